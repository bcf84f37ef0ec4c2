"""Define a small GPT over bytes (RMSNorm, rotary positions, SwiGLU, tied embeddings), and shard it over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from samestep import ConfigError
from samestep.options import Options
from samestep.sharding import sample_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from weights import place

BYTES = 256  # size of the vocabulary
STD = 0.02  # standard deviation of initial weights, as in GPT-2; `initialize` reduces it for some matrices
BLOCK = 2**17  # approximate number of values that `initialize` draws at a time, to save memory


class RMSNorm(nn.Module):
    """Divide features by their root mean square, and multiply them by a trained weight.

    Source: Zhang & Sennrich, "Root mean square layer normalization", NeurIPS 2019.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # bfloat16 is too inexact for squares
        mean_square = wide.square().mean(-1, keepdim=True)
        normalized = wide * torch.rsqrt(mean_square + 1e-6)
        return normalized.to(x.dtype) * self.weight


NORMS = (RMSNorm, nn.RMSNorm, nn.LayerNorm)  # modules whose weights start at 1


def rotation(length: int, size: int, like: Tensor) -> Tensor:
    """Return the cosines and sines [2, length, size / 2] of rotary position embeddings for heads of ``size`` features.

    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021, equation 34.

    Args:
        length: number of positions.
        size: number of features per head.
        like: tensor with the dtype and device of the result.
    """
    settings: dict[str, Any] = {"device": like.device, "dtype": torch.float64}
    pairs = torch.arange(0, size, 2, **settings)
    speeds = 10_000.0 ** (-pairs / size)
    positions = torch.arange(length, **settings)
    angles = positions[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the pairs of features (i, i + size / 2) of ``x`` [m, heads, length, size] by ``turn``, a `rotation`."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn.to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Compute causal multi-head attention. Tensor parallelism divides the heads among the ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """Map features [m, length, width] to [m, heads, length, size]."""
        heads: Tensor = x.unflatten(-1, (-1, self.size))
        return heads.transpose(1, 2)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q = self.split(self.q(x))
        k = self.split(self.k(x))
        v = self.split(self.v(x))
        mixed = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Compute SwiGLU. Source: Shazeer, "GLU variants improve transformer", 2020.

    The hidden size is about 8/3 of the width. The three matrices therefore have about as many parameters as two
    matrices with a hidden size of 4 times the width.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = -(-width * 8 // 3 // 32) * 32
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate(x))
        return self.down(gate * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Add the outputs of attention and of a feed-forward network to the features.

    If ``recompute`` is true, the backward pass computes the activations again, to save memory.
    """

    def __init__(self, width: int, heads: int, recompute: bool, dropout: float) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = RMSNorm(width)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)
        self.recompute = recompute

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():  # the backward pass recomputes the activations
            return checkpoint(self.compute, x, turn, use_reentrant=False)  # type: ignore[no-any-return]
        return self.compute(x, turn)

    def compute(self, x: Tensor, turn: Tensor) -> Tensor:
        mixed = self.attention(self.norm1(x), turn)
        x = x + self.dropout(mixed)
        added = self.feed_forward(self.norm2(x))
        return x + self.dropout(added)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predict the next byte at each position of a window."""

    def __init__(self, layers: int, width: int, heads: int, recompute: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, recompute, dropout) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.size = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes int64 [m, length] to scores [m, length, 256] of the next byte."""
        x = self.dropout(self.embedding(tokens))
        turn = rotation(tokens.shape[1], self.size, x)
        for block in self.blocks:
            x = block(x, turn)
        return F.linear(self.norm(x), self.embedding.weight)


