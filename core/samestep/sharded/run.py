"""Run a model that is sharded over the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, log
from samestep.checkpoint import Checkpoint, CorruptCheckpoint
from samestep.root import Root
from samestep.run import GROUPS, Collectives, Run
from samestep.sharded import storage
from samestep.sharded.tensors import ShardGroups, StoredGroups, TensorShard

SHARED_FS_TIMEOUT = 5.0  # seconds within which another machine sees a file in a shared directory


class ShardedRun(Run):
    """A `Run` of a sharded model: `restore` gives `StoredGroups`, and `save` and `finish` take `ShardGroups`.

    Ranks hold no copies of each other's weights, so replicas cannot be compared.
    """

    _current_checkpoint: Path | None = None  # it holds the ranks' weights
    _is_shared = False

    def restore(  # type: ignore[override]
        self, collectives: Collectives, load: Callable[[StoredGroups], None], groups: Sequence[str] = GROUPS
    ) -> None:
        """Resolve run dir, dataset and checkpoint or --init-from on rank 0; each rank loads the parts that it needs.

        All ranks verify a checkpoint's files, each its share, before using any. Every rank calls ``load`` with
        arrays that it can read in parts. Raises as `Run.restore`.
        """
        self.monitor.last_collective = getattr(collectives, "last_collective", None)
        problem: Exception | None = None
        if self.world.rank == 0:
            try:
                message = self._resolve(collectives, self._required(groups))
            except (ConfigError, NonRetryableError) as error:
                problem, message = error, {"exit_code": 2 if isinstance(error, ConfigError) else 1}
            collectives.broadcast(json.dumps(message).encode())
        else:
            while "request" in (message := json.loads(collectives.broadcast(b""))):
                self._handle_rpc(collectives, message)
        if problem:
            raise problem
        if "exit_code" in message:
            raise RemoteRankError(message["exit_code"])
        try:
            self._load(message, load)
        except (ConfigError, NonRetryableError) as error:
            if self.world.rank == 0:
                raise
            raise RemoteRankError(2 if isinstance(error, ConfigError) else 1) from error  # all ranks find the same
        self._apply_restored(message)

    def _resolve(self, collectives: Collectives, groups: Iterable[str]) -> dict[str, Any]:
        """Return rank 0's message to all ranks."""
        from samestep import rundir  # the other ranks do not need it

        def reader(folder: Path, verify: bool) -> Checkpoint:
            saved = storage.read(folder, verify=False)
            self._check_shared(collectives, folder.parents[1])
            damages = self._rpc_all(collectives, {"request": "verify", "folder": str(folder), "files": saved.files})
            if damage := next(filter(None, damages), None):
                raise CorruptCheckpoint(damage)
            return replace(saved, contents=dict.fromkeys(saved.pieces, b""))

        fresh = not self.world.restart_count
        resolved = rundir.resolve(self.app, self.options, fresh=fresh, reader=reader, groups=groups)
        self._check_shared(collectives, resolved.run_dir)
        with contextlib.suppress(OSError):  # the next save reports the obstacle
            checkpoint.clear(resolved.run_dir)
        saved = resolved.checkpoint
        return {**rundir.restore_message(resolved), "folder": str(saved.folder) if saved else None}

    def _check_shared(self, collectives: Collectives, run_dir: Path) -> None:
        """Raise ConfigError on rank 0 if a rank does not see the run dir as rank 0 does."""
        if self._is_shared:
            return
        token = run_dir / f".shared-{os.urandom(8).hex()}"
        try:
            Root(run_dir).create(token.name).close()
        except OSError as error:
            raise ConfigError(f"cannot use --run-dir {run_dir}: {error.strerror}: name another one") from error
        blind = list(filter(None, self._rpc_all(collectives, {"request": "exists", "file": str(token)})))
        Root(run_dir).unlink(token.name)
        if blind:
            why = f"{', '.join(blind)} does not see the files of rank 0 ({socket.gethostname()})"
            raise storage.not_shared_error(run_dir, why)
        self._is_shared = True

    def _rpc_all(self, collectives: Collectives, request: dict[str, Any]) -> list[str]:
        """Send a request from rank 0 to every rank; return the answers in the order of ranks."""
        collectives.broadcast(json.dumps(request).encode())
        return self._handle_rpc(collectives, request)

    def _handle_rpc(self, collectives: Collectives, request: Mapping[str, Any]) -> list[str]:
        """Send this rank's problem, or ""; return all ranks' problems."""
        rank = self.world.rank
        if request["request"] == "exists":
            deadline = time.monotonic() + SHARED_FS_TIMEOUT
            while not (exists := os.path.exists(request["file"])) and time.monotonic() < deadline:
                time.sleep(0.1)
            answer = "" if exists else f"rank {rank} ({socket.gethostname()})"
        else:
            share = {
                name: entry
                for name, entry in request["files"].items()
                if storage.rank_of(name) % self.world.world_size == rank
            }
            answer = storage.find_damage(Path(request["folder"]), share, self.monitor.beat)
        answers = storage.all_gather_bytes(collectives, answer.encode(errors="replace"))
        return [each.decode(errors="replace") for each in answers]

    def _load(self, message: Mapping[str, Any], load: Callable[[StoredGroups], None]) -> None:
        folder, init_from = message["folder"], self.options.init_from
        groups: StoredGroups = {}
        if folder:
            self._current_checkpoint = Path(folder)
            groups = storage.stored_groups(checkpoint.read(self._current_checkpoint, verify=False))
            if init_from and self.world.rank == 0:
                log.info(f"{self._current_checkpoint.name} of the run dir wins over --init-from {init_from}")
        elif init_from:
            groups = {"model": storage.stored_file(init_from)}
        try:
            if groups:
                load(groups)
        except ValueError as error:
            from samestep import rundir

            raise rundir.shape_mismatch_error(folder, init_from, error) from error

    def save(self, collectives: Collectives, groups: ShardGroups) -> None:  # type: ignore[override]
        """Write a checkpoint of the last logged updates; every rank calls this, and writes its shards."""
        folder = checkpoint.folder_of(self.options.run_dir, self._step)
        body, kept = None, tuple[Any, ...]()
        if self._metrics:
            state, invariants, *kept = self.checkpoint_state(self._metrics)  # type: ignore[assignment]
            body = {"app": self.app, "step": self._step, "state": state, "arithmetic": invariants}
        storage.save(collectives, self.world.rank, folder, groups, body, *kept)
        self._current_checkpoint = folder
        self._stop_if_requested(collectives)

    def finish(  # type: ignore[override]
        self,
        collectives: Collectives,
        weights: Mapping[str, TensorShard],
        evaluation: Mapping[str, Any],
        extra_groups: ShardGroups | None = None,
    ) -> None:
        """Write the weights and ``extra_groups``, a block at a time; every rank calls this. Raises as `save`."""
        super().finish(collectives, weights, evaluation, extra_groups)  # type: ignore[arg-type]

    def _write_final_weights(
        self, collectives: Collectives, weights: Any, extra_groups: Any
    ) -> tuple[str, dict[str, Any]]:
        """Consolidate, on rank 0, the checkpoint that holds the weights, while the others receive heartbeats."""
        folder, groups = self._current_checkpoint, {"model": weights, **extra_groups}
        new_folder = checkpoint.folder_of(self.options.run_dir, self.last_step)
        if folder is None:  # nothing was restored, and nothing trained
            files, pieces = storage.write(collectives, self.world.rank, new_folder, groups)
        if self.world.rank != 0:
            while (content := collectives.broadcast(b"")) == b".":
                self.monitor.beat()
            return content.decode(), {}

        def tick() -> None:
            self.monitor.beat()
            collectives.broadcast(b".")

        def copy_best(folder: Path, path: Path) -> None:
            storage.consolidate(storage.stored_groups(storage.read(folder))[self.eval_group], path, tick)

        checkpoint.finish()
        if folder:
            stored = storage.stored_groups(checkpoint.read(folder, verify=False))
        else:
            stored = storage.stored_in(checkpoint.temporary_of(new_folder), pieces, files)
        digests = {}
        for name in groups:
            path = self.options.run_dir / ("model.safetensors" if name == "model" else f"model-{name}.safetensors")
            digests[name] = storage.consolidate(stored[name], path if self._metrics else None, tick)
        best = self._write_best(copy_best)
        if not folder:
            checkpoint.clear(self.options.run_dir)
        collectives.broadcast(digests["model"].encode())
        return digests["model"], best
