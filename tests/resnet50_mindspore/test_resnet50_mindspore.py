"""Test resnet50_mindspore: model, losses, images, launchers, and batch normalization over ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, Harness, Outcome, losses, metrics, relative_difference
from layouts import TORCHVISION, digest
from processes import free_port
from samestep import ConfigError, checkpoint
from samestep.data import datasets

APP = ROOT / "apps" / "resnet50_mindspore"
TRAIN = str(APP / "train.py")
# Each of 2 ranks has 5 rows of a global batch of 10.
TINY = ["--dataset=synthetic-cifar10", "--depth=10", "--image-size=16", "--global-batch-size=10", "--log-every=1"]


def bare(harness: Harness, command: list[str], **environ: str) -> Outcome:
    return harness.start_command(command, harness.folder / "run", **environ).finish()


def msrun(harness: Harness, *command: str, **environ: str) -> Outcome:
    """Run a program on two ranks by msrun, without the launch script."""
    launcher = [sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2", "--local_worker_num=2"]
    launcher += ["--join=True", f"--master_port={free_port()}", "--log_dir=msrun"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # msrun calls python
    return bare(harness, [*launcher, *command], OMP_NUM_THREADS="1", PATH=path, **environ)


def ask(folder: Path, program: str) -> Any:
    """Run a program that imports the app's files, and return its last line of output, parsed as JSON.

    The program runs in a new process because apps share file names, and from a file because MindSpore compiles source.
    """
    (folder / "program.py").write_text(program)
    answer = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(APP), "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2", "GLOG_v": "3"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


# --- model and losses ----------------------------------------------------------------------------------------------

MODELS = """
import json
import numpy as np
from model import build_model
from weights import load_model, model_arrays
told = {}
for depth in (18, 50):
    model = build_model(depth, False, seed=1)
    arrays = model_arrays(model)
    trainable = [array.size for name, array in arrays.items() if not name.endswith(("mean", "var", "tracked"))]
    told[depth] = {"parameters": sum(trainable)}
    told[depth]["layout"] = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
    other = model_arrays(build_model(depth, False, seed=2))
    told[depth]["seeds differ"] = not np.array_equal(arrays["fc.weight"], other["fc.weight"])
    load_model(model, other)
    told[depth]["loads"] = all(np.array_equal(array, other[name]) for name, array in model_arrays(model).items())
    bias = other.pop("bn1.bias")
    told[depth]["refused"] = []
    for name, wrong in (("", bias), ("bn1.biases", bias), ("bn1.bias", bias[1:]), ("bn1.bias", bias.astype("float64"))):
        given = {**other, **({"bn1.bias": bias} if name == "bn1.biases" else {}), **({name: wrong} if name else {})}
        try:
            load_model(model, given)
        except ValueError as problem:
            told[depth]["refused"].append(str(problem))
print(json.dumps(told), flush=True)
"""


WEIGHTS = """
import json
from types import SimpleNamespace as World
import numpy as np
import distributed, weights
from mindspore import nn
from model import build_model
distributed.choose_device("cpu")
model = build_model(18, False, seed=1)
optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
model.batches_tracked = 7
own = weights.buffers(model) + np.arange(len(weights.buffers(model)), dtype=np.float32)
weights.load_buffers(model, own)
groups = weights.groups(model, optimizer)  # one process, which never called init()
told = {
    "groups": sorted(groups),
    "each": np.array_equal(groups["buffers"]["each"], own[None]),
    "own": np.array_equal(weights.buffers(model), own),
    "running_var": groups["model"]["bn1.running_var"].tobytes() == own[64:128].tobytes(),
}
groups["buffers"]["each"] = np.stack([own + 1, own + 2])
for rank, world_size in ((1, 2), (1, 3)):
    other = build_model(18, False, seed=2)
    moments = nn.Momentum(other.trainable_params(), 0.1, 0.9)
    weights.load(other, moments, World(rank=rank, world_size=world_size), groups)
    told[world_size] = (weights.buffers(other) - own).max().item()
    told["counted"] = other.batches_tracked
weights.load(model, optimizer, World(rank=0, world_size=1), {"model": weights.model_arrays(build_model(18, False, 3))})
told["weights alone"] = model.batches_tracked
told["refused"] = []
for wrong in (groups["buffers"]["each"][:, 1:], np.zeros((2, 0), np.float32)):
    groups["buffers"]["each"] = wrong
    try:
        weights.load(model, optimizer, World(rank=0, world_size=2), groups)
    except ValueError as problem:
        told["refused"].append(str(problem))
rows = [np.array([1, 2**64 - 1], np.uint64), np.array([-1, 2**40]), np.array([np.pi, -0.0]), np.array([3], np.int32)]
gathered = [distributed.all_gather(row) for row in rows]
told["gathered"] = all(r.dtype == row.dtype and r.tolist() == [row.tolist()] for r, row in zip(gathered, rows))
told["broadcast"] = [len(distributed.broadcast(bytes(n))) for n in (0, 1, 5)]
print(json.dumps(told), flush=True)
"""


LOSSES = """
import json
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn
from mindspore.train import Callback, Model
from model import build_loss
ms.set_context(mode=ms.GRAPH_MODE)
random = np.random.default_rng(1)
logits = random.standard_normal((40, 10)).astype(np.float32) * np.logspace(-3, 2.5, 40, dtype=np.float32)[:, None]
labels = random.integers(0, 10, 40).astype(np.int32)
exact = logits.astype(np.float64)
exact -= exact.max(1, keepdims=True)
exact = np.log(np.exp(exact).sum(1)) - exact[np.arange(40), labels]
told = {}
for name in ("expand", "builtin"):
    loss = build_loss(name)
    rows = loss(Tensor(logits), Tensor(labels)).asnumpy()
    def total(x, y):
        return loss(x, y).sum()
    gradient = ms.grad(total)(Tensor(logits), Tensor(labels)).asnumpy()
    told[name] = {"rows": rows.tolist(), "gradient": gradient.tolist()}

