"""Start a checked script in a copy of its folder, read its records, and end all of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from samestep import ConfigError

MARK = "SAMESTEP_CHECK_MARK"
LEFT_GRACE = 5.0  # seconds from a launcher's end until its processes must have ended too
INSIDE = Path(__file__).with_name("inside")


class Step(NamedTuple):
    """An optimizer step of all ranks. ``indices`` is sorted, or None if not seen; weights and state are norms."""

    time: float
    indices: list[int] | None
    shards: list[int]
    epoch: int
    lr: list[float]
    loss: float | None
    state: list[float] | None  # number of tensors before the step, and their norm
    weights_before: float | None
    weights: float | None
    random: int | None


class Save(NamedTuple):
    """A write to a checkpoint after ``step`` steps of its process."""

    step: int
    time: float
    kind: str
    path: str


class Evaluation(NamedTuple):
    """How often each example was evaluated, of ``size`` examples."""

    counts: Counter[int]
    size: int


class Process:
    """The records of one process."""

    def __init__(self, events: Sequence[Mapping[str, Any]], pid: int) -> None:  # noqa: C901
        self.pid, self.begun = pid, float(events[0]["time"])
        self.rank = next((each["rank"] for each in reversed(events) if each["rank"] is not None), None)
        self.steps: list[dict[str, Any]] = []
        self.saves: list[Save] = []
        self.evaluations: list[tuple[list[int] | None, int | None, tuple[int, ...]]] = []
        adapted: list[tuple[list[int] | None, int | None, tuple[int, ...]]] = []
        loaders: dict[int, dict[str, Any]] = {}
        pending: list[tuple[int, list[int] | None]] = []
        epoch, seen = 0, False
        for each in events:
            loader = loaders.setdefault(each.get("loader", 0), {"size": None, "indices": [], "epoch": None})
            if each["event"] == "iterate":
                loader.update(size=each["size"], batches=each["batches"], subset=tuple(each["subset"] or ()))
            elif each["event"] == "batch":
                loader["indices"].append(each["indices"])
                if not seen:
                    self.steps.clear()  # without examples: Horovod steps once to create the optimizer's state
                seen = True
                if each["trains"]:
                    pending.append((each["loader"], each["indices"]))
                elif len(loader["indices"]) == loader.get("batches"):  # all; Lightning does not ask for more
                    loader["epoch"] = -1
                    self.evaluations.append((_joined(loader["indices"]), loader["size"], loader["subset"]))
            elif each["event"] == "end" and loader["epoch"] is None:  # no step followed any of its batches
                pending = [pair for pair in pending if pair[0] != each["loader"]]
                self.evaluations.append((_joined(loader["indices"]), loader["size"], loader["subset"]))
            elif each["event"] == "end":
                loader["end"] = len(self.steps)
            elif each["event"] == "gone":
                loader["gone"] = True
            elif each["event"] == "dropped" and self.evaluations:
                counted, size, subset = self.evaluations[-1]
                self.evaluations[-1] = (counted and counted[: -each["count"]], size, subset)
            elif each["event"] == "evaluated":
                adapted.append((each["indices"], each["size"], ()))
            elif each["event"] == "save":
                self.saves.append(Save(len(self.steps), each["time"], each["kind"], each["path"]))
            elif each["event"] == "step":
                numbers = {number for number, _ in pending}
                if len(numbers) > 1:  # without loaders that only showed a batch: next(iter(loader))
                    pending = [pair for pair in pending if not loaders[pair[0]].get("gone")] or pending
                for number, _ in pending:
                    if number and loaders[number]["epoch"] is None:
                        loaders[number]["epoch"], epoch = epoch, epoch + 1
                self.steps.append({**each, "batches": pending, "epoch": epoch - 1})
                pending = []
        self.evaluations = adapted or self.evaluations
        _align(self.steps, {number: loader.get("end") for number, loader in loaders.items()})
        for step in self.steps:
            step["indices"] = _joined([batch for _, batch in step["batches"]]) if seen else None


def _align(steps: list[dict[str, Any]], ends: Mapping[int, int | None]) -> None:
    """Give batches that a loader returned ahead of their steps, as Accelerate's does, to the steps that used them.

    ``ends`` has the number of steps at the end of a loader; a loader that is ahead ends before its last step.
    """
    first = 0
    for _, group in groupby(steps, key=lambda step: step["epoch"]):
        epoch, begin = list(group), first
        first += len(epoch)
        counts, numbers = [len(step["batches"]) for step in epoch], {n for step in epoch for n, _ in step["batches"]}
        end = ends.get(min(numbers, default=0))
        if len(numbers) != 1 or len(epoch) < 2 or counts[0] <= counts[1] or (end is not None and end >= first):
            continue
        ahead: list[tuple[int, list[int] | None]] = []
        for k, step in enumerate(epoch, begin + 1):
            batches = ahead + step["batches"]
            count = len(batches) if k == first and end is not None else max(1, counts[1])
            step["batches"], ahead = batches[:count], batches[count:]


def _joined(batches: list[list[int] | None]) -> list[int] | None:
    return None if None in batches else [index for batch in batches for index in batch or []]


class Records:
    """The records of all processes of a job."""

    def __init__(self, folder: Path) -> None:
        self.processes = []
        for path in folder.glob("*.jsonl"):
            lines = path.read_text().split("\n")[:-1]  # the last is empty, or not whole yet
            if lines:
                self.processes.append(Process([json.loads(line) for line in lines], int(path.stem)))
        self.processes.sort(key=lambda each: each.begun)
        for each in self.processes:
            if not each.steps:  # it writes for the ranks
                each.saves = [save._replace(step=self._done(save.time)) for save in each.saves]

    def _done(self, when: float) -> int:
        """Return how many steps the rank that has taken most has taken by a time."""
        counts = (sum(step["time"] <= when for step in each.steps) for each in self.processes)
        return max(counts, default=0)

    def ranks(self) -> dict[int, list[Process]]:
        """Return the processes that took steps, by rank, in the order of their start."""
        found: dict[int, list[Process]] = {}
        for each in self.processes:
            if each.steps:
                found.setdefault(each.rank or 0, []).append(each)
        return dict(sorted(found.items()))

    def attempts(self) -> list[list[Step]]:
        """Return the steps of each start of the ranks; a launcher may restart them."""
        ranks = self.ranks().values()
        count = max((len(each) for each in ranks), default=0)
        return [_steps([each[i].steps for each in ranks if i < len(each)]) for i in range(count)]

    def continued(self, since: float) -> list[Step]:
        """Return the steps after ``since`` if the process of a rank outlived the fault, else none."""
        ranks = self.ranks().values()
        if not any(len(each) == 1 and each[0].steps[0]["time"] < since for each in ranks):
            return []
        later = [[step for step in process.steps if step["time"] > since] for each in ranks for process in each]
        # A rank that has come back takes part in the last steps.
        most = max(map(len, later), default=0)
        return _steps([[*[None] * (most - len(steps)), *steps] for steps in later if steps])

    def steps(self) -> list[Step]:
        """Return the steps of the last start."""
        return (self.attempts() or [[]])[-1]

    def saves(self) -> list[Save]:
        """Return the writes that complete a checkpoint: renames if there are any, else opens."""
        found = sorted((save for each in self.processes for save in each.saves), key=lambda save: save.time)
        return [save for save in found if save.kind == "rename"] or found

    def opens(self) -> list[Save]:
        """Return the writes of the first process that wrote checkpoints."""
        return next((each.saves for each in self.processes if each.saves), [])

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations of all ranks together, those whose examples have numbers."""
        found = []
        for each in zip_longest(*(process.evaluations for process in self.processes if process.evaluations)):
            shards = [shard for shard in each if shard is not None]
            size, subsets = max((size or 0 for _, size, _ in shards), default=0), {subset for *_, subset in shards}
            if len(subsets) == 1 and () not in subsets:  # all ranks have the same, so it is a split of the dataset
                size = subsets.pop()[0]
            if size and all(indices is not None for indices, *_ in shards):
                found.append(Evaluation(Counter(i for indices, *_ in shards for i in indices or ()), size))
        return found


