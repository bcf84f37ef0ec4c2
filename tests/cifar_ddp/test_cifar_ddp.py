"""Test cifar_ddp: a step with all usual parts is the same at any world size and after kills."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import amount
from harness import Harness, app_spec, evaluation, last_step, losses, relative_difference, told_by
from samestep import checkpoint

SPEC = app_spec("cifar_ddp")
SMALL = (f"--dataset={SPEC.dataset}", "--epochs=100", "--log-every=1")
EVERYTHING = SPEC.variants[0]


def uneven_batch(examples: int) -> int:
    """Return a global batch size for three micro-batches of equal size. Neither 2 nor 3 divides this size.

    The last batch of an epoch is as small as possible. With 1,024 samples, a batch has 93 samples and the last has 1.
    """
    micro_batches = [size for size in range(examples // 40, examples // 30) if size % 2 and size % 3]
    return min((3 * size for size in micro_batches), key=lambda size: (examples - 1) % size)


assert SPEC.train_examples
BATCH = uneven_batch(SPEC.train_examples)
EPOCH = math.ceil(SPEC.train_examples / BATCH)  # steps per epoch
UNEVEN = f"--global-batch-size={BATCH}"


def test_everything_on_is_the_same_step_at_any_number_of_ranks(harness: Harness, soak: bool) -> None:
    """Runs on several ranks also stop in mid-epoch and resume."""
    curves = []
    averages = []
    for n in amount(soak, few=(1, 3), many=(1, 2, 3, 4)):
        run_dir = harness.folder / str(n)
        steps = amount(soak, few=EPOCH + 2, many=50)
        stops = [5, steps]
        if n == 1:
            stops = [steps]
        for stop in stops:
            harness.train(n, *SMALL, *EVERYTHING, UNEVEN, "--dtype=float64", f"--max-steps={stop}", run_dir=run_dir)
        curves.append(losses(run_dir))
        averages.append(checkpoint.load_weights(run_dir / "model-ema.safetensors"))
    assert len(curves[0]) == steps
    assert min(curves[0]) < SPEC.loss_factor * curves[0][0]
    assert max(relative_difference(curves[0], curve) for curve in curves[1:]) < SPEC.tolerance
    for average in averages[1:]:
        assert max(np.abs(average[name] - array).max() for name, array in averages[0].items()) < SPEC.tolerance


MEMORY = ("--input=memory",)
LOADER = ("--input=loader", "--workers=1")


@pytest.mark.parametrize(
    ("n", "autocast", "way"),
    [
        (2, "bfloat16", LOADER),
        (3, "none", MEMORY),
        (2, "none", LOADER),
        (3, "bfloat16", MEMORY),
    ],
)
@pytest.mark.soak  # the quick tests kill a run with everything on and a loader (tests/common)
def test_everything_on_survives_kills(
    harness: Harness, soak: bool, n: int, autocast: str, way: Sequence[str], table: list[str]
) -> None:
    """The launch script restarts the job from its last checkpoint. The loader workers of a killed rank also end."""
    runs = amount(soak, few=1, many=5)
    kills = amount(soak, few=1, many=4)
    chance = random.Random(n)
    options = [*SMALL, *EVERYTHING, UNEVEN, f"--autocast={autocast}", "--checkpoint-every=5"]
    options += [f"--max-steps={EPOCH + 2 + 10 * kills}", f"--max-restarts={kills}"]
    expected = ends_of(harness.train(n, *options, run_dir=harness.folder / "undisturbed"))
    for i in range(runs):
        job = harness.start(n, *options, *way, run_dir=harness.folder / str(i))
        for kill in range(kills):
            job.wait_for_step(10 * kill + chance.randrange(1, 11))
            os.kill(job.ranks()[chance.randrange(n)], signal.SIGKILL)
            time.sleep(1)  # until then, job.ranks() may list the dead rank
        result = harness.checked(job.finish(), n)
        assert result["restarts"] == kills
        assert ends_of(result) == expected
    what = f"SIGKILL of a random rank, everything on, {autocast}, {way[0][2:]}"
    table.append(f"| {harness.app.name} | {n} | {what} | {runs * kills} | {runs * kills} |")


@pytest.mark.soak  # the quick tests kill and stop the run without --compile (tests/common)
def test_a_compiled_step_survives_a_kill_and_a_stop(harness: Harness) -> None:
    """A restart compiles kernels for a first batch of another size, but must compute the same bits."""
    plain_options = [*SMALL, *EVERYTHING, UNEVEN, "--lr=0.01"]  # at lr 0.1, rounding soon grows to 1e-3
    options = [*plain_options, "--compile", "--checkpoint-every=5"]
    last = f"--max-steps={EPOCH + 2}"
    whole = harness.start(2, *options, last, run_dir=harness.folder / "undisturbed").finish(1200)
    expected = ends_of(harness.checked(whole, 2))
    job = harness.start(2, *options, last, run_dir=harness.folder / "killed")
    job.wait_for(lambda: last_step(job.run_dir) >= 7, limit=1200)
    os.kill(job.ranks()[1], signal.SIGKILL)
    result = harness.checked(job.finish(1200), 2)
    assert (result["restarts"], ends_of(result)) == (1, expected)
    # The first batch of the second start is the epoch's last batch, which has few samples.
    for stop in (EPOCH - 1, EPOCH + 2):
        parts = harness.start(2, *options, f"--max-steps={stop}", run_dir=harness.folder / "parts").finish(1200)
    result = harness.checked(parts, 2)
    assert (result["resumed_from_step"], ends_of(result)) == (EPOCH - 1, expected)
    plain = harness.train(2, *plain_options, last, run_dir=harness.folder / "plain")
    # The plain run draws the same random numbers, but differences by rounding in float32 grow from step to step.
    assert relative_difference(losses(Path(plain["run_dir"]))[:6], losses(Path(result["run_dir"]))[:6]) < 1e-3


def ends_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return the results that equal runs share: digests of the weights and their average, losses and evaluation."""
    run_dir = Path(result["run_dir"])
    average = checkpoint.weights_sha256(checkpoint.load_weights(run_dir / "model-ema.safetensors"))
    return result["weights_sha256"], average, losses(run_dir), evaluation(result)


