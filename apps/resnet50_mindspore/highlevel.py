"""``--api highlevel``: the same steps by mindspore.train.Model, which owns the loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
from mindspore import Tensor, nn
from mindspore.train import Callback, LossMonitor, Model
from samestep import rollback
from samestep.phases import Phases
from samestep.run import Run


class TellRun(Callback):  # type: ignore[misc]
    """Tells after each update what it returned; of updates in a loop on the device only the last returns something."""

    def __init__(self, after_update: Callable[[int, Tensor], None], first: int, loop: int, phases: Phases) -> None:
        self.after_update, self.step, self.loop, self.phases = after_update, first, loop, phases

    def on_train_step_begin(self, run_context: Any) -> None:
        self.phases.end("input")  # of batches that sink, which the device takes, this shows nothing

    def on_train_step_end(self, run_context: Any) -> None:
        self.phases.end("waiting")  # and all else that a compiled graph does
        loss = run_context.original_args().net_outputs
        for _ in range(self.loop):
            self.after_update(self.step, loss)
            self.step += 1
        self.phases.begin()


def fit(
    forward: nn.Cell,
    optimizer: nn.Optimizer,
    shards: ds.Dataset,
    steps: range,
    after_update: Callable[[int, Tensor], None],
    run: Run,
    sink_size: int | None,
    print_every: int,
) -> None:
    """Train on ``shards``, one for each of ``steps``; ``sink_size`` is None where nothing sinks.

    ``shards`` begin where the run does, at its checkpoint, and end with it: that is what LossMonitor, which prints each
    ``print_every`` updates and for 0 is left out, calls epoch 1. Where shards sink, each loop of ``sink_size`` updates
    is an epoch to it. Raises as `Run.record` where a loss is no number.
    """
    if run.world.world_size > 1:  # Model then averages the gradients over ranks
        ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    model = Model(forward, optimizer=optimizer)
    tell = TellRun(after_update, steps.start, sink_size or 1, run.phases)
    callbacks = [tell, LossMonitor(print_every)] if print_every else [tell]
    run.phases.begin()
    try:
        if sink_size:
            loops = len(steps) // sink_size
            model.train(loops, shards, callbacks, dataset_sink_mode=True, sink_size=sink_size)  # ranks talk
        else:
            model.train(1, shards, callbacks, dataset_sink_mode=False)  # ranks talk: at each step
    except ValueError as problem:
        if "NAN or INF" not in str(problem):  # words of LossMonitor, which looks at each loss
            raise
        raise rollback.not_finite("loss", math.nan, tell.step, run.options, run.world) from problem
