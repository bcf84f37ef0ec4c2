"""What is due, and what came of it? One rank's run, from its restore to its result, the same in every framework.

An app trains; it tells its `Run` what happened, in plain numbers, and is told what is due. What ranks say to each other
about the run goes through the two functions of the app's own ranks.py that it hands over.

The rule: `Run` sees numbers, JSON and numpy arrays. It calls a ``load`` that it is given and the two functions of
`Ranks`; never a model, an optimizer or a batch. It raises, and never ends the process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from samestep import FatalError, RankZeroError, UserError, checkpoint, log, signals
from samestep.checkpoint import Arrays
from samestep.env import World
from samestep.options import Options, arithmetic
from samestep.phases import PHASES, Phases
from samestep.sharding import GlobalBatches
from samestep.watchdog import Watchdog

if TYPE_CHECKING:
    from samestep.best import Best
    from samestep.metrics import Metrics

Groups = Mapping[str, Arrays]  # the arrays of a checkpoint: "model", "optimizer", and what else the app has
TALKS_IN_GRACE = 6


class Ranks(Protocol):
    """How ranks talk about the run: two functions of an app's ranks.py."""

    def broadcast(self, content: bytes) -> bytes:
        """Rank 0's ``content`` on every rank."""

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Every rank's ``row`` [k] on every rank: [world_size, k] in the order of ranks, bit for bit."""


class Due(NamedTuple):
    """What is due after an update, on all ranks alike."""

    talk: bool  # ranks sum what they have to say; also where one of the others is due
    log: bool  # a line of metrics.jsonl; also where one of those that follow is due
    test: bool  # an evaluation: an epoch ends, or --evaluate-every
    save: bool  # a checkpoint


