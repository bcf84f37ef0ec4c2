"""Test `Checkpoints` and `StopRequests` in one process: files, parts, damage and refused arguments."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit_programs import LIMIT, environment
from samestep import ConfigError, NonRetryableError, checkpoint
from samestep.stop import StopRequest
from samestep.torch import Checkpoints, GlobalBatchSampler, StopRequests, ranks, stops, weights
from torch import nn
from torch.optim.lr_scheduler import StepLR

SGD = torch.optim.SGD([torch.zeros(1)], lr=0.1)


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


def made(folder: Path, **parts: Any) -> Checkpoints:
    return Checkpoints(folder, grace=None, **parts)


def save(checkpoints: Checkpoints, step: int) -> Path:
    """Save a checkpoint of ``step``, and return its folder."""
    checkpoints.steps = step
    checkpoints.save()
    checkpoints.finish()
    return checkpoint.folder_of(checkpoints.folder, step)


def test_parts_come_back_in_place_and_wrappers_do_not_count(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    numbers = {"best": 0.5, "seen": [1, 2]}
    save(made(tmp_path, model=torch.compile(model), numbers=numbers), 7)
    other: dict[str, Any] = {"old": 1}
    fresh = nn.Linear(2, 2)
    checkpoints = made(tmp_path, model=fresh, numbers=other)
    assert checkpoints.restore() == 7
    assert torch.equal(fresh.weight, model.weight)
    assert other == numbers
    assert checkpoints.steps == 7


def test_values_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    before = model.weight.detach().clone()
    numbers: dict[str, Any] = {"counts": np.arange(3), "turned": torch.ones(2, 3).t()}
    checkpoints = made(tmp_path, model=model, numbers=numbers)
    checkpoints.save()
    with torch.no_grad():
        model.weight.zero_()
    numbers["counts"][...] = -1
    numbers["turned"].zero_()
    checkpoints.finish()
    checkpoints.restore()
    assert torch.equal(model.weight, before)
    assert numbers["counts"].tolist() == [0, 1, 2]
    assert torch.equal(numbers["turned"], torch.ones(3, 2))


def test_nothing_is_restored_from_an_empty_folder(tmp_path: Path) -> None:
    numbers = {"a": 1}
    assert made(tmp_path / "new", numbers=numbers).restore() == 0
    assert numbers == {"a": 1}


def test_files_have_format_1_with_a_group_for_each_part(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    sampler = GlobalBatchSampler(9, 2, 0, 1)
    folder = save(made(tmp_path, model=model, optimizer=optimizer, sampler=sampler), 3)
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    arrays = checkpoint.load_weights(folder / "model.safetensors")  # as --init-from reads them
    assert checkpoint.weights_sha256(arrays) == checkpoint.weights_sha256(weights.model_arrays(model))
    weights.load_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), arrays)
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert (body["format"], body["step"], sorted(body["state"]["parts"])) == (1, 3, ["model", "optimizer", "sampler"])


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, every=2, grace=None, numbers={"a": 1})
    for _ in range(9):
        checkpoints.step()
    checkpoints.finish()
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-00000008", "step-00000006"]


def test_a_step_can_be_saved_twice(tmp_path: Path) -> None:
    numbers = {"a": 1}
    checkpoints = made(tmp_path, numbers=numbers)
    save(checkpoints, 3)
    numbers["a"] = 2
    save(checkpoints, 3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    numbers["a"] = 0
    checkpoints.restore()
    assert numbers == {"a": 2}


def test_containers_and_tensors_in_a_part_are_filled_in_place(tmp_path: Path) -> None:
    """The program holds references to them."""
    history = [1, 2]
    weight = torch.ones(2, requires_grad=True)
    kept = {"logs": {"history": history}, "weights": [weight]}
    checkpoints = made(tmp_path, numbers=kept)
    save(checkpoints, 3)
    history.append(3)
    with torch.no_grad():
        weight.zero_()
    checkpoints.restore()
    assert history == [1, 2]
    assert kept["logs"]["history"] is history  # type: ignore[index]
    assert kept["weights"] == [weight]
    assert weight.tolist() == [1.0, 1.0]
    assert weight.requires_grad


def test_a_run_that_has_not_restored_deletes_no_checkpoint_of_an_earlier_run(tmp_path: Path) -> None:
    save(made(tmp_path, numbers={"a": 1}), 100)
    with pytest.raises(ConfigError, match=r"has checkpoints of an earlier run: call restore\(\) before the first save"):
        made(tmp_path, numbers={"a": 2}).save()
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["step-00000100"]


def test_a_folder_is_the_same_after_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = made(Path("saved"), numbers={"a": 1})
    monkeypatch.chdir("/")
    assert save(checkpoints, 3).parents[2] == tmp_path


def test_a_folder_without_write_permission_is_warned_about_before_the_first_step(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Linux lets nobody create a folder in /proc."""
    assert made(Path("/proc/saved"), numbers={}).restore() == 0
    assert capfd.readouterr().err.startswith("warning: no checkpoint can be saved in /proc/saved: No such file")


