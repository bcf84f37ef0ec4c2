"""Count the steps of one rank's run, from its restore to its result, the same in every framework.

An app trains and reports numbers to its `Run`; the `Run` answers which actions follow. Ranks communicate about the run
through two functions of the app's ``distributed`` module.

The rule: `Run` sees numbers, JSON and numpy arrays. It calls the functions of the app's `Parts`, and the two of
`Collectives`; it hands batches on unseen. It raises, and never ends the process.

`Run` only sets the order of calls. Its parts work alone too: `samestep.cadence`, `samestep.step_sync`,
`samestep.progress`, `samestep.best`, `samestep.loss_guard`, `samestep.arithmetic`, `samestep.recorder`,
`samestep.trace`, and `samestep.replicas` or `samestep.sharded.shards`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsFloat, TypeVar

from samestep import ConfigError, NonRetryableError, events, log, manifest, stop
from samestep.arithmetic import Arithmetic
from samestep.cadence import Cadence, StepActions
from samestep.env import World
from samestep.job_info import JobInfo
from samestep.loss_guard import LossGuard
from samestep.monitor import Monitor
from samestep.options import Options, check_virtual_ranks, json_value, resume_invariants
from samestep.parts import Collectives, Groups, Parts
from samestep.progress import Progress
from samestep.recorder import Recorder, open_metrics
from samestep.replicas import Replicas
from samestep.sharding import GlobalBatches
from samestep.step_sync import StepSync
from samestep.step_timer import INPUT, StepTimer
from samestep.trace import Trace
from samestep.untrusted import shown

if TYPE_CHECKING:
    from samestep.metrics import Metrics

__all__ = ["Collectives", "Groups", "Loader", "Parts", "Run", "StepActions", "Storage"]

Batch = TypeVar("Batch")


class Storage(Protocol):
    """The way in which arrays are kept: `Replicas`, or `samestep.sharded.shards.Shards`."""

    is_sharded: bool  # no rank holds the whole arrays

    def restore(self, run: Run) -> dict[str, Any]:
        """Load what rank 0 finds into the parts, on all ranks; return rank 0's message about it. Collective."""

    def save(self, run: Run, groups: Any) -> None:
        """Copy the arrays, and let a thread write the checkpoint. Collective."""

    def finish(self, run: Run) -> None:
        """Wait until the last checkpoint is on the disk, at least on rank 0. May be collective."""

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


@dataclass(frozen=True)
class Restored:
    """The run that `Run.restore` found.

    Attributes:
        step: the updates of its checkpoint; None for a new run.
        state: the state of its checkpoint, and the names and the fingerprint of the dataset.
        dataset_folder: the folder of the dataset.
    """

    step: int | None
    state: Mapping[str, Any]
    dataset_folder: str


