"""Random crops and flips that belong to a sample: the same whatever rank, batch or micro-batch it is in."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from samestep.sharding import sample_bits
from torch import Tensor
from torch.nn.functional import pad

PADDING = 4  # pixels on each side, of which a random crop takes its choice


def choices(
    indices: NDArray[np.int64], seed: int, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Where each sample's window begins in the padded image, from the top and from the left, and is it flipped? [m].

    A function of (seed, epoch, index) alone. What is usually drawn here, from a rank's own generator or a worker's,
    makes another training of each number of ranks and workers, and of each resume.
    """
    bits, places = sample_bits(seed, epoch, indices), np.uint64(2 * PADDING + 1)
    top, left = bits % places, (bits >> np.uint64(20)) % places
    return top.astype(np.int64), left.astype(np.int64), (bits >> np.uint64(40)) % np.uint64(2) == 1


def crop_and_flip(images: Tensor, indices: NDArray[np.int64], seed: int, epoch: int) -> Tensor:
    """Crop from the padded images uint8 [m, s, s, 3], and flip half of them; samples ``indices`` of an epoch."""
    top, left, flipped = (torch.from_numpy(of).to(images.device) for of in choices(indices, seed, epoch))
    side = images.shape[1]
    padded = pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    windows = padded.unfold(1, side, 1).unfold(2, side, 1).permute(0, 1, 2, 4, 5, 3)  # a view: [m, 9, 9, s, s, 3]
    crops = windows[torch.arange(len(images), device=images.device), top, left]  # whole windows are copied
    crops[flipped] = crops[flipped].flip(2)
    return crops
