"""Argparse types that report a wrong number in one line. The benchmarks share them."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers that are at least ``minimum``."""

    def convert(text: str) -> int:
        if text.strip().isdecimal() and int(text) >= minimum:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")

    return convert


def counts(text: str) -> list[int]:
    """Return the numbers in a comma-separated list, such as ``1,2,4``. Each number is at least 1."""
    return [at_least(1)(each) for each in text.split(",")]
