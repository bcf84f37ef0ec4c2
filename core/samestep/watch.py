"""A run, seen live in a terminal.

    python -m samestep.watch [RUN_DIR]

shows, once a second and of the run dir's files alone, so that ssh is enough: loss, speed, time left, each rank's
heartbeat and where it stands, the last checkpoint, restarts, and the last lines of log/launcher.log. It ends by itself
when the run has. Without RUN_DIR it takes the newest run below runs/. No rank imports this.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from samestep import UserError, rundata
from samestep.options import Parser, real
from samestep.rundata import Beat, Curve, State

BLOCKS = "▁▂▃▄▅▆▇█"
SILENT = 5.0  # seconds without a heartbeat after which a rank is stopped or dead, or its disk hangs
GONE = 10.0  # seconds that a run may be without a process: a launcher's own restart
RECENT = 10  # lines of metrics.jsonl that tell the speed
RESULT = ("test_loss", "test_accuracy", "bits_per_byte", "seconds")  # of result.json
LINES = 6  # of log/launcher.log, where there is room
PLAIN = (100, 200)  # columns and lines where there is no terminal

HELP = """\
Ages of heartbeats are by this machine's clock, and told of its own ranks alone; of a rank on another host it is told
how long its file has not changed, as seen from here. Where machines share no disk, each has the files of its own ranks.

Where stdout is no terminal, it prints once, as with --once. Ctrl-C ends it, and not the run.

exit codes: 0 seen, 2 a mistake in the call
"""


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 with one line on stderr."""
    parser = Parser(
        prog="python -m samestep.watch",
        description="A run, seen live in a terminal.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    newest = "(default: the newest below runs/)"
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="?", type=Path, help=f"what a run leaves {newest}")
    often = "between looks (default: %(default)g)"
    parser.add_argument("--every", type=real(0.0, 1e6, above=True), default=1.0, metavar="SECONDS", help=often)
    parser.add_argument("--once", action="store_true", help="print it once, as plain text")
    try:
        options = parser.parse(arguments)
        run_dir: Path | None = options.run_dir or rundata.newest(Path("runs"), "*/*")
        if run_dir is None:
            raise UserError("runs/ holds no run: start one, or give a RUN_DIR")
        rundata.check(run_dir)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    view = View(run_dir)
    if options.once or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        view.look()
        print("\n".join(view.frame(*_size())))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        with _screen():
            while view.look():
                _show(view.frame(*_size()))
                _wait(options.every)
        print("\n".join(view.frame(*_size())))
    return 0


