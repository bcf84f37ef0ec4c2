"""Save and restore a run whose model is sharded over the ranks. Each rank reads and writes its own parts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, log
from samestep.checkpoint import Checkpoint, CorruptCheckpoint
from samestep.root import Root
from samestep.run import Run
from samestep.sharded import storage
from samestep.sharded.tensors import ShardGroups, StoredGroups

SHARED_FS_TIMEOUT = 5.0  # maximum seconds until a file in a shared directory is visible on other machines


class Shards:
    """The `samestep.run.Storage` of a sharded model.

    The functions of the run's `Parts` load `StoredGroups` and return `ShardGroups`. Each rank reads only the parts of
    `StoredGroups` that it needs. Most weights are on one rank only, so the ranks cannot compare weights.
    """

    is_sharded = True

    def __init__(self) -> None:
        self._current_checkpoint: Path | None = None  # the checkpoint that contains the current weights
        self._is_shared = False  # whether `_check_shared` has found that all ranks share the run dir

    def restore(self, run: Run) -> dict[str, Any]:
        """Find the run dir, the dataset and the checkpoint on rank 0, and load on each rank the parts that it needs.

        Before the ranks use a checkpoint, each rank verifies some of the checkpoint's files.

        Returns:
            The message of rank 0: the values of `samestep.rundir.restore_message`, and ``folder``, the checkpoint's
            path.

        Raises:
            ConfigError: as in `Run.restore`.
            NonRetryableError: as in `Run.restore`.
            RemoteRankError: as in `Run.restore`.
        """
        collectives = run.collectives
        problem: ConfigError | NonRetryableError | None = None
        if run.world.rank == 0:
            try:
                message = self._resolve(run)
            except (ConfigError, NonRetryableError) as error:
                problem = error
                message = {"exit_code": error.exit_code}
            collectives.broadcast(json.dumps(message).encode())
        else:
            while "request" in (message := json.loads(collectives.broadcast(b""))):
                self._handle_rpc(run, message)
        if problem:
            raise problem
        if "exit_code" in message:
            raise RemoteRankError(message["exit_code"])
        try:
            self._load(run, message)
        except (ConfigError, NonRetryableError) as error:
            problem = error
        storage.raise_first(collectives, run.world.rank, problem)  # collective
        return message

    def _resolve(self, run: Run) -> dict[str, Any]:
        """Call `rundir.resolve` on rank 0, and return the message that `restore` broadcasts."""
        from samestep import rundir  # only rank 0 needs this module

        def reader(folder: Path, verify: bool) -> Checkpoint:
            saved = storage.read(folder, verify=False)
            self._check_shared(run, folder.parents[1])
            damages = self._rpc_all(run, {"request": "verify", "folder": str(folder), "files": saved.files})
            if damage := next(filter(None, damages), None):
                raise CorruptCheckpoint(damage)
            return replace(saved, contents=dict.fromkeys(saved.pieces, b""))

        resolved = rundir.resolve(
            run.app,
            run.options,
            fresh=not run.world.restart_count,
            reader=reader,
            groups=run.required_groups,
        )
        self._check_shared(run, resolved.run_dir)
        with contextlib.suppress(OSError):  # the next save raises the error
            checkpoint.clear(resolved.run_dir)
        saved = resolved.checkpoint
        return {**rundir.restore_message(resolved), "folder": str(saved.folder) if saved else None}

    def _check_shared(self, run: Run, run_dir: Path) -> None:
        """Raise ConfigError on rank 0 unless rank 0's files in the run dir are visible to all ranks."""
        if self._is_shared:
            return
        token = run_dir / f".shared-{os.urandom(8).hex()}"
        try:
            Root(run_dir).create(token.name).close()
        except OSError as error:
            raise ConfigError(f"cannot use --run-dir {run_dir}: {error.strerror}: name another one") from error
        blind = list(filter(None, self._rpc_all(run, {"request": "exists", "file": str(token)})))
        Root(run_dir).unlink(token.name)
        if blind:
            why = f"{', '.join(blind)} does not see the files of rank 0 ({socket.gethostname()})"
            raise storage.not_shared_error(run_dir, why)
        self._is_shared = True

    def _rpc_all(self, run: Run, request: dict[str, Any]) -> list[str]:
        """Send a request from rank 0 to every rank, and return all ranks' problems ("" for none) in rank order."""
        run.collectives.broadcast(json.dumps(request).encode())  # collective
        return self._handle_rpc(run, request)

    def _handle_rpc(self, run: Run, request: Mapping[str, Any]) -> list[str]:
        """Process a request of rank 0, gather all ranks' problems ("" for none), and return them in rank order."""
        rank = run.world.rank
        if request["request"] == "exists":
            deadline = time.monotonic() + SHARED_FS_TIMEOUT
            while not (exists := os.path.exists(request["file"])) and time.monotonic() < deadline:
                time.sleep(0.1)
            answer = "" if exists else f"rank {rank} ({socket.gethostname()})"
        else:
            share = {
                name: entry
                for name, entry in request["files"].items()
                if storage.rank_of(name) % run.world.world_size == rank
            }
            answer = storage.find_damage(Path(request["folder"]), share, run.monitor.beat)
        answers = storage.all_gather_bytes(run.collectives, answer.encode(errors="replace"))
        return [each.decode(errors="replace") for each in answers]

    def _load(self, run: Run, message: Mapping[str, Any]) -> None:
        folder = message["folder"]
        init_from = run.options.init_from
        groups: StoredGroups = {}
        if folder:
            self._current_checkpoint = Path(folder)
            groups = storage.stored_groups(checkpoint.read(self._current_checkpoint, verify=False))
            if init_from and run.world.rank == 0:
                log.info(f"{self._current_checkpoint.name} of the run dir wins over --init-from {init_from}")
        elif init_from:
            groups = {"model": storage.stored_file(init_from)}
        try:
            if groups:
                run.parts.load(groups)
        except ValueError as error:
            from samestep import rundir

            raise rundir.shape_mismatch_error(folder, init_from, error) from error

    def save(self, run: Run, groups: ShardGroups) -> None:
        """Copy this rank's shards, and write them in a thread. This call is a collective.

        Raises:
            ConfigError: raised on rank 0 if the ranks do not share the run dir.
            NonRetryableError: as in `samestep.sharded.storage.save`.
            RemoteRankError: as in `samestep.sharded.storage.save`.
        """
        folder = checkpoint.folder_of(run.options.run_dir, run.step)
        body = None
        settings: dict[str, Any] = {}
        if run.metrics:
            values = run.state_to_save()
            body = {"app": run.app, "step": run.step, **values.of_manifest()}
            settings = {
                "keep": values.keep,
                "protected_step": values.protected_step,
                "report": log.info,
                "before_commit": run.metrics.sync,
            }
        storage.save(run.collectives, run.world.rank, folder, groups, body, **settings)  # collective
        self._current_checkpoint = folder

    def finish(self, run: Run) -> None:
        """Wait until the last checkpoint is on the disk. This call is a collective.

        Raises:
            NonRetryableError: this rank could not write the checkpoint.
            RemoteRankError: another rank could not write the checkpoint.
        """
        storage.finish(run.collectives, run.world.rank)  # collective

    def write_final(self, run: Run, groups: ShardGroups) -> tuple[str, dict[str, Any]]:
        """Write the full arrays on rank 0 from the checkpoint with the current weights. This call is a collective.

        Memory holds one block at a time. While rank 0 writes, it broadcasts short messages, so that the other ranks do
        not time out.

        Returns:
            SHA-256 of the model's weights, and the result's fields of the best evaluation.

        Raises:
            NonRetryableError: this rank could not read or write a file.
            RemoteRankError: another rank could not write its shards.
        """
        folder = self._current_checkpoint
        collectives = run.collectives
        new_folder = checkpoint.folder_of(run.options.run_dir, run.last_step)
        if folder is None:  # a new run without updates has no checkpoint
            files, pieces = storage.write(collectives, run.world.rank, new_folder, groups)
        self.finish(run)  # collective
        if run.world.rank != 0:
            while (content := collectives.broadcast(b"")) == b".":
                run.monitor.beat()
            return content.decode(), {}

        def tick() -> None:
            run.monitor.beat()
            collectives.broadcast(b".")

        def copy_best(saved: Path, path: Path) -> None:
            storage.consolidate(storage.stored_groups(storage.read(saved))[run.evaluated], path, tick)

        if folder:
            stored = storage.stored_groups(checkpoint.read(folder, verify=False))
        else:
            stored = storage.stored_in(checkpoint.temporary_of(new_folder), pieces, files)
        digests = {}
        for name in groups:
            path = run.options.run_dir / checkpoint.weights_file(name)
            digests[name] = storage.consolidate(stored[name], path if run.metrics else None, tick)
        best = run.write_best(copy_best)
        if not folder:
            checkpoint.clear(run.options.run_dir)
        collectives.broadcast(digests["model"].encode())
        return digests["model"], best
