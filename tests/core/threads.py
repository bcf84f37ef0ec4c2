"""Run a toy app whose ranks are threads of this process, and which calls `samestep.run` without a framework.

All values are sums of a few powers of two, so that results are equal bit for bit at any world size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from samestep import checkpoint
from samestep.checkpoint import Arrays
from samestep.data import datasets
from samestep.data.files import MNIST_FILES
from samestep.env import World
from samestep.options import Options, Parser, add_common, bounded_float
from samestep.recovery.watchdog import Watchdog
from samestep.run import Groups, Parts, Run, StepActions
from samestep.sharding import GlobalBatches, shard
from samestep.step_timer import PHASES

LIMIT = 30.0  # seconds; every exchange ends sooner
TRAINING = 20
TEST = 6  # number of test images that `put` writes


class LeftAloneError(Exception):
    """Raised if another rank ends before an exchange, in which a framework's collective would hang."""


class CrashError(Exception):
    """Raised to simulate a kill of this rank."""


class Meeting:
    """Exchange values among the threads of one job; raise LeftAloneError if a thread has ended."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._changed = threading.Condition()
        self._given: list[dict[int, Any]] = []  # the values of each exchange, by rank
        self._ended: set[int] = set()

    def exchange(self, rank: int, turn: int, local: Any) -> list[Any]:
        with self._changed:
            while len(self._given) <= turn:
                self._given.append({})
            given = self._given[turn]
            given[rank] = local
            self._changed.notify_all()
            settled = self._changed.wait_for(
                lambda: len(given) == self._world_size or bool(self._ended - given.keys()), LIMIT
            )
            if not settled or len(given) < self._world_size:
                raise LeftAloneError(f"rank {rank} waits for {sorted({*range(self._world_size)} - given.keys())}")
            return [given[each] for each in range(self._world_size)]

    def end(self, rank: int) -> None:
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()


@dataclass
class Collectives:
    """Implement an app's ``distributed`` module for `Run`, for one thread."""

    meeting: Meeting
    rank: int
    turn: int = 0  # exchanges so far

    def broadcast(self, content: bytes) -> bytes:
        assert isinstance(content, bytes)
        received: bytes = self._exchange(content)[0]
        return received

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        assert row.ndim == 1
        return np.stack(self._exchange(row.copy()))

    def _exchange(self, local: Any) -> list[Any]:
        self.turn += 1
        return self.meeting.exchange(self.rank, self.turn - 1, local)


def parse(*arguments: str) -> Options:
    """Parse the toy's options. By default the toy trains 3 epochs of 4 steps on the data of `put`."""
    parser = Parser(prog="toy")
    add_common(
        parser,
        epochs=3,
        global_batch_size=6,
        lr="1",
        datasets=("mnist", "mnist-5k"),
        devices=("auto", "cpu"),
        resolve=datasets.resolve,
    )
    parser.add_argument("--momentum", type=bounded_float(0.0), default=0.5)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse([*arguments])
    options.lr = 1.0 if options.lr is None else options.lr
    return options


