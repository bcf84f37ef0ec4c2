"""Test that ``--trace-every`` finds a flipped bit in a shard, although no other rank has a copy of the shard."""

from __future__ import annotations

import re
from pathlib import Path

from harness import Harness, faulty
from samestep import trace

STEPS = 9
OPTIONS = (
    *("--dataset=jargon-64k", "--layers=1", "--width=32", "--context=32", "--log-every=4", "--checkpoint-every=3"),
    *("--trace-every=1", f"--max-steps={STEPS}"),
)


def test_a_flipped_bit_in_one_shard_is_named_and_rolled_back_once(harness: Harness) -> None:
    """The bit flips after step 7. The restarted run has the weights and the trace of an undisturbed run."""
    whole = harness.train(2, *OPTIONS, run_dir=harness.folder / "whole")
    outcome = harness.run(2, *OPTIONS, **faulty({"rank": 1, "flip": 7}))
    result = harness.checked(outcome, 2)
    pattern = r"error: rank 1's shard of \S+ has changed since the update of step 7, which a flipped bit does: "
    assert any(re.match(pattern, line) for line in outcome.stderr.splitlines()), outcome
    assert (result["restarts"], result["resumed_from_step"]) == (1, 6)
    assert result["weights_sha256"] == whole["weights_sha256"]
    found = trace.read(harness.folder / "run")
    assert [*found] == [*range(1, STEPS + 1)]
    assert found == trace.read(harness.folder / "whole")


def test_digests_of_all_shards_are_those_of_the_whole_weights_at_any_mesh(harness: Harness) -> None:
    """Compare the digests of the initial weights, which have the same bits at any mesh."""
    found = []
    for mesh in ("1x1", "3x1", "1x2"):
        ranks = int(mesh[0]) * int(mesh[2])
        result = harness.train(ranks, *OPTIONS, "--max-steps=1", f"--mesh={mesh}", run_dir=harness.folder / mesh)
        found.append(trace.read(Path(result["run_dir"]))[1]["weights"])
    assert found[0] == found[1] == found[2]
    assert len({*found[0].values()}) > 5
