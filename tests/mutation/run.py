"""Change one operator, number or statement of a module at a time, and list the changes that no test detects.

    bash scripts/test.sh -e mutation                       # all modules, at most 45 minutes
    bash scripts/test.sh -e mutation -- sharding stop      # by name

README.md explains the changes that no test can detect, and how to read the list.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The tests of each module that run in one process or start small processes.
MODULES = {
    "stop": "tests/core/test_stop.py",
    "sharding": "tests/core/test_sharding.py",
    "checkpoint": "tests/core/test_checkpoint.py tests/adversarial/test_run_dirs.py",
}
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
    **{ast.BitXor: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr},
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change: its module, the line, the old and new code of the statement, and the text of the changed file."""

    module: str
    line: int
    old: str
    new: str
    text: str

    @property
    def key(self) -> str:
        """Return the change without its line number, which other edits move."""
        return f"{self.old}  ->  {self.new}"


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield each replacement of ``node`` as a changed copy."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        changed.ops[0] = OPERATORS[type(node.ops[0])]()
        yield changed
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        changed.op = OPERATORS[type(node.op)]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield changed.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield changed
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.Name) and node.id in NAMES:
        changed.id = NAMES[node.id]
        yield changed
    elif isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
        changed.value = ast.Constant(None)
        yield changed
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def _statements(tree: ast.AST) -> Iterator[tuple[ast.stmt, list[tuple[ast.AST, str, int | None, ast.AST]]]]:
    """Yield each statement with its nodes (parent, field, index, node) that belong to no inner statement."""
    for statement in [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]:
        found: list[tuple[ast.AST, str, int | None, ast.AST]] = []
        waiting: list[ast.AST] = [statement]
        while waiting:
            parent = waiting.pop()
            inner = ("body", "orelse", "finalbody") if isinstance(parent, ast.stmt) else ()
            for name, value in ast.iter_fields(parent):
                if name in ("annotation", "returns", *inner):
                    continue
                for index, node in enumerate(value) if isinstance(value, list) else ((None, value),):
                    if isinstance(node, ast.AST) and not isinstance(node, (ast.stmt, ast.JoinedStr)):
                        found.append((parent, name, index, node))
                        waiting.append(node)
        yield statement, found


def mutants(module: str, text: str) -> list[Mutant]:
    """Return all changes of a module's ``text`` in the order of its lines. The texts of messages do not change."""
    tree = ast.parse(text)
    made = []

    def add(statement: ast.stmt, replace: Any, old: ast.AST, new: ast.AST) -> None:
        before = ast.unparse(statement).splitlines()
        replace(new)
        whole = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
        shown = ast.unparse(new if new in ast.walk(tree) and isinstance(new, ast.stmt) else statement).splitlines()
        replace(old)
        differs = next((pair for pair in zip(before, shown) if pair[0] != pair[1]), (before[0], shown[0]))
        made.append(Mutant(module, statement.lineno, differs[0].strip(), differs[1].strip(), whole))

    bodies = [
        (body, index)
        for node in ast.walk(tree)
        for name in ("body", "orelse", "finalbody")
        if isinstance(body := getattr(node, name, None), list)
        for index in range(len(body))
    ]
    for body, index in bodies:
        for new in _variants(statement := body[index]):
            add(statement, lambda node, body=body, index=index: body.__setitem__(index, node), statement, new)
    for statement, nodes in _statements(tree):
        for parent, name, place, node in nodes:
            for new in _variants(node):

                def replace(value: ast.AST, parent: Any = parent, name: str = name, place: int | None = place) -> None:
                    if place is None:
                        setattr(parent, name, value)
                    else:
                        getattr(parent, name)[place] = value

                add(statement, replace, node, new)
    return sorted(made, key=lambda mutant: mutant.line)


def is_noticed(core: Path, module: str, limit: float) -> bool:
    """Return whether the module's tests fail or exceed ``limit`` seconds with the package in ``core``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TOX_"))}
    environ |= {"PYTHONPATH": str(core), "PYTHONDONTWRITEBYTECODE": "1"}
    tests = MODULES[module].split()
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"--basetemp={core.parent / 'tests'}", *tests]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True, **quiet)
    try:
        return process.wait(timeout=limit) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(argv: list[str]) -> int:
    """Try the mutants, print each undetected mutant that explained.toml lacks, and return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Mutation tests of core.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"default: {' '.join(MODULES)}")
    parser.add_argument("--minutes", type=float, default=45.0, help="start no mutant after this time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    options = parser.parse_args(argv)
    explained = tomllib.loads((HERE / "explained.toml").read_text())
    names = options.modules or list(MODULES)
    begun = time.monotonic()
    slots = queue.SimpleQueue[Path]()
    with tempfile.TemporaryDirectory(prefix="samestep-mutation-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        for slot in range(options.jobs):
            core = Path(folder, str(slot), "core")
            slots.put(shutil.copytree(ROOT / "core", core, ignore=shutil.ignore_patterns("__pycache__")))

        def try_mutant(mutant: Mutant, limit: float) -> bool | None:
            if time.monotonic() - begun > options.minutes * 60:
                return None
            core = slots.get()
            path = core / "samestep" / f"{mutant.module}.py"
            original = path.read_text()
            try:
                path.write_text(mutant.text)
                return is_noticed(core, mutant.module, limit)
            finally:
                path.write_text(original)
                slots.put(core)

        unexplained = 0
        for name in names:
            core = slots.get()
            start = time.monotonic()
            if is_noticed(core, name, 600.0):
                sys.exit(f"error: {MODULES[name]} fails without a change: make it pass first")
            slots.put(core)
            limit = 20 + 4 * (time.monotonic() - start)
            tried = mutants(name, (ROOT / "core" / "samestep" / f"{name}.py").read_text())
            known = explained.get(name, {})
            reasons = {key: why for why, keys in known.items() for key in keys}
            results = []
            is_explained = list[bool]()
            for mutant, noticed in zip(tried, pool.map(lambda mutant, limit=limit: try_mutant(mutant, limit), tried)):
                results.append(noticed)
                if noticed is False:
                    is_explained.append(mutant.key in reasons)
                    if not is_explained[-1]:
                        print(f"survived: core/samestep/{name}.py:{mutant.line}: {mutant.key}", flush=True)
            unexplained += is_explained.count(False)
            survived = f"{is_explained.count(True)} explained, {is_explained.count(False)} not"
            counts = f"{results.count(True)} noticed, {len(is_explained)} survived ({survived})"
            print(f"{name}: {len(tried)} mutants, {counts}, {results.count(None)} not tried", flush=True)
    if unexplained:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
