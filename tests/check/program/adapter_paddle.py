"""The adapter for lenet_paddle: adapter.py, and the steps of an optimizer that is not one of torch's."""

from pathlib import Path
from runpy import run_path
from typing import Any

from samestep_record import after_import, record_step


def watch(run: Any) -> None:
    apply = run.Run.apply_global_stats

    def applied(self: Any, stats: Any) -> Any:  # at each step, with --log-every=1
        record_step(lr=self.options.lr, loss=stats.loss / self._batches.size(self._step - 1))
        return apply(self, stats)

    run.Run.apply_global_stats = applied


run_path(str(Path(__file__).with_name("adapter.py")))
after_import("samestep.run", watch)
