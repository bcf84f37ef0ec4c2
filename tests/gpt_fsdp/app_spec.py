"""Describe gpt_fsdp for the common tests."""

from __future__ import annotations

from harness import App

TINY = ("--lr=0.003", "--dataset=jargon-64k", "--layers=1", "--width=32", "--context=32", "--warmup-steps=5")

SPEC = App(
    dataset="jargon-64k",
    test_examples=6553,
    # 1,843 windows in global batches of 120 make 16 steps per epoch.
    small=(
        *(*TINY, "--epochs=6", "--global-batch-size=120", "--checkpoint-every=5", "--log-every=1"),
        *("--clip-norm=1", "--accumulate=2"),
    ),
    exact=(*TINY, "--dtype=float64", "--log-every=1", "--epochs=100"),
    variants=[("--clip-norm=1", "--accumulate=3"), ("--layers=2", "--schedule=constant")],
    resume_invariants=[
        "--layers=2",
        "--width=64",
        "--heads=2",
        "--context=16",
        "--global-batch-size=121",
        "--seed=7",
        "--dtype=float64",
        "--autocast=bfloat16",
        "--lr=0.5",
        "--epochs=4",
        "--accumulate=3",
        "--clip-norm=2",
        "--dataset=jargon",
    ],
    defaults=(*TINY, "--epochs=2", "--log-every=1", "--lr=0.01"),
    parts=(20, 3),
    exact_steps=(50, 6),
    diverges=("--lr=1e30", "--warmup-steps=0"),
    compared=False,
    virtual_ranks=None,
    preload=("torch", "torch.distributed.fsdp", "torch.distributed.tensor"),
    skipped_marks=("core_only", "best", "kills", "launcher", "stall", "torchrun", "stragglers"),
)