PLAIN = """
import copy
import json
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from data import load
from model import build_model
from options import parse
from samestep.sharding import GlobalBatches
from samestep.torch.samplers import index_array
from torch import nn

given = json.loads(sys.argv[1])
SEED = 1
torch.set_num_threads(1)
options = parse([f"--dataset={given['dataset']}", "--dtype=float64", "--dropout=0", f"--seed={SEED}"])
training, test = load(options, torch.device("cpu"))
batches = GlobalBatches(len(training), given["batch"], SEED)
epoch = batches.steps_per_epoch


def train(kind, steps):
    model = build_model(options, torch.float64)
    average = copy.deepcopy(model)
    weights = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    groups = [dict(params=weights, weight_decay=0.05), dict(params=others, weight_decay=0.0)]
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.003)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    losses = []
    for step in range(steps):
        if kind == "adamw" and step < 3:  # three steps of warm-up
            lr = 0.003 * (step + 1) / 3
        elif kind == "adamw":  # half a cosine over what is left of two epochs
            lr = 0.003 * 0.5 * (1 + math.cos(math.pi * (step - 3) / (2 * epoch - 3)))
        else:  # a tenth after half of one epoch, a hundredth after three quarters
            lr = 0.1 * 0.1 ** ((step >= epoch // 2) + (step >= 3 * epoch // 4))
        for group in optimizer.param_groups:
            group["lr"] = lr
        images, labels = training.batch(index_array(batches.indices(step), batches.epoch(step)))
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.2)
        optimizer.zero_grad()
        loss.backward()
        if kind == "adamw":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        decay = min(0.8, (step + 1) / (step + 10))
        for mine, theirs in zip(average.state_dict().values(), model.state_dict().values()):
            if mine.is_floating_point():
                theirs = decay * mine + (1 - decay) * theirs
            mine.copy_(theirs)
    evaluated = {"adamw": average, "sgd": model}[kind].eval()
    with torch.no_grad():
        images, labels = test.batch(np.arange(len(test)))
        test_loss = F.cross_entropy(evaluated(images), labels).item()
    weights = [{name: each.abs().sum().item() for name, each in one.named_parameters()} for one in (model, average)]
    return dict(losses=losses, test_loss=test_loss, weights=weights)


print(json.dumps({kind: train(kind, steps) for kind, steps in given["kinds"].items()}))
"""


