"""What is particular to this app: three APIs, two launchers, two counts of right answers, and VisualDL."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, Outcome, bare, free_port, losses, metrics, relative_difference, write_fashion
from samestep import checkpoint

APP = ROOT / "apps" / "lenet_paddle"
TRAIN = str(APP / "train.py")
SMALL = ["--dataset=mnist-5k", "--max-steps=6", "--log-every=1"]
LAUNCH = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node=2", "--log_dir=paddle-log"]
FLEETRUN = [str(Path(sys.executable).parent / "fleetrun"), *LAUNCH[3:]]

WAYS = [
    (api, launcher, n) for api in ("basic", "fleet", "highlevel") for launcher in ("launch", "spawn") for n in (1, 2, 3)
]
IN_MATRIX = [
    ("basic", "launch", 3),
    ("fleet", "launch", 2),
    ("highlevel", "launch", 3),
    ("basic", "spawn", 3),
    ("highlevel", "spawn", 1),
]


def test_all_apis_and_launchers_take_the_same_steps(harness: Harness, soak: bool) -> None:
    """A global batch of 125 is no multiple of 2 or 3."""
    options = [*harness.app.exact, "--global-batch-size=125", "--max-steps=100"]
    expected = harness.train(1, *options, run_dir=harness.folder / "expected")
    curve = losses(harness.folder / "expected")
    assert len(curve) == 100
    for api, launcher, n in WAYS if soak else IN_MATRIX:
        run_dir = harness.folder / f"{api}-{launcher}-{n}"
        result = harness.train(n, *options, f"--api={api}", f"--launcher={launcher}", run_dir=run_dir)
        assert result["api"] == api
        assert relative_difference(curve, losses(run_dir)) < 1e-9, run_dir.name
        for name in ("test_accuracy", "test_accuracy_top2", "test_examples"):
            assert result[name] == expected[name], run_dir.name
        assert result["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-9)


def test_top_1_and_top_2_have_names_of_their_own(harness: Harness) -> None:
    result = harness.train(2, "--dataset=mnist-5k", "--epochs=1", "--api=highlevel")
    assert 0.5 < result["test_accuracy"] < result["test_accuracy_top2"] < 1
    assert metrics(harness.folder / "run")[-1]["test_accuracy_top2"] == result["test_accuracy_top2"]


def test_the_weights_have_pytorchs_names_and_layouts(harness: Harness) -> None:
    result = harness.train(1, "--dataset=mnist-5k", "--max-steps=0")
    weights = checkpoint.load_weights(Path(result["run_dir"]) / "model.safetensors")
    shapes = {name: array.shape for name, array in weights.items() if name.endswith("weight")}
    assert shapes == {
        "features.0.weight": (6, 1, 3, 3),
        "features.3.weight": (16, 6, 5, 5),
        "fc.0.weight": (120, 400),
        "fc.1.weight": (84, 120),
        "fc.2.weight": (10, 84),
    }
    assert sum(array.size for array in weights.values()) == 61_610


# --- what ranks say to each other, and what a checkpoint holds ------------------------------------------------------

RENDEZVOUS = """
import os
import numpy as np
import paddle
import ranks
from samestep import env
world = env.detect(os.environ)
ranks.rendezvous(world, "cpu", 60, "basic")
"""
TRAINED = """
import paddle
import weights
from paddle import nn
from samestep import FatalError

def trained(build):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = build(model.parameters())
    update(model, optimizer)
    return model, optimizer

