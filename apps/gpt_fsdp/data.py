"""The data: the bytes of a text file, mapped into memory: any number of them is there at once, and needs none of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from options import SIZES, TEXTS
from samestep import ConfigError
from samestep.options import Options
from samestep.sharding import GlobalBatches
from torch import Tensor

HELD_OUT = 10  # one byte of so many, the last ones, is not trained on
IGNORED = -100  # as a target: what `cross_entropy` leaves out


@dataclass(frozen=True)
class Windows:
    """Windows of ``context`` bytes whose successors are to be predicted: those from ``first`` to before ``stop``.

    Window i predicts ``context`` bytes from ``first`` + i * ``context`` on, each from those of the window before it.
    """

    text: NDArray[np.uint8]
    first: int
    stop: int
    context: int
    device: torch.device

    def __len__(self) -> int:
        """Windows, the last of which may have less to predict."""
        return -(-(self.stop - self.first) // self.context)

    @property
    def bytes(self) -> int:
        """How many are to be predicted, each in one window."""
        return self.stop - self.first

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Bytes int64 [m, context] of windows ``indices``, and their successors, IGNORED where there are none.

        Of no windows it is one with nothing to predict, as every rank takes part in what the others compute.
        """
        if not len(indices):
            tokens = torch.zeros((1, self.context), dtype=torch.int64)
            return tokens.to(self.device), torch.full_like(tokens, IGNORED).to(self.device)
        at = self.first + indices[:, None] * self.context + np.arange(self.context)
        there = np.minimum(at, self.stop - 1)
        tokens = torch.from_numpy(self.text[there - 1].astype(np.int64))
        targets = torch.from_numpy(np.where(at < self.stop, self.text[there].astype(np.int64), IGNORED))
        return tokens.to(self.device), targets.to(self.device)


def num_microbatches(options: Options, batches: GlobalBatches, step: int) -> int:
    """Micro-batches of a step: --accumulate, or fewer, so that none is empty on all ranks."""
    return min(int(options.accumulate), batches.size(step))


def read(options: Options) -> NDArray[np.uint8]:
    """The text's bytes, mapped. Raises UserError for a file that cannot be read, or is too short."""
    path = options.data_file or TEXTS / "jargon.txt"
    try:
        text: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")[: SIZES.get(options.dataset)]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}: name another --data-file") from None
    if len(text) - len(text) // HELD_OUT <= options.context or len(text) < HELD_OUT:
        raise ConfigError(
            f"{path} has {len(text)} bytes: too few for --context {options.context}: name another --data-file"
        )
    return text


def load(options: Options, device: torch.device) -> tuple[Windows, Windows]:
    """The training part, of whole windows, and the held-out part. Raises as `read`."""
    text = read(options)
    cut = len(text) - len(text) // HELD_OUT
    bounded_int = (cut - 1) // options.context * options.context
    training = Windows(text, 1, 1 + bounded_int, options.context, device)
    return training, Windows(text, cut, len(text), options.context, device)


def markov_bits(text: NDArray[np.uint8]) -> float | None:
    """Bits a byte of the held-out part by an interpolated Markov model of two bytes of context; None for a large file.

    Its counts are the training part's, and each context is mixed with the shorter one by how many successors it had.
    Source: Witten & Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory 37(4), 1991, method C.
    """
    if len(text) > 2**28:
        return None
    cut = len(text) - len(text) // HELD_OUT
    seen, held_out = text[:cut].astype(np.int64), text[cut - 2 :].astype(np.int64)
    chance = np.full(len(held_out) - 2, 1 / 256)
    for order in range(3):
        key = sum(seen[order - back : len(seen) - back] << 8 * back for back in range(order + 1))
        its = sum(held_out[2 - back : len(held_out) - back] << 8 * back for back in range(order + 1))
        counts = np.bincount(key, minlength=256 ** (order + 1))
        by_context = counts.reshape(-1, 256)
        total, kinds = by_context.sum(1)[its >> 8], (by_context > 0).sum(1)[its >> 8]
        chance = np.where(total, (counts[its] + kinds * chance) / np.maximum(1, total + kinds), chance)
    return float(-np.log2(chance).mean())
