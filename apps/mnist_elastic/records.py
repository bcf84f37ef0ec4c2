"""Record the run at the launcher. Write each log line and checkpoint once, although several ranks send them."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from channel import Channel, Message
from data import load
from membership import choose_device, run_metadata
from model import build_model
from numpy.typing import NDArray
from ranks import Rank
from samestep import NonRetryableError, RetryableError, checkpoint, stop
from samestep.options import Options
from samestep.recovery import replica_check
from samestep.run import Groups, Parts, Run
from samestep.sharding import GlobalBatches
from samestep.step_sync import Totals
from samestep.torch import distributed, weights
from train import build_optimizer

ANSWER_SECONDS = 5.0  # time limit for members to offer their state, and for a rank to send requested arrays, in seconds


class Alone:
    """The collectives that the launcher's `Run.restore` calls, for a single process.

    Attributes:
        parts: contents that `Run.restore` has broadcast. The launcher sends these contents to each rank.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def broadcast(self, content: bytes) -> bytes:
        self.parts.append(content)
        return content

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        return row[None]


class History:
    """Count updates, and record changes of the group for the result.

    Attributes:
        step: the largest number of updates that a rank has completed. After a rollback, ranks repeat steps below it.
        updated_at: time of the last update, which may be a repeated one, on the clock `time.monotonic`.
        rejoins: number of restarts of ranks.
    """

    def __init__(self, run: Run) -> None:
        self.step = 0
        self.updated_at = time.monotonic()
        self.rejoins = 0
        self._run = run
        self._members: list[dict[str, Any]] = []
        self._repeated: set[int] = set()
        self._pauses: list[float] = []
        self._paused_at: float | None = None

    def update(self, step: int, loss: float) -> None:
        """Record that the members have just made an update, as `count` does. The update may repeat an earlier one."""
        self.updated_at = time.monotonic()
        if self._paused_at:
            self._pauses.append(self.updated_at - self._paused_at)
            self._paused_at = None
        self.count(step, loss)

    def count(self, step: int, loss: float) -> None:
        """Record that a rank has completed ``step`` updates, and write the loss of the last one to log/losses.bin.

        Do nothing if a rank has already completed ``step`` updates, so that the file contains each step once.

        Args:
            step: number of updates done.
            loss: summed loss of the last update's samples.
        """
        if step <= self.step:
            return
        self.step = step
        self._run.count_step(step)
        totals = Totals(step_losses=(loss,))
        self._run.recorder.write_losses(self._run.progress.step_losses(totals))

    def repeat(self, step: int) -> None:
        """Record that the ranks repeat ``step``."""
        self._repeated.add(step)

    def pause(self) -> None:
        """Record that the group changes. A pause lasts from the last update before the change to the next update."""
        if self._members and not self._paused_at:
            self._paused_at = self.updated_at

    def regrouped(self, step: int, members: Sequence[int]) -> None:
        """Record the ranks that are members from ``step`` on."""
        entry = {"step": step, "ranks": members}
        if self._members[-1:] != [entry]:
            self._members.append(entry)
            ranks = sorted(members)
            self._run.monitor.record_event("members", text=f"ranks {ranks} train", ranks=ranks)

    def result(self) -> dict[str, Any]:
        """Return the result's fields about the group. ``pauses`` has the pauses in seconds."""
        return {
            "members": self._members,
            "rejoins": self.rejoins,
            "steps_repeated": len(self._repeated),
            "pauses": [round(each, 3) for each in self._pauses],
        }


