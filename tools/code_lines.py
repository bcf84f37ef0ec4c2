"""Count the lines of code of Python files: neither blank lines nor comments nor docstrings.

    python3 tools/code_lines.py                       # the package's parts, each app, and a user's reading in all
    python3 tools/code_lines.py tools apps             # each file of these, and their total

A line counts once, however many statements are on it; a statement over three lines counts three times. Needs the
standard library only.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "core" / "samestep"
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def count(source: str) -> int:
    """Return the number of lines of code in a module's source."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def python_files(path: Path) -> list[Path]:
    """Return a file by itself, or the Python files below a folder, sorted."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def total(files: Sequence[Path]) -> int:
    """Return the lines of code of all the files together."""
    return sum(count(file.read_text()) for file in files)


def overview() -> list[tuple[str, int]]:
    """Return the name and lines of code of each part of the repository, a total of the wheel and the apps last."""
    own = sorted(PACKAGE.glob("*.py"))
    core = total(own)
    rows = [(str(file.relative_to(ROOT)), total([file])) for file in own]
    rows.append(("core/samestep/*.py", core))
    packages = {path.name: total(python_files(path)) for path in sorted(PACKAGE.glob("*")) if any(path.rglob("*.py"))}
    rows += [(f"core/samestep/{name}/", lines) for name, lines in packages.items() if (PACKAGE / name).is_dir()]
    apps = {path.name: total(python_files(path)) for path in sorted((ROOT / "apps").iterdir()) if path.is_dir()}
    rows += [(f"apps/{name}/", lines) for name, lines in apps.items()]
    doors = total(python_files(ROOT / "scripts"))
    everything = core + sum(packages.values()) + doors + sum(apps.values())
    return [*rows, ("scripts/", doors), ("the wheel, scripts and apps", everything)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="code_lines.py", description="Count lines of code: neither blank lines nor comments nor docstrings."
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files and folders (default: an overview)")
    paths = parser.parse_args(argv).paths
    missing = [path for path in paths if not path.exists()]
    if missing:
        print(f"error: there is no {missing[0]}: name Python files or folders", file=sys.stderr)
        return 2
    rows = [(str(file), total([file])) for path in paths for file in python_files(path)]
    rows = [*rows, ("total", sum(lines for _, lines in rows))] if rows else overview()
    for name, lines in rows:
        print(f"{lines:6} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
