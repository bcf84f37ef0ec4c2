"""Manage one rank's run, from its restore to its result, in the same way for every framework.

An app trains and passes its numbers to a `Run`, which returns the actions to do next. Ranks communicate about the run
through two functions of the app's ``distributed`` module.

`Run` handles only numbers, JSON and numpy arrays. It calls the functions of the app's `Parts` and the two functions of
`Collectives`, and passes batches on without reading them. Its methods raise exceptions instead of ending the process.
Only its signal handler ends the process.

`Run` sets the order of calls. Its components also work without a `Run`: `samestep.cadence`, `samestep.step_sync`,
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
from samestep.parts import Collectives, Groups, Parts, StateToSave
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
    """The interface for saving and restoring arrays: `Replicas`, or `samestep.sharded.shards.Shards`."""

    is_sharded: bool  # whether each rank holds only shards of the arrays

    def restore(self, run: Run) -> dict[str, Any]:
        """Find the checkpoint on rank 0, and load it on all ranks. This call is a collective.

        Returns:
            The message of rank 0, with the values of `samestep.rundir.restore_message`.
        """

    def save(self, run: Run, groups: Any) -> None:
        """Copy the arrays, and start writing the checkpoint in a thread. This call is a collective."""

    def finish(self, run: Run) -> None:
        """Wait until the last checkpoint is on the disk, at least on rank 0. This call may be a collective."""

    def write_final(self, run: Run, groups: Any) -> tuple[str, dict[str, Any]]:
        """Write the final weights. This call is a collective.

        Returns:
            SHA-256 of the weights in hexadecimal, and the result's fields of the best evaluation.
        """


class Loader(Protocol[Batch]):  # type: ignore[misc]
    """A loader of batches with a position, such as `samestep.torch.DataLoader`."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches from the current position to the end of the epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, including ``step`` and ``epoch``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position to a position that `state_dict` returned."""


@dataclass(frozen=True)
class Restored:
    """The checkpoint and the dataset that `Run.restore` found.

    Attributes:
        step: updates done in the checkpoint; None for a new run.
        state: the checkpoint's state, with the dataset's requested name and fingerprint.
        dataset_folder: path of the dataset's folder.
    """

    step: int | None
    state: Mapping[str, Any]
    dataset_folder: str