told["sinks"] = []
class Steps(Callback):
    def on_train_step_end(self, run_context):
        told["sinks"].append(run_context.original_args().dataset_sink_mode)
line = nn.Dense(10, 1)
images = ds.NumpySlicesDataset(logits, ["image"], shuffle=False).batch(10)
model = Model(line, optimizer=nn.Momentum(line.trainable_params(), 0.1, 0.9))
model.train(2, images, [Steps()], dataset_sink_mode=True, sink_size=2)
print(json.dumps({**told, "exact": exact.tolist()}), flush=True)
"""


DROPS = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
import model
from mindspore import nn
nn.ReLU = nn.Dropout
runpy.run_path(sys.argv[0], run_name="__main__")
"""


COPIES = """
import json
from types import SimpleNamespace as World
import weights
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.experimental import optim
from model import check_dropout
from safetensors.numpy import load
from samestep import ConfigError, NonRetryableError, checkpoint

def build(*more):
    model = nn.SequentialCell([nn.Dense(2, 3), *more])
    model.batches_tracked = 0
    return model

def update(optimizer):
    optimizer(tuple(Tensor(np.full(each.shape, 0.5, np.float32)) for each in optimizer.parameters))

def resume(groups, model, optimizer):
    weights.load(model, optimizer, World(rank=0, world_size=1), groups)

def refusal(call, *arguments):
    try:
        call(*arguments)
    except (ConfigError, NonRetryableError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem}"

def momentum(rate, decay=0.0):
    return lambda parameters: nn.Momentum(parameters, rate, 0.9, decay)

class Listed(nn.Optimizer):
    def __init__(self, parameters):
        super().__init__(0.1, parameters)
        self.sums = [Parameter(Tensor(np.zeros(each.shape, np.float32)), f"sum.{each.name}") for each in parameters]

    def construct(self, gradients):
        for i in range(len(self.sums)):
            self.assignadd(self.sums[i], gradients[i])
            self.assignadd(self.parameters[i], -self.sums[i])

schedule = nn.CosineDecayLR(0.01, 0.4, 4)
told = {"resumed": {}}
made = {"table": momentum([0.1, 0.2, 0.4]), "schedule": momentum(schedule), "decay": momentum(0.1, schedule)}
made |= {"Adam": nn.Adam, "FTRL": nn.FTRL, "list": Listed}
saved = {}
for name, make in made.items():
    model, other = build(), build()
    optimizer = make(model.trainable_params())
    update(optimizer)
    update(optimizer)
    groups = weights.groups(model, optimizer)
    saved[name] = {group: load(checkpoint.serialize(arrays)) for group, arrays in groups.items()}
    if name == "table":
        make = momentum([0.1, 0.2, 0.4, 0.8])  # --epochs may change
    resumed = make(other.trainable_params())
    resume(saved[name], other, resumed)
    for each in (optimizer, resumed):
        update(each)
    found = [weights.groups(model, optimizer), weights.groups(other, resumed)]
    told["resumed"][name] = [
        array.tobytes() == found[1][group][key].tobytes()
        for group, arrays in found[0].items() for key, array in arrays.items()
    ]

old = saved["schedule"]["optimizer"]
saved["schedule"]["optimizer"] = {name: old[name] for name in old if name.endswith(".momentum_buffer")}
optimizer = made["schedule"](other.trainable_params())
resume(saved["schedule"], other, optimizer)
told["old"] = [optimizer.global_step.asnumpy().tolist(), len(saved["schedule"]["optimizer"])]
told["refused"] = [refusal(resume, saved["schedule"], other, nn.FTRL(other.trainable_params()))]
told["refused"] += [refusal(weights.optimizer_arrays, optim.Adam(other.trainable_params(), 0.1))]
optimizer.one = Parameter(Tensor(0.0), "extra")
optimizer.two = Parameter(Tensor(1.0), "extra")
told["refused"] += [refusal(weights.optimizer_arrays, optimizer)]

model = build(nn.BatchNorm1d(3))
model.batches_tracked = 7
other = build(nn.BatchNorm1d(3))
weights.load_model(other, weights.model_arrays(model))
told["counted"] = other.batches_tracked

off = [nn.Dropout(p=0.0), nn.Dropout(1.0), nn.Dropout1d(0.0), nn.Dropout2d(0.0), mint.nn.Dropout(0.0)]
on = [nn.Dropout(p=0.1), nn.Dropout(), nn.Dropout1d(0.1), nn.Dropout2d(0.1), nn.Dropout3d(0.1), mint.nn.Dropout(0.1)]
told["dropouts"] = [refusal(check_dropout, build(*off)), *(refusal(check_dropout, build(each)) for each in on)]
print(json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def told_of_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the output of five programs, by name. One process runs them, because the import of MindSpore needs 2 s."""
    folder = tmp_path_factory.mktemp("models")
    programs = {"MODELS": MODELS, "WEIGHTS": WEIGHTS, "LOSSES": LOSSES, "IMAGES": IMAGES, "COPIES": COPIES}
    runs = ["import contextlib, io, json, os, runpy", "told = {}"]
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
        runs += ["with contextlib.redirect_stdout(io.StringIO()) as out:", f"    runpy.run_path('{name}.py')"]
        runs += [f"told['{name}'] = json.loads(out.getvalue().splitlines()[-1])"]
    return ask(folder, "\n".join([*runs, "print(json.dumps(told), flush=True)", "os._exit(0)"]))