def build_model(options: Options, dtype: torch.dtype, mesh: DeviceMesh) -> GPT:
    """Return this rank's shard of the model on ``mesh`` (dp, tp), with initial weights drawn from --seed.

    Raises:
        ConfigError: the model has a buffer, or a parameter for which `initialize` has no rule.
    """
    dropout = options.dropout or 0.0
    with torch.device("meta"):
        model = GPT(
            options.layers,
            options.width,
            options.heads,
            recompute=options.checkpoint_activations,
            dropout=dropout,
        )
        model.to(dtype)
    buffers = [name for name, _ in model.named_buffers()]
    if buffers:  # `initialize` and the checkpoints include only parameters
        raise ConfigError(
            f"the model has the buffer {buffers[0]}, which the app neither initializes nor saves: compute its values "
            "in forward, like `rotation` in model.py"
        )
    if mesh["tp"].size() > 1:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], tensor_parallel_plan())
    policy = MixedPrecisionPolicy()
    if options.autocast == "bfloat16":  # FSDP gathers and computes in bfloat16, and reduces gradients in float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    initialize(model, options.seed, options.layers, mesh)
    return model


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Return the tensor-parallel style of each linear layer of a block.

    Column-parallel layers split their outputs over the ranks. The row-parallel layer after them splits its inputs.
    """
    plan: dict[str, ParallelStyle] = {}
    for name in ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up"):
        plan[name] = ColwiseParallel()
    for name in ("attention.out", "feed_forward.down"):
        plan[name] = RowwiseParallel()
    return plan


@torch.no_grad()
def initialize(model: nn.Module, seed: int, layers: int, mesh: DeviceMesh) -> None:
    """Set the weights of norms to 1 and biases to 0, and draw matrices from normal distributions, the same at any mesh.

    Each drawn weight depends only on (seed, number of the parameter in the order of names, index).
    The factor 1 / sqrt(2 * layers) reduces the standard deviation of the output matrices of residual branches.
    Source: Radford et al., GPT-2, 2019, section 2.3.

    Args:
        model: the sharded model.
        seed: seed of the weights.
        layers: number of blocks.
        mesh: mesh (dp, tp) of the ranks.

    Raises:
        ConfigError: a parameter is neither a matrix, nor a bias or the weight of a norm with one dimension.
    """
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        local, offset, _ = place(parameter, mesh)
        module, _, kind = name.rpartition(".")
        if parameter.ndim == 1 and kind.endswith("bias"):
            local.zero_()
            continue
        if parameter.ndim == 1 and isinstance(model.get_submodule(module), NORMS):
            local.fill_(1.0)
            continue
        if parameter.ndim != 2:
            raise ConfigError(
                f"the parameter {name} of shape {[*parameter.shape]} has no rule for its initial values: add a rule to "
                "`initialize` in model.py"
            )
        std = STD
        if name.endswith(("out.weight", "down.weight")):
            std = STD / (2 * layers) ** 0.5
        first_row, first_column = offset
        rows = max(1, BLOCK // max(1, local.shape[1]))
        for first in range(0, len(local), rows):
            block = local[first : first + rows]
            row, column = np.indices(block.shape)
            row += first_row + first
            column += first_column
            values = normal(seed, number, row * parameter.shape[1] + column)
            block.copy_(torch.from_numpy(values * std))


def normal(seed: int, number: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return standard normal values in the shape of ``indices``, which depend only on (seed, number, index).

    Source: Box & Muller, Ann. Math. Statist. 29(2), 1958.

    Args:
        seed: seed of the values.
        number: number of the parameter, as `initialize` counts.
        indices: indices of the values in the flat parameter, of any shape.
    """
    bits = sample_bits(seed, number, indices.reshape(-1))
    one = _between_0_and_1(bits >> np.uint64(32))
    two = _between_0_and_1(bits & np.uint64(2**32 - 1))
    radius = np.sqrt(-2 * np.log(one))
    values: NDArray[np.float64] = radius * np.cos(2 * np.pi * two)
    return values.reshape(indices.shape)


def _between_0_and_1(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map 32-bit numbers to values strictly between 0 and 1."""
    return (bits.astype(np.float64) + 0.5) / 2**32
