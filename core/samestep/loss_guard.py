"""Detect losses, evaluations and weights that are NaN or infinite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from samestep import NonRetryableError, log
from samestep.monitor import Monitor
from samestep.options import own_scalar


class LossGuard:
    """Check whether the numbers of a run are finite.

    If a flipped bit has made a number NaN or infinite, a restart computes the correct number. If the learning rate is
    too high, the failure recurs after the restart.
    """

    def __init__(self, monitor: Monitor) -> None:
        """Store ``monitor``, which checks losses and reads the failures of earlier starts."""
        self._monitor = monitor
        self._is_overflowed = False  # whether the last evaluation was NaN or infinite

    def check_losses(self, losses: Mapping[str, float], step: int) -> None:
        """Raise the errors of `Monitor.check_losses` if a loss is NaN or infinite."""
        self._monitor.check_losses(losses, step)

    def check_evaluation(self, evaluation: Mapping[str, Any], step: int, is_of_update: bool = False) -> dict[str, Any]:
        """Return the evaluation with None in place of NaN and infinity.

        Log a warning at the first of consecutive evaluations with NaN or infinity. If weights grow too large, batch
        normalization keeps the training loss finite. An evaluation uses the running statistics instead, so its
        activations overflow. A flipped bit can also make an evaluation infinite, but a restart then computes a finite
        one.

        Args:
            evaluation: numbers by name, also as scalars of numpy or of a framework.
            step: number of updates done.
            is_of_update: whether the evaluation follows an update of this start.

        Raises:
            RetryableError: the first such evaluation follows an update, its test loss is not finite, and no earlier
                start failed at this step.
            NonRetryableError: a value is not a number.
        """
        evaluation = {name: plain_number(name, value) for name, value in evaluation.items()}
        overflowed = [name for name, value in evaluation.items() if value is not None and not math.isfinite(value)]
        values = {**evaluation, **dict.fromkeys(overflowed)}
        is_new = bool(overflowed) and not self._is_overflowed
        if is_new and is_of_update and "test_loss" in overflowed:
            with contextlib.suppress(NonRetryableError):
                self.check_losses({"test loss": evaluation["test_loss"]}, step)
        if is_new:
            name = "test_loss" if "test_loss" in overflowed else overflowed[0]
            log.warning(
                f"at step {step} the {name.replace('_', ' ')} is NaN or infinite, reported as null: activations "
                "overflow with batch normalization's running statistics: lower --lr, or raise --global-batch-size"
            )
        if values:
            self._is_overflowed = bool(overflowed)
        return values

    def check_weights(self, weights: Mapping[str, Any], step: int) -> None:
        """Raise NonRetryableError if the last evaluation was NaN or infinite, and a weight is NaN or infinite.

        Args:
            weights: arrays by name, or shards, whose attribute ``values`` is an array.
            step: number of updates done, for the message.
        """
        if not self._is_overflowed:
            return
        for weight in weights.values():
            array = np.asarray(getattr(weight, "values", weight))
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonRetryableError(f"at step {step} weights are NaN or infinite: lower --lr")


def plain_number(name: str, value: Any) -> Any:
    """Return a number of an evaluation as Python's own number; None for None.

    Raises:
        NonRetryableError: the value is not a number.
    """
    value = own_scalar(value)
    if value is not None and not isinstance(value, (int, float)):
        kind = type(value).__name__
        raise NonRetryableError(f"the evaluation's {name} is a {kind}: return a number, such as by item()")
    return value
