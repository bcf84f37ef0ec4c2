"""Count the steps of one rank's run, from its restore to its result, the same in every framework.

An app trains and reports numbers to its `Run`; the `Run` answers which actions follow. Ranks communicate about the run
through two functions of the app's ``distributed`` module.

The rule: `Run` sees numbers, JSON and numpy arrays. It calls the functions of the app's `Parts`, and the two of
`Collectives`; it hands batches on unseen. It raises, and never ends the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, SupportsFloat, TypeVar

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, events, log, manifest, stop
from samestep.checkpoint import Arrays
from samestep.env import World
from samestep.monitor import Monitor
from samestep.options import Options, check_virtual_ranks, json_value, resume_invariants
from samestep.sharding import RANDOM_NUMBERS, GlobalBatches
from samestep.step_timer import INPUT, PHASES, StepTimer
from samestep.untrusted import shown

if TYPE_CHECKING:
    from samestep.metrics import BestEvaluation, Metrics

Groups = Mapping[str, Arrays]  # the arrays of a checkpoint, by the name of their part
Batch = TypeVar("Batch")
SYNCS_PER_GRACE = 6  # ranks synchronize so often that this many syncs fit into --grace seconds


class Collectives(Protocol):
    """The functions by which ranks communicate about the run: an app's ``distributed`` module has them."""

    def broadcast(self, content: bytes) -> bytes:
        """Return rank 0's ``content`` on every rank."""

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Return every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""


@dataclass(frozen=True)
class Parts:
    """The model, the optimizer and all else that a checkpoint holds.

    Attributes:
        load: takes the `Groups` of a checkpoint, or of --init-from, which has "model" alone, and raises ValueError if
            an array does not fit. A new run does not call it. With `samestep.sharded.shards.Shards`, it takes
            `StoredGroups`.
        groups: returns the `Groups`; with Shards, `ShardGroups`.
        names: the names of the groups; one is "model". A checkpoint without one of them counts as corrupt.
    """

    load: Callable[[Any], None]
    groups: Callable[[], Any]
    names: Sequence[str] = ("model", "optimizer")


class Storage(Protocol):
    """The way in which arrays are kept: `Replicas`, or `samestep.sharded.shards.Shards`."""

    def restore(self, run: Run) -> dict[str, Any]:
        """Load what rank 0 finds into the parts, on all ranks; return rank 0's message about it. Collective."""

    def save(self, run: Run, groups: Any) -> None:
        """Write a checkpoint. Collective."""

    def write_final(self, run: Run, groups: Any) -> tuple[str, dict[str, Any]]:
        """Write the files of weights; return the digest and the result's fields of the best evaluation. Collective."""


