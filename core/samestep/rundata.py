"""What does a run dir hold? Read as it is, by others than its ranks: it may be damaged, half-written or growing.

What cannot be read becomes a line of ``problems`` and never an exception, so that a page or a screen can say what is
missing and show the rest. Nothing is written, and no lock is taken. `report` and `watch` show it; no rank imports this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import stat
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from samestep import UserError, checkpoint
from samestep.rundir import LAUNCHER_BYTE, WRITER_BYTE

KNOWN = ("metrics.jsonl", "result.json", "evaluation.json", "checkpoints", "log", ".lock")  # one is in every run dir
NO_CURVE = {"step", "epoch", "samples_seen", "test_examples"}  # numbers of a line that are no measurements
BLOCK = 2**20  # bytes that are read at a time, and of the longest line
# What ranks say of a run's fate in log/rank-<r>.log, and what kind of event it is; the first that fits.
SAID = {
    "hang": re.compile(r"error: no progress for "),
    "rollback": re.compile(r"error: (.* differs? |.*\bat step \d+ the )"),
    "damage": re.compile(r"warning: checkpoint .* is damaged and skipped"),
    "signal": re.compile(r"(?=stopped by [A-Z0-9]+)"),
    "failure": re.compile(r"error: "),
}
_TIMED = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d) (.*)", re.DOTALL)
_STEPS = re.compile(r", (\d+) ranks on [^,]+, steps (\d+) to (\d+), run dir ")  # what rank 0 says when steps begin
_STEP = re.compile(r"\bstep (\d{1,18})\b")
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, process


# --- values ----------------------------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """A finite number of JSON as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def whole(value: Any) -> int | None:
    """A whole number of JSON from 0 on; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object within an object of JSON; {} where there is none."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def parse(text: bytes) -> dict[str, Any] | None:
    """An object of JSON; None for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """A small file's object of JSON, {} where it has none, and why: "missing", "empty"..., "" where it has one."""
    try:
        with _open(path) as file:
            content = file.read(BLOCK + 1)
    except OSError as problem:
        return {}, _why(problem)
    if not content.strip():
        return {}, "empty"
    found = parse(content)
    return (found, "") if found is not None else ({}, "damaged: not a JSON object")


def _open(path: Path) -> Any:
    """A regular file, to be read: a pipe in its place would block. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a file")
    return os.fdopen(descriptor, "rb")


def _why(problem: OSError) -> str:
    return "missing" if isinstance(problem, FileNotFoundError) else problem.strerror or str(problem)


class Lines:
    """A file to which lines are appended, and in whose place another one may come: a resumed run's metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path, self.problem = path, "missing"  # why nothing can be read; "" where something can
        self.rest = b""  # what stands behind the last end of a line
        self._file, self._read = (0, 0), 0

    def new(self, forget: Callable[[], object] = lambda: None) -> Iterator[bytes]:
        """Whole lines that were added since the last call; after ``forget``, all of them, where the file is another.

        Of a line longer than BLOCK, which no run writes, nothing but b"" is given.
        """
        try:
            with _open(self.path) as file:
                its = os.fstat(file.fileno())
                if (its.st_dev, its.st_ino) != self._file or its.st_size < self._read:
                    forget()
                    self._file, self._read, self.rest = (its.st_dev, its.st_ino), 0, b""
                self.problem = "" if its.st_size else "empty"
                file.seek(self._read)
                while block := file.read(BLOCK):
                    self._read += len(block)
                    *lines, self.rest = (self.rest + block).split(b"\n")
                    self.rest = self.rest if len(self.rest) <= BLOCK else b""
                    yield from lines
        except OSError as problem:
            self.problem = _why(problem)


# --- what was measured -----------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """A measurement: ``values`` after so many updates, ``steps``, in rising order."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def points(self) -> dict[int, float]:
        return dict(zip(self.steps, self.values))


@dataclass(frozen=True)
class Start:
    """A start of the run that got as far as steps: ``step`` is from where, and ``facts`` its header."""

    step: int
    facts: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        return part(self.facts, "options")

    @property
    def world_size(self) -> int | None:
        return whole(part(self.facts, "world").get("world_size"))

    @property
    def app(self) -> str:
        app = self.facts.get("app")
        return app if isinstance(app, str) else ""