def update(model, optimizer):
    model(paddle.ones([5, 3])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
"""


def in_app(harness: Harness, n: int, code: str) -> Outcome:
    """Run ``code`` with the app's modules, on n ranks."""
    file = harness.folder / "in_app.py"
    file.write_text(code)
    path = os.pathsep.join([str(APP), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(file)] if n == 1 else [*LAUNCH[:3], f"--nproc_per_node={n}", *LAUNCH[4:], str(file)]
    return bare(harness, command, PYTHONPATH=path, PADDLE_DISTRI_BACKEND="gloo")


@pytest.mark.parametrize("n", [1, 2])
def test_bytes_and_arrays_arrive_bit_for_bit(harness: Harness, n: int) -> None:
    code = """
for content in (b"", bytes(range(256)), bytes(100_000)):
    assert ranks.broadcast(content if world.rank == 0 else b"another") == content
rows = [np.array([2**62 + 1, -1]), np.array([2**31 - 1, 7], np.int32), np.array([0.1, -0.0, np.nan]), np.zeros(3, "u1")]
for row in rows:
    mine = row + np.array(world.rank, row.dtype)
    everyones = ranks.all_gather(mine)
    assert everyones.dtype == row.dtype
    assert everyones.shape == (world.world_size, len(row))
    expected = [row + np.array(rank, row.dtype) for rank in range(world.world_size)]
    assert everyones.tobytes() == np.stack(expected).tobytes()
"""
    outcome = in_app(harness, n, RENDEZVOUS + code)
    assert outcome.code == 0, outcome


@pytest.mark.parametrize("n", [1, 2])
def test_ordering_the_buckets_leaves_batch_normalisation_as_it_was(harness: Harness, n: int) -> None:
    code = """
from highlevel import HighLevel

def count(layer, inputs):
    layer.own.add_(paddle.ones([2]))

def bits(model):
    return [tensor.numpy().tobytes() for tensor in (*model.state_dict().values(), *model.buffers())]

images, labels = paddle.ones([1, 1, 5, 5]), paddle.zeros([1], "int64")
for api in ("basic", "highlevel"):
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Conv2D(1, 2, 3), paddle.nn.BatchNorm2D(2), paddle.nn.Flatten())
    model.register_buffer("own", paddle.ones([2]), persistable=False)
    model.register_forward_pre_hook(count)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    before = bits(model)
    if api == "basic":
        ranks.order_buckets(ranks.distribute(api, model, optimizer)[0], images, labels)
    else:
        HighLevel(model, optimizer, images, labels)
    assert bits(model) == before, api
    assert not any(each.grad is not None and each.grad.abs().sum().item() for each in model.parameters())
    model(images)
    assert bits(model) != before  # a pass outside counts
"""
    outcome = in_app(harness, n, RENDEZVOUS + code)
    assert outcome.code == 0, outcome


def test_what_is_saved_of_an_optimizer_is_loaded(harness: Harness) -> None:
    code = """
for build in (
    lambda p: paddle.optimizer.Adam(0.1, parameters=p),
    lambda p: paddle.optimizer.AdamW(0.1, parameters=p),
    lambda p: paddle.optimizer.Momentum(0.1, 0.9, parameters=p),
    lambda p: paddle.optimizer.SGD(0.1, parameters=p),
):
    model, optimizer = trained(build)
    saved = weights.groups(model, optimizer)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    its_optimizer = build(other.parameters())
    weights.load(other, its_optimizer, saved)
    update(model, optimizer)
    update(other, its_optimizer)
    one, two = weights.groups(model, optimizer), weights.groups(other, its_optimizer)
    for group in ("model", "optimizer"):
        assert list(one[group]) == list(two[group])
        assert all(one[group][name].tobytes() == two[group][name].tobytes() for name in one[group])
"""
    outcome = in_app(harness, 1, TRAINED + code)
    assert outcome.code == 0, outcome


def test_an_optimizer_that_cannot_be_saved_is_refused(harness: Harness) -> None:
    """It would be resumed without a part of its state, and nobody would notice."""
    code = """
schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
for build, words in (
    (lambda p: paddle.optimizer.RMSProp(0.1, parameters=p), "RMSProp's linear_"),
    (lambda p: paddle.optimizer.Adam(0.1, parameters=p, amsgrad=True), "_moment2_max_0 cannot"),
    (lambda p: paddle.optimizer.Adam(0.1, parameters=p, name="my"), "_my_moment1_0 cannot"),
    (lambda p: paddle.optimizer.Momentum(schedule, parameters=p), "Momentum's LR_Scheduler cannot"),
):
    try:
        weights.groups(*trained(build))
    except FatalError as problem:
        assert words in str(problem), problem
        assert "use another optimizer" in str(problem)
    else:
        raise AssertionError(words)
"""
    outcome = in_app(harness, 1, TRAINED + code)
    assert outcome.code == 0, outcome


# --- recovery by every API and launcher ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "launcher", "n"),
    [
        ("highlevel", "launch", 3),
        pytest.param("fleet", "launch", 3, marks=pytest.mark.soak),
        ("basic", "spawn", 2),
        pytest.param("highlevel", "spawn", 2, marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_changes_nothing(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, api: str, launcher: str, n: int
) -> None:
    options = [*harness.app.small, f"--api={api}", f"--launcher={launcher}"]
    expected = undisturbed(n, *([] if api == "basic" else [f"--api={api}"]))  # by either launcher the same
    for i in range(5 if soak else 1):
        job = harness.start(n, *options, run_dir=harness.folder / str(i))
        job.wait_for_step(10 + i)
        os.kill(job.alive(n - 1)["pid"], signal.SIGKILL)  # spawn shows no rank in its environment
        result = harness.checked(job.finish(), n)
        assert result["restarts"] == 1
        assert result["weights_sha256"] == expected["weights_sha256"]


# --- launchers without the script ----------------------------------------------------------------------------------


def test_paddles_launchers_alone_take_the_same_steps(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    expected = undisturbed(2)
    for name, command in (("launch", LAUNCH), ("fleetrun", FLEETRUN)):
        outcome = bare(harness, [*command, TRAIN, *harness.app.small, f"--run-dir={name}"])
        assert outcome.code == 0, outcome
        result = json.loads((harness.folder / name / "result.json").read_text())
        assert result["weights_sha256"] == expected["weights_sha256"]
        assert result["launcher"] == "paddle"


def test_spawn_alone(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, TRAIN, *SMALL, "--launcher=spawn", "--nprocs=2", "--run-dir=run"])
    harness.checked(outcome, 2)


def test_plain_rank_and_world_size(harness: Harness) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, TRAIN, *SMALL, "--run-dir=run"]
    jobs = [
        harness.start_command(command, harness.folder / "run", **common, RANK=rank, LOCAL_RANK=rank)
        for rank in ("0", "1")
    ]
    first, second = (job.finish(limit=120) for job in jobs)
    assert harness.checked(first, 2)["launcher"] == "env"
    assert second.code == 0, second


# --- its mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        (["--gpus=0,0"], {}, "--gpus: '0,0'"),
        (["--gpus=a"], {}, "--gpus: 'a'"),
        (["--api=static"], {}, "--api"),
        (["--nprocs=0"], {}, "--nprocs"),
        (["--gpus=0,1"], {}, "--gpus 0,1 contradicts --device cpu"),
        (
            ["--launcher=spawn"],
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            "--launcher launch",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(harness: Harness, options: list[str], environ: dict[str, Any], words: str) -> None:
    outcome = harness.run(2, *options, **environ)
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1
    assert words in outcome.stderr


def test_as_many_ranks_come_as_were_asked_for(harness: Harness) -> None:
    """Of several --launcher the last counts, for the script as for train.py: else one rank would train alone."""
    assert harness.train(2, *SMALL, "--launcher=spawn", "--launcher=launch")["world_size"] == 2
    for words, spawned in (("--launcher launch --launcher spawn", True), ("--launcher=spawn --launcher launch", False)):
        shown = harness.run(2, *words.split(), "--dry-run").stdout
        assert ("--nprocs=2" in shown, "paddle.distributed.launch" in shown) == (spawned, not spawned)


@pytest.mark.parametrize(
    ("command", "came"),
    [
        ([sys.executable, TRAIN, "--nprocs=2", "--launcher=spawn", "--launcher=launch"], 1),
        ([sys.executable, TRAIN, "--nprocs=3", "--launcher=spawn"], 3),
        ([*LAUNCH[:3], "--nproc_per_node=1", *LAUNCH[4:], TRAIN], 1),
    ],
    ids=["plain", "spawn", "launch"],
)
def test_every_rank_counts_the_ranks(harness: Harness, command: list[str], came: int) -> None:
    outcome = bare(harness, [*command, *SMALL, "--device=cpu", "--run-dir=run"], SAMESTEP_RANKS="2")
    assert outcome.code == 2, outcome
    (line,) = {*outcome.errors, *(line for line in outcome.stdout.splitlines() if line.startswith("error: "))}
    assert f"asked for 2 ranks, but {came} came" in line
    assert not (harness.folder / "run").exists()


@pytest.mark.parametrize("launcher", ["launch", "spawn"])
def test_a_gpu_that_is_not_there_is_one_line(harness: Harness, launcher: str) -> None:
    outcome = harness.run(2, *SMALL, "--device=gpu", f"--launcher={launcher}")
    assert outcome.code == 2, outcome
    assert len(outcome.errors) == 1
    assert "--device gpu" in outcome.errors[0]


# --- what it writes ------------------------------------------------------------------------------------------------


def test_visualdl_gets_every_step_once(harness: Harness) -> None:
    from visualdl import LogReader

    folder = harness.folder / "scalars"
    options = [*SMALL, "--global-batch-size=1000", f"--visualdl={folder}"]  # 4 steps an epoch
    harness.train(2, *options, "--max-steps=5")
    result = harness.train(2, *options, "--max-steps=9")
    assert result["resumed_from_step"] == 5
    (file,) = folder.iterdir()
    reader = LogReader(file_path=str(file))
    read = {tag: [(record.id, record.value) for record in reader.get_data("scalar", tag)] for tag in SCALARS}
    assert [step for step, _ in read["train/loss"]] == list(range(1, 10))
    assert [value for _, value in read["train/loss"]] == pytest.approx(losses(harness.folder / "run"), rel=1e-6)
    assert [step for step, _ in read["test/accuracy_top1"]] == [4, 8]
    assert all(one <= two for (_, one), (_, two) in zip(read["test/accuracy_top1"], read["test/accuracy_top2"]))


SCALARS = ("train/loss", "test/accuracy_top1", "test/accuracy_top2")


def test_fashion_mnist_is_evaluated_exactly(harness: Harness) -> None:
    write_fashion(harness.folder / "data" / "fashion-mnist")
    options = ["--dataset=fashion-mnist", "--epochs=1", "--global-batch-size=500", "--api=highlevel"]
    outcome = harness.run(3, *options, f"--data-dir={harness.folder / 'data'}")
    assert outcome.code == 0, outcome
    assert outcome.result["test_examples"] == 10_000
    assert outcome.result["steps"] == 120
    assert outcome.result["test_accuracy"] > 0.7


def test_the_run_dir_holds_no_pickle_and_the_console_no_chatter(harness: Harness) -> None:
    """Paddle's launcher repeats on the console what rank 0 says, were it not for the launch script."""
    outcome = harness.run(1, *SMALL, OMP_NUM_THREADS="2")
    harness.checked(outcome, 1)
    assert len(outcome.stdout.splitlines()) == 2
    assert outcome.stderr == ""
    suffixes = {path.suffix for path in (harness.folder / "run").rglob("*") if path.is_file()}
    assert not suffixes & {".pdparams", ".pdopt", ".pkl", ".pt"}