@dataclass(frozen=True)
class Kind:
    ranks: int
    steps: int
    options: Sequence[str]
    files: Sequence[str]  # names of the weight files, without suffix


KINDS = {
    "adamw": Kind(
        ranks=2,
        steps=EPOCH + 2,
        options=(
            *("--epochs=2", "--schedule=cosine", "--warmup-steps=3", "--clip-norm=0.5", "--ema=0.8"),
            f"--keep-best={SPEC.direction}:{SPEC.metric}",
        ),
        files=("model", "model-ema"),
    ),
    "sgd": Kind(ranks=1, steps=8, options=("--epochs=1", "--schedule=step"), files=("model",)),
}


def test_the_steps_are_those_of_a_plain_loop(harness: Harness, soak: bool) -> None:
    """Compare with a plain loop in one process, with torch's batch norm, mean loss and two parameter groups."""
    kinds = amount(soak, few=["adamw"], many=[*KINDS])
    options = [f"--dataset={SPEC.dataset}", "--log-every=1", UNEVEN, "--dtype=float64", "--dropout=0"]
    options += ["--label-smoothing=0.2", "--weight-decay=0.05"]
    steps = {name: KINDS[name].steps for name in kinds}
    reported = told_by("cifar_ddp", PLAIN, {"dataset": SPEC.dataset, "batch": BATCH, "kinds": steps})
    for name in kinds:
        kind = KINDS[name]
        plain = reported[name]
        run_dir = harness.folder / name
        own = [f"--optimizer={name}", f"--max-steps={kind.steps}", *kind.options]
        result = harness.train(kind.ranks, *options, *own, run_dir=run_dir)
        assert relative_difference(plain["losses"], losses(run_dir)) < SPEC.tolerance
        assert result["test_loss"] == pytest.approx(plain["test_loss"], rel=SPEC.tolerance)
        for file, expected in zip(kind.files, plain["weights"]):
            arrays = checkpoint.load_weights(run_dir / f"{file}.safetensors")
            sums = {key: float(np.abs(arrays[key]).sum()) for key in expected}
            assert sums == pytest.approx(expected, rel=SPEC.tolerance)
    # The best weights are averaged weights, because the evaluation uses averaged weights.
    run_dir = harness.folder / "adamw"
    best = checkpoint.load_weights(run_dir / "model-best.safetensors")
    step = json.loads((run_dir / "result.json").read_text())["best_step"]
    kept = checkpoint.load_weights(run_dir / "checkpoints" / f"step-{step:08d}" / "ema.safetensors")
    assert checkpoint.weights_sha256(best) == checkpoint.weights_sha256(kept)


# --- in one process --------------------------------------------------------------------------------------------------

ALONE = """
import json
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dataset = json.loads(sys.argv[1])
told = {}
"""

