"""Train with Hugging Face's Trainer, with the same steps at any world size, and with `Checkpoints`."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from samestep.torch.checkpoints import Checkpoints
from samestep.torch.exact_model import exact
from samestep.torch.loaders import DataLoader
from samestep.torch.samplers import GlobalBatchSampler
from samestep.torch.stops import StopRequests

_PROGRESS = (  # attributes of Trainer's state that a resume continues
    "global_step",
    "epoch",
    "log_history",
    "best_metric",
    "best_global_step",
    "num_input_tokens_seen",
    "total_flos",
)

_CONFLICTS = {  # settings that must be off, and the reasons
    "auto_find_batch_size": "cannot change global_batch_size",
    "deepspeed": "keeps weights where Checkpoints cannot see them",
    "fsdp": "shards the model, and only DDP is tested",
    "group_by_length": "would be ignored, because GlobalBatchSampler decides the order",  # up to transformers 4
    "load_best_model_at_end": "needs checkpoints that Trainer itself writes",
    "torch_compile": "compiles the model before exact() changes it",
}


class ExactTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose steps are the same at any world size, and which resumes in the middle of an epoch.

    Wherever Trainer would write a checkpoint, this class saves with `Checkpoints`, in ``output_dir/checkpoints``.
    `train` restores the newest checkpoint of this folder. After a stop signal, the ranks save the step, and end with
    the exit code 128 + the signal.

    The loss must be a sum over examples or tokens, divided by Trainer's ``num_items_in_batch``. Causal language models
    of transformers have such a loss. For other models, pass ``compute_loss_func``.

    Args:
        *args: as in Trainer.
        global_batch_size: number of examples per step, over all ranks. ``per_device_train_batch_size`` has no effect.
        **kwargs: as in Trainer.

    Raises:
        ValueError: a setting changes the batches, the order of examples or a resume; the message has its name.
    """

    def __init__(self, *args: Any, global_batch_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_training_arguments(self.args)
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            raise ValueError(
                f"{type(self.model).__name__} computes its loss without num_items_in_batch: pass compute_loss_func, "
                "and divide a sum by num_items_in_batch there"
            )
        self.global_batch_size = global_batch_size
        self._resume = _Resume(self)
        self.add_callback(self._resume)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Restore the newest checkpoint in ``output_dir/checkpoints``, and train to the end.

        Args:
            resume_from_checkpoint: None or False.
            *args: as in Trainer.
            **kwargs: as in Trainer.

        Raises:
            ValueError: ``resume_from_checkpoint`` is given.
        """
        if resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}, but ExactTrainer finds its own checkpoints in "
                f"{self.args.output_dir}: leave it out"
            )
        return super().train(None, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of this rank's shards of the global batches."""
        args = self.args
        sampler = GlobalBatchSampler(
            len(self.train_dataset),
            self.global_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
        )
        return DataLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Compute the loss and the gradients of this rank's rows, as in Trainer.

        Args:
            model: the model.
            inputs: this rank's rows.
            num_items_in_batch: number of labels of the global batch.

        Raises:
            ValueError: Trainer could not count the labels. The loss would be a mean over this rank's rows.
        """
        if num_items_in_batch is None:
            raise ValueError(
                'Trainer cannot count the labels of a batch, which the mean over all ranks needs: name them "labels"'
            )
        return super().training_step(model, inputs, num_items_in_batch)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._resume.save()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._resume.stop_if_requested()  # now, so that the log and the evaluation of this step are not lost


class _Resume(TrainerCallback):  # type: ignore[misc]
    """Restore the newest checkpoint before the first step, and stop at signals."""

    checkpoints: Checkpoints  # created at the start of the training

    def __init__(self, trainer: ExactTrainer) -> None:
        self.trainer = trainer
        self.steps_per_epoch = 0
        self.is_empty = False  # whether the epoch has had no step since this start

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        sampler = kwargs["train_dataloader"].batch_sampler
        self.steps_per_epoch = len(sampler)
        exact(trainer.model_wrapped, sampler, padded=True)  # collators pad to the longest row of the rank
        parts = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            parts["scaler"] = trainer.accelerator.scaler
        self.checkpoints = Checkpoints(
            args.output_dir,
            keep=args.save_total_limit or 3,
            grace=None,
            sampler=sampler,
            progress=_Progress(state),
            **parts,
        )
        _stop_requests()  # installs the signal handlers
        self.checkpoints.restore()  # collective
        # Trainer copied the step from its state before it called this method.
        trainer._initial_global_step = state.global_step
        trainer._globalstep_last_logged = state.global_step

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_empty = True

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_empty = False
        state.epoch = state.global_step / self.steps_per_epoch  # Trainer's own value begins at 0 at each start

    def save(self) -> None:
        """Save the training after ``trainer.state.global_step`` steps."""
        self.checkpoints.steps = self.trainer.state.global_step
        self.checkpoints.save()  # collective

    def stop_if_requested(self) -> None:
        """Save and end the program if the ranks agree on a stop signal."""
        signal = _stop_requests().step()  # collective, at some steps
        if signal:
            self.save()
            self.checkpoints.stop(signal)

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        # After a save at the end of an epoch, a resume first repeats the epoch's evaluation, without a step. Trainer
        # would stop after an epoch without a step.
        if self.is_empty and state.global_step < state.max_steps:
            control.should_training_stop = False

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.checkpoints.finish()


@cache
def _stop_requests() -> StopRequests:
    """Return the StopRequests of all trainings in this process, because signal handlers belong to the process."""
    return StopRequests()


class _Progress:
    """The attributes of Trainer's state that a resume continues, as a part of `Checkpoints`."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.state, name) for name in _PROGRESS}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.state, name, value)


def check_training_arguments(args: TrainingArguments) -> None:
    """Raise ValueError if a setting of Trainer conflicts with `ExactTrainer`.

    Args:
        args: the arguments. Call this function on all ranks.

    Raises:
        ValueError: a setting changes the batches, the order of examples or a resume; the message has its name.
    """
    for name, reason in _CONFLICTS.items():
        value = getattr(args, name, None)
        if value:
            raise ValueError(f"{name}={value!r} {reason}: leave it out")
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        raise ValueError(f"train_sampling_strategy={strategy!r} {_CONFLICTS['group_by_length']}: leave it out")
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
    if not args.average_tokens_across_devices:
        raise ValueError("average_tokens_across_devices=False makes each rank's loss a mean of its own: set it to True")
    if args.n_gpu > 1:
        raise ValueError(f"one process would use {args.n_gpu} GPUs by DataParallel: start a rank per GPU with torchrun")
