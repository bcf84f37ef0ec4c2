"""Read a run dir, also while the run writes it, or if files are damaged, half-written or missing.

An unreadable file becomes a line of ``problems``, never an exception, so that a page or a screen can show the rest.
This module writes nothing and takes no lock.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any, NamedTuple

from samestep import ConfigError, checkpoint, events, untrusted
from samestep.rundir import LAUNCHER_BYTE, WRITER_BYTE
from samestep.untrusted import open_to_read

RESULT_FILES = ("metrics.jsonl", "result.json", "log", ".lock")  # every run dir has one of them
RUN_FILES = (*RESULT_FILES, "evaluation.json", "checkpoints")
NOT_MEASURED = {"step", "epoch", "samples_seen", "test_examples"}  # numbers of a metrics line that have no curve
MAX_TIME = 2**36  # seconds since 1970; a later time is damaged
BLOCK = 2**20  # bytes that are read at a time, and of the longest line
MAX_BLOCKS = 2**11  # of a file that are read at a time
MAX_CURVES = 500  # measurements of a run
MAX_DEPTH = 50  # of JSON
MAX_HOST = 255  # characters of a host's name

# Kinds of events that no log file has: START of events.jsonl, from the second on, and the stragglers of metrics.jsonl.
RESTART, STRAGGLER = "restart", "straggler"
# Kinds of the lines in log/rank-<r>.log, for run dirs of samestep 0.1, without events.jsonl. The first match counts.
# With --log-format full, the level before the time, and the place in the code after it.
_TIMED_LINE = re.compile(r"(?:[A-Z]+\|)?(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\|[^|]*\|\d+\|)? (.*)", re.DOTALL)
RankFiles = tuple[list[dict[str, Any]], list[str]]  # the objects in files of ranks, and the problems of other files
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


# --- values ----------------------------------------------------------------------------------------------------------


def finite_number(value: Any) -> float | None:
    """Return a finite number of JSON as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def non_negative_int(value: Any) -> int | None:
    """Return an integer of JSON from 0 to 2**63 - 1; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def get_object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object ``values[name]`` of JSON; {} if there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def parse(text: bytes) -> dict[str, Any] | None:
    """Return an object of JSON; None for anything else, and for nesting that a program could not print."""
    with contextlib.suppress(ValueError):
        values = untrusted.parse_object(text)
        return values if text.count(b"[") + text.count(b"{") < MAX_DEPTH or _is_flat(values, MAX_DEPTH) else None
    return None


def _is_flat(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_is_flat(each, depth - 1) for each in inner)


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a small file, and its problem: "", "missing", "empty", ..."""
    try:
        with open_to_read(path) as file:
            content = file.read(BLOCK + 1)
    except OSError as error:
        return {}, _reason(error)
    if not content.strip():
        return {}, "empty"
    values = parse(content)
    return ({}, "damaged: not a JSON object") if values is None else (values, "")


