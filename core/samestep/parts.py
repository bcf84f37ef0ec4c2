"""Define the interfaces between an app and its `samestep.run.Run`: the arrays of a checkpoint, and collectives.

`samestep.replicas.Replicas`, which saves and restores a run, uses only the attributes in `StoredRun`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import NDArray

from samestep.checkpoint import Arrays
from samestep.env import World
from samestep.monitor import Monitor
from samestep.options import Options

if TYPE_CHECKING:
    from samestep.metrics import Metrics
    from samestep.trace import Trace

Groups = Mapping[str, Arrays]  # the arrays of a checkpoint by group, such as "model" or "optimizer"


class Collectives(Protocol):
    """The collectives that a run uses. An app's ``distributed`` module implements them."""

    def broadcast(self, content: bytes) -> bytes:
        """Return rank 0's ``content`` on every rank. This call is a collective."""

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Gather the rows of all ranks on every rank. This call is a collective.

        Args:
            row: this rank's row [k], of any numeric dtype.

        Returns:
            The rows [world_size, k], in the order of ranks and with the same bits.
        """


@dataclass(frozen=True)
class Parts:
    """The functions by which a run loads and saves the arrays of a checkpoint, such as the model's weights.

    Attributes:
        load: function that loads the `Groups` of a checkpoint, or only "model" for --init-from. The function raises
            ValueError if an array does not fit. A new run without --init-from does not call the function. With
            `samestep.sharded.shards.Shards`, the argument of the function is `StoredGroups`.
        groups: function that returns the `Groups`; with Shards, it returns `ShardGroups`.
        names: the names of the groups, including "model". A checkpoint counts as corrupt if a group is missing.
        evaluated: the group with the weights that an evaluation uses and --keep-best stores; set by `Run.restore`.
        watch: function that connects a `samestep.trace.Trace` to the optimizer's updates, for --trace-every.
        frozen: function that returns the arrays that training does not change and a checkpoint does not contain, or
            checksums of them. All ranks compare these arrays at each save. With Shards, nothing calls the function.
    """

    load: Callable[[Any], None]
    groups: Callable[[], Any]
    names: Sequence[str] = ("model", "optimizer")
    evaluated: str = "model"
    watch: Callable[[Trace], None] | None = None
    frozen: Callable[[], Arrays] | None = None


class StateToSave(NamedTuple):
    """The values of a run for a save.

    Attributes:
        state: values that a resume restores, as JSON values.
        resume_invariants: the options that a resume must repeat.
        keep: number of newest checkpoints to keep.
        protected_step: step of a checkpoint that is never deleted, or None.
    """

    state: dict[str, Any]
    resume_invariants: dict[str, Any]
    keep: int
    protected_step: int | None

    def of_manifest(self) -> dict[str, Any]:
        """Return the values that a manifest has, by their names in the manifest."""
        return {"state": self.state, "arithmetic": self.resume_invariants}


class StoredRun(Protocol):
    """The attributes of a `samestep.run.Run` that `samestep.replicas.Replicas` needs to restore and save the run."""

    app: str
    options: Options
    world: World
    monitor: Monitor
    collectives: Collectives
    parts: Parts

    @property
    def evaluated(self) -> str:
        """The name of the group with the weights that an evaluation uses."""

    @property
    def step(self) -> int:
        """The number of updates done."""

    @property
    def metrics(self) -> Metrics | None:
        """The file metrics.jsonl on rank 0; None on other ranks and with --evaluate-only."""

    @property
    def required_groups(self) -> set[str]:
        """The groups without which a checkpoint counts as corrupt."""

    def state_to_save(self) -> StateToSave:
        """Return the values for a save."""

    def write_best(self, copy: Callable[[Path, Path], None]) -> dict[str, Any]:
        """Write the weights of the best evaluation by ``copy(checkpoint, file)``, and return fields for the result."""
