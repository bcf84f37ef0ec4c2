"""Test the commands of the app's README."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest
from harness import ROOT
from samestep.sharding import GlobalBatches

APP = ROOT / "apps" / "resnet50_mindspore"


def test_the_readme_has_the_run_of_mindspores_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = runpy.run_path(str(APP / "options.py"))
    (tmp_path / "davinci_manager").touch()
    monkeypatch.setitem(options["parse"].__globals__, "ASCEND_DRIVER", tmp_path / "davinci_manager")
    readme = (APP / "README.md").read_text().replace("\\\n", "")
    (command,) = (line for line in readme.splitlines() if "--drop-remainder" in line and line.startswith("RANK_TABLE"))
    words = shlex.split(command)
    parsed = options["parse"](words[words.index("8") + 1 :])
    batches = GlobalBatches(50_000, parsed.global_batch_size, parsed.seed, 0, 8, drop_last=parsed.drop_remainder)
    assert (batches.steps_per_epoch, parsed.epochs, len(batches.indices(0))) == (195, 10, 32)
    assert (parsed.image_size, parsed.depth, parsed.lr, parsed.momentum) == (224, 50, 0.01, 0.9)
    options["check_start"](parsed, "cifar10", 0)
