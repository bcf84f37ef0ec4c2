"""Resume a run of an earlier version. A copy of the app has no such run, so the copy lacks this file."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT, Harness, bare, losses, metrics
from samestep import checkpoint

STORED = Path(__file__).parent / "stored" / "version-0.1"
STORED_OPTIONS = ["--dataset=synthetic-cifar10", "--depth=18", "--image-size=16", "--freeze-bn", "--lr=1e-3"]
STORED_OPTIONS += ["--global-batch-size=8", "--log-every=1", "--checkpoint-every=2"]


def fill(run_dir: Path) -> dict[str, checkpoint.Arrays]:
    """Write random arrays and their digests into the stored checkpoint, which has only a layout. Return the arrays."""
    (folder,) = checkpoint.folders(run_dir)
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    random = np.random.default_rng(1)
    groups: dict[str, checkpoint.Arrays] = {}
    for group, layout in json.loads((STORED / "layout.json").read_text()).items():
        groups[group] = {}
        for name, (dtype, shape) in layout.items():
            values = random.standard_normal(shape, np.float32) * np.float32(1.0 if group == "optimizer" else 0.05)
            values = abs(values) + 1 if name.endswith("running_var") or group == "buffers" else values
            groups[group][name] = values if dtype == "F32" else np.array(7, np.int64)
        content = checkpoint.serialize(groups[group])
        (folder / f"{group}.safetensors").write_bytes(content)
        body["files"][f"{group}.safetensors"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    signed = {"manifest": body, "sha256": hashlib.sha256(canonical).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(signed))
    return groups


def test_a_run_of_version_0_1_resumes(harness: Harness) -> None:
    """Version 0.1 wrote ``stored/version-0.1/run`` with STORED_OPTIONS and --max-steps=2 on 1 rank.

    ``layout.json`` has the names, dtypes and shapes of the run's arrays. Momenta are large, so the step shows
    whether each momentum is restored to its parameter. The rank continues with its own running statistics, not with
    the average.
    """
    run_dir = harness.folder / "run"
    shutil.copytree(STORED / "run", run_dir)
    stored = fill(run_dir)
    command = [sys.executable, str(ROOT / "apps" / "resnet50_mindspore" / "train.py"), f"--run-dir={run_dir}"]
    outcome = bare(harness, [*command, *STORED_OPTIONS, "--max-steps=3"])  # msrun would import MindSpore twice
    result = harness.checked(outcome, 1)
    assert (result["resumed_from_step"], result["steps"]) == (2, 3)
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3]
    assert losses(run_dir)[:2] == losses(STORED / "run")
    found = checkpoint.load_weights(run_dir / "model.safetensors")
    saved = checkpoint.newest(run_dir, pytest.fail)
    assert saved
    assert saved.arrays("optimizer")["global_step"] == 3  # version 0.1 did not save it
    assert found.keys() == stored["model"].keys()
    statistics = [found[name].ravel() for name in found if "running" in name]
    assert np.array_equal(np.sort(np.concatenate(statistics)), np.sort(stored["buffers"]["each"][0]))
    assert all(found[name] == 7 for name in found if name.endswith("num_batches_tracked"))
    for name, momentum in stored["optimizer"].items():
        parameter = name.removesuffix(".momentum_buffer")
        change = (stored["model"][parameter] - found[parameter]) / 1e-3
        # If the momenta were unrelated, the ratio of the norms would be 1.3.
        assert np.linalg.norm(change - 0.9 * momentum) < 0.5 * np.linalg.norm(momentum), name
