"""Check a Horovod installation, also over several machines; scripts/verify_horovod.sh runs this.

    python apps/mnist_horovod/verify.py [N]     # N ranks, 2 by default; HOROVOD_HOSTS is heeded

Prints a table of checks; exit code 1 when any failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import horovod
import horovod.torch as hvd
import numpy as np
import torch
from model import build_model
from options import check_hosts
from samestep import UserError
from samestep.sharding import GlobalBatches
from train import train_step

SECONDS = 180  # for the ranks to start, check and end
FOUND = "FOUND "  # before each rank's line of JSON


def main() -> None:
    if "HOROVOD_RANK" in os.environ:
        print(FOUND + json.dumps(checks_of_a_rank()), flush=True)
        hvd.shutdown()
        return
    try:
        check_hosts(os.environ)
    except UserError as problem:
        sys.exit(f"error: {problem}")
    text = sys.argv[1] if len(sys.argv) > 1 else "2"
    if not re.fullmatch(r"[1-9]\d{0,4}", text, re.ASCII):
        sys.exit(f"error: N={text} is not a number of ranks: bash scripts/verify_horovod.sh 2")
    rows = [*checks_of_the_build(), *checks_over_ranks(int(text))]
    width = max(len(what) for what, _, _ in rows)
    for what, found, good in rows:
        print(f"{'ok    ' if good else 'FAILED'}  {what:{width}}  {found}")
    sys.exit(0 if all(good for _, _, good in rows) else 1)


def checks_of_the_build() -> list[tuple[str, str, bool]]:
    """What was checked, what was found, and whether it is good."""
    parts = {"gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": bool(hvd.nccl_built())}
    built = ", ".join(name for name, there in parts.items() if there)
    rows = [
        ("Horovod", f"{horovod.__version__} for torch {torch.__version__}", True),
        ("built with", built or "neither gloo nor MPI", bool(parts["gloo"] or parts["MPI"])),
    ]
    if parts["MPI"]:
        rows.append(("MPI", *mpi_version()))
    if torch.cuda.is_available():
        rows.append(
            ("GPUs", f"{torch.cuda.device_count()}; gradients go by {'NCCL' if parts['NCCL'] else 'the CPU'}", True)
        )
    return rows


def mpi_version() -> tuple[str, bool]:
    try:
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"mpirun --version: {problem}", False
    return next(iter(said.splitlines()), "mpirun --version says nothing"), bool(said)


def checks_over_ranks(n: int) -> list[tuple[str, str, bool]]:
    """The checks that need ranks: this file again, under horovodrun."""
    hosts = ["-H", os.environ["HOROVOD_HOSTS"]] if os.environ.get("HOROVOD_HOSTS") else []
    command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(n), *hosts, "--disable-cache"]
    command += [sys.executable, os.path.abspath(__file__)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [(f"{n} ranks start", f"not ended after {SECONDS} s", False)]
    found = [json.loads(line.partition(FOUND)[2]) for line in ended.stdout.splitlines() if FOUND in line]
    if ended.returncode != 0 or len(found) != n:
        print(ended.stdout + ended.stderr, file=sys.stderr)
        return [(f"{n} ranks start", f"{len(found)} of them ended well; what they said is above", False)]
    found.sort(key=lambda one: int(one["rank"]))
    sizes, total = {one["size"] for one in found}, n * (n + 1) / 2
    return [
        ("hvd.rank()", ", ".join(str(one["rank"]) for one in found), [one["rank"] for one in found] == list(range(n))),
        ("hvd.size()", ", ".join(map(str, sorted(sizes))), sizes == {n}),
        ("all-reduce of 1 to N", f"{found[0]['sum']:g}, expected {total:g}", all(one["sum"] == total for one in found)),
        ("weights differ before the broadcast", "", n == 1 or any(one["differed"] for one in found)),
        ("weights are equal after the broadcast", "", all(one["equal_after_broadcast"] for one in found)),
        ("a training step changes the weights", "", all(one["changed"] for one in found)),
        ("weights are equal after a training step", "", all(one["equal_after_step"] for one in found)),
        ("batches are distinct", f"{found[0]['samples']} samples in all", all(one["distinct"] for one in found)),
    ]


def checks_of_a_rank() -> dict[str, Any]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum)
    model = build_model("net", 0.0, torch.float32, seed=rank)
    differed = not equal_on_all(weights(model))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = weights(model)
    equal_after_broadcast = equal_on_all(before)

    batches = GlobalBatches(1000, 16 * size + 1, 1, rank, size)
    indices = batches.indices(0)
    everyones = hvd.allgather(torch.from_numpy(indices)).numpy()  # parts of different sizes are welcome
    images = torch.from_numpy(np.random.default_rng(rank).random((len(indices), 1, 28, 28), np.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
    rows = batches.rows(0)
    train_step(model, optimizer, images, torch.from_numpy(indices % 10), rows)
    return {
        "rank": rank,
        "size": size,
        "sum": total.item(),
        "differed": differed,
        "equal_after_broadcast": equal_after_broadcast,
        "changed": not torch.equal(weights(model), before),
        "equal_after_step": equal_on_all(weights(model)),
        "samples": len(everyones),
        "distinct": len(np.unique(everyones)) == len(everyones) == batches.size(0),
    }


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def equal_on_all(values: torch.Tensor) -> bool:
    """Whether ``values`` [k] are bit for bit the same on every rank."""
    everyones = hvd.allgather(values.unsqueeze(0))
    return all(torch.equal(other, everyones[0]) for other in everyones)


if __name__ == "__main__":
    main()