class RunFiles:
    """Detect the removal or replacement of the run dir, or of its metrics.jsonl, after the start."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        paths = [run_dir, run_dir / "metrics.jsonl"]  # with --evaluate-only, metrics.jsonl does not exist
        self._at_start = {path: path.stat() for path in paths if path.exists()}

    def check(self) -> None:
        """Raise NonRetryableError if the run dir or its metrics.jsonl was removed or replaced.

        The folder may still exist after a removal of the run dir, because the ranks write new files into it.
        """
        for path, status in self._at_start.items():
            try:
                is_same = os.path.samestat(os.stat(path), status)
            except FileNotFoundError:
                is_same = False
            except OSError:  # a temporary disk error
                return
            if not is_same and path == self._run_dir:
                raise NonRetryableError(
                    f"the run dir {path} was removed or replaced: leave the run dir in place while the job runs"
                )
            if not is_same:
                raise NonRetryableError(
                    f"{path} was removed or replaced: leave the run dir in place while the job runs"
                )


class Records:
    """Write the log lines, checkpoints and the result of a run.

    Attributes:
        device: device of the ranks. The launcher itself does not compute.
        saved: step of the newest checkpoint.
        final: message and arrays of the run's last step, or None before this step.
        final_at: time at which ``final`` arrived, on the clock `time.monotonic`.
    """

    def __init__(self, run: Run, options: Options, history: History) -> None:
        """Resolve the run dir, the dataset and the checkpoint, and open metrics.jsonl."""
        self.device = choose_device(options, run.world)
        self.final: tuple[dict[str, Any], Groups] | None = None
        self.final_at = math.inf
        self._run = run
        self._history = history
        self._alone = Alone()
        self._groups: Groups = {}  # arrays for the next checkpoint
        self._left: tuple[dict[str, Any], Groups] | None = None  # newest state of a rank that has left
        self._start(options)
        self.saved = run.first_step
        self._logged = run.first_step
        history.step = run.first_step

    def _start(self, options: Options) -> None:
        run = self._run
        distributed.set_threads(options.threads)
        dtype = getattr(torch, options.dtype)
        model = build_model(options.model, options.dropout, dtype, options.seed)
        optimizer = build_optimizer(options, model)
        parts = Parts(load=partial(weights.load, model, optimizer), groups=lambda: self._groups)
        run.restore(self._alone, parts)
        train_set, test_set = load(options.dataset, options.data_dir, torch.device("cpu"))
        batches = GlobalBatches(
            len(train_set.labels), options.global_batch_size, options.seed, virtual_ranks=options.virtual_ranks
        )
        metadata = run_metadata(self.device, model)
        run.start(batches, len(test_set.labels), options.model, self.device.type, metadata)

    def checkpoint_messages(self) -> list[bytes]:
        """Return the parts of the newest checkpoint. A new rank gets them instead of `Run.restore`'s broadcasts."""
        return self._alone.parts

    def wants(self, values: dict[str, Any]) -> bool:
        """Return whether the launcher still needs the arrays of the state with these ``values``."""
        if values["stop"]:
            return self._left is None or values["step"] > self._left[0]["step"]
        if values["final"]:
            return not self.final
        return self._may_save(values["step"])

    def _may_save(self, step: int) -> bool:
        """Return whether the state after ``step`` updates can become the newest checkpoint.

        A checkpoint also has the sums of all losses up to the last log line. After a rollback, the ranks repeat steps
        before this line, and the sums do not belong to their states.
        """
        return step > self.saved and step >= self._logged

    def add(self, values: dict[str, Any], groups: Groups | None = None) -> None:
        """Write the log line and the checkpoint of a step, and keep the final state, each only once.

        Args:
            values: numbers of a log line, as `Members.record` sends them.
            groups: arrays of the state, if the launcher requested them.
        """
        step = values["step"]
        self._history.count(step, values["loss"])
        if step > self._logged:
            self._logged = step
            self._take_totals(values)
            evaluation = values["evaluation"] if values["evaluates"] else {}
            self._run.log_metrics(evaluation)
        if not groups:
            return
        if values["save"] and self._may_save(step):
            self._run.count_step(step)  # a lost rank may have completed more updates
            self._groups = groups
            self._run.save()
            self.saved = step
            self._keep(step, groups)
        if values["final"]:
            self.final = (values, groups)
            self.final_at = time.monotonic()

    def add_left(self, values: dict[str, Any], groups: Groups) -> None:
        """Keep the last state of a rank that leaves, for `save_and_stop`. An earlier state may arrive after a later."""
        if self.wants(values):
            self._left = (values, groups)

    def _keep(self, step: int, groups: Groups) -> None:
        """Store this checkpoint for ranks that join later."""
        message = {**json.loads(self._alone.parts[0]), "step": step, "groups": [*groups]}
        contents = [checkpoint.serialize(arrays) for arrays in groups.values()]
        self._alone.parts[:] = [json.dumps(message).encode(), *contents]

    def _take_totals(self, values: dict[str, Any]) -> None:
        """Pass the step, losses and stop signal in ``values`` to the run, for its next log line and checkpoint."""
        self._run.count_step(values["step"])  # a lost rank may have completed more updates
        totals = Totals(loss=values["loss"], running_loss=values["running_loss"], stop_signal=values["stop"])
        self._run.step_sync.apply(self._run.step, totals)

    def save_and_stop(self) -> None:
        """Save the newest state of the ranks that have left, and stop the run.

        If this state cannot be saved, a resume repeats the steps after the newest checkpoint.

        Raises:
            Stopped: always, after the save.
        """
        if self._left is not None:
            values, groups = self._left
            self._history.count(values["step"], values["loss"])
            if self._may_save(values["step"]):
                self._take_totals(values)
                if values["step"] > self._logged:
                    self._run.log_metrics({})
                self._groups = groups
                self._run.save()  # raises Stopped
        number = self._run.stop_request.number or signal.SIGTERM
        text = f"stopped by {signal.Signals(number).name}{self._describe_stop()}"
        raise stop.Stopped(number, text, is_final=self._left is not None)

    def _describe_stop(self) -> str:
        """Return the end of the message about a stop after which the launcher saves no state."""
        step = self._history.step
        if step == 0:
            return " before the first step"
        if step == self.saved:
            return f" at step {step}, which is saved"
        return f", unsaved: no rank has sent the state of step {step}; a resume starts at step {self.saved}"

    def finish(self) -> None:
        """Write the final weights, and print the result."""
        assert self.final
        values, groups = self.final
        self._groups = groups
        self._run.finish(values["evaluation"])
        self._run.report("torch", torch.__version__, "gloo", self.device.type, **self._history.result())


