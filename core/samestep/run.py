"""Count the steps of one rank's run, from its restore to its result, the same in every framework.

An app trains and reports numbers to its `Run`; the `Run` answers which actions follow. Ranks communicate about the run
through two functions of the app's ``distributed`` module.

The rule: `Run` sees numbers, JSON and numpy arrays. It calls a ``load`` that it is given and the two functions of
`Collectives`; never a model, an optimizer or a batch. It raises, and never ends the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, SupportsFloat

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, events, log, manifest, stop
from samestep.checkpoint import Arrays
from samestep.env import World
from samestep.monitor import Monitor
from samestep.options import Options, check_virtual_ranks, json_value, resume_invariants
from samestep.sharding import GlobalBatches
from samestep.step_timer import PHASES, StepTimer
from samestep.untrusted import shown

if TYPE_CHECKING:
    from samestep.metrics import BestEvaluation, Metrics

Groups = Mapping[str, Arrays]  # the arrays of a checkpoint: GROUPS, and the app's own
GROUPS = ("model", "optimizer")
SYNCS_PER_GRACE = 6  # ranks synchronize so often that this many syncs fit into --grace seconds


class Collectives(Protocol):
    """The functions by which ranks communicate about the run: an app's ``distributed`` module has them."""

    def broadcast(self, content: bytes) -> bytes:
        """Return rank 0's ``content`` on every rank."""

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Return every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""


class StepActions(NamedTuple):
    """The actions after an update, the same on all ranks."""

    sync: bool  # reduce the `StepStats` over ranks, also before each of the others
    log: bool  # write a line of metrics.jsonl, also before `evaluate` or `save`
    evaluate: bool  # an epoch ends, or --evaluate-every
    save: bool  # write a checkpoint


@dataclass(frozen=True)
class StepStats:
    """One rank's numbers, and, after the reduction over ranks, the sums of all ranks.

    Attributes:
        loss: the summed loss of the last step's samples, before its update.
        running_loss: the summed loss of all samples since the last log line.
        correct: the number of correct predictions since the last log line; None if the app does not count them.
        stop_requests: one slot for each signal of `stop.STOP_SIGNALS`, and one for a launcher that died.
        seconds_per_step: rank 0's seconds per step since the last sync; 0 on other ranks.
        phase_seconds: [world_size x phases]: each rank's seconds in its own slots, in the order of PHASES.
    """

    loss: float
    running_loss: float
    correct: float | None
    stop_requests: tuple[float, ...]
    seconds_per_step: float
    phase_seconds: tuple[float, ...]

    def to_vector(self) -> list[float]:
        """Return the numbers as one vector for a sum over ranks."""
        correct = math.nan if self.correct is None else self.correct
        return [self.loss, self.running_loss, correct, *self.stop_requests, self.seconds_per_step, *self.phase_seconds]

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> StepStats:
        """Return the stats of a vector from `to_vector`, or of the sum of several."""
        loss, running_loss, correct, *rest = vector
        slots = len(stop.STOP_SIGNALS) + 1
        stop_requests, (seconds, *phases) = rest[:slots], rest[slots:]
        counted = None if math.isnan(correct) else correct
        return cls(loss, running_loss, counted, tuple(stop_requests), seconds, tuple(phases))


