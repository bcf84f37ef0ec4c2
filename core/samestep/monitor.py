"""Define the interface of a run's monitor, and a default monitor, which does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from samestep.checksums import Checksums
from samestep.env import World
from samestep.options import Options

AllGather = Callable[[NDArray[Any]], NDArray[Any]]  # see `samestep.parts.Collectives.all_gather`


class Monitor:
    """The default monitor, which does nothing. `samestep.recovery.watchdog.Watchdog` overrides every method.

    A typical app calls only `expect_compilation`, `collective`, and `beat` after each evaluated batch. This package
    calls the other methods.

    Attributes:
        last_collective: function that returns the name, number and state of this rank's last collective; None if the
            framework does not record collectives.
    """

    last_collective: Callable[[], dict[str, Any] | None] | None = None

    @property
    def step(self) -> int | None:
        """Number of updates done; None if the number is unknown."""
        return None

    def start(self, world: World, options: Options) -> None:
        """Start watching this rank."""

    def write_to(self, folder: Path) -> None:
        """Write heartbeats to ``folder``, the run dir's ``log`` folder, from now on."""

    def resume_at(self, step: int) -> None:
        """Set the number of updates that earlier processes have done."""

    def expect_compilation(self) -> None:
        """Apply the time limit of a first step until the next `beat`."""

    def beat(self, step: int | None = None) -> None:
        """Record progress. After an update, ``step`` is the number of updates done; otherwise it is None."""

    def collective(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Record that this rank waits in the collective ``name`` while the context is open."""
        return contextlib.nullcontext()

    def update(self, step: int, phase_seconds: Sequence[float]) -> list[dict[str, Any]]:
        """Search for stragglers on rank 0, by the durations of all ranks' phases since the last call.

        Args:
            step: number of updates done.
            phase_seconds: [world_size * phases], each rank's seconds in the order of `samestep.step_timer.PHASES`.

        Returns:
            The new stragglers, as `samestep.recovery.straggler.StragglerDetector.update` returns them.
        """
        return []

    def check_losses(self, losses: Mapping[str, float], step: int) -> None:
        """Raise an error if a loss is NaN or infinite.

        Args:
            losses: losses by name.
            step: number of updates done.

        Raises:
            RetryableError: a loss is NaN or infinite, and no earlier start had such a loss at this step.
            NonRetryableError: a loss is NaN or infinite, as in an earlier start at this step.
        """

    def check_replicas(self, all_gather: AllGather, checksums: Checksums, step: int) -> None:
        """Raise RetryableError on every rank unless all ranks have the same checksums.

        Args:
            all_gather: function that gathers an array from all ranks.
            checksums: checksums of this rank's arrays, by group and name.
            step: number of updates done.
        """

    def check_final_weights(self, collectives: Any, digest: str, run_dir: Path | None) -> None:
        """Raise RetryableError on every rank unless the final weights of all ranks have the same digest.

        If they differ, rank 0 first renames the newest checkpoint of ``run_dir``, so that a resume skips it.

        Args:
            collectives: the app's `samestep.parts.Collectives`.
            digest: SHA-256 of this rank's weights, in hexadecimal.
            run_dir: folder of the run on rank 0; None on all other ranks.
        """

    def record_event(self, kind: str, **fields: Any) -> None:
        """Record an event of the run for `samestep_observe`. ``kind`` is one of `samestep.events.KINDS`."""

    def launcher_died(self) -> bool:
        """Return whether the launcher that started this rank has ended."""
        return False

    def all_ranks_alive(self, count: int) -> bool:
        """Return whether at least ``count`` ranks of this job are alive on this machine, and none has ended."""
        return True

    def rank_is_lost(self) -> bool:
        """Return whether a rank of this job on this machine has ended."""
        return False

    def describe_crashes(self) -> str:
        """Return "; rank 0 (host, pid 7) died ..." if signals killed ranks of this job, else ""."""
        return ""

    def stop(self) -> None:
        """Stop watching, because the rank is done."""
