"""Read windows of a text file's bytes. The file is memory-mapped, so a rank reads only the bytes that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from options import SIZES, TEXTS
from samestep import ConfigError
from samestep.options import Options
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT = 10  # the last 1 / HELD_OUT of the bytes are the test set
IGNORED = -100  # target that `cross_entropy` ignores


@dataclass(frozen=True)
class Windows(Dataset[Any]):
    """A dataset of windows, which divide the bytes [first, stop) of ``text`` into sequences of ``context`` targets.

    The targets of window i begin at byte ``first`` + i * ``context``. The model predicts each target from the window's
    earlier targets and the byte before the first target. A `samestep.torch.DataLoader` reads each batch by one call of
    `batch`.
    """

    text: NDArray[np.uint8]
    first: int
    stop: int
    context: int
    device: torch.device

    def __len__(self) -> int:
        """Return the number of windows. The last window may be shorter."""
        return -(-(self.stop - self.first) // self.context)

    @property
    def bytes(self) -> int:
        """Return the number of target bytes in all windows."""
        return self.stop - self.first

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the windows ``indices`` [m]; m may be 0, because ranks without windows also call the collectives.

        Returns:
            Inputs and targets, int64 [m, context]. The target is the byte after the input, or IGNORED from ``stop`` on.
        """
        begins = self.first + indices * self.context
        at = begins[:, None] + np.arange(self.context)  # positions of the targets in the file
        there = np.minimum(at, self.stop - 1)
        tokens = self.text[there - 1].astype(np.int64)
        targets = self.text[there].astype(np.int64)
        targets = np.where(at < self.stop, targets, IGNORED)
        return torch.from_numpy(tokens).to(self.device), torch.from_numpy(targets).to(self.device)

    __getitems__ = batch  # a DataLoader calls this method


def read(options: Options) -> NDArray[np.uint8]:
    """Return the bytes of the text as a memory-mapped array.

    Raises:
        ConfigError: the file is unreadable or too short.
    """
    path = options.data_file or TEXTS / "jargon.txt"
    try:
        text: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")[: SIZES.get(options.dataset)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}: name another --data-file") from None
    trained_on = len(text) - len(text) // HELD_OUT
    if trained_on <= options.context or len(text) < HELD_OUT:
        raise ConfigError(
            f"{path} has {len(text)} bytes: too few for --context {options.context}: name another --data-file"
        )
    return text


def load(options: Options, device: torch.device) -> tuple[Windows, Windows]:
    """Return the training set, which has only complete windows, and the test set.

    Raises:
        ConfigError: the file is unreadable or too short.
    """
    text = read(options)
    cut = len(text) - len(text) // HELD_OUT
    complete = (cut - 1) // options.context * options.context
    train_set = Windows(text, 1, 1 + complete, context=options.context, device=device)
    test_set = Windows(text, cut, len(text), context=options.context, device=device)
    return train_set, test_set


def markov_bits(text: NDArray[np.uint8]) -> float | None:
    """Return the test set's bits per byte under a Markov model with two bytes of context, as a reference value.

    The model counts the bytes before the test set. It interpolates each context with the next shorter context, weighted
    by the number of distinct successors. Source: Witten & Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory
    37(4), 1991, method C.

    Returns:
        The number of bits, or None for a text of more than 256 MiB.
    """
    if len(text) > 2**28:
        return None
    cut = len(text) - len(text) // HELD_OUT
    train = text[:cut].astype(np.int64)
    test = text[cut - 2 :].astype(np.int64)
    probability = np.full(len(test) - 2, 1 / 256)
    for order in range(3):
        train_key = _with_context(train, order, first=order)
        test_key = _with_context(test, order, first=2)
        counts = np.bincount(train_key, minlength=256 ** (order + 1))
        by_context = counts.reshape(-1, 256)
        context = test_key >> 8
        total = by_context.sum(1)[context]
        kinds = (by_context > 0).sum(1)[context]
        mixed = (counts[test_key] + kinds * probability) / np.maximum(1, total + kinds)
        probability = np.where(total, mixed, probability)
    return float(-np.log2(probability).mean())


def _with_context(text: NDArray[np.int64], order: int, first: int) -> NDArray[np.int64]:
    """Return a number for each byte from ``first`` on, which encodes the byte and the ``order`` bytes before it."""
    key = np.zeros(len(text) - first, np.int64)
    for back in range(order + 1):
        key += text[first - back : len(text) - back] << 8 * back
    return key
