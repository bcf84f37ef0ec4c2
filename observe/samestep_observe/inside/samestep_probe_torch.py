"""Record torch's losses, activations and updates in a process of a replay."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from types import ModuleType
from typing import Any

from samestep_probe import Framework, config, guarded, on_import, probe

LOSSES = (
    "nll_loss",
    "cross_entropy",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)


def start() -> None:
    """Register the hooks for torch's modules."""
    on_import("torch.nn.functional", _watch_losses)
    on_import("torch.nn.modules.module", _watch_modules)
    on_import("torch.nn.utils.clip_grad", _watch_clipping)
    on_import("torch.optim.optimizer", _watch_optimizers)


class Torch(Framework):
    """The observations of a rank with torch during its current step.

    Attributes:
        losses: for each call of a loss function, the losses of samples or of their parts, as a flat float64 tensor.
        roots: the outermost modules that have run.
        depth: number of nested modules that are running.
        activations: the largest absolute output of each module, by module.
        before: weight and gradient of each parameter before the optimizer's update, by id of the parameter.
        tensors: the result of `_describe` for each parameter, by id of the parameter.
        rates: the learning rates of the optimizer's groups.
        clip: the norm before clipping, and the limit; None without clipping.
        inputs: digest of each sample's inputs.
    """

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.roots: list[Any] = []
        self.depth = 0
        self.activations: dict[Any, float] = {}
        self.before: dict[int, tuple[Any, Any]] = {}
        self.tensors: dict[int, dict[str, Any]] = {}
        self.rates: list[float] = []
        self.clip: list[float] | None = None
        self.inputs: list[str] = []

    def keep_batch(self, batch: Any, lengths: list[int] | None) -> None:
        """Record a digest of each sample's inputs, and write the batch for ``--export``."""
        tensors = _flatten(batch)
        torch = sys.modules["torch"]
        rows = [value for value in tensors if torch.is_tensor(value) and value.ndim]
        if not rows:
            return
        if not self.inputs:
            self.forget()  # the observations may come from passes before the step, such as DDP's set-up
        inputs = list(rows[0].detach().cpu())
        if lengths is not None:  # padding belongs to the batch, not to the sample
            inputs = [row[:length] for row, length in zip(inputs, lengths)]
        self.inputs += [_digest(row) for row in inputs]
        if config.get("export"):
            named = {f"{number}": value.detach().cpu().contiguous() for number, value in enumerate(rows)}
            _write_tensors("batch", named)

    def take(self, rows: int, targets: list[int] | None) -> dict[str, Any]:
        names = _parameter_names(self.roots)
        tensors: dict[str, Any] = {}
        for key, values in self.tensors.items():
            tensors[names.get(key, f"parameter {len(tensors)}")] = values
        values = {
            "losses": _by_sample(self.losses, rows, targets),
            "learning_rates": self.rates,
            "clip": self.clip,
            "tensors": tensors,
            "activations": _by_name(self.activations, self.roots),
            "inputs": self.inputs if len(self.inputs) == rows else [],
        }
        if config.get("export"):
            _write_gradients(self.before, names)
        self.forget()
        return values


seen = Torch()


def _is_training() -> bool:
    """Return whether gradients are enabled in a step that must be recorded, as in training but not in evaluation."""
    return probe.is_wanted and sys.modules["torch"].is_grad_enabled()


# --- losses ----------------------------------------------------------------------------------------------------------


def _watch_losses(module: ModuleType) -> None:
    probe.frameworks.append(seen)
    for name in LOSSES:
        setattr(module, name, _watched_loss(vars(module)[name]))


def _watched_loss(own: Any) -> Any:
    @guarded
    def keep(outputs: Any, *arguments: Any, **named: Any) -> None:
        torch = sys.modules["torch"]
        with torch.no_grad():
            losses = own(outputs.detach(), *arguments, **{**named, "reduction": "none"})
            seen.losses.append(_local(losses).double().flatten().cpu())

    @functools.wraps(own)
    def watched(*arguments: Any, **named: Any) -> Any:
        if _is_training():
            keep(*arguments, **named)
        return own(*arguments, **named)

    return watched


def _by_sample(losses: list[Any], rows: int, targets: list[int] | None) -> list[float]:
    """Return the mean loss of each sample over its parts, such as tokens; [] if losses cannot be assigned to samples.

    Args:
        losses: float64 tensors [losses], one for each call of a loss function.
        rows: number of samples of this rank.
        targets: number of losses of each sample; None if all samples have the same number.
    """
    if not losses or not rows:
        return []
    values = sys.modules["torch"].cat(losses)
    if targets is not None:
        is_whole = values.numel() == sum(targets)
        return [float(part.mean()) for part in values.split(targets)] if is_whole else []
    if values.numel() % rows:
        return []
    means: list[float] = values.view(rows, -1).mean(dim=1).tolist()
    return means


# --- modules ---------------------------------------------------------------------------------------------------------


def _watch_modules(module: ModuleType) -> None:
    module.register_module_forward_pre_hook(_begins)
    module.register_module_forward_hook(_ends, always_call=True)


def _is_compiling() -> bool:
    return bool(sys.modules["torch"].compiler.is_compiling())


def _begins(module: Any, inputs: Any) -> None:
    if _is_compiling() or not _is_training():
        return
    if seen.depth == 0 and not any(root is module for root in seen.roots):
        seen.roots.append(module)
    seen.depth += 1


