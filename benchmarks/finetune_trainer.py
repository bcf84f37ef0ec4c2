"""Compare transformers' Trainer on several ranks with the same Trainer on one rank.

    .venvs/llm_finetune/bin/python benchmarks/finetune_trainer.py --json benchmarks/finetune_trainer.json
    .venvs/llm_finetune/bin/python benchmarks/finetune_trainer.py --quick     # one case, three steps
    python3 benchmarks/finetune_trainer.py --table benchmarks/finetune_trainer.json     # print the file's table

Each case trains the tiny model of apps/llm_finetune in float64 on global batches of 16 samples. The first rows use
the Trainer's defaults, and the last rows use the kit's ExactTrainer. The first three columns have relative differences
from the run on one rank. The columns *loss* and *gradient norm* have the largest difference of a step, in the mean loss
per target token and in the norm of the gradient. The column *weights* has the difference of the final weights. The
other columns have the relative errors of ``eval_loss``, whose true value is the mean over all test target tokens.

The model's own loss and RMSNorm round to float32, which changes each number by about 1e-7. So the program replaces
both functions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "apps" / "llm_finetune"
BATCH = 16  # samples of a global batch
STEPS = 12
QUICK_STEPS = 3
LIMIT = 300  # timeout of each rank of a case, in seconds
COLUMNS = ("loss", "norm", "weights", "evaluation", "evaluation alone")
PACKAGES = ("torch", "transformers", "accelerate", "peft")
Results = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One way to train on global batches of 16 samples.

    Attributes:
        name: the text of the table's row.
        ranks: number of ranks, which share each global batch.
        accumulate: micro-batches per step and rank.
        samples: number of samples in the training set.
        test_samples: number of samples in the test set.
        dropout: LoRA's dropout, with LoRA of rank 4; None trains all weights.
        averages: value of the Trainer's setting ``average_tokens_across_devices``.
        takes_count: whether the model's loss accepts the number of targets of the global batch.
        is_exact: whether the kit's ExactTrainer replaces the Trainer.
    """

    name: str
    ranks: int = 1
    accumulate: int = 1
    samples: int = 304
    test_samples: int = 64
    dropout: float | None = None
    averages: bool = True
    takes_count: bool = True
    is_exact: bool = False

    def alone(self) -> Case:
        """Return the reference case, in which one rank trains on each global batch in one micro-batch."""
        return replace(self, name="", ranks=1, accumulate=1, averages=True, takes_count=True)


CASES = [
    Case("4 ranks, defaults", ranks=4),
    Case("1 rank, 4 micro-batches, defaults", accumulate=4),
    Case("4 ranks, defaults, 70 test samples", ranks=4, test_samples=70),
    Case("4 ranks, defaults, 100 training samples", ranks=4, samples=100),
    Case("4 ranks, defaults, LoRA with dropout 0.1", ranks=4, dropout=0.1),
    Case("4 ranks, `average_tokens_across_devices=False`", ranks=4, averages=False),
    Case("4 micro-batches, a model without `num_items_in_batch`", accumulate=4, takes_count=False),
    Case("4 ranks, `ExactTrainer`, 100 training samples", ranks=4, samples=100, is_exact=True),
    Case("4 ranks, `ExactTrainer`, LoRA with dropout 0.1", ranks=4, dropout=0.1, is_exact=True),
]


# --- one rank --------------------------------------------------------------------------------------------------------


def features(case: Case) -> tuple[list[Results], list[Results]]:
    """Return the training samples and the test samples, each with tokens and labels, from the app's embedded texts."""
    from data import IGNORED, ByteTokenizer, tokenize
    from options import TEXT
    from rows import read_rows

    found = []
    for messages in read_rows(TEXT).values():
        sample = tokenize(ByteTokenizer(), messages)
        labels = [int(t) if target else IGNORED for t, target in zip(sample.tokens, sample.is_target)]
        found.append({"input_ids": sample.tokens.tolist(), "labels": labels})
    end = case.samples + case.test_samples
    return found[: case.samples], found[case.samples : end]


def collate(samples: list[Results]) -> Results:
    """Return padded tensors and an attention mask, as the Trainer's collators do."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    labels = [torch.tensor(sample["labels"]) for sample in samples]
    masks = [torch.ones_like(each) for each in tokens]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }


def summed_loss(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Return the summed loss of a batch, in the dtype of ``logits``, and its number of targets."""
    import torch
    import torch.nn.functional as F

    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="sum")
    return loss, torch.count_nonzero(shifted != -100)


def exact_loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    """Return the loss that the model's own loss function computes, but without rounding to float32."""
    loss, count = summed_loss(logits, labels)
    if num_items_in_batch is None:
        return loss / count
    return loss / num_items_in_batch


def build_model(case: Case) -> Any:
    """Return the tiny model, whose loss is `exact_loss`."""
    import model
    from options import parse

    words = ["--model=tiny", "--dtype=float64", "--lora=0"]
    if case.dropout is not None:
        words = ["--model=tiny", "--dtype=float64", "--lora=4", f"--lora-dropout={case.dropout}"]
    options = parse(words)
    made = model.build_model(options, model.load_tokenizer(options))
    model.causal_model(made).loss_function = exact_loss
    return made