PARTS = """
from augment import PADDING, crop_and_flip
from data import SIDE, load
from ema import Average
from model import build_model
from options import parse
from samestep.torch import FixedRows, exact
from torch import nn
from train import learning_rate

# Learning rates beside torch's schedulers, which count their calls.
warnings.simplefilter("ignore")  # torch's warn of a step without an optimizer's
steps, schedulers = 40, torch.optim.lr_scheduler
for name, make in {
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, steps),
    "linear": lambda optimizer: schedulers.LinearLR(optimizer, 1.0, 0.0, steps),
    "step": lambda optimizer: schedulers.MultiStepLR(optimizer, [20, 30]),
    "one-cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, steps, cycle_momentum=False),
    "constant": lambda optimizer: schedulers.ConstantLR(optimizer, 1.0),
}.items():
    scheduler = make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2))
    theirs = []
    for _ in range(steps):
        theirs.append(scheduler.get_last_lr()[0])
        scheduler.step()
    options = parse([f"--schedule={name}", "--lr=0.2"])
    ours = [learning_rate(options, step, steps) for step in range(steps)]
    told[f"rates of {name}"] = float(np.abs(np.subtract(ours, theirs)).max())
options = parse(["--lr=0.2", "--warmup-steps=4"])
told["warm-up"] = [learning_rate(options, step, 40) for step in range(5)]

# A sample's crop and flip, in any batch, against one written out.
images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, SIDE, SIDE, 3), np.uint8))
everything = np.arange(50)
whole = crop_and_flip(images, everything, 1, 3)
some = np.array([7, 3, 44])
told["crops"] = {
    "of the sample alone": torch.equal(crop_and_flip(images[some], some, 1, 3), whole[some]),
    "of nothing": crop_and_flip(images[:0], everything[:0], 1, 3).shape == (0, SIDE, SIDE, 3),
    "another epoch": bool((crop_and_flip(images, everything, 1, 4) != whole).any()),
    "another seed": bool((crop_and_flip(images, everything, 2, 3) != whole).any()),
}
padded = torch.nn.functional.pad(images, (0, 0, *[PADDING] * 4))
corners = [(y, x) for y in range(2 * PADDING + 1) for x in range(2 * PADDING + 1)]
windows = [[padded[i, y : y + SIDE, x : x + SIDE] for y, x in corners] for i in range(50)]
straight = [any(torch.equal(whole[i], window) for window in windows[i]) for i in range(50)]
mirrored = [any(torch.equal(whole[i].flip(1), window) for window in windows[i]) for i in range(50)]
told["crops"]["each a window"] = all(a != b for a, b in zip(straight, mirrored))
told["crops"]["mirrored"] = sum(mirrored)

# Batch normalisation at one rank is torch's, with its gradients and its running statistics.
x = torch.randn(6, 8, 5, 5, dtype=torch.float64) * 3 + 2
ours, theirs = exact(nn.BatchNorm2d(8).double()), nn.BatchNorm2d(8).double()
gaps = []
for _ in range(3):
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [norm(each) for norm, each in zip((ours, theirs), inputs)]
    for output in outputs:
        output.pow(3).sum().backward()
    gaps += [(outputs[0] - outputs[1]).abs().max(), (inputs[0].grad - inputs[1].grad).abs().max()]
gaps += [(a - b).abs().max() for a, b in zip(ours.state_dict().values(), theirs.state_dict().values())]
gaps += [(a.grad - b.grad).abs().max() / b.grad.abs().max() for a, b in zip(ours.parameters(), theirs.parameters())]
gaps += [(ours.eval()(x) - theirs.eval()(x)).abs().max()]
told["norm"] = float(max(gaps))
far = torch.randn(64, 8, 8, 8) / 10 + 50  # its variance is the small difference of large numbers
told["norm far off"] = float((exact(nn.BatchNorm2d(8))(far) - nn.BatchNorm2d(8)(far)).abs().max())

# Frozen norms use and keep the stored statistics; their weights are trained.
test_set = load(parse([f"--dataset={dataset}", "--dtype=float64"]), torch.device("cpu"))[1]
images, _ = test_set.batch(np.arange(6))
for virtual_ranks in (None, 2):
    frozen = build_model(parse(["--freeze-bn", "--dropout=0"]), torch.float64)
    exact(frozen, FixedRows(virtual_ranks))
    before = [each.clone() for each in frozen.buffers()]
    trained = frozen.train()(images)
    trained.sum().backward()
    told[f"frozen, {virtual_ranks} virtual ranks"] = [
        frozen.training,
        torch.equal(trained, frozen.eval()(images)),
        all(map(torch.equal, before, frozen.buffers())),
        all(each.grad is not None for each in frozen.parameters()),
        all(getattr(each, "sums", None) is None for each in frozen.modules()),
    ]

# The average forgets the first weights, and counts of batches are no averages. Two layers share a weight.
model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm2d(1), nn.Linear(1, 1))
model[2].weight = model[0].weight
model.register_buffer("mask", torch.zeros(1), persistent=False)
average = Average(model, 0.9)
value = average.model[0].weight.item()
for step in range(200):
    nn.init.constant_(model[0].weight, float(step))
    model[1].num_batches_tracked.fill_(step)
    model.mask.fill_(-np.inf)
    average.update(model, step)
    decay = min(0.9, (step + 1) / (step + 10))
    value = decay * value + (1 - decay) * step
told["average"] = [abs(average.model[0].weight.item() - value) < 1e-3, average.model[1].num_batches_tracked.item()]
told["average"].append(average.model.mask.item() == -np.inf)
print(json.dumps(told))
"""


