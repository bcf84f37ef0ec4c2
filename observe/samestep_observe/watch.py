"""Show a run live in a terminal.

    samestep watch [RUN_DIR]
    samestep watch --pid RANK [RUN_DIR]

Watch shows loss, speed, time left, each rank's heartbeat and location, the last
checkpoint, restarts, and the last lines of log/launcher.log. By default, it
updates the output every second. It reads only the run dir's files, so ssh is
enough. It exits when the run ends.

Watch computes the age of a heartbeat by this machine's clock. For a rank on
another host, the age is the time since watch last read a new heartbeat. Without
a shared disk, watch shows only the ranks of this machine.

If stdout is not a terminal, watch prints once, as with --once. Ctrl-C ends
watch, not the run.

With --pid, watch only prints the process ID of a rank, for kill and debuggers:
kill -KILL $(samestep watch --pid 1)

Exit codes: 0 shown, 2 a mistake in the call.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from samestep import ConfigError
from samestep.options import Options, bounded_float, bounded_int
from samestep.recovery.hang_diagnosis import format_ranges
from samestep.untrusted import printable

from samestep_observe import run_reader
from samestep_observe.command import new_parser, run_command
from samestep_observe.run_reader import RESTART, Curve, Heartbeat, State, finite_number

BLOCKS = "▁▂▃▄▅▆▇█"
SILENT_SECONDS = 5.0  # age in seconds above which a heartbeat means that the rank is stopped or dead, or its disk hangs
GONE_SECONDS = 10.0  # maximum time in seconds without a process while the launcher restarts a run
MAX_SECONDS = 1e9  # maximum plausible time of a step in seconds; a longer time means damaged lines
SPEED_LINES = 10  # number of the last lines of metrics.jsonl from which the speed is computed
RESULT_FIELDS = ("test_loss", "test_accuracy", "bits_per_byte", "seconds")
TAIL_LINES = 6  # maximum number of shown lines of log/launcher.log
DEFAULT_SIZE = (100, 200)  # columns and lines of the output without a terminal
COLORS = {"running": 36, "finished": 32, "stopped": 33, "failed": 31, "ended": 31}  # ANSI color code of each state


def main(arguments: Sequence[str]) -> int:
    """Run ``samestep watch`` and return its exit code."""
    parser = new_parser("watch", __doc__)
    default = "(default: the newest below runs/)"
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="?", type=Path, help=f"the folder of a run {default}")
    every = "seconds between updates (default: %(default)g)"
    parser.add_argument("--every", type=bounded_float(0.0, 1e6, above=True), default=1.0, metavar="SECONDS", help=every)
    parser.add_argument("--once", action="store_true", help="print once, as plain text")
    pid = "print only the process ID of this rank, which must run on this machine"
    parser.add_argument("--pid", type=bounded_int(0), metavar="RANK", help=pid)
    return run_command(parser, arguments, _run)


def _run(options: Options) -> None:
    run_dir: Path | None = options.run_dir or run_reader.newest(Path("runs"), "*/*")
    if run_dir is None:
        raise ConfigError("runs/ holds no run: start one, or give a RUN_DIR")
    run_reader.check(run_dir)
    if options.pid is not None:
        print(_process_of(run_dir, options.pid))
        return
    view = View(run_dir)
    if options.once or not _can_redraw():
        view.update()
        print("\n".join(view.frame(*_size())))
        return
    with contextlib.suppress(KeyboardInterrupt), _alternate_screen():
        while view.update():
            lines = view.colored_frame(*_size())
            # Overwrite the previous lines, because clearing the screen would flicker.
            _write("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J")
            _wait(options.every)
    print("\n".join(view.colored_frame(*_size())))


def _process_of(run_dir: Path, rank: int) -> int:
    """Return the process ID of a rank.

    Raises:
        ConfigError: the rank does not run on this machine.
    """
    if run_reader.is_held(run_dir) is False:
        raise ConfigError(f"{run_dir}: its job has ended, and no rank has a process: give the RUN_DIR of a running job")
    beats, _ = run_reader.heartbeats(run_dir)
    beat = beats.get(rank)
    if beat is None:
        known = format_ranges(beats) or "none"
        raise ConfigError(f"--pid {rank}: {run_dir / 'log'} has no heartbeat of this rank: give one of these: {known}")
    if not _is_here(beat):
        raise ConfigError(f"--pid {rank}: this rank runs on {beat.host}: run the command there")
    if not _exists(beat.pid):
        raise ConfigError(f"--pid {rank}: process {beat.pid} has ended: wait until the job has restarted")
    return beat.pid


def _exists(pid: int) -> bool:
    """Return whether this user may send a signal to a process. Processes 0 and 1 are never ranks."""
    if not 1 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _can_redraw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


# --- the terminal ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alternate_screen() -> Iterator[None]:
    """Show the terminal's alternate screen without a cursor; restore the screen also after TERM or HUP."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])  # `_wait` receives the signal
    _write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        _write("\x1b[?25h\x1b[?1049l")


