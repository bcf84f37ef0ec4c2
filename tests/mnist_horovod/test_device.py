"""Test which device a rank selects, with simulated GPUs and a simulated build of Horovod."""

from __future__ import annotations

from typing import Any

import pytest
from harness import told_by

PROGRAM = """
import json
import distributed
import horovod.torch as hvd
import torch
from samestep import ConfigError
from samestep.env import World

told = {}
current = []
torch.cuda.set_device = current.append
hvd.nccl_built = lambda: 22907
distributed.log.warning = lambda text: warnings.append(text)
for built in (False, True):
    hvd.cuda_built = lambda: built
    for gpus in (0, 1, 4):
        torch.cuda.device_count = lambda: gpus
        for n in (1, 2, 4):
            for rank in (0, n - 1):
                for wanted in ("auto", "cpu", "cuda"):
                    current.clear()
                    warnings = []
                    try:
                        device = distributed.choose_device(wanted, World(rank, n, local_rank=rank, local_world_size=n))
                        backend = distributed.backend(device) if device.type == "cuda" else ""
                        answer = [str(device), backend, [str(each) for each in current], len(warnings)]
                    except ConfigError as problem:
                        answer = str(problem).partition(": ")[2]
                    told[f"{built} {gpus} {n} {rank} {wanted}"] = answer
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def output() -> dict[str, Any]:
    answer: dict[str, Any] = told_by("mnist_horovod", PROGRAM)
    return answer


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("built", [False, True])
def test_a_rank_takes_a_gpu_that_horovod_can_use_or_none(
    output: dict[str, Any], built: bool, gpus: int, n: int
) -> None:
    for rank in (0, n - 1):
        case = f"{built} {gpus} {n} {rank}"
        cpu = ["cpu", "", [], 0]
        gpu = [f"cuda:{rank}", "nccl", [f"cuda:{rank}"], 0]
        assert output[f"{case} cpu"] == cpu
        if gpus < n:
            assert output[f"{case} auto"] == cpu
            assert output[f"{case} cuda"].startswith(f"this machine has {gpus} GPUs for {n} ranks")
        elif built:
            assert output[f"{case} auto"] == output[f"{case} cuda"] == gpu
        else:
            assert output[f"{case} auto"] == ["cpu", "", [], int(rank == 0)]  # only rank 0 warns
            assert output[f"{case} cuda"].startswith("this Horovod was built without CUDA")
