"""Test on a simulated GPU which device a rank selects, and that no tensor stays on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, bare, options_of, told_by
from samestep import ConfigError
from samestep_launch.app import check_share_gpu
from samestep_launch.environments import has_nvidia

# PROGRAM replaces torch.cuda.device_count. Tensors on torch's device "meta" have a device but no content. As on a
# GPU, an operation that mixes them with CPU tensors fails.
PROGRAM = """
import json
import os
import resource
import sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
import train
from data import Split
from loader import choose_input
from model import build_model
from options import parse
from samestep import ConfigError, NonRetryableError
from samestep.env import World
from samestep.options import SHARED_GPU
from samestep.run import Run
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, distributed, exact

told = {}
current = []
said = []
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

# The system clears the memory of a page at its first use, which is a page fault.
def use_memory():
    torch.ones(2**22).add(torch.ones(2**22))

for _ in range(5):
    use_memory()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use_memory()
told["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

# --share-gpu: a decision for each request and number of GPUs, and what a rank sets before it joins the others.
distributed.log.info = said.append
torch.cuda.device_count = lambda: 1
distributed.choose_device("auto", World(0, 2, local_rank=0, local_world_size=2))
distributed.choose_device("auto", World(1, 2, local_rank=1, local_world_size=2))
told["said"] = said
told["shared"] = []
for gpus in (0, 1, 4):
    try:
        told["shared"].append([gpus, distributed.gpu_use(SHARED_GPU, 3, gpus)])
    except ConfigError as problem:
        told["shared"].append([gpus, str(problem)])
fractions = []
torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=80e9)
torch.cuda.set_per_process_memory_fraction = lambda fraction, device: fractions.append([fraction, str(device)])
torch.cuda.nccl.version = lambda: (2, 28, 9)
current.clear()
device = distributed.choose_device(SHARED_GPU, World(2, 3, local_rank=2, local_world_size=3, node_count=1))
told["rank 2"] = [str(device), [str(each) for each in current], fractions, os.environ["NCCL_HOSTID"]]
told["remedies"] = [distributed.log.remedies[0](text) for text in ("CUDA out of memory. Tried to", "no file")]
for name, call in {
    "machines": lambda: distributed.choose_device(SHARED_GPU, World(0, 2, local_world_size=1, node_count=2)),
    "too small": lambda: distributed.memory_fraction(8e9, 6),
}.items():
    try:
        told[name] = str(call())
    except ConfigError as problem:
        told[name] = str(problem)
def refuse(device):
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\\nUpdate it")
accept, torch.cuda.set_device = torch.cuda.set_device, refuse
try:
    distributed.choose_device("cuda", World(0, 1, local_world_size=1))
except NonRetryableError as problem:
    told["driver"] = str(problem)
torch.cuda.set_device = accept

# --backend, on a CPU and on a GPU; and what the header and the console have of GPUs.
for device in (torch.device("cpu"), torch.device("cuda", 1)):
    for wanted in ("auto", "gloo", "nccl"):
        try:
            told[f"{device} {wanted}"] = distributed.backend(device, wanted)
        except ConfigError as problem:
            told[f"{device} {wanted}"] = str(problem)
distributed._sharing.clear()
torch.cuda.device_count = lambda: 4
torch.cuda.get_device_name = lambda gpu: "GPU B" if gpu in (1, torch.device("cuda", 1)) else "GPU A"
torch.cuda.nccl.version, torch.version.cuda = (lambda: (2, 27, 5)), "13.0"
metadata = distributed.run_metadata(torch.device("cuda", 1))
told["gpus"] = [metadata[name] for name in ("device", "gpus", "backend")]

meta = torch.device("meta")
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
for options in (parse(["--model=net"]), parse(["--model=lenet", "--optimizer=adam"])):
    images = torch.zeros(100, 1, 28, 28, dtype=torch.uint8, device=meta)
    split = Split(images, torch.zeros(100, dtype=torch.int64, device=meta), torch.float32)
    model = build_model(options.model, options.dropout, torch.float32, options.seed).to(meta)
    optimizer = train.build_optimizer(options, model)
    sampler = GlobalBatchSampler(100, 10, rank=1, world_size=2)
    exact(model, sampler)
    batches = iter(DataLoader(split, batch_sampler=sampler, seeded=False))
    for _ in range(2):
        images, labels = next(batches)
        loss_sum = train.train_step(model, optimizer, sampler, images, labels)
    state = {str(v.device) for s in optimizer.state.values() for k, v in s.items() if v is not None and k != "step"}
    try:
        blocks = EvalSampler(100, 10, rank=1, world_size=2)
        run = Run("mnist_ddp", options, World(1, 2))
        loader = DataLoader(split, batch_sampler=blocks, seeded=False)
        evaluated = str(train.evaluate(run, model, loader, blocks))
    except NotImplementedError as problem:  # sums.tolist(), after everything else: there is no content
        evaluated = str(problem)
    told[options.model] = [str(images.device), str(labels.device), str(loss_sum.device), *state, evaluated]
