"""Test mnist_ddp: its models, one process, and a fresh machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, Harness, bare, losses, relative_difference, write_fashion
from samestep import checkpoint, run
from samestep.data import datasets
from samestep.env import processor
from samestep.sharding import GlobalBatches

TRAIN = str(ROOT / "apps" / "mnist_ddp" / "train.py")
SMALL = ["--dataset=mnist-5k", "--max-steps=6", "--log-every=1"]


def test_the_losses_are_those_of_a_plain_loop(harness: Harness) -> None:
    """Compare losses with a plain loop: torch's layers, contiguous tensors, one process and the mean loss.

    The last 30 steps use 3 ranks and a tutorial's dataset, transforms, DataLoader, backend and log format.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    options = ["--dataset=mnist-5k", "--dtype=float64", "--dropout=0", "--global-batch-size=125", "--log-every=1"]
    result = harness.train(1, *options, "--max-steps=0", run_dir=harness.folder / "initial")
    initial = checkpoint.load_weights(Path(result["run_dir"]) / "model.safetensors")
    assert sum(array.size for array in initial.values()) == 21_840
    torch.set_num_threads(1)
    data = datasets.load("mnist-5k", harness.folder)
    images = (torch.from_numpy(data.train_images).unsqueeze(1).double() / 255 - datasets.MEAN) / datasets.STD
    labels = torch.from_numpy(data.train_labels).long()
    layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(1, 10, 5), "conv2": nn.Conv2d(10, 20, 5)}
    layers |= {"fc1": nn.Linear(320, 50), "fc2": nn.Linear(50, 10)}
    model = nn.ModuleDict(layers).double()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in initial.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    batches = GlobalBatches(len(labels), 125, result["seed"])
    curve = []
    for step in range(100):
        chosen = torch.from_numpy(batches.indices(step))
        x = images[chosen].contiguous()
        for name in ("conv1", "conv2"):
            x = F.relu(F.max_pool2d(model[name](x), 2))
        loss = F.cross_entropy(model["fc2"](F.relu(model["fc1"](x.flatten(1)))), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    harness.train(2, *options, "--max-steps=70", "--epochs=3")  # tests/common compares other world sizes
    assert relative_difference(curve[:70], losses(harness.folder / "run")) < 1e-9

    seeds = ["--input=torchvision", "--backend=gloo", "--log-format=full"]
    outcome = harness.run(3, *options, "--max-steps=100", "--epochs=4", *seeds)
    assert harness.checked(outcome, 3)["backend"] == "gloo"
    assert relative_difference(curve, losses(harness.folder / "run")) < 1e-9
    assert f"3 ranks on {harness.device}: {processor()}, steps 70 to 100" in outcome.stdout.splitlines()[0]
    lines = (harness.folder / "run" / "log" / "rank-2.log").read_text().splitlines()
    place = rf"INFO\|\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\|{re.escape(run.__file__)}\|\d+\| "
    assert re.match(place + "rank 2 on ", lines[0])
    assert [line for line in lines if re.match(place + "epoch 3/4  step 96 ", line)]


@pytest.mark.soak  # the quick tests compare LeNet's losses with Paddle's (tests/conformance)
def test_one_process_by_plain_python_has_paddles_lenet(harness: Harness) -> None:
    result = harness.checked(bare(harness, [sys.executable, TRAIN, *SMALL, "--model=lenet"]), 1)
    weights = checkpoint.load_weights(Path(result["run_dir"]) / "model.safetensors")
    assert sum(array.size for array in weights.values()) == 61_610
    layers = ("features.0", "features.3", "fc.0", "fc.1", "fc.2")
    assert set(weights) == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


# --- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_fashion_mnist_is_evaluated_exactly(harness: Harness) -> None:
    write_fashion(harness.folder / "data" / "fashion-mnist")
    outcome = harness.run(3, "--dataset=fashion-mnist", "--max-steps=100", f"--data-dir={harness.folder / 'data'}")
    assert outcome.code == 0, outcome
    assert outcome.result["train_examples"] == 60_000
    assert outcome.result["test_examples"] == 10_000
    assert outcome.result["test_accuracy"] > 0.5


def test_a_corrupted_file_is_named(harness: Harness) -> None:
    folder = harness.folder / "data" / "fashion-mnist"
    write_fashion(folder)
    file = folder / "train-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-50])
    outcome = harness.run(2, "--dataset=fashion-mnist", f"--data-dir={harness.folder / 'data'}")
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1
    assert str(file) in outcome.stderr


# --- a fresh machine -----------------------------------------------------------------------------------------------


def test_a_clean_copy_sets_itself_up(harness: Harness) -> None:
    """Run the README's first command on a copy of the tracked files. Without PYTHON, it makes .venvs."""
    clone = harness.folder / "clone"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    command = ["bash", "scripts/run_mnist_ddp.sh", "1", *SMALL]
    environ = harness.environ()
    environ.pop("PYTHON")
    path = os.pathsep.join(
        part for part in environ["PATH"].split(os.pathsep) if Path(part) != Path(sys.executable).parent
    )
    outcome = harness.start_command(command, clone, clone, PYTHON="", PATH=path).finish(limit=600)
    harness.checked(outcome, 1)
    assert "first start" in outcome.stderr  # tests/launch has the next start, which finds the environment
