"""Test the app's own features: losses over target tokens, batches of tokens, and LoRA."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, Shape, faulty, losses, metrics, relative_difference, told_by

STEPS = 6
EXACT = (
    *("--model=tiny", "--dataset=definitions-240", "--max-length=200", "--micro-tokens=400", "--dtype=float64"),
    *("--step-tokens=1200", "--lr=0.003", "--weight-decay=0.1", "--log-every=1", f"--max-steps={STEPS}"),
)
ALL_WEIGHTS = ("--lora=0",)
LORA = ("--lora=4", "--lr=0.01")

# PLAIN does the same training in one process, with each sample alone, without padding or micro-batches.
PLAIN = """
import json
import torch
from data import IGNORED, Samples, load
from model import build_model, load_tokenizer
from options import parse
from samestep.data.token_batches import TokenBatches
from train import learning_rate

options = parse({options!r})
tokenizer = load_tokenizer(options)
model = build_model(options, tokenizer)
train_set, test_set = load(options, tokenizer)
batches = TokenBatches(
    lengths=train_set.lengths, targets=train_set.targets, step_tokens=options.step_tokens, micro_tokens=10**6,
    seed=options.seed,
)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
decayed = [parameter for parameter in trained if parameter.ndim > 1]
norms = [parameter for parameter in trained if parameter.ndim <= 1]
groups = [dict(params=decayed, weight_decay=options.weight_decay), dict(params=norms, weight_decay=0)]
optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr)


def loss_of(dataset, i):
    sample = dataset._samples[i]
    tokens = torch.from_numpy(sample.tokens)[None]
    scores = model(input_ids=tokens).logits[0, :-1]
    logarithms = scores.log_softmax(-1)
    return -sum(logarithms[k, tokens[0, k + 1]] for k in range(len(scores)) if sample.is_target[k + 1])


losses = []
for step in range(options.max_steps):
    samples = [int(i) for part in batches.plan(step) for i in part]
    targets = sum(int(train_set._samples[i].is_target[1:].sum()) for i in samples)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(options, step, options.epochs * batches.steps_per_epoch)
    optimizer.zero_grad()
    total = 0.0
    for i in samples:
        loss = loss_of(train_set, i) / targets
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(trained, options.clip_norm)
    optimizer.step()
    losses.append(total)
with torch.no_grad():
    test_loss = sum(loss_of(test_set, i).item() for i in range(len(test_set))) / int(test_set.targets.sum())
print(json.dumps([losses, test_loss]))
"""


@pytest.mark.parametrize("variant", [ALL_WEIGHTS, LORA], ids=["all weights", "lora"])
def test_the_steps_are_those_of_a_plain_loop(harness: Harness, variant: tuple[str, ...]) -> None:
    """Train on 1 and 3 ranks, with samples that share a row, and with fewer micro-batches than ranks."""
    expected, test_loss = told_by("llm_finetune", PLAIN.format(options=[*EXACT, *variant]))
    for n, cut in ((1, ()), (3, ()), (2, ("--pack",)), (3, ("--micro-tokens=5000",))):
        run_dir = harness.folder / "-".join((str(n), *cut))
        result = harness.train(n, *EXACT, *variant, *cut, run_dir=run_dir)
        assert relative_difference(expected, losses(run_dir)) < 1e-12
        assert result["test_loss"] == pytest.approx(test_loss, rel=1e-12)
    assert expected[-1] < expected[0]


PACKING = """
import json
import torch
from model import check_packing, tiny_model
from samestep import ConfigError

model = tiny_model()
check_packing(model)
was_training = model.training
forward = model.model.forward
model.model.forward = lambda input_ids, **rest: forward(input_ids, attention_mask=torch.ones_like(input_ids), **rest)
try:
    check_packing(model)
except ConfigError as error:
    print(json.dumps([was_training, str(error)]))