def _reason(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _problem(path: Path) -> str:
    """Return why a file has nothing to read, or ""."""
    try:
        with open_to_read(path) as file:
            return "" if os.fstat(file.fileno()).st_size else "empty"
    except OSError as error:
        return _reason(error)


class FileTail:
    """Read the lines that are appended to a file. Another file may take its place, as metrics.jsonl's at a resume."""

    def __init__(self, path: Path, block: int = BLOCK, keep_open: bool = False) -> None:
        """``block`` is in bytes. An open file keeps its inode from being reused, so no other file is taken for it."""
        self.path, self.problem = path, "missing"  # why nothing can be read, or ""
        self.rest = b""  # the line that has no end yet
        self.at_end = True
        self._block, self._keep_open = block, keep_open
        self._opened: Any = None
        self._identity, self._position = (0, 0), 0

    def new_lines(self, on_new_file: Callable[[], object] = lambda: None, blocks: int = MAX_BLOCKS) -> Iterator[bytes]:
        """Yield the lines that were added since the last call, from at most ``blocks`` blocks.

        If the file is another one, call ``on_new_file`` and start at its beginning. A line longer than BLOCK, which no
        run writes, is yielded as b"".
        """
        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._position:
                    on_new_file()
                    self._identity, self._position, self.rest = (status.st_dev, status.st_ino), 0, b""
                    self._opened = os.fdopen(os.dup(file.fileno()), "rb") if self._keep_open else None
                self.problem = "" if status.st_size else "empty"
                file.seek(self._position)
                for _ in range(blocks):
                    content = file.read(self._block)
                    self._position, self.at_end = self._position + len(content), len(content) < self._block
                    *lines, self.rest = (self.rest + content).split(b"\n")
                    self.rest = self.rest if len(self.rest) <= BLOCK else b""
                    yield from lines
                    if self.at_end:
                        break
        except OSError as error:
            self.problem = _reason(error)


# --- metrics ---------------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """A measurement: ``values`` after ``steps`` updates, in rising order."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Start(NamedTuple):
    """A start of the run that reached its steps: the ``step`` from which, and its header in metrics.jsonl."""

    step: int
    header: dict[str, Any]


def app_of(header: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the app's name, by the header of metrics.jsonl or else the result; "" if both lack it."""
    names = (header.get("app"), result.get("app"))
    return next((name for name in names if isinstance(name, str) and name), "")


def world_size_of(header: Mapping[str, Any], result: Mapping[str, Any]) -> int | None:
    """Return the number of ranks, by the header of metrics.jsonl or else the result; None if both lack it."""
    sizes = (non_negative_int(values.get("world_size")) for values in (get_object(header, "world"), result))
    return next(filter(None, sizes), None)


class MetricsReader:
    """Read metrics.jsonl as it grows."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = FileTail(run_dir / "metrics.jsonl")
        self._reset()

    def _reset(self) -> None:
        self.starts: list[Start] = []
        self.curves: dict[str, Curve] = {}
        self.stragglers: list[tuple[int, dict[str, Any]]] = []  # the step, and its record
        self.step: int | None = None  # the last one
        self._line_count = self._damaged_count = self._first_damaged = self._not_finite = self._surplus = 0

    def read(self) -> None:
        """Read the lines that were added since the last call."""
        for line in self._tail.new_lines(self._reset):
            self._line_count += 1
            if not self._add(parse(line)):
                self._damaged_count += 1
                self._first_damaged = self._first_damaged or self._line_count

    @property
    def header(self) -> dict[str, Any]:
        """Return the header of the last start; {} if there is none."""
        return self.starts[-1].header if self.starts else {}

    def problems(self) -> list[str]:
        """Return the file's problems, a line each."""
        if self._tail.problem:
            return [f"metrics.jsonl: {self._tail.problem}"]
        lines = f"{self._damaged_count} lines left out, from line {self._first_damaged} on"
        checks = (
            (self._tail.rest, "its last line is cut off"),
            (self._damaged_count, f"damaged: {lines}: not a run's, or not in the order of steps"),
            (self._not_finite, f"{self._not_finite} values left out: not finite numbers"),
            (self._surplus, f"{self._surplus} values left out: of more than {MAX_CURVES} measurements"),
            (not self.starts, "its header is missing: options, versions and ranks are unknown"),
            (self.step is None, "no step is recorded"),
        )
        return [f"metrics.jsonl: {text}" for is_wrong, text in checks if is_wrong]

    def _add(self, line: dict[str, Any] | None) -> bool:
        """Return whether the line is one of a run, in its order."""
        if line is None:
            return False
        if "step" not in line:
            resumed = get_object(line, "resumed")
            step = non_negative_int(resumed.get("step")) if resumed else 0
            if step is None or not ({"app", "options", "world"} & (resumed or line).keys()):
                return False
            self.starts.append(Start(step, resumed or line))
            return True
        step = non_negative_int(line["step"])
        if step is None or (self.step is not None and step <= self.step):
            return False
        self.step = step
        for name, value in line.items():
            if name in NOT_MEASURED or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            number = finite_number(value)
            if number is None:
                self._not_finite += 1
                continue
            if name not in self.curves and len(self.curves) >= MAX_CURVES:
                self._surplus += 1
                continue
            curve = self.curves.setdefault(name, Curve())
            curve.steps.append(step)
            curve.values.append(number)
        stragglers = line.get("stragglers")
        for straggler in stragglers if isinstance(stragglers, list) else ():
            self.stragglers += [(step, straggler)] if isinstance(straggler, dict) else []
        return True


# --- checkpoints and ranks' files ------------------------------------------------------------------------------------


class SavedCheckpoint(NamedTuple):
    """A folder of checkpoints/. ``quarantined`` is "unequal" or "damaged" if a run renamed it, else ""."""

    folder: Path
    step: int
    quarantined: str
    size: int  # bytes
    time: float  # of its file system, in seconds since 1970
    problem: str


def checkpoints(run_dir: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints, oldest first, without half-written ones. Only manifests and sizes are checked."""
    saved = []
    with contextlib.suppress(OSError):
        for folder in (run_dir / "checkpoints").iterdir():
            if not (match := re.fullmatch(r"(?:(unequal|damaged)-)?step-(\d{8,18})", folder.name)):
                continue
            problem, size, changed = "", 0, 0.0
            if not match[1]:
                try:
                    open_to_read(folder / "manifest.json").close()
                    checkpoint.read(folder, verify=False)
                except OSError as error:
                    problem = f"manifest.json: {_reason(error)}"
                except checkpoint.CorruptCheckpoint as error:
                    problem = untrusted.shown(error, limit=1000)
            with contextlib.suppress(OSError):  # it may be deleted at this moment
                changed = folder.stat().st_mtime
                size = sum(path.lstat().st_size for path in folder.iterdir())
            saved.append(SavedCheckpoint(folder, int(match[2]), match[1] or "", size, changed, problem))
    return sorted(saved, key=lambda each: (each.step, each.quarantined))


class Heartbeat(NamedTuple):
    """A rank's last heartbeat. ``time`` is by its host's clock; ``location`` is its main thread's in the program."""

    rank: int
    host: str
    pid: int
    job: str
    step: int
    time: float
    location: str


def heartbeats(run_dir: Path) -> tuple[dict[int, Heartbeat], list[str]]:
    """Return the heartbeats of the newest start, by rank, and the problems of others.

    The newest start is rank 0's; without a rank 0, the last heartbeat decides. It may have fewer ranks than another.
    """
    files, problems = _read_rank_files(run_dir, "alive-*", ("rank", "pid", "step", "time"), "a heartbeat")
    beats = {}
    for values in files:
        rank, host, job = values["rank"], str(values.get("host", ""))[:MAX_HOST], str(values.get("job", ""))
        location = format_location(values.get("at"))
        beats[rank] = Heartbeat(rank, host, values["pid"], job, values["step"], values["time"], location)
    newest_beat = beats.get(0) or max(beats.values(), key=lambda beat: beat.time, default=None)
    return {rank: beat for rank, beat in sorted(beats.items()) if newest_beat and beat.job == newest_beat.job}, problems


def format_location(at: Any) -> str:
    """Return a heartbeat's location as "train.py:105 in train"; "" if it has none."""
    if isinstance(at, list) and len(at) >= 3 and non_negative_int(at[1]) is not None:
        return f"{os.path.basename(str(at[0]))}:{at[1]} in {at[2]}"
    return ""


def hangs(run_dir: Path) -> RankFiles:
    """Return the states that ranks left at a hang, by rank, and the problems of others."""
    files, problems = _read_rank_files(run_dir, "hang-*.json", ("rank", "step"), "a rank's state at a hang")
    return sorted(files, key=lambda values: int(values["rank"])), problems


def _read_rank_files(run_dir: Path, pattern: str, required: Sequence[str], what: str) -> RankFiles:
    files, problems = [], []
    for path in sorted((run_dir / "log").glob(pattern)):
        values, problem = read_object(path)
        numbers = [(finite_number if name == "time" else non_negative_int)(values.get(name)) for name in required]
        if problem or None in numbers:
            problems.append(f"log/{path.name}: {problem or f'damaged: not {what}'}")
        else:
            files.append(values)
    return files, problems


# --- events ----------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that happened to a run.

    ``kind`` is RESTART, STRAGGLER or one of `samestep.events.KINDS`. ``step`` is the number of updates done, None if it
    is unknown. ``when`` is the local time, "" if it is unknown. ``file`` is the source, relative to the run dir.
    """

    kind: str
    step: int | None
    when: str
    text: str
    file: str


class EventLog:
    """Read log/ as it is written: the events in events.jsonl, and the starts and the end of launcher.log."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "log"
        self.last_step: int | None = None  # at which training ends
        self.launches: list[str] = []  # times at which the launcher was started
        self.tail: list[str] = []  # the last lines of launcher.log
        self._launcher, self._recorded = (FileTail(self._folder / name) for name in ("launcher.log", events.FILE_NAME))
        self._events: list[Event] = []
        self._damaged = 0
        self._is_blank = False

    def read(self) -> None:
        """Read the lines that were added since the last call."""
        for line in self._launcher.new_lines(self._reset_launcher):
            self._add_launcher_line(line.decode(errors="replace"))
        for line in self._recorded.new_lines(self._reset_recorded):
            self._add_recorded(parse(line) or {})

    def problems(self) -> list[str]:
        """Return the files' problems, a line each."""
        problems = {path.name: _problem(path) for path in self._folder.glob("rank-*.log")}
        problems = problems or {"rank-0.log": "missing"}
        problems["launcher.log"] = self._launcher.problem
        if self._recorded.problem != "missing":  # nothing has happened yet
            damaged = f"damaged: {self._damaged} lines left out: not events" if self._damaged else ""
            problems[events.FILE_NAME] = self._recorded.problem or damaged
        return [f"log/{name}: {problem}" for name, problem in sorted(problems.items()) if problem]

    def events(self) -> list[Event]:
        """Return the events in the order of time, without the first start.

        An event that several ranks report appears once.
        """
        unique: dict[str, Event] = {}
        for event in sorted(self._events, key=lambda each: each.when):
            unique.setdefault(f"{event.when} {event.text}" if event.kind == RESTART else event.text, event)
        first_start = next((event for event in unique.values() if event.kind == RESTART), None)
        return [event for event in unique.values() if event is not first_start or event.step]

    def _reset_launcher(self) -> None:
        self.launches, self.tail, self._is_blank = [], [], False

    def _reset_recorded(self) -> None:
        self._damaged, self._events = 0, []

    def _add_launcher_line(self, line: str) -> None:
        if self._is_blank and (timed := _TIMED_LINE.match(line)):
            self.launches.append(f"{timed[1]} {timed[2]}")
        self._is_blank = not line.strip()
        if not self._is_blank:
            self.tail = [*self.tail[-19:], line]

    def _add_recorded(self, values: Mapping[str, Any]) -> None:
        kind, seconds = values.get("kind"), finite_number(values.get("time"))
        if kind not in events.KINDS or seconds is None or not 0 <= seconds < MAX_TIME:
            self._damaged += 1
            return
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
        ranks, step, last_step = (non_negative_int(values.get(name)) for name in ("ranks", "step", "last_step"))
        if kind == events.START:
            self._add_start(when, ranks or 0, step or 0, last_step)
        else:
            self._add_event(kind, step, when, str(values.get("text", kind)))

    def _add_start(self, when: str, ranks: int, step: int, last_step: int | None) -> None:
        self.last_step = last_step
        text = f"resumed at step {step}, {ranks} rank{'s' * (ranks != 1)}" if step else f"began, {ranks} ranks"
        self._add_event(RESTART, step, when, text)

    def _add_event(self, kind: str, step: int | None, when: str, text: str) -> None:
        text = text.removeprefix("error: ").removeprefix("warning: ")
        self._events.append(Event(kind, step, when, text, f"log/{events.FILE_NAME}"))


# --- the state of a run ----------------------------------------------------------------------------------------------


def is_held(run_dir: Path) -> bool | None:
    """Return whether a process holds the run dir's lock, without trying to take it; None if that is unknown.

    Another machine's lock is seen if the file system has locks over the network.
    """
    queries = [struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0) for byte in (LAUNCHER_BYTE, WRITER_BYTE)]
    with contextlib.suppress(OSError, struct.error), open_to_read(run_dir / ".lock") as file:
        holders = [struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query)) for query in queries]
        return any(kind != fcntl.F_UNLCK for kind, *_ in holders)
    return None


