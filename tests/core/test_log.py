"""What a run says: metrics without gaps or repeats, a clean console, exit codes, and one writer per run dir."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samestep import FatalError, log
from samestep.env import World

CORE = str(Path(log.__file__).parents[1])
LIMIT = 30  # seconds that no child process needs

PRELUDE = """
import os, sys, time
from argparse import Namespace
from pathlib import Path
from samestep import FatalError, UserError, log
from samestep.env import World

run_dir = Path(sys.argv[1])
"""


def default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


def environment() -> dict[str, str]:
    """This process's environment without what would change how a program prints."""
    return {**{name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}, "PYTHONPATH": CORE}


def arguments_of(code: str, run_dir: Path) -> dict[str, Any]:
    return {
        "args": [sys.executable, "-c", PRELUDE + code, str(run_dir)],
        "env": environment(),
        "text": True,
        "preexec_fn": default_signals,
    }


def child(code: str, run_dir: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that uses the package, to its end."""
    return subprocess.run(
        **{**arguments_of(code, run_dir), "capture_output": True, "timeout": LIMIT, "check": False, **changes}
    )


@contextlib.contextmanager
def running(code: str, run_dir: Path, until: str) -> Iterator[subprocess.Popen[str]]:
    """A program in the background that has printed ``until``; gone when the block ends."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(**arguments_of(code, run_dir), **pipes)
    with process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], LIMIT)[0], f"no {until!r} in time"
            assert process.stdout.readline().strip() == until
            yield process
        finally:
            process.kill()


def rank_log(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "log" / f"rank-{rank}.log").read_text()


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(run_dir: Path) -> list[int]:
    return [line["step"] for line in lines_of(run_dir) if "step" in line]


def write_steps(run_dir: Path, resumed_from: int | None, last: int) -> None:
    metrics = log.Metrics(run_dir, {"app": "toy"}, resumed_from)
    for step in range((resumed_from or 0) + 1, last + 1):
        metrics.write(step=step, loss=1 / step)
    metrics.sync()


# --- metrics.jsonl -----------------------------------------------------------------------------------------------


def test_a_run_is_a_header_and_a_line_a_step(tmp_path: Path) -> None:
    write_steps(tmp_path, None, 4)
    assert lines_of(tmp_path) == [{"app": "toy"}, *({"step": step, "loss": 1 / step} for step in (1, 2, 3, 4))]


def test_a_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    metrics = log.Metrics(tmp_path, {"app": "toy"}, None)
    metrics.write(step=1, loss=0.5)
    assert lines_of(tmp_path)[-1] == {"step": 1, "loss": 0.5}


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
    """A crash: (steps lost since the checkpoint, steps done after the resume, bytes torn from the end)."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        write_steps(run_dir, None, 10)
        done, path = 10, run_dir / "metrics.jsonl"
        for lost, more, torn in crashes:
            resumed_from = max(0, done - lost)
            content = path.read_bytes()
            synced = content.find(b'"step": %d, "loss"' % (resumed_from + 1))  # only what came after may be torn
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
metrics = log.Metrics(run_dir, {"app": "toy"}, None)
metrics.write(step=1, loss=0.5)
print("writing", flush=True)
step = 1
while True:
    step += 1
    metrics.write(step=step, loss=1 / step, padding="x" * 5000)
"""
    with running(code, tmp_path, until="writing"):
        pass  # killed
    write_steps(tmp_path, 1, 3)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_write_that_fails_is_fatal(tmp_path: Path) -> None:
    code = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
