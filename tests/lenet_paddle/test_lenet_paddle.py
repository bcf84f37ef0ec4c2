"""Test the features of lenet_paddle: three APIs, two launchers, two counts of predictions, and VisualDL."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import ROOT, Harness, Outcome, bare, losses, metrics, relative_difference, write_fashion
from processes import free_port
from samestep import checkpoint

APP = ROOT / "apps" / "lenet_paddle"
TRAIN = str(APP / "train.py")
SMALL = ["--dataset=mnist-5k", "--max-steps=6", "--log-every=1"]
LAUNCH = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node=2", "--log_dir=paddle-log"]
SCRIPT = str(ROOT / "scripts" / "run_lenet_paddle.sh")
FLEETRUN = [str(Path(sys.executable).parent / "fleetrun"), *LAUNCH[3:]]

WAYS = [
    (api, launcher, n) for api in ("basic", "fleet", "highlevel") for launcher in ("launch", "spawn") for n in (1, 2, 3)
]
# The expected losses come from the API basic. The soak compares killed runs of highlevel by both launchers, too.
IN_MATRIX = [("fleet", "spawn", 3), ("highlevel", "launch", 2)]


def test_all_apis_and_launchers_take_the_same_steps(harness: Harness, soak: bool) -> None:
    """A global batch of 43 is not a multiple of 2 or 3, and the last batch of an epoch has one sample."""
    options = [*harness.app.exact, "--global-batch-size=43", "--max-steps=100"]
    expected = harness.train(1, *options, run_dir=harness.folder / "expected")
    curve = losses(harness.folder / "expected")
    assert len(curve) == 100
    learnt = accuracies(harness.folder / "expected")
    assert sum(learnt[-10:]) / 10 > 0.8 > 0.3 > learnt[0]
    learnt_top2 = accuracies(harness.folder / "expected", "accuracy_top2")
    assert all(top1 <= top2 for top1, top2 in zip(learnt, learnt_top2))
    assert 0.5 < expected["test_accuracy"] < expected["test_accuracy_top2"] < 1
    for api, launcher, n in amount(soak, few=IN_MATRIX, many=WAYS):
        run_dir = harness.folder / f"{api}-{launcher}-{n}"
        verbose = ["--verbose=2"] if api == "highlevel" else []
        outcome = harness.run(n, *options, f"--api={api}", f"--launcher={launcher}", *verbose, run_dir=run_dir)
        result = harness.checked(outcome, n)
        assert result["api"] == api
        check_progress(outcome.stdout, run_dir, n if verbose else 0)
        assert relative_difference(curve, losses(run_dir)) < 1e-9, run_dir.name
        assert accuracies(run_dir) == learnt, run_dir.name
        assert accuracies(run_dir, "accuracy_top2") == learnt_top2, run_dir.name
        for name in ("test_accuracy", "test_accuracy_top2", "test_examples"):
            assert result[name] == expected[name], run_dir.name
        (evaluated,) = [line for line in metrics(run_dir) if "test_accuracy" in line]  # after the first epoch
        assert 0.5 < evaluated["test_accuracy"] < evaluated["test_accuracy_top2"] < 1
        assert result["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-9)


def accuracies(run_dir: Path, name: str = "accuracy") -> list[float]:
    """Return the fraction of correct predictions since the previous line, for each line of metrics.jsonl."""
    return [line[name] for line in metrics(run_dir)]


def check_progress(stdout: str, run_dir: Path, n: int) -> None:
    """Check the lines that paddle.Model printed on rank 0 of ``n`` ranks. With n = 0, no line may be printed."""
    number = r"(\d+\.\d+(?:e-\d+)?)"
    lines = re.findall(rf"^step +(\d+)/100 - loss: {number} - acc_top1: {number} - acc_top2: {number} ", stdout, re.M)
    assert [int(step) for step, *_ in lines] == (list(range(1, 101)) if n else [])
    assert all(float(loss) < 20 and float(top1) <= float(top2) for _, loss, top1, top2 in lines)
    if n == 1:  # on several ranks, the lines describe only rank 0's shards
        assert [float(loss) for _, loss, _, _ in lines] == pytest.approx(losses(run_dir), abs=1e-4)
        sizes = [43] * 93 + [1]  # batch sizes of the first epoch
        correct = sum(size * share for size, share in zip(sizes, accuracies(run_dir)))
        assert float(lines[93][2]) == pytest.approx(correct / sum(sizes), abs=1e-4)


def test_the_weights_have_pytorchs_names_and_layouts(undisturbed: Callable[..., dict[str, Any]]) -> None:
    result = undisturbed(2)
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


# --- collectives, and the contents of a checkpoint -------------------------------------------------------------------

RENDEZVOUS = """
import os
import distributed
import numpy as np
import paddle
import paddle.nn.functional as F
from samestep import env
world = env.detect(os.environ)
distributed.rendezvous(world, "cpu", 60, "basic")
"""
TRAINED = """
import paddle
import weights
from paddle import nn
from samestep import NonRetryableError

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


