"""Copy a run to MLflow, at MLFLOW_TRACKING_URI or by default in the database ``RUN_DIR/track/mlflow.db``.

MLflow cannot delete a logged metric, and a resume repeats the steps after the newest checkpoint. So this module logs a
step only after a checkpoint or the result has the step. The tag ``samestep.run`` identifies the run in MLflow.
The module reads the logged steps from MLflow, and stores no other state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from samestep.root import Root

from samestep_observe.tracker import Line, MetricsBatch, flatten

TAG = "samestep.run"
STEP_METRIC = "loss"  # every line has this metric, so its steps are all logged steps
MAX_METRICS = 1000  # MLflow's maximum number of metrics in one request
MAX_TAGS = 100  # MLflow's maximum number of tags or parameters in one request


class MLflow:
    """A tracker that finds or creates one MLflow run before the first logged step, and logs to this run.

    The logged times are computed from the lines, so that a repeated request changes nothing.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        folder = run_dir / "track"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # Root refuses links, which SQLite would follow; SQLite accepts an empty file as a new database
            root = Root(run_dir)
            root.make_folder("track")
            os.close(root.open("track/mlflow.db", os.O_RDWR))
        self._artifacts = None if uri else (folder / "mlflow-artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._header: dict[str, Any] = {}
        self._key = ""
        self._run = ""
        self._last_step = 0
        self._waiting: list[Line] = []  # lines of steps after the last `committed_step`

    def add(self, batch: MetricsBatch) -> None:
        """Log the lines up to ``batch.committed_step``, and keep later lines for the next call."""
        if batch.is_new_file:
            if batch.key != self._key:
                self._run = ""
            self._header = batch.header
            self._key = batch.key
            self._waiting = []
        self._waiting += batch.lines
        committed = [line for line in self._waiting if line.step <= batch.committed_step]
        if committed:
            self._waiting = self._waiting[len(committed) :]
            self._open_run(committed[0].time)
            self._log_lines([line for line in committed if line.step > self._last_step])
            self._last_step = max(self._last_step, committed[-1].step)

    def finish(self, result: dict[str, Any] | None) -> None:
        """Log the result as tags, and set the run's final status."""
        if self._run:
            for part in _parts([RunTag(f"result.{name}", str(value)) for name, value in flatten(result or {}).items()]):
                self._client.log_batch(self._run, tags=part)
            self._client.set_terminated(self._run, "FINISHED" if result else "KILLED")

    def _open_run(self, start_time: float) -> None:
        """Find this run in MLflow or create it, and read the last step that is logged."""
        if self._run:
            return
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._header.get("app", "samestep"))
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{self._key}'", max_results=1)
        if not runs:
            tags = {TAG: self._key, "samestep.run_dir": str(self._run_dir)}
            runs = [self._client.create_run(experiment, int(start_time * 1000), tags, self._run_dir.name)]
        run = runs[0].info.run_id
        if runs[0].info.status != RunStatus.to_string(RunStatus.RUNNING):
            self._client.update_run(run, status="RUNNING")
        for part in _parts([Param(name, str(value)) for name, value in flatten(self._header).items()]):
            self._client.log_batch(run, params=part)
        steps = [metric.step for metric in self._client.get_metric_history(run, STEP_METRIC)]
        self._run = run
        self._last_step = max(steps, default=0)

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name, self._artifacts))
            except MlflowException:  # another process may have created the experiment
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _log_lines(self, lines: list[Line]) -> None:
        """Log the lines in requests that never split a line, so that MLflow never has part of a line."""
        metrics: list[Metric] = []
        for line in lines:
            new = [Metric(name, value, int(line.time * 1000), line.step) for name, value in line.values.items()]
            if len(metrics) + len(new) > MAX_METRICS:
                self._client.log_batch(self._run, metrics=metrics)
                metrics = []
            metrics += new
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), MAX_TAGS):
        yield items[first : first + MAX_TAGS]
