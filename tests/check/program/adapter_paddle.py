"""The adapter for lenet_paddle. It also records the optimizer's steps, because the optimizer is Paddle's."""

from pathlib import Path
from runpy import run_path
from typing import Any

from samestep_record import after_import, record_step


def watch(run: Any) -> None:
    sync = run.Run.sync

    def synced(self: Any, *arguments: Any, **sums: Any) -> Any:  # called at each step with --log-every=1
        actions = sync(self, *arguments, **sums)
        record_step(lr=self.options.lr, loss=self.step_sync.totals.loss / self.progress.num_losses)
        return actions

    run.Run.sync = synced


run_path(str(Path(__file__).with_name("adapter.py")))
after_import("samestep.run", watch)