class Run:
    """Manage the life of a run.

    Call `restore` and `start` first, `after_step` and `actions` after each update, and `finish` and `report` last.

    After `restore` the options have the run dir and the dataset. After `start` the steps to train are those from
    ``first_step`` to before ``last_step``. ``eval_metrics`` is the evaluation of the last log line, or {}.
    ``eval_group`` is the group of arrays that is evaluated, and that --keep-best keeps.
    """

    eval_group = "model"

    def __init__(
        self,
        app: str,
        options: Options,
        world: World,
        monitor: Monitor | None = None,
        resolve_dataset: Callable[..., Any] | None = None,
    ) -> None:
        """Start the monitor and install the signal handlers.

        Args:
            app: the app's name, which checkpoints hold.
            options: the parsed options; `restore` completes them.
            world: this rank's place in the job.
            monitor: watches the run, such as `samestep.recovery.watchdog.Watchdog`.
            resolve_dataset: finds a dataset by name, as `samestep.data.datasets.resolve` does.

        Raises:
            ConfigError: the number of ranks or machines differs from the launch script's, or exceeds --virtual-ranks.
        """
        self.app, self.options, self.world = app, options, world
        self.monitor = monitor or Monitor()
        options.resolve_dataset = options.resolve_dataset or resolve_dataset
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

    def restore(
        self,
        collectives: Collectives,
        load: Callable[[Groups], None],
        groups: Sequence[str] = GROUPS,
        arrays: Callable[[], Groups] | None = None,
    ) -> None:
        """Resolve run dir, dataset and checkpoint or --init-from on rank 0; load the same bytes on all ranks.

        Args:
            collectives: the app's functions by which ranks communicate.
            load: puts arrays into model and optimizer and raises ValueError if they do not fit. --init-from gives
                "model" alone. A new run does not call it.
            groups: names of the groups that the app passes to `save`. A checkpoint without one of them counts as
                corrupt. --evaluate-only needs "model" and `eval_group` alone.
            arrays: returns the groups as `save` will get them. They are checked here: a dtype that no checkpoint can
                hold, such as bfloat16, then ends the run before its first update.

        Raises:
            ConfigError, NonRetryableError: on rank 0, which reports the reason.
            NonRetryableError: on every rank, for ``arrays`` that no checkpoint can hold.
            RemoteRankError: on all other ranks.
        """
        self.monitor.last_collective = getattr(collectives, "last_collective", None)
        message: dict[str, Any] = {}
        contents: dict[str, bytes] = {}
        problem: Exception | None = None
        if self.world.rank == 0:
            try:
                from samestep import rundir  # the other ranks do not need it

                fresh = not self.world.restart_count
                message, contents = rundir.open_run(self.app, self.options, fresh, load, self._required(groups))
            except (ConfigError, NonRetryableError) as error:
                problem, message = error, {"exit_code": 2 if isinstance(error, ConfigError) else 1}
        message = json.loads(collectives.broadcast(json.dumps(message).encode()))  # JSON, as pickle is never loaded
        if problem:
            raise problem
        if "exit_code" in message:
            raise RemoteRankError(message["exit_code"])
        contents = {group: collectives.broadcast(contents.get(group, b"")) for group in message["groups"]}
        if contents and self.world.rank != 0:
            load({group: safetensors.numpy.load(content) for group, content in contents.items()})
        self._apply_restored(message)
        for values in (arrays() if arrays else {}).values():
            for name, array in values.items():
                checkpoint.check_array(name, array)

    def _required(self, groups: Iterable[str]) -> set[str]:
        return {"model", self.eval_group} if self.options.evaluate_only else {*groups}

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
        """Log model and dataset, and open metrics.jsonl; ``metadata`` goes into its header."""
        options, world = self.options, self.world
        total = options.epochs * batches.steps_per_epoch
        self.last_step = max(self.first_step, total if options.max_steps is None else min(total, options.max_steps))
        self.last_step = self.first_step if options.evaluate_only else self.last_step
        metadata = json_value(metadata)
        self._batches, self._metadata, self._step = batches, metadata, self.first_step  # updates done
        self._train_loss: float | None = self._state.get("train_loss")
        self._epoch_loss: float = self._state.get("epoch_loss_sum", 0.0)  # over the samples of the epoch so far
        self._epoch_correct: float = self._state.get("epoch_correct", 0.0)
        self._threads = os.environ.get("OMP_NUM_THREADS", "")[:100] or None  # it decides how a framework's sums round
        self._metrics: Metrics | None = None
        self._best: BestEvaluation | None = None
        if world.rank == 0 and not options.evaluate_only:
            from samestep import metrics  # the other ranks do not need it

            before = self._state.get("threads", self._threads)
            if before != self._threads:
                now_set = shown(self._threads or "unset")
                change = f"was {shown(before or 'unset')} before this resume and is {now_set} now"
                name = "--threads" if getattr(options, "threads", None) else "OMP_NUM_THREADS"
                log.warning(f"{name} {change}: sums may round differently; set it back for the same bits")
            was = self._state.get("metadata", metadata) if getattr(options, "virtual_ranks", None) else metadata
            changed = [name for name in metadata if name not in ("threads", "gpus") and was.get(name) != metadata[name]]
            if changed:
                texts = [
                    f"{name} {shown(was.get(name))} before this resume, {shown(metadata[name])} now" for name in changed
                ]
                log.warning(f"{'; '.join(texts)}: the bits may differ from here on")
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
        log.info(f"{model} on {data}: {examples}, {world.world_size} ranks on {where}, {steps}")
        now = time.monotonic()
        self._begun = now - (0.0 if options.evaluate_only else self._state.get("seconds", 0.0))
        manifest.seal({"app": self.app, "step": self._step, **self._state_to_save()})  # or fail before the first update
        self._last_sync, self._next_sync, self._stop_signal = (self.first_step, now), self.first_step + 1, 0
        self._last_log = (now, batches.samples_seen(self.first_step))
        self.stop_request.install()
        self.stop_request.in_training = True
        self._bar = log.progress(self.last_step, self.first_step)

    # --- after an update -----------------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
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

    def local_stats(
        self, loss: SupportsFloat, running_loss: SupportsFloat, correct: SupportsFloat | None = None
    ) -> StepStats:
        """Return this rank's part of the sum over ranks; call it once at each `StepActions.sync`.

        Args:
            loss: the summed loss of this rank's samples of the last step.
            running_loss: the summed loss of all its samples since the last log line.
            correct: the number of correct predictions since then, if the app counts them.
        """
        rank, steps = self.world.rank, max(1, self._step - self._last_sync[0])
        seconds = (time.monotonic() - self._last_sync[1]) / steps if rank == 0 else 0.0
        phases = np.zeros((self.world.world_size, len(PHASES)))
        phases[rank] = self.timer.pop()
        counted = None if correct is None else _number(correct)
        stop_requests = self.stop_request.encode(self.monitor.launcher_died())
        return StepStats(_number(loss), _number(running_loss), counted, stop_requests, seconds, tuple(phases.flat))

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

        The losses come from the last `apply_global_stats`. ``evaluation`` is {} or has ``test_loss`` and so on;
        ``extra`` are numbers for this line alone. Raises as `Monitor.check_losses`; but a test loss that is NaN or
        infinite again after a restart becomes None.
        """
        step, batches, stats = self._step - 1, self._batches, self._stats
        loss, epoch, samples = stats.loss / batches.size(step), batches.epoch(step), batches.samples_seen(self._step)
        self.monitor.check_losses({"loss": loss, "loss before it": stats.running_loss}, self._step)
        evaluation = self._check_evaluation(evaluation, is_of_update=True)
        samples_in_epoch = samples - batches.samples_seen(epoch * batches.steps_per_epoch)
        now, new_samples = time.monotonic(), samples - self._last_log[1]
        self._epoch_loss += stats.running_loss
        self._epoch_correct += stats.correct or 0.0
        self._train_loss, self.eval_metrics = self._epoch_loss / samples_in_epoch, evaluation
        if self._best and self.options.keep_best:
            self._best.update(self._step, evaluation)
        if evaluation:
            accuracy = None if stats.correct is None else self._epoch_correct / samples_in_epoch
            shown = {"train_loss": self._train_loss, "train_accuracy": accuracy, **evaluation, "test_examples": None}
            words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in shown.items() if value is not None]
            log.info("  ".join([f"epoch {epoch + 1}/{self.options.epochs}", f"step {self._step}", *words]))
        if self._step % batches.steps_per_epoch == 0:
            self._epoch_loss = self._epoch_correct = 0.0
        line = {"step": self._step, "epoch": epoch, "samples_seen": samples, "loss": loss}
        line |= extra if stats.correct is None else {"accuracy": stats.correct / new_samples, **extra}
        line |= {"samples_per_second": round(new_samples / (now - self._last_log[0]), 1), **evaluation}
        self._last_log = now, samples
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

    def save(self, collectives: Collectives, groups: Groups) -> None:
        """Write a checkpoint of the last logged updates, after all ranks have compared their arrays.

        Every rank calls this; rank 0 writes.

        Raises:
            RetryableError: an array's bits differ between ranks; nothing is saved.
            NonRetryableError: weights are NaN or infinite.
            Stopped: a rank received a stop signal.
        """
        self._check_weights(groups[self.eval_group])
        self.monitor.check_replicas(collectives.all_gather, groups, self._step)
        if self._metrics:
            checkpoint.save(self.options.run_dir, self.app, self._step, groups, *self.checkpoint_state(self._metrics))
        self._stop_if_requested(collectives)

    def _stop_if_requested(self, collectives: Collectives) -> None:
        if self._stop_signal:
            if self.world.rank == 0:
                checkpoint.finish()
            collectives.broadcast(b"")  # a rank that ends makes the launcher end the others: rank 0 must write first
            text = f"stopped by {signal.Signals(self._stop_signal).name} at step {self._step}, which is saved"
            raise stop.Stopped(self._stop_signal, text, is_final=not self._launcher_died)

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

    def finish(
        self,
        collectives: Collectives,
        weights: Arrays,
        evaluation: Mapping[str, Any],
        extra_groups: Groups | None = None,
    ) -> None:
        """Check that all ranks hold the same weights, and write them on rank 0.

        ``extra_groups``, such as "ema", become model-ema.safetensors. Raises as `save`.
        """
        self._bar.close()
        evaluation = self._check_evaluation(evaluation, is_of_update=self.first_step < self.last_step)
        self._check_weights(weights)
        seconds = time.monotonic() - self._begun
        samples = 0 if self.options.evaluate_only else self._batches.samples_seen(self.last_step)
        digest, best = self._write_final_weights(collectives, weights, extra_groups or {})
        counts = {"train_examples": self._batches.n, "steps": self.last_step, "train_loss": self._train_loss}
        speed = {"seconds": round(seconds, 3), "samples_per_second": round(samples / seconds, 1)}
        origin = {"resumed_from_step": self.resumed_from, "weights_sha256": digest}
        self._result = {**counts, **evaluation, **best, **speed, **origin}

    def _write_final_weights(
        self, collectives: Collectives, weights: Arrays, extra_groups: Groups
    ) -> tuple[str, dict[str, Any]]:
        """Write the files of weights; return the digest and the result's fields of the best evaluation."""
        digest, folder = checkpoint.weights_sha256(weights), self.options.run_dir
        self.monitor.check_final_weights(collectives, digest, folder if self._metrics else None)
        if self._metrics:
            checkpoint.save_weights(folder / "model.safetensors", weights)
            for name, arrays in extra_groups.items():
                checkpoint.save_weights(folder / f"model-{name}.safetensors", arrays)
        return digest, self._write_best(self._copy_best)

    def _write_best(self, copy: Callable[[Path, Path], None]) -> dict[str, Any]:
        return self._best.write(self.options.run_dir, copy) if self._best and self.options.keep_best else {}

    def _copy_best(self, folder: Path, path: Path) -> None:
        checkpoint.save_weights(path, checkpoint.read(folder).arrays(self.eval_group))

    def report(self, framework: str, framework_version: str, backend: str, device: str, **fields: Any) -> None:
        """Write result.json and, as the last line on stdout, ``RESULT {json}``, on rank 0."""
        self.monitor.stop()
        if self.world.rank == 0:
            from samestep import metrics  # the other ranks do not need it

            names = {"framework": framework, "framework_version": framework_version}
            values = {**names, "backend": backend, "device": device, **fields, **self._result}
            metrics.report(self.app, self.options, self.world, values)


def _number(value: SupportsFloat) -> float:
    """Return a loss as a float. torch's ``float`` warns of a tensor that requires a gradient, and ``item`` does not."""
    item = getattr(value, "item", None)
    return float(value if item is None else item())
