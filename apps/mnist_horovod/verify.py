"""Check a Horovod installation on one or several machines. scripts/verify_horovod.sh runs this program.

    python apps/mnist_horovod/verify.py [N] [--transport mpi] [--device cuda]     # N ranks, 2 by default

Each rank computes one training step of the app, on its own device and with the app's data. HOROVOD_HOSTS selects the
machines. The program prints a table of checks. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import SUPPRESS
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import distributed
import horovod
import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from data import load
from model import build_model
from options import check_hosts
from samestep import ConfigError, env
from samestep.options import Options, Parser
from samestep.recovery.watchdog import Watchdog
from samestep.sharding import GlobalBatches
from torch.nn.utils import parameters_to_vector

TIMEOUT = 180  # time limit of all ranks, in seconds
REPORT = "FOUND "  # prefix of each rank's line of JSON
DATASET = "mnist-5k"  # this dataset needs no download

Row = tuple[str, str, bool]  # name of the check, result, whether the check passed


def main() -> None:
    parser = Parser(prog="verify_horovod.sh", description="Check a Horovod installation over N ranks.")
    parser.add_argument("n", nargs="?", default="2", metavar="N", help="number of ranks (default: %(default)s)")
    parser.add_argument("--transport", choices=("gloo", "mpi"), default="gloo", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    parser.add_argument("--rank", action="store_true", help=SUPPRESS)  # each rank gets this option
    try:
        options = parser.parse(sys.argv[1:])
        if not re.fullmatch(r"[1-9]\d{0,4}", options.n, re.ASCII):
            raise ConfigError(f"N={options.n} is not a number of ranks: bash scripts/verify_horovod.sh 2")
        check_hosts(os.environ)
        if options.rank:
            report = json.dumps(check_rank(options.transport, options.device))
            sys.stdout.write(f"{REPORT}{report}\n")  # one write, so that the lines of several ranks do not mix
            sys.stdout.flush()
            hvd.shutdown()
            return
    except ConfigError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    # Horovod finds mpirun by PATH. As in the launch script, the environment's bin is first.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    rows = [*check_build(options.transport), *check_ranks(options)]
    width = max(len(name) for name, _, _ in rows)
    failed = False
    for name, result, good in rows:
        verdict = "ok    " if good else "FAILED"
        print(f"{verdict}  {name:{width}}  {result}")
        failed = failed or not good
    sys.exit(int(failed))


def check_build(transport: str) -> list[Row]:
    """Return the checks of the Horovod build, which need no ranks."""
    parts = {
        "gloo": hvd.gloo_built(),
        "MPI": hvd.mpi_built(),
        "NCCL": hvd.nccl_built(),
        "CUDA": hvd.cuda_built(),
    }
    built = ", ".join(name for name, is_built in parts.items() if is_built)
    has_transport = parts["gloo"] if transport == "gloo" else parts["MPI"]
    rows = [
        ("Horovod", f"{horovod.__version__} for torch {torch.__version__}", True),
        ("built with", built or "nothing", bool(has_transport)),
    ]
    if parts["MPI"]:
        version, works = mpi_version()
        rows.append(("MPI", version, works))
    gpus = torch.cuda.device_count()
    if gpus:
        carrier = "NCCL" if parts["NCCL"] else "the CPU"
        rows.append(("GPUs", f"{gpus}; gradients go by {carrier}", True))
    return rows


def mpi_version() -> tuple[str, bool]:
    """Return the first two lines of ``mpirun --version``, or an error message, and whether mpirun works."""
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"mpirun --version: {problem}", False
    lines = done.stdout.splitlines()
    words = " ".join(lines[:2]).split()
    if not words:
        return "mpirun --version prints nothing", False
    return " ".join(words), done.returncode == 0


def check_ranks(options: Options) -> list[Row]:
    """Run this program on all ranks by horovodrun, and return the checks of the ranks' reports."""
    n = int(options.n)
    command = [sys.executable, "-m", "horovod.runner.launch", f"--{options.transport}", "-np", str(n)]
    hosts = os.environ.get("HOROVOD_HOSTS")
    if hosts:
        command += ["-H", hosts]
    command += ["--disable-cache", sys.executable, os.path.abspath(__file__), "--rank"]
    command += [f"--transport={options.transport}", f"--device={options.device}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return [(f"{n} ranks start", f"still running after {TIMEOUT} s", False)]
    ranks = []
    for line in done.stdout.splitlines():
        _, found, report = line.partition(REPORT)
        if found:
            ranks.append(json.loads(report))
    if done.returncode != 0 or len(ranks) != n:
        print(done.stdout + done.stderr, file=sys.stderr)
        return [(f"{n} ranks start", f"{len(ranks)} of them succeeded; their output is above", False)]
    ranks.sort(key=lambda rank: int(rank["rank"]))
    return [*place_rows(ranks, options.transport), *step_rows(ranks), *batch_rows(ranks)]


def place_rows(ranks: list[dict[str, Any]], transport: str) -> list[Row]:
    """Return the checks of the transport, the ranks' numbers, the world size, and the sum of one all-reduce."""
    n = len(ranks)
    backends = {rank["backend"] for rank in ranks}
    carriers = sorted({f"{rank['backend']} on {rank['device']}" for rank in ranks})
    numbers = [rank["rank"] for rank in ranks]
    sizes = {rank["size"] for rank in ranks}
    total = n * (n + 1) / 2
    sums = {rank["sum"] for rank in ranks}
    return [
        ("gradients go by", ", ".join(carriers), backends <= {transport, "nccl"}),
        ("hvd.rank()", ", ".join(map(str, numbers)), numbers == list(range(n))),
        ("hvd.size()", ", ".join(map(str, sorted(sizes))), sizes == {n}),
        ("all-reduce of 1 to N", f"{ranks[0]['sum']:g}, expected {total:g}", sums == {total}),
    ]


def step_rows(ranks: list[dict[str, Any]]) -> list[Row]:
    """Return the checks of weights before and after a broadcast, and of weights and optimizer state after a step."""
    differed = len(ranks) == 1 or any(rank["differed"] for rank in ranks)
    rows = [("weights differ before the broadcast", "", differed)]
    for name, title in (
        ("equal_after_broadcast", "weights are equal after the broadcast"),
        ("changed", "a training step changes the weights"),
        ("equal_after_step", "weights are equal after a training step"),
        ("equal_state", "the optimizer's state is equal after it"),
    ):
        rows.append((title, "", all(rank[name] for rank in ranks)))
    return rows


def batch_rows(ranks: list[dict[str, Any]]) -> list[Row]:
    """Return a row with the batch of each rank, and the check that no two batches share an image."""
    rows = [(f"batch of rank {rank['rank']}", shown(rank["batch"]), True) for rank in ranks]
    images = f"{ranks[0]['samples']} images of {DATASET} in total"
    rows.append(("batches are distinct", images, all(rank["distinct"] for rank in ranks)))
    return rows


def shown(batch: list[int]) -> str:
    """Return the description of a batch, such as "16 images: 4, 31, 7, ..."."""
    first = list(map(str, batch[:3]))
    if len(batch) > 3:
        first.append("...")
    return f"{len(batch)} images: {', '.join(first)}"


def check_rank(transport: str, requested_device: str) -> dict[str, Any]:
    """Run an all-reduce, a broadcast and one training step, and return this rank's values for `check_ranks`."""
    world = env.detect()
    Watchdog().start(world, Options(timeout=TIMEOUT))  # ends this rank if its launcher ends
    device = distributed.choose_device(requested_device, world)
    distributed.rendezvous(world, device, TIMEOUT, transport)
    rank = hvd.rank()
    size = hvd.size()
    total = hvd.allreduce(torch.tensor([rank + 1.0], device=device), op=hvd.Sum)
    model = build_model("net", 0.0, torch.float32, seed=rank).to(device)
    differed = not are_equal(model.parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = parameters_to_vector(model.parameters()).detach()
    equal_after_broadcast = are_equal(model.parameters())

    train_set, _ = load(DATASET, Path("data"), device, torch.float32)
    batches = GlobalBatches(len(train_set.labels), 16 * size + 1, seed=1, rank=rank, world_size=size)
    indices = batches.indices(0)
    gathered = hvd.allgather(torch.from_numpy(indices)).numpy()  # shards may differ in size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = train_set.batch(indices)
    loss_sum = F.nll_loss(model(images), labels, reduction="sum")
    (loss_sum / batches.size(0)).backward()
    options = Options(gradients="group", compression="none")
    with distributed.all_reduce_gradients(model, optimizer, options):
        optimizer.step()
    after = parameters_to_vector(model.parameters())
    return {
        "rank": rank,
        "size": size,
        "device": str(device),
        "backend": distributed.backend(device),
        "sum": total.item(),
        "differed": differed,
        "equal_after_broadcast": equal_after_broadcast,
        "changed": not torch.equal(after, before),
        "equal_after_step": are_equal(model.parameters()),
        "equal_state": are_equal(state["momentum_buffer"] for state in optimizer.state.values()),
        "batch": indices.tolist(),
        "samples": len(gathered),
        "distinct": len(np.unique(gathered)) == len(gathered) == batches.size(0),
    }


def are_equal(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether ``tensors`` have equal values on all ranks."""
    own = parameters_to_vector(tensors).detach()
    gathered = hvd.allgather(own.unsqueeze(0))
    return all(torch.equal(other, gathered[0]) for other in gathered)


if __name__ == "__main__":
    main()
