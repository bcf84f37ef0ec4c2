"""Store a run whose model has a replica on every rank: rank 0 reads and writes the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.numpy

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, log
from samestep.parts import Groups, StoredRun


class Replicas:
    """The `samestep.run.Storage` of replicas, which must agree to the bit."""

    is_sharded = False

    def restore(self, run: StoredRun) -> dict[str, Any]:
        """Resolve the run on rank 0; load the same bytes on all ranks. Raises as `Run.restore`."""
        message: dict[str, Any] = {}
        contents: dict[str, bytes] = {}
        problem: Exception | None = None
        if run.world.rank == 0:
            try:
                message, contents = self._open(run)
            except ConfigError as error:
                problem = error
                message = {"exit_code": 2}
            except NonRetryableError as error:
                problem = error
                message = {"exit_code": 1}
        broadcast = run.collectives.broadcast
        message = json.loads(broadcast(json.dumps(message).encode()))  # collective; JSON, as pickle is never loaded
        if problem:
            raise problem
        if "exit_code" in message:
            raise RemoteRankError(message["exit_code"])
        received = {}
        for group in message["groups"]:
            received[group] = broadcast(contents.get(group, b""))  # collective
        if received and run.world.rank != 0:
            run.parts.load({group: safetensors.numpy.load(content) for group, content in received.items()})
        self._check(run.parts.groups())
        return message

    def _open(self, run: StoredRun) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return rank 0's message, and the files that its parts have loaded."""
        from samestep import rundir  # the other ranks do not need it

        is_fresh = not run.world.restart_count
        return rundir.open_run(run.app, run.options, is_fresh, load=run.parts.load, required=run.required_groups)

    def _check(self, groups: Groups) -> None:
        """Refuse before the first update what `save` would refuse."""
        for arrays in groups.values():
            for name, array in arrays.items():
                checkpoint.check_array(name, array)

    def save(self, run: StoredRun, groups: Groups) -> None:
        """Compare the replicas, and write a checkpoint on rank 0. Raises as `Run.save`."""
        run.monitor.check_replicas(run.collectives.all_gather, groups, run.step)  # collective
        if run.metrics:
            state = run.checkpoint_state()
            folder = run.options.run_dir
            settings: dict[str, Any] = {"report": log.info, "before_commit": run.metrics.sync}
            checkpoint.save(folder, run.app, run.step, groups, *state, **settings)

    def finish(self, run: StoredRun) -> None:
        """Wait on rank 0 until the last checkpoint is on the disk. Raises NonRetryableError if that fails."""
        if run.world.rank == 0:
            checkpoint.finish()

    def write_final(self, run: StoredRun, groups: Groups) -> tuple[str, dict[str, Any]]:
        """Compare the replicas' digests, and write model.safetensors and model-<group>.safetensors on rank 0."""
        folder = run.options.run_dir
        digest = checkpoint.weights_sha256(groups["model"])
        run.monitor.check_final_weights(run.collectives, digest, folder if run.metrics else None)  # collective
        if run.metrics:
            for name, arrays in groups.items():
                checkpoint.save_weights(folder / checkpoint.weights_file(name), arrays)

        def copy_best(saved: Path, path: Path) -> None:
            checkpoint.save_weights(path, checkpoint.read(saved).arrays(run.evaluated))

        return digest, run.write_best(copy_best)
