"""Run `samestep check` on the scripts of tests/check/scripts, and compare its verdicts with scripts/table.toml.

    python tests/check/table.py [--only NAME...] [--rows ROWS] [--jobs 2]

The command prints a table and the wrong verdicts. The exit code is 1 if a verdict is wrong. The command needs torch,
and runs for three minutes per script with all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import tomllib

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = os.pathsep.join(str(ROOT / name) for name in ("core", "launch", "check", "observe"))  # of this checkout
MAIN = "from samestep.__main__ import main; raise SystemExit(main())"
TIME_LIMIT = 1500  # limit of a check, in seconds


class Script(NamedTuple):
    """A script of the table, and the rows that must have each verdict. All other rows must pass."""

    name: str
    failed: Sequence[str]
    cannot_tell: Sequence[str]
    not_seen: Sequence[str]
    quick: Sequence[str]  # rows that CI runs

    def wanted(self, row: str) -> str:
        """Return the verdict that a row must have."""
        verdicts = {"failed": self.failed, "cannot tell": self.cannot_tell, "not seen": self.not_seen}
        return next((verdict for verdict, rows in verdicts.items() if row in rows), "passed")


class Checked(NamedTuple):
    """The result of a check. ``rows`` has the verdict and the message of each row."""

    script: Script
    rows: dict[str, tuple[str, str]]
    seconds: float
    error: str  # empty unless the check itself failed

    def wrong(self) -> Iterator[str]:
        """Yield a line for each wrong verdict."""
        if self.error:
            yield f"{self.script.name}: {self.error}"
        for row, (verdict, message) in self.rows.items():
            wanted = self.script.wanted(row)
            if verdict != wanted:
                yield f"{self.script.name}: {row}: {verdict}, not {wanted}: {message}"

    def line(self) -> str:
        """Return the script's line of the table."""
        failed = [row for row, (verdict, _) in self.rows.items() if verdict == "failed"]
        count = sum(verdict == "passed" for verdict, _ in self.rows.values())
        wrong = sum(1 for _ in self.wrong())
        return f"| {self.script.name} | {', '.join(failed)} | {count} | {wrong} | {self.seconds:.0f} |"


def scripts() -> dict[str, Script]:
    """Return the scripts of the table by their names."""
    found = {}
    for name, entry in tomllib.loads((SCRIPTS / "table.toml").read_text()).items():
        found[name] = Script(
            name,
            failed=entry.get("failed", []),
            cannot_tell=entry.get("cannot_tell", []),
            not_seen=entry.get("not_seen", ["workers"]),
            quick=entry.get("quick", []),
        )
    return found


def check(script: Script, rows: str) -> Checked:
    """Check a script in a temporary folder, and return the result. ``rows`` is the value of --faults."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "script"
        folder.mkdir()
        for name in (f"{script.name}.py", "training.py"):
            shutil.copy2(SCRIPTS / name, folder)
        output = Path(temporary) / "table.json"
        limits = "--row-limit=300", "--total-limit=1400", "--points=8"
        options = [f"--faults={rows}", f"--json={output}", *limits]
        command = [sys.executable, "-c", MAIN, "check", *options, "--", sys.executable, f"{script.name}.py", "-n", "2"]
        environ = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": PACKAGES}
        printed, errors, code = _run(command, folder, environ)
        found = {}
        if output.exists() and code in (0, 1):
            for row in json.loads(output.read_text())["rows"]:
                found[row["row"]] = row["verdict"], row["message"]
    error = "" if found else errors.strip() or printed.strip() or f"exit {code}"
    return Checked(script, found, time.monotonic() - begun, error)


_running: set[subprocess.Popen[str]] = set()


def _run(command: list[str], folder: Path, environ: dict[str, str]) -> tuple[str, str, int]:
    """Run a command, and return its stdout, its stderr and its exit code."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environ, **pipes) as process:
        _running.add(process)
        try:
            printed, errors = process.communicate(timeout=TIME_LIMIT)
        finally:
            process.terminate()  # on TERM, a check ends its own processes
            _running.discard(process)
    return printed, errors, process.returncode


def main(arguments: Sequence[str]) -> int:
    """Check the scripts, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    known = scripts()
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=known, default=[*known], help="scripts")
    parser.add_argument("--rows", default="all", help="rows separated by commas, or own: those of failed and quick")
    parser.add_argument("--jobs", type=int, default=2, help="checks at the same time (default: 2)")
    options = parser.parse_args(arguments)
    wrong: list[str] = []
    print("| script | failed rows | passed rows | wrong | seconds |\n|---|---|---:|---:|---:|", flush=True)

    def run(name: str) -> Checked:
        script = known[name]
        rows = options.rows
        if rows == "own":
            rows = ",".join([*script.failed, *script.quick] or ["quick"])
        return check(script, rows)

    with ThreadPoolExecutor(options.jobs) as pool:

        def stop(number: int, frame: object) -> NoReturn:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.terminate()
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, stop)
        for checked in pool.map(run, options.only):
            print(checked.line(), flush=True)
            for line in checked.wrong():
                print(line, file=sys.stderr, flush=True)
                wrong.append(line)
    print("\n".join(["", f"{len(wrong)} wrong verdicts", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
