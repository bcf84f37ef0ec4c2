"""Weights, running statistics and optimizer state as arrays, under the names that all apps share, and back.

Weights have torchvision's names. The layouts are the same in both: convolutions OIHW, linear layers [out, in]; so are
the running statistics (unbiased variance, new = 0.9 old + 0.1 batch).

Each rank has running statistics of its own ("buffers"), those of its own images. Checkpoints and evaluations have their
average over ranks; a rank then goes on with its own, so that the result does not depend on how often there was one.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from model import ResNet
from numpy.typing import NDArray
from ranks import all_gather
from samestep.checkpoint import Arrays, mismatch
from samestep.env import World
from samestep.run import Groups

# A layer's parameters, under MindSpore's names and under torch's.
BATCH_NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
BUFFERS = ("running_mean", "running_var")


def groups(model: ResNet, optimizer: nn.Momentum) -> Groups:
    """What a checkpoint holds, equal on all ranks: "model" with averaged buffers; "buffers" with those of each rank."""
    average, each = averaged_buffers(model)  # ranks talk
    return {
        "model": model_arrays(model) | buffer_arrays(model, average),
        "optimizer": optimizer_arrays(model, optimizer),
        "buffers": {"each": each},
    }


def load(model: ResNet, optimizer: nn.Momentum, world: World, groups: Groups) -> None:
    """The reverse of `groups`; also of weights alone. Raises ValueError for what does not fit.

    At another number of ranks than the checkpoint's, all go on with the averaged buffers.
    """
    load_model(model, groups["model"])
    if "optimizer" in groups:
        load_optimizer(model, optimizer, groups["optimizer"])
    each = groups.get("buffers", {}).get("each", np.empty(0))
    if len(each) == world.world_size:
        load_buffers(model, each[world.rank])


def model_arrays(model: ResNet) -> Arrays:
    """The weights under their canonical names, as arrays on the CPU: what checkpoints and model.safetensors hold."""
    arrays: Arrays = {}
    for name, parameter in parameters(model).items():
        arrays[name] = np.array(parameter.asnumpy())
        if name.endswith("running_var"):
            counter = name.replace("running_var", "num_batches_tracked")
            arrays[counter] = np.array(model.batches_tracked, np.int64)
    return arrays


def optimizer_arrays(model: ResNet, optimizer: nn.Momentum) -> Arrays:
    """The optimizer's state as ``<parameter>.momentum_buffer``."""
    return {
        f"{torch_name(parameter.name)}.momentum_buffer": np.array(moment.asnumpy())
        for parameter, moment in zip(optimizer.parameters, optimizer.moments)
    }


def load_model(model: ResNet, arrays: Arrays) -> None:
    """The reverse of `model_arrays`. Raises ValueError unless names, shapes and dtypes are the model's."""
    difference = mismatch(arrays, model_arrays(model))
    if difference:
        raise ValueError(difference)
    for name, parameter in parameters(model).items():
        parameter.set_data(Tensor(arrays[name]))
    model.batches_tracked = int(arrays["bn1.num_batches_tracked"])


def load_optimizer(model: ResNet, optimizer: nn.Momentum, arrays: Arrays) -> None:
    """The reverse of `optimizer_arrays`. Raises ValueError unless names, shapes and dtypes are the optimizer's."""
    difference = mismatch(arrays, optimizer_arrays(model, optimizer))
    if difference:
        raise ValueError(difference)
    for parameter, moment in zip(optimizer.parameters, optimizer.moments):
        moment.set_data(Tensor(arrays[f"{torch_name(parameter.name)}.momentum_buffer"]))


def buffers(model: ResNet) -> NDArray[np.float32]:
    """All running statistics of this rank in one row [k]."""
    rows = [parameter.asnumpy().ravel() for name, parameter in parameters(model).items() if name.endswith(BUFFERS)]
    return np.concatenate(rows)


def averaged_buffers(model: ResNet) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The running statistics averaged over ranks [k], and each rank's [world_size, k]."""
    each = all_gather(buffers(model))  # ranks talk
    return each.mean(axis=0, dtype=np.float64).astype(np.float32), each


def buffer_arrays(model: ResNet, row: NDArray[np.float32]) -> Arrays:
    """A row [k] as `buffers` makes them, by name. Raises ValueError where it has another length."""
    own = {name: parameter for name, parameter in parameters(model).items() if name.endswith(BUFFERS)}
    ends = np.cumsum([parameter.size for parameter in own.values()])
    if row.shape != (ends[-1],):
        raise ValueError(f"the running statistics have shape {list(row.shape)}, not {[int(ends[-1])]}")
    pieces = np.split(row, ends[:-1])
    return {name: piece.reshape(parameter.shape) for (name, parameter), piece in zip(own.items(), pieces)}


def load_buffers(model: ResNet, row: NDArray[np.float32]) -> None:
    """The reverse of `buffers`."""
    arrays = buffer_arrays(model, row)
    for name, parameter in parameters(model).items():
        if name in arrays:
            parameter.set_data(Tensor(arrays[name]))


def parameters(model: ResNet) -> dict[str, ms.Parameter]:
    """All parameters and running statistics, by torch's names."""
    return {torch_name(name): parameter for name, parameter in model.parameters_and_names()}


def torch_name(name: str) -> str:
    """``layer1.0.bn1.gamma`` is ``layer1.0.bn1.weight`` in torch."""
    layer, _, last = name.rpartition(".")
    return f"{layer}.{BATCH_NORM.get(last, last)}"
