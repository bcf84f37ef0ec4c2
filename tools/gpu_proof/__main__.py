"""Run the rows and write the results, as the package's docstring describes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder becomes importable as the package gpu_proof

import gpu_proof  # noqa: E402
from gpu_proof.jobs import NotRunError, Proof, Row, Slots  # noqa: E402
from gpu_proof.report import ENDED_FIRST, NOT_RUN, PASSED, Results, machine_of, summary, table  # noqa: E402
from gpu_proof.rows import Entry, entries  # noqa: E402

LIMITS = {"cuda": (540.0, 100.0), "cpu": (14_400.0, 1_800.0)}  # time limits of all rows and of one job, in seconds


def try_row(proof: Proof, entry: Entry, priority: int) -> dict[str, Any]:
    """Run a row, and return its result. If the row raises an exception, the result has the reason."""
    row = Row(proof, entry.name, priority, entry.patience)
    try:
        outcome: dict[str, Any] = {"outcome": PASSED, **entry.call(row)}
    except NotRunError as reason:
        outcome = {"outcome": f"{NOT_RUN}: {reason}"}
    except Exception as error:
        outcome = {"outcome": f"failed: {type(error).__name__}: {error}"}
    seconds = round(time.monotonic() - row.begun, 1) if row.begun else 0.0
    print(f"{entry.name}: {outcome['outcome']} ({seconds} s)", flush=True)
    return {"row": entry.name, **outcome, "seconds taken": seconds}


def try_rows(proof: Proof, chosen: Sequence[Entry], results: Results, side_by_side: bool) -> None:
    """Run rows, and write each result as soon as it is known.

    Args:
        proof: the settings that the rows share.
        chosen: the rows to run.
        results: the file of results.
        side_by_side: whether rows run in parallel.
    """

    def prove(numbered: tuple[int, Entry]) -> None:
        results.note([try_row(proof, numbered[1], numbered[0])])

    with ThreadPoolExecutor(len(chosen) if side_by_side and chosen else 1) as pool:
        ordered = sorted(chosen, key=lambda entry: -entry.patience if side_by_side else 0)  # the longest rows first
        list(pool.map(prove, enumerate(ordered)))


def choose(options: argparse.Namespace) -> list[Entry]:
    """Return the rows that the options select."""
    chosen = [entry for entry in entries() if entry.half == (options.half or entry.half)]
    chosen = [entry for entry in chosen if entry.quick or not options.quick]
    words = options.only.split(",") if options.only else [""]
    return [entry for entry in chosen if any(word in entry.name for word in words)]


def prove(options: argparse.Namespace) -> int:
    """Run the chosen rows and return the exit code."""
    limit, job_limit = LIMITS[options.device]
    keep = bool(options.only or options.half)
    deadline = time.monotonic() + (options.limit or limit)
    results = Results(options.output, machine_of(options.device), time.strftime("%Y-%m-%d"), keep)
    chosen = choose(options)
    results.note([{"row": entry.name, "outcome": ENDED_FIRST, "seconds taken": 0.0} for entry in chosen])
    slots = Slots(options.jobs or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        settings = options.device, options.quick, options.mnist and options.mnist.resolve(), options.logs
        proof = Proof(Path(name), *settings, options.job_limit or job_limit, deadline, slots)
        signal.signal(
            signal.SIGTERM, lambda number, frame: setattr(proof, "deadline", time.monotonic())
        )  # end all jobs
        first = [entry for entry in chosen if entry.first]
        alone = [entry for entry in chosen if entry.alone]
        try_rows(proof, first, results, side_by_side=True)
        try_rows(proof, [each for each in chosen if each not in (*first, *alone)], results, side_by_side=True)
        try_rows(proof, alone, results, side_by_side=False)
    names = [entry.name for entry in chosen]
    print(f"{summary(results.values, names)}; see {options.output}")
    outcomes = {row["row"]: row["outcome"] for row in results.values["rows"]}
    if any(outcomes[name].startswith("failed") or outcomes[name] == ENDED_FIRST for name in names):
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_proof.sh", description=gpu_proof.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    add("--quick", action="store_true", help="few rows and steps: that the proof itself still works")
    add("--half", type=int, choices=(1, 2), help="one half of the rows; the output keeps the other half's results")
    add("--only", metavar="WORDS", help="only rows with one of these, such as 'gpt_fsdp,speed'; keep others")
    add("--mnist", type=Path, metavar="DIR", help="folder of MNIST's files, for the row accuracy")
    add("--output", type=Path, default=Path("gpu_proof.json"), help="default: %(default)s")
    add("--logs", type=Path, metavar="DIR", help="folder to keep the logs of failed jobs in (default: none)")
    add(
        "--limit",
        type=float,
        metavar="S",
        help="seconds after which no row begins or runs (default: 540; cpu: 4 hours)",
    )
    add("--job-limit", type=float, metavar="S", help="seconds of one job of a row (default: 100; cpu: 1800)")
    add("--jobs", type=int, metavar="N", help="ranks that run side by side (default: one for each processor)")
    add("--table", type=Path, metavar="JSON", help="prove nothing; print an earlier output as a table")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text()), [entry.name for entry in entries()]))
        return 0
    return prove(options)


if __name__ == "__main__":
    sys.exit(main())
