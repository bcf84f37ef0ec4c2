"""Read the events that the processes of a script recorded: steps, checkpoints and evaluations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from samestep_check.series import Save, is_temporary, moves

RECORDED_BEFORE = 0.5  # maximum number of seconds from the record of a write to the write itself
Event = Mapping[str, Any]
Key = Any  # key of an example: None, a number, a string, or a tuple of keys
Keys = list[Key] | None  # None if the keys are unknown
Subsets = tuple[tuple[int, int], ...]  # (length, checksum) of each Subset around a dataset, the outermost first
EVALUATED = -1  # `Loader.epoch` of a loader whose evaluation is complete


class Step(NamedTuple):
    """An optimizer step, merged over all ranks. A value that the check did not record is None."""

    time: float  # when the last rank finished the step, in seconds since 1970 (UTC)
    indices: Keys  # keys of the global batch's examples, sorted by `ordered`
    shards: list[int]  # number of examples on each rank
    epoch: int  # number of the epoch, from 0
    lr: list[float]  # learning rate of each parameter group
    loss: float | None
    optimizer: int | None  # number of the optimizer in the order of creation, from 1
    kind: str  # class name of the optimizer
    state: dict[str, list[float]] | None  # [tensors, joint norm, tensors that are zero] by name, before the step
    settings: list[dict[str, Any]] | None  # other numeric settings of each parameter group
    scale: float | None  # scale of a GradScaler
    weights_before: float | None  # norm of the weights before the step
    weights: float | None  # norm of the weights after the step
    random: dict[str, int] | None  # checksum of each random number generator's state before the step
    random_by_rank: list[dict[str, int]]  # these checksums of each rank that takes the step
    random_before: list[dict[str, int]]  # these checksums at each loader start and save since the previous step
    line: str | None  # place of the step in the script, as ``file:line``
    called: list[Called]  # modules called without gradients since the previous step


class Called(NamedTuple):
    """The weights or the buffers of a module that was called without gradients, such as a moving average."""

    name: str  # ``weights of CLASS`` or ``buffers of CLASS``
    norm: float


class Evaluation(NamedTuple):
    """How often one evaluation counts each example of a dataset with ``size`` examples."""

    counts: Counter[Key]
    size: int


@dataclass
class Batch:
    """A batch that a loader returned."""

    number: int | None  # None if an adapter recorded the batch
    loader: int
    keys: Keys


@dataclass
class Loader:
    """An iteration over a DataLoader."""

    size: int | None = None  # number of examples in the dataset
    batches: int | None = None  # number of batches in the iteration
    subsets: Subsets = ()
    keys: list[Keys] = field(default_factory=list)  # keys of each returned batch
    epoch: int | None = None  # None until a step uses a batch of the loader; EVALUATED after an evaluation
    end: int | None = None  # number of steps at the loader's end
    is_gone: bool = False
    position: int = 0  # number of training batches before the first batch of an evaluation


@dataclass
class Before:
    """Events of a process between two steps."""

    random: list[dict[str, int]] = field(default_factory=list)  # checksums of generators at loader starts and saves
    called: list[Called] = field(default_factory=list)


@dataclass
class RankStep:
    """An optimizer step of one rank."""

    event: Event
    epoch: int
    batches: list[Batch]
    before: Before
    position: int  # number of training batches that loaders returned before the step
    indices: Keys = None

    @property
    def time(self) -> float:
        return float(self.event["time"])


class Shard(NamedTuple):
    """A rank's part of an evaluation."""

    keys: Keys
    size: int | None
    subsets: Subsets
    is_complete: bool = True  # False if the loop left the loader before its last batch
    position: int = 0  # number of training batches that loaders returned before the evaluation


class Process:
    """The records of one process."""

    def __init__(self, events: Sequence[Event], pid: int) -> None:
        reader = Reader()
        for event in events:
            reader.read(event)
        reader.finish()
        ranks = [event["rank"] for event in events if event["rank"] is not None]
        self.pid = pid
        self.begun = float(events[0]["time"])
        self.rank: int | None = ranks[-1] if ranks else None
        self.steps = reader.steps
        self.saves = reader.saves
        self.reads = reader.reads
        self.evaluations = reader.adapted or reader.evaluations()
        self.trained = reader.trained()
        self.called = reader.since.called  # modules called without gradients after the last step
        self.notes = reader.notes