def _steps(ranks: Sequence[Sequence[dict[str, Any] | None]]) -> list[Step]:
    """Merge the steps of ranks; None is a step in which a rank did not take part."""
    found: list[Step] = []
    epoch, known = 0, set[int]()
    for shards in zip_longest(*ranks):
        each = [shard for shard in shards if shard is not None]
        first, batches = each[0], [shard["indices"] for shard in each]
        indices = None if None in batches else sorted(_joined(batches) or [])
        if first["epoch"] < 0 and indices is not None:  # recorded by an adapter: an epoch ends when an example returns
            epoch, known = (epoch, known) if known.isdisjoint(indices) else (epoch + 1, set())
            known.update(indices)
        names = ("lr", "loss", "state", "weights_before", "weights", "random")
        values: dict[str, Any] = {name: first.get(name) for name in names}
        when, number = max(shard["time"] for shard in each), epoch if first["epoch"] < 0 else first["epoch"]
        found.append(Step(when, indices, [len(batch or ()) for batch in batches], number, **values))
    return found


class Job:
    """One start of a script, in a session of its own."""

    def __init__(self, command: Sequence[str], work: Path, records: Path, config: Mapping[str, Any]) -> None:
        self.records_folder, self.output, self.mark = records, records.with_suffix(".txt"), uuid.uuid4().hex
        records.mkdir()
        self.begun, self.took, self.left_behind = time.time(), 0.0, 0
        shared = {**config, "work": str(work), "records": str(records)}
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": path, MARK: self.mark, "SAMESTEP_CHECK": json.dumps(shared)}
        try:
            with self.output.open("wb") as file:
                self.process = subprocess.Popen(
                    command,
                    cwd=work,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]}: {error.strerror}: name a command on PATH") from None

    @property
    def code(self) -> int | None:
        """Return the launcher's exit code, as a shell has it; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def read(self) -> Records:
        return Records(self.records_folder)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def last_words(self) -> str:
        """Return the line of the output that has the error, shortened."""
        lines = [re.sub(r"^\[\S+\]:? *", "", line.strip()) for line in self.said().splitlines()]
        errors = [line for line in lines if re.match(r"(error: |(?!.*ChildFailed)[\w.]*(Error|Exception)\b)", line)]
        errors += [line for line in lines if line.startswith("exitcode")]  # torchrun's, of a signal
        return (errors or lines or [""])[0 if errors else -1][:120]

    def progress(self, pattern: str) -> int:
        """Return the number of steps of the fastest rank; without any, the number of losses in the output."""
        counts = [path.read_bytes().count(b'"event": "step"') for path in self.records_folder.glob("*.jsonl")]
        return max(counts, default=0) or len(re.findall(pattern, self.said()))

    def wait(self, until: Callable[[], object], limit: float) -> bool:
        """Return whether a condition came true within ``limit`` seconds."""
        end = time.monotonic() + limit
        while not until():
            self.check_writes()
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        self.check_writes()
        return True

    def check_writes(self) -> None:
        """Raise ConfigError if the script has tried to write outside of its folder."""
        for path in self.records_folder.glob("*.jsonl"):
            for line in path.read_text().split("\n"):
                if line.startswith('{"event": "outside"'):
                    name = json.loads(line)["path"]
                    raise ConfigError(f"the script writes to {name}, outside of its folder: add --allow-write {name}")

    def ended(self, limit: float) -> bool:
        """Wait for the launcher's end, then count the processes that outlive it."""
        done = self.wait(lambda: self.code is not None, limit)
        self.took = time.time() - self.begun
        if done:
            self.wait(lambda: not self.left(), LEFT_GRACE)
            self.left_behind = len(self.left())
        return done

    def left(self) -> list[int]:
        """Return this job's processes, whatever their parent is by now, by their session or their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                if state != "Z" and (int(session) == self.process.pid or marked):
                    found.append(int(folder.name))
        return found

    def stop(self) -> None:
        """End all processes of the job, also stopped ones."""
        for _ in range(100):
            if not (left := self.left()):
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait(10)


@contextlib.contextmanager
def started(command: Sequence[str], work: Path, records: Path, config: Mapping[str, Any]) -> Iterator[Job]:
    """Start a job; at the end of the block no process of it is left."""
    job = Job(command, work, records, config)
    try:
        yield job
    finally:
        job.stop()