class State(NamedTuple):
    """The state of a run: ``name`` is running, finished, stopped, failed, ended (for an unknown reason) or new."""

    name: str
    text: str


def state(run_dir: Path, step: int | None, result: Mapping[str, Any]) -> State:
    """Return the state of a run by its files. ``step`` is the last one recorded, ``result`` is result.json."""
    log = run_dir / "log"
    has_ranks = any(log.glob("alive-*"))
    if is_held(run_dir):
        return State("running", "running" if step is not None or has_ranks else "starting")
    steps = non_negative_int(result.get("steps"))
    if result and (steps is None or step is None or steps >= step):
        return State("finished", "finished" + (f" at step {steps}" if steps is not None else ""))
    code = non_negative_int(read_object(log / "no-restart")[0].get("code"))
    at = f" at step {step}" if step is not None else ""
    if code is not None and code > 128:
        name = next((each.name for each in signal.Signals if each.value == code - 128), f"signal {code - 128}")
        return State("stopped", f"stopped by {name}{at}; the same --run-dir resumes from there")
    if code is not None:
        return State("failed", f"failed with exit code {code}{at}")
    if (log / "stalled").exists():
        return State("failed", f"ended by a hang{at}")
    if step is None and not has_ranks:
        return State("new", "no rank has started yet")
    return State("ended", f"ended without a result{at}: killed, or copied while it ran")