sys.modules["torchvision"] = None  # as if it were not installed
try:
    choose_input("torchvision", split)
except ConfigError as problem:
    told["torchvision"] = str(problem)
told["memory"] = choose_input("memory", split) is split
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def output() -> dict[str, Any]:
    answer: dict[str, Any] = told_by("mnist_ddp", PROGRAM)
    return answer


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_rank_takes_a_gpu_of_its_own_or_none(output: dict[str, Any], gpus: int, n: int) -> None:
    cpu = ["cpu", "gloo", []]
    gpu = [f"cuda:{n - 1}", "nccl", [f"cuda:{n - 1}"]]
    assert output[f"{gpus} GPUs, {n} ranks, cpu"] == cpu
    assert output[f"{gpus} GPUs, {n} ranks, auto"] == (gpu if gpus >= n else cpu)
    refused = f"--device cuda: this machine has {gpus} GPUs for {n} ranks: start fewer, or use --device cpu"
    assert output[f"{gpus} GPUs, {n} ranks, cuda"] == (gpu if gpus >= n else refused)


def test_a_rank_on_the_cpu_reuses_the_memory_of_freed_tensors(output: dict[str, Any]) -> None:
    """By default, glibc returns the memory to the system, and this program has 245,000 page faults."""
    assert output["faults"] < 1000


def test_auto_takes_the_cpu_for_more_ranks_than_gpus_and_names_the_option(output: dict[str, Any]) -> None:
    assert output["said"] == ["2 ranks, 1 GPU: --device auto takes the CPU; see --share-gpu"]


def test_ranks_share_the_first_gpu(output: dict[str, Any]) -> None:
    none = "--share-gpu: torch finds no GPU here: use --device cpu"
    assert output["shared"] == [[0, none], [1, "shared"], [4, "shared"]]
    device, current, ((fraction, of),), host = output["rank 2"]
    assert (device, current, of, host) == ("cuda:0", ["cuda:0"], "cuda:0", "samestep-rank-2")
    assert fraction == pytest.approx(0.9 / 3 - 1.5 / 80)


def test_a_full_or_small_gpu_that_ranks_share_is_one_line_with_the_option(output: dict[str, Any]) -> None:
    part = "this rank's part of the GPU is full (--share-gpu): start fewer ranks"
    assert output["remedies"] == [f": {part}", ""]
    assert output["too small"] == "--share-gpu: 6 ranks do not fit into 8 GB of GPU memory: start fewer"


def test_several_machines_and_an_old_driver_are_one_line(output: dict[str, Any]) -> None:
    assert output["machines"] == "--share-gpu is for one machine, and this job has 2: leave it out"
    assert output["driver"] == "CUDA cannot start: The NVIDIA driver on your system is too old (found version 11040)."


