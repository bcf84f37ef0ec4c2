"""Report statements that break a style rule of CONTRIBUTING.md.

    python tools/habits.py [PATH ...]

Without paths, the program checks the folders in CHECKED. It exits with 1 if a line breaks one of three rules:

- One assignment per statement: no ``a, b = x, y``, except to exchange two values.
- No ``:=``, except in the condition of a ``while``.
- One ``for`` per comprehension.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("core/samestep", "apps")
UNCHECKED = ("core/samestep/env.py", "core/samestep/sharded", "core/samestep/torch")
Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def main(arguments: list[str]) -> int:
    """Print a line for each problem, and return the exit code."""
    paths = [Path(argument) for argument in arguments]
    if not paths:
        paths = checked_files()
    count = 0
    for path in paths:
        for line, problem in problems(ast.parse(path.read_text())):
            print(f"{path}:{line}: {problem}")
            count += 1
    if count:
        return 1
    return 0


def checked_files() -> list[Path]:
    """Return the absolute paths of Python files in CHECKED, except files in UNCHECKED and in folders named steps."""
    found = []
    for folder in CHECKED:
        for path in sorted(Path(ROOT, folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(UNCHECKED) and not is_step(path):
                found.append(path)
    return found


def is_step(path: Path) -> bool:
    """Return whether a file is one of the examples (`apps/*/steps`) that show the style of users' programs."""
    return path.parent.name == "steps"


def problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line number and the problem of each statement that breaks a rule."""
    allowed = loop_conditions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_packed(node):
            yield node.lineno, "one statement assigns several values: use one statement for each"
        elif isinstance(node, ast.NamedExpr) and node not in allowed:
            yield node.lineno, "`:=` outside the condition of a `while`: assign in the line above"
        elif isinstance(node, Comprehension) and len(node.generators) > 1:
            yield node.lineno, "a comprehension has two `for`: write loops"


def loop_conditions(tree: ast.Module) -> set[ast.AST]:
    """Return all nodes in the conditions of `while` loops."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            found.update(ast.walk(node.test))
    return found


def is_packed(node: ast.Assign) -> bool:
    """Return whether the statement assigns a tuple to several names. Exclude exchanges, such as ``a, b = b, a``."""
    if not isinstance(node.value, ast.Tuple):
        return False
    values = sorted(ast.unparse(element) for element in node.value.elts)
    for target in node.targets:
        if isinstance(target, ast.Tuple):
            names = sorted(ast.unparse(element) for element in target.elts)
            return names != values
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
