"""--track: what is said of it before anything is started. What it does: tests/trackers."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
from house import REPOSITORY, House
from launcher import follower
from samestep import UserError, track


@pytest.mark.parametrize("text", ["", "tensorbord", "mlflow,", "tensorboard wandb", "a\nb"])
def test_an_unknown_tracker_is_named_before_anything_is_started(house: House, text: str) -> None:
    done = house.run("note()", "2", f"--track={text}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --track: there is no tracker ")
    assert done.stderr.endswith(": name some of tensorboard,mlflow,wandb, with commas\n")
    assert done.stderr.count("\n") == 1
    assert not house.run_dir.exists()


def test_each_is_taken_once_in_the_order_given() -> None:
    assert follower.names_of("wandb, mlflow,wandb") == ["wandb", "mlflow"]


def test_what_the_python_given_lacks_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "python3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else name)
    assert follower.find_python(["tensorboard"])
    remedy = r"lacks mlflow-skinny: \S+ -m pip install mlflow-skinny==[\d.]+; or unset PYTHON"
    with pytest.raises(UserError, match=remedy):
        follower.find_python(["tensorboard", "mlflow"])


def test_both_know_the_same_trackers_and_the_lock_has_all_they_need() -> None:
    assert [*follower.TRACKERS] == [*track.TRACKERS]
    for name, packages in follower.TRACKERS.items():
        assert tuple(follower.MODULES.get(package, package) for package in packages) == track.TRACKERS[name][2]
    folder = REPOSITORY / "scripts" / "launcher" / "trackers"
    pins = runpy.run_path(str(REPOSITORY / "tools" / "python_versions.py"))["pins"]
    pinned = {pin.partition("==")[0] for pin in pins((folder / "requirements.in").read_text()) if "==" in pin}
    assert pinned == {package for packages in follower.TRACKERS.values() for package in packages}
    assert (folder / "requirements-cpu.txt").is_file()


def test_without_a_run_nothing_is_waited_for(tmp_path: Path) -> None:
    follower.Follower(["wandb"], "/nowhere").finish(stopped=False)
