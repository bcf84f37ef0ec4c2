"""Test the two values of --gradients on 2 ranks, in copies of the program, and the checkpoints of both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, bare, losses, python_path, relative_difference

APP = ROOT / "apps" / "mnist_horovod"
TRAIN = str(APP / "train.py")
STORED = Path(__file__).parent / "stored" / "version-0.2"
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache", "-np", "2"]

# Each rank trains small models for 2 steps by the program's train_step, and rank 0 writes the results as JSON.
PROGRAM = """
import inspect
import json
import os
import sys
import warnings

import distributed
import horovod.torch as hvd
import torch
import torch.nn.functional as F
import train
from options import parse
from samestep import ConfigError
from samestep.torch import GlobalBatchSampler, exact, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

os.environ["HOROVOD_DISABLE_GROUP_FUSION"] = "1"
hvd.init()
torch.manual_seed(1)
examples = TensorDataset(torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3)
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.01); "


def clipping_train_step():
    source = inspect.getsource(train.train_step).replace("optimizer.step()", f"{CLIP}optimizer.step()")
    assert CLIP in source
    names = dict(vars(train))
    exec(source, names)
    return names["train_step"]


class Partial(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.trained = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return F.log_softmax(self.trained(self.frozen(x)), dim=1)


def build(make):
    torch.manual_seed(2)
    model = make().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(make, clips):
    model, optimizer = build(make)
    for images, labels in DataLoader(examples, batch_sampler=GlobalBatchSampler(12, 6, 0, 1)):
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return model, optimizer


def train_on_ranks(gradients, make, step):
    options = parse([f"--gradients={gradients}"])
    model, optimizer = build(make)
    optimizer = distributed.wrap(optimizer, model, options)
    sampler = GlobalBatchSampler(12, 6, hvd.rank(), hvd.size())
    for images, labels in sampler.received(DataLoader(examples, batch_sampler=sampler)):
        step(options, model, optimizer, sampler, images, labels)
    return model, optimizer


def compare(make, step, clips):
    alone, _ = train_alone(make, clips)
    found = {}
    for gradients in ("group", "optimizer"):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                model, optimizer = train_on_ranks(gradients, make, step)
            except Exception as error:
                found[gradients] = {"error": repr(error)}
                continue
        arrays = weights.groups(model, optimizer)
        found[gradients] = {
            "difference": max(float((a - b).abs().max()) for a, b in zip(alone.parameters(), model.parameters())),
            "warnings": [str(each.message) for each in warned],
            "digest": {name: array.tobytes().hex() for group in arrays.values() for name, array in group.items()},
        }
    return found


def refusal(call):
    try:
        call()
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def wrap(*arguments, freezes=False):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].train(not freezes)
    return lambda: distributed.wrap(torch.optim.SGD(model.parameters()), model, parse([*arguments]))


