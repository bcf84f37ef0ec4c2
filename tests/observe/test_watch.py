"""Test watch: frames of run dirs that a toy's real `Run` made, and the program in a pty."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import rundirs
from programs import CORE, HOLD, default_signals, environment, running
from samestep_observe import run_reader, watch
from samestep_observe.run_reader import Curve

LIMIT = 60.0  # seconds; every wait ends sooner
JOB = "a job"
NOW = 1_800_000_000.0  # the time of this machine's clock in the tests, in seconds since 1970


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return rundirs.make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: 1000.0))


def frame(run_dir: Path, columns: int = 100, lines: int = 60) -> list[str]:
    view = watch.View(run_dir)
    view.update()
    return view.frame(columns, lines)


def beat(
    run_dir: Path, rank: int, step: int, host: str = socket.gethostname(), ago: float = 0.5, pid: int = 4000
) -> None:
    """Write a rank's heartbeat as its watchdog does."""
    heartbeat = {"rank": rank, "pid": pid, "host": host, "job": JOB, "step": step, "updates": step}
    at = ["/x/apps/mnist_ddp/train.py", 105, "train"]
    (run_dir / "log" / f"alive-{rank}").write_text(json.dumps({**heartbeat, "time": NOW - ago, "at": at}))


def test_a_frame_of_a_finished_run(made: dict[str, Path]) -> None:
    text = "\n".join(frame(made["killed"]))
    assert "finished at step 12" in text
    assert re.search(r"step 12 of 12  █+ 100%", text)
    assert re.search(r"loss +\d\.\d+ +[▁▂▃▄▅▆▇█]{12}$", text, re.MULTILINE)
    assert re.search(r"checkpoint +step 12, .* ago by its file system; 3 kept", text)
    assert re.search(r"restarts +started 2 times; resumed at step 8$", text, re.MULTILINE)
    assert re.search(r"result +test loss 0\.\d+, test accuracy 0.5", text)
    assert "log/launcher.log" in text


def test_ranks_of_a_finished_run_are_not_behind_its_last_step(made: dict[str, Path], tmp_path: Path) -> None:
    """The last heartbeat and the last log line may be older than the last step."""
    copy = Path(shutil.copytree(made["whole"], tmp_path / "run"))
    beat(copy, 0, 7)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:-2]))
    shown = frame(copy)
    assert shown[0] == "finished at step 12"
    assert shown[2].startswith("step 12 of 12 ")
    assert "ranks          1 ended" in shown
    (copy / "result.json").unlink()
    assert "ranks          1 ended; last heartbeat at step 7" in frame(copy)


@pytest.mark.parametrize(
    ("no_color", "state"), [("", "\x1b[32mfinished at step 12\x1b[0m"), ("1", "finished at step 12")]
)
def test_the_state_is_in_color_unless_no_color_is_set(
    no_color: str, state: str, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    view = watch.View(made["whole"])
    view.update()
    assert view.colored_frame(100, 60) == [state, *view.frame(100, 60)[1:]]


def test_a_frame_of_a_stopped_run_names_the_signal_and_the_resume(made: dict[str, Path]) -> None:
    text = "\n".join(frame(made["stopped"]))
    assert "stopped by SIGTERM at step 6; the same --run-dir resumes from there" in text
    assert re.search(r"step 6 of 12  █+░+ 50%", text)


@pytest.mark.parametrize("columns", [1, 8, 20, 40, 80, 300])
@pytest.mark.parametrize("lines", [1, 2, 10, 24])
def test_a_frame_fits_its_terminal(columns: int, lines: int, made: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made["stopped"], tmp_path / "run"))
    for rank in range(50):
        beat(copy, rank, 6)
    for run_dir in (*made.values(), copy):
        shown = frame(run_dir, columns, lines)
        assert len(shown) <= max(1, lines - 1)
        assert max(map(len, shown)) <= columns


def held(run_dir: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Hold the run dir's lock in another process, because a process cannot detect its own locks."""
    return running(HOLD.format("LAUNCHER_BYTE"), run_dir, until="held")


def test_a_frame_of_a_running_run_marks_the_silent_rank(made: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made["stopped"], tmp_path / "run"))
    beat(copy, 0, 9)
    beat(copy, 1, 7, ago=31.0)
    beat(copy, 2, 9, host="elsewhere", ago=-5000.0)  # the host's clock differs
    with held(copy):
        assert run_reader.is_held(copy)
        text = "\n".join(frame(copy))
    assert text.startswith("running\n")
    assert re.search(r"0 +\S+ +step 9  0 s ago  train.py:105 in train", text)
    assert re.search(r"1 +\S+ +step 7  31 s ago  2 behind  SILENT  train.py:105 in train", text)
    assert re.search(r"2 +elsewhere +step 9  unchanged 0 s  train.py:105 in train", text)
    assert re.search(r"steps/s  .* left$", text, re.MULTILINE)
    assert not run_reader.is_held(copy)


