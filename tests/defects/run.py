"""Put each defect of defects.toml into a copy of the repository, and run the tests that must catch it.

    bash scripts/test.sh -e defects                 # all
    bash scripts/test.sh -e defects -- no-fsync     # by name
    bash scripts/test.sh -e defects -- none         # all tests, without a defect

The command prints a table, and the defects that no test catches.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
from processes import kill_marked  # noqa: E402
from repository import clone  # noqa: E402

LIMIT = 900.0  # seconds for one group of tests; each test ends a hung run much earlier
Defect = dict[str, Any]


class Outcome(NamedTuple):
    """The end of one group of tests: pytest's exit code (None at the time limit), and the first failed test."""

    code: int | None
    failed: str


def defects() -> list[Defect]:
    """Return the entries of defects.toml."""
    found: list[Defect] = tomllib.loads((HERE / "defects.toml").read_text())["defect"]
    return found


def with_defect(text: str, defect: Defect) -> str:
    """Return a file's ``text`` with the defect.

    Raises:
        ValueError: the defect's old code does not occur exactly once.
    """
    count = text.count(defect["old"])
    if count != 1:
        raise ValueError(f"{defect['name']}: its old code occurs {count} times in {defect['file']}: adapt defects.toml")
    return text.replace(defect["old"], defect["new"].removeprefix("\n"))


def python_of(environment: str) -> Path:
    """Return the path of a tox environment's Python. Make the environment if it does not exist."""
    python = ROOT / ".tox" / environment / "bin" / "python"
    if not python.exists():
        subprocess.run(["bash", "scripts/test.sh", "-e", environment, "--notest"], cwd=ROOT, check=True)
    return python


def run_tests(copy: Path, environment: str, arguments: list[str]) -> Outcome:
    """Run pytest in the copy until the first failure or the time limit, and return its outcome."""
    python = python_of(environment)
    app = environment.removesuffix("-cpu")
    options = ["-x", "-q", f"--basetemp={copy.parent / 'tests'}", "-n", "2", "--dist=worksteal", *arguments]
    if app != environment:
        options += [f"--app={app}", "--device=cpu"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TOX_", "PYTEST_"))}
    search_path = os.pathsep.join([str(python.parent), environ.get("PATH", os.defpath)])
    environ |= {"PYTHON": str(python), "PYTHONPATH": str(copy / "core"), "PATH": search_path}
    environ |= {"COLUMNS": "200", "SAMESTEP_DEFECT": str(copy)}
    process = subprocess.Popen(
        [python, "-m", "pytest", *options],
        cwd=copy,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return Outcome(None, "")
    finally:
        kill_marked("SAMESTEP_DEFECT", str(copy), LIMIT)  # launchers and ranks run in other sessions
        process.wait()
    failed = re.search(r"^FAILED (.+)", output, re.MULTILINE)
    if failed:
        return Outcome(1, failed[1])  # pytest's own code is 2 if xdist interrupts its workers
    if process.returncode:
        print(output, file=sys.stderr)
    return Outcome(process.returncode, "")


def try_defect(defect: Defect) -> Iterator[tuple[list[str], Outcome, float]]:
    """Yield each group of the defect's tests, its outcome and its seconds, until a group catches the defect."""
    with tempfile.TemporaryDirectory(prefix="samestep-defect-") as folder:
        copy = clone(Path(folder, "copy"))
        if defect["file"]:
            path = copy / defect["file"]
            path.write_text(with_defect(path.read_text(), defect))
        for place in defect["tests"]:
            begun = time.monotonic()
            outcome = run_tests(copy, place[0], place[1:])
            yield place, outcome, time.monotonic() - begun
            if outcome.code == 1 and defect["file"]:
                return


def main(names: list[str]) -> int:
    """Print a row for each group of tests, the number of caught defects, and the missed ones. Return the exit code."""
    known = defects()
    places = [list(place) for place in dict.fromkeys(tuple(place) for defect in known for place in defect["tests"])]
    none: Defect = {"name": "none", "file": "", "tests": places}
    by_name = {defect["name"]: defect for defect in [*known, none]}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        print(f"error: no defect {unknown[0]}: name one of {', '.join(by_name)}", file=sys.stderr)
        return 2
    chosen = [by_name[name] for name in names] or known
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # sys.exit cleans up
    missed = []
    print("| defect | blind | tests run | caught | seconds |\n|---|---|---|---|---|", flush=True)
    for defect in chosen:
        caught = False
        for place, (code, failed), seconds in try_defect(defect):
            caught = caught or code == 1
            result = {0: "no", 1: "by " + failed.replace("|", "/"), None: "no: time limit"}.get(
                code, f"no: pytest exited with {code}"
            )
            blind = "blind" if defect.get("blind") else ""
            print(f"| {defect['name']} | {blind} | {' '.join(place)} | {result} | {seconds:.0f} |", flush=True)
        if caught == (defect is none):
            missed.append(defect)
    print(f"caught {len(chosen) - len(missed)} of {len(chosen)}")
    for defect in missed:
        print(f"missed: {defect['name']}: {defect.get('why', 'a test fails without a defect')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
