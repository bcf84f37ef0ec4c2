"""Train with Hugging Face's Trainer, with the same steps at any world size, and with `Checkpoints`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from samestep.torch.batch_rows import empty_batch
from samestep.torch.checkpoints import Checkpoints
from samestep.torch.exact_model import exact
from samestep.torch.loaders import DataLoader, reads_examples
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
    of transformers have such a loss. For other models, pass ``compute_loss_func``. A collate function must pad at the
    end of a row, and must draw no random numbers.

    Args:
        *args: as in Trainer.
        global_batch_size: number of examples per step, over all ranks. It replaces ``per_device_train_batch_size``.
        grace: maximum seconds from a stop signal to the exit; see `StopRequests`.
        **kwargs: as in Trainer.

    Raises:
        ValueError: a setting changes the batches, the order of examples or a resume; the message has its name.
    """

    def __init__(self, *args: Any, global_batch_size: int, grace: float = 20.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_training_arguments(self.args)
        check_overrides(type(self))
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            raise ValueError(
                f"{type(self.model).__name__} computes its loss without num_items_in_batch: pass compute_loss_func, "
                "and divide a sum by num_items_in_batch there"
            )
        if not self._is_replicated():
            raise ValueError("the model is sharded by FSDP, DeepSpeed or a parallelism config: ExactTrainer needs DDP")
        self.global_batch_size = global_batch_size
        self.grace = grace
        self._sampler: GlobalBatchSampler | None = None
        self._is_checked = False  # whether `_check_loss` has passed
        self._resume = _Resume(self)
        self.callback_handler.callbacks.insert(0, self._resume)  # the other callbacks read the state that it restores

    def _is_replicated(self) -> bool:
        """Return whether each rank has the whole model, and rows of its own."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_distributed_loading_by_transformers
        return not is_sharded and self.get_tp_size() * self.get_cp_size() * self.get_sp_size() == 1

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **kwargs: Any) -> Any:
        """Restore the newest checkpoint in ``output_dir/checkpoints``, and train to the end.

        Args:
            resume_from_checkpoint: None or False.
            trial: None.
            **kwargs: as in Trainer.

        Raises:
            ValueError: ``resume_from_checkpoint`` or ``trial`` is given.
        """
        if resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}, but ExactTrainer finds its own checkpoints in "
                f"{self.args.output_dir}: leave it out"
            )
        if trial is not None:
            raise ValueError("a hyperparameter search would resume each trial from the trial before: use Trainer")
        try:
            return super().train(None, **kwargs)
        finally:
            self._resume.release_signals()

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader of this rank's shards of the global batches."""
        args = self.args
        if not (hasattr(self.train_dataset, "__len__") and reads_examples(self.train_dataset)):
            kind = type(self.train_dataset).__name__
            raise ValueError(f"train_dataset is a {kind}, without examples by number: it needs __len__ and __getitem__")
        if self._sampler is None:
            self._sampler = GlobalBatchSampler(
                len(self.train_dataset),
                self.global_batch_size,
                seed=args.seed if args.data_seed is None else args.data_seed,
                drop_last=args.dataloader_drop_last,
            )
        return DataLoader(
            self.train_dataset,
            batch_sampler=self._sampler,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader of an evaluation. It keeps the last batch, which dataloader_drop_last drops in a training."""
        drops_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = False
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last = drops_last

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Compute the loss and the gradients of this rank's rows, as in Trainer.

        Args:
            model: the model.
            inputs: this rank's rows.
            num_items_in_batch: number of labels of the global batch.

        Raises:
            ValueError: the mean over the global batch cannot be computed; see `_check_loss`.
        """
        if not self._is_checked:
            self._check_loss(inputs, num_items_in_batch)
            self._is_checked = True
        return super().training_step(model, inputs, num_items_in_batch)

    def _check_loss(self, inputs: Any, num_items: Any) -> None:
        """Check that the loss is divided by the number of items, and that the model accepts an empty shard.

        Args:
            inputs: this rank's rows.
            num_items: number of labels of the global batch.

        Raises:
            ValueError: a check has failed, or Trainer could not count the labels.
        """
        if num_items is None:
            raise ValueError(
                'Trainer cannot count the labels of a batch, which the mean over all ranks needs: name them "labels"'
            )
        one = self._loss_without_gradients(inputs, num_items)
        half = self._loss_without_gradients(inputs, 2 * num_items)
        if abs(one) > 0 and abs(one - 2 * half) > 1e-4 * abs(one):
            raise ValueError(
                f"the loss of {type(self.model).__name__} is not divided by num_items_in_batch, so it is a mean over "
                "the rows of one rank: pass compute_loss_func, and divide a sum by num_items_in_batch there, or set "
                "output_router_logits=False for a mixture of experts"
            )
        sampler = self._resume.sampler
        smallest = min(self.global_batch_size, sampler.batches.size(len(sampler) - 1))
        if smallest >= self.args.world_size:
            return
        try:
            self._loss_without_gradients(empty_batch(inputs), num_items)
        except Exception as error:
            raise ValueError(
                f"the last batch of an epoch has {smallest} examples for {self.args.world_size} ranks, and "
                f"{type(self.model).__name__} accepts no empty batch ({error}): set dataloader_drop_last=True, or "
                "another global_batch_size"
            ) from error

    def _loss_without_gradients(self, inputs: Any, num_items: Any) -> float:
        """Return the loss of a batch in evaluation mode, which draws no random numbers."""
        self.model.eval()
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(self.model, dict(self._prepare_inputs(inputs)), num_items_in_batch=num_items)
        self.model.train()
        return float(loss)

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
        self.stops: StopRequests | None = None  # only during a training
        self.exact_model: Any = None
        self.sampler: Any = None
        self.restored = 0  # number of steps at the start
        self.is_empty = False  # whether the epoch has had no step since the start
        self.has_stopped = False  # whether an earlier start has ended by early stopping

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        self.sampler = kwargs["train_dataloader"].batch_sampler
        self.sampler.seek(0)  # after an earlier call of train
        if trainer.model_wrapped is not self.exact_model:
            # Collate functions pad to the longest row of the rank.
            self.exact_model = exact(trainer.model_wrapped, self.sampler, padded=True)
        parts = {"model": part_of(trainer.model), "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        if trainer.accelerator.scaler is not None:
            parts["scaler"] = trainer.accelerator.scaler
        self.checkpoints = Checkpoints(
            args.output_dir,
            keep=args.save_total_limit or 3,
            grace=None,
            sampler=self.sampler,
            progress=_Progress(trainer),
            **parts,
        )
        self.stops = StopRequests(trainer.grace)
        self.restored = self.checkpoints.restore()  # collective
        # Trainer copied these values from its state before it called this method.
        trainer._initial_global_step = state.global_step
        trainer._globalstep_last_logged = state.global_step
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        self.has_stopped = any(map(has_stopped_early, trainer.callback_handler.callbacks))
        if self.has_stopped and trainer.is_world_process_zero():
            print(f"the training has stopped early at step {state.global_step}: it takes no step", file=sys.stderr)
        if self.has_stopped or state.global_step >= state.max_steps:
            # Trainer takes a step before it compares the number of steps, unless the loader is at its end.
            position = self.sampler.state_dict()
            end = (position["epoch"] + 1) * len(self.sampler)
            self.sampler.load_state_dict({**position, "step": end})

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_empty = True

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.is_empty = False
        state.epoch = state.global_step / len(self.sampler)  # Trainer's own value begins at 0 at each start

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_empty and state.global_step < state.max_steps and not self.has_stopped:
            # After a save at the end of an epoch, a resume first repeats the epoch's evaluation, without a step.
            # Trainer would stop after an epoch without a step.
            control.should_training_stop = False
        if state.global_step % len(self.sampler) == 0:
            self.sampler.seek(state.global_step)  # a save after this epoch's evaluation resumes at the next epoch

    def save(self) -> None:
        """Save the training after ``trainer.state.global_step`` steps."""
        step = self.trainer.state.global_step
        if step == self.restored:  # nothing has changed, and the end of a finished training may have another position
            return
        self.trainer.store_flos()  # collective
        self.checkpoints.steps = step
        self.checkpoints.save()  # collective

    def stop_if_requested(self) -> None:
        """Save and end the program if the ranks agree on a stop signal."""
        signal = self.stops.step() if self.stops else 0  # collective, at some steps
        if signal:
            self.save()
            self.checkpoints.stop(signal)

    def release_signals(self) -> None:
        """Let signals end the program at once again: a notebook or an evaluation after the training has no steps.

        After a stop, the handlers remain, because launchers repeat the signal while the program ends.
        """
        if self.stops is not None and not self.stops.signal:
            self.stops.release()
        self.stops = None

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.checkpoints.finish()


class TrainedPart:
    """The trained parameters and the buffers of a model, as a part of `Checkpoints`.

    The frozen parameters of an adapter or of a quantized model come from the base model at each start.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        trained = {name for name, each in self.model.named_parameters(remove_duplicate=False) if each.requires_grad}
        trained.update(name for name, _ in self.model.named_buffers(remove_duplicate=False))
        return {name: value for name, value in self.model.state_dict().items() if name in trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise ValueError("the checkpoint has other trained parameters than the model: pass another output_dir")
        self.model.load_state_dict(state, strict=False)


def part_of(model: torch.nn.Module) -> Any:
    """Return the part of `Checkpoints` for a model: only its trained parameters if it has adapters or is quantized."""
    if hasattr(model, "peft_config") or getattr(model, "hf_quantizer", None) is not None:
        return TrainedPart(model)
    return model


def has_stopped_early(callback: TrainerCallback) -> bool:
    """Return whether a callback is an EarlyStoppingCallback whose patience has ended."""
    if not isinstance(callback, EarlyStoppingCallback):
        return False
    return bool(callback.early_stopping_patience_counter >= callback.early_stopping_patience)


class _Progress:
    """The values of Trainer's state and of its callbacks that a resume continues, as a part of `Checkpoints`."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        values = {name: getattr(self.trainer.state, name) for name in _PROGRESS}
        callbacks = {name: callback.state()["attributes"] for name, callback in self._callbacks()}
        return {"state": values, "callbacks": callbacks}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name, value in values["state"].items():
            setattr(self.trainer.state, name, value)
        for name, callback in self._callbacks():
            for attribute, value in values["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)

    def _callbacks(self) -> Iterator[tuple[str, Any]]:
        """Yield the callbacks with a state, such as a count of evaluations without improvement, and their names."""
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                yield type(callback).__name__, callback


def check_overrides(kind: type[ExactTrainer]) -> None:
    """Raise ValueError if a subclass overrides a method that decides the batches or the scale of the loss."""
    if kind.compute_loss is not Trainer.compute_loss:
        raise ValueError(
            f"{kind.__name__} overrides compute_loss, whose result Trainer multiplies by the number of ranks: pass "
            "compute_loss_func instead"
        )
    for name in ("get_train_dataloader", "_get_train_sampler"):
        if getattr(kind, name) is not getattr(ExactTrainer, name):
            raise ValueError(f"{kind.__name__} overrides {name}, but GlobalBatchSampler decides the order: remove it")


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
