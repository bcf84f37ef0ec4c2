"""Test the lines that trackers get while rank 0 writes, cuts back or damages metrics.jsonl."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT
from processes import free_port
from readback import OF, database, of_mlflow, records, runs, scalars, written
from samestep import checkpoint
from samestep.metrics import Metrics
from samestep_observe import track

LIMIT = 900.0  # seconds; only a busy machine needs so much


class Run:
    """Write lines and checkpoints as rank 0 of a run does. After a resume, the losses differ slightly."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._starts = 0
        self._metrics = Metrics(run_dir, self._header(), None)

    def _header(self) -> dict[str, Any]:
        self._starts += 1
        when = f"2026-01-01T00:{self._starts:02d}:00Z"
        return {"app": "toy", "time": when, "torch": "2", "options": {"lr": 0.1, "init_from": None}}

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            values = {"samples_seen": 8 * step, "loss": (1 + self._starts * 1e-6) / step, "samples_per_second": 4.0}
            self._metrics.write(step=step, epoch=0, **values, **({"test_loss": 0.5} if step % 5 == 0 else {}))

    def save(self, step: int) -> None:
        checkpoint.save(self.run_dir, "toy", step, {"model": {"w": np.zeros(1)}}, {}, {}, keep=3)
        checkpoint.finish()

    def resume(self, step: int | None) -> None:
        self._metrics = Metrics(self.run_dir, self._header(), step)

    def end(self, steps: int) -> None:
        content = b'{"app": "toy", "steps": %d, "test_accuracy": 0.5, "weights_sha256": "abc"}' % steps
        checkpoint.write_atomic(self.run_dir / "result.json", content)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Path], track.TrackerThread]]:
    """Yield a function that starts a tracker's thread. End all threads afterwards."""
    monkeypatch.setattr(track, "POLL_SECONDS", 0.05)
    for name, value in track.SETTINGS.items():
        monkeypatch.setenv(name, value)
    ended = threading.Event()
    started: list[track.TrackerThread] = []

    def start(name: str, run_dir: Path) -> track.TrackerThread:
        started.append(track.TrackerThread(name, run_dir, ended))
        started[-1].start()
        return started[-1]

    yield start
    ended.set()
    for each in started:
        each.join(60)
        assert not each.is_alive()


def once(name: str, run_dir: Path) -> None:
    """Copy all metrics to a tracker once, as without --follow."""
    ended = threading.Event()
    ended.set()
    thread = track.TrackerThread(name, run_dir, ended)
    thread.run()
    assert thread.done, thread.problem


def wait_until_it_has(name: str, run_dir: Path, step: int) -> None:
    wait_for(lambda: OF[name](run_dir)["loss"][-1][0] >= step)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        with contextlib.suppress(Exception):  # the tracker's data may be missing or incomplete
            if condition():
                return
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


@pytest.mark.parametrize("name", track.TRACKERS)
def test_after_a_resume_a_tracker_has_each_step_once_as_the_file_does(
    run: Run, follow: Callable[[str, Path], track.TrackerThread], name: str
) -> None:
    run.steps(1, 5)
    run.save(5)
    run.steps(6, 10)
    follow(name, run.run_dir)
    wait_until_it_has(name, run.run_dir, 5 if name == "mlflow" else 10)
    run.resume(5)
    run.steps(6, 12)
    run.save(12)
    wait_until_it_has(name, run.run_dir, 12)
    assert OF[name](run.run_dir) == written(run.run_dir)


@pytest.mark.parametrize("name", track.TRACKERS)
def test_repeated_starts_copy_no_step_twice(run: Run, name: str) -> None:
    run.steps(1, 4)
    run.save(4)
    once(name, run.run_dir)
    once(name, run.run_dir)
    run.steps(5, 6)
    run.save(6)
    once(name, run.run_dir)
    assert OF[name](run.run_dir) == written(run.run_dir)