@dataclass
class Notes:
    """Facts about a process that limit the check or explain its results."""

    is_inferred: bool = False  # a DataLoader returned training batches, but no step recorded which batches it used
    workers: int = 0  # largest number of workers of a DataLoader
    eps: float = 0.0  # machine epsilon of the lowest floating-point precision of weights or of autocast
    draws: bool = False  # the process is a DataLoader's worker, and draws random numbers for its examples
    timeout: float | None = None  # timeout of collectives, in seconds
    parts: list[str] = field(default_factory=list)  # names of samestep.torch that the script uses
    unseen: list[str] = field(default_factory=list)  # hooks that failed, with their exceptions
    reason: str = ""  # why examples have no keys
    awaited: set[str] = field(default_factory=set)  # modules for which the adapter called after_import
    imported: set[str] = field(default_factory=set)  # awaited modules that were imported
    is_uncovered: bool = False  # the copy is not mounted over the script's folder in this process


class Reader:
    """Read the events of a process in order. The method ``on_KIND`` reads an event of kind KIND."""

    def __init__(self) -> None:
        self.steps: list[RankStep] = []
        self.saves: list[Save] = []
        self.reads: list[tuple[float, str]] = []  # time and path of the first read of each checkpoint file
        self._evaluated: dict[int, Loader] = {}  # loaders of evaluations, by number
        self._last_evaluated: Loader | None = None  # the loader that ended last
        self.adapted: list[Shard] = []  # evaluations that an adapter recorded
        self.notes = Notes()
        self.since = Before()  # events since the newest step
        self._loaders: dict[int, Loader] = {}
        self._pending: list[Batch] = []  # batches that no step has used yet
        self._ended: list[Batch] = []  # batches of loaders that ended since the last step, without a step on the loader
        self._epoch = 0
        self._has_batches = False  # a step has used a batch
        self._has_numbers = False  # a DataLoader has returned a training batch
        self._follows = False  # a step has recorded the batches that it used
        self._position = 0  # number of training batches so far
        self._step_thread: int | None = None  # thread of the newest step

    def read(self, event: Event) -> None:
        """Read one event, or ignore an event whose kind has no method."""
        method = getattr(self, f"on_{event['event']}", None)
        if method is not None:
            method(event)

    def finish(self) -> None:
        """Set the keys of each step's examples, after the last event."""
        self.notes.is_inferred = self._has_numbers and not self._follows
        if not self._follows:
            _align(self.steps, self._loaders)
        if self._has_batches:
            for step in self.steps:
                step.indices = _joined([batch.keys for batch in step.batches])

    def evaluations(self) -> list[Shard]:
        """Return this process's shard of each evaluation, in the order in which the evaluations began."""
        found = []
        for number in sorted(self._evaluated):
            loader = self._evaluated[number]
            is_complete = loader.epoch == EVALUATED
            found.append(Shard(_joined(loader.keys), loader.size, loader.subsets, is_complete, loader.position))
        return found

    def trained(self) -> dict[int, set[Key]]:
        """Return the keys of the training loaders' examples, by the size of the dataset."""
        found: dict[int, set[Key]] = {}
        for loader in self._loaders.values():
            is_training = loader.epoch not in (None, EVALUATED)
            if is_training and loader.size:
                found.setdefault(loader.size, set()).update(_joined(loader.keys) or ())
        return found

    def _loader(self, event: Event) -> Loader:
        return self._loaders.setdefault(event["loader"], Loader())

    def _remember_generators(self, event: Event) -> None:
        states = event.get("random")
        if states is not None:
            self.since.random.append(states)

    def on_iterate(self, event: Event) -> None:
        self._remember_generators(event)
        loader = self._loader(event)
        loader.size = event["size"]
        loader.batches = event["batches"]
        loader.subsets = tuple((length, checksum) for length, checksum in event.get("subsets") or ())
        self.notes.workers = max(self.notes.workers, event.get("workers", 0))

    def on_batch(self, event: Event) -> None:
        keys = None if event["indices"] is None else [_frozen(key) for key in event["indices"]]
        loader = self._loader(event)
        loader.keys.append(keys)
        if keys is None:
            self.notes.reason = event.get("reason", "")
        if event["trains"]:
            self._position += 1
            self._has_numbers |= event.get("number") is not None
            self._pending.append(Batch(event.get("number"), event["loader"], keys))
        else:
            self._begin_evaluation(event["loader"], loader)
            if len(loader.keys) == loader.batches:  # the last batch; Lightning causes no ``end`` event
                self._end_evaluation(loader)

    def on_end(self, event: Event) -> None:
        loader = self._loader(event)
        if loader.epoch is None:  # no step used a batch of this loader
            self._ended += [batch for batch in self._pending if batch.loader == event["loader"]]
            self._pending = [batch for batch in self._pending if batch.loader != event["loader"]]
            self._begin_evaluation(event["loader"], loader)
            self._end_evaluation(loader)
        else:
            loader.end = len(self.steps)

    def _begin_evaluation(self, number: int, loader: Loader) -> None:
        if number not in self._evaluated:
            self._evaluated[number] = loader
            loader.position = self._position

    def _end_evaluation(self, loader: Loader) -> None:
        loader.epoch = EVALUATED
        self._last_evaluated = loader

    def _reopen(self, used: Sequence[int]) -> None:
        """Count a loader as a training loader if it ended before the first step on its prefetched batches."""
        reopened = {batch.loader for batch in self._ended if batch.number in used}
        for number in reopened:
            loader = self._evaluated.pop(number)
            loader.epoch = None
            loader.end = len(self.steps)
        self._pending += [batch for batch in self._ended if batch.loader in reopened]
        self._ended.clear()

    def on_gone(self, event: Event) -> None:
        self._loader(event).is_gone = True

    def on_draws(self, _: Event) -> None:
        self.notes.draws = True

    def on_precision(self, event: Event) -> None:
        self.notes.eps = max(self.notes.eps, event["eps"])

    def on_dropped(self, event: Event) -> None:
        last = self._last_evaluated
        if last is not None:
            keys = _joined(last.keys)
            if keys:
                last.keys = [keys[: -event["count"]]]

    def on_evaluated(self, event: Event) -> None:
        keys = [_frozen(key) for key in event["indices"]]
        self.adapted.append(Shard(keys, event["size"], ()))

    def on_save(self, event: Event) -> None:
        self._remember_generators(event)
        self.saves.append(
            Save(
                step=len(self.steps),
                time=event["time"],
                kind=event["kind"],
                path=event["path"],
                line=event.get("line"),
                in_background=bool(self.steps) and event.get("thread") != self._step_thread,
                source=event.get("source"),
            )
        )

    def on_read(self, event: Event) -> None:
        self.reads.append((event["time"], event["path"]))

    def on_step(self, event: Event) -> None:
        self._step_thread = event.get("thread")
        used = event.get("used")
        if used:
            self._follows = True
            self._reopen(used)
        # If an earlier step recorded batch numbers, a step without numbers, such as a step of a GAN's generator, trains
        # on no batch. Batches of an adapter have no numbers, so the next step uses all of them.
        has_numbers = any(batch.number is not None for batch in self._pending)
        if used or (self._follows and has_numbers):
            taken = self._take(used or ())
        else:
            taken = self._without_shown(self._pending)
            self._pending = []
        for batch in taken:
            self._begin_epoch(batch)
        if taken and not self._has_batches:
            self.steps.clear()  # Horovod takes a step without examples, to create the optimizer's state
            self._has_batches = True
        self.steps.append(RankStep(event, self._epoch - 1, taken, self.since, self._position))
        self.since = Before()

    def on_called(self, event: Event) -> None:
        if self._position:  # earlier calls may use weights that the script has not restored yet
            self.since.called.append(Called(event["name"], event["norm"]))

    def _take(self, numbers: Sequence[int]) -> list[Batch]:
        taken = [batch for batch in self._pending if batch.number in numbers]
        self._pending = [batch for batch in self._pending if batch.number not in numbers]
        return taken

    def _without_shown(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches whose iterators still exist, which excludes the batch of a ``next(iter(loader))``."""
        if len({batch.loader for batch in batches}) < 2:
            return batches
        return [batch for batch in batches if not self._loaders[batch.loader].is_gone] or batches

    def _begin_epoch(self, batch: Batch) -> None:
        loader = self._loaders[batch.loader]
        if batch.loader and loader.epoch is None:
            loader.epoch = self._epoch
            self._epoch += 1

    def on_start(self, event: Event) -> None:
        self.notes.is_uncovered = not event.get("covered", False)

    def on_timeout(self, event: Event) -> None:
        self.notes.timeout = event["seconds"]

    def on_part(self, event: Event) -> None:
        self.notes.parts.append(event["name"])

    def on_unseen(self, event: Event) -> None:
        self.notes.unseen.append(f"{event['hook']}: {event['error']}")

    def on_awaited(self, event: Event) -> None:
        self.notes.awaited.add(event["module"])

    def on_imported(self, event: Event) -> None:
        self.notes.imported.add(event["module"])


def _frozen(key: Any) -> Key:
    return tuple(_frozen(each) for each in key) if isinstance(key, list) else key


def ordered(keys: Iterable[Key]) -> list[Key]:
    """Return sorted keys: numbers by value, then all other keys by their ``repr``."""
    return sorted(keys, key=lambda key: (0, key, "") if isinstance(key, (int, float)) else (1, 0, repr(key)))


def _joined(batches: Sequence[Keys]) -> Keys:
    found: list[Key] = []
    for keys in batches:
        if keys is None:
            return None
        found += keys
    return found


def _align(steps: list[RankStep], loaders: Mapping[int, Loader]) -> None:
    """Move batches that a loader prefetched, as Accelerate's loaders do, to the steps that used them.

    A loader that prefetches ends before the last step of its epoch.
    """
    first = 0
    for _, group in groupby(steps, key=lambda step: step.epoch):
        epoch = list(group)
        begin = first
        first += len(epoch)
        numbers: set[int] = set()
        for step in epoch:
            numbers.update(batch.loader for batch in step.batches)
        if len(numbers) != 1 or len(epoch) < 2:
            continue
        end = loaders[min(numbers)].end
        count = len(epoch[1].batches)
        if len(epoch[0].batches) > count and (end is None or end < first):
            _shift(epoch, max(1, count), None if end is None else first - begin)


def _shift(epoch: list[RankStep], count: int, last: int | None) -> None:
    """Assign ``count`` of the batches so far to each step, and all remaining batches to step ``last``, from 1."""
    ahead: list[Batch] = []
    for k, step in enumerate(epoch, 1):
        ahead += step.batches
        taken = len(ahead) if k == last else count
        step.batches = ahead[:taken]
        ahead = ahead[taken:]


class Records:
    """The records of all processes of a job."""

    def __init__(self, folder: Path) -> None:
        self.processes: list[Process] = []
        for path in folder.glob("*.jsonl"):
            lines = path.read_text().split("\n")[:-1]  # the last line is empty or incomplete
            if lines:
                events = [json.loads(line) for line in lines]
                self.processes.append(Process(events, int(path.stem)))
        self.processes.sort(key=lambda each: each.begun)
        for each in self.processes:
            if not each.steps:  # a process without steps may save for the ranks
                each.saves = [save._replace(step=self._done(save.time), in_background=True) for save in each.saves]

    def _done(self, when: float) -> int:
        """Return the number of steps that the fastest rank had taken by the time ``when``."""
        counts = (sum(step.time <= when for step in each.steps) for each in self.processes)
        return max(counts, default=0)

    def ranks(self) -> dict[int, list[Process]]:
        """Return the processes that took steps, by rank, in the order of their start."""
        found: dict[int, list[Process]] = {}
        for each in self.processes:
            if each.steps:
                found.setdefault(each.rank or 0, []).append(each)
        return dict(sorted(found.items()))

    def attempts(self) -> list[list[Step]]:
        """Return the steps of each start of the ranks. A launcher may restart ranks several times."""
        ranks = self.ranks().values()
        count = max((len(each) for each in ranks), default=0)
        return [_steps([each[i].steps for each in ranks if i < len(each)]) for i in range(count)]

    def continued(self, since: float) -> list[Step]:
        """Return the steps after ``since``, in seconds since 1970 (UTC); no steps if each rank has been restarted."""
        ranks = self.ranks().values()
        if not any(len(each) == 1 and each[0].steps[0].time < since for each in ranks):
            return []
        later = []
        for processes in ranks:
            for process in processes:
                later.append([step for step in process.steps if step.time > since])
        # A restarted rank takes part only in the last steps, so shorter lists are aligned at the end.
        most = max(map(len, later), default=0)
        return _steps([[*[None] * (most - len(steps)), *steps] for steps in later if steps])

    def steps(self) -> list[Step]:
        """Return the steps of the last start."""
        attempts = self.attempts()
        return attempts[-1] if attempts else []

    def first_times(self) -> list[float]:
        """Return when the fastest rank finished each step of the last start, in seconds since 1970 (UTC)."""
        ranks = [[step.time for step in processes[-1].steps] for processes in self.ranks().values()]
        return [min(time for time in times if time is not None) for times in zip_longest(*ranks)]

    def last_called(self) -> list[Called]:
        """Return the modules that the first rank called without gradients after its last step."""
        first = next(iter(self.ranks().values()), None)
        return first[-1].called if first else []

    def last_digests(self) -> dict[int, dict[int, int | None]]:
        """Return the checksums of weights and state after each rank's last step, by optimizer and rank."""
        found: dict[int, dict[int, int | None]] = {}
        for rank, processes in self.ranks().items():
            for step in processes[-1].steps:
                optimizer = step.event.get("optimizer")
                if optimizer is not None:
                    found.setdefault(optimizer, {})[rank] = step.event["digest"]
        return found

    def saves(self) -> list[Save]:
        """Return the writes that complete a checkpoint's file: all writes except the opens of temporary files."""
        found: list[Save] = []
        for each in self.processes:
            found += each.saves
        found.sort(key=lambda save: save.time)
        known = moves(found)
        return [save for save in found if not is_temporary(save, known)]

    def reads(self) -> set[str]:
        """Return the paths of the checkpoint files that the processes read before the end of the first step."""
        first = min(self.first_times(), default=inf)
        found: set[str] = set()
        for each in self.processes:
            found.update(path for time, path in each.reads if time < first)
        return found

    def line_of_save(self, begin: float, end: float) -> str | None:
        """Return the line of the script that first writes or renames a checkpoint between two times, or None.

        A process records a write just before the write itself, so a record may precede ``begin``.
        """
        for each in self.processes:
            for save in each.saves:
                if save.line and begin - RECORDED_BEFORE <= save.time <= end:
                    return save.line
        return None

    def opens(self) -> list[Save]:
        """Return the writes of the process with the most writes to checkpoints; of the first among equals."""
        return max((each.saves for each in self.processes), key=len, default=[])

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations whose examples have keys, each merged over all ranks.

        An evaluation that a rank has left early, such as Lightning's sanity check of two batches, is omitted. So is a
        loader of the training dataset that ended without a batch. If samplers split a dataset, the size of an
        evaluation excludes the examples of the other splits.
        """
        found = []
        parts = [process.evaluations for process in self.processes if process.evaluations]
        for shards in _paired(parts):
            evaluation = _whole(shards)
            if evaluation is None or not all(shard.is_complete for shard in shards):
                continue
            if evaluation.counts or not self._trained(evaluation.size):
                found.append(evaluation)
        return [each._replace(size=each.size - len(self._elsewhere(each, found))) for each in found]

    def _trained(self, size: int) -> set[Key]:
        """Return the keys on which all processes trained, of a dataset with ``size`` examples."""
        found: set[Key] = set()
        for process in self.processes:
            found |= process.trained.get(size, set())
        return found

    def _elsewhere(self, evaluation: Evaluation, others: Sequence[Evaluation]) -> set[Key]:
        """Return the keys of the training and of other evaluations, if these use other examples of the dataset."""
        own = evaluation.counts.keys()
        trained = self._trained(evaluation.size)
        if not trained.isdisjoint(own):
            return set()
        for other in others:
            if trained and other.size == evaluation.size and own.isdisjoint(other.counts):
                trained |= other.counts.keys()
        return trained

    def sizes(self) -> list[set[int]]:
        """Return, for each rank, the sizes of the datasets that the last start trains on."""
        return [set(processes[-1].trained) for processes in self.ranks().values()]

    def notes(self) -> Iterator[Notes]:
        """Yield the notes of each process."""
        for each in self.processes:
            yield each.notes


def _paired(parts: Sequence[Sequence[Shard]]) -> list[list[Shard]]:
    """Return the shards of each evaluation, from the shards of each process.

    If a process has another number of evaluations than the others, the number of training batches before an evaluation
    shows which shards belong together.
    """
    if len({len(part) for part in parts}) == 1:
        return [list(shards) for shards in zip(*parts)]
    found = []
    for position in sorted({shard.position for part in parts for shard in part}):
        there = [[shard for shard in part if shard.position == position] for part in parts]
        for each in zip_longest(*there):
            found.append([shard for shard in each if shard is not None])
    return found


def _whole(shards: Sequence[Shard]) -> Evaluation | None:
    """Merge the ranks' shards of an evaluation. Return None if examples have no keys, or no dataset has a size."""
    size = max((shard.size or 0 for shard in shards), default=0)
    for each in zip(*(reversed(shard.subsets) for shard in shards)):
        if len(set(each)) > 1:
            break
        size = each[0][0]  # a Subset that is equal on all ranks is a split of the dataset, not a shard
    keys = _joined([shard.keys for shard in shards])
    if not size or keys is None:
        return None
    return Evaluation(Counter(keys), size)


def _steps(ranks: Sequence[Sequence[RankStep | None]]) -> list[Step]:
    """Return the steps of all ranks, merged. None marks a step in which a rank did not take part."""
    found: list[Step] = []
    epoch = 0
    known: set[Key] = set()
    for shards in zip_longest(*_aligned(ranks)):
        each = [shard for shard in shards if shard is not None]
        indices = _joined([shard.indices for shard in each])
        number = each[0].epoch
        if number < 0:  # an adapter records no epochs, so a repeated example begins an epoch
            if indices is not None and not known.isdisjoint(indices):
                epoch += 1
                known.clear()
            known.update(indices or ())
            number = epoch
        found.append(_merged(each, indices, number))
    return found


def _aligned(ranks: Sequence[Sequence[RankStep | None]]) -> Sequence[Sequence[RankStep | None]]:
    """Return the ranks' steps, aligned by the number of batches before each step, because a rank may skip steps."""
    by_position = []
    for steps in ranks:
        by_position.append({step.position: step for step in steps if step is not None})
    if any(len(known) < len(steps) for known, steps in zip(by_position, ranks)):
        return ranks  # a batch has several steps, or a rank joined later
    longest = max(by_position, key=len, default={})
    if not all(known.keys() <= longest.keys() for known in by_position):
        return ranks
    return [[known.get(position) for position in longest] for known in by_position]


def _merged(shards: Sequence[RankStep], indices: Keys, epoch: int) -> Step:
    event = shards[0].event
    return Step(
        time=max(shard.time for shard in shards),
        indices=None if indices is None else ordered(indices),
        shards=[len(shard.indices or ()) for shard in shards],
        epoch=epoch,
        lr=event.get("lr") or [],
        loss=event.get("loss"),
        optimizer=event.get("optimizer"),
        kind=event.get("kind") or "the optimizer",
        state=event.get("state"),
        settings=event.get("settings"),
        scale=event.get("scale"),
        weights_before=event.get("weights_before"),
        weights=event.get("weights"),
        random=event.get("random"),
        random_by_rank=[shard.event.get("random") or {} for shard in shards],
        random_before=shards[0].before.random,
        line=event.get("line"),
        called=shards[0].before.called,
    )
