"""Run the quick and the slow tests, one tox environment after the other, and write docs/soak.md.

    bash scripts/test.sh -e soak                         # all environments; takes hours
    bash scripts/test.sh -e soak -- core gpt_fsdp-cpu    # keeps the other environments' results
    bash scripts/test.sh -e soak -- mnist_ddp-cpu:exec   # tests of faults, with --start-method exec
    bash scripts/test.sh -e soak -- --low-counts core    # quick and slow tests with low counts; keeps the page as it is
    python tools/soak.py --page                          # only makes the page, from docs/soak.json

The program also writes the results to docs/soak.json. Its exit code is 1 if a test failed. It needs only the standard
library.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "soak.json"
PAGE = ROOT / "docs" / "soak.md"
WITHOUT_SLOW_TESTS = {"lint", "docs"}
BY_EXEC = "mnist_ddp-cpu:exec"
FAULTS = ["common/test_recovery.py", "common/test_torchrun.py", "mnist_ddp/test_hangs.py", "mnist_ddp/test_signals.py"]
WORDS = {BY_EXEC: ["--", "--start-method=exec", *(f"tests/{path}" for path in FAULTS)]}  # after -e ENVIRONMENT
COLUMNS = ("passed", "failed", "minutes", "cores", "date", "commit")
HEAD = """\
# Slow tests

`bash scripts/test.sh` runs the quick tests, with low counts of faults. `bash scripts/test.sh -e soak` runs the quick
and the slow tests, with high counts, and makes this page. To select environments, add their names, for example
`-- core gpt_fsdp-cpu`. The page then keeps the results of the other environments. In the row `mnist_ddp-cpu:exec`, the
tests of faults start mnist_ddp with `--start-method exec`.
"""


def environments() -> list[str]:
    """Return the names of the tox environments that have slow tests, and BY_EXEC."""
    tox = configparser.RawConfigParser()
    tox.read(ROOT / "tox.ini")
    names = [name.strip() for name in tox["tox"]["env_list"].split(",")]
    return [*(name for name in names if name not in WITHOUT_SLOW_TESTS), BY_EXEC]


def run(environment: str, counts: str) -> dict[str, Any]:
    """Run an environment's quick and slow tests, and return the environment's results.

    Args:
        environment: name in `environments`.
        counts: option of pytest: ``--soak`` for high counts, or ``--every-case`` for low counts.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TOX_")}
    command = ["bash", "scripts/test.sh", "-e", environment.partition(":")[0], *WORDS.get(environment, [])]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        table = Path(folder, "table")
        table.write_text("")
        environ |= {"PYTEST_ADDOPTS": f"{counts} --junitxml={report}", "MATRIX_SOAK_TABLE": str(table)}
        begun = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
        seconds = time.monotonic() - begun
        suite = ElementTree.parse(report).getroot()[0].attrib if report.exists() else {}  # noqa: S314 - pytest wrote it
        lines = table.read_text().splitlines()
    tests = int(suite.get("tests", 0))
    skipped = int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {
        "passed": tests - skipped - failed,
        "failed": max(failed, int(code != 0)),
        "minutes": round(seconds / 60, 1),
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit(),
        "table": sorted(lines),
    }


def commit() -> str:
    """Return the short name of the newest commit."""
    return subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def counterparts() -> list[str]:
    """Return a table row for each slow test for which a comment names a counterpart among the default tests."""
    pattern = re.compile(r"^@pytest\.mark\.soak +# (.+)\n(?:[@ )].*\n)*def (\w+)", re.MULTILINE)
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [(path.relative_to(ROOT), match) for path in paths for match in pattern.finditer(path.read_text())]
    return [f"| `{path}`: `{match[2]}` | {match[1]} |" for path, match in found]


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of docs/soak.md."""
    lines = [HEAD, f"| environment | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for name in environments():
        row = results.get(name, {})
        cells = [str(row.get(column, "not run")) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    tables = [line for name in environments() for line in results.get(name, {}).get("table", ())]
    if tables:
        lines += ["", "| app | ranks | what | runs | good |", "|---|---|---|---|---|", *tables]
    lines += ["", "## Counterparts of the slow tests", "", "| slow test | counterpart |", "|---|---|", *counterparts()]
    return "\n".join(lines) + "\n"


def low_counts(chosen: Sequence[str]) -> int:
    """Run all cases of the environments with low counts, print the results, and return the exit code."""
    results = {name: run(name, "--every-case") for name in chosen}
    for name, row in results.items():
        print(f"{name}: {row['passed']} passed, {row['failed']} failed, {row['minutes']} minutes")
    return int(any(row["failed"] for row in results.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT", help=", ".join(environments()))
    parser.add_argument("--page", action="store_true", help="make the page, and run no tests")
    parser.add_argument("--low-counts", action="store_true", help="run all cases with low counts, and write no file")
    options = parser.parse_args()
    chosen = options.environments or environments()
    unknown = {*chosen} - {*environments()}
    if unknown:
        parser.error(f"unknown environments: {', '.join(sorted(unknown))}")
    if options.low_counts:
        return low_counts(chosen)
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.page:
        PAGE.write_text(page(results))
        return 0
    for name in chosen:
        results[name] = run(name, "--soak")
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(results))
    print(PAGE.read_text())
    return int(any(results[name]["failed"] for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