class Loader(Protocol[Batch]):  # type: ignore[misc]
    """A loader of batches with a position, such as `samestep.torch.DataLoader`."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from the position to the end of its epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position: ``step`` and ``epoch``, beside others."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""


class StepActions(NamedTuple):
    """The actions after an update, the same on all ranks."""

    sync: bool  # reduce the `StepStats` over ranks, also before each of the others
    log: bool  # write a line of metrics.jsonl, also before `evaluate` or `save`
    evaluate: bool  # an epoch ends, or --evaluate-every
    save: bool  # write a checkpoint


@dataclass(frozen=True)
class StepStats:
    """The sums of all ranks' numbers at a sync.

    Attributes:
        loss: the summed loss of the last step's samples, before its update.
        running_loss: the summed loss of all samples since the last log line.
        counts: other sums over the samples since the last log line, by name, such as ``correct``.
        stop_requests: one slot for each signal of `stop.STOP_SIGNALS`, and one for a launcher that died.
        seconds_per_step: rank 0's seconds per step since the last sync.
        phase_seconds: [world_size x phases]: each rank's seconds in its own slots, in the order of PHASES.
    """

    loss: float
    running_loss: float
    counts: Mapping[str, float]
    stop_requests: tuple[float, ...]
    seconds_per_step: float
    phase_seconds: tuple[float, ...]


class Run:
    """Manage the life of a run.

    Call `restore` and `start` first, `after_step` after each update, and `finish` and `report` last.

    After `restore` the options have the run dir and the dataset. After `start` the steps to train are those from
    ``first_step`` to before ``last_step``. ``eval_metrics`` is the evaluation of the last log line, or {}.
    """

    collectives: Collectives
    parts: Parts
    evaluated: str

    def __init__(
        self,
        app: str,
        options: Options,
        world: World,
        monitor: Monitor | None = None,
        resolve_dataset: Callable[..., Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Start the monitor and install the signal handlers.

        Args:
            app: the app's name, which checkpoints hold.
            options: the parsed options; `restore` completes them.
            world: this rank's place in the job.
            monitor: watches the run, such as `samestep.recovery.watchdog.Watchdog`.
            resolve_dataset: finds a dataset by name, as `samestep.data.datasets.resolve` does.
            storage: the way in which arrays are kept. By default every rank has a replica of the model.

        Raises:
            ConfigError: the number of ranks or machines differs from the launch script's, or exceeds --virtual-ranks.
        """
        self.app, self.options, self.world = app, options, world
        self.monitor = monitor or Monitor()
        options.resolve_dataset = options.resolve_dataset or resolve_dataset
        self.storage = storage or Replicas()
        self.eval_metrics: dict[str, Any] = {}
        self._overflows = False  # the last evaluation
        self.stop_request = stop.StopRequest(options.grace, self._exit, self.monitor.rank_is_lost)
        self.timer = StepTimer()
        self.monitor.start(world, options)
        self.stop_request.install()  # before the heartbeat by which the launch script finds the ranks
        if "SAMESTEP_LAUNCHER" in os.environ and options.run_dir:  # the launch script holds the run dir's lock
            self._open_logs()
        if missing := ", ".join(name for name in options.RESULT_FIELDS if not hasattr(options, name)):
            raise NonRetryableError(f"the options of {app} lack {missing}: add them in apps/{app}/options.py")
        check_virtual_ranks(options, world.world_size)
        if threads := getattr(options, "threads", None):
            os.environ["OMP_NUM_THREADS"] = str(threads)  # for frameworks that read it later than this
        for things, count in (("ranks", world.world_size), ("machines", world.node_count)):
            requested = os.environ.get(f"SAMESTEP_{things.upper()}") or str(count)
            if count is not None and requested != str(count):
                problem = f"the launch script was asked for {shown(requested)} {things}, but {count} joined"
                raise ConfigError(f"{problem} (launcher: {world.launcher}): make N and the options agree")

    def _open_logs(self) -> None:
        """Write into the run dir from here on: rank-<r>.log and heartbeats."""
        log.places = getattr(self.options, "log_format", "") == "full"
        log.start(self.options.run_dir, self.world.rank, self.options.quiet, self.monitor)
        self.monitor.write_to(self.options.run_dir / "log")

    def _exit(self, stopped: stop.Stopped) -> NoReturn:
        """End this rank, from any thread. If other ranks are gone, the signal was a launcher's after a failure."""
        ranks = self.world.local_world_size or self.world.world_size
        log.exit_process(stopped, stopped.is_final or self.monitor.all_ranks_alive(ranks))

    # --- where to start ------------------------------------------------------------------------------------------

    def restore(self, collectives: Collectives, parts: Parts, evaluated: str = "model") -> None:
        """Resolve run dir, dataset and checkpoint or --init-from on rank 0; load the same bytes on all ranks.

        Args:
            collectives: the app's functions by which ranks communicate; later calls use them too.
            parts: what a checkpoint holds; `save` and `finish` ask it for arrays.
            evaluated: the group that is evaluated, and that --keep-best keeps. If it is not "model", `finish` also
                writes model-<evaluated>.safetensors.

        Raises:
            ConfigError, NonRetryableError: on rank 0, which reports the reason.
            NonRetryableError: on every rank, for arrays that no checkpoint can hold, such as bfloat16.
            RemoteRankError: on all other ranks.
        """
        self.collectives = collectives
        self.parts = parts
        self.evaluated = evaluated
        self.monitor.last_collective = getattr(collectives, "last_collective", None)
        message = self.storage.restore(self)  # collective
        self._apply_restored(message)

    @property
    def required_groups(self) -> set[str]:
        """The groups without which a checkpoint counts as corrupt."""
        return {"model", self.evaluated} if self.options.evaluate_only else {*self.parts.names}

    def _apply_restored(self, message: Mapping[str, Any]) -> None:
        self.options.run_dir, self.options.dataset = Path(message["run_dir"]), message["dataset"]
        self.resumed_from, self._state = message["step"], message["state"]
        self._dataset_folder = message["dataset_folder"]
        self.first_step = self.resumed_from or 0
        self._open_logs()
        self.monitor.resume_at(self.first_step)

    def start(
        self, batches: GlobalBatches, test_examples: int, model: str, device: str, metadata: Mapping[str, Any]
    ) -> None:
        """Log model and dataset, and open metrics.jsonl.

        Args:
            batches: the global batches.
            test_examples: number of examples of the test set.
            model: its name, for the log.
            device: its name, for the log.
            metadata: versions and settings that decide the run's numbers, for the header of metrics.jsonl and for
                checkpoints. A program with dropout by `samestep.torch.exact` has RANDOM_NUMBERS in it.
        """
        options, world = self.options, self.world
        total = options.epochs * batches.steps_per_epoch
        self.last_step = max(self.first_step, total if options.max_steps is None else min(total, options.max_steps))
        self.last_step = self.first_step if options.evaluate_only else self.last_step
        metadata = json_value(metadata)
        self._batches, self._metadata, self._step = batches, metadata, self.first_step  # updates done
        self._train_loss: float | None = self._state.get("train_loss")
        self._epoch_loss: float = self._state.get("epoch_loss_sum", 0.0)  # over the samples of the epoch so far
        self._epoch_correct: float = self._state.get("epoch_correct", 0.0)
        self._unread: list[dict[str, SupportsFloat]] = []  # this rank's sums of each step since the last sync
        self._sums: dict[str, float] = {}  # this rank's sums of the steps before, since the last log line
        self._threads = os.environ.get("OMP_NUM_THREADS", "")[:100] or None  # it decides how a framework's sums round
        self._metrics: Metrics | None = None
        self._best: BestEvaluation | None = None
        if world.rank == 0 and not options.evaluate_only:
            from samestep import metrics  # the other ranks do not need it

            self._warn_of_changes()
            header = metrics.header(self.app, options, world, metadata)
            self._metrics = metrics.Metrics(options.run_dir, header, self.resumed_from)
            self._best = metrics.BestEvaluation(self._state.get("best"))
        self._stragglers = list[dict[str, Any]]()  # since the last log line
        examples = f"{batches.n:,} training and {test_examples:,} test examples"
        steps = f"steps {self.first_step} to {self.last_step}, run dir {options.run_dir}"
        place = shown(metadata.get("gpus", metadata.get("device", device)), limit=200)
        where = ": ".join(dict.fromkeys([device, place]))
        if world.rank == 0:  # before the line of the log: readers leave out the log's lines from this event on
            self.monitor.record_event(events.START, last_step=self.last_step, ranks=world.world_size)
        data = f"{options.dataset} from {self._dataset_folder}"
        ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
        log.info(f"{model} on {data}: {examples}, {ranks} on {where}, {steps}")
        now = time.monotonic()
        self._begun = now - (0.0 if options.evaluate_only else self._state.get("seconds", 0.0))
        manifest.seal({"app": self.app, "step": self._step, **self._state_to_save()})  # or fail before the first update
        self._last_sync, self._next_sync, self._stop_signal = (self.first_step, now), self.first_step + 1, 0
        self._last_log = (now, batches.samples_seen(self.first_step))
        self.stop_request.install()
        self.stop_request.in_training = True
        self._bar = log.progress(self.last_step, self.first_step)

    def _warn_of_changes(self) -> None:
        """Warn if a resumed run has other threads, libraries or random numbers than before."""
        options = self.options
        metadata = self._metadata
        before = self._state.get("threads", self._threads)
        if before != self._threads:
            now = shown(self._threads or "unset")
            change = f"was {shown(before or 'unset')} before this resume and is {now} now"
            name = "--threads" if getattr(options, "threads", None) else "OMP_NUM_THREADS"
            log.warning(f"{name} {change}: sums may round differently; set it back for the same bits")
        was = self._state.get("metadata", metadata) if getattr(options, "virtual_ranks", None) else metadata
        ignored = ("threads", "gpus", RANDOM_NUMBERS)
        changed = [name for name in metadata if name not in ignored and was.get(name) != metadata[name]]
        if changed:
            texts = []
            for name in changed:
                texts.append(f"{name} {shown(was.get(name))} before this resume, {shown(metadata[name])} now")
            log.warning(f"{'; '.join(texts)}: the bits may differ from here on")
        trains_on = self.resumed_from is not None and self.first_step < self.last_step
        if trains_on and RANDOM_NUMBERS in metadata and RANDOM_NUMBERS not in self._state.get("metadata", {}):
            log.warning(
                "random numbers of dropout differ from samestep 0.2's from here on: go on, or start a new run with "
                "--no-resume"
            )

    # --- after an update -----------------------------------------------------------------------------------------

    def batches(self, loader: Loader[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches from ``first_step`` to before ``last_step``, and time the input phase."""
        epoch = self.first_step // self._batches.steps_per_epoch
        loader.load_state_dict({**loader.state_dict(), "step": self.first_step, "epoch": epoch})
        while self._step < self.last_step:
            with self.timer.phase(INPUT):
                iterator = iter(loader)
            while self._step < self.last_step:
                with self.timer.phase(INPUT):
                    batch = next(iterator, None)
                if batch is None:
                    break
                yield batch

    def after_step(self, loss_sum: SupportsFloat | None = None, **counts: SupportsFloat) -> StepActions:
        """Count an update, send a heartbeat, and return the actions that follow. It does not communicate.

        Args:
            loss_sum: the summed loss of this rank's samples of the step: a number, or a detached tensor without
                dimensions, which is not read before `sync`. A program that adds up its losses elsewhere passes None.
            counts: other sums over these samples. ``correct=`` becomes ``accuracy`` in a log line, ``correct_top2=``
                becomes ``accuracy_top2``.
        """
        if loss_sum is not None:
            self._unread.append({"loss": loss_sum, **counts})
        self.count_step(self._step)
        return self.actions(self._step - 1)

    def count_step(self, step: int) -> None:
        """Count the update ``step``, from 0, and send a heartbeat."""
        self._bar.update(step + 1 - self._step)
        self._step = step + 1
        self.monitor.beat(self._step)

    def actions(self, step: int) -> StepActions:
        """Return the actions after the update ``step``. It has no side effect."""
        options, done = self.options, step + 1
        every = options.log_every, options.evaluate_every, options.checkpoint_every
        logs, evaluates, saves = (steps > 0 and done % steps == 0 for steps in every)  # 0 is never
        ends, epoch_ends = done == self.last_step, done % self._batches.steps_per_epoch == 0
        evaluate = epoch_ends or evaluates or (ends and options.keep_best)
        save = epoch_ends or ends or saves or (evaluate and options.keep_best)
        line = evaluate or save or logs
        return StepActions(line or done >= self._next_sync, line, evaluate, save)

    def sync(self, loss_sum: SupportsFloat | None = None, running_loss: SupportsFloat | None = None) -> StepActions:
        """Add up losses, counts and stop requests over all ranks; return the actions again. Collective.

        A stop request adds a log line and a checkpoint to the actions. Call it once at each `StepActions.sync`.

        Args:
            loss_sum: the summed loss of this rank's samples of the last step, if `after_step` did not get it.
            running_loss: the summed loss of all its samples since the last log line, likewise.
        """
        loss = 0.0
        for sums in self._unread:
            loss = _number(sums["loss"])
            for name, value in sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + _number(value)
        self._unread = []
        counts = {name: value for name, value in self._sums.items() if name != "loss"}
        row = [
            loss if loss_sum is None else _number(loss_sum),
            self._sums.get("loss", 0.0) if running_loss is None else _number(running_loss),
            (time.monotonic() - self._last_sync[1]) / max(1, self._step - self._last_sync[0]),
            *self.stop_request.encode(self.monitor.launcher_died()),
            *self.timer.pop(),
            *counts.values(),
        ]
        table = self.collectives.all_gather(np.array(row))  # collective; [world_size, numbers]
        total = table.sum(axis=0).tolist()
        first_phase = 3 + len(stop.STOP_SIGNALS) + 1
        first_count = first_phase + len(PHASES)
        stats = StepStats(
            loss=total[0],
            running_loss=total[1],
            counts=dict(zip(counts, total[first_count:])),
            stop_requests=tuple(total[3:first_phase]),
            seconds_per_step=float(table[0, 2]),
            phase_seconds=tuple(table[:, first_phase:first_count].ravel().tolist()),
        )
        return self.apply_global_stats(stats)

    def apply_global_stats(self, stats: StepStats) -> StepActions:
        """Take the sums over all ranks and return the actions again: a stop request adds a log line and a checkpoint.

        The next sync follows after ``--log-every`` steps, or sooner, so that several syncs fit into ``--grace``.
        """
        self._stats = stats
        self._last_sync = self._step, time.monotonic()
        interval = self.options.grace / SYNCS_PER_GRACE / max(stats.seconds_per_step, 1e-6)
        actions, self._next_sync = self.actions(self._step - 1), self._step + max(1, int(interval))
        self._stop_signal, self._launcher_died = stop.decode(stats.stop_requests)
        self._stragglers += self.monitor.update(self._step, stats.phase_seconds)
        return actions._replace(log=True, save=True) if self._stop_signal else actions

    def log_metrics(self, evaluation: dict[str, Any], **extra: float) -> dict[str, Any]:
        """Append a line to metrics.jsonl on rank 0; return it on every rank.

        The losses come from the last `sync`. ``evaluation`` is {} or has ``test_loss`` and so on; ``extra`` are numbers
        for this line alone. Raises as `Monitor.check_losses`; but a test loss that is NaN or infinite again after a
        restart becomes None.
        """
        step, batches, stats = self._step - 1, self._batches, self._stats
        loss, epoch, samples = stats.loss / batches.size(step), batches.epoch(step), batches.samples_seen(self._step)
        self.monitor.check_losses({"loss": loss, "loss before it": stats.running_loss}, self._step)
        evaluation = self._check_evaluation(evaluation, is_of_update=True)
        samples_in_epoch = samples - batches.samples_seen(epoch * batches.steps_per_epoch)
        now, new_samples = time.monotonic(), samples - self._last_log[1]
        self._epoch_loss += stats.running_loss
        self._epoch_correct += stats.counts.get("correct", 0.0)
        self._train_loss, self.eval_metrics = self._epoch_loss / samples_in_epoch, evaluation
        if self._best and self.options.keep_best:
            self._best.update(self._step, evaluation)
        if evaluation:
            accuracy = self._epoch_correct / samples_in_epoch if "correct" in stats.counts else None
            shown = {"train_loss": self._train_loss, "train_accuracy": accuracy, **evaluation, "test_examples": None}
            words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in shown.items() if value is not None]
            place = [f"epoch {epoch + 1}/{self.options.epochs}", f"step {self._step}", f"{now - self._begun:.1f} s"]
            log.info("  ".join([*place, *words]))
        if self._step % batches.steps_per_epoch == 0:
            self._epoch_loss = self._epoch_correct = 0.0
        line = {"step": self._step, "epoch": epoch, "samples_seen": samples, "loss": loss}
        line |= {name.replace("correct", "accuracy", 1): count / new_samples for name, count in stats.counts.items()}
        line |= {"samples_per_second": round(new_samples / (now - self._last_log[0]), 1), **evaluation, **extra}
        self._last_log = now, samples
        self._sums = {}
        if self._metrics:
            self._metrics.write(**line, **({"stragglers": self._stragglers} if self._stragglers else {}))
            self._stragglers = []
        return line

    def _check_evaluation(self, evaluation: Mapping[str, Any], is_of_update: bool = False) -> dict[str, Any]:
        """Return the evaluation with None for numbers that are NaN or infinite, and warn of the first.

        Batch normalization hides from the training loss that weights have grown too large; with its running statistics
        the activations then overflow. A flipped bit has the same effect, but not again at the same step: so after an
        update, the first such evaluation raises RetryableError.
        """
        values = {name: value if value is None or math.isfinite(value) else None for name, value in evaluation.items()}
        if values != evaluation and not self._overflows:
            if is_of_update:
                with contextlib.suppress(NonRetryableError):
                    self.monitor.check_losses({"test loss": evaluation.get("test_loss", math.nan)}, self._step)
            text = f"at step {self._step} the test loss is NaN or infinite, reported as null: activations overflow with"
            log.warning(f"{text} batch normalization's running statistics: lower --lr, or raise --global-batch-size")
        self._overflows = None in values.values() if values else self._overflows
        return values

    def _check_weights(self, weights: Mapping[str, Any]) -> None:
        """Raise NonRetryableError if the last evaluation overflowed because weights are NaN or infinite."""
        arrays = [np.asarray(getattr(array, "values", array)) for array in weights.values()] if self._overflows else []
        if not all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f"):
            raise NonRetryableError(f"at step {self._step} weights are NaN or infinite: lower --lr")

    def save(self) -> None:
        """Write a checkpoint of the last logged updates, after all ranks have compared their arrays. Collective.

        Raises:
            RetryableError: an array's bits differ between ranks; nothing is saved.
            NonRetryableError: weights are NaN or infinite.
            Stopped: a rank received a stop signal.
        """
        groups = self.parts.groups()
        self._check_weights(groups[self.evaluated])
        self.storage.save(self, groups)  # collective
        self._stop_if_requested()

    def _stop_if_requested(self) -> None:
        if self._stop_signal:
            if self.world.rank == 0:
                checkpoint.finish()
            # collective: a rank that ends makes the launcher end the others, so rank 0 must write first
            self.collectives.broadcast(b"")
            text = f"stopped by {signal.Signals(self._stop_signal).name} at step {self._step}, which is saved"
            raise stop.Stopped(self._stop_signal, text, is_final=not self._launcher_died)

    @property
    def metrics(self) -> Metrics | None:
        """The file metrics.jsonl on rank 0; None on other ranks and with --evaluate-only."""
        return self._metrics

    @property
    def step(self) -> int:
        """The number of updates done."""
        return self._step

    def checkpoint_state(self, metrics: Metrics) -> tuple[dict[str, Any], dict[str, Any], int, int | None]:
        """Return a checkpoint's content beside arrays: state, options, number to keep, protected step."""
        metrics.sync()
        values = self._state_to_save()
        protected_step = self._best.step if self._best else None
        return values["state"], values["arithmetic"], self.options.keep_checkpoints, protected_step

    def _state_to_save(self) -> dict[str, Any]:
        """Return a manifest's state and arithmetic, as JSON values."""
        state = {name: self._state[name] for name in ("requested_dataset", "dataset_fingerprint")}
        state |= {"epoch_loss_sum": self._epoch_loss, "epoch_correct": self._epoch_correct, "metadata": self._metadata}
        state |= {"train_loss": self._train_loss, "seconds": time.monotonic() - self._begun, "threads": self._threads}
        if self._best and self._best.state:
            state["best"] = self._best.state
        return {"state": json_value(state), "arithmetic": resume_invariants(self.options)}

    # --- the result ----------------------------------------------------------------------------------------------

    def finish(self, evaluation: Mapping[str, Any]) -> None:
        """Check that all ranks hold the same weights, and write them on rank 0. Collective. Raises as `save`."""
        self._bar.close()
        evaluation = self._check_evaluation(evaluation, is_of_update=self.first_step < self.last_step)
        groups = self.parts.groups()
        self._check_weights(groups["model"])
        seconds = time.monotonic() - self._begun
        samples = 0 if self.options.evaluate_only else self._batches.samples_seen(self.last_step)
        digest, best = self.storage.write_final(self, {name: groups[name] for name in ("model", self.evaluated)})
        counts = {"train_examples": self._batches.n, "steps": self.last_step, "train_loss": self._train_loss}
        speed = {"seconds": round(seconds, 3), "samples_per_second": round(samples / seconds, 1)}
        origin = {"resumed_from_step": self.resumed_from, "weights_sha256": digest}
        self._result = {**counts, **evaluation, **best, **speed, **origin}

    def write_best(self, copy: Callable[[Path, Path], None]) -> dict[str, Any]:
        """Write the weights of the best evaluation by ``copy(checkpoint, file)``; return the result's fields."""
        return self._best.write(self.options.run_dir, copy) if self._best and self.options.keep_best else {}

    def report(self, framework: str, framework_version: str, backend: str, device: str, **fields: Any) -> None:
        """Write result.json and, as the last line on stdout, ``RESULT {json}``, on rank 0."""
        self.monitor.stop()
        if self.world.rank == 0:
            from samestep import metrics  # the other ranks do not need it

            names = {"framework": framework, "framework_version": framework_version}
            values = {**names, "backend": backend, "device": device, **fields, **self._result}
            metrics.report(self.app, self.options, self.world, values)


class Replicas:
    """The `Storage` of replicas, which must agree to the bit."""

    def restore(self, run: Run) -> dict[str, Any]:
        """Resolve the run on rank 0; load the same bytes on all ranks. Raises as `Run.restore`."""
        message: dict[str, Any] = {}
        contents: dict[str, bytes] = {}
        problem: Exception | None = None
        if run.world.rank == 0:
            try:
                message, contents = self._open(run)
            except (ConfigError, NonRetryableError) as error:
                problem = error
                message = {"exit_code": 2 if isinstance(error, ConfigError) else 1}
        broadcast = run.collectives.broadcast
        message = json.loads(broadcast(json.dumps(message).encode()))  # collective; JSON, as pickle is never loaded
        if problem:
            raise problem
        if "exit_code" in message:
            raise RemoteRankError(message["exit_code"])
        contents = {group: broadcast(contents.get(group, b"")) for group in message["groups"]}  # collective
        if contents and run.world.rank != 0:
            run.parts.load({group: safetensors.numpy.load(content) for group, content in contents.items()})
        for arrays in run.parts.groups().values():  # what `save` would refuse is refused before the first update
            for name, array in arrays.items():
                checkpoint.check_array(name, array)
        return message

    def _open(self, run: Run) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return rank 0's message, and the files that its parts have loaded."""
        from samestep import rundir  # the other ranks do not need it

        is_fresh = not run.world.restart_count
        return rundir.open_run(run.app, run.options, is_fresh, run.parts.load, run.required_groups)

    def save(self, run: Run, groups: Groups) -> None:
        """Compare the replicas, and write a checkpoint on rank 0. Raises as `Run.save`."""
        run.monitor.check_replicas(run.collectives.all_gather, groups, run.step)  # collective
        if run.metrics:
            state = run.checkpoint_state(run.metrics)
            checkpoint.save(run.options.run_dir, run.app, run.step, groups, *state)

    def write_final(self, run: Run, groups: Groups) -> tuple[str, dict[str, Any]]:
        """Compare the replicas' digests, and write model.safetensors and model-<group>.safetensors on rank 0."""
        folder = run.options.run_dir
        digest = checkpoint.weights_sha256(groups["model"])
        run.monitor.check_final_weights(run.collectives, digest, folder if run.metrics else None)  # collective
        if run.metrics:
            for name, arrays in groups.items():
                checkpoint.save_weights(folder / checkpoint.weights_file(name), arrays)

        def copy_best(saved: Path, path: Path) -> None:
            checkpoint.save_weights(path, checkpoint.read(saved).arrays(run.evaluated))

        return digest, run.write_best(copy_best)


def _number(value: SupportsFloat) -> float:
    """Return a loss as a float. torch's ``float`` warns of a tensor that requires a gradient, and ``item`` does not."""
    item = getattr(value, "item", None)
    return float(value if item is None else item())
