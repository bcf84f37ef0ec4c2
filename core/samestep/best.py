"""Find the best evaluation of a run, and write the evaluated weights to a file, for --keep-best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep import NonRetryableError, checkpoint, log
from samestep.options import BEST_DIRECTIONS
from samestep.root import Root
from samestep.untrusted import shown


class BestEvaluation:
    """The best evaluation so far. The first of several equal evaluations is the best.

    A resumed run starts with the ``state`` of its checkpoint. If a resume changes the metric, the next evaluation
    becomes the best one.

    Attributes:
        state: the number of updates ("step") and the metric's value by its name, for checkpoints; {} before the first
            evaluation.
    """

    def __init__(self, state: Mapping[str, Any] | None, keep_best: bool | str = True) -> None:
        """Restore the best evaluation from the ``state`` of a checkpoint.

        Args:
            state: the attribute ``state`` as a checkpoint stores it; None for a new run.
            keep_best: the value of --keep-best: max:NAME or min:NAME. True means test_accuracy, or test_loss if the
                evaluation has no accuracy. With False, `update` does not change the state.
        """
        self.state: dict[str, Any] = dict(state or {})
        self._keep_best = keep_best

    @property
    def step(self) -> int | None:
        """The number of updates done at the best evaluation; None before the first evaluation."""
        return self.state.get("step")

    def update(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Replace the best evaluation if the evaluation after ``step`` updates is better. Ignore an empty evaluation.

        Raises:
            NonRetryableError: the evaluation lacks the metric of --keep-best.
        """
        if not evaluation or not self._keep_best:
            return
        direction, _, name = self._metric(evaluation).partition(":")
        value = evaluation.get(name)
        if value is None:  # the value was NaN or infinite, or the evaluation has neither accuracy nor loss
            return
        if name not in self.state:
            is_better = True
        elif direction == "max":
            is_better = value > self.state[name]
        else:
            is_better = value < self.state[name]
        if is_better:
            self.state = {"step": step, name: value}

    def _metric(self, evaluation: Mapping[str, Any]) -> str:
        """Return max:NAME or min:NAME for the metric to compare; "" if the evaluation has neither accuracy nor loss."""
        if isinstance(self._keep_best, str):
            name = self._keep_best.partition(":")[2]
            if name in evaluation:
                return self._keep_best
            known = ", ".join(shown(each) for each in evaluation)
            raise NonRetryableError(
                f"--keep-best {self._keep_best}: the evaluation has no such metric: use one of {known}"
            )
        for name in ("test_accuracy", "test_loss"):
            if evaluation.get(name) is not None:
                return f"{BEST_DIRECTIONS[name]}:{name}"
        return ""

    def write(self, run_dir: Path, copy: Callable[[Path, Path], None]) -> dict[str, Any]:
        """Write ``model-best.safetensors`` from the best evaluation's checkpoint.

        If nothing was evaluated, or if the checkpoint is corrupt, log a warning instead.

        Args:
            run_dir: folder of the run.
            copy: function that writes the weights of a checkpoint's folder to a file.

        Returns:
            Fields for the result, such as ``best_step``; {} if nothing was evaluated.

        Raises:
            NonRetryableError: a write fails, such as on a full disk.
        """
        path = run_dir / "model-best.safetensors"
        with checkpoint.writing(path):
            Root(run_dir).unlink(path.name)  # an earlier start of this run may have written the file
        if self.step is None:
            log.warning("no model-best.safetensors: nothing was evaluated with --keep-best")
            return {}
        checkpoint.finish()
        try:
            copy(checkpoint.folder_of(run_dir, self.step), path)
        except checkpoint.CorruptCheckpoint as error:
            log.warning(f"no model-best.safetensors: the checkpoint of the best, step {self.step}, is damaged: {error}")
        return {f"best_{name}": value for name, value in self.state.items()}