def damage(folder: Path) -> None:
    path = folder / "manifest.json"
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    numbers = {"a": 1}
    checkpoints = made(tmp_path, numbers=numbers)
    older = save(checkpoints, 3)
    numbers["a"] = 2
    damage(save(checkpoints, 4))
    assert checkpoints.restore() == 3
    assert numbers == {"a": 1}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: checkpoint step-00000004 (")
    damage(older)
    with pytest.raises(NonRetryableError, match="restore one, or move the folder away, or pass another one") as error:
        checkpoints.restore()
    assert "--run-dir" not in str(error.value)


def test_a_checkpoint_of_other_parts_is_refused(tmp_path: Path) -> None:
    save(made(tmp_path, numbers={"a": 1}), 3)
    with pytest.raises(ConfigError, match=r"has the parts \['numbers'\], not \['other'\]"):
        made(tmp_path, other={"a": 1}).restore()
    checkpoint.save(tmp_path, "app", 4, {}, {}, {}, 3)
    checkpoint.finish()
    with pytest.raises(ConfigError, match=r"step-00000004 is not a checkpoint of samestep.torch.Checkpoints"):
        made(tmp_path, numbers={"a": 1}).restore()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, ValueError, "no parts: pass model=model"),
        ({"keep": 0, "a": {}}, ValueError, "keep must be at least 1"),
        ({"every": -1, "a": {}}, ValueError, "every at least 0"),
        ({"rng": os}, TypeError, "rng is a module: it needs state_dict and load_state_dict, or must be a dict"),
        ({"metrics": {"best": {"when": os.environ}}}, TypeError, r"metrics\['best'\]\['when'\] is a os._Environ"),
        ({"netG": {}}, ValueError, "the part's name 'netG' is not made of lower-case letters"),
        ({"model": nn.Linear(1, 1).state_dict()}, TypeError, "model is a state_dict, .* pass the object itself"),
        ({"optimizer": SGD.state_dict()}, TypeError, "optimizer is a state_dict"),
        ({"schedule": StepLR(SGD, 1).state_dict()}, TypeError, "schedule is a state_dict"),
        ({"numbers": nested(40)}, NonRetryableError, "is nested too deeply"),
        ({"numbers": {"name": "\ud83d\ude00"}}, NonRetryableError, "cannot save"),  # JSON reads one character
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Checkpoints(tmp_path, grace=None, **options)


def test_a_restart_that_shares_the_store_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks._place_without_group.cache_clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    made(tmp_path, numbers={}).restore()
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of it" in capfd.readouterr().err
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    made(tmp_path, numbers={}).restore()
    assert capfd.readouterr().err == ""


LAST_SAVE = """
import multiprocessing, resource, sys
import torch
from samestep.torch import Checkpoints

def main():
    model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(sys.argv[1], every=2, grace=None, model=model, optimizer=optimizer)
    checkpoints.restore()
    if sys.argv[2] == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 700)).sum().backward()
        optimizer.step()
        checkpoints.step()

if sys.argv[2] == "fork":
    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join()
    sys.exit(process.exitcode)
main()
"""


@pytest.mark.parametrize(("where", "code"), [("main", 0), ("fork", 0), ("full disk", 1)])
def test_a_program_that_ends_after_its_last_save_completes_it_or_fails(tmp_path: Path, where: str, code: int) -> None:
    """The program does not call finish, and frees its tensors while the thread writes."""
    command = [sys.executable, "-c", LAST_SAVE, str(tmp_path), where]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == code, done.stderr
    if code:
        assert re.fullmatch(r"error: cannot write checkpoint \S+step-00000002: File too large\n", done.stderr)
    assert len(checkpoint.folders(tmp_path)) == 1 - code


STOPPED = """
import os, signal, sys, time
from samestep.stop import StopRequest
from samestep.torch import Checkpoints, StopRequests

numbers = {"steps": 0}
checkpoints = Checkpoints(sys.argv[1], numbers=numbers)
try:
    StopRequests()
except RuntimeError as error:
    print(error)
checkpoints.restore()
print("from", numbers["steps"], flush=True)
while numbers["steps"] < 1000:
    numbers["steps"] += 1
    if numbers["steps"] == int(sys.argv[2]):
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
        time.sleep(0.05)  # the thread that takes the signal
    checkpoints.step()
print("done", numbers["steps"])
"""


def test_a_stop_saves_its_step_and_exits_with_the_signals_code(tmp_path: Path) -> None:
    def run(step: int, name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", STOPPED, str(tmp_path), str(step), name]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)

    first = run(100, "SIGTERM")
    assert first.returncode == 128 + signal.SIGTERM
    assert "already: pass grace=None" in first.stdout
    (folder,) = checkpoint.folders(tmp_path)
    step = int(folder.name[5:])
    assert 100 <= step <= 100 + stops.MAX_STEPS
    assert f"stopped by signal 15 at step {step}, which is saved" in first.stderr
    second = run(1, "SIGUSR1")
    assert f"from {step}" in second.stdout
    assert second.stdout.endswith("done 1000\n")


def test_ranks_reduce_their_votes_within_a_quarter_of_the_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "_installed", None)
    monkeypatch.setattr(StopRequest, "install", lambda self: None)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    requests = StopRequests(grace=8.0)
    for seconds, interval in ((0.5, 4), (0.001, 64), (3.0, 1)):
        for _ in range(200):
            now += seconds
            requests.step()
        assert requests._interval == interval
    with pytest.raises(ValueError, match="grace must be above 0, got 0"):
        StopRequests(grace=0)
