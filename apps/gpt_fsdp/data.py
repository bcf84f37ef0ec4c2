"""Read windows of a text file's bytes. The file is mapped, so that its size costs neither time nor memory."""

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
IGNORED = -100  # the target that `cross_entropy` leaves out


@dataclass(frozen=True)
class Windows(Dataset[Any]):
    """Cut the bytes [first, stop) of ``text`` into windows of ``context`` targets.

    Window i predicts ``context`` bytes from ``first`` + i * ``context`` on, each from its predecessors in the window. A
    `samestep.torch.DataLoader` reads whole batches.
    """

    text: NDArray[np.uint8]
    first: int
    stop: int
    context: int
    device: torch.device

    def __len__(self) -> int:
        """Return the number of windows; the last may be shorter."""
        return -(-(self.stop - self.first) // self.context)

    @property
    def bytes(self) -> int:
        """Return the number of target bytes. Each is in one window."""
        return self.stop - self.first

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return bytes int64 [m, context] of the windows ``indices`` [m], and their successors, IGNORED beyond the end.

        m may be 0, because every rank must take part in the collectives of a pass.
        """
        at = self.first + indices[:, None] * self.context + np.arange(self.context)
        there = np.minimum(at, self.stop - 1)
        tokens = torch.from_numpy(self.text[there - 1].astype(np.int64))
        targets = torch.from_numpy(np.where(at < self.stop, self.text[there].astype(np.int64), IGNORED))
        return tokens.to(self.device), targets.to(self.device)

    __getitems__ = batch  # a DataLoader's name for it


def read(options: Options) -> NDArray[np.uint8]:
    """Return the bytes of the text, mapped. Raises ConfigError for a file that is unreadable or too short."""
    path = options.data_file or TEXTS / "jargon.txt"
    try:
        text: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")[: SIZES.get(options.dataset)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}: name another --data-file") from None
    if len(text) - len(text) // HELD_OUT <= options.context or len(text) < HELD_OUT:
        few = f"{path} has {len(text)} bytes: too few for --context {options.context}"
        raise ConfigError(f"{few}: name another --data-file")
    return text


def load(options: Options, device: torch.device) -> tuple[Windows, Windows]:
    """Return the training set, in complete windows, and the test set. Raises ConfigError as `read` does."""
    text = read(options)
    cut = len(text) - len(text) // HELD_OUT
    complete = (cut - 1) // options.context * options.context
    train_set = Windows(text, 1, 1 + complete, options.context, device)
    return train_set, Windows(text, cut, len(text), options.context, device)


def markov_bits(text: NDArray[np.uint8]) -> float | None:
    """Return the bits per byte of an interpolated Markov model of two bytes of context on the test set.

    The counts come from the training set. Each context is mixed with the next shorter one by its number of different
    successors. It returns None for a file above 256 MB.
    Source: Witten & Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory 37(4), 1991, method C.
    """
    if len(text) > 2**28:
        return None
    cut = len(text) - len(text) // HELD_OUT
    train, test = text[:cut].astype(np.int64), text[cut - 2 :].astype(np.int64)
    probability = np.full(len(test) - 2, 1 / 256)
    for order in range(3):
        # The byte and its context as one number: of each training byte, and of each test byte.
        train_key = sum(train[order - back : len(train) - back] << 8 * back for back in range(order + 1))
        test_key = sum(test[2 - back : len(test) - back] << 8 * back for back in range(order + 1))
        counts = np.bincount(train_key, minlength=256 ** (order + 1))
        by_context = counts.reshape(-1, 256)
        total, kinds = by_context.sum(1)[test_key >> 8], (by_context > 0).sum(1)[test_key >> 8]
        mixed = (counts[test_key] + kinds * probability) / np.maximum(1, total + kinds)
        probability = np.where(total, mixed, probability)
    return float(-np.log2(probability).mean())