def test_if_ranks_outnumber_lines_those_behind_are_shown(made: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made["stopped"], tmp_path / "run"))
    for rank in range(100):
        beat(copy, rank, 5 if rank == 71 else 9)
    with held(copy):
        text = "\n".join(frame(copy, 80, 30))
    assert re.search(r"\n +71 .* 4 behind", text)
    assert re.search(r"and \d+ more, not behind these", text)


def test_before_the_first_log_line_the_frame_names_what_the_run_waits_for(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    assert "no rank has started yet" in frame(tmp_path)
    beat(tmp_path, 0, 0)
    assert frame(tmp_path)[1] == str(tmp_path)[:100]
    assert "waiting for the first step" in frame(tmp_path)
    beat(tmp_path, 0, 3)
    assert "waiting for the first log line" in frame(tmp_path)


def test_ranks_on_another_host_are_running_when_their_files_change(made: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made["stopped"], tmp_path / "run"))
    (copy / "log" / "no-restart").unlink()
    beat(copy, 0, 6, host="elsewhere", ago=-900.0)
    view = watch.View(copy)
    assert view.update()
    assert "ranks on other hosts" in view.frame(100, 50)[0]
    beat(copy, 0, 7, host="elsewhere", ago=-901.0)
    assert view.update()
    assert view.frame(100, 50)[0] == "running on elsewhere"


def test_files_cannot_control_the_terminal(made: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made["whole"], tmp_path / "run"))
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[0]["app"] = "\x1b[2J\x07\x9b31m"
    for line in lines[1:]:
        line["\x1b]0;title\x07\r\n"] = 1.0
    (copy / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with (copy / "log" / "launcher.log").open("ab") as log:
        log.write(b"\x1b[31m\xff\x00\r\x1b]8;;x\n")
    beat(copy, 0, 12, host="\x1b[5m")
    shown = frame(copy)
    assert all(line.isprintable() for line in shown)
    assert any("�[2J" in line for line in shown)


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "log/launcher.log", "log/rank-0.log", "log/alive-0"])
@pytest.mark.parametrize(
    "content", [None, b"", b"\x00\xff" * 500, b'{"step": [], "rank": {}}\n', b"[" * 90_000 + b"\n"]
)
def test_a_damaged_file_hides_only_its_part(
    name: str, content: bytes | None, made: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(made["killed"], tmp_path / "run"))
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    assert len(frame(copy)) > 4


def test_a_sparkline_scales_means_from_the_least_to_the_greatest() -> None:
    def of(*values: float) -> Curve:
        return Curve(array("q", range(len(values))), array("d", values))

    assert watch.sparkline(of(0, 1, 2, 3, 4, 5, 6, 7), 40) == watch.BLOCKS
    assert watch.sparkline(of(0, 2, 6, 8), 2) == "▁█"
    assert watch.sparkline(of(3, 3, 3), 40) == "▁▁▁"
    assert len(watch.sparkline(of(*range(1000)), 40)) == 40


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (200_000, "2 d 7 h")],
)
def test_a_duration_has_at_most_two_units(seconds: float, message: str) -> None:
    assert watch.duration(seconds) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "error: nowhere: no such folder: give a run dir"),
        ([], "error: runs/ holds no run: start one, or give a RUN_DIR"),
        (["--pid=x"], "error: --pid: 'x' is not a whole number from 0"),
        (["--every", "0"], "error: --every: '0' is not a finite number above 0"),
        (["--evry", "1"], "error: unknown argument --evry: did you mean --every?"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert watch.main(arguments) == 2
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1)
    assert errors.startswith(message)


def test_pid_prints_the_process_of_a_rank(
    made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(made["stopped"], tmp_path / "run"))
    for rank in (0, 1):
        beat(copy, rank, 7, pid=os.getppid() if rank == 0 else os.getpid())
    with held(copy):
        assert watch.main(["--pid", "1", str(copy)]) == 0
    assert capsys.readouterr().out == f"{os.getpid()}\n"


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (1, "process 0 has ended: wait until the job has restarted"),  # `kill 0` would end the caller's shell
        (2, "this rank runs on elsewhere: run the command there"),
        (3, "has no heartbeat of this rank: give one of these: 0-2"),
    ],
)
def test_pid_prints_no_process_that_is_not_the_ranks(
    rank: int, message: str, made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(made["stopped"], tmp_path / "run"))
    beat(copy, 0, 7, pid=os.getpid())
    beat(copy, 1, 7, pid=0)
    beat(copy, 2, 7, host="elsewhere", pid=os.getpid())
    arguments = ["--pid", str(rank), str(copy)]
    with held(copy):
        assert watch.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert watch.main(arguments) == 2
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1)
    assert f"{copy}: its job has ended" in errors


