"""Save the parts of a training program in atomic, checksummed checkpoints, and restore values with the same types."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import safetensors.numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, manifest
from samestep.checkpoint import Checkpoint, CorruptCheckpoint
from samestep.sharded import storage
from samestep.sharded.tensors import StoredGroups
from samestep.torch import ranks
from samestep.torch.ranks import broadcast, place
from samestep.torch.sharded_state import is_sharded, local_parts, shard_of
from samestep.torch.state_tree import Arrays, decode, encode
from samestep.torch.stops import StopRequests, exit_stopped
from samestep.torch.worker_signals import stop_workers

_PART_NAME = re.compile("[a-z_]+")  # a part's name is also a file name
_APP = "samestep.torch"  # name of the app in manifests
_FSDP1 = "FullyShardedDataParallel"
_REMEDY = "move the folder away, or pass another one"
_SHARE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Checkpoints:
    """Save and restore the parts of a program, keep the newest checkpoints in a folder, and handle stop signals.

    A part is an object with ``state_dict`` and ``load_state_dict``, or a dict of Python values. A restore changes the
    dict in place, with its dicts, lists and tensors. Models are saved without the wrappers of DDP and torch.compile.
    Rank 0 reads and writes the files, and broadcasts their content. Every checkpoint in the folder is complete, even
    after a kill.

    If a part has DTensors, such as a model with FSDP2 or tensor parallelism, each rank writes its shard of each tensor.
    In this case, all ranks must share the folder. The mesh may change before a restore.

    Args:
        folder: folder for this job only. Pass the same folder on all ranks.
        keep: number of newest checkpoints to keep.
        every: number of steps between checkpoints; 0 saves only in `save` and at a stop.
        grace: maximum seconds from a stop signal to the exit; see `StopRequests`. None installs no signal handlers.
        **parts: the parts by name. Names consist of lower-case letters and underscores.

    Raises:
        TypeError: a part has a value that a restore would change (the message has the value's path), or is neither a
            dict nor an object with ``state_dict`` and ``load_state_dict``.
        NonRetryableError: a part's values are nested too deeply, or a string is not valid Unicode.
        ValueError: an argument is out of range, no parts are given, or a part's name is invalid.
    """

    def __init__(
        self, folder: str | Path, keep: int = 3, every: int = 0, grace: float | None = 20.0, **parts: Any
    ) -> None:
        if keep < 1 or every < 0:
            raise ValueError(f"keep must be at least 1 and every at least 0, got {keep} and {every}")
        if not parts:
            raise ValueError("no parts: pass model=model, optimizer=optimizer, ...")
        self.folder = Path(folder).absolute()  # the program may change its working directory
        self.keep = keep
        self.every = every
        self.parts = {name: checked_part(name, part) for name, part in parts.items()}
        self.steps = 0  # number of steps done, over all starts
        self._owns_folder = False  # whether the checkpoints in the folder belong to this run
        structures, _ = self._encode(with_values=False)  # raises TypeError now, on all ranks, not at a save
        manifest.seal({"app": _APP, "step": 0, "state": {"parts": structures}, "arithmetic": {}, "files": {}})
        self.stops = None if grace is None else StopRequests(grace)

    def restore(self) -> int:
        """Load the newest valid checkpoint into the parts. This call is a collective.

        Returns:
            The number of steps done; 0 without a checkpoint.

        Raises:
            NonRetryableError: all checkpoints are corrupt, or a rank cannot read its part.
            ConfigError: the checkpoint has other parts, or another version of this package or another program wrote it.
            ValueError: a sharded tensor has another shape now. A part's ``load_state_dict`` may raise other errors.
        """
        self.finish()  # an interrupted training of this process may still write, and `_newest` deletes unfinished files
        rank, _ = place()
        found, error = self._newest() if rank == 0 else (None, None)
        message = describe_checkpoint(found, error)
        received = json.loads(broadcast(json.dumps(message).encode()))  # collective
        if received["error"]:
            kind = ConfigError if received["is_config_error"] else NonRetryableError
            raise kind(received["error"])
        self._owns_folder = True
        if received["step"] is None:
            return 0
        structures = received["parts"]
        if sorted(structures) != sorted(self.parts):
            raise ConfigError(
                f"the checkpoint in {self.folder} has the parts {sorted(structures)}, not {sorted(self.parts)}: pass "
                f"these parts, or {_REMEDY}"
            )
        if received["sharded_folder"]:
            arrays = self._read_shards(Path(received["sharded_folder"]))  # collective
        else:
            contents = found.contents if found else {}
            files = {name: broadcast(contents.get(name, b"")) for name in structures}  # collective
            arrays = self._local_parts({name: parse_arrays(content) for name, content in files.items()})
        for name in structures:
            load_part(self.parts[name], decode(structures[name], arrays[name]))
        self.steps = received["step"]
        return self.steps

    def _read_shards(self, folder: Path) -> dict[str, Arrays]:
        """Return the arrays of each part by name, from a sharded checkpoint. Read only this rank's shards.

        Raises:
            NonRetryableError: raised on all ranks if one rank cannot read its parts.
        """
        problem = ""
        arrays: dict[str, Arrays] = {}
        try:
            saved = checkpoint.read(folder, verify=False)
            arrays = self._local_parts(storage.stored_groups(saved))
        except (CorruptCheckpoint, NonRetryableError) as error:
            problem = f"rank {place().rank}: {error}"
        for text in storage.all_gather_bytes(ranks, problem.encode()):  # collective
            if text:
                reason = text.decode()
                raise NonRetryableError(f"cannot read {folder}, {reason}: use a folder that all ranks share")
        return arrays

    def _local_parts(self, stored: StoredGroups | dict[str, Arrays]) -> dict[str, Arrays]:
        """Return the stored arrays of each part by name, with `LocalPart` objects for tensors that are sharded now."""
        _, own = self._encode(with_values=False)
        arrays = {}
        for name, part in self.parts.items():
            arrays[name] = local_parts(part, own.get(name, {}), stored.get(name, {}))
        return arrays

    def _newest(self) -> tuple[Checkpoint | None, Exception | None]:
        """Return (newest valid checkpoint or None, error for all ranks or None). Only rank 0 calls this method."""
        warn_shared_store()
        try:
            self._warn_if_read_only()
            found = checkpoint.newest(self.folder, print_warning, reader=read_any, remedy=_REMEDY)
        except (ConfigError, NonRetryableError) as error:
            return None, error
        if found is not None and "parts" not in found.state:
            return None, ConfigError(f"{found.folder} is not a checkpoint of samestep.torch.Checkpoints: {_REMEDY}")
        return found, None

    def _warn_if_read_only(self) -> None:
        """Delete unfinished checkpoints. Print a warning if the folder cannot be written to, as saves will fail."""
        try:
            checkpoint.clear(self.folder)
            checkpoint.check_writable(self.folder)
        except OSError as error:  # a program may read a checkpoint without saving
            print_warning(f"no checkpoint can be saved in {self.folder}: {checkpoint.os_error_message(error)}")

    def step(self) -> None:
        """Count a step, and save if a checkpoint is due. Call this method on all ranks after each optimizer step.

        Raises:
            SystemExit: the ranks agreed to stop, and the step is saved. The code is 128 + the signal.
        """
        self.steps += 1
        signal = self.stops.step() if self.stops else 0  # collective, at some steps
        is_due = self.every > 0 and self.steps % self.every == 0
        if signal or is_due:
            self.save()
        if signal:
            self.stop(signal)

    def stop(self, signal: int) -> NoReturn:
        """End the program on all ranks, after the last save is on the disk. Call this method on all ranks.

        Args:
            signal: the signal that the ranks agreed on.

        Raises:
            SystemExit: always. The code is 128 + the signal.
        """
        self.finish()
        rank, world_size = place()
        if rank == 0:
            print(f"stopped by signal {signal} at step {self.steps}, which is saved", file=sys.stderr, flush=True)
        stop_workers()
        if world_size > 1:
            dist.barrier()  # collective: a launcher ends all ranks as soon as one rank has ended
            dist.destroy_process_group()
        exit_stopped(128 + signal)

    def save(self) -> None:
        """Save the parts now: copy them, and write the files in a thread. Call this method on all ranks.

        Raises:
            TypeError: a part has a value that a restore would change.
            NonRetryableError: the previous checkpoint could not be written.
            ConfigError: raised on rank 0 if the folder has checkpoints that this run has not restored, or if a part has
                DTensors and the ranks do not share the folder.
        """
        rank, _ = place()
        if rank == 0:
            self._check_folder()
        structures, groups = self._encode(with_values=rank == 0)
        state = {"parts": structures}
        if any(is_sharded(value) for arrays in groups.values() for value in arrays.values()):
            self._save_shards(groups, state)  # collective
        elif rank == 0:
            checkpoint.save(self.folder, _APP, self.steps, groups, state, {}, keep=self.keep, report=print_warning)

    def _check_folder(self) -> None:
        """Raise ConfigError if the folder has checkpoints of an earlier run, which may have more steps than this run.

        `checkpoint.commit` keeps the checkpoints with the most steps, so it would delete the checkpoints of this run.
        """
        if not self._owns_folder and checkpoint.folders(self.folder):
            raise ConfigError(
                f"{self.folder} has checkpoints of an earlier run: call restore() before the first save, or {_REMEDY}"
            )
        self._owns_folder = True

    def _save_shards(self, groups: dict[str, Arrays], state: dict[str, Any]) -> None:
        """Save each rank's shards of the parts. This call is a collective."""
        rank, _ = place()
        shards = {}
        for group, arrays in groups.items():
            shards[group] = {name: shard_of(value, rank) for name, value in arrays.items()}
        body = {"app": _APP, "step": self.steps, "state": state, "arithmetic": {}}
        folder = checkpoint.folder_of(self.folder, self.steps)
        report = print_warning if rank == 0 else None
        with remote_failures(self.folder):
            storage.save(ranks, rank, folder, shards, body, keep=self.keep, report=report)  # collective

    def _encode(self, with_values: bool) -> tuple[dict[str, Any], dict[str, Arrays]]:
        """Return (structure of each part, arrays of each part that has arrays), both by part name."""
        structures = {}
        groups = {}
        for name, part in self.parts.items():
            state = part if isinstance(part, dict) else part.state_dict()
            structures[name], arrays = encode(state, name, with_values)
            if arrays:
                groups[name] = arrays
        return structures, groups

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Ranks other than rank 0 wait only for their own files.

        Raises:
            NonRetryableError: the checkpoint could not be written.
        """
        with remote_failures(self.folder):
            checkpoint.finish()


@contextlib.contextmanager
def remote_failures(folder: Path) -> Iterator[None]:
    """Convert a RemoteRankError in the context, which does not describe the failure, to NonRetryableError."""
    try:
        yield
    except RemoteRankError as error:
        raise NonRetryableError(f"another rank could not write its part of {folder}: read its error") from error


def checked_part(name: str, part: Any) -> Any:
    """Return a part without wrappers.

    Raises:
        ValueError: the name is invalid.
        TypeError: the part is neither a dict nor an object with ``state_dict`` and ``load_state_dict``.
    """
    if not _PART_NAME.fullmatch(name):
        raise ValueError(f"the part's name {name!r} is not made of lower-case letters and underscores: rename it")
    part = unwrapped(part)
    has_methods = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    if not isinstance(part, dict) and not has_methods:
        raise TypeError(
            f"{name} is a {type(part).__name__}: it needs state_dict and load_state_dict, or must be a dict"
        )
    if is_state_dict(part):
        raise TypeError(f"{name} is a state_dict, which a restore cannot load: pass the object itself")
    if isinstance(part, nn.Module) and any(type(each).__name__ == _FSDP1 for each in part.modules()):
        raise TypeError(f"{name} has a {_FSDP1}, whose state depends on the rank: use fully_shard of FSDP2")
    return part


def is_state_dict(part: Any) -> bool:
    """Return whether a part is the state_dict of a module, an optimizer or a learning rate scheduler of torch."""
    if not isinstance(part, dict):
        return False
    of_module = hasattr(part, "_metadata")
    return of_module or part.keys() >= {"state", "param_groups"} or part.keys() >= {"last_epoch", "_step_count"}


def unwrapped(part: Any) -> Any:
    """Return a model without the wrappers of torch.compile and DDP, and other objects unchanged."""
    while isinstance(part, nn.Module):
        inner = getattr(part, "_orig_mod", None)
        if inner is None and isinstance(part, nn.parallel.DistributedDataParallel):
            inner = part.module
        if inner is None:
            return part
        part = inner
    return part


def describe_checkpoint(found: Checkpoint | None, error: Exception | None) -> dict[str, Any]:
    """Return the newest checkpoint's description as JSON values, which rank 0 broadcasts."""
    sharded_folder = ""
    if found and found.pieces:
        sharded_folder = str(found.folder.absolute())
    return {
        "error": str(error) if error else "",
        "is_config_error": isinstance(error, ConfigError),
        "step": found.step if found else None,
        "parts": found.state["parts"] if found else {},
        "sharded_folder": sharded_folder,
    }


def read_any(folder: Path, verify: bool) -> Checkpoint:
    """Read and verify a checkpoint; verify a sharded checkpoint in blocks.

    Raises:
        CorruptCheckpoint: the manifest or another file is missing, unreadable or corrupt, or of another format.
    """
    if checkpoint.read(folder, verify=False).pieces:
        return storage.read(folder, verify)
    return checkpoint.read(folder, verify)


def parse_arrays(content: bytes) -> Arrays:
    """Return the arrays in the content of a safetensors file; {} for the empty content of a part without arrays."""
    return safetensors.numpy.load(content) if content else {}


def load_part(part: Any, state: Mapping[str, Any]) -> None:
    """Load a state into a part. A dict is changed in place, with its dicts, lists and tensors."""
    if isinstance(part, dict):
        filled(part, state)
    else:
        part.load_state_dict(state)


def filled(old: Any, new: Any) -> Any:
    """Return ``old`` with the content of ``new`` if its type permits this, else ``new``.

    The program may hold references to the containers and tensors in a part.
    """
    if isinstance(old, dict) and type(old) is type(new):
        content = {key: filled(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(content)
        return old
    if type(old) is list and type(new) is list:
        known = [*old, *[None] * len(new)]
        old[:] = [filled(before, value) for before, value in zip(known, new)]
        return old
    if isinstance(old, Tensor) and isinstance(new, Tensor) and _can_hold(old, new):
        with torch.no_grad():
            old.copy_(new)
        return old
    return new


def _can_hold(old: Tensor, new: Tensor) -> bool:
    """Return whether a copy into ``old`` gives the values of ``new``. Elements of an expanded tensor share memory."""
    return old.shape == new.shape and old.dtype == new.dtype and old.is_contiguous()


def warn_shared_store() -> None:
    """Print a warning if torchrun, after a restart, reuses the store with the addresses of killed ranks."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if is_restart and os.environ.get(_SHARE_VARIABLE) != "1":
        print_warning(f"torchrun may restart without success: set {_SHARE_VARIABLE}=1 in front of it")


def print_warning(text: str) -> None:
    """Print a warning line to stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
