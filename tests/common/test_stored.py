"""Resume runs of earlier versions, because the checkpoints of users must stay valid.

The folder ``tests/<app>/stored/version-<v>/`` exists for some apps, and contains:

* ``options``: the options of both runs, one per line.
* ``run/`` or ``run.tar.xz``: a run dir of --max-steps=2, without logs and final weights.
* ``longer/metrics.jsonl``: the losses of a run of --max-steps=6.
* ``longer/result.json``: the result of that run, since version 0.2. On the same processor, a resume of ``run`` on 1
  rank with OMP_NUM_THREADS=1 ends with the same weights_sha256. Other processors round differently, so no test
  compares the digest.

Versions before 0.3 drew other random numbers for dropout. Such a run resumes with a warning, and only the losses before
the resume equal the stored losses.

A run in ``run.tar.xz`` began with weights whose channels repeat, because such weights compress to a small file.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, losses, metrics, relative_difference

# Another processor or world size rounds differently.
TOLERANCE = 1e-6
OTHER_MASKS = 0.1  # the largest relative difference of losses if only the dropout masks differ


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the tests with each stored version of the app."""
    stored = ROOT / "tests" / metafunc.config.getoption("--app") / "stored"
    metafunc.parametrize("version", sorted(path.parent.name for path in stored.glob("*/options")))


def restore(folder: Path, target: Path) -> Path:
    """Copy the stored run dir into ``target``, and return the path of the copy."""
    if (archive := folder / "run.tar.xz").exists():
        with tarfile.open(archive) as content:
            content.extractall(target, filter="data")
        return target / "run"
    return shutil.copytree(folder / "run", target / "run")


def options_of_run(run_dir: Path) -> dict[str, Any]:
    """Return the options in the header of metrics.jsonl."""
    header = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    options: dict[str, Any] = header["options"]
    return options


@pytest.mark.stored_run
@pytest.mark.weights
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_stored_run_resumes_with_the_same_losses(harness: Harness, version: str, n: int) -> None:
    folder = ROOT / "tests" / harness.app.name / "stored" / version
    run_dir = restore(folder, harness.folder)
    options = (folder / "options").read_text().split()
    result = harness.train(n, *options, "--max-steps=6", run_dir=run_dir)
    assert (result["resumed_from_step"], result["steps"]) == (2, 6)
    expected = folder / "longer"
    assert len(losses(expected)) == len(losses(run_dir)) == 6
    has_dropout = options_of_run(run_dir).get("dropout", 0) > 0
    log = (run_dir / "log" / "rank-0.log").read_text()
    assert log.count("random numbers of dropout differ from samestep 0.2's") == has_dropout
    comparable = 2 if has_dropout else 6
    pairs = losses(expected)[:comparable], losses(run_dir)[:comparable]
    assert relative_difference(*pairs) < max(TOLERANCE, harness.app.tolerance)
    if has_dropout:  # the resumed run has the same weights and momentum, but other dropout masks
        assert relative_difference(losses(expected), losses(run_dir)) < OTHER_MASKS
    accuracies, expected_accuracies = ([line.get("accuracy") for line in metrics(path)] for path in (run_dir, expected))
    assert accuracies == expected_accuracies
