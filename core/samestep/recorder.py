"""Write a run's records on rank 0: the lines of metrics.jsonl, the losses, the trace and the progress bar."""

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
    """Write records on rank 0. Other ranks, and runs with --evaluate-only, write no files.

    Attributes:
        metrics: the file metrics.jsonl; None on other ranks and with --evaluate-only.
        stragglers: the stragglers that were found since the last line, for the next line.
        result: the fields of the result; {} before `Run.finish`.
        trace: the trace of weights and gradients; None without --trace-every.
    """

    def __init__(
        self, last_step: int, first_step: int, metrics: Metrics | None = None, trace: Trace | None = None
    ) -> None:
        """Show a progress bar from ``first_step`` to ``last_step``.

        Args:
            last_step: number of the run's last update.
            first_step: number of updates done.
            metrics: the file for lines and losses, or None.
            trace: the trace to write, or None.
        """
        self.metrics = metrics
        self.stragglers: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self.trace = trace
        self._bar = log.progress(last_step, first_step)

    def count(self, done: int, updates: int) -> None:
        """Advance the progress bar by ``updates``, and the trace to ``done`` updates."""
        self._bar.update(updates)
        if self.trace is not None:
            self.trace.count_step(done)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl.

        Raises:
            NonRetryableError: the write fails, such as on a full disk.
        """
        if self.metrics is None:
            return
        if self.stragglers:
            line = {**line, "stragglers": self.stragglers}
        self.metrics.write(**line)
        self.stragglers = []

    def write_losses(self, records: Iterable[tuple[int, float]]) -> None:
        """Append (step, loss) of each step since the last sync to log/losses.bin.

        Raises:
            NonRetryableError: the write fails, such as on a full disk.
        """
        if self.metrics is not None:
            self.metrics.losses.write(records)

    def write_trace(self, all_gather: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Append the trace since the last sync to log/trace.jsonl. If the model is sharded, the call is a collective.

        Args:
            all_gather: the function `samestep.parts.Collectives.all_gather`.
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
    """Open metrics.jsonl, log/losses.bin and log/trace.jsonl, and delete all steps after ``resumed_from``.

    Args:
        app: name of the app, such as "cifar_ddp".
        options: the run's parsed command-line options.
        world: rank, world size and launcher of this process.
        metadata: versions and settings that affect the run's numbers, and the dataset's fingerprint.
        resumed_from: last step to keep; None for a new run.

    Raises:
        NonRetryableError: a file cannot be written.
    """
    from samestep import metrics  # only rank 0 needs this module

    header = metrics.header(app, options, world, metadata)
    return metrics.Metrics(options.run_dir, header, resumed_from)