class Offers:
    """Compare the states that members offer after a step, and request the state's arrays from one member."""

    def __init__(self, records: Records, options: Options) -> None:
        self._records = records
        self._options = options
        self._offers: list[Message] = []  # unanswered offers; the launcher requests the arrays of the first offer
        self._digests: dict[int, tuple[str, int]] = {}  # the first digest of each step and its sender's rank, by step
        self._offered_at = 0.0
        self._asked_at = math.inf

    def add(self, each: Rank, message: Message) -> None:
        """Add an offer.

        Raises:
            RetryableError: another rank has different bits after the same step, and --allow-mixed is not set.
        """
        step = message.values["step"]
        digest = message.values["digest"]
        first, owner = self._digests.setdefault(step, (digest, each.rank))
        if digest != first and not self._options.allow_mixed:
            checkpoint.finish()
            if step == self._records.saved:
                replica_check.quarantine_newest(self._options.run_dir)
            raise RetryableError(f"rank {owner} and rank {each.rank} hold different bits after {step} updates")
        if message.values["final"]:
            each.is_done = True
        self._offers.append(message)
        self._offered_at = time.monotonic()

    def drop(self, channel: Channel) -> None:
        """Drop the offers of a rank whose connection has ended."""
        if self._offers and self._offers[0].channel is channel:
            self._asked_at = math.inf
        self._offers = [offer for offer in self._offers if offer.channel is not channel]

    def compare(self, members: Sequence[Rank]) -> None:
        """Answer the offers when all members have sent one, so that the launcher compares states before a save.

        If a rank does not send requested arrays within ANSWER_SECONDS, request them from the next rank.
        """
        now = time.monotonic()
        is_asked = self._asked_at < math.inf
        if self._offers and not is_asked and self._is_due(members, now):
            self._ask()
        if now - self._asked_at > ANSWER_SECONDS:  # the rank does not send the arrays
            self._ask_next()

    def _is_due(self, members: Sequence[Rank], now: float) -> bool:
        """Return whether all members have sent an offer, or the launcher need not wait for other offers."""
        if now - self._offered_at > ANSWER_SECONDS:
            return True
        if any(self._is_single(offer.values) for offer in self._offers):
            return True
        channels = {offer.channel for offer in self._offers}
        return all(each.channel is None or each.channel in channels for each in members)

    def _is_single(self, values: dict[str, Any]) -> bool:
        """Return whether an offer needs no comparison, because its rank leaves or the launcher has the state."""
        return bool(values["stop"]) or not self._records.wants(values)

    def _ask(self) -> None:
        """Answer offers in order, until the launcher needs the arrays of an offer. Request these arrays."""
        self._asked_at = math.inf
        while self._offers:
            offer = self._offers[0]
            wanted = self._records.wants(offer.values)
            offer.channel.send(wanted=wanted)
            offer.reply(wanted)
            if wanted:
                self._asked_at = time.monotonic()
                return
            self._offers.pop(0)

    def _ask_next(self) -> None:
        self._offers.pop(0)
        self._ask()

    def arrived(self, message: Message) -> None:
        """Record the arrays of an accepted offer, and answer the next offers."""
        assert message.contents is not None
        groups = {group: safetensors.numpy.load(content) for group, content in message.contents.items()}
        values = message.values
        if values["stop"]:
            self._records.add_left(values, groups)
        else:
            self._records.add(values, groups)
        if self._offers and self._offers[0].values is values:
            self._ask_next()
