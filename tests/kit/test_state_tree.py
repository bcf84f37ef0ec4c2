"""Test that a restore keeps the types and bits of a state, or that the save refuses a value with the value's path."""

from __future__ import annotations

import enum
import json
import math
import os
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from samestep.checkpoint import serialize
from samestep.torch.state_tree import decode, encode
from torch import nn
from torch.optim import lr_scheduler


def restored(tree: Any) -> Any:
    """Return the tree after a round trip through a checkpoint's JSON and safetensors."""
    structure, arrays = encode(tree, "state")
    structure = json.loads(json.dumps(structure, sort_keys=True))
    return decode(structure, safetensors.numpy.load(serialize(arrays)))


def bits(tensor: torch.Tensor) -> bytes:
    if tensor.numel():
        return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return b""


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Assert that two trees have equal types, order, dtypes, strides and bits."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert list(one) == list(other), path
        assert list(map(type, one)) == list(map(type, other)), path
        for key, value in one.items():
            assert_same(value, other[key], f"{path}.{key}")
        assert getattr(one, "_metadata", None) == getattr(other, "_metadata", None), path
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for number, (mine, its) in enumerate(zip(one, other)):
            assert_same(mine, its, f"{path}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), path
        assert bits(one) == bits(other), path
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), path
    elif isinstance(one, float):
        assert one.hex() == other.hex(), path
    else:
        assert one == other, path


VALUES = {
    "keys": {0: "a", 1.5: None, True: b"\x00\xff", None: (1, 2), (1, "x"): {}, "": 1},
    "floats": [3.0, math.inf, -math.inf, -0.0, math.nan, 1e-310],
    "ints": [10**30, -(10**5000), 2**63 - 1],
    "tags": {"tensor": "x", "dict": [1], "list": {"float": "1"}},
    "counter": Counter([3, 3, 5]),
    "defaultdict": defaultdict(list, {1: [2]}),
    "ordered": OrderedDict(b=1, a=2),
    "sets": ({1, 2}, frozenset(["a"])),
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")],
    "numpy": [
        np.float32(1.25),
        np.int64(7),
        np.bool_(True),
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.array(2.5),
    ],
    "empty": [torch.empty(0, 3), torch.empty(0), np.empty((0, 2))],
    "scalars": [torch.tensor(3.5, dtype=torch.float64), torch.tensor(1.5).bfloat16(), torch.tensor(2j)],
    "dtypes": [
        torch.ones(3).to(dtype)
        for dtype in (torch.bool, torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint64)
    ],
    "strides": [torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(2, 3).t()],
    "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
    "same path": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2)},
    "text": "\ud800 \u00e9",
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back(name: str) -> None:
    assert_same(restored({name: VALUES[name]}), {name: VALUES[name]})


def stepped(make: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters(), **options)
    for _ in range(2):
        loss = model(torch.ones(3, 2)).sum()
        loss.backward()
        optimizer.step(lambda loss=loss: loss)  # type: ignore[misc]
    return optimizer


def schedulers() -> list[Any]:
    optimizer = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return [
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.SequentialLR(optimizer, parts, [2]),
        lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
    ]


def test_the_states_of_torchs_classes_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    kinds = (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.LBFGS, torch.optim.SGD)
    parts = [model, torch.optim.swa_utils.AveragedModel(model), torch.amp.GradScaler("cpu")]
    for part in [*parts, *map(stepped, kinds), *schedulers()]:
        state = part.state_dict()
        assert_same(restored(state), state, type(part).__name__)


def test_arrays_are_named_by_their_paths() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    _, arrays = encode(model.state_dict(), "model")
    assert list(arrays) == list(model.state_dict())
    _, arrays = encode(stepped(torch.optim.AdamW).state_dict(), "optimizer")
    assert "state.0.exp_avg" in arrays


class Color(enum.Enum):
    RED = 1


class OwnDict(dict[str, int]):
    pass


Pair = namedtuple("Pair", "a")
LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: Any = 0
for _ in range(2000):
    DEEP = [DEEP]
REFUSED = [object(), max, pathlib.Path("x"), Color.RED, OwnDict(), Pair(1), 1j, range(3), slice(1), deque([1])]
REFUSED += [np.array(["a"]), np.datetime64("2020"), np.longdouble(1), np.str_("x"), np.ma.masked_array([1])]
REFUSED += [torch.ones(2).to_sparse(), nn.Parameter(torch.ones(1)), torch.Generator(), torch.empty(2, device="meta")]
REFUSED += [os.environ, defaultdict(lambda: 0), {Color.RED: 1}]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("with_values", [True, False])
def test_other_values_are_refused_with_their_path(value: Any, with_values: bool) -> None:
    with pytest.raises(TypeError, match=r"^metrics\['best'\]\[0\].* (is a|is a tensor|has) "):
        encode({"best": [value]}, "metrics", with_values=with_values)


@pytest.mark.parametrize(("value", "message"), [(LOOP, "contains itself"), (DEEP, "more than 100 levels deep")])
def test_trees_without_end_are_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(value, "state")
