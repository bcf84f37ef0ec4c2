"""Compare transformers' Trainer with itself: the same global batches on one rank and on four.

    .venvs/llm_finetune/bin/python benchmarks/finetune_trainer.py            # prints a table
    .venvs/llm_finetune/bin/python benchmarks/finetune_trainer.py --quick    # two cases, few steps

Every case trains the tiny model of apps/llm_finetune in float64, on 16 samples per step. The reference is one
rank with 16 samples. The table has the largest relative differences of the loss over the target tokens of a
global batch, and of the gradient's norm. It also has the relative error of eval_loss. The Trainer's loss
and norms round to float32; the program replaces both, because otherwise everything differs by 1e-7.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "apps" / "llm_finetune"
sys.path.append(str(APP))

TRAIN = 304
BATCH = 16
STEPS = 12
LIMIT = 300


@dataclass(frozen=True)
class Case:
    """One way to train 16 samples per step.

    Attributes:
        name: the text of the table's row.
        ranks: number of ranks.
        accumulate: micro-batches per step and rank.
        reference: index of the case that it is compared with; None for a reference.
        samples: of the training set.
        test_samples: of the test set.
        dropout: LoRA's dropout, with LoRA of rank 4; None trains all weights.
        settings: other TrainingArguments.
        takes_count: whether the model's loss takes the number of targets of the global batch.
    """

    name: str
    ranks: int = 1
    accumulate: int = 1
    reference: int | None = 0
    samples: int = TRAIN
    test_samples: int = 64
    dropout: float | None = None
    settings: dict[str, Any] | None = None
    takes_count: bool = True


ALONE = Case("1 rank x 16", reference=None)
CASES = [
    ALONE,
    Case("4 ranks x 4, defaults", ranks=4),
    Case("1 rank, 4 x 4 accumulated, defaults", accumulate=4),
    Case("4 ranks, `average_tokens_across_devices=False`", ranks=4, settings={"average_tokens_across_devices": False}),
    Case("4 x 4 accumulated, model without `num_items_in_batch`", accumulate=4, takes_count=False),
    Case("1 rank x 16, LoRA with dropout 0.1", reference=None, dropout=0.1),
    Case("4 ranks, LoRA with dropout 0.1, defaults", ranks=4, reference=5, dropout=0.1),
    Case("1 rank x 16, 100 samples", reference=None, samples=100),
    Case("4 ranks, 100 samples (not a multiple of 16), defaults", ranks=4, reference=7, samples=100),
    Case("4 ranks, 70 test samples, defaults", ranks=4, test_samples=70),
]
QUICK = [0, 1]


def features(count: int, test_count: int) -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Return the tokens and labels of training and test samples of the embedded definitions."""
    from data import IGNORED, ByteTokenizer, tokenize
    from options import TEXT
    from rows import read_rows

    samples = [tokenize(ByteTokenizer(), messages) for messages in read_rows(TEXT).values()]
    found = []
    for sample in samples[: count + test_count]:
        labels = [int(t) if target else IGNORED for t, target in zip(sample.tokens, sample.is_target)]
        found.append({"input_ids": sample.tokens.tolist(), "labels": labels})
    return found[:count], found[count:]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Return padded tensors, with an attention mask as the Trainer's collators make it."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
    labels = [torch.tensor(sample["labels"]) for sample in samples]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True),
    }


