"""Define the rows of gpt_fsdp, which shards its model over the ranks, and of mnist_elastic, whose ranks may rejoin.

A row's function returns figures for the table of results, and raises an exception if the row fails.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_proof.jobs import (
    NotRunError,
    Row,
    check_equal,
    copy_run,
    largest_difference,
    losses,
    result,
)
from gpu_proof.several import MNIST, TOLERANCE, steps_of

GPT = ["--dataset=jargon-64k", "--layers=2", "--width=64", "--epochs=1000", "--dtype=float64", "--log-every=1"]
MESHES = {"1x1": 1, "2x1": 2, "1x2": 2, "3x1": 3}
STEPS = 10
QUICK_STEPS = 4


def meshes(row: Row) -> dict[str, Any]:
    """Compare the losses of gpt_fsdp in float64 at four meshes of data-parallel and tensor-parallel ranks."""
    steps = QUICK_STEPS if row.proof.quick else STEPS
    options = [*GPT, f"--max-steps={steps}", "--checkpoint-every=0"]
    calls = [partial(row.run, "gpt_fsdp", ranks, [*options, f"--mesh={mesh}"]) for mesh, ranks in MESHES.items()]
    curves = dict(zip(MESHES, map(losses, row.together(calls))))
    difference = largest_difference(list(curves.values()), steps)
    if not difference <= TOLERANCE:
        raise RuntimeError(f"losses differ by {difference:.1e}: {curves}")
    return {"largest difference": difference, "tolerance": TOLERANCE, "steps": steps, "meshes": ", ".join(MESHES)}


def reshard(row: Row) -> dict[str, Any]:
    """Load a checkpoint of mesh 2x1 at 1x1, and check the weights. Resume at 2x1, and check the final weights."""
    half = STEPS // 2
    steps = STEPS

    def train(ranks: int, last: int, run_dir: Path | None = None) -> Path:
        options = [*GPT, f"--max-steps={last}", f"--mesh={ranks}x1"]
        return row.run("gpt_fsdp", ranks, options, run_dir=run_dir)

    def interrupted() -> dict[str, str]:
        first = train(2, half)
        saved = result(first)["weights_sha256"]
        copy = copy_run(first, row.proof.new_folder())
        same, other = row.together([partial(train, 2, steps, first), partial(train, 1, half, copy)])
        hashes = {"saved at 2x1": saved, "read at 1x1": result(other)["weights_sha256"]}
        check_equal("weights", hashes)
        return {"resumed at 2x1": result(same)["weights_sha256"]}

    whole, resumed = row.together([lambda: {"undisturbed": result(train(2, steps))["weights_sha256"]}, interrupted])
    check_equal("weights", {**whole, **resumed})
    return {"weights": whole["undisturbed"][:12], "steps": steps}


def elastic(row: Row) -> dict[str, Any]:
    """Kill one of three ranks, wait until it rejoins, and compare the final weights with the weights of one rank."""
    if importlib.util.find_spec("torchft") is None:
        raise NotRunError("torchft is missing")
    steps = steps_of(row, "mnist_ddp")
    options = [*MNIST, "--virtual-ranks=4", f"--max-steps={steps}", f"--checkpoint-every={steps // 4}"]
    fault = {"rank": 2, "step": steps // 2, "kind": "kill"}  # the launcher is rank 0

    def disturbed() -> Path:
        with row.start("mnist_elastic", 3, [*options, "--min-ranks=3"], faults=[fault]) as job:
            job.wait(0)
            return job.run_dir

    calls: list[Callable[[], Path]] = [partial(row.run, "mnist_elastic", 1, options), disturbed]
    whole, run_dir = row.together(calls)
    found = result(run_dir)
    hashes = {"one rank": result(whole)["weights_sha256"], "three, one killed": found["weights_sha256"]}
    check_equal("weights", hashes)
    if (found["rejoins"], found["restarts"]) != (1, 0):
        raise RuntimeError(
            f"{found['rejoins']} ranks came back, and the job was started again {found['restarts']} times"
        )
    transport = "gloo on CUDA tensors" if row.proof.device == "cuda" else "gloo"
    return {"weights": found["weights_sha256"][:12], "transport": transport, "device": found["device"]}
