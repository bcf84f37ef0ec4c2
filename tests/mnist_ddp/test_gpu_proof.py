"""tools/gpu_proof.sh, which needs a GPU, in short on a CPU: all kinds of rows but the accuracy still work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness import ROOT, Harness, bare


def test_the_proof_passes_on_a_cpu(harness: Harness, tmp_path: Path) -> None:
    output = tmp_path / "proof.json"
    script = ["bash", str(ROOT / "tools" / "gpu_proof.sh"), "--device=cpu", "--quick", f"--output={output}"]
    outcome = harness.start_command(script, harness.folder).finish(limit=400)
    assert outcome.code == 0, outcome
    seen = json.loads(output.read_text())
    assert [row["outcome"] for row in seen["rows"]] == ["passed"] * 3
    assert {row["row"].split()[0] for row in seen["rows"]} == {"losses", "recovery", "speed"}
    command = [sys.executable, str(ROOT / "tools" / "gpu_proof.py"), f"--table={output}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.count("| passed |") == 3


def test_without_a_gpu_it_is_one_line(harness: Harness) -> None:
    outcome = bare(harness, ["bash", str(ROOT / "tools" / "gpu_proof.sh")])
    problem = "error: --device cuda: torch finds no GPU here: use --device cpu, or another machine"
    assert (outcome.code, outcome.errors) == (2, [problem])
