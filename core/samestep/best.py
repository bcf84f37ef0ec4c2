"""Which evaluation was the best? For --keep-best, on rank 0 alone: the others import none of this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep import checkpoint, log

# What is compared, the first that an evaluation has, and the sign by which more is better.
MEASURES = {"test_accuracy": 1, "test_loss": -1}


class Best:
    """The best evaluation so far, the first of equals: what checkpoints say of it, and its weights in the end.

    A run that starts again from a checkpoint knows what that one knew, and finds what came later once more.
    """

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        """``state`` is a checkpoint's: what `state` gave; None for a new run."""
        self.state: dict[str, Any] = dict(state or {})  # "step", and what was measured there

    @property
    def step(self) -> int | None:
        """Updates done when it was evaluated."""
        return self.state.get("step")

    def see(self, step: int, tested: Mapping[str, Any]) -> None:
        """An evaluation after ``step`` updates; {} is none."""
        name = next((name for name in MEASURES if name in tested), None)
        if name and (name not in self.state or MEASURES[name] * (tested[name] - self.state[name]) > 0):
            self.state = {"step": step, name: tested[name]}

    def write(self, run_dir: Path, group: str, copy: Callable[[Path, str, Path], None] | None = None) -> dict[str, Any]:
        """Write ``model-best.safetensors``, the ``group`` of the best one's checkpoint; returns what a result says.

        ``copy`` does so where its own way does not do: from the checkpoint's folder, the group, to the file's path.
        A checkpoint that is damaged costs the file, not the run. Raises FatalError where the disk is full.
        """
        (run_dir / "model-best.safetensors").unlink(missing_ok=True)  # of an earlier end of this run
        if self.step is None:
            log.warning("no model-best.safetensors: nothing was evaluated while there was --keep-best")
            return {}
        checkpoint.finish()
        try:
            (copy or _copy)(checkpoint.folder_of(run_dir, self.step), group, run_dir / "model-best.safetensors")
        except checkpoint.Damaged as problem:
            log.warning(
                f"no model-best.safetensors: the checkpoint of the best, step {self.step}, is damaged: {problem}"
            )
        return {f"best_{name}": value for name, value in self.state.items()}


def _copy(folder: Path, group: str, path: Path) -> None:
    checkpoint.save_weights(path, checkpoint.read(folder).arrays(group))