@dataclass
class RunData:
    """The parts of a run dir that `report` shows. ``problems`` names missing or damaged files, a line each."""

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

    @property
    def trains(self) -> bool:
        """Return whether the run has steps; collectives_lab only measures."""
        return not ("command" in self.result and "files" in self.result) or self.metrics.step is not None


def read(run_dir: Path) -> RunData:
    """Read all that a run dir holds. Raises ConfigError if it is none."""
    check(run_dir)
    metrics, log = MetricsReader(run_dir), EventLog(run_dir)
    metrics.read()
    log.read()
    result, result_problem = read_object(run_dir / "result.json")
    evaluation, evaluation_problem = read_object(run_dir / "evaluation.json")
    saved, (hang_states, hang_problems) = checkpoints(run_dir), hangs(run_dir)
    run_state = state(run_dir, metrics.step, result)
    data = RunData(run_dir, metrics, log, result, evaluation, saved, hang_states, run_state, log.events(), [])
    data.events += _events_of_files(data)
    if result_problem not in ("", "missing") or (
        result_problem and run_state.name == "ended"
    ):  # else the state shows it
        data.problems.append(f"result.json: {result_problem}")
    if evaluation_problem not in ("", "missing"):
        data.problems.append(f"evaluation.json: {evaluation_problem}")
    if data.trains:
        data.problems += [*metrics.problems(), *log.problems(), *hang_problems, *heartbeats(run_dir)[1]]
        data.problems += [f"checkpoints/{each.folder.name}: damaged: {each.problem}" for each in saved if each.problem]
        if not saved:
            data.problems.append(f"checkpoints: {'empty' if (run_dir / 'checkpoints').is_dir() else 'missing'}")
    return data