class Measured:
    """metrics.jsonl, read as far as it is written."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = Lines(run_dir / "metrics.jsonl")
        self._forget()

    def _forget(self) -> None:
        self.starts: list[Start] = []
        self.curves: dict[str, Curve] = {}
        self.stragglers: list[tuple[int, dict[str, Any]]] = []  # at which step, and what was recorded
        self.last: dict[str, Any] = {}  # the last line of a step
        self.step: int | None = None  # its step
        self._count = 0
        self._damaged: list[int] = []  # numbers of lines, from 1
        self._not_finite = 0

    def read(self) -> None:
        """Take in what was added since the last call."""
        for line in self._lines.new(self._forget):
            self._count += 1
            if not self._take(parse(line)):
                self._damaged.append(self._count)

    def problems(self) -> list[str]:
        """What is wrong with the file."""
        name, found = "metrics.jsonl", []
        if self._lines.problem:
            return [f"{name}: {self._lines.problem}"]
        if self._lines.rest:
            found.append(f"{name}: its last line is cut off")
        if self._damaged:
            which = f"line {self._damaged[0]}" + (f" and {len(self._damaged) - 1} more" * (len(self._damaged) > 1))
            found.append(f"{name}: damaged: {which} left out: not a run's, or not in the order of steps")
        if self._not_finite:
            found.append(f"{name}: {self._not_finite} values left out: not finite numbers")
        if not self.starts:
            found.append(f"{name}: its header is missing: options, versions and ranks are not known")
        if self.step is None:
            found.append(f"{name}: no step is recorded")
        return found

    def _take(self, line: dict[str, Any] | None) -> bool:
        if line is None:
            return False
        if "step" not in line:
            resumed = part(line, "resumed")
            step = whole(resumed.get("step")) if resumed else 0
            if step is None or not ({"app", "options", "world"} & (resumed or line).keys()):
                return False
            self.starts.append(Start(step, resumed or line))
            return True
        step = whole(line["step"])
        if step is None or (self.step is not None and step <= self.step):
            return False
        self.step, self.last = step, line
        for name, value in line.items():
            if name in NO_CURVE or isinstance(value, (bool, str, list, dict)) or value is None:
                continue
            finite = number(value)
            if finite is None:
                self._not_finite += 1
                continue
            curve = self.curves.setdefault(name, Curve())
            curve.steps.append(step)
            curve.values.append(finite)
        named = line.get("stragglers")
        self.stragglers += [(step, each) for each in named if isinstance(each, dict)] if isinstance(named, list) else []
        return True


# --- what happened ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: ``kind`` is restart, straggler or one of SAID.

    ``step`` is the step that is told with it, ``when`` the time by its host's clock, "" where none is told.
    """

    kind: str
    step: int | None
    when: str
    text: str
    file: str


@dataclass(frozen=True)
class Saved:
    """A folder of checkpoints/: ``kept`` says "unequal" or "damaged" of one that was set aside."""

    folder: Path
    step: int
    kept: str
    size: int  # bytes
    time: float  # of its file system, in seconds since 1970
    problem: str


def checkpoints(run_dir: Path) -> list[Saved]:
    """Those that are there, oldest first; half-written ones are none. Judged by manifests and sizes alone."""
    found = []
    with contextlib.suppress(OSError):
        for folder in (run_dir / "checkpoints").iterdir():
            if not (match := re.fullmatch(r"(?:(unequal|damaged)-)?step-(\d{8,18})", folder.name)):
                continue
            problem = ""
            if not match[1]:
                try:
                    _open(folder / "manifest.json").close()
                    checkpoint.read(folder, verify=False)
                except OSError as damage:
                    problem = f"manifest.json: {_why(damage)}"
                except checkpoint.Damaged as damage:
                    problem = str(damage)
            size, time = 0, 0.0
            with contextlib.suppress(OSError):  # it may be deleted while it is looked at
                time = folder.stat().st_mtime
                size = sum(path.lstat().st_size for path in folder.iterdir())
            found.append(Saved(folder, int(match[2]), match[1] or "", size, time, problem))
    return sorted(found, key=lambda each: (each.step, each.kept))