# --- the screen ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, without a cursor; the one before comes back, whatever ends this."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])  # `_wait` takes it
    _put("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        _put("\x1b[?25h\x1b[?1049l")


def _size() -> tuple[int, int]:
    """The terminal's columns and lines; not those of COLUMNS and LINES, which know nothing of a change."""
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(sys.stdout.fileno())
        return size.columns or PLAIN[0], size.lines or PLAIN[1]
    return PLAIN


def _show(lines: Sequence[str]) -> None:
    """Over the lines before, each to its end, so that nothing flickers."""
    _put("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J")


def _put(content: str) -> None:
    sys.stdout.write(content)
    sys.stdout.flush()


def _wait(seconds: float) -> None:
    """So long, or until the terminal has another size."""
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait([signal.SIGWINCH], seconds)
    else:
        time.sleep(seconds)


# --- what is shown ---------------------------------------------------------------------------------------------------


class View:
    """A run dir, as its files tell now."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._measured, self._story = rundata.Measured(run_dir), rundata.Story(run_dir)
        self._beats: dict[int, Beat] = {}
        self._changed: dict[int, tuple[float, float]] = {}  # of a rank's heartbeat: its time, and when that was seen
        self._looks = 0
        self._gone_since: float | None = None
        self._state = State("new", "")

    def look(self) -> bool:
        """Read what the run has written since; returns whether it goes on."""
        self._looks += 1
        self._measured.read()
        self._story.read()
        self._beats, _ = rundata.beats(self.run_dir)
        self._result, _ = rundata.read_object(self.run_dir / "result.json")
        now, moved = time.monotonic(), False
        for rank, beat in self._beats.items():
            if self._changed.get(rank, (None,))[0] != beat.time:
                moved = moved or (rank in self._changed and not _is_here(beat))
                self._changed[rank] = (beat.time, now)
        self._state = rundata.state(self.run_dir, self._measured.step, self._result)
        elsewhere = any(not _is_here(beat) for beat in self._beats.values())
        if self._state.name in ("new", "ended", "running") or moved:
            return self._goes_on(now, moved, elsewhere)
        return False

    def _goes_on(self, now: float, moved: bool, elsewhere: bool) -> bool:
        """Of a run that has left no word of its end: is there anyone?"""
        if moved and self._state.name != "running":
            hosts = sorted({beat.host for beat in self._beats.values() if not _is_here(beat)})
            self._state = State("running", f"running on {', '.join(hosts)}")
        if self._state.name == "running":
            self._gone_since = None
            return True
        waits = elsewhere or self._looks > 1 or self._state.name == "new"  # else it was over when this began
        self._gone_since = now if self._gone_since is None else self._gone_since
        if elsewhere and now - self._gone_since < GONE:
            self._state = State("unknown", "ranks on other hosts: whether they still write shows in some seconds")
        return waits and now - self._gone_since < GONE

    def frame(self, columns: int, lines: int) -> list[str]:
        """The lines to show, each within ``columns``, and no more than ``lines``."""
        above = [*self._head(columns), *self._numbers(columns), *self._kept(), ""]
        tail = [f"  {each.rstrip()}" for each in self._story.tail]
        room = max(3, lines - len(above) - 2 - min(LINES, len(tail)))
        shown = [*above, *self._ranks(room)]
        if tail and (left := lines - len(shown) - 2) > 0:
            shown += ["log/launcher.log", *tail[-min(LINES, left) :]]
        return [_cut(line, columns) for line in shown[: max(1, lines - 1)]]

    def _head(self, columns: int) -> list[str]:
        measured = self._measured
        app = measured.starts[-1].app if measured.starts else str(self._result.get("app", ""))
        return [f"{app or 'a run'}  {self.run_dir}", self._state.text]

    def _numbers(self, columns: int) -> list[str]:
        measured, curves = self._measured, self._measured.curves
        step = max([beat.step for beat in self._beats.values()] + [measured.step or 0])
        stop, shown = self._story.stop, []
        if self._state.name == "finished":
            step = measured.step or step
        if stop:
            share = min(1.0, step / stop)
            width = max(4, min(30, columns - 40))
            bar = "█" * int(share * width) + "░" * (width - int(share * width))
            shown.append(f"step {step:,} of {stop:,}  {bar} {100 * share:.0f}%")
        else:
            shown.append(f"step {step:,}")
        rate = self._seconds_a_step()
        speed = f"{measured.last['samples_per_second']:,.0f} samples/s" if "samples_per_second" in curves else ""
        if rate and speed and stop and self._state.name == "running":
            speed += f"  {1 / rate:,.1f} steps/s  {duration(max(0, stop - step) * rate)} left"
        shown += [speed] if speed else []
        wide = max(8, min(40, columns - 24))
        for name in (name for name in curves if name != "samples_per_second"):
            curve = curves[name]
            shown.append(f"{name.replace('_', ' '):<14} {curve.values[-1]:<10.5g} {sparkline(curve, wide)}")
        if not curves:
            shown.append("nothing is measured yet")
        if self._state.name == "finished":
            told = {name: self._result.get(name) for name in RESULT}
            words = [f"{name.replace('_', ' ')} {value:.5g}" for name, value in told.items() if rundata.number(value)]
            shown += [f"result         {', '.join(words)}"] if words else []
        return shown

    def _seconds_a_step(self) -> float | None:
        """Of the last lines, evaluations and checkpoints included: of their own numbers, so no clock is compared."""
        curve, start = self._measured.curves.get("samples_per_second"), self._measured.starts[-1:]
        batch = rundata.number(start[0].options.get("global_batch_size")) if start else None
        if curve is None or not batch or len(curve.steps) < 2:
            return None
        recent = range(max(1, len(curve.steps) - RECENT), len(curve.steps))
        gone = [(curve.steps[i] - curve.steps[i - 1], curve.values[i]) for i in recent]
        if any(value <= 0 for _, value in gone):
            return None
        return sum(steps * batch / value for steps, value in gone) / sum(steps for steps, _ in gone)

    def _kept(self) -> list[str]:
        saved = rundata.checkpoints(self.run_dir)
        good = [each for each in saved if not each.kept and not each.problem]
        lines = []
        if good:
            age = duration(max(0.0, time.time() - good[-1].time))
            lines.append(f"checkpoint     step {good[-1].step:,}, {age} ago by its file system; {len(good)} kept")
        else:
            lines.append("checkpoint     none yet")
        lines += [f"checkpoint     {each.folder.name} is damaged: {each.problem}" for each in saved if each.problem]
        events = self._story.events()
        restarts = [event for event in events if event.kind == "restart"]
        started = f"started {len(self._story.starts)} times" if len(self._story.starts) > 1 else ""
        if started or restarts:
            told = ", ".join(f"{event.text.partition(',')[0]}" for event in restarts[-3:])
            lines.append(f"restarts       {'; '.join(filter(None, [started, told]))}")
        for event in [each for each in events if each.kind != "restart"][-2:]:
            lines.append(f"{event.kind:<14} {event.when[11:]} {event.text}")
        return lines

    def _ranks(self, most: int) -> list[str]:
        """A line for each rank, the ones that are behind or silent first where there is no room for all."""
        beats = list(self._beats.values())
        starts = self._measured.starts
        size = max((starts[-1].world_size if starts else None) or 0, len(beats))
        if not beats:
            return ["ranks          none has a heartbeat here"]
        if self._state.name not in ("running", "unknown"):
            return [f"ranks          {len(beats)} were here, to step {max(beat.step for beat in beats):,}"]
        first = max(beat.step for beat in beats)
        if len(beats) > most - 1:
            beats.sort(key=lambda beat: (self._age(beat) <= SILENT, beat.step, beat.rank))
        width = max(len(beat.host) for beat in beats)
        lines = [f"ranks          {len(self._beats)} of {size} have heartbeats here"]
        for beat in beats[: max(1, most - 2)]:
            age, behind = self._age(beat), first - beat.step
            seen = f"{age:.0f} s ago" if _is_here(beat) else f"unchanged {age:.0f} s"
            words = [f"{beat.rank:>5}  {beat.host:<{width}}  step {beat.step:,}", seen]
            words += [f"{behind:,} behind"] if behind else []
            words += ["SILENT"] if age > SILENT else []
            lines.append("  ".join([*words, beat.at]))
        if len(beats) > len(lines) - 1:
            lines.append(f"       and {len(beats) - len(lines) + 1} more, not behind these")
        return lines

    def _age(self, beat: Beat) -> float:
        """Seconds since a heartbeat: by this machine's clock where it is its own, else since its file has changed."""
        if _is_here(beat):
            return max(0.0, time.time() - beat.time)
        return time.monotonic() - self._changed[beat.rank][1]


def _is_here(beat: Beat) -> bool:
    return beat.host == socket.gethostname()


def sparkline(curve: Curve, width: int) -> str:
    """A curve in ``width`` characters or fewer: of each stretch of points the mean, from the least to the greatest."""
    count = len(curve.values)
    width = min(width, count)
    parts = [curve.values[i * count // width : (i + 1) * count // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def duration(seconds: float) -> str:
    """In words, to two units: "3 h 12 min"."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole} s" if minutes else f"{whole} s"


def _cut(line: str, columns: int) -> str:
    """What a terminal shows of it in one line; control characters, which it would obey, are not sent."""
    line = "".join(each if each.isprintable() else "�" for each in line.expandtabs(4))
    return line if len(line) <= columns else f"{line[: columns - 1]}…"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