def put(data_dir: Path, label: int = 0) -> Path:
    """Write a dataset of 20 training and 6 test images, all of class ``label``, and return its folder."""
    folder = data_dir / "mnist"
    folder.mkdir(parents=True, exist_ok=True)
    for (images_file, labels_file), n in ((MNIST_FILES[:2], TRAINING), (MNIST_FILES[2:], TEST)):
        images = np.full((n, 28, 28), 7, np.uint8)
        labels = np.full(n, label, np.uint8)
        for file, array in ((images_file, images), (labels_file, labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / file).write_bytes(header + array.tobytes())
    return folder


def loss_of(sample: int, step: int) -> float:
    """Return the loss of a sample before the update of ``step``: a multiple of 1/16, so that sums are exact."""
    return ((sample * 7 + step * 5) % 64 + 1) / 16


COUNTING = "counting"  # name of the app that counts correct and correct_twice


def is_hit(sample: int, step: int) -> bool:
    """Return whether the toy classifies the sample correctly at ``step``."""
    return loss_of(sample, step) < 2


@dataclass
class Model:
    """The weights and optimizer state of the toy, by group and name."""

    groups: dict[str, Arrays]

    def load(self, groups: Groups) -> None:
        """Load the weights and the optimizer state.

        Raises:
            ValueError: names, shapes or dtypes differ from the model's.
        """
        for group, arrays in groups.items():
            difference = checkpoint.state_dict_diff(arrays, self.groups[group])
            if difference:
                raise ValueError(difference)
            for name, array in arrays.items():
                self.groups[group][name][...] = array

    def update(self, gradient: float, momentum: float) -> None:
        weights = self.groups["model"]
        velocity = self.groups["optimizer"]["w.momentum"]
        velocity[...] = momentum * velocity + gradient
        weights["w"][...] -= velocity / 64
        weights["updates"][...] += 1


def build_model(size: int = 5, dtype: str = "float32") -> Model:
    w: Arrays = {"w": np.ones(size, dtype), "updates": np.zeros((), np.int64)}
    return Model({"model": w, "optimizer": {"w.momentum": np.zeros(size, dtype)}})


@dataclass
class Faults:
    """Faults to inject into a job, by default none. Each rank calls ``after_update`` after each update."""

    after_update: Callable[[int, int, Model], None] = lambda rank, done, model: None
    before_finish: Callable[[int, Model], None] = lambda rank, model: None
    spend: Callable[[int, int, str], None] = lambda rank, step, phase: None  # called in each phase; steps from 0
    loss_scale: Mapping[int, float] = field(default_factory=dict)  # factor of a step's loss, by step
    accuracy: Mapping[int, float] = field(default_factory=dict)  # test accuracy, by number of updates
    leaves_after: int | None = None  # number of updates after which the program leaves its loop


@dataclass
class Rank:
    """The state of one thread, and its error if it failed."""

    options: Options
    model: Model
    loaded: list[list[str]] = field(default_factory=list)  # the groups of each call of `load`
    run: Run | None = None
    actions: dict[int, StepActions] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    exchanges: dict[str, int] = field(default_factory=dict)  # number of exchanges by method of `Run`
    first_beat: str | None = None  # content of the heartbeat file after the first update
    error: BaseException | None = None

    @property
    def done(self) -> Run:
        """Return the run, or raise this rank's error."""
        if self.error:
            raise self.error
        assert self.run is not None
        return self.run


def train(me: Rank, app: str, world: World, ranks: Collectives, faults: Faults) -> None:
    """Train as the `main` of every app does."""
    options = me.options
    model = me.model

    def load(groups: Groups) -> None:
        me.loaded.append(sorted(groups))
        model.load(groups)

    def counted(name: str, call: Callable[[], Any]) -> Any:
        before = ranks.turn
        result = call()
        me.exchanges[name] = me.exchanges.get(name, 0) + ranks.turn - before
        return result

    me.run = run = Run(app, options, world, Watchdog(), datasets.resolve)
    counted("restore", lambda: run.restore(ranks, Parts(load, lambda: model.groups)))
    data = datasets.load(options.dataset, options.data_dir)
    n = len(data.train_labels)
    batches = GlobalBatches(n, options.global_batch_size, options.seed, world.rank, world.world_size)
    counted("start", lambda: run.start(batches, len(data.test_labels), "toy", "cpu", {"numpy": np.__version__}))
    for step in range(run.first_step, run.last_step):
        for phase in PHASES:
            with run.timer.phase(phase):
                faults.spend(world.rank, step, phase)
        loss_sum = sum(loss_of(int(sample), step) for sample in batches.indices(step)) * faults.loss_scale.get(
            step, 1.0
        )
        hits = sum(is_hit(int(sample), step) for sample in batches.indices(step))
        counts = {"correct": hits, "correct_twice": 2 * hits} if app == COUNTING else {}
        gradient = ranks.all_gather(np.array([loss_sum])).sum() / batches.rows(step).global_size
        model.update(gradient, options.momentum)
        faults.after_update(world.rank, step + 1, model)
        actions: StepActions = counted("after_step", partial(run.after_step, loss_sum, **counts))
        me.actions[step + 1] = actions
        if me.first_beat is None:
            me.first_beat = (options.run_dir / "log" / f"alive-{world.rank}").read_text()
        if actions.sync:
            actions = counted("sync", run.sync)
        if actions.log:
            tested = evaluate(model, data.test_labels, ranks, world, faults) if actions.evaluate else {}
            me.lines.append(counted("log_metrics", partial(run.log_metrics, tested)))
        if actions.save:
            counted("save", run.save)
        if run.step == faults.leaves_after:
            break
    tested = run.eval_metrics or evaluate(model, data.test_labels, ranks, world, faults)
    faults.before_finish(world.rank, model)
    counted("finish", partial(run.finish, tested))
    counted("report", lambda: run.report("numpy", np.__version__, "threads", "cpu"))


def evaluate(
    model: Model, labels: NDArray[np.uint8], ranks: Collectives, world: World, faults: Faults
) -> dict[str, Any]:
    first, last = shard(len(labels), world.rank, world.world_size)
    local = np.array([float(model.groups["model"]["w"][0]) * (last - first), float(last - first)])
    loss_sum, examples = ranks.all_gather(local).sum(axis=0).tolist()
    accuracy = faults.accuracy.get(int(model.groups["model"]["updates"]), 0.5)
    return {"test_loss": loss_sum / examples, "test_accuracy": accuracy, "test_examples": int(examples)}


def job(
    world_size: int,
    arguments: Sequence[str],
    faults: Faults | None = None,
    app: str = "toy",
    size: int = 5,
    world: Mapping[str, Any] | None = None,
    ranks: list[Rank] | None = None,
) -> list[Rank]:
    """Run the toy on ``world_size`` threads; return them when all have ended. ``world`` sets more fields of `World`."""
    meeting = Meeting(world_size)
    ranks = [] if ranks is None else ranks  # a fault may read these ranks
    ranks += [Rank(parse(*arguments), build_model(size)) for _ in range(world_size)]

    def live(rank: int) -> None:
        me = ranks[rank]
        try:
            train(me, app, World(rank, world_size, **(world or {})), Collectives(meeting, rank), faults or Faults())
        except BaseException as problem:
            me.error = problem
        finally:
            meeting.end(rank)
            if me.run and hasattr(me.run, "monitor"):
                me.run.monitor.stop()  # the watchdog of a failed rank would end this process

    threads = [threading.Thread(target=live, args=[rank], daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive(), "a rank hangs"
    checkpoint.finish()  # as log.run always does
    return ranks