def in_app(harness: Harness, n: int, code: str, **environ: str) -> Outcome:
    """Run ``code`` with the app's modules on n ranks."""
    file = harness.folder / "in_app.py"
    file.write_text(code)
    path = os.pathsep.join([str(APP), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(file)] if n == 1 else [*LAUNCH[:3], f"--nproc_per_node={n}", *LAUNCH[4:], str(file)]
    return bare(harness, command, PYTHONPATH=path, PADDLE_DISTRI_BACKEND="gloo", **environ)


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_bytes_and_arrays_arrive_bit_for_bit(harness: Harness, n: int) -> None:
    code = """
for content in (b"", bytes(range(256)), bytes(100_000)):
    assert distributed.broadcast(content if world.rank == 0 else b"another") == content
rows = [np.array([2**62 + 1, -1]), np.array([2**31 - 1, 7], np.int32), np.array([0.1, -0.0, np.nan]), np.zeros(3, "u1")]
for row in rows:
    local = row + np.array(world.rank, row.dtype)
    gathered = distributed.all_gather(local)
    assert gathered.dtype == row.dtype
    assert gathered.shape == (world.world_size, len(row))
    expected = [row + np.array(rank, row.dtype) for rank in range(world.world_size)]
    assert gathered.tobytes() == np.stack(expected).tobytes()
"""
    outcome = in_app(harness, n, RENDEZVOUS + code)
    assert outcome.code == 0, outcome


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_ordering_the_buckets_leaves_batch_normalisation_as_it_was(harness: Harness, n: int) -> None:
    code = """
from types import SimpleNamespace
from highlevel import HighLevel
from samestep.monitor import Monitor
from samestep.step_timer import StepTimer

run = SimpleNamespace(monitor=Monitor(), timer=StepTimer())

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
        parallel, _ = distributed.distribute(api, model, optimizer)
        distributed.fix_reduction_order(model, lambda: F.cross_entropy(parallel(images), labels).backward())
    else:
        HighLevel(run, model, optimizer, images, labels)
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
    other_optimizer = build(other.parameters())
    weights.load(other, other_optimizer, saved)
    update(model, optimizer)
    update(other, other_optimizer)
    one, two = weights.groups(model, optimizer), weights.groups(other, other_optimizer)
    for group in ("model", "optimizer"):
        assert list(one[group]) == list(two[group])
        assert all(one[group][name].tobytes() == two[group][name].tobytes() for name in one[group])
"""
    outcome = in_app(harness, 1, TRAINED + code)
    assert outcome.code == 0, outcome


def test_an_optimizer_that_cannot_be_saved_is_refused(harness: Harness) -> None:
    """A resumed run would silently lack a part of the optimizer's state."""
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
    except NonRetryableError as problem:
        assert words in str(problem), problem
        assert "use another optimizer" in str(problem)
    else:
        raise AssertionError(words)
"""
    outcome = in_app(harness, 1, TRAINED + code)
    assert outcome.code == 0, outcome


def test_training_refuses_layers_that_depend_on_the_number_of_ranks(harness: Harness) -> None:
    code = """
from types import SimpleNamespace
import paddle
import train
from options import parse
from paddle import nn
from samestep import ConfigError

def start(layer, *words, ranks):
    train.build_model = lambda dtype, seed: nn.Sequential(nn.Linear(4, 4), layer)
    try:
        train.train(SimpleNamespace(world=SimpleNamespace(world_size=ranks)), parse(words), "cpu")
    except ConfigError as problem:
        return str(problem)
    except AttributeError as problem:  # this incomplete Run cannot restore
        return str(problem).partition("no attribute ")[2]

for layer in (nn.Dropout(), nn.Dropout2D(), nn.Dropout3D(), nn.AlphaDropout(), nn.FeatureAlphaDropout(),
              nn.LSTM(4, 4, 2, dropout=0.1), nn.MultiHeadAttention(4, 2, dropout=0.1)):
    assert start(layer, ranks=2) == (
        f"1 ({type(layer).__name__}) drops other values at another number of ranks: set its probability to 0, use "
        "--virtual-ranks, or train on 1 rank"
    )
    assert start(layer, ranks=1) == start(layer, "--virtual-ranks=2", ranks=2) == "'restore'"
assert start(nn.TransformerEncoderLayer(4, 2, 4), ranks=2).startswith("1.self_attn (MultiHeadAttention) drops ")
for layer in (nn.BatchNorm(4), nn.BatchNorm1D(4), nn.BatchNorm2D(4), nn.BatchNorm3D(4), nn.SyncBatchNorm(4)):
    for words, ranks in (([], 2), (["--virtual-ranks=2"], 1)):
        assert start(layer, *words, ranks=ranks) == (
            f"1 ({type(layer).__name__}) computes statistics of one rank's samples: use GroupNorm, or freeze the "
            "statistics by use_global_stats=True"
        )
    assert start(layer, ranks=1) == start(layer, "--evaluate-only", "--run-dir=run", ranks=2) == "'restore'"
for build in (nn.BatchNorm, nn.BatchNorm2D):
    layer = build(4, use_global_stats=True)
    assert start(layer, ranks=2) == "'restore'"
    before = [value.numpy().tobytes() for value in layer.state_dict().values()]
    layer(paddle.randn([3, 4, 2, 2])).sum().backward()
    assert [value.numpy().tobytes() for value in layer.state_dict().values()] == before
for layer in (nn.GroupNorm(2, 4), nn.Dropout(0.0), nn.LSTM(4, 4), nn.TransformerEncoderLayer(4, 2, 4, 0.0)):
    assert start(layer, ranks=2) == "'restore'"
"""
    outcome = in_app(harness, 1, code)
    assert outcome.code == 0, outcome


def test_random_augmentation_resumes_in_all_loops(harness: Harness) -> None:
    """The batches draw from three generators. With --virtual-ranks, a micro-batch draws the same on any rank."""
    code = """
import random
from types import SimpleNamespace
import distributed
import highlevel
import numpy as np
import paddle
import train
from options import parse
from paddle import nn
from samestep.monitor import Monitor
from samestep.sharding import GlobalBatches
from samestep.step_timer import StepTimer

class Augmented:
    def batch(self, indices, dtype):
        drawn[tuple(indices)] = [random.random(), np.random.rand(), paddle.rand([1]).item()]
        return paddle.ones([len(indices), 3, 2, 2]), paddle.zeros([len(indices)], "int64")

class Tree:  # replaces a collective
    def __init__(self, model, batches):
        pass
    def add(self, *sums):
        pass
    def all_reduce(self, step, count):
        return [paddle.zeros([1])] * count

def draws(loop, first_step, rank=0, world_size=1):
    global drawn
    drawn = {}
    words = ["--virtual-ranks=4"] if loop is train.train_virtual_ranks else []
    run = SimpleNamespace(
        options=parse(words), monitor=Monitor(), timer=StepTimer(), first_step=first_step, last_step=4
    )
    batches = GlobalBatches(40, 8, 1, rank=rank, world_size=world_size, virtual_ranks=run.options.virtual_ranks)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    loop(run, model, optimizer, Augmented(), batches, lambda loss_sum, correct: None)
    drawn.pop((0,), None)  # the sample before training
    return drawn

def fit(run, model, optimizer, split, batches, after_step):
    for images, labels, size in highlevel.Shards(run, split, batches):
        pass

distributed.GradientTree = Tree
for loop in (train.train_parallel, train.train_virtual_ranks, fit):
    whole = draws(loop, 0)
    assert len(whole) == len({tuple(values) for values in whole.values()})
    resumed = draws(loop, 2)
    assert len(resumed) == len(whole) // 2
    assert resumed.items() <= whole.items(), loop.__name__
both = draws(train.train_virtual_ranks, 0, 0, 2) | draws(train.train_virtual_ranks, 0, 1, 2)
assert both == draws(train.train_virtual_ranks, 0)
assert len(both) == 16

run = SimpleNamespace(options=parse([]), timer=StepTimer(), first_step=0, last_step=1)
batches = GlobalBatches(1, 8, 1, rank=1, world_size=2)
((images, labels, size),) = highlevel.Shards(run, Augmented(), batches)
assert (images.shape, labels.tolist()) == ([1, 3, 2, 2], [highlevel.NO_LABEL])  # the padding row of an empty shard
"""
    outcome = in_app(harness, 1, code)
    assert outcome.code == 0, outcome


def test_spawn_forwards_a_signal_to_all_ranks_that_still_run(harness: Harness) -> None:
    code = """
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
import spawn
from options import parse

def join():
    os.kill(os.getpid(), signal.SIGTERM)
    return True

context = multiprocessing.get_context("fork")
ranks = [context.Process(target=time.sleep, args=[seconds]) for seconds in (0, 20)]
for rank in ranks:
    rank.start()
ranks[0].join()
spawn.dist.spawn = lambda *arguments, **settings: SimpleNamespace(processes=ranks, join=join)
spawn.spawn(None, parse(["--launcher=spawn", "--nprocs=2"]))
ranks[1].join()
assert [rank.exitcode for rank in ranks] == [0, -signal.SIGTERM]
"""
    outcome = in_app(harness, 1, code)
    assert outcome.code == 0, outcome


# --- recovery with every API and launcher ----------------------------------------------------------------------------


@pytest.mark.soak  # the quick tests kill a rank with --api=basic, --launcher=launch (test_one_run_survives_every_fault)
@pytest.mark.parametrize(
    ("api", "launcher", "n"),
    [("highlevel", "spawn", 2), ("highlevel", "launch", 2), ("fleet", "launch", 3), ("basic", "spawn", 2)],
)
def test_a_killed_rank_changes_nothing(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, api: str, launcher: str, n: int
) -> None:
    options = [*harness.app.small, f"--api={api}", f"--launcher={launcher}"]
    expected = undisturbed(n, *([] if api == "basic" else [f"--api={api}"]))  # both launchers have the same result
    for i in range(amount(soak, few=1, many=5)):
        job = harness.start(n, *options, run_dir=harness.folder / str(i))
        job.wait_for_step(10 + i)
        os.kill(job.alive(n - 1)["pid"], signal.SIGKILL)  # spawn sets no rank in the environment
        result = harness.checked(job.finish(), n)
        assert result["restarts"] == 1
        assert result["weights_sha256"] == expected["weights_sha256"]
        assert accuracies(harness.folder / str(i)) == accuracies(Path(expected["run_dir"]))


# --- launchers without the script ----------------------------------------------------------------------------------


def test_paddles_launchers_alone_take_the_same_steps(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool
) -> None:
    """The quick tests start only fleetrun here. Another test starts the other launcher on two addresses."""
    expected = undisturbed(2)
    commands = {"fleetrun": FLEETRUN, "launch": LAUNCH}
    for name in amount(soak, few=["fleetrun"], many=["fleetrun", "launch"]):
        command = commands[name]
        outcome = bare(harness, [*command, TRAIN, *harness.app.small, f"--run-dir={name}"])
        assert outcome.code == 0, outcome
        result = json.loads((harness.folder / name / "result.json").read_text())
        assert result["weights_sha256"] == expected["weights_sha256"]
        assert result["launcher"] == "paddle"


TWO_PROCESSORS = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.soak
def test_spawn_alone_takes_the_processors_that_it_may_use(harness: Harness) -> None:
    command = [sys.executable, "-c", TWO_PROCESSORS, TRAIN, *SMALL, "--launcher=spawn", "--device=cpu", "--run-dir=run"]
    harness.checked(bare(harness, command), min(2, len(os.sched_getaffinity(0))))


@pytest.mark.soak  # the quick tests use two hosts (tests/multihost)
def test_two_addresses_take_the_same_steps(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Use --ips with two addresses of this machine. Paddle refuses 127.0.0.1 in a list of several addresses."""
    hosts = ("127.0.0.2", "127.0.0.3")
    words = [f"--ips={','.join(hosts)}", f"--start_port={free_port()}", "--nproc_per_node=1"]
    jobs = []
    for host in hosts:  # --log_dir is relative to the folder, which simulates a machine's disk
        folder = harness.folder / host
        folder.mkdir()
        command = [*LAUNCH[:3], *words, f"--host={host}", "--log_dir=log", TRAIN, *harness.app.small, "--max-steps=6"]
        jobs.append(harness.start_command([*command, "--run-dir=run"], folder / "run", folder))
    first, second = (job.finish(limit=120) for job in jobs)
    assert (first.code, second.code) == (0, 0), (first, second)
    result = json.loads((harness.folder / hosts[0] / "run" / "result.json").read_text())
    assert (result["world_size"], result["node_count"]) == (2, 2)
    assert losses(harness.folder / hosts[0] / "run") == losses(Path(undisturbed(2)["run_dir"]))[:6]


@pytest.mark.soak
@pytest.mark.parametrize(("late", "flag", "ends"), [(36, "3600", True), (15, "1", False)])
def test_gloos_own_30_seconds_decide_and_no_flag_does(harness: Harness, late: int, flag: str, ends: bool) -> None:
    """FLAGS_stop_check_timeout does not change how long a rank waits for another rank, as the README states."""
    code = f"""
import sys, time
import paddle.distributed as dist
ones = paddle.ones([1])
dist.all_reduce(ones)
if world.rank == 1:
    time.sleep({late})
dist.all_reduce(ones)
"""
    outcome = in_app(harness, 2, RENDEZVOUS + code, FLAGS_stop_check_timeout=flag)
    assert (outcome.code != 0) == ends, outcome
    assert ("gloo" in outcome.stdout and "TIMEOUT" in outcome.stdout) == ends, outcome


def test_two_processes_with_rank_and_world_size_train_together(harness: Harness) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "LOCAL_WORLD_SIZE": "2"}
    # fleet reads more variables than the other two APIs.
    command = [sys.executable, TRAIN, *SMALL, "--api=fleet", "--run-dir=run"]
    jobs = [
        harness.start_command(command, harness.folder / "run", **common, RANK=rank, LOCAL_RANK=rank)
        for rank in ("0", "1")
    ]
    first, second = (job.finish(limit=120) for job in jobs)
    assert harness.checked(first, 2)["launcher"] == "env"
    assert second.code == 0, second


