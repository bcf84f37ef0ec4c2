"""Test the events of a run: recorded events, and samestep 0.1's events, which only log lines show."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from samestep import events
from samestep_observe import report, run_reader, watch
from samestep_observe.report_page import KINDS
from samestep_observe.run_reader import RESTART, Event

STORED = Path(__file__).parent / "stored" / "0.1" / "restarted"  # a rank was killed, then one stopped, then the job
HANG_TEXT = (
    "no progress for 6 s: rank 1 (vm, pid 20291) last alive at step 20, silent for 6 s, stopped by a signal (kill "
    "-CONT 20291 continues it), last seen at train.py:56 in train_step ((loss_sum * (dist.get_world_size() / "
    "rows.global_size)).backward()); rank 0 (vm, pid 20290) waits in all_reduce 70 [3] double at train.py:74 in "
    "evaluate (dist.all_reduce(sums)); samestep hang /home/user/runs/mnist shows all stacks"
)
DAMAGE_TEXT = (
    "checkpoint step-00000043 (model.safetensors has 100 bytes, not 87944) is damaged and skipped; using step-00000042"
)
FAILURE_TEXT = (
    "rank 0: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:50091: Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the "
    "application. Check the logs of the remote worker before reporting an error. GLHF! 🏖️; more in "
    "/home/user/runs/mnist/log/rank-0.log"
)
# The events that samestep 0.1 showed.
STORED_EVENTS = [
    ("failure", None, "2026-11-24 23:47:08", FAILURE_TEXT, "log/rank-0.log"),
    ("restart", 6, "2026-11-24 23:47:11", "resumed at step 6, 2 ranks", "log/rank-0.log"),
    ("hang", 20, "2026-11-24 23:47:20", HANG_TEXT, "log/rank-0.log"),
    ("restart", 20, "2026-11-24 23:47:23", "resumed at step 20, 2 ranks", "log/rank-0.log"),
    ("signal", 43, "2026-11-24 23:47:27", "stopped by SIGTERM at step 43, which is saved", "log/rank-1.log"),
    ("damage", None, "2026-11-24 23:47:31", DAMAGE_TEXT, "log/rank-0.log"),
    ("restart", 42, "2026-11-24 23:47:31", "resumed at step 42, 2 ranks", "log/rank-0.log"),
]
STORED_FRAME = [
    "restarts       started 4 times; resumed at step 6, resumed at step 20, resumed at step 42",
    "signal         23:47:27 stopped by SIGTERM at step 43, which is saved",
    f"damage         23:47:31 {DAMAGE_TEXT}",
]


def frame(run_dir: Path) -> list[str]:
    view = watch.View(run_dir)
    view.update()
    return view.frame(400, 60)


def read_events(run_dir: Path) -> list[Event]:
    event_log = run_reader.EventLog(run_dir)
    event_log.read()
    return event_log.events()


def write_log(run_dir: Path, *texts: str) -> Path:
    """Write the lines of rank 0 of samestep 0.1, one a second."""
    (run_dir / "log").mkdir(parents=True)
    lines = [f"2026-01-01T00:00:{i:02d} {text}\n" for i, text in enumerate(texts)]
    (run_dir / "log" / "rank-0.log").write_text("".join(lines))
    return run_dir


# --- run dirs of samestep 0.1 ----------------------------------------------------------------------------------------


def test_a_stored_run_of_version_0_1_has_the_same_events() -> None:
    data = run_reader.read(STORED)
    assert [(event.kind, event.step, event.when, event.text, event.file) for event in data.events] == STORED_EVENTS
    assert data.log.launches == [f"2026-11-24 23:47:{second}" for second in ("04", "09", "20", "28")]
    assert data.problems == ["checkpoints: missing"]
    assert data.state.text == "finished at step 48"


def test_the_report_and_watch_show_the_events_of_version_0_1() -> None:
    page = report.build([run_reader.read(STORED)])
    assert [(event.kind, event.step) for event in page.timelines[0].events] == [
        *(("restart", 6), ("hang", 20), ("restart", 20), ("signal", 43), ("restart", 42)),
    ]
    table = next(table for table in page.tables if table.title == "What happened")
    cells = [[KINDS[kind][0], "" if step is None else str(step), *rest] for kind, step, *rest in STORED_EVENTS]
    assert table.rows == [["restarted", *row] for row in cells]
    lines = frame(STORED)
    assert lines[2].startswith("step 48 of 48 ")
    first = lines.index(STORED_FRAME[0])
    assert lines[first : first + 3] == STORED_FRAME


@pytest.mark.parametrize(
    ("line", "kind", "step"),
    [
        ("error: rank 2 differs from all others at step 8, first in model w: not saved; starting", "rollback", 8),
        ("error: ranks 0 and 1 differ in the weights of the end: no result; starting", "rollback", None),
        ("error: at step 6 the loss is nan: lower --lr, now 1.0, unless a flipped bit made it so", "rollback", 6),
        ("error: rank 0: its launcher (pid 7) is gone; ending", "failure", None),
        ("stopped by SIGUSR1, unsaved: a second signal", "signal", None),
        ("warning: checkpoint step-00000008 (empty) is damaged and skipped; using step-00000004", "damage", None),
    ],
)
def test_a_line_of_version_0_1_has_a_kind(line: str, kind: str, step: int | None, tmp_path: Path) -> None:
    (event,) = read_events(write_log(tmp_path / "run", "warning: of nothing", line, "epoch 1/3  step 4"))
    assert (event.kind, event.step, event.text) == (kind, step, re.sub("^(error|warning): ", "", line))


def test_a_log_with_level_file_and_line_is_read_too(tmp_path: Path) -> None:
    """--log-format full; the first line is of a start, the second of an event."""
    run_dir, place = tmp_path / "run", "2026-01-01T00:00:00|/x/core/samestep/run.py|7|"
    (run_dir / "log").mkdir(parents=True)
    start = f"INFO|{place} net on mnist-5k: 20 images, 2 ranks on cpu: a CPU, steps 0 to 12, run dir /r\n"
    (run_dir / "log" / "rank-0.log").write_text(f"{start}ERROR|{place} error: at last\n")
    event_log = run_reader.EventLog(run_dir)
    event_log.read()
    assert event_log.last_step == 12
    assert [(event.kind, event.text) for event in event_log.events()] == [("failure", "at last")]
    assert "log/rank-0.log" not in "".join(event_log.problems())


# --- recorded events -------------------------------------------------------------------------------------------------


def test_recorded_events_are_shown_whatever_the_log_says(tmp_path: Path) -> None:
    run_dir = write_log(tmp_path / "run")
    with (run_dir / "log" / "rank-0.log").open("a") as log:
        log.write("2100-01-01T00:00:00 error: no progress for 6 s: of other words than the event at step 9\n")
    events.append_event(run_dir / "log", events.START, step=0, last_step=48, ranks=2)
    for kind in events.KINDS[1:]:
        for rank in range(2):  # each thing once, though several ranks report it
            events.append_event(run_dir / "log", kind, rank=rank, step=7, text=f"of the kind {kind}")
    events.append_event(run_dir / "log", events.FAILURE)
    events.append_event(run_dir / "log", events.START, step=6, last_step=50, ranks=1)
    found = read_events(run_dir)
    assert [(event.kind, event.step, event.text) for event in found] == [
        *((kind, 7, f"of the kind {kind}") for kind in events.KINDS[1:]),
        *(("failure", None, "failure"), ("restart", 6, "resumed at step 6, 1 rank")),
    ]
    assert {event.file for event in found} == {"log/events.jsonl"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", event.when) for event in found)
    event_log = run_reader.EventLog(run_dir)
    event_log.read()
    assert event_log.last_step == 50
    assert "failure        " in "\n".join(frame(run_dir))


def test_a_run_of_version_0_1_that_a_later_version_resumes_keeps_its_events(tmp_path: Path) -> None:
    begins = "toy on mnist: 20 training and 6 test examples, 1 ranks on cpu, steps 0 to 12, run dir /r"
    run_dir = write_log(tmp_path / "run", begins, "error: of version 0.1")
    events.append_event(run_dir / "log", events.START, step=8, last_step=12, ranks=1)
    with (run_dir / "log" / "rank-0.log").open("a") as log:
        log.write("2100-01-01T00:00:00 error: of the later version\n")
    assert [(event.kind, event.text) for event in read_events(run_dir)] == [
        ("failure", "of version 0.1"),
        (RESTART, "resumed at step 8, 1 rank"),
    ]


def test_without_a_recorded_start_log_lines_count_too(tmp_path: Path) -> None:
    """A job may fail before its first step, and its launch script may be of another version than its ranks."""
    run_dir = write_log(tmp_path / "run", "error: a rank failed", "error: of the log alone")
    events.append_event(run_dir / "log", events.FAILURE, rank=0, text="a rank failed")
    events.append_event(run_dir / "log", events.FAILURE, code=1, text="warning: the job ended with code 1")
    assert [event.text for event in read_events(run_dir)] == [
        *("a rank failed", "of the log alone", "the job ended with code 1"),
    ]


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