"""


def test_a_model_that_mixes_the_samples_of_a_row_is_refused() -> None:
    """A model of transformers mixes the samples of a row if the model gets an attention mask."""
    was_training, message = told_by("llm_finetune", PACKING)
    assert was_training
    assert message == "--pack: LlamaForCausalLM lets samples that share a row see each other: leave it out"


def test_ranks_that_are_killed_end_with_the_bits_of_one(harness: Harness) -> None:
    """Kill one of 3 ranks, and resume on 2 ranks, in float32 with LoRA and dropout.

    A step has one or two micro-batches, so that some ranks have none. The model has a buffer, which DDP would
    broadcast.
    """
    options = [*harness.app.small, "--max-steps=20", "--virtual-ranks=3", "--micro-tokens=1000"]
    reference = harness.train(1, *options, run_dir=harness.folder / "reference")
    run_dir = harness.folder / "run"
    job = harness.start(3, *options, "--max-restarts=0", run_dir=run_dir)
    job.wait_for_step(7)
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.finish().code == 1
    result = harness.train(2, *options, run_dir=run_dir)
    assert result["resumed_from_step"] == 5
    for name in ("weights_sha256", "test_loss", "train_loss"):
        assert result[name] == reference[name]
    assert losses(run_dir) == losses(harness.folder / "reference")


def test_a_frozen_weight_that_changes_is_named_and_undone(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The weight makes the gradients of all ranks wrong, and equal. No checkpoint contains it."""
    reference = undisturbed(2)
    every = Shape.of(reference).every
    outcome = harness.run(2, *harness.app.small, **faulty({"rank": 1, "differ": every + 1, "frozen": True}))
    result = harness.checked(outcome, 2)
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert (result["restarts"], result["resumed_from_step"]) == (1, every)
    assert outcome.errors[0].startswith(f"error: ranks 0 and 1 differ at step {2 * every}, first in frozen base_model.")


WEIGHTS = """
import json
import numpy as np
from data import ByteTokenizer, Samples, idle_share, load, make_sampler, tokenize
from options import parse
from model import load_tokenizer

options = parse({options!r})
train_set, test_set = load(options, load_tokenizer(options))
shares = train_set.targets / train_set.lengths
turns = [
    dict(role="system", content="S"), dict(role="user", content="a"), dict(role="assistant", content="bc"),
    dict(role="user", content="d"), dict(role="assistant", content="e"),
]
sample = tokenize(ByteTokenizer(), turns)
tokens, labels = Samples([sample, tokenize(ByteTokenizer(), turns[1:3])]).__getitems__(np.array([1, 0]))
idle = [idle_share(make_sampler(options, train_set, 0, ranks).batches) for ranks in (1, 3, 99)]
print(json.dumps([len(train_set), len(test_set), shares.min(), shares.max(), tokens.tolist(), labels.tolist(), idle]))
"""


def test_targets_are_the_completions_and_their_ends() -> None:
    """A label is the next token. In the embedded dataset, the fraction of targets varies widely between samples."""
    options = ["--model=tiny", "--dataset=definitions-240"]
    counts = told_by("llm_finetune", WEIGHTS.format(options=options))
    assert counts[:2] == [216, 24]
    assert counts[2] < 0.1
    assert counts[3] > 0.8
    first = [*b"a\n", *b"bc", 256]
    second = [*b"S\na\n", *b"bc", 256, *b"d\n", *b"e", 256]
    none = -100
    assert counts[4] == [first + [0] * (len(second) - len(first)), second]
    padding = len(second) - len(first)
    assert counts[5][0] == [none, *b"bc", 256, none, *[-101] * padding]
    # The fraction of time that 1, 3 and 99 ranks wait, because a step has few micro-batches.
    idle = counts[6]
    assert idle[0] == 0
    assert 0 < idle[1] < 0.5
    assert idle[2] > 0.9
    assert counts[5][1] == [none, none, none, *b"bc", 256, none, none, *b"e", 256, none]


def test_a_run_shows_the_loss_before_and_its_tokens(harness: Harness) -> None:
    outcome = harness.run(2, *harness.app.small, "--epochs=1")
    result = harness.checked(outcome, 2)
    before = [line for line in outcome.stdout.splitlines() if "before training" in line]
    assert len(before) == 1
    assert float(before[0].split()[2]) > result["test_loss"]
    assert result["steps"] == -(-result["train_tokens"] // result["step_tokens"])
    assert 0 < result["train_targets"] < result["train_tokens"]
    assert 0 <= result["idle_share"] < 0.5
    assert metrics(Path(result["run_dir"]))[-1]["samples_seen"] == result["train_examples"] == 216
