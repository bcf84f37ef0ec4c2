"""Fixtures for all tests of core. Their ranks are threads in pytest's own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from samestep.recovery.watchdog import Watchdog


@pytest.fixture(autouse=True)
def watchdogs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None outlives its test: after --timeout it would end the process without a word."""
    started: list[Watchdog] = []
    begin = Watchdog.__init__

    def noted(self: Watchdog, *values: Any, **named: Any) -> None:
        begin(self, *values, **named)
        started.append(self)

    monkeypatch.setattr(Watchdog, "__init__", noted)
    yield
    for each in started:
        each.stop()
