"""Test gpt_fsdp: steps are the same at any mesh, and checkpoints hold a model that no single rank holds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import amount
from harness import ROOT, Harness, faulty, last_step, losses, metrics, relative_difference, told_by
from samestep import checkpoint
from samestep.sharded import storage
from samestep.sharding import GlobalBatches

APP = ROOT / "apps" / "gpt_fsdp"
TINY = ("--dataset=jargon-64k", "--layers=2", "--width=48", "--context=32", "--warmup-steps=5", "--log-every=1")
# 1,843 windows in global batches of 25 and micro-batches of 9, 8 and 8. An epoch's last batch has 18 windows.
UNEVEN = (*TINY, "--lr=0.003", "--global-batch-size=25", "--accumulate=3", "--clip-norm=0.5")
# Global batches of 203 in micro-batches of 68, 68 and 67 make ten steps per epoch. The last batch has 16 windows.
BATCH = 203
STEPS = 16
EXACT = (*UNEVEN, "--dtype=float64", f"--global-batch-size={BATCH}", "--checkpoint-every=3", "--epochs=2")
MESHES = ("1x1", "2x1", "3x1", "4x1", "2x2", "1x2")


def size(mesh: str) -> int:
    dp, tp = map(int, mesh.split("x"))
    return dp * tp


# PLAIN trains the same model in one process with plain torch. Only the order of samples comes from samestep.
PLAIN = """
import json, math
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from samestep.sharding import GlobalBatches

STEPS, BATCH, T, HEADS, EPOCHS = {steps}, {batch}, 32, 4, 2
text = np.frombuffer(Path("{text}").read_bytes()[: 2**16], np.uint8).astype(np.int64)
cut = len(text) - len(text) // 10
windows = GlobalBatches((cut - 1) // T, BATCH, 1)
w = dict((name, each.requires_grad_()) for name, each in load_file("{initial}").items())
angles = torch.arange(T).double()[:, None] * 10000.0 ** (-torch.arange(0, 12, 2).double() / 12)
turns = torch.polar(torch.ones_like(angles), angles)


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x):
    x = torch.complex(x[..., :6], x[..., 6:]) * turns[: x.shape[-2]]
    return torch.cat([x.real, x.imag], -1)


def scores_of(tokens):
    x = w["embedding.weight"][tokens]
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    for i in range(2):
        part = lambda name: w[f"blocks.{{i}}.{{name}}.weight"]
        y = norm(x, part("norm1"))
        q, k, v = ((y @ part(f"attention.{{n}}").T).unflatten(-1, (HEADS, 12)).transpose(1, 2) for n in "qkv")
        weights = (turned(q) @ turned(k).transpose(-1, -2) / 12**0.5).masked_fill(~mask, -math.inf).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2) @ part("attention.out").T
        y = norm(x, part("norm2"))
        y = F.silu(y @ part("feed_forward.gate").T) * (y @ part("feed_forward.up").T)
        x = x + y @ part("feed_forward.down").T
    return norm(x, w["norm.weight"]) @ w["embedding.weight"].T