def summed_loss(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Return the summed loss and the number of targets of a batch, in the dtype of the scores."""
    import torch
    import torch.nn.functional as F

    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="sum")
    return loss, torch.count_nonzero(shifted != -100)


def train(case: Case, steps: int, output: Path) -> None:
    """Train one case in this process, one rank of it, and write the rank's results."""
    import torch
    from model import build_model, causal_model, load_tokenizer
    from options import parse
    from transformers import Trainer, TrainingArguments

    torch.set_num_threads(1)
    words = ["--model=tiny", "--dtype=float64", "--lora=0"]
    if case.dropout is not None:
        words = ["--model=tiny", "--dtype=float64", "--lora=4", f"--lora-dropout={case.dropout}"]
    options = parse(words)
    model: Any = build_model(options, load_tokenizer(options))

    def loss_function(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
        loss, count = summed_loss(logits, labels)
        return loss / (count if num_items_in_batch is None else num_items_in_batch)

    causal_model(model).loss_function = loss_function
    training, test = features(case.samples, case.test_samples)
    part = BATCH // case.ranks // case.accumulate
    settings = TrainingArguments(
        output_dir=str(output.parent),
        per_device_train_batch_size=part,
        per_device_eval_batch_size=BATCH // case.ranks,
        gradient_accumulation_steps=case.accumulate,
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
        **(case.settings or {}),
    )
    trainer = Trainer(model=model, args=settings, train_dataset=training, eval_dataset=test, data_collator=collate)
    if not case.takes_count:
        trainer.model_accepts_loss_kwargs = False  # as for a model whose forward takes no other arguments
    seen: list[tuple[int, float, int]] = []
    step_of_trainer = trainer.training_step

    def training_step(module: Any, inputs: Any, count: Any = None) -> Any:
        with torch.no_grad():  # the true loss over this part's targets, beside the one that the Trainer takes
            module.eval()
            masked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            loss, targets = summed_loss(module(**masked).logits, inputs["labels"])
            module.train()
        seen.append((trainer.state.global_step, float(loss), int(targets)))
        return step_of_trainer(module, inputs, count)

    trainer.training_step = training_step
    trainer.train()
    measured = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        model.eval()
        sums = []
        for sample in test:
            batch = collate([sample])
            logits = model(input_ids=batch["input_ids"]).logits
            sums.append([float(each) for each in summed_loss(logits, batch["labels"])])
    true = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    values = {"seen": seen, "norms": norms, "evaluation": abs(measured - true) / true}
    output.with_suffix(f".{settings.process_index}").write_text(json.dumps(values))


def means(parts: list[list[tuple[int, float, int]]]) -> list[float]:
    """Return the mean loss over the targets of each step, from (step, summed loss, targets) of all ranks."""
    steps = sorted({step for part in parts for step, _, _ in part})
    found = []
    for step in steps:
        rows = [(loss, count) for part in parts for number, loss, count in part if number == step]
        found.append(sum(loss for loss, _ in rows) / sum(count for _, count in rows))
    return found


def run(index: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train a case in ranks of its own, and return its results."""
    output = folder / f"{index}.json"
    program = [str(Path(__file__)), f"--case={index}", f"--steps={steps}", f"--output={output}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CASES[index].ranks}"]
    command = [sys.executable, *(launcher if CASES[index].ranks > 1 else []), *program]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {CASES[index].name} failed: {done.stderr[-2000:]}")
    by_rank = [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(CASES[index].ranks)]
    return {**by_rank[0], "losses": means([each["seen"] for each in by_rank])}


def gap(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other))


def main() -> None:
    parser = argparse.ArgumentParser(description="compare transformers' Trainer on one rank and on four")
    parser.add_argument("--quick", action="store_true", help="two cases, three steps")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each case (default: %(default)s)")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)  # this process is a rank of it
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        train(CASES[options.case], options.steps, options.output)
        return
    indices = QUICK if options.quick else range(len(CASES))
    steps = 3 if options.quick else options.steps
    print("| Trainer | loss | gradient norm | eval_loss |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        results: dict[int, dict[str, Any]] = {}
        for index in indices:
            case = CASES[index]
            found = results[index] = run(index, steps, Path(name))
            if case.reference is None:
                print(f"| {case.name} | | | {found['evaluation']:.1e} |", flush=True)
                continue
            base = results[case.reference]
            differences = [gap(base[key], found[key]) for key in ("losses", "norms")]
            cells = [f"{each:.1e}" for each in (*differences, found["evaluation"])]
            print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
