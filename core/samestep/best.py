"""Keep the best evaluation of a run, for --keep-best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep import checkpoint, log
from samestep.root import Root

# The first of these that an evaluation has decides which evaluation is best; the sign shows whether more is better.
BEST_MEASURES = {"test_accuracy": 1, "test_loss": -1}


class BestEvaluation:
    """Keep the best evaluation so far, the first of equals.

    ``state`` goes into checkpoints: the step and its evaluation. A resumed run starts with the state of its
    checkpoint and finds later evaluations again.
    """

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        self.state: dict[str, Any] = dict(state or {})

    @property
    def step(self) -> int | None:
        """The number of updates done at the best evaluation."""
        return self.state.get("step")

    def update(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Compare the evaluation after ``step`` updates; {} means none."""
        for name, sign in BEST_MEASURES.items():
            value = evaluation.get(name)
            if value is None:
                continue
            if name not in self.state or sign * (value - self.state[name]) > 0:
                self.state = {"step": step, name: value}
            return

    def write(self, run_dir: Path, copy: Callable[[Path, Path], None]) -> dict[str, Any]:
        """Write ``model-best.safetensors`` from the best evaluation's checkpoint; return the fields of the result.

        ``copy`` takes the checkpoint's folder and the file's path. A corrupt checkpoint costs the file, not the run.
        Raises NonRetryableError if the disk is full.
        """
        path = run_dir / "model-best.safetensors"
        with checkpoint.writing(path):
            Root(run_dir).unlink(path.name)  # from an earlier end of this run
        if self.step is None:
            log.warning("no model-best.safetensors: nothing was evaluated with --keep-best")
            return {}
        checkpoint.finish()
        try:
            copy(checkpoint.folder_of(run_dir, self.step), path)
        except checkpoint.CorruptCheckpoint as error:
            log.warning(f"no model-best.safetensors: the checkpoint of the best, step {self.step}, is damaged: {error}")
        return {f"best_{name}": value for name, value in self.state.items()}
