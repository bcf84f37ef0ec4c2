"""Compare the traces that two runs with --trace-every have recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from samestep.untrusted import shown

from samestep_observe.run_reader import count_of

Traced = Mapping[int, Mapping[str, Mapping[str, str]]]  # digests of `samestep.trace.read` by step, kind and tensor


class Parting(NamedTuple):
    """The first difference between two traces.

    Attributes:
        step: the first step whose digests differ.
        kind: either "weights" (at the start of the step) or "gradients".
        names: names of the tensors that differ.
        before: the previous step of both traces; None if ``step`` is the first common step.
    """

    step: int
    kind: str
    names: list[str]
    before: int | None

    def describe(self) -> str:
        """Return a text about the difference, which begins with the step and the first tensor."""
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        place = f"step {self.step}, tensor {shown(self.names[0])}{others}"
        if self.kind == "gradients":
            return f"{place}: other gradients from equal weights"
        if self.before is None:
            return f"{place}: other weights at its start, and no step before it is traced"
        return f"{place}: other weights at its start, after equal weights and gradients of step {self.before}"


def first_difference(one: Traced, other: Traced) -> Parting | None:
    """Return the first difference between two traces; None if all common steps have equal digests."""
    before = None
    for step in common_steps(one, other):
        for kind in ("weights", "gradients"):
            mine = one[step][kind]
            theirs = other[step][kind]
            names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            if names:
                return Parting(step, kind, names=names, before=before)
        before = step
    return None


def common_steps(one: Traced, other: Traced) -> list[int]:
    """Return the steps that both traces have, in order."""
    return sorted(one.keys() & other.keys())


def describe(one: Traced, other: Traced) -> str:
    """Return a line about two traces; "" if they have no step in common."""
    steps = common_steps(one, other)
    if not steps:
        return ""
    parting = first_difference(one, other)
    if parting is None:
        return f"trace: {count_of(len(steps), 'common step')} with equal weights and gradients"
    return f"trace: {parting.describe()}"
