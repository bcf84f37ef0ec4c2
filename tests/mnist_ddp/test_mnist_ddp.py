"""What is particular to this app: its models, torch's launchers, and torchvision's reader as a witness."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Harness, Job, bare, faulty, last_step, losses, relative_difference, write_fashion
from layouts import TORCHVISION, digest
from processes import free_port
from samestep import UserError, checkpoint, datasets
from samestep.sharding import GlobalBatches

TRAIN = str(ROOT / "apps" / "mnist_ddp" / "train.py")
SMALL = ["--dataset=mnist-5k", "--max-steps=6", "--log-every=1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def test_the_losses_are_those_of_a_plain_loop(harness: Harness) -> None:
    """What the app does to be fast changes nothing: stock layers, contiguous tensors, one process, the mean loss."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    options = ["--dataset=mnist-5k", "--dtype=float64", "--dropout=0", "--global-batch-size=125", "--log-every=1"]
    result = harness.train(1, *options, "--max-steps=0", run_dir=harness.folder / "initial")
    initial = checkpoint.load_weights(Path(result["run_dir"]) / "model.safetensors")
    assert sum(array.size for array in initial.values()) == 21_840
    torch.set_num_threads(1)
    data = datasets.load("mnist-5k", harness.folder)
    images = (torch.from_numpy(data.train_images).unsqueeze(1).double() / 255 - datasets.MEAN) / datasets.STD
    labels = torch.from_numpy(data.train_labels).long()
    layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(1, 10, 5), "conv2": nn.Conv2d(10, 20, 5)}
    layers |= {"fc1": nn.Linear(320, 50), "fc2": nn.Linear(50, 10)}
    model = nn.ModuleDict(layers).double()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in initial.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    batches = GlobalBatches(len(labels), 125, result["seed"])
    curve = []
    for step in range(100):
        chosen = torch.from_numpy(batches.indices(step))
        x = images[chosen].contiguous()
        for name in ("conv1", "conv2"):
            x = F.relu(F.max_pool2d(model[name](x), 2))
        loss = F.cross_entropy(model["fc2"](F.relu(model["fc1"](x.flatten(1)))), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    harness.train(2, *options, "--max-steps=100", "--epochs=4")  # tests/common compares other numbers of ranks
    assert relative_difference(curve, losses(harness.folder / "run")) < 1e-9


# --- its launchers -------------------------------------------------------------------------------------------------


def test_torchrun_alone_takes_the_same_steps(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", TRAIN, *harness.app.small]
    result = harness.checked(bare(harness, command), 2)
    assert result["launcher"] == "torchrun"
    assert result["weights_sha256"] == undisturbed(2)["weights_sha256"]


def test_torch_distributed_launch_alone_takes_the_same_steps(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The launcher before torchrun. It gives ranks --local-rank, of which the record says nothing."""
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port", free_port()]
    result = harness.checked(bare(harness, [*command, TRAIN, *harness.app.small]), 2)
    assert result["launcher"] == "torchrun"
    assert result["weights_sha256"] == undisturbed(2)["weights_sha256"]
    run_dir = Path(result["run_dir"])
    header = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert "local_rank" not in header["options"]
    assert " --local-rank=1 " in (run_dir / "log" / "rank-1.log").read_text().splitlines()[0]


def test_local_rank_says_nothing_about_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.distributed.launch gives to a rank, in both spellings; without LOCAL_RANK it is not understood."""
    parse = runpy.run_path(str(ROOT / "apps" / "mnist_ddp" / "options.py"))["parse"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert parse(["--local-rank=1"]) == parse(["--local_rank=1"]) == parse([])
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match="--local-rank 1, but LOCAL_RANK is 0: start the ranks with torchrun"):
        parse(["--local-rank=1"])
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(UserError, match="--local-rank 1, but LOCAL_RANK is not set: start the ranks with torchrun"):
        parse(["--local-rank=1"])


def test_torchruns_own_restart_finds_the_run_dir_again(harness: Harness) -> None:
    """The key in the run dir's name is for launchers that start ranks again by themselves."""
    command = [*TORCHRUN, "--nnodes=1", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", TRAIN, *SMALL, "--checkpoint-every=2"]
    environ = {**faulty({"rank": 0, "updates": 5, "signal": 9}), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    result = harness.checked(bare(harness, command, **environ), 1)
    assert result["restarts"] == 1
    assert result["resumed_from_step"] == 4
    assert len(list((harness.folder / "runs" / "mnist_ddp").iterdir())) == 1


def test_one_process_by_plain_python(harness: Harness) -> None:
    result = harness.checked(bare(harness, [sys.executable, TRAIN, *SMALL, "--model=lenet"]), 1)
    assert result["launcher"] == "none"
    weights = checkpoint.load_weights(Path(result["run_dir"]) / "model.safetensors")
    assert sum(array.size for array in weights.values()) == 61_610
    layers = ("features.0", "features.3", "fc.0", "fc.1", "fc.2")  # Paddle's LeNet
    assert set(weights) == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


def test_plain_rank_and_world_size(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """As DLC and a person at two terminals set them: one process each, no launcher."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, TRAIN, *harness.app.small, "--run-dir=run"]
    jobs = [harness.start_command(command, harness.folder / "run", **common, RANK=str(rank)) for rank in range(2)]
    first, second = (job.finish(limit=120) for job in jobs)
    result = harness.checked(first, 2)
    assert result["launcher"] == "env"
    assert second.code == 0
    assert second.stdout == ""
    assert result["weights_sha256"] == undisturbed(2)["weights_sha256"]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "NPROC_PER_NODE": "4"}, "scripts/run_"),
        ({"JOB_COMPLETION_INDEX": "0"}, "NNODES"),
    ],
    ids=str,
)
def test_a_wrong_environment_is_one_line(harness: Harness, environ: dict[str, str], words: str) -> None:
    outcome = bare(harness, [sys.executable, TRAIN, *SMALL], **environ)
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert words in outcome.stderr


def test_a_taken_master_port_is_one_line(harness: Harness) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        outcome = bare(harness, [sys.executable, TRAIN, *SMALL], **environ)
    assert outcome.code == 2, outcome
    assert len(outcome.errors) == 1
    assert f"MASTER_PORT {port} is in use" in outcome.errors[0]
    assert "Traceback" not in outcome.stderr


def test_ranks_end_when_torchrun_is_killed(harness: Harness) -> None:
    """torchrun gives each rank a session of its own, so nothing but the rank's watchdog ends it."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", TRAIN, "--dataset=mnist-5k", "--epochs=1000"]
    job = harness.start_command([*command, "--run-dir=run", "--log-every=1"], harness.folder / "run")
    job.wait_for_step(5)
    job.process.kill()
    job.process.communicate()
    harness.check_nothing_left()


def two_machines(harness: Harness) -> list[Job]:
    """Two launch scripts, 1 and 2 ranks, each in a folder of its own."""
    script = str(ROOT / "scripts" / "run_mnist_ddp.sh")
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    jobs = []
    for node in range(2):
        folder = harness.folder / f"machine-{node}"
        folder.mkdir(exist_ok=True)
        command = ["bash", script, str(node + 1), *harness.app.small, "--run-dir=run"]
        jobs.append(harness.start_command(command, folder / "run", folder, **nodes, NODE_RANK=str(node)))
    return jobs


def test_two_machines_without_a_shared_disk_stop_and_recover_together(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The second gets a signal, which stops both; started again, a rank of it is killed."""
    expected = undisturbed(3)
    jobs = two_machines(harness)
    jobs[0].wait_for_step(2)
    os.kill(jobs[1].process.pid, signal.SIGUSR1)
    assert [job.finish().code for job in jobs] == [138, 138]
    stopped = last_step(jobs[0].run_dir)
    jobs = two_machines(harness)
    jobs[0].wait_for_step(max(10, stopped + 1))
    os.kill(jobs[1].ranks()[2], signal.SIGKILL)
    first, second = (job.finish() for job in jobs)
    result = harness.checked(first, 3)
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert (result["node_count"], result["restarts"]) == (2, 1)
    assert (second.code, second.stdout) == (0, "")
    # Each machine's launch script finds the heartbeats of its own ranks in its own run dir.
    for job, ranks in zip(jobs, ({"alive-0"}, {"alive-1", "alive-2"})):
        assert {path.name for path in (job.run_dir / "log").glob("alive-*")} == ranks


# --- ranks that differ --------------------------------------------------------------------------------------------


def test_what_ranks_do_not_share_is_named_and_never_saved(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """One weight of rank 1 is changed from outside, two steps before a checkpoint."""
    fault = {"rank": 1, "differ": 18, "signal": 0}
    outcome = harness.run(2, *harness.app.small, "--max-restarts=0", **faulty(fault))
    assert outcome.code == 1, outcome
    assert outcome.errors[0].startswith(
        "error: ranks 0 and 1 differ at step 20, first in model conv1.weight: not saved"
    )
    assert [error for error in outcome.errors[1:] if "the job ended with code 1" not in error] == []
    assert "RESULT" not in outcome.stdout
    kept = sorted(path.name for path in (harness.folder / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (10, 15, 16)]
    result = harness.train(2, *harness.app.small)
    assert (result["resumed_from_step"], result["weights_sha256"]) == (16, undisturbed(2)["weights_sha256"])


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_a_flipped_bit_is_named_and_undone(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, n: int
) -> None:
    """Any of the upper 24 bits of any weight, at any step: another process writes it into the rank's memory.

    A lower bit may be gone by rounding before ranks compare what they hold.
    """
    reference, chance = undisturbed(n), random.Random(n)
    for i in range(20 if soak else 1):
        told = harness.folder / f"addresses-{i}"
        rank, after = chance.randrange(n), chance.randrange(1, reference["steps"] - harness.app.every - 1)
        fault = {"rank": rank, "tell": str(told), "signal": 0}
        run_dir = harness.folder / str(i)
        job = harness.start(n, *harness.app.small, run_dir=run_dir, **faulty(fault))
        job.wait_for_step(after)
        # The first of a soak makes a weight huge: no number comes of it.
        address, bit = flip_a_bit(
            json.loads(told.read_text()), chance, 30 if soak and not i else chance.randrange(8, 32)
        )
        outcome = job.finish()
        where = f"run {i}: bit {bit} at {address}, rank {rank}, after step {after}: {outcome}"
        result = harness.checked(outcome, n)
        assert result["weights_sha256"] == reference["weights_sha256"], where
        assert result["restarts"] == 1, where
        differs = (
            f"error: rank {rank} differs from all others at step " if n > 2 else "error: ranks 0 and 1 differ at step "
        )
        no_number = r"error: at step \d+ the (test )?loss.* is (nan|inf): lower --lr, now 0.03, unless a flipped bit"
        assert outcome.errors[0].startswith(differs) or re.match(no_number, outcome.errors[0]), where
        assert len(outcome.errors) == 1, where


def flip_a_bit(told: dict[str, Any], chance: random.Random, bit: int) -> tuple[int, int]:
    """Flip this bit of any float32 weight of the process that told its addresses; returns where and which."""
    place = chance.choice([first + 4 * i for first, count in told["weights"] for i in range(count)])
    with open(f"/proc/{told['pid']}/mem", "r+b", buffering=0) as memory:
        memory.seek(place + bit // 8)  # little-endian
        byte = memory.read(1)[0] ^ 1 << bit % 8
        memory.seek(place + bit // 8)
        memory.write(bytes([byte]))
    return place, bit


# --- data ----------------------------------------------------------------------------------------------------------


def test_fashion_mnist_is_evaluated_exactly(harness: Harness) -> None:
    write_fashion(harness.folder / "data" / "fashion-mnist")
    outcome = harness.run(3, "--dataset=fashion-mnist", "--epochs=1", f"--data-dir={harness.folder / 'data'}")
    assert outcome.code == 0, outcome
    assert outcome.result["train_examples"] == 60_000
    assert outcome.result["test_examples"] == 10_000
    assert outcome.result["steps"] == 469
    assert outcome.result["test_accuracy"] > 0.75


def test_a_corrupted_file_is_named(harness: Harness) -> None:
    folder = harness.folder / "data" / "fashion-mnist"
    write_fashion(folder)
    file = folder / "train-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-50])
    outcome = harness.run(2, "--dataset=fashion-mnist", f"--data-dir={harness.folder / 'data'}")
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1
    assert str(file) in outcome.stderr


def test_torchvisions_reader_gives_the_same_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "loops")
    importlib.import_module("common").torchvision_that_imports()
    from torchvision.datasets import MNIST

    ours = datasets.load("mnist-5k", tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in datasets.resolve("mnist-5k", tmp_path).folder.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    for train, images, labels in (
        (True, ours.train_images, ours.train_labels),
        (False, ours.test_images, ours.test_labels),
    ):
        theirs: Any = MNIST(str(tmp_path), train=train)
        assert np.array_equal(theirs.data.numpy(), images)
        assert np.array_equal(theirs.targets.numpy(), labels)


def test_torchvisions_resnets_hold_what_resnet50_mindspore_gives_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, where torchvision is; the other half is in tests/resnet50_mindspore."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "loops")
    importlib.import_module("common").torchvision_that_imports()
    import torch
    from torchvision import models

    for depth, wanted in TORCHVISION.items():
        with torch.device("meta"):
            state = getattr(models, f"resnet{depth}")(num_classes=10).state_dict()
        layout = {name: (tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in state.items()}
        assert digest(layout) == wanted


# --- a fresh machine -----------------------------------------------------------------------------------------------


def test_a_clean_copy_sets_itself_up(harness: Harness) -> None:
    """The README's first command on what git tracks, with no PYTHON to fall back on: makes .venvs and trains."""
    clone = harness.folder / "clone"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    command = ["bash", "scripts/run_mnist_ddp.sh", "1", *SMALL]
    environ = harness.environ()
    environ.pop("PYTHON")
    path = os.pathsep.join(
        part for part in environ["PATH"].split(os.pathsep) if Path(part) != Path(sys.executable).parent
    )
    for expected in ("first start", ""):
        job = harness.start_command(command, clone, clone, PYTHON="", PATH=path)
        outcome = job.finish(limit=600)
        harness.checked(outcome, 1)
        assert expected in outcome.stderr
    assert "first start" not in outcome.stderr
