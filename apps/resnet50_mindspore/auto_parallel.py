"""``--parallel auto``, experimental: MindSpore chooses how to cut the operators of the step.

Where it cuts a weight, each rank holds a piece of it. This app evaluates, saves and compares whole weights, so such a
run is refused, when its graph is compiled and before its first step. What remains are cuts along the batch and within
operators. None of this ever ran on Ascend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel
from samestep import ConfigError


def cut(step: nn.Cell, rows: int, image_size: int) -> nn.Cell:
    """``step`` as MindSpore cuts it, compiled for batches of ``rows``. Raises UserError where it cuts a weight."""
    graph = AutoParallel(step, "recursive_programming")
    graph.enable_gradients_mean()
    shapes = ((rows, 3, image_size, image_size), np.float32), ((rows,), np.int32), ((rows,), np.float32)
    graph.compile(*(Tensor(np.zeros(shape, dtype)) for shape, dtype in shapes))
    refuse_cut_weights(graph.parameter_layout_dict)
    return graph


def refuse_cut_weights(layouts: Mapping[str, Sequence[Any]]) -> None:
    """``layouts`` by name: device matrix, tensor map (for each axis the matrix's axis that cuts it, or -1), ..."""
    found = [name for name, (_, tensor_map, *_) in layouts.items() if any(axis != -1 for axis in tensor_map)]
    if found:
        raise ConfigError(
            f"--parallel auto would cut {len(found)} weights, {found[0]} first, which this app can neither evaluate "
            "nor save: use --parallel data"
        )
