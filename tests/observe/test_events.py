"""Test the recorded events of a run."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from samestep import events
from samestep_observe import run_reader, watch
from samestep_observe.report_page import KINDS
from samestep_observe.run_reader import RESTART, Event


def frame(run_dir: Path) -> list[str]:
    view = watch.View(run_dir)
    view.update()
    return view.frame(400, 60)


def read_events(run_dir: Path) -> list[Event]:
    event_log = run_reader.EventLog(run_dir)
    event_log.read()
    return event_log.events()


def write_log(run_dir: Path, *texts: str) -> Path:
    """Write the log of rank 0, with one line per second."""
    (run_dir / "log").mkdir(parents=True)
    lines = [f"2026-01-01T00:00:{i:02d} {text}\n" for i, text in enumerate(texts)]
    (run_dir / "log" / "rank-0.log").write_text("".join(lines))
    return run_dir


# --- recorded events -------------------------------------------------------------------------------------------------


def test_recorded_events_are_shown_whatever_the_log_says(tmp_path: Path) -> None:
    run_dir = write_log(tmp_path / "run")
    with (run_dir / "log" / "rank-0.log").open("a") as log:
        log.write("2100-01-01T00:00:00 error: no progress for 6 s: of other words than the event at step 9\n")
    events.append_event(run_dir / "log", events.START, step=0, last_step=48, ranks=2)
    for kind in events.KINDS[1:]:
        for rank in range(2):  # an event that several ranks report appears once
            events.append_event(run_dir / "log", kind, rank=rank, step=7, text=f"of the kind {kind}")
    events.append_event(run_dir / "log", events.FAILURE)
    events.append_event(run_dir / "log", events.START, step=6, last_step=50, ranks=1)
    events.append_event(run_dir / "log", events.FAILURE)  # the same failure of a later start
    found = read_events(run_dir)
    assert [(event.kind, event.step, event.text) for event in found] == [
        *((kind, 7, f"of the kind {kind}") for kind in events.KINDS[1:]),
        *(("failure", None, "failure"), ("restart", 6, "resumed at step 6, 1 rank")),
        ("failure", None, "failure"),
    ]
    assert {event.file for event in found} == {"log/events.jsonl"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", event.when) for event in found)
    event_log = run_reader.EventLog(run_dir)
    event_log.read()
    assert event_log.last_step == 50
    assert "failure        " in "\n".join(frame(run_dir))


@pytest.mark.parametrize(
    "line",
    [
        *("", "7", '{"kind": "hang"}', '{"time": 1e300, "kind": "hang"}', '{"time": NaN, "kind": "hang"}'),
        *('{"time": 1, "kind": []}', '{"time": 1, "kind": "of a later version"}', "\x00\xff"),
    ],
)
def test_a_damaged_event_is_named_and_the_others_are_shown(line: str, tmp_path: Path) -> None:
    log = write_log(tmp_path / "run", "a line") / "log"
    (log / "launcher.log").write_text("a line\n")
    events.append_event(log, events.FAILURE, text="a")
    with (log / events.FILE_NAME).open("a") as file:
        file.write(f"{line}\n")
    events.append_event(log, events.FAILURE, text="b")
    event_log = run_reader.EventLog(log.parent)
    event_log.read()
    assert [event.text for event in event_log.events()] == ["a", "b"]
    assert event_log.problems() == ["log/events.jsonl: damaged: 1 lines left out: not events"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"time": "2026-01-01T23:30:00Z"}, "2026-01-02 01:30:00"),
        *(({}, ""), ({"time": "2026-01-01 23:30"}, ""), ({"time": 7}, "")),
    ],
)
def test_the_time_of_a_header_is_shown_as_local_time(
    header: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that starts without a launch script has no events.jsonl, and its headers have UTC."""
    monkeypatch.setenv("TZ", "Etc/GMT-2")  # two hours east of Greenwich
    time.tzset()
    try:
        assert run_reader._time_of(header) == expected
    finally:
        monkeypatch.undo()
        time.tzset()


def test_every_kind_has_words_and_a_shape() -> None:
    assert {*KINDS} == {*events.KINDS[1:], RESTART, run_reader.STRAGGLER}


def test_ranks_that_write_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        for step in range(50):
            events.append_event(tmp_path, events.FAILURE, rank=rank, step=step, text="x" * 500)

    threads = [threading.Thread(target=write, args=[rank]) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [json.loads(line) for line in (tmp_path / events.FILE_NAME).read_text().splitlines()]
    assert len({(line["rank"], line["step"]) for line in lines}) == 200


def test_an_event_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    events.append_event(tmp_path / "nowhere", events.FAILURE, text="a failure matters more than its record")
    assert not (tmp_path / "nowhere").exists()