class Run:
    """Manage the life of a run.

    Call `restore` and `start` first, `after_step` after each update, and `finish` and `report` last.

    After `restore` the options have the run dir and the dataset. After `start` the steps to train are those from
    ``first_step`` to before ``last_step``. ``eval_metrics`` is the evaluation of the last log line, or {}.
    """

    collectives: Collectives
    parts: Parts
    restored: Restored
    arithmetic: Arithmetic
    progress: Progress
    recorder: Recorder

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
        self.app = app
        self.options = options
        self.world = world
        self.monitor = monitor or Monitor()
        self.storage = storage or Replicas()
        self.guard = LossGuard(self.monitor)
        options.resolve_dataset = options.resolve_dataset or resolve_dataset
        stop_request = stop.StopRequest(options.grace, self._exit, self.monitor.rank_is_lost)
        self.step_sync = StepSync(stop_request, StepTimer(), grace=options.grace)
        self.monitor.start(world, options)
        stop_request.install()  # before the heartbeat by which the launch script finds the ranks
        if JobInfo.from_environ(os.environ).launcher and options.run_dir:  # the launch script holds the run dir's lock
            self._open_logs()
        check_result_fields(app, options)
        check_virtual_ranks(options, world.world_size)
        if options.threads:
            os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for frameworks that read it later than this
        check_launch(world)

    def _open_logs(self) -> None:
        """Write into the run dir from here on: rank-<r>.log and heartbeats."""
        log.places = self.options.log_format == "full"
        log.start(self.options.run_dir, self.world.rank, self.options.quiet, self.monitor)
        self.monitor.write_to(self.options.run_dir / "log")

    def _exit(self, stopped: stop.Stopped) -> NoReturn:
        """End this rank, from any thread. If other ranks are gone, the signal was a launcher's after a failure."""
        ranks = self.world.local_world_size or self.world.world_size
        log.exit_process(stopped, stopped.is_final or self.monitor.all_ranks_alive(ranks))

    # --- numbers for the app -------------------------------------------------------------------------------------

    @property
    def timer(self) -> StepTimer:
        """The seconds of this rank's phases."""
        return self.step_sync.timer

    @property
    def stop_request(self) -> stop.StopRequest:
        """The stop signal that this rank received."""
        return self.step_sync.stop_request

    @property
    def resumed_from(self) -> int | None:
        """The number of updates of the restored checkpoint; None for a new run."""
        return self.restored.step

    @property
    def first_step(self) -> int:
        """The number of updates done before this start."""
        return self.restored.step or 0

    @property
    def evaluated(self) -> str:
        """The group that is evaluated."""
        return self.parts.evaluated

    @property
    def last_step(self) -> int:
        """The number of updates of the whole run."""
        return self.progress.last_step

    @property
    def step(self) -> int:
        """The number of updates done."""
        return self.progress.step

    @property
    def eval_metrics(self) -> dict[str, Any]:
        """The evaluation of the last log line, or {}."""
        return self.progress.evaluation

    @property
    def metrics(self) -> Metrics | None:
        """The file metrics.jsonl on rank 0; None on other ranks and with --evaluate-only."""
        return self.recorder.metrics

    @cached_property
    def cadence(self) -> Cadence:
        """The steps at which this run logs, evaluates and saves."""
        options = self.options
        return Cadence(
            log_every=options.log_every,
            evaluate_every=options.evaluate_every,
            checkpoint_every=options.checkpoint_every,
            steps_per_epoch=self.progress.batches.steps_per_epoch,
            last_step=self.last_step,
            keep_best=bool(options.keep_best),
        )

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
        self.parts = replace(parts, evaluated=evaluated)
        self.monitor.last_collective = getattr(collectives, "last_collective", None)
        message = self.storage.restore(self)  # collective
        self.options.run_dir = Path(message["run_dir"])
        self.options.dataset = message["dataset"]
        self.restored = Restored(
            step=message["step"],
            state=message["state"],
            dataset_folder=message["dataset_folder"],
        )
        self._open_logs()
        self.monitor.resume_at(self.first_step)

    @property
    def required_groups(self) -> set[str]:
        """The groups without which a checkpoint counts as corrupt."""
        if self.options.evaluate_only:
            return {"model", self.evaluated}
        return set(self.parts.names)

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
        is_writer = self.world.rank == 0 and not self.options.evaluate_only
        state = self.restored.state
        last_step = last_step_of(self.options, batches.steps_per_epoch, first_step=self.first_step)
        seconds = 0.0 if self.options.evaluate_only else state.get("seconds", 0.0)
        self.arithmetic = Arithmetic.of_process(metadata)
        self.progress = Progress(
            batches,
            self.first_step,
            last_step=last_step,
            state=state,
            seconds=seconds,
            keep_best=self.options.keep_best,
        )
        metrics = None
        if is_writer:
            self._warn_of_changes()
            metrics = open_metrics(
                self.app,
                self.options,
                world=self.world,
                metadata={**self.arithmetic.metadata, "dataset_fingerprint": state["dataset_fingerprint"]},
                resumed_from=self.resumed_from,
            )
        if self.world.rank == 0:  # before the line of the log: readers leave out the log's lines from this event on
            self.monitor.record_event(events.START, last_step=last_step, ranks=self.world.world_size)
        log.info(self._describe_start(model, device, test_examples=test_examples))
        manifest.seal({"app": self.app, "step": self.step, **self._state_to_save()})  # or fail before the first update
        self.step_sync.start(self.first_step)
        self.stop_request.install()
        self.stop_request.in_training = True
        self.recorder = Recorder(last_step, self.first_step, metrics=metrics, trace=self._start_trace())

    def _start_trace(self) -> Trace | None:
        """Let the app's optimizer report to a trace, on the ranks whose digests count. Raises ConfigError."""
        options = self.options
        if not options.trace_every or options.evaluate_only:
            return None
        if self.parts.watch is None:
            raise ConfigError("--trace-every needs `watch` in the program's Parts: add it, or leave the option out")
        is_sharded = self.storage.is_sharded
        if self.world.rank != 0 and not is_sharded:
            return None
        trace = Trace(options.trace_every, self.first_step, rank=self.world.rank, is_sharded=is_sharded)
        self.parts.watch(trace)
        return trace

    def _describe_start(self, model: str, device: str, test_examples: int) -> str:
        """Return the first line of the log."""
        metadata = self.arithmetic.metadata
        processor = shown(metadata.get("gpus", metadata.get("device", device)), limit=200)
        place = device if processor == device else f"{device}: {processor}"
        world_size = self.world.world_size
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        return (
            f"{model} on {self.options.dataset} from {self.restored.dataset_folder}: "
            f"{self.progress.batches.n:,} training and {test_examples:,} test examples, "
            f"{ranks} on {place}, "
            f"steps {self.first_step} to {self.last_step}, run dir {self.options.run_dir}"
        )

    def _warn_of_changes(self) -> None:
        """Warn if a resumed run has other threads, libraries or random numbers than before."""
        state = self.restored.state
        options = self.options
        name = "--threads" if options.threads else "OMP_NUM_THREADS"
        changes = [self.arithmetic.threads_change(state, name)]
        if options.virtual_ranks:
            changes.append(self.arithmetic.metadata_change(state))
        if self.resumed_from is not None and self.first_step < self.last_step:
            changes.append(self.arithmetic.random_numbers_change(state))
        for change in changes:
            if change:
                log.warning(change)

    # --- after an update -----------------------------------------------------------------------------------------

    def batches(self, loader: Loader[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches from ``first_step`` to before ``last_step``, and time the input phase."""
        epoch = self.first_step // self.progress.batches.steps_per_epoch
        loader.load_state_dict({**loader.state_dict(), "step": self.first_step, "epoch": epoch})
        while self.step < self.last_step:
            with self.timer.phase(INPUT):
                iterator = iter(loader)
            while self.step < self.last_step:
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
            self.step_sync.add(loss_sum, counts)
        self.count_step(self.step)
        return self.actions(self.step - 1)

    def count_step(self, step: int) -> None:
        """Count the update ``step``, from 0, and send a heartbeat."""
        done = step + 1
        self.recorder.count(done, done - self.step)
        self.progress.step = done
        self.monitor.beat(done)

    def actions(self, step: int) -> StepActions:
        """Return the actions after the update ``step``. It has no side effect."""
        done = step + 1
        return self.cadence.after(done, self.step_sync.is_due(done))

    def sync(self, loss_sum: SupportsFloat | None = None, running_loss: SupportsFloat | None = None) -> StepActions:
        """Add up losses, counts and stop requests over all ranks; return the actions again. Collective.

        A stop request adds a log line and a checkpoint to the actions. Call it once at each `StepActions.sync`.

        Args:
            loss_sum: the summed loss of this rank's samples of the last step, if `after_step` did not get it.
            running_loss: the summed loss of all its samples since the last log line, likewise.
        """
        totals = self.step_sync.reduce(
            self.step,
            self.collectives.all_gather,
            launcher_died=self.monitor.launcher_died(),
            loss_sum=loss_sum,
            running_loss=running_loss,
        )
        self.recorder.stragglers += self.monitor.update(self.step, totals.phase_seconds)
        self.recorder.write_losses(self.progress.step_losses(totals))
        self.recorder.write_trace(self.collectives.all_gather)  # collective if the model is sharded
        actions = self.actions(self.step - 1)
        if totals.stop_signal:
            return actions._replace(log=True, save=True)
        return actions

    def log_metrics(self, evaluation: dict[str, Any], **extra: float) -> dict[str, Any]:
        """Append a line to metrics.jsonl on rank 0; return it on every rank.

        The losses come from the last `sync`. ``evaluation`` is {} or has ``test_loss`` and so on; ``extra`` are numbers
        for this line alone. Raises as `Monitor.check_losses`; but a test loss that is NaN or infinite again after a
        restart becomes None.
        """
        progress = self.progress
        totals = self.step_sync.totals
        losses = {"loss": totals.loss / progress.num_losses, "loss before it": totals.running_loss}
        self.guard.check_losses(losses, self.step)
        evaluation = self.guard.check_evaluation(evaluation, self.step, is_of_update=True)
        line = progress.add(totals)
        progress.evaluation = evaluation
        progress.best.update(self.step, evaluation)
        if evaluation:
            log.info(self._describe_evaluation(line))
        line.update(evaluation)
        line.update(extra)
        self.step_sync.end_log_line()
        self.recorder.write(line)
        return line

    def _describe_evaluation(self, line: Mapping[str, Any]) -> str:
        """Return the line of the log for the evaluation of a line of metrics.jsonl."""
        progress = self.progress
        values = {"train_loss": progress.train_loss, "train_accuracy": progress.train_accuracy, **progress.evaluation}
        epoch = line["epoch"] + 1
        texts = [f"epoch {epoch}/{self.options.epochs}", f"step {self.step}", f"{progress.seconds:.1f} s"]
        for name, value in values.items():
            if value is not None and name != "test_examples":
                texts.append(f"{name.replace('_', ' ')} {value:.4f}")
        return "  ".join(texts)

    def save(self) -> None:
        """Save the last logged updates, after all ranks have compared their arrays. Collective.

        Training continues while a thread writes the checkpoint. The next save reports a failure of this thread.

        Raises:
            RetryableError: an array's bits differ between ranks, or a shard's from those after its update; nothing is
                saved.
            NonRetryableError: weights are NaN or infinite, or the checkpoint before could not be written.
            Stopped: a rank received a stop signal.
        """
        groups = self.parts.groups()
        self.guard.check_weights(groups[self.evaluated], self.step)
        if self.recorder.trace is not None:
            self.recorder.trace.check()
        self.storage.save(self, groups)  # collective
        self._stop_if_requested()

    def _stop_if_requested(self) -> None:
        totals = self.step_sync.totals
        if not totals.stop_signal:
            return
        self.storage.finish(self)
        # collective: a rank that ends makes the launcher end the others, so rank 0 must write first
        self.collectives.broadcast(b"")
        name = signal.Signals(totals.stop_signal).name
        raise stop.Stopped(
            totals.stop_signal,
            f"stopped by {name} at step {self.step}, which is saved",
            is_final=not totals.launcher_died,
        )

    def checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any], int, int | None]:
        """Return a checkpoint's content beside arrays: state, options, number to keep, protected step."""
        values = self._state_to_save()
        return values["state"], values["arithmetic"], self.options.keep_checkpoints, self.progress.best.step

    def _state_to_save(self) -> dict[str, Any]:
        """Return a manifest's state and arithmetic, as JSON values."""
        state = {name: self.restored.state[name] for name in ("requested_dataset", "dataset_fingerprint")}
        state.update(self.arithmetic.state())
        state.update(self.progress.state())
        return {"state": json_value(state), "arithmetic": resume_invariants(self.options)}

    # --- the result ----------------------------------------------------------------------------------------------

    def finish(self, evaluation: Mapping[str, Any]) -> None:
        """Check that all ranks hold the same weights, and write them on rank 0. Collective. Raises as `save`."""
        self.recorder.close()
        has_trained = self.first_step < self.last_step
        evaluation = self.guard.check_evaluation(evaluation, self.step, is_of_update=has_trained)
        groups = self.parts.groups()
        self.guard.check_weights(groups["model"], self.step)
        seconds = self.progress.seconds
        samples = 0 if self.options.evaluate_only else self.progress.batches.samples_seen(self.last_step)
        digest, best = self.storage.write_final(self, {name: groups[name] for name in ("model", self.evaluated)})
        self.recorder.result = {
            "train_examples": self.progress.batches.n,
            "steps": self.last_step,
            "train_loss": self.progress.train_loss,
            **evaluation,
            **best,
            "seconds": round(seconds, 3),
            "samples_per_second": round(samples / seconds, 1),
            "resumed_from_step": self.resumed_from,
            "weights_sha256": digest,
        }

    def write_best(self, copy: Callable[[Path, Path], None]) -> dict[str, Any]:
        """Write the weights of the best evaluation by ``copy(checkpoint, file)``; return the result's fields."""
        if self.metrics is None or not self.options.keep_best:
            return {}
        return self.progress.best.write(self.options.run_dir, copy)

    def report(self, framework: str, framework_version: str, backend: str, device: str, **fields: Any) -> None:
        """Write result.json and, as the last line on stdout, ``RESULT {json}``, on rank 0.

        Args:
            framework: name of the framework.
            framework_version: its version.
            backend: backend of the collectives.
            device: kind of device.
            **fields: further fields of the result.
        """
        self.monitor.stop()
        if self.world.rank != 0:
            return
        from samestep import metrics  # the other ranks do not need it

        values = {
            "framework": framework,
            "framework_version": framework_version,
            "backend": backend,
            "device": device,
            **fields,
            **self.recorder.result,
        }
        metrics.report(self.app, self.options, world=self.world, values=values)


def check_result_fields(app: str, options: Options) -> None:
    """Raise NonRetryableError if the options lack one that every result repeats."""
    missing = [name for name in options.RESULT_FIELDS if not options.offers(name)]
    if missing:
        raise NonRetryableError(f"the options of {app} lack {', '.join(missing)}: add them in apps/{app}/options.py")


def check_launch(world: World) -> None:
    """Raise ConfigError if more or fewer ranks or machines joined than the launch script was asked for."""
    info = JobInfo.from_environ(os.environ)
    for things, requested, count in (
        ("ranks", info.ranks, world.world_size),
        ("machines", info.machines, world.node_count),
    ):
        if requested is not None and count is not None and requested != count:
            problem = f"the launch script was asked for {requested} {things}, but {count} joined"
            raise ConfigError(f"{problem} (launcher: {world.launcher}): make N and the options agree")


def last_step_of(options: Options, steps_per_epoch: int, first_step: int) -> int:
    """Return the number of updates of the whole run, at least those that are done.

    Args:
        options: options of the run.
        steps_per_epoch: number of global batches of an epoch.
        first_step: number of updates done.
    """
    if options.evaluate_only:
        return first_step
    last_step: int = options.epochs * steps_per_epoch
    if options.max_steps is not None:
        last_step = min(last_step, options.max_steps)
    return max(first_step, last_step)
