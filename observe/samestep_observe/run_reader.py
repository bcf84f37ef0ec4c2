"""Read a run dir, even while a run writes to it, and even if files are damaged, half-written or missing.

An unreadable file becomes a line of ``problems``, never an exception, so that a caller can show the other files.
This module writes nothing and takes no lock.
"""

from __future__ import annotations

import calendar
import contextlib
import fcntl
import math
import os
import re
import signal
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from samestep import ConfigError, checkpoint, events, step_losses, untrusted
from samestep.rundir import LAUNCHER_BYTE, WRITER_BYTE
from samestep.untrusted import open_to_read

RESULT_FILES = ("metrics.jsonl", "result.json", "log", ".lock")  # files by which `newest` finds run dirs
RUN_FILES = (*RESULT_FILES, "evaluation.json", "checkpoints")
NOT_MEASURED = {"step", "epoch", "samples_seen", "test_examples"}  # numbers of a metrics line that have no curve
MAX_TIME = 2**36  # seconds since 1970; a later time counts as damaged
BLOCK = 2**20  # maximum number of bytes of one read
MAX_BLOCKS = 2**11  # maximum number of blocks that one call reads
MAX_CURVES = 500  # maximum number of curves of a run
MAX_DEPTH = 50  # JSON with this number of nested levels, or more, counts as damaged
MAX_HOST = 255  # maximum number of characters of a host's name

# Kinds of events in addition to `events.KINDS`: a START of events.jsonl, and a straggler of metrics.jsonl.
RESTART = "restart"
STRAGGLER = "straggler"
# Pattern of a line of launcher.log that begins with a time. --log-format full adds a level before the time, and a place
# in the code after the time.
_TIMED_LINE = re.compile(r"(?:[A-Z]+\|)?(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\|[^|]*\|\d+\|)? (.*)", re.DOTALL)
RankFiles = tuple[list[dict[str, Any]], list[str]]  # objects of ranks' files, and problems of unreadable files
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


# --- values ----------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a number, including Infinity and NaN, but not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite_number(value: Any) -> float | None:
    """Return a finite JSON number as a float; None for any other value."""
    if not _is_number(value):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def non_negative_int(value: Any) -> int | None:
    """Return a JSON integer from 0 to 2**63 - 1; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if not 0 <= value < 2**63:
        return None
    return value


def count_of(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 rank" or "1,000 ranks"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def get_object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the JSON object ``values[name]``; {} if the value is missing or not an object."""
    value = values.get(name)
    if isinstance(value, dict):
        return value
    return {}


