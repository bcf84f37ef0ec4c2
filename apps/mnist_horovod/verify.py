"""Check a Horovod installation, also over several machines; scripts/verify_horovod.sh runs this.

    python apps/mnist_horovod/verify.py [N] [--transport mpi] [--device cuda]     # N ranks, 2 by default

HOROVOD_HOSTS is heeded. On each rank's own device, with the app's own data: one step of its training. Prints a table of
checks; exit code 1 when any failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import SUPPRESS
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

SECONDS = 180  # for the ranks to start, check and end
FOUND = "FOUND "  # before each rank's line of JSON
DATASET = "mnist-5k"  # of the app's data sets the one that is always there


def main() -> None:
    parser = Parser(prog="verify_horovod.sh", description="Check a Horovod installation over N ranks.")
    parser.add_argument("n", nargs="?", default="2", metavar="N", help="how many ranks (default: %(default)s)")
    parser.add_argument("--transport", choices=("gloo", "mpi"), default="gloo", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    parser.add_argument("--rank", action="store_true", help=SUPPRESS)  # given to the ranks that are started
    try:
        options = parser.parse(sys.argv[1:])
        if not re.fullmatch(r"[1-9]\d{0,4}", options.n, re.ASCII):
            raise ConfigError(f"N={options.n} is not a number of ranks: bash scripts/verify_horovod.sh 2")
        check_hosts(os.environ)
        if options.rank:
            # One write, so that the lines of several ranks do not mix.
            sys.stdout.write(FOUND + json.dumps(checks_of_a_rank(options.transport, options.device)) + "\n")
            sys.stdout.flush()
            hvd.shutdown()
            return
    except ConfigError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    # Horovod looks for mpirun by PATH: the environment's own comes first, as in the launch script.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    rows = [*checks_of_the_build(options.transport), *checks_over_ranks(options)]
    width = max(len(what) for what, _, _ in rows)
    for what, found, good in rows:
        print(f"{'ok    ' if good else 'FAILED'}  {what:{width}}  {found}")
    sys.exit(0 if all(good for _, _, good in rows) else 1)


def checks_of_the_build(transport: str) -> list[tuple[str, str, bool]]:
    """What was checked, what was found, and whether it is good."""
    parts = {"gloo": bool(hvd.gloo_built()), "MPI": bool(hvd.mpi_built()), "NCCL": bool(hvd.nccl_built())}
    parts["CUDA"] = bool(hvd.cuda_built())
    built = ", ".join(name for name, there in parts.items() if there)
    rows = [
        ("Horovod", f"{horovod.__version__} for torch {torch.__version__}", True),
        ("built with", built or "nothing", parts["gloo" if transport == "gloo" else "MPI"]),
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
    return " ".join(" ".join(said.splitlines()[:2]).split()) or "mpirun --version says nothing", bool(said)


def checks_over_ranks(options: Options) -> list[tuple[str, str, bool]]:
    """The checks that need ranks: this file again, under horovodrun."""
    n, transport = int(options.n), options.transport
    hosts = ["-H", os.environ["HOROVOD_HOSTS"]] if os.environ.get("HOROVOD_HOSTS") else []
    command = [sys.executable, "-m", "horovod.runner.launch", f"--{transport}", "-np", str(n), *hosts]
    command += ["--disable-cache", sys.executable, os.path.abspath(__file__), "--rank"]
    command += [f"--transport={transport}", f"--device={options.device}"]
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
    backends = {f"{one['backend']} on {one['device']}" for one in found}
    return [
        ("gradients go by", ", ".join(sorted(backends)), all(one["backend"] in (transport, "nccl") for one in found)),
        ("hvd.rank()", ", ".join(str(one["rank"]) for one in found), [one["rank"] for one in found] == list(range(n))),
        ("hvd.size()", ", ".join(map(str, sorted(sizes))), sizes == {n}),
        ("all-reduce of 1 to N", f"{found[0]['sum']:g}, expected {total:g}", all(one["sum"] == total for one in found)),
        ("weights differ before the broadcast", "", n == 1 or any(one["differed"] for one in found)),
        ("weights are equal after the broadcast", "", all(one["equal_after_broadcast"] for one in found)),
        ("a training step changes the weights", "", all(one["changed"] for one in found)),
        ("weights are equal after a training step", "", all(one["equal_after_step"] for one in found)),
        (
            "batches are distinct",
            f"{found[0]['samples']} images of {DATASET} in all",
            all(one["distinct"] for one in found),
        ),
    ]


def checks_of_a_rank(transport: str, wanted: str) -> dict[str, Any]:
    """What a rank finds, on its device: with tensors there, and with a step of the app's training on its data."""
    world = env.detect(os.environ)
    Watchdog().start(world, Options(timeout=SECONDS))  # ends this rank with its launcher
    device = distributed.choose_device(wanted, world)
    distributed.rendezvous(world, device, SECONDS, transport)
    rank, size = hvd.rank(), hvd.size()
    total = hvd.allreduce(torch.tensor([rank + 1.0], device=device), op=hvd.Sum)
    model = build_model("net", 0.0, torch.float32, seed=rank).to(device)
    differed = not equal_on_all(weights(model))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = weights(model)
    equal_after_broadcast = equal_on_all(before)

    training, _ = load(DATASET, Path("data"), device)
    batches = GlobalBatches(len(training.labels), 16 * size + 1, 1, rank, size)
    indices = batches.indices(0)
    gathered = hvd.allgather(torch.from_numpy(indices)).numpy()  # parts of different sizes are welcome
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (images, labels), rows = training.batch(indices, torch.float32), batches.rows(0)
    (F.nll_loss(model(images, rows), labels, reduction="sum") / rows.global_size).backward()
    distributed.all_reduce_gradients(model, "none")
    optimizer.step()
    return {
        "rank": rank,
        "size": size,
        "device": str(device),
        "backend": distributed.backend(device),
        "sum": total.item(),
        "differed": differed,
        "equal_after_broadcast": equal_after_broadcast,
        "changed": not torch.equal(weights(model), before),
        "equal_after_step": equal_on_all(weights(model)),
        "samples": len(gathered),
        "distinct": len(np.unique(gathered)) == len(gathered) == batches.size(0),
    }


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def equal_on_all(values: torch.Tensor) -> bool:
    """Whether ``values`` [k] are bit for bit the same on every rank."""
    gathered = hvd.allgather(values.unsqueeze(0))
    return all(torch.equal(other, gathered[0]) for other in gathered)


if __name__ == "__main__":
    main()