# --- the tutorial's own programs -------------------------------------------------------------------------------------


def test_the_tutorials_five_programs_take_the_same_steps(harness: Harness, soak: bool) -> None:
    """Start the programs in steps/ as a reader does. The mean loss of their ranks is the loss of plain.py to 0.002.

    The quick tests run only five of the eight starts.
    """
    alone = [sys.executable]
    plain = printed(harness, alone, "plain")
    launched = printed(harness, LAUNCH, "launch")
    results = [(launched, 2), (printed(harness, alone, "spawn"), 2)]
    on_one_card = [FLEETRUN[0], "--ips=127.0.0.1", "--nproc_per_node=1", "--log_dir=paddle-log"]
    results += [(printed(harness, on_one_card, "fleet"), 1)]
    if soak:
        results += [(printed(harness, FLEETRUN, "fleet"), 2), (printed(harness, alone, "fleet"), 1)]
        results += [(printed(harness, alone, "highlevel"), 1)]
    for ranks, n in results:
        assert {len(values) for values in ranks.values()} == {n}
        assert mean(ranks) == pytest.approx(mean(plain), abs=2e-3)
    of_rank_0 = [values[0] for values in launched.values()]  # with paddle.Model, only rank 0 prints
    assert mean(printed(harness, LAUNCH, "highlevel")) == pytest.approx(of_rank_0, abs=2e-3)


