"""Run tools/gpu_proof.sh in a short form on a CPU over gloo: rows pass, and fail for faulty programs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, Harness, bare

sys.path.insert(0, str(ROOT / "tools"))
from gpu_proof import kit, report, several
from gpu_proof.jobs import Proof, Row, Slots, last_errors
from gpu_proof.rows import entries

ROW_SECONDS = 300.0


@pytest.fixture
def row(harness: Harness) -> Row:
    proof = Proof(harness.folder, "cpu", True, None, None, ROW_SECONDS, time.monotonic() + ROW_SECONDS, Slots(2))
    return Row(proof, "a row")


def test_the_proof_passes_on_a_cpu(harness: Harness, tmp_path: Path) -> None:
    output = tmp_path / "proof.json"
    script = ["bash", str(ROOT / "tools" / "gpu_proof.sh"), "--device=cpu", "--quick", f"--output={output}"]
    outcome = harness.start_command(script, harness.folder).finish(limit=400)
    assert outcome.code == 0, outcome
    results = json.loads(output.read_text())
    assert {row["row"]: row["outcome"] for row in results["rows"]} == {
        entry.name: "passed" for entry in entries() if entry.quick
    }
    kinds = {row["row"].split()[0] for row in results["rows"]}
    assert kinds == {"all-reduce,", "bits", "killed", "same", "hang", "speed"}
    command = ["bash", str(ROOT / "tools" / "gpu_proof.sh"), f"--table={output}"]
    environ = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.count("| passed |") == len(results["rows"])
    assert shown.count("| not run |") == len(entries()) - len(results["rows"])


def test_without_a_gpu_it_is_one_line(harness: Harness) -> None:
    outcome = bare(harness, ["bash", str(ROOT / "tools" / "gpu_proof.sh")])
    problem = "error: --device cuda: torch finds no GPU here: use --device cpu, or another machine"
    assert (outcome.code, outcome.errors) == (2, [problem])


def test_a_rank_that_reseeds_dropout_by_its_rank_makes_same_step_fail(row: Row) -> None:
    with pytest.raises(RuntimeError, match="losses differ by "):
        several.same_step(row, "mnist_ddp", faults=[{"rank": 1, "step": 0, "kind": "reseed"}])


@pytest.mark.soak
def test_an_all_reduce_that_rank_1_skips_makes_hang_name_rank_1(row: Row) -> None:
    figures = several.hang(row, ranks=3, kind="skip")
    assert figures["others wait in"].startswith("all_reduce ")


@pytest.mark.soak
def test_the_kits_loop_has_the_same_losses_at_1_to_3_ranks_and_resumes_after_a_kill(row: Row) -> None:
    assert kit.kit(row)["largest difference"] <= kit.TOLERANCE


@pytest.mark.soak
def test_a_rank_that_waits_in_c_code_ends_soon_after_another_is_killed(row: Row) -> None:
    """NCCL waits in this way: a lost connection does not end the wait, but the launcher's signal does."""
    figures = several.killed(row, ranks=2, blocked=True)
    assert figures["by"] == "the launcher's signal"


@pytest.mark.soak
def test_stopped_passes_on_a_cpu(row: Row) -> None:
    assert several.stopped(row, ranks=2)["resumed from step"] >= several.QUICK_STEPS // 2 + 1


def test_halves_complete_one_file_and_another_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "proof.json"
    gpu = {"device": "GPU", "nccl": "2.28.9"}
    first = report.Results(path, gpu, "2026-01-01", keep=True)
    first.note([{"row": "bits mnist_ddp", "outcome": report.ENDED_FIRST, "seconds taken": 0.0}])
    first.note([{"row": "bits mnist_ddp", "outcome": "passed", "seconds taken": 1.0}])
    second = report.Results(path, gpu, "2026-01-02", keep=True)
    second.note([{"row": "losses mnist_ddp", "outcome": "failed: a | b", "seconds taken": 1.0}])
    results = json.loads(path.read_text())
    assert [row["row"] for row in results["rows"]] == ["bits mnist_ddp", "losses mnist_ddp"]
    names = ["bits mnist_ddp", "losses mnist_ddp", "hang mnist_ddp, 3 ranks"]
    assert report.summary(results, names) == "1 of 3 rows passed, 1 failed, 1 did not run"
    assert "| losses mnist_ddp | failed: a / b | 1.0 |  |" in report.table(results, names)
    assert report.several_ranks_passed(results)
    assert not report.several_ranks_passed({**results, "machine": {"device": "x86_64"}})
    with pytest.raises(SystemExit) as ended:
        report.Results(path, {"device": "another"}, "2026-01-02", keep=True)
    assert ended.value.code == 2
    assert "is of another machine" in capsys.readouterr().err


def test_a_row_fails_with_the_last_errors_of_its_logs() -> None:
    log = "2026-11-27T10:00:00 rank 0 on host\n2026-11-27T10:00:01 error: rank 0: it broke\n  File x\nafter\n"
    assert last_errors(log, 1) == ["2026-11-27T10:00:01 error: rank 0: it broke"]
    assert last_errors("a\nRuntimeError: b\nc", 2) == ["RuntimeError: b"]
    assert last_errors("a\nb\n", 1) == ["b"]
