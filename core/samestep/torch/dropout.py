"""Compute dropout masks by row of the global batch, so that a row's mask does not depend on the world size."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules import dropout

from samestep.torch.samplers import HasRows, Rows

# The constants of SplitMix64, as int64.
_GAMMA = -0x61C8864680B583EB
_M1 = -0x40A7B892E31B1A47
_M2 = -0x6B2FB644ECCEEE15
MOST_BY_NUMPY = 2**16  # maximum positions of a mask to draw by numpy; torch draws larger masks with several threads
_models: weakref.WeakValueDictionary[int, ModelRows] = weakref.WeakValueDictionary()


class ModelRows:
    """The rows of a model's current batch, which its dropouts share.

    Attributes:
        is_padded: whether the ranks pad their rows to different lengths.
        number: key of this object for `keep_mask`, which torch.compile can call only with numbers and tensors.
        state: states of torch's generators after the last draw of a dropout, while `DrawWatch` is active; else None.
    """

    def __init__(self, source: HasRows | None, is_padded: bool = False) -> None:
        self._source = source
        self.is_padded = is_padded
        self.number = max(_models, default=0) + 1
        self.state: list[Tensor] | None = None
        _models[self.number] = self

    def rows(self) -> Rows:
        """Return the rows of the current batch.

        Raises:
            ValueError: `exact` got no rows.
        """
        if self._source is None:
            raise ValueError("a dropout needs the rows of the batch: pass the sampler, or FixedRows, to exact()")
        return self._source.rows()

    def note_draw(self) -> None:
        """Record that a dropout has drawn its key."""
        if self.state is not None:
            self.state = generator_states()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRows:
        return self  # a copy of the model, such as its moving average, computes the same batches

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelRows, (None, self.is_padded)  # an unpickled model has no source of rows yet


def generator_states() -> list[Tensor]:
    """Return the states of torch's CPU generator, and of the current GPU's generator if CUDA is initialized."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def random_bits(key: Tensor, first: int, count: int, device: torch.device) -> Tensor:
    """Return 64 random bits for each position, int64 [count]. The bits are the same on any device.

    The bits are SplitMix64's outputs for a counter, without SplitMix64's last step, which changes only low bits. Each
    bitwise AND removes the sign bits that torch shifts into an int64.

    Args:
        key: offset of the counter, int64 [].
        first: number of the first position.
        count: number of positions.
        device: device of the result.
    """
    if device.type == "cpu" and count <= MOST_BY_NUMPY:
        return torch.from_numpy(_bits_by_numpy(int(key), first, count))
    return _mix(torch.arange(first, first + count, device=device).mul_(_GAMMA).add_(key))


def random_bits_by_index(key: Tensor, first: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return 64 random bits for each element of some rows, int64 of the given shape, flattened.

    An element's bits depend only on its indices, with the row's index in the global batch. They do not depend on the
    lengths to which the rows are padded.

    Args:
        key: offset of the counter, int64 [].
        first: index of the first row.
        shape: number of rows, and the size of each other dimension.
        device: device of the result.
    """
    z = key.to(device)
    start = first
    factor = 1
    for size in shape:
        factor = factor * _GAMMA % 2**64  # an odd number of its own for each dimension
        signed = factor - 2**64 if factor >= 2**63 else factor
        z = z.unsqueeze(-1) + torch.arange(start, start + size, device=device).mul_(signed)
        start = 0
    return _mix(z.flatten())


def _mix(z: Tensor) -> Tensor:
    """Replace counters by SplitMix64's output for them, in place."""
    z = z.bitwise_xor_((z >> 30).bitwise_and_(2**34 - 1)).mul_(_M1)
    return z.bitwise_xor_((z >> 27).bitwise_and_(2**37 - 1)).mul_(_M2)


def _bits_by_numpy(key: int, first: int, count: int) -> NDArray[np.int64]:
    """Return the bits of `random_bits`. For few positions, numpy needs a third of torch's time."""
    z = np.arange(first, first + count, dtype=np.uint64)
    z *= np.uint64(_GAMMA % 2**64)
    z += np.uint64(key % 2**64)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_M1 % 2**64)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_M2 % 2**64)
    return z.view(np.int64)


