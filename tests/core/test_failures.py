"""Test which failures of two starts count as equal, so that a third start would fail too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from samestep import failures
from samestep.failures import Failure

BEFORE = Failure(7, "ValueError", "rank 0: ValueError: sample 7 at 0x7f31 of pid 12, port 2000 of 10.0.0.1:2000")


@pytest.mark.parametrize(
    ("after", "same"),
    [
        (BEFORE, True),
        (Failure(7, "ValueError", "rank 3: ValueError: sample 7 at 0x8a of pid 9, port 1 of 10.0.0.1:31000"), True),
        (BEFORE._replace(step=8), False),
        (BEFORE._replace(error="KeyError"), False),
        (BEFORE._replace(text=BEFORE.text.replace("sample 7", "sample 8")), False),
        (None, False),
    ],
)
def test_a_failure_repeats_if_step_error_and_sample_are_equal(after: Failure | None, same: bool) -> None:
    assert BEFORE.is_same(after) == same


def test_the_first_rank_that_failed_counts_once_per_start(tmp_path: Path) -> None:
    failures.record(tmp_path, "a", 1, 7, ValueError("bad"), "rank 1: bad")
    failures.record(tmp_path, "a", 0, 7, KeyError("lost"), "rank 0: lost")
    assert failures.read(tmp_path, "a") == Failure(7, "ValueError", "rank 1: bad")
    assert failures.read(tmp_path, "b") is None
    failures.record(tmp_path, "b", 0, 8, KeyError("lost"), "rank 0: lost")
    assert failures.read(tmp_path, "b") == Failure(8, "KeyError", "rank 0: lost")


@pytest.mark.parametrize("text", ["Connection closed by peer", "Broken pipe", "Horovod has been shut down"])
def test_a_lost_connection_is_no_failure_of_its_own(tmp_path: Path, text: str) -> None:
    failures.record(tmp_path, "a", 1, 7, RuntimeError(text), text)
    assert failures.read(tmp_path, "a") is None


@pytest.mark.parametrize("change", [{"step": -1}, {"step": "7"}, {"error": None}, {"text": "x" * 1001}, {"job": 3}])
def test_a_damaged_file_is_no_failure(tmp_path: Path, change: dict[str, object]) -> None:
    values = {"job": "a", "step": 7, "error": "E", "text": "t", **change}
    (tmp_path / failures.FILE_NAME).write_text(json.dumps(values))
    assert failures.read(tmp_path, "a") is None


def test_the_text_is_one_line_of_printable_characters(tmp_path: Path) -> None:
    failures.record(tmp_path, "a", 0, 7, ValueError("x"), "rank 0:\x1b[2J\nerror: forged")
    failure = failures.read(tmp_path, "a")
    assert failure is not None
    assert failure.text.isprintable()