plain = lambda: nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))
results = {
    "partial": compare(Partial, train.train_step, clips=False),
    "clipped": compare(plain, clipping_train_step(), clips=True),
    "batch norm": refusal(wrap()),
    "frozen batch norm": refusal(wrap(freezes=True)),
    "batch norm of a sub-shard": refusal(wrap("--virtual-ranks=2")),
    "batch norm of the kit": refusal(lambda: exact(nn.BatchNorm1d(4))(torch.randn(3, 4))),
}
if hvd.rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)
hvd.shutdown()
os._exit(0)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gradients")
    (folder / "program.py").write_text(PROGRAM)
    path = folder / "results.json"
    done = subprocess.run(
        [*HOROVODRUN, sys.executable, "program.py", str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(APP), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# --- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["group", "optimizer"])
def test_a_parameter_may_be_frozen_or_unused(output: dict[str, Any], gradients: str) -> None:
    found = output["partial"][gradients]
    assert "error" not in found, found
    assert found["difference"] < 1e-12
    assert "trained.weight.momentum_buffer" in found["digest"]
    assert "frozen.weight.momentum_buffer" not in found["digest"]


@pytest.mark.parametrize("gradients", ["group", "optimizer"])
def test_a_copy_may_clip_the_sums_before_the_update(output: dict[str, Any], gradients: str) -> None:
    found = output["clipped"][gradients]
    assert found["difference"] < 1e-12
    assert found["warnings"] == []


def test_weights_and_state_have_the_same_bits_with_both_options(output: dict[str, Any]) -> None:
    for found in (output["partial"], output["clipped"]):
        assert found["group"]["digest"] == found["optimizer"]["digest"]


# --- batch norm ----------------------------------------------------------------------------------------------------


def test_a_batch_norm_is_refused_unless_it_needs_no_other_rank(output: dict[str, Any]) -> None:
    assert output["batch norm"] == (
        "ConfigError: 1 is a batch norm, which needs torch's process group, and Horovod has none: freeze it, or use "
        "GroupNorm"
    )
    assert output["frozen batch norm"] is None
    assert output["batch norm of a sub-shard"] is None


def test_the_kit_names_a_remedy_that_a_batch_norm_has(output: dict[str, Any]) -> None:
    message = output["batch norm of the kit"]
    assert message.startswith("RuntimeError: horovodrun started 2 ranks, but torch has no process group: ")
    assert message.endswith("init_process_group first, freeze the batch norm by eval(), or use GroupNorm")


def test_a_copy_with_batch_norm_ends_with_one_line(harness: Harness) -> None:
    copy = harness.folder / "copy"
    shutil.copytree(APP, copy, ignore=shutil.ignore_patterns("__pycache__"))
    model = (copy / "model.py").read_text()
    changed = model.replace("nn.Dropout2d(dropout)", "nn.Sequential(nn.BatchNorm2d(20), nn.Dropout2d(dropout))")
    assert changed != model
    (copy / "model.py").write_text(changed)
    command = [*HOROVODRUN, sys.executable, str(copy / "train.py"), "--dataset=mnist-5k", "--max-steps=1"]
    outcome = bare(harness, command)
    assert "exit with status code 2" in outcome.stdout, outcome
    # horovodrun kills the other rank when the first one ends, and prints a traceback of its own. Horovod may print too.
    (line,) = {line.partition(">:")[2] for line in outcome.stderr.splitlines() if "]<stderr>:error: " in line}
    assert line.startswith("error: conv2_drop.0 is a batch norm, which needs torch's process group, and Horovod has ")


# --- checkpoints ---------------------------------------------------------------------------------------------------


def train_alone(harness: Harness, gradients: str, run_dir: Path, *options: str) -> dict[str, Any]:
    """Train in one process without a launcher, and return the result."""
    command = [sys.executable, TRAIN, "--dataset=mnist-5k", "--log-every=1", f"--gradients={gradients}", *options]
    return harness.checked(bare(harness, [*command, f"--run-dir={run_dir}"]), 1)


def test_a_resume_with_a_distributed_optimizer_ends_with_the_same_weights(harness: Harness) -> None:
    """Equal checkpoints of both options let a run change the option at a resume."""
    whole = harness.folder / "whole"
    parts = harness.folder / "parts"
    expected = train_alone(harness, "group", whole, "--max-steps=6", "--checkpoint-every=3")
    train_alone(harness, "optimizer", parts, "--max-steps=3")
    found = train_alone(harness, "optimizer", parts, "--max-steps=6")
    assert found["resumed_from_step"] == 3
    assert found["weights_sha256"] == expected["weights_sha256"]
    for step in ("step-00000003", "step-00000006"):
        for name in ("model.safetensors", "optimizer.safetensors"):
            file = Path("checkpoints", step, name)
            assert (parts / file).read_bytes() == (whole / file).read_bytes(), file


def test_a_distributed_optimizer_resumes_a_run_of_version_02(harness: Harness) -> None:
    """The stored run used --gradients group and momentum, without dropout."""
    run_dir = harness.folder / "run"
    shutil.copytree(STORED / "run", run_dir)
    options = (STORED / "options").read_text().split()
    result = train_alone(harness, "optimizer", run_dir, *options, "--max-steps=6")
    assert result["resumed_from_step"] == 2
    assert relative_difference(losses(STORED / "longer"), losses(run_dir)) < 1e-6
