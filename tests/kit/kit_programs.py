"""Run programs that use the kit, as ranks of one process group or under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240.0  # seconds; every program ends sooner

PRELUDE = """
import os, sys
import torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from samestep.torch import *

rank, world_size = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)

def end():
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an orderly end
"""


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a rank: one thread, gloo on loopback, core on PYTHONPATH, and ``variables``."""
    mine = {"PYTHONPATH": str(ROOT / "core"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **mine, **variables}


def run_ranks(program: str, world_size: int, folder: Path) -> list[str]:
    """Run a program on each rank of a process group; return what each rank printed."""
    path = folder / "program.py"
    path.write_text(PRELUDE + program)
    store = folder / f"store-{world_size}-{os.urandom(4).hex()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), str(rank), str(world_size), str(store)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = []
    try:
        for process in ranks:
            out, errors = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, errors
            outputs.append(out)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return outputs
