"""Let MindSpore choose how to cut the operators of the step: ``--parallel auto``, experimental.

If MindSpore cuts a weight, each rank holds a part of it. This app evaluates, saves and compares whole weights, so it
refuses such a run when the graph is compiled, before the first step. Cuts along the batch and within operators remain.
None of this ever ran on Ascend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel
from samestep import ConfigError


def cut(step: nn.Cell, rows: int, image_size: int) -> nn.Cell:
    """Return ``step`` as MindSpore cuts it, for batches of ``rows``. Raises ConfigError if it would cut a weight."""
    graph = AutoParallel(step, "recursive_programming")
    graph.enable_gradients_mean()
    shapes = ((rows, 3, image_size, image_size), np.float32), ((rows,), np.int32), ((rows,), np.float32)
    graph.compile(*(Tensor(np.zeros(shape, dtype)) for shape, dtype in shapes))
    refuse_cut_weights(graph.parameter_layout_dict)
    return graph


def refuse_cut_weights(layouts: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigError if a weight is cut.

    Args:
        layouts: by the weight's name its device matrix, its tensor map (for each axis the axis of the matrix that cuts
            it, or -1), and more.
    """
    found = [name for name, (_, tensor_map, *_) in layouts.items() if any(axis != -1 for axis in tensor_map)]
    if found:
        raise ConfigError(f"--parallel auto would cut {len(found)} weights, {found[0]} first: use --parallel data")
