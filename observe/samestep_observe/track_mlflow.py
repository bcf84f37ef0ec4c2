"""Copy a run to MLflow: at MLFLOW_TRACKING_URI, or else in a database of its own, ``RUN_DIR/track/mlflow.db``.

MLflow cannot take a metric back. So it gets a step only once a checkpoint has it: otherwise a resume would log the step
again. The run in MLflow has the tag ``samestep.run``. This module asks MLflow which steps it has, and stores nothing.
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
STEP_METRIC = "loss"  # every line has it, so its steps are all steps in MLflow
MAX_METRICS = 1000  # that MLflow takes in one request
MAX_TAGS = 100  # likewise; parameters are tags


class MLflow:
    """Write one run of MLflow, which is made with its first step.

    Its times are computed from the lines. So a request that is repeated, because the answer was lost, changes nothing.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        folder = run_dir / "track"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # SQLite would follow a link; an empty file is a new database
            root = Root(run_dir)
            root.make_folder("track")
            os.close(root.open("track/mlflow.db", os.O_RDWR))
        self._artifacts = None if uri else (folder / "mlflow-artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._header: dict[str, Any] = {}
        self._key = ""
        self._run = ""
        self._last_step = 0
        self._waiting: list[Line] = []  # that no checkpoint has yet

    def add(self, batch: MetricsBatch) -> None:
        """Log the lines that a checkpoint has by now."""
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
        """Log the result as tags, and the run's status."""
        if self._run:
            for part in _parts([RunTag(f"result.{name}", str(value)) for name, value in flatten(result or {}).items()]):
                self._client.log_batch(self._run, tags=part)
            self._client.set_terminated(self._run, "FINISHED" if result else "KILLED")

    def _open_run(self, start_time: float) -> None:
        """Find this run in MLflow, or make it."""
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
            except MlflowException:  # another run may have made it meanwhile
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _log_lines(self, lines: list[Line]) -> None:
        """Log in requests of whole lines, so that MLflow has all of a line or nothing."""
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
