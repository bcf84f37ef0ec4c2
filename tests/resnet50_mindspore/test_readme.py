"""Test the commands of the app's README."""

from __future__ import annotations

import shlex
from typing import Any

from harness import ROOT
from samestep.sharding import GlobalBatches

APP = ROOT / "apps" / "resnet50_mindspore"


def test_the_readme_has_the_run_of_mindspores_tutorial(ascend_options: dict[str, Any]) -> None:
    readme = (APP / "README.md").read_text().replace("\\\n", "")
    (command,) = (line for line in readme.splitlines() if "--drop-remainder" in line and line.startswith("RANK_TABLE"))
    words = shlex.split(command)
    parsed = ascend_options["parse"](words[words.index("8") + 1 :])
    batches = GlobalBatches(50_000, parsed.global_batch_size, parsed.seed, 0, 8, drop_last=parsed.drop_remainder)
    assert (batches.steps_per_epoch, parsed.epochs, len(batches.indices(0))) == (195, 10, 32)
    assert (parsed.image_size, parsed.depth, parsed.lr, parsed.momentum) == (224, 50, 0.01, 0.9)
    ascend_options["check_start"](parsed, "cifar10", 0)