def _ends(module: Any, inputs: Any, output: Any) -> None:
    if _is_compiling() or not _is_training():
        return
    seen.depth -= 1
    _keep_activation(module, output)


@guarded
def _keep_activation(module: Any, output: Any) -> None:
    torch = sys.modules["torch"]
    tensors = [value for value in _flatten(output) if torch.is_tensor(value) and value.is_floating_point()]
    for value in tensors:
        local = _local(value.detach())
        if local.numel():
            largest = float(local.abs().max())
            before = seen.activations.get(module, 0.0)
            seen.activations[module] = largest if largest != largest else max(before, largest)


def _by_name(activations: dict[Any, float], roots: list[Any]) -> dict[str, float]:
    """Return the activations by module name, in the order of the model, without the root modules."""
    found = {}
    for root in roots:
        for name, module in root.named_modules():
            plain = plain_name(name)
            if plain and module in activations:
                found[f"{plain} ({type(module).__name__})"] = activations[module]
    return found


def plain_name(name: str) -> str:
    """Return a module's or parameter's name without the parts that DDP and torch.compile add."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while parts and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


# --- updates ---------------------------------------------------------------------------------------------------------


def _watch_clipping(module: ModuleType) -> None:
    own = module.clip_grad_norm_

    @functools.wraps(own)
    def clip(parameters: Any, max_norm: float, *arguments: Any, **named: Any) -> Any:
        norm = own(parameters, max_norm, *arguments, **named)
        if probe.is_wanted:
            seen.clip = [float(norm), float(max_norm)]
        return norm

    module.clip_grad_norm_ = clip  # type: ignore[attr-defined]


def _watch_optimizers(module: ModuleType) -> None:
    module.register_optimizer_step_pre_hook(_before_update)
    module.register_optimizer_step_post_hook(_after_update)


@guarded
def _before_update(optimizer: Any, arguments: Any, named: Any) -> None:
    """Copy weights and gradients before an update.

    If the optimizer gets a closure, as in Lightning, the closure computes the gradients later.
    """
    if not probe.is_wanted:
        return
    has_closure = any(map(callable, [*arguments, *named.values()]))
    seen.rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for parameter in _parameters(optimizer):
        gradient = None
        if parameter.grad is not None and not has_closure:  # a copy, because some optimizers change the gradient
            gradient = _local(parameter.grad.detach()).clone()
        seen.before[id(parameter)] = (_local(parameter.detach()).clone(), gradient)


@guarded
def _after_update(optimizer: Any, *_: Any) -> None:
    if not probe.is_wanted:
        return
    for parameter in _parameters(optimizer):
        weight, gradient = seen.before[id(parameter)]
        if gradient is None and parameter.grad is not None:
            gradient = _local(parameter.grad.detach()).clone()
            seen.before[id(parameter)] = (weight, gradient)
        if gradient is not None:
            seen.tensors[id(parameter)] = _describe(parameter)


def _parameters(optimizer: Any) -> list[Any]:
    found: list[Any] = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def _describe(parameter: Any) -> dict[str, Any]:
    """Return the record of a parameter with a gradient.

    The record has the parameter's shape, and the squared norms of this rank's part of weight, gradient and update.
    ``share`` is the factor of these norms in the sum over all ranks.
    """
    weight, gradient = seen.before[id(parameter)]
    after = _local(parameter.detach())
    return {
        "shape": list(parameter.shape),
        "weight": _square(weight),
        "gradient": _square(gradient),
        "update": _square(after - weight),
        "share": _share(parameter),
    }


def _square(value: Any) -> float:
    torch = sys.modules["torch"]
    return float(torch.linalg.vector_norm(value, dtype=torch.float64) ** 2)


def _share(parameter: Any) -> float:
    """Return 1 / the number of ranks with the same part of a parameter; without shards, each rank has the parameter."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return 1 / int(probe.run.world.world_size)
    share = 1.0
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            share /= parameter.device_mesh.size(axis)
    return share


def _local(value: Any) -> Any:
    """Return a tensor, or this rank's part of a sharded tensor, without communication."""
    return value.to_local() if hasattr(value, "to_local") else value


def _parameter_names(roots: list[Any]) -> dict[int, str]:
    names = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            names[id(parameter)] = plain_name(name)
    return names


# --- values ----------------------------------------------------------------------------------------------------------


def _flatten(value: Any) -> list[Any]:
    """Return the values of nested tuples, lists and dicts as a flat list."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [value]
    found = []
    for each in value:
        found += _flatten(each)
    return found


def _digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a CPU tensor's bytes."""
    torch = sys.modules["torch"]
    content = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _write_gradients(before: dict[int, tuple[Any, Any]], names: dict[int, str]) -> None:
    """Write this rank's gradients. If all ranks have equal gradients, only rank 0 writes them."""
    gradients: dict[str, Any] = {}
    is_whole = True
    for key, (_, gradient) in before.items():
        if gradient is None:
            continue
        gradients[names.get(key, f"parameter {len(gradients)}")] = gradient.cpu().contiguous()
    for values in seen.tensors.values():
        is_whole = is_whole and values["share"] == 1 / int(probe.run.world.world_size)
    if probe.run.world.rank == 0 or not is_whole:
        _write_tensors("gradients", gradients)


def _write_tensors(what: str, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    name = f"{what}-{probe.run.step + 1}-{probe.run.world.rank}.safetensors"
    save_file(tensors, os.path.join(config["records"], name))