class Run:
    """Manage a run from its restore to its result.

    Call `restore` and `start`, which set the attributes below. Then train, and call `finish` and `report` last::

        for batch in run.batches(loader):
            ...  # one update
            actions = run.after_step(loss_sum)
            if actions.sync:
                actions = run.sync()
            if actions.log:
                run.log_metrics(evaluate() if actions.evaluate else {})
            if actions.save:
                run.save()  # raises Stopped after a stop signal
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
            app: the app's name, which each checkpoint contains.
            options: the parsed options. `restore` sets their ``run_dir`` and ``dataset``.
            world: rank, world size and launcher of this process.
            monitor: the monitor of this rank, such as a `samestep.recovery.watchdog.Watchdog`.
            resolve_dataset: function that finds a dataset by name, such as `samestep.data.datasets.resolve`.
            storage: the object that saves and restores arrays. By default, every rank has a replica of the model.

        Raises:
            ConfigError: as in `check_launch`, or the number of ranks exceeds --virtual-ranks.
            NonRetryableError: the options lack a field that every result has.
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
        stop_request.install()  # must come before the first heartbeat, from which the launch script gets the rank's pid
        if JobInfo.from_environ(os.environ).launcher and options.run_dir:  # the launch script holds the run dir's lock
            self._open_logs()  # first, so that rank-<r>.log has the errors of the checks below
        check_result_fields(app, options)
        check_virtual_ranks(options, world.world_size)
        if options.threads:
            os.environ["OMP_NUM_THREADS"] = str(options.threads)  # some frameworks read the variable later
        check_launch(world)

    def _open_logs(self) -> None:
        """Start writing ``rank-<r>.log`` and heartbeats into the run dir."""
        log.places = self.options.log_format == "full"
        log.start(self.options.run_dir, self.world.rank, self.options.quiet, self.monitor)
        self.monitor.write_to(self.options.run_dir / "log")

    def _exit(self, stopped: stop.Stopped) -> NoReturn:
        """Exit this rank, from any thread.

        If another rank has ended, its failure may have caused the signal, so the launch script may restart the job.
        """
        ranks = self.world.local_world_size or self.world.world_size
        log.exit_process(stopped, is_final=self.monitor.all_ranks_alive(ranks))

    # --- numbers for the app -------------------------------------------------------------------------------------

    @property
    def timer(self) -> StepTimer:
        """The timer of this rank's phases."""
        return self.step_sync.timer

    @property
    def stop_request(self) -> stop.StopRequest:
        """The object that receives this rank's stop signals."""
        return self.step_sync.stop_request

    @property
    def resumed_from(self) -> int | None:
        """The number of updates done in the restored checkpoint; None for a new run."""
        return self.restored.step

    @property
    def first_step(self) -> int:
        """The number of updates done before this start."""
        return self.restored.step or 0

    @property
    def evaluated(self) -> str:
        """The name of the group with the weights that an evaluation uses."""
        return self.parts.evaluated

    @property
    def last_step(self) -> int:
        """The number of the run's last update."""
        return self.progress.last_step

    @property
    def step(self) -> int:
        """The number of updates done."""
        return self.progress.step

    @property
    def eval_metrics(self) -> dict[str, Any]:
        """The evaluation of the last log line; {} without an evaluation."""
        return self.progress.evaluation

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's files: rank 0 does, except with --evaluate-only."""
        return self.world.rank == 0 and not self.options.evaluate_only

    @property
    def metrics(self) -> Metrics | None:
        """The file metrics.jsonl on rank 0; None on other ranks and with --evaluate-only."""
        return self.recorder.metrics

    @cached_property
    def cadence(self) -> Cadence:
        """The settings that determine after which updates this run logs, evaluates and saves."""
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

    def restore(self, collectives: Collectives, parts: Parts, evaluated: str | None = None) -> None:
        """Find the run dir, the dataset and the checkpoint (or --init-from), and load the same bytes on all ranks.

        Args:
            collectives: the app's collectives, which later calls use too.
            parts: functions that load and return a checkpoint's arrays.
            evaluated: the group with the weights that an evaluation uses and --keep-best stores; by default
                ``parts.evaluated``. If the group is not "model", `finish` also writes model-<evaluated>.safetensors.

        Raises:
            ConfigError: raised on rank 0 for a mistake of the caller.
            NonRetryableError: raised on rank 0 for a failure, or on every rank for arrays that a checkpoint cannot
                hold, such as bfloat16.
            RemoteRankError: raised on all other ranks if rank 0 failed.
        """
        self.collectives = collectives
        self.parts = replace(parts, evaluated=evaluated or parts.evaluated)
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

    def start(
        self, batches: GlobalBatches, test_examples: int, model: str, device: str, metadata: Mapping[str, Any]
    ) -> None:
        """Log the model and the dataset, and open metrics.jsonl.

        Args:
            batches: the run's global batches, for this rank.
            test_examples: number of examples of the test set.
            model: name of the model, for the log.
            device: name of the device, for the log.
            metadata: versions and settings that affect the run's numbers, for the header of metrics.jsonl and for
                checkpoints. If `samestep.torch.exact` computes dropout, include `samestep.sharding.RANDOM_NUMBERS`.

        Raises:
            ConfigError: the app does not support --trace-every, or the dataset has another number of training examples
                than at the checkpoint.
            NonRetryableError: a value of the state cannot be stored as JSON, or a file cannot be written.
        """
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
        # Check the state now, so that a value that JSON would change is reported before the first update.
        values = self.state_to_save()
        manifest.seal({"app": self.app, "step": self.step, **values.of_manifest()})
        trace = self._start_trace()
        metrics = None
        if self.is_writer:
            self._warn_of_changes()
            metrics = open_metrics(
                self.app,
                self.options,
                world=self.world,
                metadata={**self.arithmetic.metadata, "dataset_fingerprint": state["dataset_fingerprint"]},
                resumed_from=self.resumed_from,
            )
        if self.world.rank == 0:
            self.monitor.record_event(events.START, last_step=last_step, ranks=self.world.world_size)
        log.info(self._describe_start(model, device, test_examples=test_examples))
        self.step_sync.start(self.first_step)
        self.stop_request.install()  # again, because a framework may have replaced the handlers meanwhile
        self.stop_request.in_training = True  # from here on, a stop signal takes effect at a `sync`
        self.recorder = Recorder(last_step, self.first_step, metrics=metrics, trace=trace)

    def _start_trace(self) -> Trace | None:
        """Connect a trace to the app's optimizer on all ranks of a sharded model, else on rank 0.

        Raises:
            ConfigError: the app does not support --trace-every.
        """
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
        """Return the log line that describes the start of this process's training."""
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
        """Log a warning if the threads, libraries or random numbers of a resumed run have changed."""
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
        """Yield the loader's batches for the steps in [``first_step``, ``last_step``), and time the input phase.

        Raises:
            ValueError: the loader cannot begin at a step, or has no batches.
            RuntimeError: the program did not call `after_step` after a batch.
        """
        epoch = self.first_step // self.progress.batches.steps_per_epoch
        loader.load_state_dict({**loader.state_dict(), "step": self.first_step, "epoch": epoch})
        if loader.state_dict().get("step") != self.first_step:
            raise ValueError("run.batches needs a loader that resumes: give the DataLoader a GlobalBatchSampler")
        while self.step < self.last_step:
            before_epoch = self.step
            with self.timer.phase(INPUT):
                iterator = iter(loader)
            while self.step < self.last_step:
                with self.timer.phase(INPUT):
                    batch = next(iterator, None)
                if batch is None:
                    break
                before = self.step
                yield batch
                if self.step == before:
                    raise RuntimeError(f"step {before} was not counted: call run.after_step after each update")
            if self.step == before_epoch:
                raise ValueError("the loader has no batches: check the dataset's length")

    def after_step(self, loss_sum: SupportsFloat | None = None, **counts: SupportsFloat) -> StepActions:
        """Count an update, record progress, and return the actions that follow, without communication.

        Args:
            loss_sum: the summed loss of this rank's samples of the step: a number, or a detached scalar tensor, which
                is not read before `sync`. Pass None if the program itself sums its losses.
            **counts: other sums over these samples. ``correct=`` becomes ``accuracy`` in a log line, and
                ``correct_top2=`` becomes ``accuracy_top2``.
        """
        if loss_sum is not None:
            self.step_sync.add(loss_sum, counts)
        done = self.step + 1
        self.count_step(done)
        return self.actions(done)

    def count_step(self, done: int) -> None:
        """Record that ``done`` updates are done."""
        self.recorder.count(done, done - self.step)
        self.progress.step = done
        self.monitor.beat(done)

    def actions(self, done: int) -> StepActions:
        """Return the actions that follow ``done`` updates, without side effects."""
        return self.cadence.after(done, self.step_sync.is_due(done))

    def sync(self, loss_sum: SupportsFloat | None = None, running_loss: SupportsFloat | None = None) -> StepActions:
        """Reduce losses, counts and stop requests over all ranks, and return the actions. This call is a collective.

        Call `sync` once after each update whose actions have ``sync``. A stop request adds a log line and a checkpoint
        to the actions.

        Args:
            loss_sum: the summed loss of this rank's samples of the last step, if `after_step` did not get the loss.
            running_loss: the summed loss of this rank's samples since the last log line, if `after_step` did not get
                the losses.
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
        actions = self.actions(self.step)
        if totals.stop_signal:
            return actions._replace(log=True, save=True)
        return actions

    def log_metrics(self, evaluation: dict[str, Any], **extra: float) -> dict[str, Any]:
        """Append a line to metrics.jsonl on rank 0, with the losses of the last `sync`.

        Args:
            evaluation: numbers such as ``test_loss``; {} without an evaluation.
            **extra: numbers for this line only.

        Returns:
            The line, on every rank. A number of the evaluation that is NaN or infinite becomes None.

        Raises:
            RetryableError: a loss is NaN or infinite, and no earlier start failed at this step.
            NonRetryableError: the training loss is NaN or infinite again after a restart, the evaluation lacks the
                metric of --keep-best, or the write fails.
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
        """Return the log's text about the newest evaluation. ``line`` is the new line of metrics.jsonl."""
        progress = self.progress
        values = {"train_loss": progress.train_loss, "train_accuracy": progress.train_accuracy, **progress.evaluation}
        epoch = line["epoch"] + 1
        texts = [f"epoch {epoch}/{self.options.epochs}", f"step {self.step}", f"{progress.seconds:.1f} s"]
        for name, value in values.items():
            if value is not None and name != "test_examples":
                texts.append(f"{name.replace('_', ' ')} {value:.4f}")
        return "  ".join(texts)

    def save(self) -> None:
        """Compare the arrays of all ranks, and save a checkpoint of the last logged update. This call is a collective.

        Training continues while a thread writes the checkpoint. The next save raises the error of this thread, if any.

        Raises:
            RetryableError: an array differs between ranks, or a shard has changed since its update; nothing is saved.
            NonRetryableError: weights are NaN or infinite, or the previous checkpoint could not be written.
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
        # collective: no rank may exit before rank 0 has written the checkpoint, because a launcher ends all ranks as
        # soon as one rank has ended
        self.collectives.broadcast(b"")
        name = signal.Signals(totals.stop_signal).name
        raise stop.Stopped(
            totals.stop_signal,
            f"stopped by {name} at step {self.step}, which is saved",
            is_final=not totals.launcher_died,
        )

    # --- for a Storage -----------------------------------------------------------------------------------------------

    @property
    def required_groups(self) -> set[str]:
        """The groups without which a checkpoint counts as corrupt."""
        if self.options.evaluate_only:
            return {"model", self.evaluated}
        return set(self.parts.names)

    def state_to_save(self) -> StateToSave:
        """Return the values for a save."""
        state = {name: self.restored.state[name] for name in ("requested_dataset", "dataset_fingerprint")}
        state.update(self.arithmetic.state())
        state.update(self.progress.state())
        return StateToSave(
            json_value(state),
            resume_invariants(self.options),
            keep=self.options.keep_checkpoints,
            protected_step=self.progress.best.step,
        )

    def write_best(self, copy: Callable[[Path, Path], None]) -> dict[str, Any]:
        """Write the weights of the best evaluation by ``copy(checkpoint, file)``, and return fields for the result."""
        if not self.is_writer or not self.options.keep_best:
            return {}
        return self.progress.best.write(self.options.run_dir, copy)

    # --- the result ----------------------------------------------------------------------------------------------

    def finish(self, evaluation: Mapping[str, Any]) -> None:
        """Compare the weights of all ranks, and write them to files. This call is a collective.

        Args:
            evaluation: the numbers of the last evaluation, by name, for the result.

        Raises:
            RetryableError: the weights differ between ranks, or as in `LossGuard.check_evaluation`.
            NonRetryableError: weights are NaN or infinite, or a file could not be written.
        """
        self.recorder.close()
        has_trained = self.first_step < self.last_step
        evaluation = self.guard.check_evaluation(evaluation, self.step, is_of_update=has_trained)
        groups = self.parts.groups()
        self.guard.check_weights(groups["model"], self.step)
        seconds = self.progress.seconds
        samples = 0 if self.options.evaluate_only else self.progress.batches.samples_seen(self.step)
        digest, best = self.storage.write_final(self, {name: groups[name] for name in ("model", self.evaluated)})
        self.recorder.result = {
            "train_examples": self.progress.batches.n,
            "steps": self.step,  # less than last_step if the program has left the loop early
            "train_loss": self.progress.train_loss,
            **evaluation,
            **best,
            "seconds": round(seconds, 3),
            "samples_per_second": round(samples / seconds, 1),
            "resumed_from_step": self.resumed_from,
            "weights_sha256": digest,
        }

    def report(self, framework: str, framework_version: str, backend: str, device: str, **fields: Any) -> None:
        """Write result.json on rank 0 (evaluation.json with --evaluate-only), and print ``RESULT {json}`` on stdout.

        Args:
            framework: name of the framework.
            framework_version: version of the framework.
            backend: backend of the collectives, such as "gloo".
            device: type of the device, such as "cpu".
            **fields: further fields of the result.
        """
        self.monitor.stop()
        if self.world.rank != 0:
            return
        from samestep import metrics  # only rank 0 needs this module

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
    """Raise NonRetryableError if the app does not offer an option that every result contains."""
    missing = [name for name in options.RESULT_FIELDS if not options.offers(name)]
    if missing:
        raise NonRetryableError(f"the options of {app} lack {', '.join(missing)}: add them in apps/{app}/options.py")


def check_launch(world: World) -> None:
    """Raise ConfigError if the number of ranks or machines differs from the number that the launch script requested."""
    info = JobInfo.from_environ(os.environ)
    for things, requested, count in (
        ("ranks", info.ranks, world.world_size),
        ("machines", info.machines, world.node_count),
    ):
        if requested is not None and count is not None and requested != count:
            problem = f"the launch script was asked for {requested} {things}, but {count} joined"
            raise ConfigError(f"{problem} (launcher: {world.launcher}): make N and the options agree")


def last_step_of(options: Options, steps_per_epoch: int, first_step: int) -> int:
    """Return the number of the run's last update, which is at least the number of updates done.

    Args:
        options: the run's parsed command-line options.
        steps_per_epoch: number of global batches per epoch.
        first_step: number of updates done.
    """
    if options.evaluate_only:
        return first_step
    last_step: int = options.epochs * steps_per_epoch
    if options.max_steps is not None:
        last_step = min(last_step, options.max_steps)
    return max(first_step, last_step)
