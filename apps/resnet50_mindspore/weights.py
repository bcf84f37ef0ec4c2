"""Convert weights, running statistics and optimizer state to arrays and back.

The arrays have torchvision's names. MindSpore and torchvision have the same layouts (convolutions OIHW, linear layers
[out, in]). They also compute running statistics in the same way (unbiased variance, new = 0.9 old + 0.1 batch).

Each rank has its own running statistics ("buffers") of its images. Checkpoints and evaluations use the average of the
buffers over ranks. Afterwards, each rank continues with its own buffers, so the result does not depend on the number
of checkpoints.

If MindSpore has split parameters over ranks (auto_parallel.py), the functions that return arrays are collective, and
return the arrays of unsplit parameters. Only a model with unsplit parameters can load these arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from auto_parallel import whole
from distributed import all_gather
from mindspore import Tensor, nn
from model import ResNet
from numpy.typing import NDArray
from samestep import NonRetryableError
from samestep.checkpoint import Arrays, state_dict_diff
from samestep.env import World
from samestep.run import Groups

# torch's name of each parameter of a batch norm, by MindSpore's name.
BATCH_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


def groups(model: ResNet, optimizer: nn.Optimizer) -> Groups:
    """Return the arrays of a checkpoint, which are equal on all ranks.

    "model" contains weights and averaged buffers. "buffers" contains the buffers of each rank [world_size, k].

    Raises:
        NonRetryableError: as in `optimizer_arrays`.
    """
    arrays, each = averaged(model)  # collective
    return {"model": arrays, "optimizer": optimizer_arrays(optimizer), "buffers": {"each": each}}


def load(model: ResNet, optimizer: nn.Optimizer, world: World, groups: Groups) -> None:
    """Load the arrays of `groups`, or only the group "model".

    If the world size differs from the checkpoint's, every rank continues with the averaged buffers.

    Raises:
        ValueError: an array does not fit the model or the optimizer.
    """
    load_model(model, groups["model"])
    if "optimizer" in groups:
        load_optimizer(optimizer, groups["optimizer"])
    each = groups.get("buffers", {}).get("each", np.empty(0))
    if len(each) == world.world_size:
        load_buffers(model, each[world.rank])


def model_arrays(model: ResNet) -> Arrays:
    """Return the weights and buffers as arrays on the CPU, by torch's names, as model.safetensors has them."""
    arrays = _arrays(_parameters(model))
    variances = [name for name in arrays if name.endswith("running_var")]
    counter = np.array(model.batches_tracked, np.int64)
    for name in variances:
        arrays[name.replace("running_var", "num_batches_tracked")] = counter
    return arrays


def optimizer_arrays(optimizer: nn.Optimizer) -> Arrays:
    """Return the optimizer's state by ``<parameter>.momentum_buffer``, or else by MindSpore's name.

    Raises:
        NonRetryableError: the Parameters of the optimizer do not hold all its state, or two of them have the same name.
    """
    return _arrays(_state(optimizer))


def load_model(model: ResNet, arrays: Arrays) -> None:
    """Load arrays that `model_arrays` returned.

    Raises:
        ValueError: names, shapes or dtypes differ from the model's.
    """
    _load(_parameters(model), arrays, model_arrays(model))
    counters = [int(array) for name, array in arrays.items() if name.endswith("num_batches_tracked")]
    model.batches_tracked = max(counters, default=0)


def load_optimizer(optimizer: nn.Optimizer, arrays: Arrays) -> None:
    """Load arrays that `optimizer_arrays` returned.

    Versions up to 0.2 saved only the momenta. The global_step then becomes -1, and the caller must set it.

    Raises:
        ValueError: names, shapes or dtypes differ from the optimizer's.
        NonRetryableError: as in `optimizer_arrays`.
    """
    state = _state(optimizer)
    if "global_step" not in arrays:
        state = {name: parameter for name, parameter in state.items() if "." in name}
        optimizer.global_step.set_data(Tensor([-1], ms.int32))
    _load(state, arrays, _arrays(state))


def buffers(model: ResNet) -> NDArray[np.float32]:
    """Return all running statistics of this rank as one array [k]."""
    arrays = _arrays(_statistics(model)).values()
    return np.concatenate([np.empty(0, np.float32), *(array.ravel() for array in arrays)])


