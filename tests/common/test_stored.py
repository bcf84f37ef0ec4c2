"""Resume a run of an earlier version: checkpoints that people have must stay good.

``tests/<app>/stored/version-<v>/`` has, for the apps that store one:

* ``options``: the options of both runs, one a line.
* ``run/`` or ``run.tar.xz``: a run dir of --max-steps=2, without logs and final weights.
* ``longer/metrics.jsonl``: the losses of a run of --max-steps=6.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from harness import ROOT, Harness, losses, relative_difference

# A processor or a number of ranks of its own rounds in another way.
TOLERANCE = 1e-6


def restore(folder: Path, target: Path) -> Path:
    """Copy the stored run dir into ``target``; return where it is."""
    if (archive := folder / "run.tar.xz").exists():
        with tarfile.open(archive) as content:
            content.extractall(target, filter="data")
        return target / "run"
    return shutil.copytree(folder / "run", target / "run")


@pytest.mark.stored_run
@pytest.mark.weights
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_run_of_version_0_1_resumes_with_the_same_losses(harness: Harness, n: int) -> None:
    folder = ROOT / "tests" / harness.app.name / "stored" / "version-0.1"
    run_dir = restore(folder, harness.folder)
    options = (folder / "options").read_text().split()
    result = harness.train(n, *options, "--max-steps=6", run_dir=run_dir)
    assert (result["resumed_from_step"], result["steps"]) == (2, 6)
    expected = losses(folder / "longer")
    assert len(expected) == 6
    assert relative_difference(expected, losses(run_dir)) < TOLERANCE
