"""Write the records of a run on rank 0: its lines of metrics.jsonl, its progress bar and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from samestep import log
from samestep.env import World
from samestep.options import Options

if TYPE_CHECKING:
    from samestep.metrics import Metrics
    from samestep.trace import Trace


class Recorder:
    """Write records on rank 0. On other ranks, and with --evaluate-only, only the result and the trace are kept.

    Attributes:
        metrics: the file metrics.jsonl, or None.
        stragglers: the stragglers since the last line, which the next line reports.
        result: the fields of the result, once the run is finished.
        trace: takes digests of weights and gradients; None without --trace-every.
    """

    def __init__(
        self, last_step: int, first_step: int, metrics: Metrics | None = None, trace: Trace | None = None
    ) -> None:
        """Show a progress bar from ``first_step`` to ``last_step``.

        Args:
            last_step: number of updates of the whole run.
            first_step: number of updates done.
            metrics: gets the lines and losses.
            trace: its records go to the file of ``metrics``.
        """
        self.metrics = metrics
        self.stragglers: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self.trace = trace
        self._bar = log.progress(last_step, first_step)

    def count(self, done: int, updates: int) -> None:
        """Move the progress bar and the trace by ``updates``, after which ``done`` are done."""
        self._bar.update(updates)
        if self.trace is not None:
            self.trace.count_step(done)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl. Raises NonRetryableError if the disk is full."""
        if self.metrics is None:
            return
        if self.stragglers:
            line = {**line, "stragglers": self.stragglers}
        self.metrics.write(**line)
        self.stragglers = []

    def write_losses(self, records: Iterable[tuple[int, float]]) -> None:
        """Append (step, loss) of the steps since the last sync to log/losses.bin. Raises as `write`."""
        if self.metrics is not None:
            self.metrics.losses.write(records)

    def write_trace(self, all_gather: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Append the trace since the last sync to log/trace.jsonl. Collective if the model is sharded.

        Args:
            all_gather: as `samestep.parts.Collectives.all_gather`.
        """
        if self.trace is None:
            return
        records = self.trace.take(all_gather)  # collective
        if self.metrics is not None:
            self.metrics.trace.write(records)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.close()


def open_metrics(
    app: str, options: Options, world: World, metadata: Mapping[str, Any], resumed_from: int | None
) -> Metrics:
    """Open metrics.jsonl, log/losses.bin and log/trace.jsonl on rank 0, cut back to ``resumed_from`` updates.

    Args:
        app: name of the app.
        options: options of the run.
        world: place of this process.
        metadata: facts that decide the numbers, such as versions and the dataset's fingerprint.
        resumed_from: number of updates to keep; None for a new run.
    """
    from samestep import metrics  # the other ranks do not need it

    header = metrics.header(app, options, world, metadata)
    return metrics.Metrics(options.run_dir, header, resumed_from)
