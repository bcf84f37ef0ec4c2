"""Start one job of a program, watch its ranks' logs, inject a fault, and end all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "SCOREBOARD_JOB"
Position = tuple[int, int]  # epoch, batch


@dataclass(frozen=True)
class Step:
    """A step of one rank."""

    position: Position
    loss: float
    indices: list[int]
    time: float
    pid: int


@dataclass
class Told:
    """The logs of the ranks of a job, or of several in turn: for each rank, its processes' logs in order."""

    ranks: dict[int, list[list[dict[str, Any]]]] = field(default_factory=dict)

    @classmethod
    def read(cls, *folders: Path) -> Told:
        found: dict[int, list[list[dict[str, Any]]]] = {}
        for folder in folders:
            files = []
            for path in folder.glob("*.jsonl"):
                lines = path.read_text().split("\n")[:-1]  # the last is empty, or not whole yet
                if lines:
                    files.append([json.loads(line) for line in lines])
            for events in sorted(files, key=lambda each: float(each[0]["time"])):
                found.setdefault(events[0]["rank"], []).append(events)
        return cls(found)

    def pid(self, rank: int) -> int | None:
        return self.ranks[rank][-1][-1]["pid"] if rank in self.ranks else None

    def steps(self, rank: int | None = None) -> list[Step]:
        """In the order of time; of all ranks where none is named."""
        those = self.ranks.values() if rank is None else [self.ranks.get(rank, [])]
        found = [
            Step((each["epoch"], each["batch"]), each["loss"], each["indices"], each["time"], each["pid"])
            for processes in those
            for events in processes
            for each in events
            if each["event"] == "step"
        ]
        return sorted(found, key=lambda step: step.time)

    def events(self, kind: str) -> list[dict[str, Any]]:
        every = [e for processes in self.ranks.values() for events in processes for e in events if e["event"] == kind]
        return sorted(every, key=lambda each: float(each["time"]))

    def lineage(self) -> dict[Position, list[list[int]]]:
        """Return the updates behind the final weights: for each, as often as it was made, the samples of all its ranks.

        A process that restored a checkpoint resumes from the newest one saved before it; any other starts from scratch.
        """
        history: dict[int, list[Step]] = {}
        saves, restores = self.events("saved"), self.events("restored")
        for rank, processes in self.ranks.items():
            kept: list[Step] = []
            for events in processes:
                local = [e for e in restores if e["pid"] == events[0]["pid"]]
                before = [s for s in saves if local and s["time"] < local[0]["time"]]
                if local and before:
                    last = (before[-1]["epoch"], before[-1]["batch"])
                    # Keep the newest checkpoint's steps once, as a later process may have repeated them.
                    end = max((i for i, step in enumerate(kept) if step.position == last), default=-1)
                    kept = kept[: end + 1]
                else:
                    kept = []
                kept += [
                    Step((e["epoch"], e["batch"]), e["loss"], e["indices"], e["time"], e["pid"])
                    for e in events
                    if e["event"] == "step"
                ]
            history[rank] = kept
        found: dict[Position, list[list[int]]] = {}
        for steps in history.values():
            seen: Counter[Position] = Counter()
            for step in steps:
                times = found.setdefault(step.position, [])
                nth = seen[step.position]
                seen[step.position] += 1
                if nth == len(times):
                    times.append([])
                times[nth].extend(step.indices)
        return found

    def repeated_and_lost(self, examples: Sequence[int], epochs: int) -> tuple[int, int]:
        """How often samples were trained on more than once in an epoch, and how often not at all, over all epochs."""
        counts = [Counter[int]() for _ in range(epochs)]
        for (epoch, _), times in self.lineage().items():
            if epoch < epochs:
                for indices in times:
                    counts[epoch].update(indices)
        repeated = sum(max(0, count[i] - 1) for count in counts for i in examples)
        return repeated, sum(count[i] == 0 for count in counts for i in examples)


def marked(mark: str, sessions: Collection[int]) -> list[int]:
    """Return the processes with the mark in their environment, whatever their parent is by now; no zombies.

    A process that changed its title, as Ray's agents do, may have overwritten its environment. Its session, one of
    ``sessions``, identifies it.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            environ = (folder / "environ").read_bytes().split(b"\0")
            if state != "Z" and (int(session) in sessions or f"{MARK}={mark}".encode() in environ):
                found.append(int(folder.name))
    return found


@dataclass
class Job:
    """Processes that were started together; the last is the launcher of the rank that is harmed."""

    launchers: list[subprocess.Popen[bytes]]
    mark: str
    told: Path
    output: Path
    begun: float
    services: list[subprocess.Popen[bytes]] = field(default_factory=list)  # that never end by themselves

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        return self.launchers[-1]

    def read(self) -> Told:
        return Told.read(self.told)

    def left(self) -> list[int]:
        return marked(self.mark, [each.pid for each in self.launchers + self.services])

    def done(self) -> bool:
        """Return whether all launchers that should end have ended."""
        return all(each.poll() is not None for each in self.launchers)

    def wait(self, until: Callable[[], bool], limit: float) -> bool:
        """Whether it came to be so within so many seconds."""
        end = time.monotonic() + limit
        while not until():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def stop(self) -> None:
        """End all that is left of it, stopped processes too."""
        for _ in range(3):
            for pid in self.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.wait(lambda: not self.left(), 5):
                break
        for each in self.launchers + self.services:
            each.wait(10)


@dataclass(frozen=True)
class Start:
    """A process of a job: its command, and its additions to our environment."""

    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    counts: bool = True  # whether the job lasts as long as it: a service does not


@contextlib.contextmanager
def started(starts: Sequence[Start], folder: Path, told: Path, environ: Mapping[str, str]) -> Iterator[Job]:
    """Start a job in a folder; at the end of the block nothing of it is left."""
    told.mkdir(parents=True)
    mark, output = uuid.uuid4().hex, told.with_suffix(".txt")
    job = Job([], mark, told, output, time.time())
    try:
        with output.open("wb") as file:
            for start in starts:
                process = subprocess.Popen(
                    list(start.command),
                    cwd=folder,
                    env={**os.environ, **environ, **start.environ, MARK: mark, "SCOREBOARD_TOLD": str(told)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                (job.launchers if start.counts else job.services).append(process)
        yield job
    finally:
        job.stop()