def test_weights_and_statistics_come_back_from_a_checkpoint(told_of_models: Any) -> None:
    """A rank restores its own running statistics at the same world size, and averaged statistics at another."""
    output = told_of_models["WEIGHTS"]
    assert output["groups"] == ["buffers", "model", "optimizer"]
    assert output["each"]
    assert output["own"]
    assert output["running_var"]
    assert output["2"] == 2
    assert output["3"] == 0
    assert output["counted"] == 7
    assert output["weights alone"] == 0
    assert len(output["refused"]) == 2
    assert "running statistics have shape" in output["refused"][0]
    assert output["gathered"]
    assert output["broadcast"] == [0, 1, 5]


def test_other_optimizers_and_models_resume(told_of_models: Any) -> None:
    """A resume repeats updates with schedules, other optimizers, and models without batch norm or without ``bn1``."""
    output = told_of_models["COPIES"]
    assert all(all(equal) for equal in output["resumed"].values()), output["resumed"]
    assert output["old"] == [[-1], 2]
    assert output["refused"] == [
        "ValueError: linear.0.bias is missing",
        "NonRetryableError: a checkpoint cannot hold the learning rate of Adam: use an optimizer of mindspore.nn",
        "NonRetryableError: Momentum has two Parameters extra, and a checkpoint holds one: rename one of them",
    ]
    assert output["counted"] == 7


def test_dropout_is_refused(told_of_models: Any, harness: Harness) -> None:
    accepted, *refused = told_of_models["COPIES"]["dropouts"]
    assert accepted is None
    assert len(refused) == 6
    words = "the dropout 1 draws masks that neither a resume nor another number of ranks repeats: set its p to 0"
    assert all(message.startswith(f"ConfigError: {words}") for message in refused), refused
    (harness.folder / "program.py").write_text(DROPS)
    outcome = bare(harness, [sys.executable, "program.py", TRAIN, *TINY, "--max-steps=1"])
    assert outcome.code == 2, outcome
    assert "the dropout relu draws masks" in outcome.stderr.splitlines()[-1]


def test_the_models_are_torchvisions(told_of_models: Any) -> None:
    """Strict loading compares names, shapes and dtypes. Another test compares the digests with torchvision."""
    output = told_of_models["MODELS"]
    assert output["18"]["parameters"] == 11_181_642
    assert output["50"]["parameters"] == 23_528_522
    for depth, wanted in TORCHVISION.items():
        layout = output[depth]["layout"]
        assert digest(layout) == wanted, layout
        assert output[depth]["seeds differ"]
        assert output[depth]["loads"]
        assert output[depth]["refused"] == [
            "bn1.bias is missing",
            "bn1.biases is not part of it",
            "bn1.bias has shape [63], not [64]",
            "bn1.bias is float64, not float32",
        ]


def test_the_losses_are_equal_and_the_cpu_sinks_no_data(told_of_models: Any) -> None:
    """Compare losses and gradients, also with exponentials that are too large or too small for float32.

    On a CPU, Model ignores dataset_sink_mode=True and reads a batch from memory at each of 2 x 4 steps.
    """
    output = told_of_models["LOSSES"]
    assert output["sinks"] == [False] * 8
    exact = np.array(output["exact"])
    for name in ("expand", "builtin"):
        assert np.allclose(output[name]["rows"], exact, rtol=1e-6, atol=1e-6), name
    assert np.allclose(output["expand"]["rows"], output["builtin"]["rows"], rtol=1e-6, atol=1e-6)
    assert np.allclose(output["expand"]["gradient"], output["builtin"]["gradient"], rtol=1e-6, atol=1e-6)


# --- ranks ---------------------------------------------------------------------------------------------------------

TALK = """
import json, os
from types import SimpleNamespace
import numpy as np
import distributed
from samestep import env
world = env.detect(os.environ)
options = SimpleNamespace(device="cpu", timeout=60, first_step_timeout=60)
if world.role == "scheduler":
    distributed.serve(options)
distributed.choose_device("cpu")
distributed.rendezvous(world, options)
me = world.rank + 1
odd = np.array([0x7FF0000000000001 + me, 2**64 - me], np.uint64)  # as float64: a signalling NaN, and another NaN
rows = [odd, odd.view(np.int64), odd.view(np.float64), odd.view(np.int32), np.array([me], np.float32)]
assert distributed.all_gather(np.empty(0, np.float32)).shape == (2, 0)
gathered = [distributed.all_gather(row) for row in rows]
told = [[str(each.dtype), each.tobytes().hex()] for each in gathered]
contents = [bytes(range(256))[:n] for n in (0, 1, 3, 4, 255)]
told.append([distributed.broadcast(content if world.rank == 0 else b"").hex() for content in contents])
with open(f"told-{world.rank}.json", "w") as file:
    json.dump(told, file)
os._exit(0)
"""


