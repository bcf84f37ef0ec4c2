"""Define the interface of a run's monitor, and a default that watches nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from samestep.env import World
from samestep.options import Options

AllGather = Callable[[NDArray[Any]], NDArray[Any]]  # as `samestep.run.Collectives.all_gather`


class Monitor:
    """Watch nothing. `samestep.recovery.watchdog.Watchdog` overrides every method.

    A `Run` calls these methods; an app calls `beat`, `expect_compilation` and `collective` itself.

    Attributes:
        last_collective: returns the name, number and state of this rank's last collective, if the framework records it.
    """

    last_collective: Callable[[], dict[str, Any] | None] | None = None

    @property
    def step(self) -> int | None:
        """Number of updates done; None if it is not known."""
        return None

    def start(self, world: World, options: Options) -> None:
        """Start to watch this rank."""

    def write_to(self, folder: Path) -> None:
        """Write heartbeats to ``folder``, the ``log`` folder of the run dir, from here on."""

    def resume_at(self, step: int) -> None:
        """Note that earlier processes have done ``step`` updates."""

    def expect_compilation(self) -> None:
        """Allow as much time as for the first step until the next `beat`."""

    def beat(self, step: int | None = None) -> None:
        """Note progress: after each update, with the number of updates done, and after each evaluated batch."""

    def collective(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Note, while the context is open, that this rank waits for the others in ``name``."""
        return contextlib.nullcontext()

    def update(self, step: int, phase_seconds: Sequence[float]) -> list[dict[str, Any]]:
        """Compare all ranks' phase seconds since the last call, on rank 0. Return the stragglers that were found."""
        return []

    def check_losses(self, losses: Mapping[str, float], step: int) -> None:
        """Raise RetryableError if a loss is NaN or infinite, NonRetryableError if a restart did not help before."""

    def check_replicas(self, all_gather: AllGather, groups: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Raise RetryableError on every rank unless all ranks hold the same bits in every array of ``groups``.

        Args:
            all_gather: gathers an array from all ranks.
            groups: arrays by group and name.
            step: number of updates done.
        """

    def check_final_weights(self, collectives: Any, digest: str, run_dir: Path | None) -> None:
        """Raise RetryableError on every rank unless all have the same ``digest`` of their weights.

        The newest checkpoint of ``run_dir``, which rank 0 passes, is then renamed, so that a resume skips it.

        Args:
            collectives: the app's functions broadcast and all_gather.
            digest: SHA-256 of the weights, hexadecimal.
            run_dir: folder of the run on rank 0, None on the others.
        """

    def record_event(self, kind: str, **fields: Any) -> None:
        """Record an event of the run, with a machine-readable kind, for `samestep_observe`."""

    def launcher_died(self) -> bool:
        """Return whether the launcher that started this rank is gone."""
        return False

    def all_ranks_alive(self, count: int) -> bool:
        """Return whether ``count`` ranks of this job live on this machine."""
        return True

    def rank_is_lost(self) -> bool:
        """Return whether a rank of this job on this machine has ended, without which the others cannot continue."""
        return False

    def describe_crashes(self) -> str:
        """Return "; rank 0 (host, pid 7) died ..." for ranks of this job that a signal killed, else ""."""
        return ""

    def stop(self) -> None:
        """Stop to watch: the rank is done."""