def test_schedules_crops_norm_and_average_equal_their_definitions() -> None:
    reported = told_by("cifar_ddp", ALONE + PARTS, SPEC.dataset)
    assert all(reported[f"rates of {name}"] < 1e-15 for name in ("cosine", "linear", "step", "one-cycle", "constant"))
    assert reported["warm-up"] == [0.05, 0.1, 0.15000000000000002, 0.2, 0.2]
    mirrored = reported["crops"].pop("mirrored")
    assert 10 < mirrored < 40
    assert all(reported["crops"].values()), reported["crops"]
    assert reported["norm"] < 1e-9
    assert reported["norm far off"] < 1e-3
    assert reported["frozen, None virtual ranks"] == [True] * 5
    assert reported["frozen, 2 virtual ranks"] == [True] * 5
    assert reported["average"] == [True, 199, True]


STEPS = """
import dataclasses
import itertools

import data
import train
from model import build_model
from options import parse
from samestep.torch import GlobalBatchSampler, exact
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


training, _ = data.load(parse([f"--dataset={dataset}"]), torch.device("cpu"))


def loader_of(options, sampler):
    seed = options.seed if options.augment else None
    count = sampler.batches.n
    split = dataclasses.replace(training, images=training.images[:count], labels=training.labels[:count])
    split = dataclasses.replace(split, dtype=getattr(torch, options.dtype), augment_seed=seed)
    return data.make_loader(options, split, sampler)


def curve(*arguments, batch=20, steps=3):
    '''The losses of some steps at one rank, in float64.'''
    options = parse(["--dtype=float64", "--lr=0.02", *arguments])
    dtype = getattr(torch, options.dtype)
    model = build_model(options, dtype)
    ddp, optimizer = DistributedDataParallel(model), train.build_optimizer(options, model)
    sampler = GlobalBatchSampler(len(training), batch, seed=options.seed, accumulate=options.accumulate)
    exact(ddp, sampler)
    batches = itertools.islice(loader_of(options, sampler), steps)
    losses = [train.train_step(options, ddp, optimizer, sampler, *each).item() for each in batches]
    state = [each for entry in optimizer.state.values() for each in entry.values() if torch.is_tensor(each)]
    assert all(each.dtype == dtype for each in [*model.parameters(), *state])
    return losses


def gap(one, other):
    return max(abs(a - b) / abs(a) for a, b in zip(one, other))


# The same shards by both inputs, of one rank of three, from a step in mid-epoch to after its last batch of one sample.
fed = []
for way in ("memory", "loader"):
    options = parse(["--accumulate=2", f"--input={way}"])
    sampler = GlobalBatchSampler(304, 101, rank=2, world_size=3, seed=1, accumulate=2)
    sampler.seek(2)
    loader = loader_of(options, sampler)
    parts = []
    for count in (None, 1):  # the rest of an epoch, and the first batch of the next
        for batch in itertools.islice(loader, count):
            parts += sampler.micro_batches(batch)
    fed.append(parts)
    del loader  # and its workers
told["inputs"] = [[len(labels) for _, labels in shards] for shards in fed]
told["equal"] = all(torch.equal(a, b) for one, other in zip(*fed) for a, b in zip(one, other))
told["channels last"] = all(a.stride() == b.stride() for (a, _), (b, _) in zip(*fed))
for norm in ("group", "batch"):
    whole = curve(f"--norm={norm}")
    told[norm] = {k: gap(whole, curve(f"--norm={norm}", f"--accumulate={k}")) for k in (4, 7)}
told["does nothing"] = [
    words
    for words in ("--no-augment", "--dropout=0", "--label-smoothing=0.3", "--norm=group", "--freeze-bn", "--momentum=0")
    if gap(curve(), curve(words)) < 1e-6
]
told["bfloat16"] = gap(curve("--dtype=float32"), curve("--dtype=float32", "--autocast=bfloat16"))
told["frozen"] = gap(curve("--freeze-bn"), curve("--freeze-bn", "--accumulate=4"))
told["more than samples"] = gap(curve("--norm=group", batch=3), curve("--norm=group", "--accumulate=9", batch=3))
print(json.dumps(told))
"""