matrices = [each for each in w.values() if each.ndim > 1]
vectors = [each for each in w.values() if each.ndim == 1]
groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
losses, horizon = [], EPOCHS * windows.steps_per_epoch
for step in range(STEPS):
    along = (step - 5) / (horizon - 5)
    lr = 0.003 * ((step + 1) / 5 if step < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * along)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = lr
    at = 1 + windows.indices(step)[:, None] * T + np.arange(T)
    tokens, targets = torch.from_numpy(text[at - 1]), torch.from_numpy(text[at])
    loss = F.cross_entropy(scores_of(tokens).transpose(1, 2), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(w.values(), 0.5)
    optimizer.step()
    losses.append(loss.item())
with torch.no_grad():
    total = 0.0
    for first in range(cut, len(text), T):
        stop = min(first + T, len(text))
        tokens, targets = (torch.from_numpy(text[first - back : stop - back]) for back in (1, 0))
        total += F.cross_entropy(scores_of(tokens[None])[0], targets, reduction="sum").item()
print(json.dumps(dict(losses=losses, test_loss=total / (len(text) - cut))))
"""


@pytest.fixture
def whole(undisturbed: Callable[..., dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Return a function that returns the result of an undisturbed exact run at a mesh."""
    return lambda mesh: undisturbed(size(mesh), *EXACT, f"--max-steps={STEPS}", f"--mesh={mesh}")


def test_the_steps_are_those_of_a_plain_loop_at_any_mesh(
    harness: Harness, whole: Callable[[str], dict[str, Any]], soak: bool
) -> None:
    """Train with AdamW, warm-up, cosine, clipping and micro-batches of 68, 68 and 67 windows."""
    start = harness.train(1, *EXACT, "--max-steps=0", run_dir=harness.folder / "start")
    text = APP / "text" / "jargon.txt"
    initial = f"{start['run_dir']}/model.safetensors"
    plain = told_by("gpt_fsdp", PLAIN.format(steps=STEPS, batch=BATCH, text=text, initial=initial))
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]

    def check(result: dict[str, Any]) -> None:
        assert relative_difference(plain["losses"], losses(Path(result["run_dir"]))) < 1e-9, result
        assert result["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-9)
        assert result["bits_per_byte"] == pytest.approx(plain["test_loss"] / math.log(2), rel=1e-9)

    for mesh in amount(soak, few=("3x1",), many=MESHES):
        check(whole(mesh))
    run_dir = Path(shutil.copytree(whole("3x1")["run_dir"], harness.folder / "run"))
    oldest, *newer = sorted((run_dir / "checkpoints").iterdir())
    for folder in newer:
        shutil.rmtree(folder)
    resumed = harness.train(2, *EXACT, f"--max-steps={STEPS}", "--mesh=1x2")
    assert oldest.name == f"step-{resumed['resumed_from_step']:08d}"
    check(resumed)


def test_dropout_does_not_depend_on_the_mesh(harness: Harness, soak: bool) -> None:
    """Some micro-batches are empty on some ranks, and the mesh 2x2 recomputes activations."""
    options = [*TINY, "--dtype=float64", "--dropout=0.2", "--global-batch-size=5", "--accumulate=3", "--max-steps=8"]
    harness.train(1, *options, run_dir=harness.folder / "1x1")
    expected = losses(harness.folder / "1x1")
    without = losses(Path(harness.train(1, *options, "--dropout=0", run_dir=harness.folder / "without")["run_dir"]))
    assert relative_difference(expected, without) > 1e-4
    for mesh in amount(soak, few=("2x2",), many=MESHES[1:]):
        recompute = ["--checkpoint-activations"] if mesh == "2x2" else []
        harness.train(size(mesh), *options, f"--mesh={mesh}", *recompute, run_dir=harness.folder / mesh)
        difference = relative_difference(expected, losses(harness.folder / mesh))
        print(mesh, difference)
        assert difference < 1e-12


def test_tensor_parallel_ranks_evaluate_a_batch_without_windows(harness: Harness) -> None:
    """Only the first group has windows of the last of 7 batches. An earlier version hung in this batch."""
    options = ["--dataset=jargon-64k", "--layers=1", "--width=32", "--context=32", "--max-steps=1", "--timeout=60"]
    found = harness.train(4, *options, "--mesh=2x2", run_dir=harness.folder / "2x2")
    alone = harness.train(1, *options, run_dir=harness.folder / "1x1")
    assert found["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)


@pytest.mark.soak  # the quick tests resume a run of 3x1 at 1x2 (a test above)
def test_a_run_killed_in_mid_epoch_resumes_at_another_mesh(
    harness: Harness, whole: Callable[[str], dict[str, Any]], soak: bool, table: list[str]
) -> None:
    """The losses equal the losses of an undisturbed run, and each window is used once."""
    batch = BATCH
    killed_at = 5
    ranks = amount(soak, few=2, many=4)
    options = [*EXACT, f"--max-steps={STEPS}"]
    reference = whole("3x1")
    expected = losses(Path(reference["run_dir"]))
    job = harness.start(ranks, *options, f"--mesh={ranks}x1", "--max-restarts=0", run_dir=harness.folder / "killed")
    first = checkpoint.folder_of(harness.folder / "killed", 3)
    landed = job.wait_for(lambda: first.exists() and (step := last_step(first.parents[1])) >= killed_at and step)
    os.kill(job.ranks()[random.Random(1).randrange(ranks)], signal.SIGKILL)
    assert job.finish().code == 1
    meshes = amount(soak, few=("1x2",), many=("3x1", "2x2", "1x1", "1x2"))
    for mesh in meshes:
        run_dir = shutil.copytree(harness.folder / "killed", harness.folder / mesh)
        result = harness.train(size(mesh), *options, f"--mesh={mesh}", run_dir=run_dir)
        assert killed_at - 3 < result["resumed_from_step"] <= landed + 3
        assert relative_difference(expected, losses(run_dir)) < 1e-9
        assert result["test_loss"] == pytest.approx(reference["test_loss"], rel=1e-9)
        taken = []
        n = result["train_examples"]
        for step in range(GlobalBatches(n, batch, 1).steps_per_epoch):
            dp = ranks if step < result["resumed_from_step"] else int(mesh.partition("x")[0])
            taken += [GlobalBatches(n, batch, 1, rank, dp).indices(step) for rank in range(dp)]
        assert np.array_equal(np.sort(np.concatenate(taken)), np.arange(n))
    table.append(
        f"| {harness.app.name} | {ranks}x1 | SIGKILL, resumed at {', '.join(meshes)} | {len(meshes)} | {len(meshes)} |"
    )


@pytest.mark.soak  # the quick tests kill ranks of 2x1 (tests/common), and resume at 1x2
@pytest.mark.parametrize("mesh", ["1x2", "4x1", "2x2"])
@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_a_kill_costs_no_bit_at_the_same_mesh(
    harness: Harness, soak: bool, mesh: str, autocast: str, table: list[str]
) -> None:
    runs = amount(soak, few=1, many=5)
    kills = amount(soak, few=1, many=4)
    chance = random.Random(mesh)
    options = [*UNEVEN, f"--mesh={mesh}", f"--autocast={autocast}", "--checkpoint-every=4", "--epochs=3"]
    options += [f"--max-steps={6 + 10 * kills}", f"--max-restarts={kills}"]
    ranks = size(mesh)
    reference = harness.train(ranks, *options, run_dir=harness.folder / "undisturbed")
    for i in range(runs):
        job = harness.start(ranks, *options, run_dir=harness.folder / str(i))
        for kill in range(kills):
            job.wait_for_step(10 * kill + chance.randrange(1, 11))
            os.kill(job.ranks()[chance.randrange(ranks)], signal.SIGKILL)
            time.sleep(1)  # until then, job.ranks() may list the dead rank
        result = harness.checked(job.finish(), ranks)
        assert result["restarts"] == kills
        assert result["weights_sha256"] == reference["weights_sha256"]
        assert losses(Path(result["run_dir"])) == losses(Path(reference["run_dir"]))
        assert result["test_loss"] == reference["test_loss"]
    what = f"SIGKILL of a random rank, {autocast}: the same bits"
    table.append(f"| {harness.app.name} | {mesh} | {what} | {runs * kills} | {runs * kills} |")


STAGES = {
    "before its folder": {"audit": "os.mkdir", "match": r"/\.step-00000010\.tmp"},
    "before its weights": {"audit": "open", "match": r"/\.step-00000010\.tmp/model"},
    "between its files": {"audit": "open", "match": r"/\.step-00000010\.tmp/optimizer"},
    "before the manifest": {"audit": "open", "match": r"/\.step-00000010\.tmp/manifest"},
    "before its name": {"audit": "os.rename", "match": r"/\.step-00000010\.tmp"},
}


@pytest.mark.parametrize(
    ("stage", "rank"),
    [
        ("between its files", 1),
        ("before the manifest", 0),
        ("before its name", 0),
        *((stage, rank) for stage in list(STAGES)[:3] for rank in (0, 2)),
    ],
)
@pytest.mark.soak  # the quick tests kill ranks before each change to a checkpoint (tests/core)
def test_a_rank_is_killed_while_a_checkpoint_is_written(
    harness: Harness, soak: bool, stage: str, rank: int, table: list[str]
) -> None:
    """The run resumes from the previous checkpoint."""
    options = [*UNEVEN, "--accumulate=1", "--checkpoint-every=5", "--max-steps=12"]
    reference = harness.train(3, *options, run_dir=harness.folder / "undisturbed")
    fault = {"rank": rank, **STAGES[stage], "signal": signal.SIGKILL}
    outcome = harness.run(3, *options, **faulty(fault))
    result = harness.checked(outcome, 3)
    assert (result["restarts"], result["resumed_from_step"]) == (1, 5), outcome
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert not list((harness.folder / "run").rglob("checkpoints/.*"))
    table.append(f"| {harness.app.name} | 3x1 | SIGKILL of rank {rank}, {stage} | 1 | 1 |")


def test_weights_are_gathered_and_text_is_written(harness: Harness, whole: Callable[[str], dict[str, Any]]) -> None:
    """Gather the weights without a job. The file and its digest equal those at the end of the run."""
    result = whole("3x1")
    run_dir = Path(shutil.copytree(result["run_dir"], harness.folder / "run"))
    at_its_end = (run_dir / "model.safetensors").read_bytes()
    (run_dir / "model.safetensors").unlink()
    done = program("generate.py", run_dir)
    assert done.returncode == 2
    assert "gather_weights.py" in done.stderr
    done = program("gather_weights.py", run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert result["weights_sha256"] in done.stdout
    assert (run_dir / "model.safetensors").read_bytes() == at_its_end
    found = storage.read(checkpoint.folder_of(run_dir, STEPS))
    held = [
        sum(int(np.prod(shape)) for _, _, shape in each.pieces)
        for each in storage.stored_groups(found)["model"].values()
    ]
    assert len(found.files) == 6
    assert sum(held) == sum(array.size for array in checkpoint.load_weights(run_dir / "model.safetensors").values())
    written = [
        program("generate.py", run_dir, "--bytes=40", "--text=hack", *more).stdout for more in ([], [], ["--seed=2"])
    ]
    assert written[0] == written[1] != written[2]
    assert written[0].startswith("hack")
    assert len(written[0].encode(errors="replace")) >= 44
    for wrong in (program("gather_weights.py", harness.folder), program("generate.py", harness.folder)):
        assert wrong.returncode == 2
        assert wrong.stderr.startswith("error: ")


def program(name: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(Path(storage.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command: Sequence[str] = [sys.executable, str(APP / name), *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_a_data_file_may_move_but_not_change(harness: Harness) -> None:
    """A checkpoint holds the fingerprint of the data file, not its path."""
    text = harness.folder / "text"
    text.write_bytes(bytes(range(256)) * 40)
    options = ["--layers=1", "--width=32", "--context=32", "--global-batch-size=20", f"--data-file={text}"]
    first = harness.run(1, *options, "--max-steps=3")
    assert first.code == 0, first
    assert (first.result["dataset"], first.result["test_examples"]) == ("file", 1024)
    moved = text.rename(harness.folder / "moved")
    options[-1] = f"--data-file={moved}"
    assert harness.run(1, *options, "--max-steps=4").result["resumed_from_step"] == 3
    moved.write_bytes(bytes(range(256)) * 40 + b".")
    other = harness.run(1, *options, "--max-steps=5")
    assert other.code == 2
    assert "was trained on other data" in other.errors[0]
    text.write_bytes(b"short")
    for wrong, message in ((text, "too few"), (harness.folder / "none", "cannot read")):
        outcome = harness.run(1, f"--data-file={wrong}", run_dir=harness.folder / "another")
        assert outcome.code == 2, outcome
        assert message in outcome.errors[0]


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (4, ["--mesh=3x1"], "--mesh 3x1 is not DPxTP with a product of 4"),
        (4, ["--mesh=four"], "--mesh four is not DPxTP"),
        (3, ["--mesh=1x3"], "--mesh 1x3 cuts 4 heads into 3"),
        (2, ["--width=36"], "--width 36 is not a multiple of 2 x --heads 4"),
        (2, ["--autocast=bfloat16", "--dtype=float64"], "--autocast bfloat16 is less precise than --dtype float64"),
        (2, ["--dataset=file"], "name it by --data-file"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(
    harness: Harness, n: int, options: list[str], message: str
) -> None:
    outcome = harness.run(n, *options)
    assert outcome.code == 2, outcome
    assert message in outcome.errors[0]
    assert len(outcome.stderr.splitlines()) == 1


CHANGED = """
import json
import distributed
import model
import torch
import torch.distributed as dist
from options import parse
from samestep import ConfigError
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = parse(["--layers=1", "--width=48"])
mesh = distributed.make_mesh(options, torch.device("cpu"))
unchanged = model.GPT


def build(add):
    class Changed(unchanged):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            add(self)

    model.GPT = Changed
    try:
        built = model.build_model(options, torch.float32, mesh)
    except ConfigError as error:
        return str(error)
    return {name: each.full_tensor().unique().tolist() for name, each in built.named_parameters() if each.ndim == 1}


print(json.dumps({
    "buffer": build(lambda gpt: gpt.register_buffer("seen", torch.zeros(2))),
    "temporary buffer": build(lambda gpt: gpt.register_buffer("mask", torch.zeros(2), persistent=False)),
    "kernel": build(lambda gpt: gpt.add_module("conv", nn.Conv1d(4, 4, 3))),
    "slope": build(lambda gpt: gpt.add_module("slope", nn.PReLU(8))),
    "norm": build(lambda gpt: gpt.add_module("last", nn.LayerNorm(8))),
}))
"""


def test_changed_model_has_initial_values_or_is_rejected() -> None:
    """Without these checks, buffers have the values of uninitialized memory, and a bias starts at 1."""
    reported = told_by("gpt_fsdp", CHANGED)
    assert reported["buffer"].startswith("the model has the buffer seen, which the app neither initializes nor saves")
    assert reported["temporary buffer"].startswith("the model has the buffer mask, ")
    assert reported["kernel"].startswith("the parameter conv.weight of shape [4, 4, 3] has no rule")
    assert reported["slope"].startswith("the parameter slope.weight of shape [8] has no rule")
    norms = ("blocks.0.norm1.weight", "blocks.0.norm2.weight", "norm.weight", "last.weight")
    assert reported["norm"] == {**{name: [1.0] for name in norms}, "last.bias": [0.0]}


MARKOV = """
import json
import numpy as np
from data import markov_bits
from options import parse

text = np.frombuffer(b"abracadabra, abracadabra, the cadaver of abra " * 3, np.uint8)
print(json.dumps(markov_bits(text)))
"""


def test_the_markov_model_is_the_one_counted_by_hand() -> None:
    text = b"abracadabra, abracadabra, the cadaver of abra " * 3
    cut = len(text) - len(text) // 10

    def chance(context: bytes, byte: int, order: int) -> float:
        if order < 0:
            return 1 / 256
        context = context[-order:] if order else b""
        seen = [text[i + order] for i in range(cut - order) if text[i : i + order] == context]
        below = chance(context, byte, order - 1)
        if seen:
            return (seen.count(byte) + len({*seen}) * below) / (len(seen) + len({*seen}))
        return below

    bits = [-math.log2(chance(text[:i], text[i], 2)) for i in range(cut, len(text))]
    assert told_by("gpt_fsdp", MARKOV) == pytest.approx(sum(bits) / len(bits), rel=1e-12)


@pytest.mark.soak  # the quick tests compare losses with a plain loop
def test_the_defaults_beat_a_markov_model(harness: Harness) -> None:
    """Train on four ranks with the default options."""
    outcome = harness.start(4).finish(limit=900)
    assert outcome.code == 0, outcome
    print(f"{outcome.seconds:.0f} s")  # pytest -rP shows this time
    assert outcome.result["bits_per_byte"] < outcome.result["markov_bits_per_byte"] < 3.2
    assert outcome.result["dataset"] == "jargon"
    assert "bits per byte" in outcome.stdout
    header = json.loads((harness.folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert header["mesh"] == "4x1"
    assert metrics(harness.folder / "run")


@pytest.mark.soak
def test_a_rank_holds_a_quarter_of_a_large_model(harness: Harness, table: list[str]) -> None:
    """Check each rank's peak memory, minus a tiny model's peak, in training, saving, loading and at the end."""
    few = ("--dataset=jargon-64k", "--context=64", "--global-batch-size=4", "--warmup-steps=2", "--checkpoint-every=2")
    idle = peaks(harness, "tiny", [*few, "--layers=1", "--width=32", "--max-steps=1"])
    options = [*few, "--layers=16", "--width=1024", "--heads=16"]
    for steps in (2, 3):  # the second run resumes from the first run's checkpoint
        found = peaks(harness, "large", [*options, f"--max-steps={steps}"])
        block = 4 * 1024**2 + 3 * 1024 * 2752 + 2 * 1024
        parameters = 16 * block + 257 * 1024
        trained = 16 * parameters / 4  # weights, gradients and Adam's two moments
        saved = 12 * parameters / 4  # the copy of weights and moments that a thread writes
        allowed = 1.3 * trained + saved + 3 * 4 * block
        above = [peak - tiny for peak, tiny in zip(found, idle)]
        assert max(above) <= allowed, (steps, above, allowed)
        what = f"{parameters:,} parameters, to step {steps}: {max(above) / allowed:.2f} of the memory allowed"
        table.append(f"| {harness.app.name} | 4x1 | {what} | 1 | 1 |")


def peaks(harness: Harness, name: str, options: Sequence[str]) -> list[float]:
    """Return each rank's peak memory in bytes (VmHWM) on four ranks, polled until the run ends."""
    job = harness.start(4, *options, run_dir=harness.folder / name)
    most = [0.0] * 4
    begun = time.time()
    while job.process.poll() is None:
        for rank, alive in ((rank, job.alive(rank)) for rank in range(4)):
            with contextlib.suppress(OSError):  # the process may have ended
                held = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{alive.get('pid', 0)}/status").read_text())
                if held and alive["time"] > begun:
                    most[rank] = max(most[rank], 1024.0 * int(held[1]))
        time.sleep(0.05)
    harness.checked(job.finish(), 4)
    return most
