"""Test the errors of --track before a job starts; tests/trackers tests its effect."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
from repository import REPOSITORY
from samestep import ConfigError
from samestep_launch import trackers
from samestep_observe import track
from scratch_project import LAUNCH, ScratchProject


@pytest.mark.parametrize("text", ["", "tensorbord", "mlflow,", "tensorboard wandb", "a\nb"])
def test_an_unknown_tracker_is_named_before_anything_is_started(project: ScratchProject, text: str) -> None:
    done = project.run("note()", "2", f"--track={text}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --track: unknown tracker ")
    assert done.stderr.endswith(": name some of tensorboard,mlflow,wandb, with commas\n")
    assert done.stderr.count("\n") == 1
    assert not project.run_dir.exists()


def test_each_is_taken_once_in_the_order_given() -> None:
    assert trackers.parse_names("wandb, mlflow,wandb") == ["wandb", "mlflow"]


def test_what_the_python_given_lacks_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "python3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else name)
    assert trackers.find_python(REPOSITORY, ["tensorboard"])
    remedy = r"lacks mlflow-skinny: \S+ -m pip install mlflow-skinny==[\d.]+; or unset PYTHON"
    with pytest.raises(ConfigError, match=remedy):
        trackers.find_python(REPOSITORY, ["tensorboard", "mlflow"])


def test_both_know_the_same_trackers_and_the_lock_has_all_they_need() -> None:
    assert [*trackers.TRACKERS] == [*track.TRACKERS]
    for name, packages in trackers.TRACKERS.items():
        assert tuple(trackers.MODULES.get(package, package) for package in packages) == track.TRACKERS[name][2]
    folder = LAUNCH / "samestep_launch" / "tracker_locks"
    pins = runpy.run_path(str(REPOSITORY / "tools" / "python_versions.py"))["pins"]
    pinned = {pin.partition("==")[0] for pin in pins((folder / "requirements.in").read_text()) if "==" in pin}
    assert pinned == {package for packages in trackers.TRACKERS.values() for package in packages}
    assert (folder / "requirements-cpu.txt").is_file()


def test_without_a_run_nothing_is_waited_for(tmp_path: Path) -> None:
    trackers.TrackerProcess(REPOSITORY, ["wandb"], "/nowhere").finish(stopped=False)
