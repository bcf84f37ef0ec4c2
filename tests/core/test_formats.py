"""Test that a run resumes from each checkpoint in stored/, which earlier versions wrote.

`stored/format-<n>` is a run dir of the toy in threads.py: 2 ranks, stopped after step 6 of 12 by --max-steps. Only its
checkpoint is kept. No folder is ever rewritten; a version that changes the format adds a folder. The stored checkpoints
lack later options. If a new option of all apps must stay the same at a resume, the test therefore fails.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from samestep import ConfigError, checkpoint, log
from threads import job, put

STORED = Path(__file__).parent / "stored"  # a folder "data" would hide the apps' data.py from mypy
STEP = 6


def no_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def folder_of(run_dir: Path) -> Path:
    return checkpoint.folder_of(run_dir, STEP)


@pytest.mark.parametrize("stored", sorted(STORED.glob("format-*")), ids=lambda path: path.name)
def test_a_run_resumes_from_a_checkpoint_of_an_earlier_version(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checkpoint.newest(stored, no_warning)
    assert found is not None
    assert (found.app, found.step, sorted(found.contents)) == ("toy", STEP, ["model", "optimizer"])
    assert found.arrays("model")["updates"] == STEP
    assert found.arrays("model")["w"].dtype == np.float32

    monkeypatch.setattr(log, "start", lambda run_dir, rank, quiet, crashes: (run_dir / "log").mkdir(exist_ok=True))
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "data")
    shutil.copytree(stored, tmp_path / "resumed")
    results = {}
    for name in ("resumed", "undisturbed"):
        for rank in job(2, ["--run-dir", str(tmp_path / name), "--quiet"]):
            assert rank.done.last_step == 12
        results[name] = json.loads((tmp_path / name / "result.json").read_text())
    assert (results["resumed"]["resumed_from_step"], results["undisturbed"]["resumed_from_step"]) == (STEP, None)
    for same in ("weights_sha256", "train_loss", "test_loss"):
        assert results["resumed"][same] == results["undisturbed"][same]


def test_the_format_that_is_written_now_is_among_those_kept(tmp_path: Path) -> None:
    kept = {path.name for path in STORED.glob("format-*")}
    assert kept == {f"format-{number}" for number in range(1, checkpoint.FORMAT + 1)}
    for path in STORED.glob("format-*"):
        manifest = json.loads((folder_of(path) / "manifest.json").read_text())
        assert manifest["manifest"]["format"] == int(path.name.rpartition("-")[2])


def test_of_a_format_that_is_not_known_one_line_says_how_and_nothing_is_lost(tmp_path: Path) -> None:
    """A later version may have written the newest checkpoint, so the run does not resume from an older checkpoint."""
    unknown = checkpoint.FORMAT + 1
    run_dir = tmp_path / "run"
    shutil.copytree(STORED / f"format-{checkpoint.FORMAT}", run_dir)
    newer = shutil.copytree(folder_of(run_dir), checkpoint.folder_of(run_dir, STEP + 1))
    body = {**json.loads((newer / "manifest.json").read_text())["manifest"], "format": unknown, "step": STEP + 1}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    sealed = {"manifest": body, "sha256": hashlib.sha256(canonical).hexdigest()}
    (newer / "manifest.json").write_text(json.dumps(sealed))
    for verify in (True, False):  # rank 0 verifies the arrays; the launch script does not
        with pytest.raises(ConfigError) as mistake:
            checkpoint.newest(run_dir, no_warning, verify)
        message = rf"format {unknown}, this program reads {checkpoint.FORMAT}: use that version, or start a new run "
        assert re.search(message, str(mistake.value))
    assert newer.exists()
