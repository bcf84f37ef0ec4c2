"""Let MindSpore cut the operators of the step over ranks: ``--parallel semi-auto`` and ``auto``, experimental.

Semi-automatic parallelization cuts the batch and the weights of the last layer, which `cut` selects. In automatic
parallelization (AUTO_PARALLEL), a search with a cost model cuts all operators.

If MindSpore cuts a weight, each rank holds a part of it. Checkpoints, comparisons and evaluations need whole weights,
which `gather` puts together. No Ascend has run this yet.
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

MODES = {"semi-auto": "semi_auto", "auto": "recursive_programming"}  # AutoParallel's names


def cut(network: nn.Cell, model: ResNet, parallel: str, world_size: int) -> nn.Cell:
    """Return ``network`` as a cell that MindSpore cuts over ranks when it compiles it.

    Args:
        network: a training step, or the forward pass for `Model`. It contains ``model``.
        model: the trained model.
        parallel: "semi-auto" or "auto".
        world_size: number of ranks; with "semi-auto" it divides the inputs of the last layer.
    """
    if parallel == "semi-auto":  # each rank multiplies its part of the features; MindSpore adds up the products
        model.fc.matmul.shard(((1, world_size), (1, world_size)))
    graph = AutoParallel(network, MODES[parallel])
    graph.enable_gradients_mean()
    return graph


@contextlib.contextmanager
def stand_alone() -> Iterator[None]:
    """Within this, MindSpore does not cut what it compiles. `Model` keeps its own mode for as long as it trains."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.STAND_ALONE)
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=mode)


def record_layouts(network: nn.Cell) -> None:
    """Note in each parameter how MindSpore has cut it, once ``network`` is compiled; nothing if MindSpore cut none."""
    for parameter in network.get_parameters():
        parameter.layout = network.parameter_layout_dict.get(parameter.name)


def whole(parameter: Parameter) -> NDArray[Any]:
    """Return a parameter as an array. If MindSpore has cut it, this is collective: all ranks call it, in one order."""
    part = np.array(parameter.asnumpy())
    layout = getattr(parameter, "layout", None)
    if layout is None or all(axis == -1 for axis in layout[1]):
        return part
    return gather(part, *layout[:2])  # collective


def gather(part: NDArray[Any], matrix: Sequence[int], tensor_map: Sequence[int]) -> NDArray[Any]:
    """Return the whole array from the equal parts that the ranks hold.

    Args:
        part: this rank's part. All parts have the same shape and dtype.
        matrix: the shape in which MindSpore arranges the ranks, by rows.
        tensor_map: for each axis of ``part`` an axis of the matrix, counted from the last one (0). The ranks along this
            axis hold consecutive parts. -1: the axis is not cut.
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