def draw_mask(x: Tensor, model: int, p: float, by_channel: bool) -> Tensor:
    """Return the mask of the values that a dropout keeps, for this rank's m rows of the global batch.

    The key of the mask is drawn from torch's CPU generator, whose state must be the same on all ranks. Activation
    checkpointing restores this generator, so its second forward pass drops the same values.

    Args:
        x: the input, [k * m, ...], with k consecutive entries for each row.
        model: the number of a `ModelRows`.
        p: probability of dropping a value.
        by_channel: whether to drop all values of a channel (the second dimension) together.

    Returns:
        bool [k * m, c, 1, ...] with ``by_channel``, otherwise bool with the shape of x.

    Raises:
        ValueError: the first dimension of x is not a multiple of m.
    """
    model_rows = _models[model]
    key = torch.randint(-(2**63), 2**63 - 1, (), device="cpu")
    model_rows.note_draw()
    rows = model_rows.rows()
    if rows.local and x.shape[0] % rows.local:
        raise ValueError(
            f"a dropout gets {x.shape[0]} rows, which is not a multiple of the batch's {rows.local}: exact() needs the "
            "batch as the first dimension"
        )
    shape = mask_shape(x, by_channel)
    if model_rows.is_padded:
        entries = shape[0] // rows.local if rows.local else 1
        bits = random_bits_by_index(key, rows.first, [rows.local, entries, *shape[1:]], x.device)
    else:
        count = math.prod(shape)
        first = rows.first * (count // rows.local) if rows.local else 0
        bits = random_bits(key, first, count, x.device)
    threshold = int((2 * p - 1) * 2**63) if p < 1 else 2**63 - 1
    return (bits >= threshold).view(shape)


def mask_shape(x: Tensor, by_channel: bool) -> list[int]:
    """Return the shape of the mask for ``x``."""
    return [*x.shape[:2], *[1] * (x.ndim - 2)] if by_channel else list(x.shape)


# For torch.compile, the mask is one custom operation, which draws its key in the order of the program. Therefore the
# compiled code does not depend on the number of rows or the step.
keep_mask = torch.library.custom_op(
    "samestep::keep_mask", draw_mask, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)


@keep_mask.register_fake
def _(x: Tensor, model: int, p: float, by_channel: bool) -> Tensor:
    return x.new_empty(mask_shape(x, by_channel), dtype=torch.bool)


class RowDropout(dropout._DropoutNd):
    """A dropout with masks by row of the global batch. `exact_model.exact` sets ``rows``."""

    rows: ModelRows
    by_channel = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [k * m, ...], where m is this rank's number of rows. The result has the shape of x."""
        if not self.training or self.p == 0:
            return x
        draw = keep_mask if torch.compiler.is_compiling() else draw_mask
        return self._apply_mask(x, draw(x.detach(), self.rows.number, self.p, self.by_channel))

    def _apply_mask(self, x: Tensor, kept: Tensor) -> Tensor:
        factor = 1 / (1 - self.p) if self.p < 1 else 0.0
        scale = kept.to(x.dtype).mul_(factor)
        return x.mul_(scale) if self.inplace else x * scale


class RowAlphaDropout(RowDropout):
    """A `RowDropout` that computes like torch's AlphaDropout.

    Dropped values become SELU's negative saturation value, and an affine map preserves mean and variance.
    """

    def _apply_mask(self, x: Tensor, kept: Tensor) -> Tensor:
        alpha = -1.7580993408473766
        a = ((1 - self.p) * (1 + self.p * alpha**2)) ** -0.5 if self.p < 1 else 0.0
        mask = kept.to(x.dtype)
        return (x * mask + alpha * (1 - mask)) * a - a * alpha * self.p


class RowDropoutElements(RowDropout, nn.Dropout):
    """The `RowDropout` that replaces torch's Dropout."""


class RowDropout1d(RowDropout, nn.Dropout1d):
    """The `RowDropout` that replaces torch's Dropout1d."""

    by_channel = True


class RowDropout2d(RowDropout, nn.Dropout2d):
    """The `RowDropout` that replaces torch's Dropout2d."""

    by_channel = True


class RowDropout3d(RowDropout, nn.Dropout3d):
    """The `RowDropout` that replaces torch's Dropout3d."""

    by_channel = True


class RowAlphaDropoutElements(RowAlphaDropout, nn.AlphaDropout):
    """The `RowAlphaDropout` that replaces torch's AlphaDropout."""


class RowFeatureAlphaDropout(RowAlphaDropout, nn.FeatureAlphaDropout):
    """The `RowAlphaDropout` that replaces torch's FeatureAlphaDropout."""

    by_channel = True
