"""Define the row of llm_finetune, an app for language models with batch sizes in tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from gpu_proof import several, single
from gpu_proof.jobs import NotRunError, Row, metrics, result

APP = "llm_finetune"
STEPS = 12
QUICK_STEPS = 4


def finetune(row: Row) -> dict[str, Any]:
    """Compare weights at several world sizes, and losses on the device and the CPU. Measure tokens per second."""
    for package in ("transformers", "peft"):
        if importlib.util.find_spec(package) is None:
            raise NotRunError(f"{package} is missing")
    figures = several.bits(row, APP)
    losses = single.first_losses(row, APP, ["--autocast=bfloat16"], single.BFLOAT16)
    return {**figures, **losses, **speeds(row)}


def speeds(row: Row) -> dict[str, Any]:
    """Return the model's name, and its tokens per second in bfloat16 at 1 and 2 ranks.

    The model is SmolLM2, or the tiny model if SmolLM2 is not available. On CPU, the model is always the tiny model,
    because most processors emulate bfloat16.
    """
    steps = QUICK_STEPS if row.proof.quick else STEPS
    options = ["--autocast=bfloat16", "--epochs=1000", f"--max-steps={steps}", "--log-every=1", "--checkpoint-every=0"]
    if row.proof.device == "cpu":
        options.append("--model=tiny")
    figures: dict[str, Any] = {}
    for ranks in (1, 2):
        run_dir = row.run(APP, ranks, options)
        found = result(run_dir)
        figures["model"] = found["model"]
        figures[f"tokens per second at {ranks}"] = round(tokens_per_second(run_dir, found))
    return figures


def tokens_per_second(run_dir: Path, found: dict[str, Any]) -> float:
    """Return the tokens per second in the second half of a run's steps. The device warms up in the first half."""
    rates = [line["samples_per_second"] for line in metrics(run_dir)]
    late = rates[len(rates) // 2 :]
    seconds_per_sample = sum(1 / rate for rate in late) / len(late)
    tokens_per_sample = found["train_tokens"] / found["train_examples"]
    return float(tokens_per_sample / seconds_per_sample)
