"""Crop and flip images at random, as a function of the sample: the same in any rank, batch or micro-batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from samestep.sharding import sample_bits
from torch import Tensor
from torch.nn.functional import pad

PADDING = 4  # pixels on each side, within which a crop may begin


def choices(
    indices: NDArray[np.int64], seed: int, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return for each sample [m] the top and left of its window in the padded image, and whether to flip it.

    The result depends only on (seed, epoch, index). A draw from a generator of the rank or worker would change with the
    number of ranks and workers, and at each resume.
    """
    bits = sample_bits(seed, epoch, indices)
    positions = np.uint64(2 * PADDING + 1)
    top = bits % positions
    left = (bits >> np.uint64(20)) % positions
    flipped = (bits >> np.uint64(40)) % np.uint64(2) == 1
    return top.astype(np.int64), left.astype(np.int64), flipped


def crop_and_flip(images: Tensor, indices: NDArray[np.int64], seed: int, epoch: int) -> Tensor:
    """Crop each of the images uint8 [m, s, s, 3], samples ``indices`` of an epoch, after padding; flip half of them."""
    device = images.device
    top, left, flipped = (torch.from_numpy(each).to(device) for each in choices(indices, seed, epoch))
    side = images.shape[1]
    padded = pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    windows = padded.unfold(1, side, 1).unfold(2, side, 1)  # a view: [m, 9, 9, 3, s, s]
    windows = windows.permute(0, 1, 2, 4, 5, 3)
    rows = torch.arange(len(images), device=device)
    crops = windows[rows, top, left]  # whole windows are copied
    crops[flipped] = crops[flipped].flip(2)
    return crops