def test_without_a_run_dir_it_is_the_newest(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "stopped"):
        shutil.copytree(made[name], tmp_path / "runs" / "toy" / name)
    for path in (tmp_path / "runs" / "toy" / "whole").rglob("*"):
        os.utime(path, (1.0, 1.0))
    assert watch.main([]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"toy  {Path('runs', 'toy', 'stopped')}"


# --- in a terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """Run the program in its own pty, and collect its output."""

    def __init__(self, run_dir: Path, columns: int = 80, lines: int = 30) -> None:
        pid, self.descriptor = pty.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                default_signals()
                environ = {**os.environ, "PYTHONPATH": CORE, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
                command = [sys.executable, "-m", "samestep_observe.watch", str(run_dir), "--every", "0.1"]
                os.execve(sys.executable, command, environ)
            os._exit(127)
        self.pid = pid
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.ended = False
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, pattern: str) -> None:
        """Wait until the output since the last match matches ``pattern``, and drop the output up to the match's end."""
        deadline = time.monotonic() + LIMIT
        while not (found := re.search(pattern, self.text)):
            assert select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], self.text[-2000:]
            content = self._read()
            assert content, self.text[-2000:]
            self.text += content
        self.text = self.text[found.end() :]

    def end(self) -> int:
        """Wait until the program ends, and return its exit code."""
        deadline = time.monotonic() + LIMIT
        while True:
            assert select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], self.text[-2000:]
            content = self._read()
            if not content:
                break
            self.text += content
        status = os.waitpid(self.pid, 0)[1]
        self.ended = True
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> str:
        """Return the program's next output, or "" if the program has ended."""
        text = ""
        with contextlib.suppress(OSError):  # the program has closed the other end
            while not text and (content := os.read(self.descriptor, 2**16)):
                text = self._decoder.decode(content)
        return text


@contextlib.contextmanager
def terminal(run_dir: Path) -> Iterator[Terminal]:
    found = Terminal(run_dir)
    try:
        yield found
    finally:
        if not found.ended:
            os.kill(found.pid, signal.SIGKILL)
            os.waitpid(found.pid, 0)
        os.close(found.descriptor)


def test_ctrl_c_ends_it_quietly_and_restores_the_screen(made: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made["stopped"], tmp_path / "run"))
    with held(copy), terminal(copy) as shown:
        shown.until(r"\x1b\[\?1049h\x1b\[\?25l")
        shown.until(r"step 6 of 12")
        shown.resize(30, 12)
        shown.until(r"\x1b\[H[^\r\n]{0,29}…?\x1b\[K\r\n")
        os.write(shown.descriptor, b"\x03")
        assert shown.end() == 0
        assert "\x1b[?25h\x1b[?1049l" in shown.text
        assert "Traceback" not in shown.text


def test_it_follows_a_run_to_its_end(made: dict[str, Path], tmp_path: Path) -> None:
    """The run was killed and restarted. The last frame stays on the terminal."""
    run_dir = tmp_path / "run"
    (run_dir / "log").mkdir(parents=True)
    with held(run_dir) as holder, terminal(run_dir) as shown:
        shown.until("starting")
        for name in ("log", "checkpoints"):
            shutil.copytree(made["killed"] / name, run_dir / name, dirs_exist_ok=True)
        shutil.copy(made["killed"] / "metrics.jsonl", run_dir)
        shown.until("resumed at step 8")
        shutil.copy(made["killed"] / "result.json", run_dir)
        holder.kill()
        assert shown.end() == 0
        assert "finished at step 12" in shown.text.rpartition("\x1b[?1049l")[2]


def test_it_exits_for_a_run_that_was_killed(made: dict[str, Path]) -> None:
    """watch exits at once if the run and its launcher were killed earlier."""
    shutil.copytree(made["whole"], copy := made["whole"].parent / "no result")
    (copy / "result.json").unlink()
    with terminal(copy) as shown:
        assert shown.end() == 0
        assert "ended without a result at step 12: killed, or copied while it ran" in shown.text


def test_without_a_terminal_it_prints_plain_text(made: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "samestep_observe.watch", str(made["killed"])]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "finished at step 12" in done.stdout
