"""A simulated GPU shows which device a rank takes, and that nothing stays behind on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from harness import options_of, told_by

# The app believes torch.cuda.device_count. Tensors of torch's device "meta" have a device, but no content: an
# operation refuses to mix them with the CPU's, as it would a GPU's.
PROGRAM = """
import json
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
import train
from data import Split
from loader import choose_input
from model import build_model
from options import parse
from samestep import ConfigError
from samestep.env import World
from samestep.sharding import GlobalBatches
from samestep.run import Run
from samestep.torch import distributed

told = {}
current = []
torch.cuda.set_device = current.append
for gpus in (0, 1, 4):
    torch.cuda.device_count = lambda: gpus
    for n in (1, 2, 4):
        for wanted in ("auto", "cpu", "cuda"):
            current.clear()
            try:
                device = distributed.choose_device(wanted, World(n - 1, n, local_rank=n - 1, local_world_size=n))
                answer = [str(device), distributed.backend(device), [str(each) for each in current]]
            except ConfigError as problem:
                answer = str(problem)
            told[f"{gpus} GPUs, {n} ranks, {wanted}"] = answer

# --backend, on a CPU and on a GPU; and what the header and the console have of GPUs.
for device in (torch.device("cpu"), torch.device("cuda", 1)):
    for wanted in ("auto", "gloo", "nccl"):
        try:
            told[f"{device} {wanted}"] = distributed.backend(device, wanted)
        except ConfigError as problem:
            told[f"{device} {wanted}"] = str(problem)
torch.cuda.get_device_name = lambda gpu: "GPU B" if gpu in (1, torch.device("cuda", 1)) else "GPU A"
torch.cuda.nccl.version, torch.version.cuda = (lambda: (2, 27, 5)), "13.0"
metadata = distributed.run_metadata(torch.device("cuda", 1))
told["gpus"] = [metadata[name] for name in ("device", "gpus", "backend")]

meta = torch.device("meta")
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
for options in (parse(["--model=net"]), parse(["--model=lenet", "--optimizer=adam"])):
    images = torch.zeros(100, 1, 28, 28, dtype=torch.uint8, device=meta)
    split = Split(images, torch.zeros(100, dtype=torch.int64, device=meta))
    model = build_model(options.model, options.dropout, torch.float32, options.seed).to(meta)
    optimizer = train.build_optimizer(options, model)
    batches = GlobalBatches(100, 10, 1, 1, 2)
    for step in range(2):
        (images, labels), rows = split.batch(batches.indices(step), torch.float32), batches.rows(step)
        loss_sum = F.nll_loss(model(images, rows), labels, reduction="sum")
        (loss_sum * (2 / rows.global_size)).backward()
        optimizer.step()
    state = {str(v.device) for s in optimizer.state.values() for k, v in s.items() if v is not None and k != "step"}
    try:
        evaluated = str(train.evaluate(Run("mnist_ddp", options, World(1, 2)), model, split, torch.float32))
    except NotImplementedError as problem:  # sums.tolist(), after everything else: there is no content
        evaluated = str(problem)
    told[options.model] = [str(images.device), str(labels.device), str(loss_sum.device), *state, evaluated]
sys.modules["torchvision"] = None  # as if it were not installed
try:
    choose_input("torchvision", split, batches, range(2))
except ConfigError as problem:
    told["torchvision"] = str(problem)
told["memory"] = choose_input("memory", split, batches, range(2)) is split
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def output() -> dict[str, Any]:
    answer: dict[str, Any] = told_by("mnist_ddp", PROGRAM)
    return answer


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_rank_takes_a_gpu_of_its_own_or_none(output: dict[str, Any], gpus: int, n: int) -> None:
    cpu, gpu = ["cpu", "gloo", []], [f"cuda:{n - 1}", "nccl", [f"cuda:{n - 1}"]]
    assert output[f"{gpus} GPUs, {n} ranks, cpu"] == cpu
    assert output[f"{gpus} GPUs, {n} ranks, auto"] == (gpu if gpus >= n else cpu)
    refused = f"--device cuda: this machine has {gpus} GPUs for {n} ranks: start fewer, or use --device cpu"
    assert output[f"{gpus} GPUs, {n} ranks, cuda"] == (gpu if gpus >= n else refused)


def test_gpu_is_device_cuda() -> None:
    parse = options_of("mnist_ddp").parse
    assert [parse(words).device for words in ([], ["--gpu"], ["--gpu", "--device=cpu"])] == ["auto", "cuda", "cpu"]


def test_a_backend_is_chosen_or_refused(output: dict[str, Any]) -> None:
    assert [output[f"cuda:1 {wanted}"] for wanted in ("auto", "gloo", "nccl")] == ["nccl", "gloo", "nccl"]
    assert [output[f"cpu {wanted}"] for wanted in ("auto", "gloo")] == ["gloo", "gloo"]
    assert output["cpu nccl"].startswith("--backend nccl needs a GPU for each rank: ")


def test_a_run_names_its_gpus_and_their_libraries(output: dict[str, Any]) -> None:
    assert output["gpus"] == ["GPU B", "4 x GPU A and GPU B; CUDA 13.0; NCCL 2.27.5", "nccl"]


def test_without_torchvision_its_input_is_refused(output: dict[str, Any]) -> None:
    """By ranks, for a Python that a launcher or PYTHON= names."""
    assert output["torchvision"].startswith("--input torchvision: ")
    assert "pip install torchvision==" in output["torchvision"]
    assert output["memory"]


@pytest.mark.parametrize("model", ["net", "lenet"])
def test_a_step_and_an_evaluation_stay_on_the_device(output: dict[str, Any], model: str) -> None:
    assert output[model] == ["meta"] * 4 + ["Cannot copy out of meta tensor; no data!"]
