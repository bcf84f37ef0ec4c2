"""Choose how many cases a test runs: few in the quick tests, many in a soak."""

from __future__ import annotations

from typing import TypeVar

Amount = TypeVar("Amount")


def amount(soak: bool, few: Amount, many: Amount) -> Amount:
    """Return ``many`` in a soak, and ``few`` otherwise; both are counts, options or cases."""
    if soak:
        return many
    return few
