"""Compute the same steps as train.py's loop by `mindspore.train.Model` (``--api highlevel``)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
from auto_parallel import record_layouts, stand_alone
from mindspore import Tensor, nn
from mindspore.train import Callback, LossMonitor, Model
from samestep.run import Run
from samestep.step_timer import COMMUNICATION, INPUT

AfterUpdate = Callable[[int, Tensor], None]  # function of a step's number and its loss


class RunCallback(Callback):  # type: ignore[misc]
    """Call ``after_update`` for each update of `Model`. All updates of a loop get the loop's last loss."""

    def __init__(self, run: Run, after_update: AfterUpdate, loop: int) -> None:
        self.run = run
        self.after_update = after_update
        self.step = run.first_step
        self.loop = loop
        self.current = contextlib.ExitStack()  # context of the current phase: fetch of a batch, or a step

    def on_train_begin(self, run_context: Any) -> None:
        self.current.enter_context(self.run.timer.phase(INPUT))

    def on_train_step_begin(self, run_context: Any) -> None:
        self.current.close()
        self.current.enter_context(self.run.monitor.collective("train step"))

    def on_train_step_end(self, run_context: Any) -> None:
        self.current.close()
        self.run.timer.mark(COMMUNICATION)  # includes all work of the compiled graph, whose parts cannot be timed
        arguments = run_context.original_args()
        loss = arguments.net_outputs
        if self.step == self.run.first_step:
            record_layouts(arguments.train_network)
        mode: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.run.options.parallel != "data":
            mode = stand_alone()
        with mode:  # MindSpore must not split evaluations over ranks
            for _ in range(self.loop):
                self.after_update(self.step, loss)
                self.step += 1
        self.current.enter_context(self.run.timer.phase(INPUT))


def fit(
    run: Run, forward: nn.Cell, optimizer: nn.Optimizer, shards: ds.Dataset, after_update: AfterUpdate, sinks: bool
) -> None:
    """Train all steps of ``run``.

    LossMonitor, which --quiet disables, prints epoch 1 for all steps. If ``sinks`` is true, LossMonitor counts each
    loop as an epoch.

    Args:
        run: the run, with its steps and options.
        forward: cell that returns the loss of images, labels and sample weights, or the result of `auto_parallel.cut`.
        optimizer: optimizer of the model in ``forward``.
        shards: this rank's batches, one per step from the run's first to its last.
        after_update: function that `fit` calls after each update.
        sinks: whether to send the shards to the device in advance, and run loops of --sink-size updates there.

    Raises:
        RetryableError, NonRetryableError: a loss is NaN or infinite, as in `Run.log_metrics`.
    """
    if run.world.world_size > 1 and run.options.parallel == "data":  # in this mode, Model averages the gradients
        ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    model = Model(forward, optimizer=optimizer)
    options = run.options
    loop = options.sink_size if sinks else 1
    callbacks = [RunCallback(run, after_update, loop)]
    if not options.quiet and options.log_every:
        callbacks.append(LossMonitor(options.log_every))
    try:
        if sinks:
            loops = (run.last_step - run.first_step) // loop
            model.train(loops, shards, callbacks, dataset_sink_mode=True, sink_size=loop)  # collective
        else:
            model.train(1, shards, callbacks, dataset_sink_mode=False)  # collective: at each step
    except ValueError as problem:
        if "NAN or INF" in str(problem):  # LossMonitor's message about a loss
            run.monitor.check_losses({"loss": math.nan}, callbacks[0].step)
        raise
