"""Test weights of samestep.torch as arrays and the order of DDP's buckets, in one process without a launcher."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from samestep import NonRetryableError
from samestep.torch import weights
from torch import nn
from torch.optim import Optimizer


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def update(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    torch.manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(8, 5)).square().mean().backward()
    optimizer.step()


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_optimizer_takes_the_steps_of_one_that_was_not_saved(name: str) -> None:
    make = MAKERS[name]
    model = small_model()
    optimizer = make(model.parameters())
    for step in range(3):
        update(model, optimizer, step)
    saved = {
        group: {k: v.copy() for k, v in arrays.items()} for group, arrays in weights.groups(model, optimizer).items()
    }

    other = small_model()
    resumed = make(other.parameters())
    weights.load(other, resumed, saved)
    for step in range(3, 6):
        update(model, optimizer, step)
        update(other, resumed, step)
    expected = weights.groups(model, optimizer)
    found = weights.groups(other, resumed)
    for group in expected:
        assert expected[group].keys() == found[group].keys()
        for array in expected[group]:
            assert expected[group][array].tobytes() == found[group][array].tobytes(), array


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(name: str) -> None:
    model = small_model()
    optimizer = getattr(torch.optim, name)(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(8, 5)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(NonRetryableError, match=f"{name}'s .* cannot be kept in a checkpoint"):
        weights.groups(model, optimizer)


def test_weights_are_the_models_or_are_refused() -> None:
    """--init-from and checkpoints load only weights with exactly the model's names, shapes and dtypes."""
    model = small_model()
    right = {name: array.copy() for name, array in weights.model_arrays(model).items()}
    bias = right.pop("2.bias")
    for wrong, words in (
        ({}, "2.bias is missing"),
        ({"2.bias": bias, "2.scale": bias}, "2.scale is not part of it"),
        ({"2.bias": bias[1:]}, r"2.bias has shape \[1\], not \[2\]"),
        ({"2.bias": bias.astype("float64")}, "2.bias is float64, not float32"),
    ):
        with pytest.raises(ValueError, match=words):
            weights.load_model(model, {name: array + 1 for name, array in right.items()} | wrong)
    kept = weights.model_arrays(model)
    assert all(array.tobytes() == kept[name].tobytes() for name, array in right.items())


def test_state_that_does_not_fit_is_named() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update(model, optimizer, 0)
    arrays = weights.optimizer_arrays(model, optimizer)
    for name, wrong, words in (
        ("0.weight.momentum_buffer", arrays["0.weight.momentum_buffer"].T, r"\[5, 4\], not torch.float32 \[4, 5\]"),
        ("0.weight.momentum_buffer", arrays["0.weight.momentum_buffer"].astype("float64"), "float64"),
        ("9.weight.momentum_buffer", arrays["0.weight.momentum_buffer"], "not part of its optimizer state"),
    ):
        with pytest.raises(ValueError, match=f"{name} is .*{words}"):
            weights.load_optimizer(model, optimizer, {name: wrong})


def test_a_trained_parameter_outside_the_model_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(3))})
    with pytest.raises(NonRetryableError, match=r"SGD trains a parameter of shape \[3\] that is not part of the model"):
        weights.optimizer_arrays(model, optimizer)


@pytest.mark.parametrize("setting", ["fused", "capturable", "foreach"])
def test_a_restored_counter_is_where_the_optimizer_reads_it(setting: str) -> None:
    """torch's device meta simulates a GPU."""
    model = small_model().to("meta")
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.param_groups[0][setting] = True  # Adam's constructor would refuse the device meta
    moment = np.zeros((4, 5), np.float32)
    weights.load_optimizer(model, optimizer, {"0.weight.step": np.array(3, np.float32), "0.weight.exp_avg": moment})
    found = {
        key: value.device.type for key, value in optimizer.state[dict(model.named_parameters())["0.weight"]].items()
    }
    assert found == {"step": "cpu" if setting == "foreach" else "meta", "exp_avg": "meta"}


def test_frozen_arrays_are_all_that_has_no_gradient() -> None:
    model = small_model()
    model[2].weight.requires_grad_(False)
    arrays = weights.frozen_arrays(model)
    assert arrays.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight"}
    assert arrays["2.weight"].tobytes() == model.state_dict()["2.weight"].numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool])
def test_a_flip_of_any_bit_changes_the_sum_of_words(dtype: torch.dtype) -> None:
    """A tensor on a GPU is compared by this sum."""
    values = torch.ones(3, dtype=dtype)
    before = weights.sum_of_words(values).item()
    content = values.view(torch.uint8)
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        assert weights.sum_of_words(values).item() != before
        content[bit // 8] ^= 1 << bit % 8