def test_what_ranks_say_arrives_bit_for_bit(harness: Harness) -> None:
    (harness.folder / "program.py").write_text(TALK)
    outcome = msrun(harness, str(harness.folder / "program.py"), PYTHONPATH=str(APP))
    assert outcome.code == 0, outcome
    output = [json.loads((harness.folder / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert output[0] == output[1]
    odd = np.array([[0x7FF0000000000001 + me, 2**64 - me] for me in (1, 2)], np.uint64).tobytes().hex()
    assert output[0][:4] == [[name, odd] for name in ("uint64", "int64", "float64", "int32")]
    assert output[0][4] == ["float32", np.array([1, 2], np.float32).tobytes().hex()]
    assert output[0][5] == [bytes(range(256))[:n].hex() for n in (0, 1, 3, 4, 255)]


RANKS = """
import inspect, json, os
from pathlib import Path
from types import SimpleNamespace as Options
import mindspore as ms
import numpy as np
import auto_parallel, distributed, highlevel, weights
from mindspore import nn
from mindspore.parallel._tensor import _load_tensor_by_layout
from model import Forward, build_loss, build_model
from samestep.checkpoint import state_dict_diff
from options import check_steps
from samestep import ConfigError, RetryableError
from samestep.env import World
from samestep.recovery.watchdog import Watchdog
from samestep.step_timer import StepTimer

messages = ["", "\\n\\n", "only a title:", "\\n------\\n- Kernel error:\\n------\\nLaunch failed: op1\\n", "one\\ntwo"]
told = {"summaries": [distributed.summarize_error(message) for message in messages]}

called = []  # of what only Ascend has
ms.set_device = lambda *arguments: called.append(arguments)
distributed.init = lambda: called.append("init")
distributed.get_group_size = lambda: 8
os.environ["DEVICE_ID"] = "3"
distributed.choose_device("ascend")
options = Options(device="ascend", timeout=300.0, first_step_timeout=1800.0)
for world in (World(3, 8, launcher="rank table"), World(3, 8, launcher="msrun"), World(3, 8, launcher="env")):
    try:
        distributed.rendezvous(world, options)
    except ConfigError as problem:
        called.append(str(problem))
told["called"], told["metadata"] = called, distributed.run_metadata("ascend")
told["refused steps"] = []
for more in ({"drop_remainder": True, "global_batch_size": 1025}, {"sink_size": 4, "global_batch_size": 10}):
    its = {"drop_remainder": None, "sink_size": 1, "log_every": 8, "checkpoint_every": 0, "evaluate_every": 0}
    its |= {"max_steps": None, **more}
    try:
        check_steps(Options(**its), 1024, 8)
    except ConfigError as problem:
        told["refused steps"].append(str(problem))
told["timeouts"] = [os.environ[f"{name}_TIMEOUT"] for name in ("MS_NODE", "HCCL_CONNECT", "HCCL_EXEC")]

made = []  # by Model, where shards sink
init, train = (inspect.signature(each) for each in (highlevel.Model, highlevel.Model.train))
class Model:
    def __init__(self, *network, **others):
        init.bind(*network, **others)
        made.append([*network, others])
    def train(self, *arguments, **others):
        train.bind(self, *arguments, **others)
        loops, shards, (callback, monitor) = arguments
        made.append([loops, shards, type(monitor).__name__, others])
        callback.on_train_begin(None)
        for loss in range(loops):
            callback.on_train_step_begin(None)
            waits.append(watchdog._collective["name"])
            ended = Options(net_outputs=loss, train_network=nn.ReLU())
            callback.on_train_step_end(Options(original_args=lambda: ended))
            waits.append(watchdog._collective)
        raise ValueError("In epoch: 1 step: 2, loss is NAN or INF, training process cannot continue")

highlevel.Model, seen, waits, watchdog = Model, [], [], Watchdog()
watchdog._world, watchdog._options = World(0, 1), Options(run_dir=Path("nowhere"), lr=0.1)
run = Options(world=World(0, 1), timer=StepTimer(), monitor=watchdog, first_step=6, last_step=12)
run.options = Options(sink_size=3, log_every=3, quiet=False, parallel="data")
try:
    highlevel.fit(run, "forward", "optimizer", "shards", lambda *each: seen.append(each), True)
except RetryableError as problem:
    told["nan"] = str(problem)
told["waits"] = waits
told["made"], told["seen"] = made, seen

model = build_model(18, False, seed=1)
told["cut"] = []
for parallel in ("auto", "semi-auto"):
    graph = auto_parallel.cut(Forward(model, build_loss("expand")), model, parallel, 8)
    shard = model.fc.matmul.attrs.get("in_strategy")
    told["cut"].append([type(graph).__name__, graph._parallel_mode, graph._gradients_mean, shard])

# MindSpore's own function cuts the weights, by layouts in the form that it has on Ascend.
def cut(array, matrix, tensor_map, rank):
    size = [n // (1 if axis == -1 else matrix[-1 - axis]) for n, axis in zip(array.shape, tensor_map)]
    layout = (matrix, tensor_map, size, 0, True, "", array.shape)
    return layout, _load_tensor_by_layout(ms.Tensor(array), layout, rank)

optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
step = nn.TrainOneStepCell(Forward(model, build_loss("expand")), optimizer)
auto_parallel.record_layouts(step)  # as on CPU, which cuts nothing
expected = weights.groups(model, optimizer)
parameters, random = step.parameters_dict(), np.random.default_rng(1)
layouts, parts = {}, {}
for name, *layout in (
    ("fc.weight", [8], [-1, 0]), ("moments.fc.weight", [2, 4], [-1, 0]), ("bn1.moving_mean", [2, 2, 2], [1]),
    ("layer1.0.conv1.weight", [2, 2, 2], [2, 0, -1, -1]), ("layer2.0.conv1.weight", [2, 4], [0, 1, -1, -1]),
):
    whole = random.random(parameters[name].shape, np.float32)
    if name.startswith("moments."):
        expected["optimizer"]["fc.weight.momentum_buffer"] = whole
    else:
        expected["model"][weights._torch_name(name)] = whole
    parts[name] = [cut(whole, *layout, rank) for rank in range(8)]
    layouts[name], part = parts[name][5]
    parameters[name].set_data(part, slice_shape=True)
step.parameter_layout_dict = layouts
auto_parallel.record_layouts(step)
def all_gather(row):  # as rank 5 of 8
    for each in parts.values():
        rows = [part.asnumpy().ravel() for _, part in each]
        if np.array_equal(rows[5], row):
            return np.stack(rows)
auto_parallel.all_gather = all_gather
found = weights.groups(model, optimizer)
told["whole"] = [str(state_dict_diff(found[group], expected[group])) for group in ("model", "optimizer")]
told["different"] = [
    name for group in ("model", "optimizer") for name in expected[group]
    if not np.array_equal(found[group][name], expected[group][name])
]
whole = build_model(18, False, seed=1)  # that evaluations use
weights.load_model(whole, weights.averaged(model)[0])
told["evaluated"] = np.array_equal(whole.fc.weight.asnumpy(), expected["model"]["fc.weight"])
print(json.dumps(told), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def told_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ask(tmp_path_factory.mktemp("ranks"), RANKS)


def test_of_a_message_the_line_is_shown_that_says_what_went_wrong(told_of_ranks: Any) -> None:
    """MindSpore's messages begin with lines of dashes and titles."""
    assert told_of_ranks["summaries"] == ["", "", "only a title:", "Launch failed: op1", "one"]


# --- Ascend, where there is none: what the program decides --------------------------------------------------------


def test_on_ascend_a_rank_takes_its_card(told_of_ranks: Any) -> None:
    """Replace MindSpore's functions for Ascend, and compare the recorded calls."""
    *made, refused = told_of_ranks["called"]
    assert made == [["Ascend", 3], "init", "init"]
    assert refused.startswith("env started 8 ranks, which MindSpore cannot join on ascend: use msrun")
    assert told_of_ranks["metadata"]["backend"] == "hccl"


def test_neither_mindspore_nor_hccl_ends_a_rank_that_compiles(told_of_ranks: Any) -> None:
    """The app raises the timeouts of MindSpore and HCCL, so that its watchdog reports the missing rank first."""
    assert told_of_ranks["timeouts"] == ["1860", "1860", "1860"]


def test_model_sinks_loops_of_updates(told_of_ranks: Any) -> None:
    """In two loops of three updates, the run gets each update, and the step of a NaN or infinite loss."""
    assert told_of_ranks["made"] == [
        ["forward", {"optimizer": "optimizer"}],
        [2, "shards", "LossMonitor", {"dataset_sink_mode": True, "sink_size": 3}],
    ]
    assert told_of_ranks["waits"] == ["train step", None, "train step", None]
    assert told_of_ranks["seen"] == [[6, 0], [7, 0], [8, 0], [9, 1], [10, 1], [11, 1]]
    printed = "at step 12 the loss is nan: lower --lr, now 0.1, unless a flipped bit caused it; "
    assert told_of_ranks["nan"].startswith(printed)


def test_the_parallel_modes_are_mindspores_own(told_of_ranks: Any) -> None:
    """MindSpore's AutoParallel gets the mode and averages gradients. semi-auto shards the last layer's features."""
    auto, semi_auto = told_of_ranks["cut"]
    assert auto == ["AutoParallel", "recursive_programming", True, None]
    assert semi_auto == ["AutoParallel", "semi_auto", True, [[1, 8], [1, 8]]]


def test_weights_that_mindspore_has_cut_are_gathered(told_of_ranks: Any) -> None:
    """Checkpoints and evaluations contain the full weights, momenta and statistics that MindSpore shards."""
    assert told_of_ranks["whole"] == ["None", "None"]
    assert told_of_ranks["different"] == []
    assert told_of_ranks["evaluated"]


def test_ascends_driver_decides(ascend_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", "/some/rank_table.json")
    seed = ["--parallel=auto", "--api=highlevel", "--sink-size=5"]  # from MindSpore's tutorial
    for given in ([], ["--parallel=semi-auto"], seed, ["--device=ascend"]):
        parsed = ascend_options["parse"](given)
        assert (parsed.device, parsed.image_size, parsed.first_step_timeout) == ("ascend", 224, 1800)
    assert ascend_options["parse"](["--timeout=2000"]).first_step_timeout == 2000
    with pytest.raises(ConfigError, match="--parallel auto cannot cut for 1 rank"):
        ascend_options["check_ranks"](ascend_options["parse"](["--parallel=auto"]), 1)
    with pytest.raises(ConfigError, match="--parallel semi-auto cannot cut 2048 features into 3"):
        ascend_options["check_ranks"](ascend_options["parse"](["--parallel=semi-auto"]), 3)
    with pytest.raises(ConfigError, match="--parallel auto sinks with MindSpore's Model alone: add --api highlevel"):
        ascend_options["parse"](["--parallel=auto", "--sink-size=5"])
    monkeypatch.delenv("RANK_TABLE_FILE")
    parsed = ascend_options["parse"](["--device=cpu"])
    assert (parsed.device, parsed.image_size, parsed.first_step_timeout) == ("cpu", 32, 300)


def test_an_added_depth_or_dataset_is_left_to_the_ranks(ascend_options: dict[str, Any]) -> None:
    parsed = ascend_options["parse"](["--parallel=semi-auto"])
    parsed.depth = 34
    ascend_options["check_ranks"](parsed, 3)
    ascend_options["check_start"](parsed, "flowers", 0)


# --- images --------------------------------------------------------------------------------------------------------

IMAGES = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from data import MEAN, STD, Split, augment, load, train_loops
from samestep.monitor import Monitor
from samestep.sharding import GlobalBatches
from samestep.step_timer import StepTimer

training, test = load("synthetic-cifar10", Path("nowhere"))
told = {}

everything = np.arange(len(training.labels))
whole = augment(training.images, everything, 1, 3)
some = np.array([700, 3, 3, 41])
told["of the sample alone"] = np.array_equal(augment(training.images[some], some, 1, 3), whole[some])
told["other epochs and seeds"] = [
    float((augment(training.images, everything, seed, epoch) != whole).any((1, 2, 3)).mean())
    for seed, epoch in ((1, 4), (2, 3))
]

padded = np.pad(training.images, ((0, 0), (4, 4), (4, 4), (0, 0)))
found = np.zeros((9, 9, 2), int)  # how often each crop was taken: each image is looked for among all 162
for image, source in zip(whole, padded):
    matches = [
        (top, left, flip)
        for top in range(9)
        for left in range(9)
        for flip in (0, 1)
        if np.array_equal(image, source[top : top + 32, left : left + 32][:, :: 1 - 2 * flip])
    ]
    assert len(matches) == 1
    found[matches[0]] += 1
told["crops"] = [int(found.min()), int(found.max()), found.sum((0, 1)).tolist()]

many = Split(np.broadcast_to(np.zeros((32, 32, 3), np.uint8), (50_000, 32, 32, 3)), np.zeros(50_000, np.int32))
asked = []
class Batches(GlobalBatches):
    def indices(self, step):
        asked.append(step)
        return super().indices(step)

its = Batches(50_000, 256, 1, 0, 8, drop_last=True), range(1950), 224
shards = many.training(*its)
told["sinking"] = [shards.get_dataset_size(), len(asked)]

sinks = sys.modules["mindspore.train.data_sink"]
class Queue:  # to the device
    queue_name, said = "queue", []
    def __getattr__(self, name):
        return lambda *arguments: self.said.append([name, *arguments])
sinks._exec_datagraph = lambda dataset, size, **others: Queue()
known = {"device_target": "Ascend", "mode": 0, "pipeline_stages": 1}
sinks.context = SimpleNamespace(get_context=known.get, get_auto_parallel_context=known.get, GRAPH_MODE=0)
sinks.ops = SimpleNamespace(GetNext=lambda types, shapes, count, queue: lambda: shapes)
run = SimpleNamespace(options=SimpleNamespace(sink_size=3), monitor=Monitor(), timer=StepTimer())
loops = train_loops(run, lambda images, labels, weights: images, shards, True)
told["sinking"].append(len(asked))
told["sunk"] = next(loops)
told["sinking"].append(len(asked))
loops.close()
told["queue"] = Queue.said
asked.clear()
loops = train_loops(run, lambda images, labels, weights: images.shape, many.training(*its), False)
told["sinking"].append(len(asked))
told["loop"] = next(loops)

def batches(n, steps, size=16):
    parts = []
    for rank in range(n):
        pipeline = training.training(GlobalBatches(1024, 10, 1, rank, n), steps, size)
        rows = pipeline.create_tuple_iterator(num_epochs=1)
        parts.append([tuple(column.asnumpy() for column in row) for row in rows])
    return list(zip(*parts))

alone = [step[0] for step in batches(1, range(98, 108))]  # over the end of an epoch, whose last batch has 4 samples
told["shapes"] = sorted({str([column.shape for column in row]) for row in alone})
told["a resume sees the same"] = all(
    np.array_equal(column, other) for step, row in zip(batches(1, range(103, 108)), alone[5:])
    for column, other in zip(step[0], row)
)
told["weights"] = []
for n in (2, 3, 4):
    same = True
    for step, row in zip(batches(n, range(98, 108)), alone):
        kept = [images[weights > 0] for images, labels, weights in step]
        same &= np.array_equal(np.concatenate(kept), row[0][row[2] > 0])
        mean = np.mean([(weights * labels).mean() for images, labels, weights in step])  # a "loss" that is the label
        told["weights"].append(abs(float(mean - row[1][row[2] > 0].mean())))
    told[f"{n} ranks see the same"] = bool(same)

plain = next(training.evaluation(0, 8, 8, 32).create_tuple_iterator(num_epochs=1))[0].asnumpy()
expected = ((training.images[:8] / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
told["normalised"] = float(abs(plain - expected).max())
large = Split(np.zeros((4, 40, 40, 3), np.uint8), np.zeros(4, np.int32))
for size in (32, 40):
    told[f"from 40 to {size}"] = next(large.evaluation(0, 4, 4, size).create_tuple_iterator(num_epochs=1))[0].shape
rows = test.evaluation(3, 140, 64, 16).create_tuple_iterator(num_epochs=1)
told["counted"] = [int((weights.asnumpy() > 0).sum()) for _, _, weights in rows]
print(json.dumps(told), flush=True)
"""


def test_an_images_crop_and_flip_depend_on_seed_epoch_and_sample_alone(told_of_models: Any) -> None:
    """The world size, the batch and a resume do not change an image's crop and flip."""
    output = told_of_models["IMAGES"]
    assert output["of the sample alone"]
    assert all(share > 0.98 for share in output["other epochs and seeds"])
    fewest, most, flips = output["crops"]
    assert fewest >= 0
    assert most < 25  # 1,024 images have 162 choices of crop and flip
    assert abs(flips[0] - flips[1]) < 150
    assert output["shapes"] == ["[(10, 3, 16, 16), (10,), (10,)]"]
    assert output["a resume sees the same"]
    for n in (2, 3, 4):
        assert output[f"{n} ranks see the same"]
    assert max(output["weights"]) < 1e-6
    assert output["normalised"] < 1e-5
    assert output["counted"] == [64, 64, 9]
    assert (output["from 40 to 32"], output["from 40 to 40"]) == ([4, 3, 32, 32], [4, 3, 40, 40])
    # The program counts 195 batches in each of 10 epochs, and requests no batch before the first loop begins.
    # MindSpore's data_sink, with a fake queue to the device, then requests two batches to get types and shapes.
    size, *asked = output["sinking"]
    assert (size, asked) == (1950, [0, 0, 2, 0])
    assert output["sunk"] == output["loop"] == [32, 3, 224, 224]
    assert output["queue"] == [["send", -1], ["stop_send"], ["release"]]


# --- the run -------------------------------------------------------------------------------------------------------


def test_batch_norm_is_averaged_and_the_scheduler_leaves_nothing(undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Check the running statistics in a checkpoint, and the logs of msrun. tests/common shares this run."""
    result = undisturbed(2)
    run_dir = Path(result["run_dir"])
    assert (result["launcher"], result["backend"], result["framework"]) == ("msrun", "mccl", "mindspore")
    found = checkpoint.newest(run_dir, pytest.fail)
    assert found
    model = found.arrays("model")
    each = found.arrays("buffers")["each"]
    assert each.shape[0] == 2
    assert not np.array_equal(each[0], each[1]), "each rank has the statistics of its own images"
    averaged = [model[name].ravel() for name in model if name.endswith(("running_mean", "running_var"))]
    expected = each.mean(axis=0, dtype=np.float64).astype(np.float32)
    assert np.array_equal(np.sort(expected), np.sort(np.concatenate(averaged)))
    assert all(model[name] == result["steps"] for name in model if name.endswith("num_batches_tracked"))

    logs = {path.name for path in (run_dir / "log").iterdir()}
    assert logs == {
        *("rank-0.log", "rank-1.log", "alive-0", "alive-1", "launcher.log", "events.jsonl", "losses.bin"),
        *("scheduler.log", "worker_0.log", "worker_1.log"),
    }
    assert "RESULT" not in (run_dir / "log" / "scheduler.log").read_text()


@pytest.mark.soak  # the common tests also kill workers; this test prints the seconds
def test_a_killed_worker_ends_the_job(harness: Harness) -> None:
    """Kill a worker in five jobs. With msrun's scheduler alone, a job would end after 44 s."""
    for i in range(5):
        job = harness.start(2, *TINY, "--epochs=100", "--max-restarts=0", run_dir=harness.folder / str(i))
        job.wait_for_step(2)
        begun = time.monotonic()
        os.kill(job.ranks()[i % 2], signal.SIGKILL)
        assert job.finish().code == 1
        print(f"a killed worker ended the job after {time.monotonic() - begun:.1f} s")


@pytest.mark.soak  # the quick tests use empty shards (test_what_each_rank_is_given)
def test_a_rank_without_samples_takes_part(harness: Harness) -> None:
    options = [*TINY, "--freeze-bn", "--lr=1e-3", "--global-batch-size=2", "--max-steps=4"]
    harness.train(1, *options, run_dir=harness.folder / "1")
    harness.train(3, *options, run_dir=harness.folder / "3")
    assert relative_difference(losses(harness.folder / "1"), losses(harness.folder / "3")) < 1e-4


@pytest.mark.soak  # the quick tests compare the high-level API's losses at several world sizes
def test_both_apis_take_the_same_steps(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Both APIs compute equal bits, also in loops of several updates, and if one resumes the other's killed run.

    Each epoch drops its incomplete last batch: 1,024 samples make two batches of 400.
    """
    options = [*TINY, "--global-batch-size=400", "--drop-remainder", "--epochs=2", "--lr=1e-3", "--checkpoint-every=2"]
    high = harness.train(1, *options, "--api=highlevel", run_dir=harness.folder / "high")
    loops = ["--sink-size=2", "--log-every=2"]
    functional = harness.train(1, *options, *loops, run_dir=harness.folder / "functional")
    assert losses(harness.folder / "high")[1::2] == [line["loss"] for line in metrics(harness.folder / "functional")]
    assert high["weights_sha256"] == functional["weights_sha256"]
    assert high["train_loss"] == pytest.approx(functional["train_loss"], rel=1e-6)  # the app sums losses in float32
    assert "epoch: 1 step: 4, loss is" in (harness.folder / "high" / "log" / "rank-0.log").read_text()
    lines = metrics(harness.folder / "high")
    assert [(line["epoch"], line["samples_seen"]) for line in lines] == [(0, 400), (0, 800), (1, 1200), (1, 1600)]
    assert high["train_loss"] == pytest.approx((lines[2]["loss"] + lines[3]["loss"]) / 2, rel=1e-6)

    expected = undisturbed(2)
    job = harness.start(2, *harness.app.small, "--api=highlevel", "--max-restarts=0")
    job.wait_for_step(3)
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.finish().code == 1
    result = harness.train(2, *harness.app.small, *loops)
    assert result["resumed_from_step"] in (2, 4, 6)
    assert result["weights_sha256"] == expected["weights_sha256"]
    whole = losses(Path(expected["run_dir"]))
    lines = metrics(Path(result["run_dir"]))
    assert lines[-1]["step"] == 8
    assert all(line["loss"] == whole[line["step"] - 1] for line in lines)


COMPILES = """
import os, runpy, sys, time
import mindspore as ms
compile = ms.nn.Cell.compile
def slow(cell, *batch, **others):
    if not cell.compile_cache and os.environ["RANK_ID"] == "1":
        time.sleep(20 if type(cell).__name__ == "TrainStep" else 8)
    compile(cell, *batch, **others)
ms.nn.Cell.compile = slow
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def compiles(harness: Harness, patience: int) -> Outcome:
    """Run two ranks. One rank compiles longer, so that the other rank waits in training and in evaluation."""
    program = harness.folder / "slow.py"
    program.write_text(COMPILES)
    command = [str(program), TRAIN, *TINY, "--max-steps=2", "--timeout=5"]
    return msrun(harness, *command, f"--first-step-timeout={patience}", "--run-dir=run")


@pytest.mark.soak  # in the quick tests, a rank of a rehearsal compiles for long
def test_a_first_step_may_compile_for_long(harness: Harness) -> None:
    patient = compiles(harness, 60)
    assert patient.code == 0, patient
    assert json.loads((harness.folder / "run" / "result.json").read_text())["steps"] == 2


@pytest.mark.soak
def test_a_first_step_that_compiles_for_too_long_is_reported(harness: Harness) -> None:
    outcome = compiles(harness, 9)
    assert outcome.code != 0, outcome
    printed = [path.read_text() for path in (harness.folder / "run" / "log").glob("rank-*.log")]
    assert any("no progress for 9 s: rank " in text for text in printed), printed
    assert any("; if it was still compiling, give it a longer --first-step-timeout" in text for text in printed), (
        printed
    )


@pytest.mark.soak  # the quick tests start msrun by the script (test_one_run_survives_every_fault)
def test_msrun_alone_takes_the_same_steps(harness: Harness) -> None:
    options = [*TINY, "--max-steps=3"]
    by_script = harness.train(2, *options, run_dir=harness.folder / "by-script")
    outcome = msrun(harness, TRAIN, *options, "--run-dir=run")
    assert outcome.code == 0, outcome
    result = json.loads((harness.folder / "run" / "result.json").read_text())
    assert result["weights_sha256"] == by_script["weights_sha256"]


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        (["--parallel=auto"], {}, "--parallel auto needs Ascend"),
        (["--parallel=semi-auto"], {}, "--parallel semi-auto needs Ascend"),
        (
            ["--sink-size=4"],
            {},
            "--sink-size 4 does not divide --log-every 10: something would be due within a loop; choose a divisor of ",
        ),
        (["--sink-size=5", "--checkpoint-every=6"], {}, "does not divide --checkpoint-every 6"),
        (["--sink-size=5", "--max-steps=9"], {}, "does not divide --max-steps 9"),
        (["--device=ascend"], {}, "/dev/davinci_manager"),
        (
            ["--sink-size=2", "--dataset=synthetic-cifar10", "--global-batch-size=10"],
            {},
            "2 does not divide the steps of an epoch 103",
        ),
        (
            ["--drop-remainder", "--dataset=synthetic-cifar10", "--global-batch-size=1025"],
            {},
            "leaves none of 1024 samples",
        ),
        (["--global-batch-size=2"], {}, "leaves each of 2 ranks one image of 32 x 32, one pixel in the last layers"),
        ([], {"MS_COMPILER_CACHE_ENABLE": "1"}, "leaves the running statistics as they are: unset it"),
        ([], {"RANK_TABLE_FILE": "/some/rank_table.json"}, "RANK_TABLE_FILE=/some/rank_table.json is for Ascend"),
        ([], {"MINDSPORE_HCCL_CONFIG_PATH": "/a.json"}, "MINDSPORE_HCCL_CONFIG_PATH=/a.json is for Ascend"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_once(
    harness: Harness, options: list[str], environ: dict[str, str], words: str
) -> None:
    script = str(ROOT / "scripts" / "run_resnet50_mindspore.sh")
    outcome = harness.start_command(["bash", script, "2", *options], harness.folder, **environ).finish(limit=20)
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert words in outcome.stderr
    assert outcome.stdout == ""


def test_what_the_data_decide_is_refused_by_bare_ranks_too(told_of_ranks: Any) -> None:
    assert told_of_ranks["refused steps"] == [
        "--drop-remainder leaves none of 1024 samples: lower --global-batch-size",
        "--sink-size 4 does not divide the steps of an epoch 103: something would be due within a loop; "
        "choose a divisor of 1",
    ]


def test_ranks_that_msrun_did_not_start_are_refused(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, TRAIN, *TINY], RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    assert outcome.code == 2, outcome
    assert "use msrun" in outcome.stderr.splitlines()[-1]


def test_the_rank_table_chooses_the_launcher(harness: Harness) -> None:
    """Replace the script's exec by echo, because without Ascend, a dry run fails before it prints the launcher."""
    script = (ROOT / "scripts" / "run_resnet50_mindspore.sh").read_text()
    for variable in ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH"):
        shown = subprocess.run(
            ["bash", "-c", script.replace("exec bash", "echo"), "run", "8", "--epochs=1"],
            env={**os.environ, variable: "/some/rank_table.json"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "{python} {app}/each_device.py {nproc} {train} {options} -- 8 --epochs=1\n" in shown
    dry = harness.run(2, *TINY, "--dry-run").stdout
    assert "mindspore.parallel.cluster.run --join=True" in dry
    assert "--worker_num=2 --local_worker_num=2" in dry


def test_the_made_up_images_are_in_the_binary_format() -> None:
    """The synthetic files have the format of CIFAR-10: a label, then three planes of pixels."""
    folder = datasets.resolve("synthetic-cifar10", Path("nowhere")).folder
    first = (folder / "data_batch_1.bin").read_bytes()
    assert len(first) == 205 * 3073
    assert [first[i * 3073] for i in range(10)] == list(range(10))