def _events_of_files(data: RunData) -> list[Event]:
    """Return the events that other files show and that were not logged; the log of rank 0 may be missing."""
    logged, unlogged = {event.kind for event in data.events}, []
    if RESTART not in logged:
        for start in data.metrics.starts[1:]:
            when = str(start.header.get("time", ""))
            unlogged.append(Event(RESTART, start.step, when, f"resumed at step {start.step}", "metrics.jsonl"))
    if data.hangs and events.HANG not in logged:
        latest = max(data.hangs, key=lambda values: int(values["step"]))
        text = next((str(values["verdict"]) for values in data.hangs if "verdict" in values), "no progress")
        unlogged.append(Event(events.HANG, latest["step"], "", text, f"log/hang-{latest['rank']}.json"))
    for step, values in data.metrics.stragglers:
        own, others = finite_number(values.get("seconds")), finite_number(values.get("others"))
        text = f"rank {values.get('rank')} is a straggler in {values.get('phase')}"
        text += "" if own is None or others is None else f": {own:.3f} s per step, the others {others:.3f}"
        unlogged.append(Event(STRAGGLER, step, "", text, "metrics.jsonl"))
    unequal = next((each for each in data.checkpoints if each.quarantined == "unequal"), None)
    if unequal and events.ROLLBACK not in logged:
        text = f"the ranks' weights differed at step {unequal.step}: that checkpoint is quarantined"
        unlogged.append(Event(events.ROLLBACK, unequal.step, "", text, f"checkpoints/{unequal.folder.name}"))
    return unlogged


def check(run_dir: Path) -> None:
    """Raise ConfigError if a folder is not a run dir, and name a run dir below it, if any."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder: give a run dir, such as runs/mnist_ddp/20260101T120000Z")
    if not any((run_dir / name).exists() for name in RUN_FILES):
        below = newest(run_dir, "*", "*/*")
        hint = f"did you mean {below}?" if below else "give the folder that holds metrics.jsonl and log/"
        raise ConfigError(f"{run_dir} holds no run: {hint}")


def newest(folder: Path, *patterns: str) -> Path | None:
    """Return the run dir below ``folder`` that was written last; None if there is none."""

    def last_write(run_dir: Path) -> float:
        times = [0.0]
        for path in (*(run_dir / name for name in RUN_FILES), *run_dir.glob("log/alive-*")):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    folders = [path for pattern in patterns for path in folder.glob(pattern) if path.is_dir()]
    run_dirs = [path for path in folders if any((path / name).exists() for name in RESULT_FILES)]
    return max(run_dirs, key=last_write, default=None)