def settings(case: Case, steps: int, folder: Path) -> Any:
    """Return the TrainingArguments of a case."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // case.ranks // case.accumulate,
        per_device_eval_batch_size=BATCH // case.ranks,
        gradient_accumulation_steps=case.accumulate,
        average_tokens_across_devices=case.averages,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=1,
        data_seed=1,
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def record_losses(trainer: Any) -> list[tuple[int, float, int]]:
    """Wrap the Trainer's step, which then appends (step, summed loss, number of targets) to the returned list.

    The loss uses the weights before the step, and no dropout. The Trainer's own log rounds the loss to float32.
    """
    import torch

    found: list[tuple[int, float, int]] = []
    own = trainer.training_step

    def training_step(module: Any, inputs: Any, count: Any = None) -> Any:
        with torch.no_grad():
            module.eval()
            logits = module(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            loss, targets = summed_loss(logits, inputs["labels"])
            module.train()
        found.append((trainer.state.global_step, float(loss), int(targets)))
        return own(module, inputs, count)

    trainer.training_step = training_step
    return found


def true_evaluation(model: Any, test: list[Results]) -> float:
    """Return the mean loss over all target tokens of the test set, by evaluating one sample at a time."""
    import torch

    total = 0.0
    targets = 0
    model.eval()
    with torch.no_grad():
        for sample in test:
            batch = collate([sample])
            loss, count = summed_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])
            total += float(loss)
            targets += int(count)
    return total / targets


def train(case: Case, steps: int, folder: Path) -> Results:
    """Train one rank of a case, and return its results."""
    import torch
    from samestep.torch.trainer import ExactTrainer
    from transformers import Trainer

    model = build_model(case)
    training, test = features(case)
    parts = {
        "model": model,
        "args": settings(case, steps, folder),
        "train_dataset": training,
        "eval_dataset": test,
        "data_collator": collate,
    }
    trainer = ExactTrainer(**parts, global_batch_size=BATCH) if case.is_exact else Trainer(**parts)
    if not case.takes_count:
        trainer.model_accepts_loss_kwargs = False  # as if the model's forward accepted no further keyword arguments
    losses = record_losses(trainer)
    trainer.train()
    measured = trainer.evaluate()["eval_loss"]
    true = true_evaluation(model, test)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters() if weight.requires_grad])
    norms = [float(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights.tolist(),
        "evaluation": abs(measured - true) / true,
    }


def run_rank(case: Case, steps: int, rank: int, port: int, folder: Path) -> None:
    """Train as one rank of a case, and write its results and its output to files.

    Args:
        case: settings of the training.
        steps: number of optimizer steps.
        rank: number of this rank, from 0.
        port: TCP port of the rendezvous on 127.0.0.1.
        folder: folder for the files of all ranks.
    """
    import torch

    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if case.ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    results = train(case, steps, folder)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may wait for each other at the interpreter's end


# --- all ranks -------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(case: Case, steps: int) -> Results:
    """Train a case in ranks forked from this process, and return its results. Exit with an error if a rank fails."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = []
        for rank in range(case.ranks):
            process = context.Process(target=run_rank, args=(case, steps, rank, port, folder))
            process.start()
            ranks.append(process)
        for process in ranks:
            process.join(LIMIT)
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        for process in ranks:
            process.kill()
        if failed:
            log = (folder / f"{failed[0]}.log").read_text()[-2000:]
            sys.exit(f"error: {case}: rank {failed[0]} failed: {log}")
        by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(case.ranks)]
    return {**by_rank[0], "losses": mean_losses([each["losses"] for each in by_rank])}


def mean_losses(ranks: Sequence[Sequence[tuple[int, float, int]]]) -> list[float]:
    """Return the mean loss over the targets of each step, from the micro-batches of all ranks."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for micro_batches in ranks:
        for step, loss, targets in micro_batches:
            sums[step] = sums.get(step, 0.0) + loss
            counts[step] = counts.get(step, 0) + targets
    return [sums[step] / counts[step] for step in sorted(sums)]


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference between two curves at the same step."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the norm of the difference of two vectors, divided by the norm of the first vector."""
    import numpy as np

    first = np.array(one)
    return float(np.linalg.norm(first - np.array(other)) / np.linalg.norm(first))


def measure(cases: Sequence[Case], steps: int) -> list[Results]:
    """Return a row of the table for each case."""
    references: dict[Case, Results] = {}
    rows = []
    for case in cases:
        if case.alone() not in references:
            references[case.alone()] = run(case.alone(), steps)
        alone = references[case.alone()]
        found = run(case, steps)
        rows.append(
            {
                "case": case.name,
                "loss": largest_gap(alone["losses"], found["losses"]),
                "norm": largest_gap(alone["norms"], found["norms"]),
                "weights": distance(alone["weights"], found["weights"]),
                "evaluation": found["evaluation"],
                "evaluation alone": alone["evaluation"],
            }
        )
        print(f"measured: {case.name}", file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[Results]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| Trainer | loss | gradient norm | weights | `eval_loss` | `eval_loss`, 1 rank |", "|---" * 6 + "|"]
    for row in rows:
        figures = " | ".join(f"{row[name]:.0e}" for name in COLUMNS)
        lines.append(f"| {row['case']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="compare transformers' Trainer on several ranks and on one")
    parser.add_argument("--quick", action="store_true", help="one case, three steps: that it still runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure nothing; print the table of this file")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="1")
    sys.path[:0] = [str(APP), str(ROOT / "core")]
    import model  # noqa: F401  imported once, before the ranks are forked
    from transformers import Trainer  # noqa: F401

    steps = QUICK_STEPS if options.quick else STEPS
    cases = CASES[:1] if options.quick else CASES
    rows = measure(cases, steps)
    print(table(rows), flush=True)
    if options.json:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        about = {"machine": platform.machine(), "steps": steps, "versions": versions}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
