"""Check a Horovod installation, also over several machines; scripts/verify_horovod.sh runs this.

    python apps/mnist_horovod/verify.py [N] [--transport mpi] [--device cuda]     # N ranks, 2 by default

Each rank takes one step of the app's training, on its own device and with the app's own data. HOROVOD_HOSTS chooses the
machines. The output is a table of checks; the exit code is 1 if any of them failed.
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

TIMEOUT = 180  # seconds for the ranks to start, check and end
REPORT = "FOUND "  # prefix of each rank's line of JSON
DATASET = "mnist-5k"  # which needs no download

Row = tuple[str, str, bool]  # what was checked, the result, whether it is good


def main() -> None:
    parser = Parser(prog="verify_horovod.sh", description="Check a Horovod installation over N ranks.")
    parser.add_argument("n", nargs="?", default="2", metavar="N", help="number of ranks (default: %(default)s)")
    parser.add_argument("--transport", choices=("gloo", "mpi"), default="gloo", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    parser.add_argument("--rank", action="store_true", help=SUPPRESS)  # the started ranks get it
    try:
        options = parser.parse(sys.argv[1:])
        if not re.fullmatch(r"[1-9]\d{0,4}", options.n, re.ASCII):
            raise ConfigError(f"N={options.n} is not a number of ranks: bash scripts/verify_horovod.sh 2")
        check_hosts(os.environ)
        if options.rank:
            # One write, so that the lines of several ranks do not mix.
            sys.stdout.write(REPORT + json.dumps(check_rank(options.transport, options.device)) + "\n")
            sys.stdout.flush()
            hvd.shutdown()
            return
    except ConfigError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    # Horovod finds mpirun by PATH: the environment's own comes first, as in the launch script.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    rows = [*check_build(options.transport), *check_ranks(options)]
    width = max(len(name) for name, _, _ in rows)
    for name, result, good in rows:
        print(f"{'ok    ' if good else 'FAILED'}  {name:{width}}  {result}")
    sys.exit(0 if all(good for _, _, good in rows) else 1)


def check_build(transport: str) -> list[Row]:
    """Return the checks of Horovod itself, which need no ranks."""
    parts = {"gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built(), "CUDA": hvd.cuda_built()}
    built = ", ".join(name for name, is_built in parts.items() if is_built)
    rows = [
        ("Horovod", f"{horovod.__version__} for torch {torch.__version__}", True),
        ("built with", built or "nothing", bool(parts["gloo" if transport == "gloo" else "MPI"])),
    ]
    if parts["MPI"]:
        rows.append(("MPI", *mpi_version()))
    if gpus := torch.cuda.device_count():
        rows.append(("GPUs", f"{gpus}; gradients go by {'NCCL' if parts['NCCL'] else 'the CPU'}", True))
    return rows


def mpi_version() -> tuple[str, bool]:
    """Return the first two lines of ``mpirun --version``, and whether it works."""
    try:
        text = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"mpirun --version: {problem}", False
    return " ".join(" ".join(text.splitlines()[:2]).split()) or "mpirun --version prints nothing", bool(text)


def check_ranks(options: Options) -> list[Row]:
    """Return the checks that need ranks: horovodrun starts this file on each of them."""
    n, transport = int(options.n), options.transport
    hosts = ["-H", os.environ["HOROVOD_HOSTS"]] if os.environ.get("HOROVOD_HOSTS") else []
    command = [sys.executable, "-m", "horovod.runner.launch", f"--{transport}", "-np", str(n), *hosts]
    command += ["--disable-cache", sys.executable, os.path.abspath(__file__), "--rank"]
    command += [f"--transport={transport}", f"--device={options.device}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return [(f"{n} ranks start", f"still running after {TIMEOUT} s", False)]
    ranks = [json.loads(line.partition(REPORT)[2]) for line in done.stdout.splitlines() if REPORT in line]
    if done.returncode != 0 or len(ranks) != n:
        print(done.stdout + done.stderr, file=sys.stderr)
        return [(f"{n} ranks start", f"{len(ranks)} of them succeeded; their output is above", False)]
    ranks.sort(key=lambda rank: int(rank["rank"]))
    numbers, sizes, total = [rank["rank"] for rank in ranks], {rank["size"] for rank in ranks}, n * (n + 1) / 2
    backends = {f"{rank['backend']} on {rank['device']}" for rank in ranks}
    images = f"{ranks[0]['samples']} images of {DATASET} in total"
    batches = [(f"batch of rank {rank['rank']}", shown(rank["batch"]), True) for rank in ranks]
    return [
        ("gradients go by", ", ".join(sorted(backends)), all(rank["backend"] in (transport, "nccl") for rank in ranks)),
        ("hvd.rank()", ", ".join(map(str, numbers)), numbers == list(range(n))),
        ("hvd.size()", ", ".join(map(str, sorted(sizes))), sizes == {n}),
        (
            "all-reduce of 1 to N",
            f"{ranks[0]['sum']:g}, expected {total:g}",
            all(rank["sum"] == total for rank in ranks),
        ),
        ("weights differ before the broadcast", "", n == 1 or any(rank["differed"] for rank in ranks)),
        ("weights are equal after the broadcast", "", all(rank["equal_after_broadcast"] for rank in ranks)),
        ("a training step changes the weights", "", all(rank["changed"] for rank in ranks)),
        ("weights are equal after a training step", "", all(rank["equal_after_step"] for rank in ranks)),
        ("the optimizer's state is equal after it", "", all(rank["equal_state"] for rank in ranks)),
        *batches,
        ("batches are distinct", images, all(rank["distinct"] for rank in ranks)),
    ]


def shown(batch: list[int]) -> str:
    """Return "16 images: 4, 31, 7, ..."."""
    return f"{len(batch)} images: {', '.join(map(str, batch[:3]))}{', ...' if len(batch) > 3 else ''}"


def check_rank(transport: str, requested_device: str) -> dict[str, Any]:
    """Return what one rank finds: an all-reduce, a broadcast, and a step of the app's training on its data."""
    world = env.detect()
    Watchdog().start(world, Options(timeout=TIMEOUT))  # ends this rank with its launcher
    device = distributed.choose_device(requested_device, world)
    distributed.rendezvous(world, device, TIMEOUT, transport)
    rank, size = hvd.rank(), hvd.size()
    total = hvd.allreduce(torch.tensor([rank + 1.0], device=device), op=hvd.Sum)
    model = build_model("net", 0.0, torch.float32, seed=rank).to(device)
    differed = not are_equal(model.parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before, equal_after_broadcast = parameters_to_vector(model.parameters()).detach(), are_equal(model.parameters())

    train_set, _ = load(DATASET, Path("data"), device, torch.float32)
    batches = GlobalBatches(len(train_set.labels), 16 * size + 1, 1, rank, size)
    indices = batches.indices(0)
    gathered = hvd.allgather(torch.from_numpy(indices)).numpy()  # shards may differ in size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = train_set.batch(indices)
    (F.nll_loss(model(images), labels, reduction="sum") / batches.size(0)).backward()
    distributed.all_reduce_gradients(model, Options(gradients="group", compression="none"))
    optimizer.step()
    return {
        "rank": rank,
        "size": size,
        "device": str(device),
        "backend": distributed.backend(device),
        "sum": total.item(),
        "differed": differed,
        "equal_after_broadcast": equal_after_broadcast,
        "changed": not torch.equal(parameters_to_vector(model.parameters()), before),
        "equal_after_step": are_equal(model.parameters()),
        "equal_state": are_equal(state["momentum_buffer"] for state in optimizer.state.values()),
        "batch": indices.tolist(),
        "samples": len(gathered),
        "distinct": len(np.unique(gathered)) == len(gathered) == batches.size(0),
    }


def are_equal(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all ranks have the same bits in their ``tensors``."""
    gathered = hvd.allgather(parameters_to_vector(tensors).detach().unsqueeze(0))
    return all(torch.equal(other, gathered[0]) for other in gathered)


if __name__ == "__main__":
    main()
