"""Check that a framework's settings do not conflict with the samplers of this package."""

from __future__ import annotations

from typing import Any


def check_training_arguments(args: Any) -> None:
    """Raise ValueError if a setting of Hugging Face's Trainer conflicts with a `GlobalBatchSampler`.

    Args:
        args: the `transformers.TrainingArguments`. Call this function on all ranks.

    Raises:
        ValueError: a setting changes the batches, the order of examples or a resume; the message has its name.
    """
    if getattr(args, "group_by_length", False):  # exists up to transformers 4
        raise ValueError("group_by_length=True would be ignored: GlobalBatchSampler decides the order, so remove it")
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        raise ValueError(
            f"train_sampling_strategy={strategy!r} would be ignored: GlobalBatchSampler decides the order, so remove it"
        )
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name, None):
            raise ValueError(
                f"accelerator_config has {name}=True, but GlobalBatchSampler cuts each batch among the ranks: set "
                f"{name}=False"
            )
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}: Trainer reads the batches of a step "
            "before it computes them, and dropout needs the rows of each: set it to 1"
        )
    if not args.ignore_data_skip:
        raise ValueError(
            "ignore_data_skip is False, so a resume would read a loader that nothing counts: set ignore_data_skip=True"
        )