def _size() -> tuple[int, int]:
    """Return the terminal's current columns and lines; DEFAULT_SIZE without a terminal.

    The function ignores the variables COLUMNS and LINES, because they may be out of date.
    """
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(sys.stdout.fileno())
        return size.columns or DEFAULT_SIZE[0], size.lines or DEFAULT_SIZE[1]
    return DEFAULT_SIZE


def _write(content: str) -> None:
    print(content, end="", flush=True)


def _wait(seconds: float) -> None:
    """Wait for ``seconds``, or until the terminal's size changes."""
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait([signal.SIGWINCH], seconds)
    else:
        time.sleep(seconds)


# --- the content -----------------------------------------------------------------------------------------------------


class View:
    """The current state of a run dir, as lines for a terminal."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._metrics = run_reader.MetricsReader(run_dir)
        self._log = run_reader.EventLog(run_dir)
        self._result: dict[str, Any] = {}
        self._heartbeats: dict[int, Heartbeat] = {}
        # The time in each rank's last heartbeat, and the monotonic time at which this object first read the heartbeat.
        self._changed: dict[int, tuple[float, float]] = {}
        self._updates = 0
        self._gone_since: float | None = None
        self._state = State("new", "")

    def update(self) -> bool:
        """Read the run's new data; return whether the run may still write."""
        self._updates += 1
        self._metrics.read()
        self._log.read()
        self._heartbeats, _ = run_reader.heartbeats(self.run_dir)
        self._result, _ = run_reader.read_object(self.run_dir / "result.json")
        now = time.monotonic()
        active_hosts = self._note_changes(now)
        self._state = run_reader.state(self.run_dir, self._metrics.step, self._result)
        if self._state.name != "running" and active_hosts:
            self._state = State("running", f"running on {', '.join(sorted(active_hosts))}")
        return self._continues(now)

    def _note_changes(self, now: float) -> set[str]:
        """Record the heartbeats that changed; return the other hosts on which a known rank's heartbeat changed."""
        active_hosts = set()
        for rank, beat in self._heartbeats.items():
            last_time, _ = self._changed.get(rank, (None, 0.0))
            if beat.time == last_time:
                continue
            self._changed[rank] = (beat.time, now)
            if last_time is not None and not _is_here(beat):
                active_hosts.add(beat.host)
        return active_hosts

    def _continues(self, now: float) -> bool:
        """Return whether the run may still write.

        A killed run leaves no result. Such a run counts as ended after GONE_SECONDS seconds.
        """
        if self._state.name == "running":
            self._gone_since = None
            return True
        if self._state.name not in ("new", "ended"):
            return False
        if self._gone_since is None:
            self._gone_since = now
        if now - self._gone_since >= GONE_SECONDS:
            return False
        is_elsewhere = not all(map(_is_here, self._heartbeats.values()))
        if is_elsewhere:
            self._state = State("unknown", "ranks on other hosts: seconds will show whether they still write")
            return True
        ended_before_watch = self._state.name == "ended" and self._updates == 1
        return not ended_before_watch

    def colored_frame(self, columns: int, lines: int) -> list[str]:
        """Return the frame, with the state in color unless NO_COLOR is set."""
        first, *rest = self.frame(columns, lines)
        color = COLORS.get(self._state.name)
        if color and not os.environ.get("NO_COLOR"):
            first = f"\x1b[{color}m{first}\x1b[0m"
        return [first, *rest]

    def frame(self, columns: int, lines: int) -> list[str]:
        """Return at least one and at most ``lines`` - 1 lines, each of at most ``columns`` characters."""
        app = run_reader.app_of(self._metrics.header, self._result)
        name = f"{app}  {self.run_dir}" if app else str(self.run_dir)  # before the first step, no file has the name
        shown = [self._state.text, name]
        shown += self._progress(columns)
        shown += self._curves(columns)
        shown += self._checkpoints()
        shown += self._events()
        shown.append("")
        tail = [f"  {line.rstrip()}" for line in self._log.tail[-TAIL_LINES:]]
        shown += self._ranks(max(3, lines - len(shown) - 2 - len(tail)))
        room = lines - len(shown) - 2
        if tail and room > 0:
            shown += ["log/launcher.log", *tail[-room:]]
        return [_cut(line, columns) for line in shown[: max(1, lines - 1)]]

    def _step(self) -> int:
        """Return the last step, from the result of a finished run, or from metrics and heartbeats."""
        recorded = self._metrics.step or 0
        newest = max([recorded, *(beat.step for beat in self._heartbeats.values())])
        if self._state.name != "finished":
            return newest
        return run_reader.non_negative_int(self._result.get("steps")) or recorded or newest

    def _progress(self, columns: int) -> Iterator[str]:
        step = self._step()
        last_step = self._log.last_step
        text = f"step {step:,}"
        if last_step:
            share = min(1.0, step / last_step)
            text += f" of {last_step:,}  {_bar(share, max(4, min(30, columns - 40)))} {100 * share:.0f}%"
        yield text
        rates = self._metrics.curves.get("samples_per_second")
        if rates:
            yield f"{rates.values[-1]:,.0f} samples/s{self._time_left(step)}"

    def _time_left(self, step: int) -> str:
        if self._state.name != "running" or not self._log.last_step:
            return ""
        seconds = self._seconds_per_step()
        if seconds is None:
            return ""
        remaining = max(0, self._log.last_step - step) * seconds
        return f"  {1 / seconds:,.1f} steps/s  {duration(remaining)} left"

    def _curves(self, columns: int) -> Iterator[str]:
        width = max(8, min(40, columns - 24))
        for name, curve in self._metrics.curves.items():
            if name != "samples_per_second":
                yield f"{name.replace('_', ' '):<14} {curve.values[-1]:<10.5g} {sparkline(curve, width)}"
        if not self._metrics.curves:
            yield self._waiting_for()
        if self._state.name == "finished":
            yield from self._result_line()

    def _result_line(self) -> Iterator[str]:
        texts = []
        for name in RESULT_FIELDS:
            value = finite_number(self._result.get(name))
            if value:
                texts.append(f"{name.replace('_', ' ')} {value:.5g}")
        if texts:
            yield f"result         {', '.join(texts)}"

    def _waiting_for(self) -> str:
        """Return a text about the wait for the first measurement."""
        if not self._heartbeats:
            return "no rank has started yet"
        has_stepped = any(beat.step > 0 for beat in self._heartbeats.values())
        return "waiting for the first log line" if has_stepped else "waiting for the first step"

    def _seconds_per_step(self) -> float | None:
        """Return the mean time per step in seconds, from the last SPEED_LINES lines at most; None if unknown.

        The time includes evaluations and checkpoints.
        """
        curve = self._metrics.curves.get("samples_per_second", Curve())
        options = run_reader.get_object(self._metrics.header, "options")
        batch_size = finite_number(options.get("global_batch_size"))
        steps = np.diff(np.array(curve.steps)[-SPEED_LINES - 1 :])
        rates = np.array(curve.values)[len(curve.values) - len(steps) :]  # samples/s of these steps
        if not batch_size or not len(steps):
            return None
        if (rates <= 0).any():
            return None
        with np.errstate(all="ignore"):
            durations = steps * batch_size / rates
            seconds = float(durations.sum() / steps.sum())
        if not 0 < seconds < MAX_SECONDS:
            return None
        return seconds

    def _checkpoints(self) -> Iterator[str]:
        saved = run_reader.checkpoints(self.run_dir)
        good = [each for each in saved if each.is_good]
        if good:
            newest = good[-1]
            age = duration(max(0.0, time.time() - newest.time))
            yield f"checkpoint     step {newest.step:,}, {age} ago by its file system; {len(good)} kept"
        else:
            yield "checkpoint     none yet"
        for each in saved:
            if each.problem:
                yield f"checkpoint     {each.folder.name} is damaged: {each.problem}"

    def _events(self) -> Iterator[str]:
        events = self._log.events()
        starts = [event.text.partition(",")[0] for event in events if event.kind == RESTART]
        launch_count = len(self._log.launches)
        texts = []
        if launch_count > 1:
            texts.append(f"started {launch_count} times")
        if starts:
            texts.append(", ".join(starts[-3:]))
        if texts:
            yield f"restarts       {'; '.join(texts)}"
        others = [event for event in events if event.kind != RESTART]
        for event in others[-2:]:
            yield f"{event.kind:<14} {event.when[11:]} {event.text}"

    def _ranks(self, max_lines: int) -> Iterator[str]:
        """Yield a summary line about the ranks, followed by one line per rank if the run may still write."""
        beats = list(self._heartbeats.values())
        world_size = max(run_reader.world_size_of(self._metrics.header, self._result) or 0, len(beats))
        if self._state.name == "finished":
            if world_size:
                yield f"ranks          {world_size} ended"
        elif not beats:
            yield "ranks          none has a heartbeat here"
        elif self._state.name not in ("running", "unknown"):
            last_step = max(beat.step for beat in beats)
            yield f"ranks          {len(beats)} ended; last heartbeat at step {last_step:,}"
        else:
            yield f"ranks          {len(beats)} of {world_size} have heartbeats here"
            yield from self._rank_lines(beats, max_lines - 1)

    def _rank_lines(self, beats: list[Heartbeat], max_lines: int) -> Iterator[str]:
        """Yield one line per rank. If ``max_lines`` is too small, prefer silent ranks, and then ranks at low steps."""
        shown = beats
        if len(beats) > max_lines:
            shown = sorted(beats, key=lambda beat: (self._age(beat) <= SILENT_SECONDS, beat.step, beat.rank))
            shown = shown[: max(1, max_lines - 1)]
        last_step = max(beat.step for beat in beats)
        host_width = max(len(beat.host) for beat in beats)
        for beat in shown:
            yield self._rank_line(beat, last_step, host_width)
        hidden_count = len(beats) - len(shown)
        if hidden_count:
            yield f"       and {hidden_count} more, not behind these"

    def _rank_line(self, beat: Heartbeat, last_step: int, host_width: int) -> str:
        age = self._age(beat)
        texts = [f"{beat.rank:>5}", f"{beat.host:<{host_width}}", f"step {beat.step:,}"]
        texts.append(f"{age:.0f} s ago" if _is_here(beat) else f"unchanged {age:.0f} s")
        if beat.step < last_step:
            texts.append(f"{last_step - beat.step:,} behind")
        if age > SILENT_SECONDS:
            texts.append("SILENT")
        if beat.location:
            texts.append(beat.location)
        return "  ".join(texts)

    def _age(self, beat: Heartbeat) -> float:
        """Return the seconds since a heartbeat, or since its first reading if the rank runs on another host."""
        if _is_here(beat):
            return max(0.0, time.time() - beat.time)
        _, changed = self._changed[beat.rank]
        return time.monotonic() - changed


def _is_here(beat: Heartbeat) -> bool:
    return beat.host == socket.gethostname()


def _bar(share: float, width: int) -> str:
    full = int(share * width)
    return "█" * full + "░" * (width - full)


def sparkline(curve: Curve, width: int) -> str:
    """Return a curve as at most ``width`` characters. Each character shows a section's mean, relative to all means."""
    values = np.array(curve.values)
    count = len(values)
    sections = min(width, count)
    first = np.arange(sections) * count // sections  # index of each section's first value
    with np.errstate(all="ignore"):  # sums may overflow
        means = np.add.reduceat(values, first) / np.diff(first, append=count)
        shares = (means - means.min()) / (np.ptp(means) or 1.0)
        levels = (len(BLOCKS) - 1) * shares
    return "".join(BLOCKS[level] for level in np.rint(np.nan_to_num(levels)).astype(int))


def duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as "3 h 12 min"."""
    rest = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def _cut(line: str, columns: int) -> str:
    """Truncate a line to the terminal's width, and escape control characters, which would change the terminal."""
    line = printable(line.expandtabs(4))
    if len(line) <= columns:
        return line
    return f"{line[: columns - 1]}…"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