def averaged(model: ResNet) -> tuple[Arrays, NDArray[np.float32]]:
    """Return `model_arrays` with averaged running statistics, and the statistics of each rank [world_size, k]."""
    arrays = model_arrays(model)  # collective
    average, each = averaged_buffers(model)  # collective
    own = {name: arrays[name] for name in _statistics(model)}
    return arrays | _split(own, average), each


def averaged_buffers(model: ResNet) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the running statistics averaged over ranks [k], and each rank's statistics [world_size, k].

    All ranks must call this function.
    """
    each = all_gather(buffers(model))  # collective
    return each.mean(axis=0, dtype=np.float64).astype(np.float32), each


def load_buffers(model: ResNet, row: NDArray[np.float32]) -> None:
    """Load an array that `buffers` returned.

    Raises:
        ValueError: the array's length does not fit the model.
    """
    arrays = _split(_statistics(model), row)
    for name, parameter in _statistics(model).items():
        parameter.set_data(Tensor(arrays[name]))


def _split(like: Mapping[str, ms.Parameter | NDArray[Any]], row: NDArray[np.float32]) -> Arrays:
    """Split an array [k] of `buffers` into arrays with the names and shapes of ``like``.

    Raises:
        ValueError: the array's length differs from the sum of the sizes.
    """
    sizes = [each.size for each in like.values()]
    if row.shape != (sum(sizes),):
        raise ValueError(f"the running statistics have shape {list(row.shape)}, not {[sum(sizes)]}")
    parts = np.split(row, np.cumsum(sizes[:-1], dtype=int))
    return {name: part.reshape(like[name].shape) for name, part in zip(like, parts)}


def _parameters(model: ResNet) -> dict[str, ms.Parameter]:
    """Return all parameters and running statistics by torch's names."""
    return {_torch_name(name): parameter for name, parameter in model.parameters_and_names()}


def _statistics(model: ResNet) -> dict[str, ms.Parameter]:
    kinds = ("running_mean", "running_var")
    return {name: each for name, each in _parameters(model).items() if name.endswith(kinds)}


def _state(optimizer: nn.Optimizer) -> dict[str, ms.Parameter]:
    """Return the optimizer's own Parameters by name, except tables of learning rates, which are no state.

    A table may have another length after a resume, because --epochs may change.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, nn.Optimizer):  # MindSpore's experimental optimizers hold learning rates in dicts
        raise NonRetryableError(
            f"a checkpoint cannot hold the learning rate of {kind}: use an optimizer of mindspore.nn"
        )
    found = {id(parameter): parameter for parameter in optimizer.get_parameters()}
    for value in vars(optimizer).values():  # get_parameters() omits Parameters in a list
        if isinstance(value, list):
            found |= {id(each): each for each in value if isinstance(each, ms.Parameter)}
    weights = {id(parameter) for parameter in optimizer.parameters}
    state: dict[str, ms.Parameter] = {}
    for key, parameter in found.items():
        name = parameter.name
        is_table = name.startswith("learning_rate") and parameter.ndim
        if key in weights or is_table:
            continue
        if name.startswith("moments."):
            name = f"{_torch_name(name.removeprefix('moments.'))}.momentum_buffer"
        if name in state:
            raise NonRetryableError(f"{kind} has two Parameters {name}, and a checkpoint holds one: rename one of them")
        state[name] = parameter
    return state


def _torch_name(name: str) -> str:
    """Return torch's name of a parameter, such as ``layer1.0.bn1.weight`` for ``layer1.0.bn1.gamma``."""
    layer, _, last = name.rpartition(".")
    return f"{layer}.{BATCH_NORM.get(last, last)}"


def _arrays(parameters: dict[str, ms.Parameter]) -> Arrays:
    return {name: whole(parameter) for name, parameter in parameters.items()}


def _load(parameters: dict[str, ms.Parameter], arrays: Arrays, expected: Arrays) -> None:
    difference = state_dict_diff(arrays, expected)
    if difference:
        raise ValueError(difference)
    for name, parameter in parameters.items():
        parameter.set_data(Tensor(arrays[name]))