NCCL = """
import json
import torch
import torch.distributed as dist
from samestep import NonRetryableError
from samestep.env import World
from samestep.torch import distributed

told = {}
names = "NCCL_SOCKET_IFNAME=lo NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0"
told["variables"] = []
for version in ((2, 27, 5), (2, 28, 9), (2, 29, 0), (2, 30, 0), (3, 0, 0), ()):
    variables = distributed.sharing_variables(version, 1)
    own = {name: value for name, value in variables.items() if f"{name}={value}" not in names}
    told["variables"].append([len(variables), own])

# An NCCL that refuses all the same, at the first collective.
torch.cuda.nccl.version = lambda: (2, 28, 9)
torch.cuda.synchronize = lambda device: None
distributed._sharing.update(distributed.sharing_variables((2, 28, 9), 0))
dist.init_process_group = lambda **settings: None
dist.get_backend, dist.get_world_size = (lambda: "nccl"), (lambda: 2)
def refuse(tensor):
    raise dist.DistBackendError("NCCL error in: x.cpp:1\\nLast error:\\nDuplicate GPU detected : rank 0 and rank 1")
dist.all_reduce = refuse
try:
    world = World(0, 2, launcher="env", master_addr="127.0.0.1", master_port=1)
    distributed.rendezvous(world, torch.device("cpu"), 1.0)
except NonRetryableError as problem:
    told["refused"] = str(problem)

# The flight recorder of NCCL, if torch's generic one is empty. Its fields were seen on an H100 with torch 2.11.
def entry(number, state, retired=False):
    common = {"is_p2p": False, "profiling_name": "nccl:all_reduce", "input_sizes": [[7]], "input_dtypes": ["Float"]}
    return {"collective_seq_id": number, "state": state, "retired": retired, **common}
c10d = torch._C._distributed_c10d
c10d._dump_fr_trace_json = lambda *flags: "{}"
told["recorded"] = []
for entries in ([], [entry(1, "completed")], [entry(1, "completed"), entry(2, "started"), entry(3, "scheduled")],
                [entry(1, "started", retired=True), entry(2, "completed")]):
    c10d._dump_nccl_trace_json = lambda *flags: json.dumps({"entries": entries})
    told["recorded"].append(distributed.last_collective())
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def nccl() -> dict[str, Any]:
    answer: dict[str, Any] = told_by("mnist_ddp", NCCL)
    return answer


def test_the_variables_of_ranks_that_share_a_gpu_follow_the_version_of_nccl(nccl: dict[str, Any]) -> None:
    host = [5, {"NCCL_HOSTID": "samestep-rank-1"}]
    several = [5, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}]
    assert nccl["variables"] == [host, host, host, several, several, host]


def test_an_nccl_that_refuses_ranks_on_one_gpu_is_one_line(nccl: dict[str, Any]) -> None:
    variables = "NCCL_HOSTID=samestep-rank-0 NCCL_SOCKET_IFNAME=lo NCCL_ALGO=Ring NCCL_PROTO=Simple NCCL_NVLS_ENABLE=0"
    reason = "Duplicate GPU detected : rank 0 and rank 1"
    assert nccl["refused"] == f"--share-gpu: NCCL 2.28.9 refuses it with {variables}: {reason}"


def test_the_first_pending_collective_of_nccl_is_reported(nccl: dict[str, Any]) -> None:
    def reported(number: int, pending: bool) -> dict[str, Any]:
        return {"name": f"all_reduce {number} [7] float", "number": number, "pending": pending}

    assert nccl["recorded"] == [None, reported(1, False), reported(2, True), reported(2, False)]


def test_share_gpu_without_a_driver_or_on_the_cpu_is_one_line(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch script refuses the option before an installation. A rank without the script refuses it, too."""
    contradiction = "error: --share-gpu needs a GPU, and --device cpu takes none: leave one of them out"
    outcome = harness.run(2, "--share-gpu", "--device=cpu")
    assert (outcome.code, outcome.errors) == (2, [contradiction])
    rank = [sys.executable, str(ROOT / "apps" / "mnist_ddp" / "train.py"), "--share-gpu", "--dataset=mnist-5k"]
    outcome = bare(harness, rank)
    assert (outcome.code, outcome.errors) == (2, ["error: --share-gpu: torch finds no GPU here: use --device cpu"])
    options = options_of("mnist_ddp").parse(["--share-gpu"])
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if not has_nvidia():
        with pytest.raises(ConfigError, match="--share-gpu: this machine has no NVIDIA driver: use --device cpu"):
            check_share_gpu(options, machines=1)
    with pytest.raises(ConfigError, match="--share-gpu is for one machine, and this job has 2: leave it out"):
        check_share_gpu(options, machines=2)


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
    """A rank refuses --input torchvision, because a launcher or PYTHON= may select a Python without torchvision."""
    assert output["torchvision"].startswith("--input torchvision: ")
    assert "pip install torchvision==" in output["torchvision"]
    assert output["memory"]


@pytest.mark.parametrize("model", ["net", "lenet"])
def test_a_step_and_an_evaluation_stay_on_the_device(output: dict[str, Any], model: str) -> None:
    assert output[model] == ["meta"] * 4 + ["Cannot copy out of meta tensor; no data!"]
