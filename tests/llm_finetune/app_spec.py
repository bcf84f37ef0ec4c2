"""Describe llm_finetune for the common tests."""

from __future__ import annotations

from harness import App

TINY = ("--model=tiny", "--dataset=definitions-240", "--max-length=200", "--micro-tokens=400")
LORA = ("--lora=4", "--lora-dropout=0.1", "--lr=0.01")

SPEC = App(
    dataset="definitions-240",
    test_examples=24,
    # About 17,000 tokens in global batches of 1,200 make 15 steps per epoch.
    small=(*TINY, *LORA, "--step-tokens=1200", "--epochs=2", "--checkpoint-every=5", "--log-every=1"),
    exact=(*TINY, "--dtype=float64", "--log-every=1", "--epochs=100"),
    variants=[(*TINY, "--lora=0", "--lr=0.003", "--weight-decay=0.1"), (*TINY, *LORA)],
    batch_option="--step-tokens",
    resume_invariants=[
        "--lora=2",
        "--lora-alpha=3",
        "--lora-dropout=0.2",
        "--lora-targets=q_proj",
        "--step-tokens=1201",
        "--micro-tokens=401",
        "--pack",
        "--max-length=201",
        "--seed=7",
        "--dtype=float64",
        "--autocast=bfloat16",
        "--lr=0.5",
        "--epochs=4",
        "--clip-norm=2",
        "--schedule=constant",
        "--dataset=definitions",
    ],
    defaults=(*TINY, "--lora=0", "--lr=0.003", "--log-every=1", "--epochs=10"),
    evaluates_first=True,
    parts=(20, 3),
    exact_steps=(30, 6),
    virtual_ranks=4,
    diverges=("--lr=1e30", "--warmup-steps=0"),
    preload=("torch", "transformers", "peft"),
    skipped_marks=("core_only", "best", "faults", "kills", "launcher", "stall", "stragglers", "torchrun", "weights"),
)
