"""Copy the standard error of a launcher and its ranks to launcher.log, and parts of it to the console.

This module imports no third-party package.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Callable
from typing import IO

from samestep import failures

MAX_CHUNK = 2**16  # maximum number of bytes of one read
MAX_SHOWN = 2**13  # maximum number of bytes of one line that the console shows
# Seconds without output after which the console shows an unfinished line, such as a progress bar.
PAUSE_SECONDS = 0.2
# Pattern of a rank's error about a lost connection. A framework's error begins with the name of an exception class.
LOST_CONNECTION = re.compile(
    rb"error: rank \d+: (?P<exception>\w+: )?.*(%b)" % failures.LOST_CONNECTION.encode(), re.IGNORECASE
)
# Patterns of the one or two lines by which torchrun, horovodrun and Open MPI report an ended rank and its signal.
ENDED_RANK = re.compile(rb"\s*rank +: (\d+) \(local_rank|Process name: (\d+)$|.*process rank (\d+) with PID")
ENDED_BY = re.compile(
    rb"\s*exitcode +: -(\d+) |Exit code: -(\d+)$|Exit code: (129|1[3-5]\d)$|.*exited on signal (\d+)|signal (\d+) \("
)
SHELL_SIGNAL = 128  # a shell's exit code is 128 plus the number of the signal that ended its command


class StderrForwarder:
    """A forwarder that copies a pipe to the log, and parts of the pipe's content to the console.

    The log gets all bytes immediately. The console shows error and warning lines without repetitions, and other lines
    only while ``shows`` returns True. A carriage return also ends a line. The console shows only the first
    `MAX_SHOWN` bytes of a line.

    If a rank is killed, the other ranks lose their connections. After the first error, the console therefore omits
    errors about lost connections. The console shows the first framework exception about a lost connection only when the
    pipe ends. The console omits this exception after another error, or if the launcher has reported a rank that a
    signal ended.
    """

    def __init__(
        self, source: int, log: IO[bytes], line_prefix: str, shows: Callable[[], bool], show: Callable[[str, str], None]
    ) -> None:
        """Store the streams and callbacks; `run` copies the output.

        Args:
            source: the descriptor to read from, which `run` closes.
            log: the file that gets all bytes, which `run` closes.
            line_prefix: a regular expression for the launcher's prefix of each line of a rank's stderr.
            shows: function that returns whether the console shows lines other than errors and warnings.
            show: function that prints a text and a terminator on the console.
        """
        self.ends = RankEnds()
        self._source = source
        self._log = log
        self._prefix = re.compile(line_prefix.encode())
        self._shows = shows
        self._show = show
        self._line = b""  # the unfinished line, truncated to MAX_SHOWN bytes
        self._is_cut = False
        self._shown_bytes = 0  # number of bytes of the unfinished line that the console shows
        self._messages: set[bytes] = set()
        self._has_error = False
        self._lost_connection = b""  # the first framework exception about a lost connection
        self._read_begun: float | None = None  # time on the clock `time.monotonic` at which the current read began

    def run(self) -> None:
        """Copy the output until the last writer has closed the pipe."""
        with self._log:
            while chunk := self._read():
                self._write_log(chunk)
                for piece in chunk.splitlines(keepends=True):
                    self._take(piece)
                if self._line and not self._has_more():
                    self._show_unfinished_line()
            if self._line:
                self._end_line("\n")
        if self._lost_connection and not self._has_error and not self.ends.describe():
            self._show_message(self._lost_connection, "\n")
        os.close(self._source)

    def idle_seconds(self) -> float:
        """Return for how many seconds `run` has waited for output; 0.0 while it writes output."""
        begun = self._read_begun
        return 0.0 if begun is None else time.monotonic() - begun

    def _read(self) -> bytes:
        self._read_begun = time.monotonic()
        chunk = os.read(self._source, MAX_CHUNK)
        self._read_begun = None
        return chunk

    def _has_more(self) -> bool:
        """Wait up to `PAUSE_SECONDS` seconds; return True as soon as the pipe has more output or ends."""
        readable, _, _ = select.select([self._source], [], [], PAUSE_SECONDS)
        return bool(readable)

    def _write_log(self, chunk: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the job
            self._log.write(chunk)

    def _take(self, piece: bytes) -> None:
        """Append a piece to the unfinished line, which ends if the piece has a terminator."""
        text = piece.rstrip(b"\r\n")
        self._is_cut = self._is_cut or len(self._line) + len(text) > MAX_SHOWN
        self._line = (self._line + text)[:MAX_SHOWN]
        if piece.endswith(b"\n"):
            self._end_line("\n")
        elif piece.endswith(b"\r"):
            self._end_line("\r")

    def _end_line(self, terminator: str) -> None:
        line = self._line
        match = self._prefix.match(line)
        if match:
            line = line[match.end() :]
        self.ends.read(line)
        if _is_message(line):
            self._take_message(line, terminator)
        elif self._is_cut:
            self._show_rest(line, f" [...]{terminator}")
        else:
            self._show_rest(line, terminator)
        self._line = b""
        self._is_cut = False
        self._shown_bytes = 0

    def _take_message(self, line: bytes, terminator: str) -> None:
        """Show a message, but omit or delay an error about a lost connection, as the class docstring describes."""
        lost = LOST_CONNECTION.match(line)
        if lost is None:
            self._show_message(line, terminator)
        elif lost["exception"]:
            self._lost_connection = self._lost_connection or line
        elif not self._has_error:
            self._show_message(line, terminator)

    def _show_message(self, line: bytes, terminator: str) -> None:
        """Show a message, unless the console has shown the same message before."""
        if line not in self._messages:
            self._messages.add(line)
            self._show(line.decode(errors="replace").rstrip(), terminator)
        if line.startswith(b"error: "):
            self._has_error = True

    def _show_unfinished_line(self) -> None:
        match = self._prefix.match(self._line)
        if match is None:
            return
        line = self._line[match.end() :]
        if not _is_message(line):
            self._show_rest(line, "")

    def _show_rest(self, line: bytes, end: str) -> None:
        """Show the rest of the line, if the console shows its beginning already or if ``shows`` returns True."""
        if self._shown_bytes or self._shows():
            self._show(line[self._shown_bytes :].decode(errors="replace"), end)
            self._shown_bytes = len(line)


class RankEnds:
    """A parser that finds, in a launcher's output, the first rank that a signal ended.

    Later ranks may have ended as a result of the first rank's end.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._signals: list[tuple[int, int]] = []  # rank and signal

    def read(self, line: bytes) -> None:
        """Parse a line of the launcher's output."""
        rank = ENDED_RANK.match(line)
        if rank:
            self._rank = int(rank[rank.lastindex or 0])
        end = ENDED_BY.match(line)
        if end and self._rank is not None:
            number = int(end[end.lastindex or 0])
            self._signals.append((self._rank, number % SHELL_SIGNAL))
            self._rank = None

    def describe(self) -> str:
        """Return a text such as "; rank 0 was ended by SIGKILL"; "" if no signal ended a rank.

        SIGTERM does not count, because launchers end the other ranks by SIGTERM.
        """
        for rank, number in self._signals:
            if number != signal.SIGTERM and number in {*signal.Signals}:
                return f"; rank {rank} was ended by {signal.Signals(number).name}"
        return ""


def _is_message(line: bytes) -> bool:
    """Return whether a line begins with ``error:`` or ``warning:`` and a space."""
    return line.startswith((b"error: ", b"warning: "))