@dataclass(frozen=True)
class Beat:
    """A rank's last heartbeat: ``time`` is by its own host's clock; ``at`` is where its main thread stood."""

    rank: int
    host: str
    pid: int
    job: str
    step: int
    time: float
    at: str


def beats(run_dir: Path) -> tuple[dict[int, Beat], list[str]]:
    """The heartbeats of the newest start, by rank, and what is wrong with others.

    Those of another start than rank 0's (or, without one, than the last of them) are left out: fewer ranks came then.
    """
    found, problems = dict[int, Beat](), []
    for path in sorted((run_dir / "log").glob("alive-*")):
        its, problem = read_object(path)
        rank, pid, step = (whole(its.get(name)) for name in ("rank", "pid", "step"))
        time = number(its.get("time"))
        if problem or rank is None or pid is None or step is None or time is None:
            problems.append(f"log/{path.name}: {problem or 'damaged: not a heartbeat'}")
            continue
        host, job = str(its.get("host", "")), str(its.get("job", ""))
        found[rank] = Beat(rank, host, pid, job, step, time, place(its.get("at")))
    if found:
        job = found[0].job if 0 in found else max(found.values(), key=lambda beat: beat.time).job
        found = {rank: beat for rank, beat in sorted(found.items()) if beat.job == job}
    return found, problems


def place(at: Any) -> str:
    """Where a heartbeat says that a rank stands: "train.py:105 in train"; "" where it does not say so."""
    if isinstance(at, list) and len(at) >= 3 and whole(at[1]) is not None:
        return f"{os.path.basename(str(at[0]))}:{at[1]} in {at[2]}"
    return ""


