"""Crop and flip images at random, independently of ranks, batches and micro-batches."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from samestep.sharding import sample_bits
from torch import Tensor
from torch.nn.functional import pad

PADDING = 4  # width of the zero border on each side of an image before cropping, in pixels


def choices(
    indices: NDArray[np.int64], seed: int, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return random crop positions and flips, which depend only on (seed, epoch, index).

    A generator per rank or worker would make the values depend on the number of ranks or workers, and on resumes.

    Returns:
        Arrays [m]: top edge and left edge of each crop in the padded image, in pixels, and whether to flip the crop.
    """
    bits = sample_bits(seed, epoch, indices)
    positions = np.uint64(2 * PADDING + 1)
    top = bits % positions
    left = (bits >> np.uint64(20)) % positions
    flipped = (bits >> np.uint64(40)) % np.uint64(2) == 1
    return top.astype(np.int64), left.astype(np.int64), flipped


def crop_and_flip(images: Tensor, indices: NDArray[np.int64], seed: int, epoch: int) -> Tensor:
    """Pad images with zeros, crop each at a random position to the original size, and flip each with probability 1/2.

    Args:
        images: images uint8 [m, s, s, 3].
        indices: indices of the images in the dataset, int64 [m].
        seed: seed of the random choices.
        epoch: number of the epoch, from 0.

    Returns:
        Images uint8 [m, s, s, 3].
    """
    device = images.device
    top, left, flipped = (torch.from_numpy(each).to(device) for each in choices(indices, seed, epoch))
    side = images.shape[1]
    padded = pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    windows = padded.unfold(1, side, 1).unfold(2, side, 1)  # a view: [m, 9, 9, 3, s, s]
    windows = windows.permute(0, 1, 2, 4, 5, 3)
    rows = torch.arange(len(images), device=device)
    crops = windows[rows, top, left]  # indexing copies only the chosen windows
    crops[flipped] = crops[flipped].flip(2)
    return crops
