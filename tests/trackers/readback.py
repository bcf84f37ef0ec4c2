"""Read a run from trackers by their own readers: steps and float32 values of each metric, in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

Metrics = dict[str, list[tuple[int, float]]]


def _by_metric(triples: Any) -> Metrics:
    metrics: Metrics = {}
    for name, step, value in triples:
        metrics.setdefault(name, []).append((int(step), float(np.float32(value))))
    return metrics


def written(run_dir: Path) -> Metrics:
    """Return the metrics in metrics.jsonl."""
    triples = []
    for text in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(text)
        except ValueError:
            continue
        if not isinstance(values, dict):
            continue
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        step = numbers.pop("step", None)
        if step:
            triples += [(name, step, value) for name, value in numbers.items()]
    return _by_metric(triples)


def of_tensorboard(run_dir: Path) -> Metrics:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert sum(path.stat().st_size > 0 for path in (run_dir / "track" / "tensorboard").glob("*tfevents*")) == 1
    events = EventAccumulator(str(run_dir / "track" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return scalars(events)


def scalars(events: Any) -> Metrics:
    return _by_metric((tag, each.step, each.value) for tag in events.Tags()["scalars"] for each in events.Scalars(tag))


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of W&B's file, read by W&B's own program."""
    (folder,) = (run_dir / "track" / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_wandb(run_dir: Path) -> Metrics:
    items = [record["history"]["item"] for record in records(run_dir) if record["type"] == "history"]
    triples = [(name, item["_step"], value) for item in items for name, value in item.items() if name[0] != "_"]
    return _by_metric(triples)


def runs(uri: str) -> list[Any]:
    """Return all runs of the MLflow server or database at ``uri``."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return list(client.search_runs([each.experiment_id for each in client.search_experiments()]))


def database(run_dir: Path) -> str:
    return f"sqlite:///{run_dir / 'track' / 'mlflow.db'}"


def of_mlflow(run_dir: Path, uri: str | None = None) -> Metrics:
    from mlflow import MlflowClient

    uri = uri or database(run_dir)
    (run,) = runs(uri)
    client = MlflowClient(tracking_uri=uri)
    triples = []
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        triples += [(name, metric.step, metric.value) for metric in sorted(history, key=lambda metric: metric.step)]
    return _by_metric(triples)


OF = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
