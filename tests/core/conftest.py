"""Stop the watchdogs that a test started. The ranks of core's tests are threads in pytest's process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from samestep.recovery.watchdog import Watchdog


@pytest.fixture(autouse=True)
def watchdogs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop each test's watchdogs. A watchdog that outlives its test would end pytest after ``--timeout``."""
    started: list[Watchdog] = []
    begin = Watchdog.__init__

    def noted(self: Watchdog, *values: Any, **named: Any) -> None:
        begin(self, *values, **named)
        started.append(self)

    monkeypatch.setattr(Watchdog, "__init__", noted)
    yield
    for each in started:
        each.stop()