metrics = log.Metrics(run_dir, {"app": "toy"}, None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for step in range(1000):
        metrics.write(step=step)
except FatalError as problem:
    print(problem, flush=True)
    os._exit(0)
"""
    done = child(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "metrics.jsonl: File too large" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_the_header_says_what_made_the_numbers(tmp_path: Path) -> None:
    options = Namespace(seed=1, run_dir=tmp_path)
    header = log.header("toy", options, World(0, 2, launcher="torchrun"), framework="1.2")
    header = json.loads(json.dumps(header))
    assert (header["app"], header["framework"]) == ("toy", "1.2")
    assert header["options"] == {"run_dir": str(tmp_path), "seed": 1}
    assert (header["world"]["world_size"], header["world"]["launcher"]) == (2, "torchrun")
    assert {"time", "python", "machine", "host"} <= header.keys()
    log.Metrics(tmp_path, header, None)
    log.Metrics(tmp_path, header, 0)
    assert lines_of(tmp_path)[1]["resumed"] == {"step": 0, **header}


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
    for said in [*wanted.split(", "), "error: an error over lines", f"rank {rank} on "]:
        assert said in text, said


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
    """As in ``bash scripts/run_mnist_ddp.sh 4 | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "log.start(run_dir, 0, False)\n[log.info(f'line {n}') for n in range(100)]\nlog.error('the end')"
    try:
        done = child(code, tmp_path, capture_output=False, stdout=writing, stderr=writing)
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
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        arguments = arguments_of(code, tmp_path)
        arguments["args"].append(str(rank))
        process = subprocess.Popen(**arguments, stdout=theirs, stderr=theirs)
        os.close(theirs)
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
options = Namespace(dataset="mnist-5k", epochs=1, global_batch_size=32, seed=1, dtype="float32")
world = World(0, 2, node_count=1, launcher="torchrun", restart_count=1)
log.result(run_dir, "toy", options, world, framework="none", test_loss=1 / 3, steps=7)
os.write(1, b"last words of C\\n")
"""


@pytest.mark.parametrize("quiet", [False, True])
def test_the_result_is_the_last_line_on_stdout_and_in_result_json(
    tmp_path: Path, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMESTEP_RESTARTS", "2")
    done = child(f"quiet = {quiet}\n" + RESULT, tmp_path)
    assert done.returncode == 0, done.stderr
    *before, last = done.stdout.splitlines()
    assert before == ([] if quiet else ["epoch 1/1"])
    assert last.startswith("RESULT {")
    result = json.loads(last.removeprefix("RESULT "))
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["test_loss"] == 1 / 3
    wanted = {
        "app": "toy",
        "launcher": "torchrun",
        "world_size": 2,
        "node_count": 1,
        "dataset": "mnist-5k",
        "epochs": 1,
        "global_batch_size": 32,
        "seed": 1,
        "dtype": "float32",
        "framework": "none",
        "steps": 7,
        "run_dir": str(tmp_path),
        "restarts": 3,  # the launch script's and the launcher's own
    }
    assert {name: result[name] for name in wanted} == wanted


# --- exit codes --------------------------------------------------------------------------------------------------


def run(body: str, run_dir: Path, started: bool = True) -> subprocess.CompletedProcess[str]:
    start = "log.start(run_dir, 0, False)" if started else "pass"
    return child(f"def main():\n    {start}\n    {body}\nlog.run(main)\n", run_dir)


def verdict(run_dir: Path) -> Any:
    path = run_dir / "log" / "no-restart"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise UserError('--lr 9 is too high')", 2, "error: --lr 9 is too high\n"),
        ("raise FatalError('the disk is full')", 1, "error: the disk is full\n"),
        ("raise FatalError('over\\n two lines')", 1, "error: over two lines\n"),
    ],
)
def test_a_known_failure_is_one_line_and_a_code(tmp_path: Path, body: str, code: int, said: str, started: bool) -> None:
    done = run(body, tmp_path, started)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)
    assert verdict(tmp_path) == ({"code": code} if code and started else None)  # starting again cannot help
    assert not started or "Traceback" not in rank_log(tmp_path)


def test_an_unknown_failure_is_one_line_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    done = run("{}['weights'] if True else 'the culprit line'", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: rank 0: KeyError: 'weights'")
    assert str(tmp_path / "log" / "rank-0.log") in done.stderr
    assert "Traceback (most recent call last)" in rank_log(tmp_path)
    assert verdict(tmp_path) is None  # starting again may help


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("", ";"),
        ("one\ntwo\nthree", "one;"),
        ("\n\n", ";"),
        ("only a title:", "only a title:;"),
        ("\n------\n- Kernel error:\n------\nLaunch failed: op1\n", "Launch failed: op1;"),  # as MindSpore writes
    ],
)
def test_an_unknown_failure_with_an_odd_message_is_one_line(tmp_path: Path, message: str, shown: str) -> None:
    done = run(f"raise RuntimeError({message!r})", tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"RuntimeError: {shown} more in " in done.stderr


@pytest.mark.parametrize("failure", ["UserError('x')", "FatalError('x')", "RuntimeError('x')"])
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


@pytest.mark.parametrize("failure", ["FatalError", "RuntimeError"])
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


# --- one writer per run dir --------------------------------------------------------------------------------------

HOLD = "log.lock(run_dir, log.{}, 'the first job')\nprint('held', flush=True)\nsys.stdin.read()\n"
TRY = """
def main():
    log.lock(run_dir, log.{}, "the second job", wait={})
    print("got it")
log.run(main)
"""


def test_a_second_job_waits_and_then_names_the_holder(tmp_path: Path) -> None:
    with running(HOLD.format("LAUNCHER_BYTE"), tmp_path, until="held") as holder:
        done = child(TRY.format("LAUNCHER_BYTE", 0.5), tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    waiting, refused = done.stderr.splitlines()
    for line in (waiting, refused):
        assert f"{tmp_path} is in use by the first job (host " in line
        assert f"pid {holder.pid}" in line
    assert waiting.startswith("warning: ")
    assert refused.startswith("error: ")
    assert "--run-dir" in refused


def test_a_second_job_goes_on_when_the_first_is_done(tmp_path: Path) -> None:
    with running(HOLD.format("WRITER_BYTE"), tmp_path, until="held") as holder:
        second = subprocess.Popen(
            **arguments_of(TRY.format("WRITER_BYTE", LIMIT), tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with second:
            assert second.stderr is not None
            assert "waiting" in second.stderr.readline()
            holder.communicate(timeout=LIMIT)  # its stdin ends, and so does it
            out, _ = second.communicate(timeout=LIMIT)
    assert (second.returncode, out) == (0, "got it\n")


def test_a_killed_job_holds_nothing(tmp_path: Path) -> None:
    with running(HOLD.format("LAUNCHER_BYTE"), tmp_path, until="held"):
        pass  # SIGKILL
    done = child(TRY.format("LAUNCHER_BYTE", 0), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "got it\n", "")


@pytest.mark.parametrize(("held", "wanted"), [("LAUNCHER_BYTE", "WRITER_BYTE"), ("WRITER_BYTE", "LAUNCHER_BYTE")])
def test_launch_script_and_rank_0_do_not_lock_each_other_out(tmp_path: Path, held: str, wanted: str) -> None:
    with running(HOLD.format(held), tmp_path, until="held"):
        assert child(TRY.format(wanted, 0), tmp_path).returncode == 0
        assert child(TRY.format(held, 0), tmp_path).returncode == 2


def test_a_byte_that_was_given_up_is_free_and_the_other_is_not(tmp_path: Path) -> None:
    code = """
log.lock(run_dir, log.LAUNCHER_BYTE, "the first job")
log.lock(run_dir, log.WRITER_BYTE, "the first job")
log.unlock(log.WRITER_BYTE)
print("held", flush=True)
sys.stdin.read()
"""
    with running(code, tmp_path, until="held"):
        assert child(TRY.format("WRITER_BYTE", 0), tmp_path).returncode == 0
        assert child(TRY.format("LAUNCHER_BYTE", 0), tmp_path).returncode == 2


def test_the_ranks_a_job_starts_do_not_inherit_its_lock(tmp_path: Path) -> None:
    """A rank that outlives its killed launch script must not hold that one's lock."""
    code = """
import subprocess
log.lock(run_dir, log.LAUNCHER_BYTE, "the first job")
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=0, stdout=2)
print(rank.pid, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(**arguments_of(code, tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT)[0]
        rank = int(process.stdout.readline())
        process.kill()
    try:
        assert child(TRY.format("LAUNCHER_BYTE", 0), tmp_path).returncode == 0
    finally:
        os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_run_dir_that_cannot_be_locked_is_the_callers_mistake(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = child(TRY.format("LAUNCHER_BYTE", 0), tmp_path / place)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot use --run-dir {tmp_path / place}: ")
    assert len(done.stderr.splitlines()) == 1


def test_metrics_are_refused_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises((OSError, FatalError)):
        log.Metrics(tmp_path / "gone", {"app": "toy"}, None)