def parse(text: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; return None for any other text, and for MAX_DEPTH or more nested levels."""
    try:
        values = untrusted.parse_object(text)
    except ValueError:
        return None
    brackets = text.count(b"[") + text.count(b"{")
    if brackets >= MAX_DEPTH and not _is_flat(values, MAX_DEPTH):
        return None
    return values


def _is_flat(value: Any, depth: int) -> bool:
    """Return whether a JSON value has fewer than ``depth`` nested levels."""
    if depth <= 0:
        return False
    if isinstance(value, dict):
        return all(_is_flat(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return all(_is_flat(each, depth - 1) for each in value)
    return True


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and the file's problem, such as "missing" or "empty"; "" for no problem."""
    try:
        with open_to_read(path) as file:
            content = file.read(BLOCK + 1)
    except OSError as error:
        return {}, _reason(error)
    if not content.strip():
        return {}, "empty"
    values = parse(content)
    if values is None:
        return {}, "damaged: not a JSON object"
    return values, ""


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    return error.strerror or str(error)


def _problem(path: Path) -> str:
    """Return the reason why a file is unreadable or empty; "" if it has content."""
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return _reason(error)
    return "" if size else "empty"


class FileTail:
    """Read new lines of a growing file.

    If the file is replaced (a resume replaces metrics.jsonl), reading restarts at the first line of the new file.
    """

    def __init__(self, path: Path, block: int = BLOCK, keep_open: bool = False) -> None:
        """Store the settings; `new_lines` reads the file.

        Args:
            path: path of the file, which may be missing.
            block: bytes of one read.
            keep_open: whether to keep the file open, so that no new file can have its inode.
        """
        self.path = path
        self.problem = "missing"  # reason why nothing can be read; "" if the file can be read
        self.rest = b""  # the unfinished last line
        self.at_end = True
        self._block = block
        self._keep_open = keep_open
        self._opened: Any = None
        self._identity = (0, 0)  # device and inode
        self._position = 0

    def new_lines(self, on_new_file: Callable[[], object] = lambda: None, blocks: int = MAX_BLOCKS) -> Iterator[bytes]:
        """Yield the lines that were added since the last call, from at most ``blocks`` blocks.

        If the file was replaced, the method calls ``on_new_file`` and starts at the beginning. A line that is longer
        than BLOCK may lose its beginning; no run writes such a line.
        """
        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                self._restart_if_replaced(file, status, on_new_file)
                self.problem = "" if status.st_size else "empty"
                file.seek(self._position)
                for _ in range(blocks):
                    yield from self._next_block(file)
                    if self.at_end:
                        break
        except OSError as error:
            self.problem = _reason(error)

    def _restart_if_replaced(self, file: IO[bytes], status: os.stat_result, on_new_file: Callable[[], object]) -> None:
        identity = (status.st_dev, status.st_ino)
        if identity == self._identity and status.st_size >= self._position:
            return
        on_new_file()
        self._identity = identity
        self._position = 0
        self.rest = b""
        self._opened = None
        if self._keep_open:
            self._opened = os.fdopen(os.dup(file.fileno()), "rb")

    def _next_block(self, file: IO[bytes]) -> list[bytes]:
        """Return the lines that end in the next block."""
        content = file.read(self._block)
        self._position += len(content)
        self.at_end = len(content) < self._block
        *lines, self.rest = (self.rest + content).split(b"\n")
        if len(self.rest) > BLOCK:
            self.rest = b""
        return lines


# --- metrics ---------------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """The values of one metric after each number of completed updates in ``steps``, which is in ascending order."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Start(NamedTuple):
    """A start of the run: the ``step`` from which the start continued, and the start's header in metrics.jsonl."""

    step: int
    header: dict[str, Any]


def app_of(header: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the app's name from the header of metrics.jsonl, or else from the result; "" if both lack it."""
    for name in (header.get("app"), result.get("app")):
        if isinstance(name, str) and name:
            return name
    return ""


def world_size_of(header: Mapping[str, Any], result: Mapping[str, Any]) -> int | None:
    """Return the number of ranks from the header of metrics.jsonl, or else from the result; None if both lack it."""
    for values in (get_object(header, "world"), result):
        world_size = non_negative_int(values.get("world_size"))
        if world_size:
            return world_size
    return None


class MetricsReader:
    """A reader of a growing metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = FileTail(run_dir / "metrics.jsonl")
        self._reset()

    def _reset(self) -> None:
        self.starts: list[Start] = []
        self.curves: dict[str, Curve] = {}
        self.stragglers: list[tuple[int, dict[str, Any]]] = []  # step and record of each straggler
        self.step: int | None = None  # the last step
        self._line_count = 0
        self._damaged_count = 0
        self._first_damaged = 0  # number of the first damaged line, from 1; 0 for none
        self._not_finite_count = 0
        self._surplus_count = 0

    def read(self) -> None:
        """Read the lines that were added since the last call."""
        for line in self._tail.new_lines(self._reset):
            self._line_count += 1
            if self._add(parse(line)):
                continue
            self._damaged_count += 1
            if not self._first_damaged:
                self._first_damaged = self._line_count

    @property
    def header(self) -> dict[str, Any]:
        """Return the header of the last start; {} if the file has no header."""
        if not self.starts:
            return {}
        return self.starts[-1].header

    def problems(self) -> list[str]:
        """Return a line for each problem of the file."""
        problems = [self._tail.problem] if self._tail.problem else self._content_problems()
        return [f"metrics.jsonl: {problem}" for problem in problems]

    def _content_problems(self) -> list[str]:
        problems = []
        if self._tail.rest:
            problems.append("its last line is cut off")
        if self._damaged_count:
            problems.append(
                f"damaged: {self._damaged_count} lines left out, from line {self._first_damaged} on: "
                "not a run's, or not in the order of steps"
            )
        if self._not_finite_count:
            problems.append(f"{self._not_finite_count} values left out: not finite numbers")
        if self._surplus_count:
            problems.append(f"{self._surplus_count} values left out: of more than {MAX_CURVES} measurements")
        if not self.starts:
            problems.append("its header is missing: options, versions and ranks are unknown")
        if self.step is None:
            problems.append("no step is recorded")
        return problems

    def _add(self, line: dict[str, Any] | None) -> bool:
        """Add a line; return whether the line is valid and in order."""
        if line is None:
            return False
        if "step" in line:
            return self._add_step(line)
        return self._add_start(line)

    def _add_start(self, line: dict[str, Any]) -> bool:
        """Add a start from a header or from ``{"resumed": header}``; return whether the line is one of these."""
        resumed = get_object(line, "resumed")
        header = resumed or line
        step = non_negative_int(resumed.get("step")) if resumed else 0
        is_header = not header.keys().isdisjoint({"app", "options", "world"})
        if step is None or not is_header:
            return False
        self.starts.append(Start(step, header))
        return True

    def _add_step(self, line: dict[str, Any]) -> bool:
        step = non_negative_int(line["step"])
        if step is None:
            return False
        if self.step is not None and step <= self.step:
            return False
        self.step = step
        for name, value in line.items():
            if name not in NOT_MEASURED and _is_number(value):
                self._add_value(step, name, value)
        stragglers = line.get("stragglers")
        if isinstance(stragglers, list):
            self.stragglers += [(step, straggler) for straggler in stragglers if isinstance(straggler, dict)]
        return True

    def _add_value(self, step: int, name: str, value: float) -> None:
        number = finite_number(value)
        if number is None:
            self._not_finite_count += 1
            return
        if name not in self.curves and len(self.curves) >= MAX_CURVES:
            self._surplus_count += 1
            return
        curve = self.curves.setdefault(name, Curve())
        curve.steps.append(step)
        curve.values.append(number)


def logged_losses(metrics: MetricsReader) -> dict[int, float]:
    """Return the losses of metrics.jsonl by step."""
    curve = metrics.curves.get("loss", Curve())
    return dict(zip(curve.steps, curve.values))


def read_losses(run_dir: Path, metrics: MetricsReader) -> dict[int, float]:
    """Return the loss of each recorded step, from log/losses.bin or else from metrics.jsonl, in the order of steps.

    Args:
        run_dir: the run's folder.
        metrics: reader of the run's metrics.jsonl.

    Raises:
        OSError: log/losses.bin cannot be read.
    """
    found = logged_losses(metrics)
    records = step_losses.read(run_dir)
    count = step_losses.count_until(records, 2**62)
    found.update(zip(records["step"][:count].tolist(), records["loss"][:count].tolist()))
    return dict(sorted(found.items()))


# --- checkpoints and ranks' files ------------------------------------------------------------------------------------


class SavedCheckpoint(NamedTuple):
    """A checkpoint's folder. ``quarantined`` is "unequal" or "damaged" if a run renamed the folder; otherwise ""."""

    folder: Path
    step: int
    quarantined: str
    size: int  # total size of the files, in bytes
    time: float  # time of the last change, in seconds since 1970 by the file system's clock
    problem: str

    @property
    def is_good(self) -> bool:
        """Return whether the manifest and the file sizes are valid, so that a resume may read the checkpoint."""
        return not self.quarantined and not self.problem


def checkpoints(run_dir: Path) -> list[SavedCheckpoint]:
    """Return the complete and the quarantined checkpoints, oldest first.

    The function checks only manifests and file sizes.
    """
    saved = []
    with contextlib.suppress(OSError):
        for folder in (run_dir / "checkpoints").iterdir():
            match = re.fullmatch(r"(?:(unequal|damaged)-)?step-(\d{8,18})", folder.name)
            if match:
                saved.append(_saved_checkpoint(folder, quarantined=match[1] or "", step=int(match[2])))
    return sorted(saved, key=lambda each: (each.step, each.quarantined))


def _saved_checkpoint(folder: Path, quarantined: str, step: int) -> SavedCheckpoint:
    problem = ""
    if not quarantined:
        problem = _checkpoint_problem(folder)
    changed = 0.0
    size = 0
    with contextlib.suppress(OSError):  # the run may delete the folder at this moment
        changed = folder.stat().st_mtime
        size = sum(path.lstat().st_size for path in folder.iterdir())
    return SavedCheckpoint(folder, step, quarantined=quarantined, size=size, time=changed, problem=problem)


def _checkpoint_problem(folder: Path) -> str:
    try:
        open_to_read(folder / "manifest.json").close()
        checkpoint.read(folder, verify=False)
    except OSError as error:
        return f"manifest.json: {_reason(error)}"
    except checkpoint.CorruptCheckpoint as error:
        return untrusted.shown(error, limit=1000)
    return ""


class Heartbeat(NamedTuple):
    """A rank's last heartbeat.

    Attributes:
        time: seconds since 1970 by the clock of the rank's host.
        location: line of the program in which the main thread was; "" if unknown.
    """

    rank: int
    host: str
    pid: int
    job: str
    step: int
    time: float
    location: str


def heartbeats(run_dir: Path) -> tuple[dict[int, Heartbeat], list[str]]:
    """Return the heartbeats of the newest start, by rank, and the problems of unreadable heartbeats.

    The newest start is the start of rank 0's heartbeat, or of the last heartbeat if rank 0 has none. An earlier start
    may have left heartbeats of more ranks.
    """
    files, problems = _read_rank_files(run_dir, "alive-*", required=("rank", "pid", "step", "time"), what="a heartbeat")
    beats = {values["rank"]: _heartbeat(values) for values in files}
    if not beats:
        return {}, problems
    newest_beat = beats.get(0)
    if newest_beat is None:
        newest_beat = max(beats.values(), key=lambda beat: beat.time)
    same_start = {rank: beat for rank, beat in sorted(beats.items()) if beat.job == newest_beat.job}
    return same_start, problems


def _heartbeat(values: Mapping[str, Any]) -> Heartbeat:
    host = str(values.get("host", ""))
    return Heartbeat(
        rank=values["rank"],
        host=host[:MAX_HOST],
        pid=values["pid"],
        job=str(values.get("job", "")),
        step=values["step"],
        time=values["time"],
        location=format_location(values.get("at")),
    )


def format_location(at: Any) -> str:
    """Return a heartbeat's location as a text such as "train.py:105 in train"; "" for an invalid location."""
    if not isinstance(at, list) or len(at) < 3:
        return ""
    path, line, function = at[:3]
    if non_negative_int(line) is None:
        return ""
    return f"{os.path.basename(str(path))}:{line} in {function}"


def hangs(run_dir: Path) -> RankFiles:
    """Return the states that ranks recorded at a hang, in the order of ranks, and the problems of unreadable files."""
    files, problems = _read_rank_files(
        run_dir, "hang-*.json", required=("rank", "step"), what="a rank's state at a hang"
    )
    return sorted(files, key=lambda values: int(values["rank"])), problems


def _read_rank_files(run_dir: Path, pattern: str, required: Sequence[str], what: str) -> RankFiles:
    files = []
    problems = []
    for path in sorted((run_dir / "log").glob(pattern)):
        values, problem = read_object(path)
        if problem:
            problems.append(f"log/{path.name}: {problem}")
        elif not all(_has_number(values, name) for name in required):
            problems.append(f"log/{path.name}: damaged: not {what}")
        else:
            files.append(values)
    return files, problems


def _has_number(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if name == "time":
        return finite_number(value) is not None
    return non_negative_int(value) is not None


# --- events ----------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An event of a run.

    Attributes:
        kind: RESTART, STRAGGLER or one of `samestep.events.KINDS`.
        step: number of completed updates; None if unknown.
        when: local time as "2026-01-31 12:00:00"; "" if unknown.
        text: one line for the user.
        file: path of the source, relative to the run dir.
    """

    kind: str
    step: int | None
    when: str
    text: str
    file: str


class EventLog:
    """A reader of growing log files: the events in events.jsonl, and the start times and last lines of launcher.log."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "log"
        self.last_step: int | None = None  # the step at which training ends
        self.launches: list[str] = []  # times at which the launcher was started
        self.tail: list[str] = []  # the last lines of launcher.log
        self._launcher = FileTail(self._folder / "launcher.log")
        self._recorded = FileTail(self._folder / events.FILE_NAME)
        self._events: list[Event] = []
        self._damaged_count = 0
        self._is_blank = False  # whether the last line of launcher.log is blank

    def read(self) -> None:
        """Read the lines that were added since the last call."""
        for line in self._launcher.new_lines(self._reset_launcher):
            self._add_launcher_line(line.decode(errors="replace"))
        for line in self._recorded.new_lines(self._reset_recorded):
            self._add_recorded(parse(line) or {})

    def problems(self) -> list[str]:
        """Return a line for each problem of the log files."""
        problems = {path.name: _problem(path) for path in self._folder.glob("rank-*.log")}
        problems = problems or {"rank-0.log": "missing"}
        problems["launcher.log"] = self._launcher.problem
        if self._recorded.problem != "missing":  # a run without events has no such file
            problems[events.FILE_NAME] = self._recorded.problem or self._damage()
        return [f"log/{name}: {problem}" for name, problem in sorted(problems.items()) if problem]

    def _damage(self) -> str:
        if not self._damaged_count:
            return ""
        return f"damaged: {self._damaged_count} lines left out: not events"

    def events(self) -> list[Event]:
        """Return the events in the order of their records, without the first start unless it was a resume.

        An event that several ranks report appears once for each start.
        """
        found = []
        known: set[str] = set()  # texts since the newest start
        for event in self._events:
            text = event.text
            if event.kind == RESTART:
                text = f"{event.when} {event.text}"
                if text not in known:
                    known.clear()
            if text not in known:
                known.add(text)
                found.append(event)
        first_start = next((event for event in found if event.kind == RESTART), None)
        return [event for event in found if event is not first_start or event.step]

    def _reset_launcher(self) -> None:
        self.launches = []
        self.tail = []
        self._is_blank = False

    def _reset_recorded(self) -> None:
        self._damaged_count = 0
        self._events = []

    def _add_launcher_line(self, line: str) -> None:
        timed = _TIMED_LINE.match(line)
        if self._is_blank and timed:
            self.launches.append(f"{timed[1]} {timed[2]}")
        self._is_blank = not line.strip()
        if not self._is_blank:
            self.tail = [*self.tail[-19:], line]

    def _add_recorded(self, values: Mapping[str, Any]) -> None:
        kind = values.get("kind")
        seconds = finite_number(values.get("time"))
        if kind not in events.KINDS or seconds is None:
            self._damaged_count += 1
            return
        if not 0 <= seconds < MAX_TIME:
            self._damaged_count += 1
            return
        when = local_time(seconds)
        step = non_negative_int(values.get("step"))
        if kind == events.START:
            self.last_step = non_negative_int(values.get("last_step"))
            ranks = non_negative_int(values.get("ranks"))
            self._add_start(when, step or 0, ranks or 0)
        else:
            self._add_event(kind, step, when=when, text=str(values.get("text", kind)))

    def _add_start(self, when: str, step: int, ranks: int) -> None:
        text = f"began, {ranks} ranks"
        if step:
            text = f"resumed at step {step}, {count_of(ranks, 'rank')}"
        self._add_event(RESTART, step, when=when, text=text)

    def _add_event(self, kind: str, step: int | None, when: str, text: str) -> None:
        text = text.removeprefix("error: ").removeprefix("warning: ")
        self._events.append(Event(kind, step, when=when, text=text, file=f"log/{events.FILE_NAME}"))


# --- the state of a run ----------------------------------------------------------------------------------------------


def is_held(run_dir: Path) -> bool | None:
    """Return whether a process holds the run dir's lock, without taking the lock; None if unknown.

    The function detects the lock of another machine only on a file system with network locks.
    """
    try:
        with open_to_read(run_dir / ".lock") as file:
            return any(_is_byte_held(file, byte) for byte in (LAUNCHER_BYTE, WRITER_BYTE))
    except (OSError, struct.error):
        return None


def _is_byte_held(file: IO[bytes], byte: int) -> bool:
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer = fcntl.fcntl(file, fcntl.F_GETLK, query)
    kind, *_ = struct.unpack(_FLOCK, answer)
    return bool(kind != fcntl.F_UNLCK)


class State(NamedTuple):
    """The state of a run.

    Attributes:
        name: running, finished, stopped, failed, ended (for an unknown reason) or new.
        text: the state as a text for the user.
    """

    name: str
    text: str


def state(run_dir: Path, step: int | None, result: Mapping[str, Any]) -> State:
    """Return the state of a run, from its files.

    Args:
        run_dir: the run's folder.
        step: the last step in metrics.jsonl; None if the file has no step.
        result: the content of result.json; {} if the file is missing.
    """
    log = run_dir / "log"
    has_ranks = any(log.glob("alive-*"))
    has_begun = step is not None or has_ranks
    if is_held(run_dir):
        return State("running", "running" if has_begun else "starting")
    if result and not is_behind(result, step):
        return State("finished", f"finished{_at_step(result.get('steps'))}")
    no_restart, _ = read_object(log / "no-restart")
    code = non_negative_int(no_restart.get("code"))
    at = _at_step(step)
    if code is not None and code > 128:
        name = _signal_name(code - 128)
        return State("stopped", f"stopped by {name}{at}; the same --run-dir resumes from there")
    if code is not None:
        return State("failed", f"failed with exit code {code}{at}")
    if (log / "stalled").exists():
        return State("failed", f"ended by a hang{at}")
    if not has_begun:
        return State("new", "no rank has started yet")
    return State("ended", f"ended without a result{at}: killed, or copied while it ran")


def is_behind(result: Mapping[str, Any], step: int | None) -> bool:
    """Return whether a later start went beyond the step of the result."""
    steps = non_negative_int(result.get("steps"))
    if steps is None or step is None:
        return False
    return steps < step


def _at_step(step: Any) -> str:
    if non_negative_int(step) is None:
        return ""
    return f" at step {step}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass
class RunData:
    """The content of a run dir for `report`. ``problems`` has a line for each missing or damaged file."""

    folder: Path
    metrics: MetricsReader
    log: EventLog
    result: dict[str, Any]
    evaluation: dict[str, Any]
    checkpoints: list[SavedCheckpoint]
    hangs: list[dict[str, Any]]
    state: State
    events: list[Event]
    problems: list[str]

    @property
    def app(self) -> str:
        """Return the app's name; "" if no file has it."""
        return app_of(self.metrics.header, self.result)

    @cached_property
    def losses(self) -> dict[int, float]:
        """Return the finite losses by step. log/losses.bin also has the steps between two lines of metrics.jsonl."""
        try:
            losses = read_losses(self.folder, self.metrics)
        except OSError:
            losses = logged_losses(self.metrics)
        return {step: loss for step, loss in losses.items() if math.isfinite(loss)}

    @property
    def trains(self) -> bool:
        """Return whether the run trains; a run of collectives_lab measures instead."""
        only_measures = "command" in self.result and "files" in self.result
        return not only_measures or self.metrics.step is not None


def read(run_dir: Path) -> RunData:
    """Return the content of a run dir for `report`.

    Raises:
        ConfigError: the folder is not a run dir.
    """
    check(run_dir)
    metrics = MetricsReader(run_dir)
    metrics.read()
    log = EventLog(run_dir)
    log.read()
    result, result_problem = read_object(run_dir / "result.json")
    evaluation, evaluation_problem = read_object(run_dir / "evaluation.json")
    hang_states, hang_problems = hangs(run_dir)
    data = RunData(
        folder=run_dir,
        metrics=metrics,
        log=log,
        result=result,
        evaluation=evaluation,
        checkpoints=checkpoints(run_dir),
        hangs=hang_states,
        state=state(run_dir, metrics.step, result),
        events=log.events(),
        problems=[],
    )
    data.events += _events_of_files(data)
    is_missing = result_problem == "missing"
    if result_problem and (not is_missing or data.state.name == "ended"):  # other states explain a missing result
        data.problems.append(f"result.json: {result_problem}")
    if evaluation_problem not in ("", "missing"):
        data.problems.append(f"evaluation.json: {evaluation_problem}")
    if data.trains:
        _, heartbeat_problems = heartbeats(run_dir)
        data.problems += [*metrics.problems(), *log.problems(), *hang_problems, *heartbeat_problems]
        data.problems += _checkpoint_problems(data)
    return data


def _checkpoint_problems(data: RunData) -> Iterator[str]:
    for each in data.checkpoints:
        if each.problem:
            yield f"checkpoints/{each.folder.name}: damaged: {each.problem}"
    if not data.checkpoints:
        has_folder = (data.folder / "checkpoints").is_dir()
        yield f"checkpoints: {'empty' if has_folder else 'missing'}"


def _events_of_files(data: RunData) -> Iterator[Event]:
    """Yield the events that only other files show: stragglers, and kinds of events that events.jsonl lacks."""
    logged = {event.kind for event in data.events}
    if RESTART not in logged:
        yield from _resumes(data.metrics)
    if data.hangs and events.HANG not in logged:
        yield _hang_event(data.hangs)
    for step, values in data.metrics.stragglers:
        text = _straggler_text(values)
        yield Event(STRAGGLER, step, when="", text=text, file="metrics.jsonl")
    if events.ROLLBACK not in logged:
        yield from _rollback(data.checkpoints)


def _resumes(metrics: MetricsReader) -> Iterator[Event]:
    for start in metrics.starts[1:]:
        text = f"resumed at step {start.step}"
        yield Event(RESTART, start.step, when=_time_of(start.header), text=text, file="metrics.jsonl")


def _time_of(header: Mapping[str, Any]) -> str:
    """Return a header's time, which is UTC, as local time; "" if the header has none."""
    seconds = start_seconds(header)
    return "" if seconds is None else local_time(seconds)


def start_seconds(header: Mapping[str, Any]) -> float | None:
    """Return a header's time in seconds since 1970; None if the header has no valid time."""
    try:
        return float(calendar.timegm(time.strptime(str(header.get("time", "")), "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


def local_time(seconds: float) -> str:
    """Return a time in seconds since 1970 as local time, such as "2026-01-31 12:00:00"."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _hang_event(states: Sequence[Mapping[str, Any]]) -> Event:
    latest = max(states, key=lambda values: int(values["step"]))
    verdicts = [str(values["verdict"]) for values in states if "verdict" in values]
    text = verdicts[0] if verdicts else "no progress"
    return Event(events.HANG, latest["step"], when="", text=text, file=f"log/hang-{latest['rank']}.json")


def _straggler_text(values: Mapping[str, Any]) -> str:
    text = f"rank {values.get('rank')} is a straggler in {values.get('phase')}"
    own = finite_number(values.get("seconds"))
    others = finite_number(values.get("others"))
    if own is None or others is None:
        return text
    return f"{text}: {own:.3f} s per step, the others {others:.3f}"


def _rollback(saved: Sequence[SavedCheckpoint]) -> Iterator[Event]:
    """Yield an event of the first rollback, found by its quarantined checkpoint."""
    for each in saved:
        if each.quarantined == "unequal":
            text = f"the ranks' weights differed at step {each.step}: that checkpoint is quarantined"
            yield Event(events.ROLLBACK, each.step, when="", text=text, file=f"checkpoints/{each.folder.name}")
            return


def check(run_dir: Path) -> None:
    """Raise ConfigError if a folder is not a run dir; the error may suggest a run dir below the folder."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder: give a run dir, such as runs/mnist_ddp/20260101T120000Z")
    if _has_any(run_dir, RUN_FILES):
        return
    below = newest(run_dir, "*", "*/*")
    if below:
        raise ConfigError(f"{run_dir} holds no run: did you mean {below}?")
    raise ConfigError(f"{run_dir} holds no run: give the folder that holds metrics.jsonl and log/")


def _has_any(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).exists() for name in names)


def newest(folder: Path, *patterns: str) -> Path | None:
    """Return the run dir with the last write among the matches of ``patterns`` below ``folder``; None without one."""
    run_dirs = []
    for pattern in patterns:
        for path in folder.glob(pattern):
            if path.is_dir() and _has_any(path, RESULT_FILES):
                run_dirs.append(path)
    return max(run_dirs, key=_last_write, default=None)


def _last_write(run_dir: Path) -> float:
    """Return the time of the last write to a run dir, in seconds since 1970; 0 if it is unknown."""
    paths = [run_dir / name for name in RUN_FILES]
    paths += run_dir.glob("log/alive-*")
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
