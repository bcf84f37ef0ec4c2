"""Test the log: metrics without gaps or repeats, a clean console, and exit codes that the launch script reads."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import tempfile
import termios
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import LIMIT, child, rank_log, running, start, verdict
from samestep import NonRetryableError, events, trace
from samestep.metrics import Metrics


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(run_dir: Path) -> list[int]:
    return [line["step"] for line in lines_of(run_dir) if "step" in line]


def write_steps(run_dir: Path, resumed_from: int | None, last: int) -> None:
    metrics = Metrics(run_dir, {"app": "toy"}, resumed_from)
    for step in range((resumed_from or 0) + 1, last + 1):
        metrics.write(step=step, loss=1 / step)
    metrics.sync()


# --- metrics.jsonl -----------------------------------------------------------------------------------------------


def test_a_run_is_a_header_and_a_line_a_step(tmp_path: Path) -> None:
    write_steps(tmp_path, None, 4)
    assert lines_of(tmp_path) == [{"app": "toy"}, *({"step": step, "loss": 1 / step} for step in (1, 2, 3, 4))]


def test_a_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, {"app": "toy"}, None)
    metrics.write(step=1, loss=0.5)
    assert lines_of(tmp_path)[-1] == {"step": 1, "loss": 0.5}


def test_files_are_closed_with_the_run_that_opened_them(tmp_path: Path) -> None:
    write_steps(tmp_path, None, 1)
    (tmp_path / trace.NAME).touch()  # a run with --trace-every writes this file
    before = len(os.listdir("/proc/self/fd"))
    write_steps(tmp_path, 1, 2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_resume_cuts_later_steps_and_says_so(tmp_path: Path) -> None:
    write_steps(tmp_path, None, 9)
    write_steps(tmp_path, 6, 8)
    lines = lines_of(tmp_path)
    assert lines[0] == {"app": "toy"}
    assert lines[7] == {"resumed": {"step": 6, "app": "toy"}}
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_new_run_replaces_the_file(tmp_path: Path) -> None:
    write_steps(tmp_path, None, 9)
    write_steps(tmp_path, None, 2)
    assert steps_of(tmp_path) == [1, 2]


def test_a_resume_without_the_file_starts_one(tmp_path: Path) -> None:
    write_steps(tmp_path, 6, 8)
    assert lines_of(tmp_path)[0] == {"app": "toy"}
    assert steps_of(tmp_path) == [7, 8]


def test_a_line_torn_at_any_byte_is_cut(tmp_path: Path) -> None:
    write_steps(tmp_path, None, 5)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    begin = content.rstrip().rindex(b"\n") + 1
    for cut in range(begin, len(content) + 1):
        path.write_bytes(content[:cut])
        write_steps(tmp_path, 4, 6)
        assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
        assert [line["resumed"]["step"] for line in lines_of(tmp_path) if "resumed" in line] == [4]


@pytest.mark.parametrize(
    "tail", [bytes(300), b"\xff\xfe\x80", b"{}}", b"12", b"[]", b'"text"', b"null", b"{" * 100_000, b"\n\n\n"]
)
def test_what_a_machines_crash_left_at_the_end_is_cut(tmp_path: Path, tail: bytes) -> None:
    write_steps(tmp_path, None, 5)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    write_steps(tmp_path, 4, 6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(0, 60)), max_size=6))
def test_after_any_crashes_each_step_is_there_once(crashes: list[tuple[int, int, int]]) -> None:
    """Each crash is (steps lost since the checkpoint, steps done after the resume, bytes torn off the file)."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        write_steps(run_dir, None, 10)
        done = 10
        path = run_dir / "metrics.jsonl"
        for lost, more, torn in crashes:
            resumed_from = max(0, done - lost)
            content = path.read_bytes()
            synced = content.find(b'"step": %d, "loss"' % (resumed_from + 1))  # only lines after the resume may be torn
            keep = len(content) if synced < 0 else max(synced - 1, len(content) - torn)
            path.write_bytes(content[:keep])
            done = resumed_from + more
            write_steps(run_dir, resumed_from, done)
        assert steps_of(run_dir) == list(range(1, done + 1))
        lines = lines_of(run_dir)
        assert lines[0] == {"app": "toy"}
        resumed = [line["resumed"]["step"] for line in lines if "resumed" in line]
        assert resumed == sorted(resumed)