def test_micro_batches_make_the_same_step_but_for_batch_normalisation() -> None:
    """Dropout, augmentation and the mean over samples do not depend on micro-batches, but batch statistics do.

    The workers of a DataLoader make the same batches as --input=memory.
    """
    reported = told_by("cifar_ddp", ALONE + STEPS, SPEC.dataset)
    assert reported["inputs"] == [[17, 16, 0, 17, 16]] * 2
    assert reported["equal"]
    assert reported["channels last"]
    assert max(reported["group"].values()) < 1e-9
    assert reported["frozen"] < 1e-9
    assert reported["does nothing"] == []
    assert 1e-5 < reported["bfloat16"] < 0.1  # float32 rounds by at most 1e-7 of a value
    assert reported["more than samples"] < 1e-9
    assert min(reported["batch"].values()) > 1e-4, "then the README is wrong about what accumulation changes"


MISTAKES = """
import os

from options import parse
from samestep import ConfigError
from samestep.options import resume_invariants

for words in (
    "--model=small --stem=imagenet",
    "--norm=group --freeze-bn",
    "--dtype=float64 --autocast=bfloat16",
    "--accumulate=0",
    "--clip-norm=0",
    "--compile",
):
    if words == "--compile":
        os.environ.update(PATH="/nowhere", CXX="")
    try:
        parse(words.split())
    except ConfigError as mistake:
        told[words] = str(mistake)
told["inputs"] = resume_invariants(parse(["--input=loader", "--workers=7"])) == resume_invariants(parse([]))
told["horizon"] = ["epochs" in resume_invariants(parse([f"--schedule={name}"])) for name in ("cosine", "constant")]
print(json.dumps(told))
"""


def test_a_mistake_is_one_line_and_a_schedules_horizon_stays() -> None:
    reported = told_by("cifar_ddp", "import json; told = {}" + MISTAKES)
    assert reported.pop("horizon") == [True, False]
    assert reported.pop("inputs")  # a resume may change --input
    assert len(reported) == 6
    for words, text in reported.items():
        assert "\n" not in text
        assert words.split()[-1].partition("=")[0] in text
