"""Record Paddle's losses, activations and updates in a process of a replay."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from samestep_probe import Framework, guarded, on_import, probe


def start() -> None:
    """Register the hooks for Paddle's modules."""
    on_import("paddle.nn.functional", _watch_losses)
    on_import("paddle.nn.layer.layers", _watch_layers)
    on_import("paddle.optimizer", _watch_optimizers)


class Paddle(Framework):
    """The observations of a rank with Paddle during its current step.

    Attributes:
        losses: the losses of all calls of ``cross_entropy``, in the order of calls.
        activations: the largest absolute output of each layer, by the layer's full name.
        tensors: the record of each parameter, by parameter name, as in `samestep_probe_torch`.
        rates: the learning rate of the optimizer.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.activations: dict[str, float] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self.rates: list[float] = []

    def take(self, rows: int, targets: list[int] | None) -> dict[str, Any]:
        values = {
            # Before the first step, the app computes an extra loss, which fixes the order of the app's collectives.
            "losses": self.losses[-rows:] if rows else [],
            "learning_rates": self.rates,
            "clip": None,
            "tensors": self.tensors,
            "activations": self.activations,
            "inputs": [],
        }
        self.forget()
        return values


seen = Paddle()


def _is_training() -> bool:
    return probe.is_wanted and sys.modules["paddle"].is_grad_enabled()


def _watch_losses(module: ModuleType) -> None:
    probe.frameworks.append(seen)
    own = module.cross_entropy

    @guarded
    def keep(outputs: Any, *arguments: Any, **named: Any) -> None:
        with sys.modules["paddle"].no_grad():
            losses = own(outputs.detach(), *arguments, **{**named, "reduction": "none"})
            seen.losses += [float(each) for each in losses.flatten().tolist()]

    @functools.wraps(own)
    def watched(*arguments: Any, **named: Any) -> Any:
        if _is_training():
            keep(*arguments, **named)
        return own(*arguments, **named)

    module.cross_entropy = watched  # type: ignore[attr-defined]


def _watch_layers(module: ModuleType) -> None:
    own = module.Layer.__call__

    @functools.wraps(own)
    def call(layer: Any, *inputs: Any, **named: Any) -> Any:
        output = own(layer, *inputs, **named)
        if _is_training():
            _keep_activation(layer, output)
        return output

    module.Layer.__call__ = call


@guarded
def _keep_activation(layer: Any, output: Any) -> None:
    if not hasattr(output, "abs") or not output.size:
        return
    with sys.modules["paddle"].no_grad():
        largest = float(output.detach().abs().max())
    name = layer.full_name()
    before = seen.activations.get(name, 0.0)
    seen.activations[name] = largest if largest != largest else max(before, largest)


def _watch_optimizers(module: ModuleType) -> None:
    for name in ("SGD", "Momentum", "Adam", "AdamW"):
        optimizer_class = vars(module)[name]
        optimizer_class.step = _watched_step(optimizer_class.step)


def _watched_step(own: Any) -> Any:
    @functools.wraps(own)
    def step(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        before = _weights(optimizer) if probe.is_wanted else None
        result = own(optimizer, *arguments, **named)
        if before:
            _describe(optimizer, before)
        return result

    return step


@guarded
def _weights(optimizer: Any) -> dict[str, Any]:
    """Return copies of the weight and the gradient of each parameter that has a gradient, by parameter name."""
    found = {}
    for parameter in optimizer._parameter_list:
        if parameter.grad is not None:
            found[parameter.name] = (parameter.detach().clone(), parameter.grad.detach().clone())
    return found


@guarded
def _describe(optimizer: Any, before: dict[str, Any]) -> None:
    seen.rates = [float(optimizer.get_lr())]
    for parameter in optimizer._parameter_list:
        if parameter.name in before:
            weight, gradient = before[parameter.name]
            seen.tensors[parameter.name] = {
                "shape": list(parameter.shape),
                "weight": _square(weight),
                "gradient": _square(gradient),
                "update": _square(parameter.detach() - weight),
                "share": 1 / int(probe.run.world.world_size),
            }


def _square(value: Any) -> float:
    return float((value.astype("float64") ** 2).sum())