def printed(harness: Harness, command: list[str], name: str) -> dict[str, list[float]]:
    """Run a program of steps/. Return ``{step: losses in the order of ranks}`` for the steps 20, 40 and 60."""
    outcome = bare(harness, [*command, str(APP / "steps" / f"{name}.py")])
    assert outcome.code == 0, outcome
    logs = sorted((harness.folder / "paddle-log").glob("workerlog.*"))
    text = "".join(path.read_text() for path in logs) or outcome.stdout
    shutil.rmtree(harness.folder / "paddle-log", ignore_errors=True)
    losses: dict[str, list[float]] = {"20": [], "40": [], "60": []}
    # The pattern has no ^, because two ranks write to one pipe, and print() writes the newline separately.
    for step, loss in re.findall(r"step (20|40|60)(?:/63)? - loss: (\S+) - acc_top1: ", text):
        losses[step].append(float(loss))
    return losses


def mean(losses: dict[str, list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in losses.values()]


@pytest.mark.soak
@pytest.mark.parametrize(("method", "works"), [("spawn", False), ("fork", True)])
def test_spawn_in_a_notebook_needs_fork_or_a_file(harness: Harness, method: str, works: bool) -> None:
    """A program in ``python -c`` has no file, like a cell of a notebook."""
    code = f"""
import paddle.distributed as dist

def train():
    dist.init_parallel_env()
    print("rank", dist.get_rank(), flush=True)

dist.spawn(train, nprocs=2, start_method="{method}")
"""
    outcome = bare(harness, [sys.executable, "-c", code])
    assert outcome.code == (0 if works else 1), outcome
    assert ("Can't get attribute 'train'" in outcome.stderr) == (not works), outcome
    assert [outcome.stdout.count(f"rank {rank}\n") for rank in (0, 1)] == [works, works]


# --- mistakes of the caller ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        (["--gpus=0,0"], {}, "--gpus: '0,0'"),
        (["--gpus=a"], {}, "--gpus: 'a'"),
        (["--api=static"], {}, "--api"),
        (["--nprocs=0"], {}, "--nprocs"),
        (["--gpus=0,1"], {}, "--gpus 0,1 contradicts --device cpu"),
        (["--verbose=2"], {}, "--verbose 2 prints paddle.Model's progress: add --api highlevel"),
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
    """The launch script and train.py both use the last --launcher. Otherwise, one rank would train alone."""
    assert harness.train(2, *SMALL, "--launcher=spawn", "--launcher=launch")["world_size"] == 2
    for words, spawned in (("--launcher launch --launcher spawn", True), ("--launcher=spawn --launcher launch", False)):
        shown = harness.run(2, *words.split(), "--dry-run").stdout
        assert ("--nprocs=2" in shown, "paddle.distributed.launch" in shown) == (spawned, not spawned)


@pytest.mark.parametrize(
    ("command", "came"),
    [
        pytest.param([sys.executable, TRAIN, "--nprocs=2", "--launcher=spawn", "--launcher=launch"], 1, id="plain"),
        pytest.param([sys.executable, TRAIN, "--nprocs=3", "--launcher=spawn"], 3, id="spawn", marks=pytest.mark.soak),
        pytest.param([*LAUNCH[:3], "--nproc_per_node=1", *LAUNCH[4:], TRAIN], 1, id="launch", marks=pytest.mark.soak),
    ],
)
def test_every_rank_counts_the_ranks(harness: Harness, command: list[str], came: int) -> None:
    outcome = bare(harness, [*command, *SMALL, "--device=cpu", "--run-dir=run"], SAMESTEP_JOB_INFO='{"ranks":2}')
    assert outcome.code == 2, outcome
    (line,) = {*outcome.errors, *(line for line in outcome.stdout.splitlines() if line.startswith("error: "))}
    assert f"asked for 2 ranks, but {came} joined" in line
    assert not (harness.folder / "run").exists()


@pytest.mark.parametrize("launcher", ["launch", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_gpu_that_is_not_there_is_one_line(harness: Harness, launcher: str) -> None:
    folder = harness.folder / "scalars"
    outcome = harness.run(2, *SMALL, "--device=gpu", f"--launcher={launcher}", f"--visualdl={folder}")
    assert outcome.code == 2, outcome
    assert len(outcome.errors) == 1
    assert "--device gpu" in outcome.errors[0]
    assert not list(folder.glob("*"))  # the folder stays free for the next start


# --- decisions about GPUs that need none -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["3", "--gpus=0,1"], {}, "--gpus 0,1 names 2 GPUs for 3 ranks"),
        (["1", "--gpus=0,1", "--launcher=spawn"], {}, "--gpus 0,1 names 2 GPUs for 1 ranks"),
        (["2", "--gpus=2,5"], {"CUDA_VISIBLE_DEVICES": "2,3"}, "CUDA_VISIBLE_DEVICES=2,3 hides 5"),
        (["2", "--gpus=0,1"], {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= hides 0,1"),
        (["2", "--device=cpu"], {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= lists 0 GPUs"),
        (["3"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1 lists 2 GPUs"),
        (["2", "--selected_gpus=0,1"], {}, "--gpus 0,1: this Paddle is the CPU build"),
        (["1", "--gpus=0"], {"PYTHON": ""}, "--gpus 0: this script would install the CPU build of Paddle"),
    ],
    ids=str,
)
def test_gpus_that_do_not_suit_n_are_one_line_before_anything_starts(
    harness: Harness, words: list[str], environ: dict[str, str], message: str
) -> None:
    outcome = bare(harness, ["bash", SCRIPT, *words, "--run-dir=run"], **environ)
    assert (outcome.code, outcome.stdout) == (2, ""), outcome
    assert len(outcome.stderr.splitlines()) == 1
    assert message in outcome.stderr
    assert not (harness.folder / "run").exists()


def test_a_rank_reports_the_gpus_that_paddles_old_launcher_ignored(harness: Harness) -> None:
    """--selected_gpus starts the old launcher, which would train on one rank with the CPU build of Paddle."""
    outcome = bare(
        harness, [*LAUNCH[:3], "--selected_gpus=0,1", "--log_dir=paddle-log", TRAIN, *SMALL, "--run-dir=run"]
    )
    assert outcome.code != 0, outcome
    assert "error: paddle.distributed.launch ignored --selected_gpus=0,1: this Paddle is the CPU build: " in (
        outcome.stdout + outcome.stderr
    )
    assert not (harness.folder / "run").exists()


def test_a_rank_under_paddles_launcher_alone_compares_its_gpus(harness: Harness) -> None:
    outcome = bare(harness, [*LAUNCH, TRAIN, *SMALL, "--gpus=3", "--run-dir=run"])
    # The launcher's code is -15 if it ended rank 0 because of rank 1's error before rank 0 found its own error.
    assert outcome.code in (2, 256 - signal.SIGTERM), outcome
    logs = "".join(path.read_text() for path in (harness.folder / "paddle-log").glob("workerlog.*"))
    assert "error: --gpus 3 names 1 GPUs for 2 ranks" in logs, outcome
    assert not (harness.folder / "run").exists()


def test_the_launcher_sees_the_gpus_that_are_named(harness: Harness) -> None:
    outcome = bare(harness, ["bash", SCRIPT, "2", "--gpus=7,5", "--dry-run"], CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert outcome.stdout.startswith("env CUDA_VISIBLE_DEVICES=7,5 "), outcome
    assert "CUDA" not in bare(harness, ["bash", SCRIPT, "2", "--dry-run"]).stdout


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ("3", "error: --gpus 3 names no GPU for local rank 1: name one for each rank"),
        ("0,1", "error: --gpus 0,1: this machine has 0 GPUs for local rank 1 (this Paddle is the CPU build): "),
    ],
)
def test_plain_ranks_without_local_world_size_compare_what_they_know(harness: Harness, gpus: str, message: str) -> None:
    command = [sys.executable, TRAIN, *SMALL, f"--gpus={gpus}"]
    outcome = bare(harness, command, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert outcome.code == 2, outcome
    assert outcome.errors[0].startswith(message)
    assert len(outcome.errors) == 1


def test_the_gpu_build_of_paddle_counts_the_gpus_before_its_launcher_does(harness: Harness) -> None:
    """A fake Paddle reports two GPUs. `check_installed` must not import Paddle in its own process."""
    code = """
import os, sys
from pathlib import Path
from options import check_installed, parse
from samestep import ConfigError

def error(ranks, *words):
    try:
        return check_installed(parse(words), ranks)
    except ConfigError as problem:
        return str(problem)

LINE = "this machine has 2 GPUs, and Paddle's launcher gives each of 3 ranks one of them: start fewer, or use "
for device in ("auto", "cpu", "gpu"):
    assert error(3, f"--device={device}") == LINE + "--launcher spawn"
assert error(2) is error(3, "--launcher=spawn") is error(3, "--gpus=0,1,2") is None
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2"  # check_ranks has compared them
assert error(3) is None
del os.environ["CUDA_VISIBLE_DEVICES"]
for broken in ("raise ImportError", Path("paddle.py").read_text().replace("2", "0")):
    Path("paddle.py").write_text(broken)
    assert error(3) is None
assert "paddle" not in sys.modules
"""
    installed = harness.folder / "paddlepaddle_gpu-3.3.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: paddlepaddle-gpu\nVersion: 3.3.1\n")
    (harness.folder / "paddle.py").write_text("class device:\n class cuda:\n  device_count = lambda: 2\n")
    outcome = in_app(harness, 1, code)
    assert outcome.code == 0, outcome


# A rank that got one of two GPUs from Paddle's launcher runs this program. Only CUDA is simulated.
TWO_GPUS = """
import os, sys
import paddle
import distributed, spawn
from options import parse
from samestep import ConfigError, env
from samestep.env import World

paddle.is_compiled_with_cuda, paddle.device.cuda.device_count = lambda: True, lambda: 2
chosen, flags = [], {}
paddle.set_device, paddle.set_flags = chosen.append, flags.update

def device(wanted, gpus, world):
    kind = distributed.choose_device(wanted, gpus, world)
    if kind == "gpu":  # Paddle gets the same number
        assert chosen[-1] == "gpu:" + os.environ["FLAGS_selected_gpus"] == "gpu:" + flags["FLAGS_selected_gpus"]
    return kind, chosen[-1]

def refused(call, *arguments):
    try:
        call(*arguments)
    except ConfigError as problem:
        return "has 2 GPUs for 3 ranks" in str(problem) or "has 2 GPUs for local rank 2:" in str(problem)

world = env.detect(os.environ)
own, other = world.rank, 1 - world.rank
assert world.launcher == "paddle"
assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"
"""


def test_each_rank_gets_its_own_gpu_from_any_launcher(harness: Harness) -> None:
    code = """
assert device("auto", None, world) == ("gpu", f"gpu:{own}")  # as Paddle's launcher numbered it
assert flags["FLAGS_cudnn_deterministic"] is True
assert device("gpu", "5,7", world) == ("gpu", f"gpu:{own}")
assert device("gpu", "7,5", world) == ("gpu", f"gpu:{other}")
assert device("cpu", None, world) == ("cpu", "cpu")
three = World(own, 3, local_rank=own, local_world_size=3, launcher="torchrun")
assert device("auto", None, three) == ("cpu", "cpu")
assert refused(device, "gpu", None, three)
for rank in (0, 1, 2):  # three plain ranks with LOCAL_RANK alone: no GPU is taken twice, and auto decides alike on all
    plain = env.detect({"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank)})
    assert device("auto", None, plain) == ("cpu", "cpu")
    if rank < 2:
        assert device("gpu", None, plain) == ("gpu", f"gpu:{rank}")
assert refused(device, "gpu", None, plain)
two = env.detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
assert device("auto", None, two) == ("gpu", "gpu:1")
os.environ["FLAGS_selected_gpus"] = "0"  # inherited from the shell that started torchrun: it is not each rank's
torchrun = World(2 + own, 4, local_rank=own, local_world_size=2, launcher="torchrun")
assert device("auto", None, torchrun) == ("gpu", f"gpu:{own}")
assert device("gpu", "7,5", torchrun) == ("gpu", f"gpu:{other}")
del os.environ["CUDA_VISIBLE_DEVICES"]
assert device("gpu", "1,0", torchrun) == ("gpu", f"gpu:{other}")
"""
    outcome = in_app(harness, 2, TWO_GPUS + code, CUDA_VISIBLE_DEVICES="5,7")
    assert outcome.code == 0, outcome


def test_spawn_takes_each_visible_gpu(harness: Harness) -> None:
    """With the settings that the app passes to spawn, Paddle and the ranks number the GPUs equally."""
    code = """
def choice(*words):
    return spawn.choose(parse(["--launcher=spawn", *words]))

processors = len(os.sched_getaffinity(0))
assert choice() == (2, {"backend": "nccl"})
assert choice("--gpus=7") == (1, {"backend": "nccl", "gpus": "7"})
assert choice("--nprocs=1") == (1, {"backend": "nccl"})
assert choice("--nprocs=3") == (3, {"backend": "gloo"})  # --device auto
assert choice("--nprocs=3", "--device=gpu") == (3, {"backend": "gloo"})  # the ranks refuse
assert choice("--device=cpu") == (processors, {"backend": "gloo"})
paddle.base.core.is_compiled_with_cuda = lambda: True
for gpus in ("7,5", None):
    count, settings = choice(*([f"--gpus={gpus}"] if gpus else []))
    for rank, environ in enumerate(sys.modules["paddle.distributed.spawn"]._get_subprocess_env_list(count, settings)):
        os.environ |= environ  # as in the process that it starts
        spawned = env.detect(environ)
        assert (spawned.rank, spawned.local_rank, spawned.local_world_size) == (rank, rank, 2)
        number = str(1 - rank if gpus else rank)
        assert distributed.gpu_number(gpus, spawned) == environ["FLAGS_selected_gpus"] == number
paddle.device.cuda.device_count = lambda: 0
assert choice() == (processors, {"backend": "gloo"})
"""
    outcome = in_app(harness, 2, TWO_GPUS + code, CUDA_VISIBLE_DEVICES="5,7")
    assert outcome.code == 0, outcome


def test_the_gpu_wheel_needs_no_cpu_wheel_beside_it(harness: Harness) -> None:
    """The package paddlepaddle-gpu also has the module paddle. This test renames the CPU package to that name."""
    venv = harness.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    (packages,) = venv.glob("lib/python*/site-packages")
    for path in sorted(Path(sysconfig.get_path("purelib")).iterdir()):
        if not path.name.startswith("paddlepaddle-") and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    (installed,) = Path(sysconfig.get_path("purelib")).glob("paddlepaddle*.dist-info")
    made = packages / "paddlepaddle_gpu-3.3.1.dist-info"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    text = (installed / "METADATA").read_text()
    (made / "METADATA").write_text(text.replace("Name: paddlepaddle\n", "Name: paddlepaddle-gpu\n"))
    outcome = harness.run(1, *SMALL, PYTHON=str(venv / "bin" / "python"))
    assert outcome.stderr == ""
    harness.checked(outcome, 1)
    shutil.rmtree(made)
    outcome = harness.run(1, *SMALL, PYTHON=str(venv / "bin" / "python"))
    assert outcome.code == 2, outcome
    assert "lacks paddlepaddle or paddlepaddle-gpu: " in outcome.stderr


# --- what it writes ------------------------------------------------------------------------------------------------


def test_visualdl_gets_every_step_once(harness: Harness) -> None:
    from visualdl import LogReader

    folder = harness.folder / "scalars"
    folder.mkdir()
    (folder / "notes.txt").write_text("own")
    options = [*SMALL, "--global-batch-size=1000", f"--visualdl={folder}"]  # 4 steps per epoch
    harness.train(2, *options, "--max-steps=5")
    result = harness.train(1, *options, "--max-steps=9")
    assert result["resumed_from_step"] == 5
    (file,) = folder.glob("*vdlrecords*")
    assert (harness.folder / "run" / "visualdl-file").read_text() == f"{file.name}\n"
    assert (folder / "notes.txt").read_text() == "own"
    reader = LogReader(file_path=str(file))
    read = {tag: [(record.id, record.value) for record in reader.get_data("scalar", tag)] for tag in SCALARS}
    assert [step for step, _ in read["train/loss"]] == list(range(1, 10))
    assert [value for _, value in read["train/loss"]] == pytest.approx(losses(harness.folder / "run"), rel=1e-6)
    assert [value for _, value in read["train/accuracy_top1"]] == pytest.approx(accuracies(harness.folder / "run"))
    top2 = accuracies(harness.folder / "run", "accuracy_top2")
    assert [value for _, value in read["train/accuracy_top2"]] == pytest.approx(top2)
    assert [step for step, _ in read["test/accuracy_top1"]] == [4, 8]
    assert all(one <= two for (_, one), (_, two) in zip(read["test/accuracy_top1"], read["test/accuracy_top2"]))
    outcome = harness.run(1, *options, run_dir=harness.folder / "other")
    assert (outcome.code, outcome.stderr.count("\n")) == (2, 1), outcome
    assert f"error: --visualdl {folder} holds {file.name}, of another run" in outcome.stderr
    before = file.read_bytes()
    assert harness.run(1, *options, "--evaluate-only").code == 0
    assert file.read_bytes() == before


SCALARS = ("train/loss", *(f"{part}/accuracy_top{k}" for part in ("train", "test") for k in (1, 2)))


def test_visualdl_deletes_nobody_elses_file(harness: Harness) -> None:
    code = """
import json
from pathlib import Path
from samestep import ConfigError
from visual import Scalars

def written(folder, run):
    Path(run).mkdir(exist_ok=True)
    Path(run, "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + chr(10))
    Scalars(Path(folder), Path(run)).close()
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

one = written("shown/one", "one")
assert list(written("shown/one", "one")) == list(one)  # a resume rewrites its own file
assert list(written("shown/two", "two")) != list(one)
Path("others").mkdir()
Path("others", "vdlrecords.1587375595.log").write_text("somebody's")
for folder in ("shown/one", "others"):
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    try:
        written(folder, "three")
    except ConfigError as problem:
        assert str(problem).startswith(f"--visualdl {folder} holds {next(iter(before))}, of another run"), problem
    else:
        raise AssertionError(folder)
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before
"""
    outcome = in_app(harness, 1, code)
    assert outcome.code == 0, outcome


def test_visualdl_knows_a_run_that_was_moved(harness: Harness) -> None:
    code = """
import json
from pathlib import Path
from visual import Scalars

def write(run_dir):
    Scalars(Path("shown"), run_dir).close()
    return [path.name for path in Path("shown").iterdir()]

run_dir = Path("one")
run_dir.mkdir()
(run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + chr(10))
(before,) = write(run_dir)
assert write(run_dir.rename("elsewhere")) == [before]
"""
    outcome = in_app(harness, 1, code)
    assert outcome.code == 0, outcome


@pytest.mark.soak
def test_fashion_mnist_is_evaluated_exactly(harness: Harness) -> None:
    write_fashion(harness.folder / "data" / "fashion-mnist")
    options = ["--dataset=fashion-mnist", "--epochs=1", "--global-batch-size=500", "--api=highlevel"]
    outcome = harness.run(3, *options, f"--data-dir={harness.folder / 'data'}")
    assert outcome.code == 0, outcome
    assert outcome.result["test_examples"] == 10_000
    assert outcome.result["steps"] == 120
    assert outcome.result["test_accuracy"] > 0.7


def test_the_run_dir_holds_no_pickle_and_the_console_no_chatter(harness: Harness) -> None:
    """Without the launch script, Paddle's launcher would repeat rank 0's output on the console."""
    outcome = harness.run(1, *SMALL, OMP_NUM_THREADS="2")
    harness.checked(outcome, 1)
    assert len(outcome.stdout.splitlines()) == 2
    assert outcome.stderr == ""
    suffixes = {path.suffix for path in (harness.folder / "run").rglob("*") if path.is_file()}
    assert not suffixes & {".pdparams", ".pdopt", ".pkl", ".pt"}
