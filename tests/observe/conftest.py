"""Make the toy app of tests/core importable, and stop the app's watchdogs after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samestep.recovery.watchdog import Watchdog

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))


@pytest.fixture(autouse=True)
def watchdogs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop each test's watchdogs. A watchdog that outlives its test would end pytest after ``--timeout``."""
    started: list[Watchdog] = []
    original = Watchdog.__init__

    def init(self: Watchdog, *values: Any, **named: Any) -> None:
        original(self, *values, **named)
        started.append(self)

    monkeypatch.setattr(Watchdog, "__init__", init)
    yield
    for watchdog in started:
        watchdog.stop()
