"""``--api highlevel``: take the same steps by `mindspore.train.Model`, which owns the loop."""

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

AfterUpdate = Callable[[int, Tensor], None]  # takes a step and the loss that it returned


class RunCallback(Callback):  # type: ignore[misc]
    """Call ``after_update`` for each update of `Model`. A loop of updates on the device returns only its last loss."""

    def __init__(self, run: Run, after_update: AfterUpdate, loop: int) -> None:
        self.run = run
        self.after_update = after_update
        self.step = run.first_step
        self.loop = loop
        self.current = contextlib.ExitStack()  # Model now fetches a batch, or takes a step

    def on_train_begin(self, run_context: Any) -> None:
        self.current.enter_context(self.run.timer.phase(INPUT))

    def on_train_step_begin(self, run_context: Any) -> None:
        self.current.close()
        self.current.enter_context(self.run.monitor.collective("train step"))

    def on_train_step_end(self, run_context: Any) -> None:
        self.current.close()
        self.run.timer.mark(COMMUNICATION)  # includes all work of the compiled graph, which cannot be measured in parts
        arguments = run_context.original_args()
        loss = arguments.net_outputs
        if self.step == self.run.first_step:
            record_layouts(arguments.train_network)
        mode: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.run.options.parallel != "data":
            mode = stand_alone()
        with mode:  # what follows is whole on each rank
            for _ in range(self.loop):
                self.after_update(self.step, loss)
                self.step += 1
        self.current.enter_context(self.run.timer.phase(INPUT))


def fit(
    run: Run, forward: nn.Cell, optimizer: nn.Optimizer, shards: ds.Dataset, after_update: AfterUpdate, sinks: bool
) -> None:
    """Take all steps of ``run``.

    LossMonitor, which --quiet disables, calls all of ``shards`` epoch 1; with ``sinks`` each loop is an epoch.

    Args:
        run: gives the steps and the options.
        forward: computes the loss of a batch's images, labels and sample weights; or `auto_parallel.cut` of that.
        optimizer: updates the model in ``forward``.
        shards: this rank's batches, one per step from the run's first to its last.
        after_update: called after each update.
        sinks: MindSpore keeps the shards ready on the device, and runs loops of --sink-size updates there.

    Raises:
        RetryableError, NonRetryableError: a loss is NaN or infinite, as `Run.log_metrics` raises.
    """
    if run.world.world_size > 1 and run.options.parallel == "data":  # Model then averages the gradients over ranks
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
        if "NAN or INF" in str(problem):  # LossMonitor's words: it reads each loss
            run.monitor.check_losses({"loss": math.nan}, callbacks[0].step)
        raise