@pytest.mark.parametrize("name", track.TRACKERS)
def test_an_incomplete_line_waits_for_its_end_and_a_damaged_one_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(track, "CHUNK_BYTES", 64)  # shorter than a line
    run.steps(1, 2)
    run.save(4)
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": \x00\x00\n[3]\n\n{"step": 4, "loss": 0.25')
    once(name, run.run_dir)
    assert OF[name](run.run_dir)["loss"][-1][0] == 2
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write("}\n")
    once(name, run.run_dir)
    assert OF[name](run.run_dir)["loss"][-1] == (4, 0.25)
    assert OF[name](run.run_dir) == written(run.run_dir)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_file_of_many_blocks_is_copied_once(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(track, "CHUNK_BYTES", 10_007)
    run.steps(1, 3000)
    once(name, run.run_dir)
    assert OF[name](run.run_dir) == written(run.run_dir)


def test_an_open_tensorboard_drops_what_a_resume_cut_back(
    run: Run, follow: Callable[[str, Path], track.TrackerThread]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.steps(1, 10)
    follow("tensorboard", run.run_dir)
    wait_until_it_has("tensorboard", run.run_dir, 10)
    events = EventAccumulator(str(run.run_dir / "track" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert scalars(events) == written(run.run_dir)
    run.resume(5)
    run.steps(6, 7)
    wait_for(lambda: OF["tensorboard"](run.run_dir) == written(run.run_dir))
    events.Reload()
    assert scalars(events) == written(run.run_dir)
    assert "result/text_summary" not in events.Tags()["tensors"]


def test_a_run_after_no_resume_is_another_one(run: Run) -> None:
    """--no-resume moves the checkpoints and metrics.jsonl away. MLflow keeps the earlier run."""
    for _ in range(2):
        run.steps(1, 3)
        run.save(3)
        for name in track.TRACKERS:
            once(name, run.run_dir)
        run.resume(None)
    assert len(runs(database(run.run_dir))) == 2
    assert len([*(run.run_dir / "track" / "wandb").iterdir()]) == 1
    assert sum(path.stat().st_size > 0 for path in (run.run_dir / "track" / "tensorboard").iterdir()) == 1


def test_trackers_have_the_header_and_the_result(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.steps(1, 3)
    run.save(3)
    for name in track.TRACKERS:
        once(name, run.run_dir)
    assert runs(database(run.run_dir))[0].info.status == "KILLED"
    assert all(record["type"] != "exit" for record in records(run.run_dir))
    run.end(3)
    for name in track.TRACKERS:
        once(name, run.run_dir)
    (found,) = runs(database(run.run_dir))
    assert (found.info.status, found.info.run_name) == ("FINISHED", run.run_dir.name)
    assert found.data.params["options.lr"] == "0.1"
    assert found.data.tags["result.test_accuracy"] == "0.5"
    values = {record["type"]: record[record["type"]] for record in records(run.run_dir)}
    assert values["exit"] == {"exit_code": 0, "runtime": 4}
    assert values["run"]["project"] == "toy"
    assert values["summary"]["update"]["weights_sha256"] == "abc"
    events = EventAccumulator(str(run.run_dir / "track" / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("result")
    assert b'"weights_sha256": "abc"' in text.tensor_proto.string_val[0]
    # A step of 8 samples at 4 samples/s lasts 2 s. Times count from the header's time.
    assert [event.wall_time - events.Scalars("loss")[0].wall_time for event in events.Scalars("loss")] == [0, 2, 4]


@contextlib.contextmanager
def server(folder: Path, port: str) -> Iterator[str]:
    """Run MLflow's own server, with a database in ``folder``."""
    store = f"sqlite:///{folder / 'server.db'}"
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri={store}", f"--default-artifact-root={folder / 'artifacts'}"]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # the job queue starts and ends slowly
    process = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        uri = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None
            return runs(uri) is not None

        wait_for(answers)
        yield uri
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.soak  # the quick tests train while the server is down (test_tracked_training.py)
def test_a_server_that_stops_and_restarts_gets_everything(
    run: Run, follow: Callable[[str, Path], track.TrackerThread], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(track, "MAX_RETRY_SECONDS", 1.0)
    port = free_port()
    folder = tmp_path / "server"
    folder.mkdir()
    with server(folder, port) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        run.steps(1, 5)
        run.save(5)
        thread = follow("mlflow", run.run_dir)
        wait_for(lambda: of_mlflow(run.run_dir, uri)["loss"][-1][0] == 5)
    run.steps(6, 400)  # more values than one request can have
    run.save(400)
    wait_for(lambda: thread.problem is not None)
    with server(folder, port) as uri:
        wait_for(lambda: of_mlflow(run.run_dir, uri)["loss"][-1][0] == 400)
        assert of_mlflow(run.run_dir, uri) == written(run.run_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--to", "tensorbord"],
            "unknown tracker 'tensorbord': name some of tensorboard,mlflow,wandb, with commas",
        ),
        (["--to", "wandb"], "holds no metrics.jsonl: name the run dir of a run that trains"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "samestep_observe.track", str(tmp_path), *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "core"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f"{message}\n")
    assert done.stderr.count("\n") == 1