class Run:
    """`restore`, `begin`; after each update `done`, and where due `record` and `save`; then `finish` and `report`.

    After `restore` the options have the run dir and the data set. After `begin` the steps to train are those from
    ``start`` to before ``stop``. ``tested`` is the last record's evaluation, {} where it had none; ``evaluates`` is the
    group of arrays that is evaluated, and that --keep-best keeps.
    """

    evaluates = "model"

    def __init__(self, app: str, options: Options, world: World) -> None:
        """Raises UserError where not as many ranks, or machines, came as the launch script was asked for."""
        self.app, self.options, self.world = app, options, world
        self.tested: dict[str, Any] = {}
        self.wish, self.phases = signals.Wish(options.grace, self._leave), Phases()
        self.watchdog = Watchdog(world, options.timeout, getattr(options, "first_step_timeout", None))
        self.wish.listen()  # before the heartbeat by which the launch script finds whom to signal
        if "SAMESTEP_LAUNCHER" in os.environ and options.run_dir:  # the launch script holds the run dir's lock
            self._open()
        if missing := [name for name in options.REPORTED if not hasattr(options, name)]:
            raise FatalError(f"the options of {app} lack {', '.join(missing)}: add them in apps/{app}/options.py")
        for things, came in (("ranks", world.world_size), ("machines", world.node_count)):
            asked_for = os.environ.get(f"SAMESTEP_{things.upper()}")
            if asked_for and came is not None and asked_for != str(came):
                raise UserError(
                    f"the launch script was asked for {asked_for} {things}, but {came} came (launcher: "
                    f"{world.launcher}): let N and the options say the same"
                )

    def _open(self) -> None:
        """Write into the run dir from here on: rank-<r>.log and heartbeats."""
        log.start(self.options.run_dir, self.world.rank, self.options.quiet)
        self.watchdog.write_to(self.options.run_dir / "log")

    def _leave(self, stopped: signals.Stopped) -> NoReturn:
        """End this rank, from any thread. Where others are gone, the signal was a launcher's after a failure."""
        from samestep import hang

        ranks = self.world.local_world_size or self.world.world_size
        log.leave(stopped, stopped.stands or hang.all_are_here(self.watchdog, ranks))

    # --- where to start ------------------------------------------------------------------------------------------

    def restore(self, ranks: Ranks, load: Callable[[Groups], None]) -> None:
        """Rank 0 resolves run dir, data set and checkpoint or --init-from; all ranks load the same bytes.

        ``load`` puts arrays into model and optimizer, and raises ValueError where they do not fit; "model" alone comes
        from --init-from. It is not called for a new run. Raises UserError or FatalError on rank 0, which tells why,
        and RankZeroError on all others.
        """
        self.watchdog.collectives = getattr(ranks, "collectives", None)
        answer: dict[str, Any] = {}
        contents: dict[str, bytes] = {}
        problem: Exception | None = None
        if self.world.rank == 0:
            try:
                from samestep import rundir  # the others need none of it

                answer, contents = rundir.open_run(self.app, self.options, not self.world.restart_count, load)
            except (UserError, FatalError) as caught:
                problem, answer = caught, {"exit_code": 2 if isinstance(caught, UserError) else 1}
        answer = json.loads(ranks.broadcast(json.dumps(answer).encode()))  # JSON, as pickle is never loaded
        if problem:
            raise problem
        if "exit_code" in answer:
            raise RankZeroError(answer["exit_code"])
        contents = {group: ranks.broadcast(contents.get(group, b"")) for group in answer["groups"]}
        if contents and self.world.rank != 0:
            load({group: safetensors.numpy.load(content) for group, content in contents.items()})
        self._go_on(answer)

    def _go_on(self, answer: Mapping[str, Any]) -> None:
        self.options.run_dir, self.options.dataset = Path(answer["run_dir"]), answer["dataset"]
        self.resumed_from, self._state = answer["step"], answer["state"]
        self.start = self.resumed_from or 0
        self._open()
        self.watchdog.restored(self.start)

    def begin(
        self, batches: GlobalBatches, test_examples: int, model: str, device: str, facts: Mapping[str, Any]
    ) -> None:
        """Tell what is trained, and open metrics.jsonl; ``facts`` is what made its numbers, for the header."""
        options, world = self.options, self.world
        total = options.epochs * batches.steps_per_epoch
        self.stop = max(self.start, total if options.max_steps is None else min(total, options.max_steps))
        self.stop = self.start if options.evaluate_only else self.stop
        self._batches, self._step = batches, self.start  # updates done
        self._train_loss: float | None = self._state.get("train_loss")
        self._epoch_sum: float = self._state.get("epoch_loss_sum", 0.0)  # over the samples of the epoch so far
        self._epoch_correct: float = self._state.get("epoch_correct", 0.0)
        self._metrics: Metrics | None = None
        self._best: Best | None = None
        if world.rank == 0 and not options.evaluate_only:
            from samestep import best, metrics  # the others need none of it

            header = metrics.header(self.app, options, world, facts)
            self._metrics = metrics.Metrics(options.run_dir, header, self.resumed_from)
            self._best = best.Best(self._state.get("best"))
        self._judge, self._stragglers = None, list[dict[str, Any]]()  # those named since the last line
        if world.rank == 0 and options.straggler > 0 and 1 < world.world_size <= options.global_batch_size:
            from samestep.straggler import Judge  # the others need none of it

            self._judge = Judge(options.straggler, world.world_size, options.global_batch_size, self.start)
        log.info(
            f"{model} on {options.dataset}: {batches.n:,} training and {test_examples:,} test examples, "
            f"{world.world_size} ranks on {device}, steps {self.start} to {self.stop}, run dir {options.run_dir}"
        )
        self._begun = time.monotonic() - (0.0 if options.evaluate_only else self._state.get("seconds", 0.0))
        self._talked, self._talks, self._stops = (self.start, time.monotonic()), self.start + 1, 0
        self.wish.listen()
        self.wish.waits = True
        self._recorded_at, self._recorded_samples = time.monotonic(), batches.samples_seen(self.start)
        self._bar = log.progress(self.stop, self.start)

    # --- after an update -----------------------------------------------------------------------------------------

    def done(self, step: int) -> Due:
        """The update ``step``, from 0, is done; returns what is due."""
        self._step = step + 1
        self.watchdog.beat(self._step)
        self._bar.update()
        return self.due(step)

    def due(self, step: int) -> Due:
        """What is due after the update ``step``."""
        options, done = self.options, step + 1
        every = options.log_every, options.evaluate_every, options.checkpoint_every
        logs, tests, saves = (steps > 0 and done % steps == 0 for steps in every)  # 0 is never
        ends, epoch_ends = done == self.stop, done % self._batches.steps_per_epoch == 0
        test = epoch_ends or tests or (ends and options.keep_best)
        save = epoch_ends or ends or saves or (test and options.keep_best)
        line = test or save or logs
        return Due(line or done >= self._talks, line, test, save)

    def says(self) -> list[float]:
        """What this rank adds to a sum over ranks, for `heard`: its wish to stop, of rank 0 the seconds a step, and in
        slots of its own the seconds of its phases since it last did. In a step that talks, or after it."""
        steps, rank, now = max(1, self._step - self._talked[0]), self.world.rank, time.monotonic()
        before, after = ([0.0] * len(PHASES) * ranks for ranks in (rank, self.world.world_size - rank - 1))
        seconds = (now - self._talked[1]) / steps if rank == 0 else 0.0
        return [self.wish.as_number(self.watchdog.is_orphan()), seconds, *before, *self.phases.take(), *after]

    def heard(self, due: Due, said: Sequence[float]) -> Due:
        """What is due now that ``said`` is known, the sums of what all ranks say: where one wishes to stop, a save.

        All ranks talk again after ``--log-every`` steps, or sooner, so that several talks are within ``--grace``."""
        wishes, seconds, *slots = said
        self._talked = self._step, time.monotonic()
        self._talks = self._step + max(1, int(self.options.grace / TALKS_IN_GRACE / max(seconds, 1e-6)))
        self._stops, self._orphans = signals.heard(wishes)
        self._stragglers += self._judge.hear(self._step, slots) if self._judge else []
        return due._replace(log=True, save=True) if self._stops else due

    def record(
        self, loss_sum: float, sum_since: float, tested: dict[str, Any], correct: float | None = None, **also: float
    ) -> dict[str, Any]:
        """Append a line to metrics.jsonl, on rank 0; returns it, on every rank.

        ``loss_sum`` is the last update's loss, before it was made, ``sum_since`` that of all since the last line and
        ``correct`` their right answers, of all ranks' samples; ``also`` are numbers for this line alone. Where the loss
        is no number, raises RestartError, and FatalError where it was none at this step in the start before.
        """
        step, batches = self._step - 1, self._batches
        loss, epoch, samples = loss_sum / batches.size(step), batches.epoch(step), batches.samples_seen(self._step)
        self._check_finite({"loss": loss, "loss before it": sum_since, "test loss": tested.get("test_loss", 0.0)})
        in_epoch = samples - batches.samples_seen(epoch * batches.steps_per_epoch)
        since = samples - self._recorded_samples
        self._epoch_sum, self._epoch_correct = self._epoch_sum + sum_since, self._epoch_correct + (correct or 0.0)
        self._train_loss, self.tested = self._epoch_sum / in_epoch, tested
        if self._best and self.options.keep_best:
            self._best.see(self._step, tested)
        if tested:
            accuracy = None if correct is None else self._epoch_correct / in_epoch
            shown = {"train_loss": self._train_loss, "train_accuracy": accuracy, **tested, "test_examples": None}
            words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in shown.items() if value is not None]
            log.info("  ".join([f"epoch {epoch + 1}/{self.options.epochs}", f"step {self._step}", *words]))
        if self._step % batches.steps_per_epoch == 0:
            self._epoch_sum = self._epoch_correct = 0.0
        line = {"step": self._step, "epoch": epoch, "samples_seen": samples, "loss": loss}
        line |= also if correct is None else {"accuracy": correct / since, **also}
        line |= {"samples_per_second": round(since / (time.monotonic() - self._recorded_at), 1), **tested}
        self._recorded_at, self._recorded_samples = time.monotonic(), samples
        if self._metrics:
            self._metrics.write(**line, **({"stragglers": self._stragglers} if self._stragglers else {}))
            self._stragglers = []
        return line

    def _check_finite(self, losses: Mapping[str, float]) -> None:
        for name, value in losses.items():
            if not math.isfinite(value):
                from samestep import rollback

                raise rollback.not_finite(name, value, self._step, self.options, self.world)

    def save(self, ranks: Ranks, groups: Groups) -> None:
        """Write a checkpoint of the updates recorded last, after all ranks have compared what they hold.

        Every rank calls this; rank 0 writes. Raises RestartError where an array's bits are not the same on all ranks:
        what is known to be unequal never becomes a checkpoint.
        """
        names = [(group, name) for group in sorted(groups) for name in sorted(groups[group])]
        sums = np.array([checkpoint.bit_sum(groups[group][name]) for group, name in names], np.uint64)
        everyones = ranks.all_gather(sums.view(np.int64))
        if (everyones != everyones[0]).any():
            from samestep import rollback

            raise rollback.unequal(everyones, [" ".join(name) for name in names], self._step)
        if self._metrics:
            checkpoint.save(self.options.run_dir, self.app, self._step, groups, *self._vouched(self._metrics))
        self._stop(ranks)

    def _stop(self, ranks: Ranks) -> None:
        if self._stops:
            if self.world.rank == 0:
                checkpoint.finish()
            ranks.broadcast(b"")  # none ends, and has the launcher end the others, before rank 0 has written
            name = signal.Signals(self._stops).name
            said = f"stopped by {name} at step {self._step}, which is saved"
            raise signals.Stopped(self._stops, said, stands=not self._orphans)

    def _vouched(self, metrics: Metrics) -> tuple[dict[str, Any], dict[str, Any], int, int | None]:
        """What a checkpoint has beside arrays, and which are kept; it vouches for the lines of ``metrics``."""
        metrics.sync()
        state = {name: self._state[name] for name in ("requested_dataset", "dataset_fingerprint")}
        state |= {"epoch_loss_sum": self._epoch_sum, "epoch_correct": self._epoch_correct}
        state |= {"train_loss": self._train_loss, "seconds": time.monotonic() - self._begun}
        options, best = self.options, self._best
        state |= {"best": best.state} if best and best.state else {}
        return state, arithmetic(options), options.keep_checkpoints, best.step if best else None

    # --- what came of it -----------------------------------------------------------------------------------------

    def finish(self, ranks: Ranks, weights: Arrays, tested: Mapping[str, Any], also: Groups | None = None) -> None:
        """Make sure that all ranks hold the same weights, and write them, and what rank 0 has ``also``, such as "ema",
        as model-ema.safetensors. Raises as `save` and `record` do."""
        self._bar.close()
        self._check_finite({"test loss": tested.get("test_loss", 0.0)})
        seconds = time.monotonic() - self._begun
        samples = 0 if self.options.evaluate_only else self._batches.samples_seen(self.stop)
        digest, best = self._leave_weights(ranks, weights, also or {})
        self._result = {
            "train_examples": self._batches.n,
            "steps": self.stop,
            "train_loss": self._train_loss,
            **tested,
            **best,
            "seconds": round(seconds, 3),
            "samples_per_second": round(samples / seconds, 1),
            "resumed_from_step": self.resumed_from,
            "weights_sha256": digest,
        }

    def _leave_weights(self, ranks: Ranks, weights: Arrays, also: Groups) -> tuple[str, dict[str, Any]]:
        """The files of weights; returns the digest, all ranks' own, and what a result says of the best."""
        digest, folder = checkpoint.weights_sha256(weights), self.options.run_dir
        everyones = ranks.all_gather(np.frombuffer(bytes.fromhex(digest), np.int32))
        if (everyones != everyones[0]).any():
            from samestep import rollback

            if self._metrics:
                rollback.retire_newest(folder)
            ranks.broadcast(b"")  # none ends, and has the launcher end the others, before that is done
            raise rollback.unequal_at_the_end(everyones)
        if self._metrics:
            for name, arrays in {"model": weights, **{f"model-{name}": also[name] for name in also}}.items():
                checkpoint.save_weights(folder / f"{name}.safetensors", arrays)
        return digest, self._best.write(folder, self.evaluates) if self._best and self.options.keep_best else {}

    def report(self, framework: str, framework_version: str, backend: str, device: str, **facts: Any) -> None:
        """Rank 0 writes result.json and, as the last line on stdout, ``RESULT {json}``."""
        self.watchdog.stop()
        if self.world.rank == 0:
            from samestep import metrics  # the others need none of it

            names = {"framework": framework, "framework_version": framework_version}
            values = {**names, "backend": backend, "device": device, **facts, **self._result}
            metrics.report(self.app, self.options, self.world, values)


def processor() -> str:
    """The CPU's name, for a header; "cpu" where the system does not tell."""
    cpus = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", cpus.read_text() if cpus.exists() else "", re.MULTILINE)
    return found.group(1) if found else platform.processor() or "cpu"
