"""Test which lines of a launcher's stderr the console shows, and which ended ranks they name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from samestep_launch.stderr_forwarder import MAX_SHOWN, RankEnds, StderrForwarder


def console_and_log(tmp_path: Path, content: bytes, *, shows: bool = True, prefix: str = "") -> tuple[str, bytes]:
    """Forward content that fits into a pipe; return the console's text and the log's bytes."""
    source, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    shown: list[str] = []
    path = tmp_path / "launcher.log"
    log = path.open("ab", buffering=0)
    StderrForwarder(source, log, prefix, lambda: shows, lambda text, end: shown.append(text + end)).run()
    return "".join(shown), path.read_bytes()


@pytest.mark.parametrize(
    "content", [b"a\nb\n", b"\r1/9 [bar]\r2/9 [bar]\n", b"a\r\nb\r\n", b"\n\n", "\u00e9\n".encode()]
)
def test_lines_and_bars_are_shown_as_they_are(tmp_path: Path, content: bytes) -> None:
    console, log = console_and_log(tmp_path, content)
    assert (console.replace("\r\n", "\n"), log) == (content.decode().replace("\r\n", "\n"), content)


def test_the_console_cuts_a_line_that_the_log_has_whole(tmp_path: Path) -> None:
    content = b"x" * (MAX_SHOWN + 1) + b"\nshort\n"
    console, log = console_and_log(tmp_path, content)
    assert (console, log) == ("x" * MAX_SHOWN + " [...]\nshort\n", content)


def test_messages_are_shown_once_and_alone_if_nothing_else_is_shown(tmp_path: Path) -> None:
    lost = b"error: rank 1: RuntimeError: Connection closed by peer\n"
    content = b"a\nwarning: w\nerror: e\nwarning: w\n" + lost + b"error: the last"
    console, log = console_and_log(tmp_path, content, shows=False)
    assert (console, log) == ("warning: w\nerror: e\nerror: the last\n", content)


LOST = "error: rank 0: RuntimeError: [gloo/pair.cc:537] Connection {} by peer; more in log/rank-0.log\n"
CLOSED = LOST.format("closed")
APP = "error: rank 0: all_reduce failed: connection reset\n"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (CLOSED + "error: rank 1: ValueError: damaged\n", "error: rank 1: ValueError: damaged\n"),
        (CLOSED + "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)  (SIGKILL)\n", ""),
        (CLOSED + LOST.format("reset"), CLOSED),
        (APP + CLOSED, APP),
    ],
    ids=["a later error", "a killed rank", "no other cause", "an error in the words of an app"],
)
def test_a_frameworks_error_about_a_lost_connection_is_shown_only_without_another_cause(
    tmp_path: Path, content: str, shown: str
) -> None:
    console, log = console_and_log(tmp_path, content.encode(), shows=False)
    assert (console, log.decode()) == (shown, content)


def test_the_launchers_prefix_is_no_part_of_a_line(tmp_path: Path) -> None:
    content = b"[1]<stderr>:error: e\n[1]<stderr>:a\nof the launcher\n"
    console, _ = console_and_log(tmp_path, content, prefix=r"\[\d+\]<stderr>:")
    assert console == "error: e\na\nof the launcher\n"


TORCHRUN = """
  rank      : {} (local_rank: 0)
  exitcode  : {} (pid: 7)  (SIGKILL)
  error_file: <N/A>
"""
HOROVODRUN = "status, The first process to do so was:\nProcess name: 1\nExit code: {}\n"


@pytest.mark.parametrize(
    ("output", "rank", "number"),
    [
        (TORCHRUN.format(4, -9), 4, signal.SIGKILL),
        (TORCHRUN.format(1, 1) + TORCHRUN.format(3, -11), 3, signal.SIGSEGV),  # rank 1 lost its connection
        (TORCHRUN.format(1, -15) + TORCHRUN.format(3, -9), 3, signal.SIGKILL),  # SIGTERM comes from torchrun
        (HOROVODRUN.format(137), 1, signal.SIGKILL),
        ("mpirun noticed that process rank 2 with PID 7 on node h exited on signal 9 (Killed).\n", 2, signal.SIGKILL),
        ("prterun noticed that process rank 2 with PID 7 on node h exited on\nsignal 11 (x).\n", 2, signal.SIGSEGV),
    ],
)
def test_the_rank_that_a_signal_ended_is_named(output: str, rank: int, number: signal.Signals) -> None:
    assert description(output) == f"; rank {rank} was ended by {number.name}"


@pytest.mark.parametrize(
    "output",
    [
        TORCHRUN.format(4, 1),
        TORCHRUN.format(4, -15),
        TORCHRUN.format(4, -999),
        HOROVODRUN.format(1),
        "signal 9 (x)\n",
        "  exitcode  : -9 (pid: 7)\n",
    ],
)
def test_no_rank_is_named_without_a_signal(output: str) -> None:
    assert description(output) == ""


def description(output: str) -> str:
    ends = RankEnds()
    for line in output.encode().splitlines():
        ends.read(line)
    return ends.describe()
