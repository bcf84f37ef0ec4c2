"""Call parts of mnist_elastic on small inputs, and print their results as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_elastic")]

import membership  # type: ignore[import-not-found]  # noqa: E402
from ranks import Ranks  # type: ignore[import-not-found]  # noqa: E402
from records import History  # type: ignore[import-not-found]  # noqa: E402


class SevenStarter:
    """Start processes that end with code 7."""

    def start(self, rank: int, name: str, ranks: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])


class Counter:
    """Replace a Run, and record the updates that are counted."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.monitor = SimpleNamespace(record_event=lambda kind, **fields: None)

    def count_step(self, done: int) -> None:
        self.steps.append(done)


def order() -> list[str]:
    """Return the names of members in order of rank. Two of the three members with the most progress have equal bits."""
    states = [("000000", 8, "x"), ("000001", 9, "y"), ("000005", 9, "x"), ("000003", 9, "x")]
    found = [{"name": name, "progress": progress, "digest": digest} for name, progress, digest in states]
    return [each["name"] for each in membership._in_order(found)]


def numbers_and_codes() -> tuple[list[int], list[int | None]]:
    """Return free rank numbers before and after rank 1 left, and rank 1's code with and without a connection."""
    ranks = Ranks(SevenStarter(), 2)
    for rank in (1, 2):
        ranks.start(rank)
    free = [ranks.free_rank()]
    first, second = ranks.all()
    for each in (first, second):
        each.process.wait()
    first.channel = SimpleNamespace()
    codes = [first.exit_code()]
    first.channel = None
    codes.append(first.exit_code())
    first.has_left = True
    free.append(ranks.free_rank())
    return free, codes


def history() -> tuple[list[int], dict[str, Any]]:
    """Return the updates that a `History` counted, and its result."""
    run = Counter()
    found = History(run)
    found.regrouped(0, [1, 2])
    found.count(1)
    found.count(1)
    found.pause()
    found.regrouped(1, [1])
    found.regrouped(1, [1])
    found.count(2)
    return run.steps, found.result()


def main() -> None:
    free, codes = numbers_and_codes()
    steps, result = history()
    cases = {"order": order(), "free": free, "exit codes": codes, "steps": steps, "result": result}
    print(json.dumps(cases), flush=True)


if __name__ == "__main__":
    main()
