"""Save and restore a run whose model has a replica on every rank. Rank 0 reads and writes the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.numpy

from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint, checksums, log
from samestep.checksums import Checksums
from samestep.parts import Groups, StoredRun


class Replicas:
    """The `samestep.run.Storage` of replicas, whose bits must be equal on all ranks."""

    is_sharded = False

    def restore(self, run: StoredRun) -> dict[str, Any]:
        """Find the run dir, the dataset and the checkpoint on rank 0, and load the same bytes on all ranks.

        Returns:
            The message of rank 0 from `samestep.rundir.open_run`.

        Raises:
            ConfigError: as in `Run.restore`.
            NonRetryableError: as in `Run.restore`.
            RemoteRankError: as in `Run.restore`.
        """
        message: dict[str, Any] = {}
        contents: dict[str, bytes] = {}
        problem: ConfigError | NonRetryableError | None = None
        if run.world.rank == 0:
            try:
                message, contents = self._open(run)
            except (ConfigError, NonRetryableError) as error:
                problem = error
                message = {"exit_code": error.exit_code}
        broadcast = run.collectives.broadcast
        message = json.loads(broadcast(json.dumps(message).encode()))  # collective
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
        """Load the arrays on rank 0, and return the message for all ranks and the bytes of each group's file."""
        from samestep import rundir  # only rank 0 needs this module

        is_fresh = not run.world.restart_count
        return rundir.open_run(run.app, run.options, is_fresh, load=run.parts.load, required=run.required_groups)

    def _check(self, groups: Groups) -> None:
        """Raise NonRetryableError now, instead of at the first save, if a checkpoint cannot store an array."""
        for arrays in groups.values():
            for name, array in arrays.items():
                checkpoint.check_array(name, array)

    def save(self, run: StoredRun, groups: Groups) -> None:
        """Compare the replicas, and save a checkpoint on rank 0.

        Raises:
            RetryableError: an array differs between ranks.
            NonRetryableError: the previous checkpoint could not be written.
        """
        frozen = checksums.of_groups({"frozen": run.parts.frozen()} if run.parts.frozen else {})

        def compare(own: Checksums) -> None:
            run.monitor.check_replicas(run.collectives.all_gather, {**own, **frozen}, step=run.step)  # collective

        if not run.metrics:
            compare(checksums.of_groups(groups))  # collective
            return
        values = run.state_to_save()
        folder = run.options.run_dir
        # Rank 0 compares the copies that it writes, because a bit of the arrays may flip after the comparison.
        settings: dict[str, Any] = {"report": log.info, "compare": compare, "before_commit": run.metrics.sync}
        checkpoint.save(folder, run.app, run.step, groups, *values, **settings)  # collective

    def finish(self, run: StoredRun) -> None:
        """Wait on rank 0 until the last checkpoint is on the disk.

        Raises:
            NonRetryableError: the write failed.
        """
        if run.world.rank == 0:
            checkpoint.finish()

    def write_final(self, run: StoredRun, groups: Groups) -> tuple[str, dict[str, Any]]:
        """Compare the replicas' digests, and write the final weights of ``groups`` on rank 0.

        Returns:
            SHA-256 of the model's weights, and the result's fields of the best evaluation.
        """
        folder = run.options.run_dir
        digest = checkpoint.weights_sha256(groups["model"])
        run.monitor.check_final_weights(run.collectives, digest, folder if run.metrics else None)  # collective
        if run.metrics:
            for name, arrays in groups.items():
                checkpoint.save_weights(folder / checkpoint.weights_file(name), arrays)

        def copy_best(saved: Path, path: Path) -> None:
            checkpoint.save_weights(path, checkpoint.read(saved).arrays(run.evaluated))

        return digest, run.write_best(copy_best)
