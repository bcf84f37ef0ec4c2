"""Check that the buffers of a DDP model stay equal on all ranks, because `exact` stops DDP's broadcast of buffers."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.torch.ranks import all_gather

Buffers = dict[str, Optional[Tensor]]
Version = tuple[Optional[Tensor], int]  # a buffer, and the number of its changes


class BufferWatch:
    """Compare between ranks the buffers that the first training forward pass changes.

    A buffer that a rank computes from its own rows differs between ranks, and a resume would load rank 0's buffer on
    all ranks. A broadcast would make such a buffer equal, but the buffer would still depend on the number of ranks.
    Buffers outside the state_dict are not compared, because they are caches, which may depend on a batch's length.

    Args:
        ddp: the model.
        known: classes of modules whose buffers are equal on all ranks.
        must_be_constant: whether the forward pass must not change a buffer, because ranks may have different numbers of
            forward passes.
    """

    def __init__(
        self, ddp: DistributedDataParallel, known: Collection[type[nn.Module]], must_be_constant: bool
    ) -> None:
        self._known = known
        self._must_be_constant = must_be_constant
        self._before: dict[str, Version] | None = None
        self._is_done = not saved_buffers(ddp.module, known)
        if not self._is_done:
            ddp.register_forward_pre_hook(self.begin)
            ddp.register_forward_hook(self.end)

    def begin(self, ddp: DistributedDataParallel, inputs: Any) -> None:
        """Remember the buffers before the forward pass, and how often each has changed."""
        if torch.compiler.is_compiling() or self._is_done or not ddp.training:
            return
        buffers = saved_buffers(ddp.module, self._known)
        self._before = {name: version_of(buffer) for name, buffer in buffers.items()}

    def end(self, ddp: DistributedDataParallel, inputs: Any, output: Any) -> None:
        """Compare the changed buffers after the forward pass. This call is a collective.

        Args:
            ddp: the model.
            inputs: ignored.
            output: ignored.

        Raises:
            ValueError: a buffer differs between ranks.
        """
        if torch.compiler.is_compiling() or self._before is None:
            return
        after = saved_buffers(ddp.module, self._known)
        names = list(self._before)
        checksums = np.array([checksum(after.get(name), self._before[name]) for name in names], np.int64)
        self._before = None
        self._is_done = True
        if self._must_be_constant:
            is_wrong = checksums != 0
        else:
            of_ranks = all_gather(checksums, ddp.process_group)  # collective
            is_wrong = (of_ranks != of_ranks[0]).any(0)
        if is_wrong.any():
            name = names[int(is_wrong.argmax())]
            raise ValueError(
                f"the forward pass computes the buffer {name} from the batches of one rank: reduce its update over all "
                "ranks there, or freeze the buffer"
            )


def version_of(buffer: Tensor | None) -> Version:
    """Return a buffer, and how often its values have changed."""
    return buffer, 0 if buffer is None else buffer._version


def checksum(buffer: Tensor | None, before: Version) -> int:
    """Return a checksum of a buffer's values; 0 if the buffer has not changed since ``before``."""
    earlier, version = before
    if buffer is None or (buffer is earlier and buffer._version == version):
        return 0
    values = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return 1 + zlib.crc32(values.numpy().tobytes())


def saved_buffers(model: nn.Module, known: Collection[type[nn.Module]]) -> Buffers:
    """Return the buffers in a model's state_dict, by name, without the buffers of modules of the ``known`` classes."""
    buffers: Buffers = {}
    for prefix, module in model.named_modules():
        if type(module) in known:
            continue
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return buffers
