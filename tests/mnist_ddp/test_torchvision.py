"""Test --input torchvision, and compare the reader of MNIST and the layouts of ResNets with torchvision."""

from __future__ import annotations

import gzip
import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Harness, losses, options_of, relative_difference
from layouts import TORCHVISION, digest
from samestep import ConfigError
from samestep.data import datasets


def test_torchvisions_reader_gives_the_same_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "loops")
    importlib.import_module("common").torchvision_that_imports()
    from torchvision.datasets import MNIST

    ours = datasets.load("mnist-5k", tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in datasets.resolve("mnist-5k", tmp_path).folder.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    for train, images, labels in (
        (True, ours.train_images, ours.train_labels),
        (False, ours.test_images, ours.test_labels),
    ):
        reference: Any = MNIST(str(tmp_path), train=train)
        assert np.array_equal(reference.data.numpy(), images)
        assert np.array_equal(reference.targets.numpy(), labels)


def test_torchvisions_resnets_hold_what_resnet50_mindspore_gives_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare recorded digests with torchvision. tests/resnet50_mindspore compares them with the app's models."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "loops")
    importlib.import_module("common").torchvision_that_imports()
    import torch
    from torchvision import models

    for depth, wanted in TORCHVISION.items():
        with torch.device("meta"):
            state = getattr(models, f"resnet{depth}")(num_classes=10).state_dict()
        layout = {name: (tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in state.items()}
        assert digest(layout) == wanted


@pytest.mark.soak  # the quick tests compare a resume on 3 ranks with a plain loop (test_mnist_ddp.py)
@pytest.mark.parametrize("options", [(), ("--virtual-ranks=8",), ("--dtype=float32",)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_both_inputs_have_the_same_losses(harness: Harness, n: int, options: tuple[str, ...]) -> None:
    """Compare all losses, with dropout. The last batch of an epoch has one sample."""
    common = ["--dataset=mnist-5k", "--dtype=float64", "--global-batch-size=129", "--max-steps=50", "--log-every=1"]
    for source in ("memory", "torchvision"):
        harness.train(n, *common, *options, f"--input={source}", run_dir=harness.folder / source)
    memory, torchvision = (losses(harness.folder / source) for source in ("memory", "torchvision"))
    assert len(memory) == 50
    assert relative_difference(memory, torchvision) < (1e-5 if "--dtype=float32" in options else 1e-9)


def test_without_torchvision_a_fresh_machine_gets_one_line(harness: Harness) -> None:
    """The launch script reports the error before an installation, because the lock file has no torchvision."""
    script = str(ROOT / "scripts" / "run_mnist_ddp.sh")
    outcome = harness.start_command(["bash", script, "2", "--input=torchvision"], harness.folder, PYTHON="").finish(20)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert len(outcome.stderr.splitlines()) == 1
    assert re.search(r"name a Python with torch and torchvision==\S+ by PYTHON=$", outcome.stderr.strip())


def test_nccl_without_gpus_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage detects the mistake before an installation, from the options or from the missing driver."""
    options = options_of("mnist_ddp")
    with pytest.raises(ConfigError, match="--backend nccl needs GPUs"):
        options.parse(["--backend=nccl", "--device=cpu"])
    parsed = options.parse(["--backend=nccl"])
    monkeypatch.setenv("PYTHON", "/of/the/user")  # the user's Python may have CUDA, so the ranks check
    options.check_ranks(parsed, 2)
    monkeypatch.delenv("PYTHON")
    for found in (None, "/usr/bin/nvidia-smi"):
        monkeypatch.setattr(options.shutil, "which", lambda _, found=found: found)
        monkeypatch.setattr(options.os.path, "exists", lambda _: False)
        if found:
            options.check_ranks(parsed, 2)
        else:
            with pytest.raises(ConfigError, match="no NVIDIA driver"):
                options.check_ranks(parsed, 2)
