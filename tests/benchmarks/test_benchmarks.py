"""Each benchmark still runs: once, for seconds, with --quick. What it measures then is of no meaning."""

from __future__ import annotations

import json
import sys

import pytest
from harness import ROOT, Harness, Outcome, bare


def quick(harness: Harness, name: str, *options: str) -> Outcome:
    outcome = bare(harness, [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", *options])
    assert outcome.code == 0, outcome
    return outcome


@pytest.mark.once  # the loops of the other apps' frameworks are for the soak
def test_throughput(harness: Harness) -> None:
    (harness.folder / "run").mkdir()
    outcome = quick(harness, "throughput", f"--apps={harness.app.name}", f"--json={harness.folder / 'found.json'}")
    assert f"\n| {harness.app.name} | 2 | " in outcome.stdout
    (found,) = json.loads((harness.folder / "found.json").read_text())["results"]
    assert {"textbook", "app", "limit"} <= set(found["speeds"])
    assert all(speed > 0 for speeds in found["speeds"].values() for speed in speeds)


@pytest.mark.once
@pytest.mark.parametrize(("name", "rows"), [("ddp_step", 9), ("step_cost", 5)])
def test_the_variants_of_a_step(harness: Harness, name: str, rows: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    outcome = bare(harness, [*launcher, str(ROOT / "benchmarks" / f"{name}.py"), "--rounds=2"])
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("\n|") >= rows


@pytest.mark.once
@pytest.mark.parametrize("name", ["start_up", "checkpoint", "sharding"])
def test_it_prints_its_table(harness: Harness, name: str) -> None:
    assert quick(harness, name).stdout.count("\n|") >= 3
