"""Compare the traces of two runs, which they recorded by --trace-every."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from samestep.untrusted import shown

from samestep_observe.run_reader import count_of

Traced = Mapping[int, Mapping[str, Mapping[str, str]]]  # as `samestep.trace.read` returns it


class Parting(NamedTuple):
    """The first digests that differ.

    Attributes:
        step: of the digests.
        kind: "weights", which are those at the start of the step, or "gradients".
        names: the tensors that differ.
        before: the last step before it that both traces have; None if it is the first.
    """

    step: int
    kind: str
    names: list[str]
    before: int | None

    def describe(self) -> str:
        """Return the place as a text that begins with the step and the first tensor."""
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        place = f"step {self.step}, tensor {shown(self.names[0])}{others}"
        if self.kind == "gradients":
            return f"{place}: other gradients from equal weights"
        if self.before is None:
            return f"{place}: other weights at its start, and no step before it is traced"
        return f"{place}: other weights at its start, after equal weights and gradients of step {self.before}"


def first_difference(one: Traced, other: Traced) -> Parting | None:
    """Return where two traces part; None if they have equal digests at all common steps."""
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
