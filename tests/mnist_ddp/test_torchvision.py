"""torchvision as a witness, in the one environment that has it for this: its reader of MNIST, its ResNets' layouts."""

from __future__ import annotations

import gzip
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT
from layouts import TORCHVISION, digest
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
    """Here, where torchvision is; the other half is in tests/resnet50_mindspore."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "loops")
    importlib.import_module("common").torchvision_that_imports()
    import torch
    from torchvision import models

    for depth, wanted in TORCHVISION.items():
        with torch.device("meta"):
            state = getattr(models, f"resnet{depth}")(num_classes=10).state_dict()
        layout = {name: (tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in state.items()}
        assert digest(layout) == wanted