def test_a_process_killed_while_it_writes_leaves_a_file_that_resumes(tmp_path: Path) -> None:
    code = """
metrics = Metrics(run_dir, {"app": "toy"}, None)
metrics.write(step=1, loss=0.5)
print("writing", flush=True)
step = 1
while True:
    step += 1
    metrics.write(step=step, loss=1 / step, padding="x" * 5000)
"""
    with running(code, tmp_path, until="writing"):
        pass  # the end of the block kills the process
    write_steps(tmp_path, 1, 3)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_write_that_fails_is_fatal(tmp_path: Path) -> None:
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
metrics = Metrics(run_dir, {"app": "toy"}, None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for step in range(1000):
        metrics.write(step=step)
except NonRetryableError as problem:
    print(problem, flush=True)
    os._exit(0)
"""
    done = child(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "metrics.jsonl: File too large" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_metrics_are_refused_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises((OSError, NonRetryableError)):
        Metrics(tmp_path / "gone", {"app": "toy"}, None)


# --- console and log files ---------------------------------------------------------------------------------------

NOISE = """
log.start(run_dir, rank, quiet)
os.write(1, b"C says one\\n")
os.write(2, b"C says two\\n")
print("Python says one")
print("Python says two", file=sys.stderr)
os.system("echo a child says it")
log.info("an info")
log.warning("a warning")
log.error("an error\\n  over lines")
"""


@pytest.mark.parametrize(("rank", "quiet", "shown"), [(0, False, True), (0, True, False), (1, False, False)])
def test_all_output_goes_to_the_file_and_only_ours_to_the_console(
    tmp_path: Path, rank: int, quiet: bool, shown: bool
) -> None:
    done = child(f"rank, quiet = {rank}, {quiet}\n" + NOISE, tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines() == (["an info"] if shown else [])
    assert done.stderr.splitlines() == ["warning: a warning", "error: an error over lines"]
    text = rank_log(tmp_path, rank)
    wanted = "C says one, C says two, Python says one, Python says two, a child says it, an info, warning: a warning"
    for output in [*wanted.split(", "), "error: an error over lines", f"rank {rank} on "]:
        assert output in text, output


def test_a_restarted_rank_appends_to_its_log(tmp_path: Path) -> None:
    for text in ("the first life", "the second life"):
        assert child(f"log.start(run_dir, 0, False)\nlog.info({text!r})", tmp_path).returncode == 0
    text = rank_log(tmp_path)
    assert text.index("the first life") < text.index("the second life")


def test_starting_twice_keeps_the_console(tmp_path: Path) -> None:
    done = child("log.start(run_dir, 0, False)\nlog.start(run_dir, 0, False)\nlog.info('here')", tmp_path)
    assert done.stdout == "here\n"


def test_before_start_all_goes_to_the_console(tmp_path: Path) -> None:
    done = child("log.info('one')\nlog.warning('two')\nlog.error('three')", tmp_path)
    assert (done.stdout, done.stderr) == ("one\n", "warning: two\nerror: three\n")


def test_a_console_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    """A reader may close the console, as in ``bash scripts/run_mnist_ddp.sh 4 | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "log.start(run_dir, 0, False)\n[log.info(f'line {n}') for n in range(100)]\nlog.error('the end')"
    try:
        done = child(code, tmp_path, stdout=writing, stderr=writing)
    finally:
        os.close(writing)
    assert done.returncode == 0
    assert "line 99" in rank_log(tmp_path)
    assert "error: the end" in rank_log(tmp_path)


def test_without_a_terminal_there_is_no_progress_bar(tmp_path: Path) -> None:
    code = "log.start(run_dir, 0, False)\nbar = log.progress(3, 1)\nbar.update()\nlog.info('step')\nbar.close()"
    done = child(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "step\n", "")


def test_on_a_terminal_rank_0_shows_progress_and_whole_lines(tmp_path: Path) -> None:
    code = """
log.start(run_dir, int(sys.argv[2]), False)
bar = log.progress(30, 10)
for step in range(20):
    bar.update()
    time.sleep(0.02)
log.warning("whole line")
bar.close()
"""
    for rank in (0, 1):
        ours, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        process = start(code, tmp_path, str(rank), stdout=terminal, stderr=terminal)
        os.close(terminal)
        shown = b""
        with process, contextlib.suppress(OSError):  # EIO: the other end is closed
            while select.select([ours], [], [], LIMIT)[0] and (part := os.read(ours, 10_000)):
                shown += part
        os.close(ours)
        assert process.returncode == 0
        assert (b"/30" in shown) == (rank == 0)
        assert b"warning: whole line\r\n" in shown.replace(b"\x1b[A", b"")


# --- the result --------------------------------------------------------------------------------------------------

RESULT = """
log.start(run_dir, 0, quiet)
print("noise of a framework")
log.info("epoch 1/1")
log.result('{"steps": 7}')
os.write(1, b"last words of C\\n")
"""


@pytest.mark.parametrize("quiet", [False, True])
def test_the_result_is_the_last_line_on_stdout(tmp_path: Path, quiet: bool) -> None:
    done = child(f"quiet = {quiet}\n" + RESULT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*([] if quiet else ["epoch 1/1"]), 'RESULT {"steps": 7}']
    assert 'RESULT {"steps": 7}' in rank_log(tmp_path)
    assert not (tmp_path / "result.json").exists()  # only a Run writes it


# --- exit codes --------------------------------------------------------------------------------------------------


def run(body: str, run_dir: Path, started: bool = True) -> subprocess.CompletedProcess[str]:
    start = "log.start(run_dir, 0, False)" if started else "pass"
    return child(f"def main():\n    {start}\n    {body}\nlog.run(main)\n", run_dir)


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize(
    ("body", "code", "output"),
    [
        ("pass", 0, ""),
        ("raise ConfigError('--lr 9 is too high')", 2, "error: --lr 9 is too high\n"),
        ("raise NonRetryableError('the disk is full')", 1, "error: the disk is full\n"),
        ("raise NonRetryableError('over\\n two lines')", 1, "error: over two lines\n"),
    ],
)
def test_a_known_failure_is_one_line_and_a_code(
    tmp_path: Path, body: str, code: int, output: str, started: bool
) -> None:
    done = run(body, tmp_path, started)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", output)
    expected = None
    if code and started:
        expected = {"code": code}  # a restart cannot help
    assert verdict(tmp_path) == expected
    assert not started or "Traceback" not in rank_log(tmp_path)


def test_an_unknown_failure_is_one_line_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    done = run("{}['weights'] if True else 'the culprit line'", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: rank 0: KeyError: 'weights'")
    assert str(tmp_path / "log" / "rank-0.log") in done.stderr
    assert "Traceback (most recent call last)" in rank_log(tmp_path)
    assert verdict(tmp_path) is None  # a restart may help


RECORDING = """
from samestep.monitor import Monitor
class Recording(Monitor):
    def record_event(self, kind, **fields):
        (run_dir / "event").write_text(kind + ": " + fields["text"])
def main():
    log.start(run_dir, 0, False, Recording())
    raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer")
log.run(main)
"""


def test_the_event_of_a_lost_connection_has_no_words_of_a_framework(tmp_path: Path) -> None:
    done = child(RECORDING, tmp_path)
    rest = f"lost the connection to another rank; more in {tmp_path / 'log' / 'rank-0.log'}"
    assert (tmp_path / "event").read_text() == f"{events.FAILURE}: rank 0: {rest}"
    assert "pair.cc:553" in done.stderr  # users can search for this text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("", ";"),
        ("one\ntwo\nthree", "one;"),
        ("\n\n", ";"),
        ("only a title:", "only a title:;"),
        (" \n\t\n  three  \nfour", "three;"),
    ],
)
def test_an_unknown_failure_with_an_odd_message_is_one_line(tmp_path: Path, message: str, shown: str) -> None:
    done = run(f"raise RuntimeError({message!r})", tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"RuntimeError: {shown} more in " in done.stderr


def test_an_app_may_choose_what_is_shown_of_an_unknown_failures_message(tmp_path: Path) -> None:
    """MindSpore's messages begin with a title line, so resnet50_mindspore shows another line."""
    code = """
def main():
    log.start(run_dir, 0, False)
    raise RuntimeError("a title\\nthe reason")
log.run(main, lambda text: text.splitlines()[-1])
"""
    done = child(code, tmp_path)
    where = tmp_path / "log" / "rank-0.log"
    assert (done.returncode, done.stderr) == (1, f"error: rank 0: RuntimeError: the reason; more in {where}\n")


@pytest.mark.parametrize("code", [1, 2])
def test_a_rank_whose_rank_0_has_failed_ends_silently_with_its_code(tmp_path: Path, code: int) -> None:
    done = run(f"raise RemoteRankError({code})", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert verdict(tmp_path) == {"code": code}  # the code of rank 0, which may be on another machine
    assert "Traceback" not in rank_log(tmp_path)


@pytest.mark.parametrize(
    "failure", ["ConfigError('x')", "NonRetryableError('x')", "RemoteRankError(2)", "RuntimeError('x')"]
)
def test_what_was_printed_before_a_failure_is_in_the_log(tmp_path: Path, failure: str) -> None:
    run(f"print('my last print'); raise {failure}", tmp_path)
    assert "my last print" in rank_log(tmp_path)


def test_a_failed_rank_leaves_at_once_whatever_its_framework_waits_for(tmp_path: Path) -> None:
    waits = (
        "import threading, atexit; atexit.register(time.sleep, 600); threading.Thread(target=time.sleep, args=[600])"
    )
    done = run(f"{waits}.start(); raise RuntimeError('x')", tmp_path)
    assert done.returncode == 1


def test_ctrl_c_is_130_without_a_traceback_on_the_console(tmp_path: Path) -> None:
    code = "def main():\n    log.start(run_dir, 0, False)\n    log.info('here')\n    time.sleep(600)\nlog.run(main)"
    with running(code, tmp_path, until="here") as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (130, "", "")
    assert "interrupted" in rank_log(tmp_path)
    assert verdict(tmp_path) is None


@pytest.mark.parametrize("failure", ["NonRetryableError", "RuntimeError"])
def test_a_full_disk_does_not_hide_the_error(tmp_path: Path, failure: str) -> None:
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def main():
    log.start(run_dir, 0, False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise {failure}("the reason")
log.run(main)
"""
    done = child(code, tmp_path)
    assert done.returncode == 1
    assert "the reason" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_warnings_and_errors_are_one_line_of_limited_length_whatever_they_quote(tmp_path: Path) -> None:
    quoted = r"x\nerror: the disk burns\x1b[2J" + "y" * 100
    done = run(f"log.warning('{quoted}' * 1000); raise NonRetryableError('{quoted}' * 1000)", tmp_path)
    warning, error = done.stderr.splitlines()
    for line, kind in ((warning, "warning"), (error, "error")):
        assert line.startswith(f"{kind}: x error: the disk burns")
        assert line.isprintable()
        assert len(line) < 4100
    assert len(rank_log(tmp_path)) < 10_000