def hangs(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What ranks left of a hang, by rank, and what is wrong with others."""
    found, problems = [], []
    for path in sorted((run_dir / "log").glob("hang-*.json")):
        its, problem = read_object(path)
        if problem or whole(its.get("rank")) is None or whole(its.get("step")) is None:
            problems.append(f"log/{path.name}: {problem or 'damaged: not what a rank leaves of a hang'}")
        else:
            found.append(its)
    return sorted(found, key=lambda its: int(its["rank"])), problems


class Story:
    """What the files of log/ say has happened, as far as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.stop: int | None = None  # the step at which training ends, as rank 0 said when its steps began
        self.starts: list[str] = []  # of the launcher: when
        self._launcher = Lines(run_dir / "log" / "launcher.log")
        self._ranks: dict[Path, Lines] = {}
        self._events: dict[str, list[Event]] = {}  # by file
        self._blank = False
        self.tail: list[str] = []  # the last lines of launcher.log

    def read(self) -> None:
        """Take in what was added since the last call."""
        for line in self._launcher.new(self._forget_launcher):
            self._of_launcher(line.decode(errors="replace"))
        for path in (self.run_dir / "log").glob("rank-*.log"):
            self._ranks.setdefault(path, Lines(path))
        for path, lines in self._ranks.items():
            for line in lines.new(partial(self._events.pop, path.name, None)):
                self._of_rank(path.name, line.decode(errors="replace"))

    def problems(self) -> list[str]:
        """What is wrong with the files."""
        found = {"launcher.log": self._launcher.problem}
        found |= {path.name: lines.problem for path, lines in self._ranks.items()}
        if not any(name.startswith("rank-") for name in found):
            found["rank-0.log"] = "missing"
        if "rank-0.log" in found and not found["rank-0.log"] and not self._events.get("rank-0.log"):
            found["rank-0.log"] = "nothing in it is of a run"
        return [f"log/{name}: {problem}" for name, problem in sorted(found.items()) if problem]

    def events(self) -> list[Event]:
        """In the order of time, each thing once, though several ranks say it; without the first start."""
        first: dict[str, Event] = {}
        for event in sorted((each for its in self._events.values() for each in its), key=lambda each: each.when):
            first.setdefault(f"{event.when} {event.text}" if event.kind == "restart" else event.text, event)
        starts = [event for event in first.values() if event.kind == "restart"]
        return [event for event in first.values() if event is not next(iter(starts), None) or event.step]

    def _forget_launcher(self) -> None:
        self.starts, self.tail, self._blank = [], [], False

    def _of_launcher(self, line: str) -> None:
        if self._blank and (timed := _TIMED.match(line)):
            self.starts.append(f"{timed[1]} {timed[2]}")
        self._blank = not line.strip()
        if not self._blank:
            self.tail = [*self.tail[-19:], line]

    def _of_rank(self, name: str, line: str) -> None:
        if not (timed := _TIMED.match(line)):
            return
        when, text = f"{timed[1]} {timed[2]}", timed[3].rstrip()
        events = self._events.setdefault(name, [])
        if begins := _STEPS.search(text):
            if name != "rank-0.log":  # all say it
                return
            ranks, first, self.stop = map(int, begins.groups())
            said = f"resumed at step {first}, {ranks} rank{'s' * (ranks != 1)}" if first else f"began, {ranks} ranks"
            events.append(Event("restart", first, when, said, f"log/{name}"))
            return
        for kind, pattern in SAID.items():
            if found := pattern.match(text):
                step = _STEP.search(text)
                said = text.removeprefix("error: ").removeprefix("warning: ") if found else text
                events.append(Event(kind, int(step[1]) if step else None, when, said, f"log/{name}"))
                return


# --- how it stands ---------------------------------------------------------------------------------------------------


def is_held(run_dir: Path) -> bool | None:
    """Whether a process holds the run dir's lock, by asking, not by trying; None where that cannot be told.

    Another machine's is seen where the file system has locks over the network.
    """
    with contextlib.suppress(OSError, struct.error):
        descriptor = os.open(run_dir / ".lock", os.O_RDONLY | os.O_NONBLOCK)
        try:
            for byte in (LAUNCHER_BYTE, WRITER_BYTE):
                asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
                if struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK:
                    return True
            return False
        finally:
            os.close(descriptor)
    return None


@dataclass(frozen=True)
class State:
    """How a run stands: ``name`` is running, finished, stopped, failed, ended (without a word), or new."""

    name: str
    text: str


def state(run_dir: Path, step: int | None, result: Mapping[str, Any]) -> State:
    """How it stands, by its files; ``step`` is the last one recorded."""
    if is_held(run_dir):
        begun = step is not None or any((run_dir / "log").glob("alive-*"))
        return State("running", "running" if begun else "starting")
    log = run_dir / "log"
    steps = whole(result.get("steps"))
    if result and (steps is None or step is None or steps >= step):
        return State("finished", "finished" + (f" at step {steps}" if steps is not None else ""))
    code = whole(read_object(log / "no-restart")[0].get("code"))
    at = f" at step {step}" if step is not None else ""
    if code is not None and code > 128:
        name = next((each.name for each in signal.Signals if each.value == code - 128), f"signal {code - 128}")
        return State("stopped", f"stopped by {name}{at}; the same --run-dir goes on from there")
    if code is not None:
        return State("failed", f"failed with exit code {code}{at}")
    if (log / "stalled").exists():
        return State("failed", f"ended by a hang{at}")
    if step is None and not any(log.glob("alive-*")):
        return State("new", "no rank has been here")
    return State("ended", f"ended without a result{at}: killed, or copied while it ran")


@dataclass
class RunData:
    """All of a run dir that `report` shows; ``problems`` name what is missing or damaged, a line each."""

    folder: Path
    measured: Measured
    result: dict[str, Any]
    evaluation: dict[str, Any]
    saved: list[Saved]
    hangs: list[dict[str, Any]]
    events: list[Event]
    launches: list[str]  # when its launcher was started
    stop: int | None
    state: State
    problems: list[str]

    @property
    def app(self) -> str:
        """Its app's name, wherever it is told; "" where it is not."""
        told = [start.app for start in self.measured.starts[-1:]] + [self.result.get("app")]
        return next((app for app in told if isinstance(app, str) and app), "")

    @property
    def facts(self) -> dict[str, Any]:
        """The header of its last start."""
        return self.measured.starts[-1].facts if self.measured.starts else {}

    @property
    def world_size(self) -> int | None:
        return whole(part(self.facts, "world").get("world_size")) or whole(self.result.get("world_size"))

    @property
    def trains(self) -> bool:
        """Whether it is a run that has steps: collectives_lab's are measurements."""
        return not ("command" in self.result and "files" in self.result) or self.measured.step is not None


def read(run_dir: Path) -> RunData:
    """All that a run dir holds. Raises UserError where it is none."""
    check(run_dir)
    measured, story = Measured(run_dir), Story(run_dir)
    measured.read()
    story.read()
    result, lacks = read_object(run_dir / "result.json")
    evaluation, evaluation_lacks = read_object(run_dir / "evaluation.json")
    found = state(run_dir, measured.step, result)
    saved = checkpoints(run_dir)
    left, hang_problems = hangs(run_dir)
    _, beat_problems = beats(run_dir)
    data = RunData(run_dir, measured, result, evaluation, saved, left, [], story.starts, story.stop, found, [])
    data.events = _events(data, story)
    if lacks not in ("", "missing") or (lacks and found.name == "ended"):  # else the state says enough
        data.problems.append(f"result.json: {lacks}")
    if evaluation_lacks not in ("", "missing"):
        data.problems.append(f"evaluation.json: {evaluation_lacks}")
    if not data.trains:
        return data
    data.problems += [*measured.problems(), *story.problems(), *hang_problems, *beat_problems]
    data.problems += [f"checkpoints/{each.folder.name}: damaged: {each.problem}" for each in saved if each.problem]
    if not saved:
        there = (run_dir / "checkpoints").is_dir()
        data.problems.append("checkpoints: " + ("none is in it" if there else "missing"))
    return data


def _events(data: RunData, story: Story) -> list[Event]:
    """What logs say, and what else files show of it."""
    events = story.events()
    if not any(event.kind == "restart" for event in events):  # rank 0's log may be missing
        for start in data.measured.starts[1:]:
            said = f"resumed at step {start.step}"
            events.append(Event("restart", start.step, str(start.facts.get("time", "")), said, "metrics.jsonl"))
    if data.hangs and not any(event.kind == "hang" for event in events):
        worst = max(data.hangs, key=lambda its: int(its["step"]))
        said = next((str(its["verdict"]) for its in data.hangs if "verdict" in its), "no progress")
        events.append(Event("hang", int(worst["step"]), "", said, f"log/hang-{worst['rank']}.json"))
    for step, its in data.measured.stragglers:
        seconds, others = number(its.get("seconds")), number(its.get("others"))
        said = f"rank {its.get('rank')} held the others up in {its.get('phase')}"
        if seconds is not None and others is not None:
            said += f": {seconds:.3f} s a step, the others {others:.3f}"
        events.append(Event("straggler", step, "", said, "metrics.jsonl"))
    for each in data.saved:
        if each.kept == "unequal" and not any(event.kind == "rollback" for event in events):
            said = f"the ranks' weights differed at step {each.step}: that checkpoint is set aside"
            events.append(Event("rollback", each.step, "", said, f"checkpoints/{each.folder.name}"))
    return events


def check(run_dir: Path) -> None:
    """Raise UserError where a folder is no run dir, naming one below it where there is one."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give a run dir, such as runs/mnist_ddp/20260101T120000Z")
    if not any((run_dir / name).exists() for name in KNOWN):
        below = newest(run_dir, "*", "*/*")
        hint = f"; did you mean {below}?" if below else "; give the folder that holds metrics.jsonl and log/"
        raise UserError(f"{run_dir} holds no run{hint}")


def newest(folder: Path, *patterns: str) -> Path | None:
    """The run dir below ``folder`` in which something was written last; None where there is none."""

    def written(run_dir: Path) -> float:
        times = [0.0]
        for path in (*(run_dir / name for name in KNOWN), *run_dir.glob("log/alive-*")):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_dir()]
    found = [path for path in found if any((path / name).exists() for name in KNOWN[:2] + KNOWN[4:])]
    return max(found, key=written, default=None)
