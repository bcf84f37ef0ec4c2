"""A run for MLflow: at MLFLOW_TRACKING_URI, or else in a database of its own, ``RUN_DIR/track/mlflow.db``.

MLflow cannot take a metric back. So it gets a step only once a checkpoint vouches for it: what a resume makes again, at
another number of ranks perhaps, it has not been given. A run there bears the tag ``samestep.run``; what it has of it is
asked, not remembered.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException

from samestep.track import Line, News, flat

TAG = "samestep.run"
ASKED = "loss"  # a metric that every line has: its steps are those that are there
AT_ONCE = 1000, 100  # metrics, parameters or tags: what MLflow takes in one request


class MLflow:
    """One run of MLflow, made when there is something to give it. Its times follow from the lines: a request that is
    repeated, as its answer was lost, changes nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        folder = run_dir / "track"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._artifacts = None if uri else (folder / "mlflow-artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._header: dict[str, Any] = {}
        self._key, self._run, self._had = "", "", 0
        self._waiting: list[Line] = []  # which no checkpoint vouches for yet

    def take(self, news: News) -> None:
        if news.anew:
            if news.key != self._key:
                self._run = ""
            self._header, self._key, self._waiting = news.header, news.key, []
        self._waiting += news.lines
        given = [line for line in self._waiting if line.step <= news.vouched]
        if given:
            self._waiting = self._waiting[len(given) :]
            self._open(given[0].time)
            self._give([line for line in given if line.step > self._had])
            self._had = max(self._had, given[-1].step)

    def end(self, result: dict[str, Any] | None) -> None:
        if not self._run:
            return
        tags = [RunTag(f"result.{name}", str(value)) for name, value in flat(result or {}).items()]
        for at in range(0, len(tags), AT_ONCE[1]):
            self._client.log_batch(self._run, tags=tags[at : at + AT_ONCE[1]])
        self._client.set_terminated(self._run, "FINISHED" if result else "KILLED")

    def _open(self, begun: float) -> None:
        """Find this run in MLflow, or make it."""
        if self._run:
            return
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._header.get("app", "samestep"))
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{self._key}'", max_results=1)
        if not found:
            tags = {TAG: self._key, "samestep.run_dir": str(self._run_dir)}
            found = [self._client.create_run(experiment, int(begun * 1000), tags, self._run_dir.name)]
        run = found[0].info.run_id
        if found[0].info.status != RunStatus.to_string(RunStatus.RUNNING):
            self._client.update_run(run, status="RUNNING")
        params = [Param(name, str(value)) for name, value in flat(self._header).items()]
        for at in range(0, len(params), AT_ONCE[1]):
            self._client.log_batch(run, params=params[at : at + AT_ONCE[1]])
        has = [metric.step for metric in self._client.get_metric_history(run, ASKED)]
        self._run, self._had = run, max(has, default=0)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, self._artifacts))
            except MlflowException:  # another run may have made it just now
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _give(self, lines: list[Line]) -> None:
        """In requests of whole lines: a line is there, or it is not."""
        metrics: list[Metric] = []
        for line in lines:
            its = [Metric(name, value, int(line.time * 1000), line.step) for name, value in line.values.items()]
            if len(metrics) + len(its) > AT_ONCE[0]:
                self._client.log_batch(self._run, metrics=metrics)
                metrics = []
            metrics += its
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)
