"""How fast? Learning rates as functions of the step: what to multiply --lr by at one update.

``step`` counts the updates done before this one, from 0, and ``steps`` is the horizon: how many there are in all. A
factor is computed from them alone, so there is nothing to save, a resume cannot get it wrong, and it is the same on
every rank, to the bit. Whoever takes a horizon from --epochs must keep them at a resume
(`Options.resume_pinned`). Beyond its horizon a schedule stays where it ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def constant(step: int) -> float:
    """1 at every update."""
    return 1.0


def warmup(step: int, warmup_steps: int) -> float:
    """Linear from 1 / warmup_steps at the first update to 1 at the last of ``warmup_steps``, and 1 from there on.

    Multiply another factor by it. No update is made with 0. Source: Goyal et al., "Accurate, large minibatch SGD:
    training ImageNet in 1 hour", 2017, section 2.2.
    """
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def linear(step: int, steps: int, final: float = 0.0) -> float:
    """A straight line from 1 at step 0 to ``final`` at ``steps``.

    Source: Devlin et al., "BERT", NAACL 2019, appendix A.2, after a warm-up.
    """
    return 1.0 + (final - 1.0) * _along(step, steps)


def cosine(step: int, steps: int, final: float = 0.0) -> float:
    """Half a cosine from 1 at step 0 to ``final`` at ``steps``.

    Source: Loshchilov & Hutter, "SGDR: stochastic gradient descent with warm restarts", ICLR 2017, equation 5, with
    one period.
    """
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * _along(step, steps)))


def step_decay(step: int, milestones: Sequence[int], gamma: float = 0.1) -> float:
    """``gamma`` to the number of ``milestones`` (steps) that are reached.

    Source: He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2: 1/10 at two milestones.
    """
    return float(gamma ** sum(step >= milestone for milestone in milestones))


def one_cycle(step: int, steps: int, rising: float = 0.3, start: float = 1 / 25, final: float = 1 / 250_000) -> float:
    """Half a cosine up from ``start`` to 1 over the share ``rising`` of the steps, and another down to ``final``.

    Source: Smith & Topin, "Super-convergence", 2018, in the form and with the numbers of fast.ai and of torch's
    OneCycleLR, which makes its last update, steps - 1, with ``final``.
    """
    top = rising * steps - 1
    if step < top:
        return start + (1.0 - start) * 0.5 * (1.0 - math.cos(math.pi * _along(step, top)))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * _along(step - top, (1.0 - rising) * steps)))


def _along(step: float, steps: float) -> float:
    """How far ``step`` is on the way to ``steps``, in [0, 1]."""
    return min(1.0, step / steps) if steps else 1.0
