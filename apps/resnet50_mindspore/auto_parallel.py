"""Split the operators of a step over ranks by MindSpore (``--parallel semi-auto`` and ``auto``, experimental).

Semi-automatic parallelization splits the batch and the weights of the last layer. Automatic parallelization
(AUTO_PARALLEL) splits all operators by a search with a cost model.

If MindSpore splits a weight, each rank holds a part of the weight. `gather` assembles the parts for checkpoints,
comparisons and evaluations. This module was never run on Ascend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from distributed import all_gather
from mindspore import Parameter, nn
from mindspore.parallel.auto_parallel import AutoParallel
from model import ResNet
from numpy.typing import NDArray

MODES = {"semi-auto": "semi_auto", "auto": "recursive_programming"}  # AutoParallel's name for each value of --parallel


def cut(network: nn.Cell, model: ResNet, parallel: str, world_size: int) -> nn.Cell:
    """Return ``network`` as a cell that MindSpore splits over ranks during compilation.

    Args:
        network: a training step, or the forward pass that `Model` needs. Both contain ``model``.
        model: the trained model.
        parallel: "semi-auto" or "auto".
        world_size: number of ranks, which must divide the number of inputs of the last layer for "semi-auto".
    """
    if parallel == "semi-auto":  # each rank multiplies its part of the features, and MindSpore sums the products
        model.fc.matmul.shard(((1, world_size), (1, world_size)))
    graph = AutoParallel(network, MODES[parallel])
    graph.enable_gradients_mean()
    return graph


@contextlib.contextmanager
def stand_alone() -> Iterator[None]:
    """Compile without automatic parallelization in the block, and then restore the previous mode."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.STAND_ALONE)
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=mode)


def record_layouts(network: nn.Cell) -> None:
    """Set the attribute ``layout`` of each parameter of the compiled ``network``: the layout over ranks, or None."""
    for parameter in network.get_parameters():
        parameter.layout = network.parameter_layout_dict.get(parameter.name)


def whole(parameter: Parameter) -> NDArray[Any]:
    """Return a parameter as one array. If MindSpore has split the parameter, all ranks must call this function."""
    part = np.array(parameter.asnumpy())
    layout = getattr(parameter, "layout", None)
    if layout is None or all(axis == -1 for axis in layout[1]):
        return part
    return gather(part, *layout[:2])  # collective


def gather(part: NDArray[Any], matrix: Sequence[int], tensor_map: Sequence[int]) -> NDArray[Any]:
    """Assemble an array from the equal parts of all ranks. All ranks must call this function.

    Args:
        part: this rank's part. All parts have the same shape and dtype.
        matrix: shape of MindSpore's grid of ranks, which is filled by rows.
        tensor_map: for each axis of ``part``, the axis of the grid over which it is split, or -1 if it is not split.
            The last axis of the grid has the number 0. Ranks along a split axis hold consecutive parts.
    """
    parts = all_gather(part.ravel())  # collective
    cuts = [1 if axis == -1 else matrix[-1 - axis] for axis in tensor_map]
    shape = [count * size for count, size in zip(cuts, part.shape)]
    array = np.empty(shape, part.dtype)
    for rank, values in enumerate(parts):
        place = np.unravel_index(rank, matrix)
        region = []
        for axis, size in zip(tensor_map, part.shape):
            start = 0 if axis == -1 else place[-1 - axis] * size
            region.append(slice(start, start + size))
        array[tuple(region)] = values.reshape(part.shape)
    return array
