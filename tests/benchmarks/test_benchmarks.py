"""Run each benchmark once with --quick, which ends within seconds. The results have no meaning."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator

import pytest
from harness import ROOT, Harness, Outcome, bare


def quick(harness: Harness, name: str, *options: str) -> Outcome:
    outcome = bare(harness, [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", *options])
    assert outcome.code == 0, outcome
    return outcome


@pytest.mark.soak  # tests/mnist_ddp/test_gpu_proof.py runs this benchmark for mnist_ddp
def test_the_benchmark_of_throughput_prints_a_row_and_its_speeds(harness: Harness) -> None:
    (harness.folder / "run").mkdir()
    # These values of --contestants need only the app's packages.
    contestants = "--contestants=textbook,app,limit,plain-limit,fused-limit"
    found_in = harness.folder / "found.json"
    outcome = quick(harness, "throughput", f"--apps={harness.app.name}", contestants, f"--json={found_in}")
    assert f"\n| {harness.app.name} | 2 | " in outcome.stdout
    (found,) = json.loads(found_in.read_text())["results"]
    assert {"textbook", "app", "limit"} <= set(found["speeds"])
    assert found["attempts"] == 1
    assert all(speed > 0 for speeds in found["speeds"].values() for speed in speeds)


@pytest.mark.core_only
def test_the_steadiest_attempt_is_shown_with_the_number_of_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # where the program finds its types of arguments
    script = runpy.run_path(str(ROOT / "benchmarks" / "throughput.py"))
    steady, wide, wider = ({"app": [100.0, 100.0], "limit": [100.0, fastest]} for fastest in (129.0, 140.0, 200.0))

    def tried(*attempts: dict[str, list[float]]) -> tuple[dict[str, list[float]], int]:
        found: Iterator[dict[str, list[float]]] = iter(attempts)
        shown: tuple[dict[str, list[float]], int] = script["steadiest"](lambda: next(found), 3)
        return shown

    assert tried(steady) == (steady, 1)
    assert tried(wide, steady, wider) == (steady, 2)
    assert tried(wider, wide, wider) == (wide, 3)


@pytest.mark.core_only
def test_a_missing_contestant_is_reported(harness: Harness) -> None:
    for options, message in (
        (["--contestants=app,best"], "error: --contestants best: choose from textbook, "),
        (["--apps=lenet_paddle", "--contestants=plain-limit"], "lenet_paddle has textbook, app, limit"),
    ):
        outcome = bare(harness, [sys.executable, str(ROOT / "benchmarks" / "throughput.py"), *options])
        assert (outcome.code, len(outcome.stderr.splitlines())) == (1, 1), outcome
        assert message in outcome.stderr


@pytest.mark.core_only
@pytest.mark.parametrize(("name", "option"), [("sharding", "--rounds=0"), ("throughput", "--ranks=1,x")])
def test_a_wrong_number_is_reported(harness: Harness, name: str, option: str) -> None:
    outcome = bare(harness, [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), option])
    assert (outcome.code, "Traceback" in outcome.stderr) == (2, False)
    assert "is not a whole number of at least 1" in outcome.stderr


@pytest.mark.core_only
@pytest.mark.soak  # the quick tests reduce in a fixed order (tests/mnist_ddp/test_gradient_tree.py)
def test_hooks_that_add_up_in_rank_order_have_ddps_gradients_and_bits_of_no_bucket(harness: Harness) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    outcome = bare(harness, [*launcher, str(ROOT / "benchmarks" / "ddp_step.py"), "--check"])
    assert outcome.code == 0, outcome
    assert "in rank order: equal bits, " in outcome.stdout


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [
        ("ddp_step", [], 12),
        ("step_cost", [], 5),
        ("step_cost", ["--virtual-ranks", "4"], 4),
        ("trace_cost", [], 5),
    ],
)
def test_the_benchmarks_of_a_step_print_all_variants(
    harness: Harness, name: str, options: list[str], rows: int
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    outcome = bare(harness, [*launcher, str(ROOT / "benchmarks" / f"{name}.py"), "--rounds=2", *options])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("\n|") >= rows


@pytest.mark.core_only
@pytest.mark.soak
@pytest.mark.parametrize("name", ["start_up", "recovery_time", "checkpoint", "sharding", "record_cost"])
def test_a_quick_benchmark_prints_its_table(harness: Harness, name: str) -> None:
    assert quick(harness, name).stdout.count("\n|") >= 3
