"""Compute learning-rate schedules: functions of the step that return a factor for --lr.

``step`` is the number of updates done, from 0. ``steps`` is the schedule's length: the number of updates in the run. A
factor depends only on the function's arguments. Therefore checkpoints do not store it, and its bits are the same on
every rank and after a resume. If the length depends on --epochs, a resume must not change --epochs (see
`Options.resume_pinned`). After ``steps`` updates, a schedule keeps its last value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def constant(step: int) -> float:
    """Return 1.0 for every step."""
    return 1.0


def warmup(step: int, warmup_steps: int) -> float:
    """Return a factor that grows linearly from 1 / warmup_steps at step 0 to 1, and stays at 1.

    The factor reaches 1 at step warmup_steps - 1. If warmup_steps is 0, the factor is always 1. Multiply another
    schedule by this factor. Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017,
    section 2.2.
    """
    if not warmup_steps:
        return 1.0
    return min(1.0, (step + 1) / warmup_steps)


def linear(step: int, steps: int, final: float = 0.0) -> float:
    """Return a factor that falls linearly from 1 at step 0 to ``final`` at ``steps``.

    Devlin et al., "BERT", NAACL 2019, appendix A.2, use this schedule after a warm-up.

    Args:
        step: number of the update, from 0.
        steps: number of updates of the run.
        final: factor at ``steps``.
    """
    return 1.0 + (final - 1.0) * _progress(step, steps)


def cosine(step: int, steps: int, final: float = 0.0) -> float:
    """Return a factor that falls along half a cosine from 1 at step 0 to ``final`` at ``steps``.

    Source: Loshchilov & Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, equation 5, with
    one period.

    Args:
        step: number of the update, from 0.
        steps: number of updates of the run.
        final: factor at ``steps``.
    """
    return final + (1.0 - final) * _fall(_progress(step, steps))


def step_decay(step: int, milestones: Sequence[int], gamma: float = 0.1) -> float:
    """Return ``gamma`` to the power of the number of milestones that ``step`` has reached.

    Source: He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2 (1/10 at two milestones).

    Args:
        step: number of the update, from 0.
        milestones: steps at which the factor is multiplied by ``gamma`` once more.
        gamma: factor of each milestone.
    """
    reached = [milestone for milestone in milestones if step >= milestone]
    return float(gamma ** len(reached))


def one_cycle(step: int, steps: int, rising: float = 0.3, start: float = 1 / 25, final: float = 1 / 250_000) -> float:
    """Return a factor that rises along half a cosine from ``start`` to 1, then falls along half a cosine to ``final``.

    Source: Smith & Topin, "Super-convergence", 2018. torch's OneCycleLR uses the same form and default values. The
    factor reaches ``final`` at the last update, steps - 1.

    Args:
        step: number of the update, from 0.
        steps: number of updates of the run.
        rising: fraction of the updates in which the factor rises.
        start: factor at update 0.
        final: factor at the last update.
    """
    top = rising * steps - 1
    if step < top:
        return start + (1.0 - start) * _rise(_progress(step, top))
    falling = _progress(step - top, (1.0 - rising) * steps)
    return final + (1.0 - final) * _fall(falling)


def _rise(progress: float) -> float:
    """Return half a cosine that rises from 0 to 1 while ``progress`` rises from 0 to 1."""
    return 0.5 * (1.0 - math.cos(math.pi * progress))


def _fall(progress: float) -> float:
    """Return half a cosine that falls from 1 to 0 while ``progress`` rises from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _progress(step: float, steps: float) -> float:
    """Return the fraction ``step / steps``, at most 1; 1 if ``steps`` is 0."""
    if not steps:
        return 1.0
    return min(1.0, step / steps)
