"""Test that an ExactTrainer resumes its steps, logs and evaluations in one process, and refuses other settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samestep.stop import STOP_SIGNALS
from samestep.torch.trainer import ExactTrainer, check_training_arguments
from torch import Tensor, nn
from torch.nn import functional
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0  # seconds; the process ends sooner
EXAMPLES = 10
BATCH = 4
STEPS_PER_EPOCH = 3
EPOCHS = 3
LONG = 30  # epochs


class Examples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Examples with a column that the model does not have, which Trainer removes."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": torch.tensor(index % 2), "name": f"example {index}"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.dropout(self.layer(inputs))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = functional.cross_entropy(logits, labels)
        return found


def mean_loss(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Any) -> Tensor:
    return functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


class Crash(TrainerCallback):  # type: ignore[misc]
    """Raise an error after the save of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise InterruptedError("a crash after this step's save")


class SendTerm(TrainerCallback):  # type: ignore[misc]
    """Send TERM to this process at the start of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def settings(folder: Path, **others: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "logging_steps": 1,
        "save_steps": 1,
        "eval_strategy": "epoch",
        "learning_rate": 0.1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **{**chosen, **others})


def trainer(folder: Path, *callbacks: Any, **others: Any) -> ExactTrainer:
    return ExactTrainer(
        Model(),
        settings(folder, **others),
        train_dataset=Examples(),
        eval_dataset=Examples(),
        compute_loss_func=mean_loss,
        callbacks=[*callbacks],
        global_batch_size=BATCH,
    )


def logged(found: Trainer) -> list[dict[str, float]]:
    """Return the logs of a training without times."""
    timeless = []
    for entry in found.state.log_history:
        kept = {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        timeless.append(kept)
    return timeless[:-1]  # the last log has this start's mean loss


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ExactTrainer:
    found = trainer(tmp_path_factory.mktemp("undisturbed"))
    found.train()
    return found


@pytest.mark.parametrize("step", [1, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1])
def test_a_crash_changes_no_weight_no_log_and_no_evaluation(
    tmp_path: Path, undisturbed: ExactTrainer, step: int
) -> None:
    """After the last step of an epoch, the evaluation is due: the resumed training makes up for it."""
    with pytest.raises(InterruptedError):
        trainer(tmp_path, Crash(step)).train()
    resumed = trainer(tmp_path)
    resumed.train()
    assert resumed.state.global_step == EPOCHS * STEPS_PER_EPOCH
    for name, value in undisturbed.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert logged(resumed) == logged(undisturbed)


def test_a_finished_training_takes_no_further_step(tmp_path: Path, undisturbed: ExactTrainer) -> None:
    trainer(tmp_path).train()
    again = trainer(tmp_path)
    again.train()
    assert again.state.global_step == EPOCHS * STEPS_PER_EPOCH
    assert torch.equal(again.model.layer.weight, undisturbed.model.layer.weight)


@pytest.mark.parametrize("max_steps", [2, 4])
def test_a_finished_training_in_the_middle_of_an_epoch_takes_no_further_step(tmp_path: Path, max_steps: int) -> None:
    weights = []
    for _ in range(3):
        again = trainer(tmp_path, max_steps=max_steps, lr_scheduler_type="constant")
        again.train()
        assert again.state.global_step == max_steps
        weights.append(again.model.layer.weight)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_what_evaluations_change_is_restored(tmp_path: Path) -> None:
    """Save after each epoch's evaluation, which changes the learning rate and a count of EarlyStoppingCallback."""
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}}
    each = {**plateau, "save_strategy": "epoch", "num_train_epochs": 6, "metric_for_best_model": "loss"}

    def run(folder: Path, *callbacks: Any) -> ExactTrainer:
        made = trainer(folder, EarlyStoppingCallback(3, 1.0), *callbacks, **each)
        made.train()
        return made

    whole = run(tmp_path / "whole")
    for step in (STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH):
        with pytest.raises(InterruptedError):
            run(tmp_path / "crashed", Crash(step))
    resumed = run(tmp_path / "crashed")
    assert resumed.state.global_step == whole.state.global_step == 4 * STEPS_PER_EPOCH
    assert logged(resumed) == logged(whole)
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)


def test_a_second_call_of_train_starts_at_the_newest_checkpoint(tmp_path: Path) -> None:
    twice = trainer(tmp_path, max_steps=STEPS_PER_EPOCH, lr_scheduler_type="constant")
    twice.train()
    twice.args.max_steps = 3 * STEPS_PER_EPOCH
    twice.train()
    once = trainer(tmp_path / "once", max_steps=3 * STEPS_PER_EPOCH, lr_scheduler_type="constant")
    once.train()
    assert torch.equal(twice.model.layer.weight, once.model.layer.weight)


def test_after_a_training_signals_have_their_former_handlers(tmp_path: Path) -> None:
    """A notebook must survive an interrupt of its next cell, and a later training may have another ``grace``."""
    former = [signal.getsignal(number) for number in STOP_SIGNALS]
    for grace in (20.0, 21.0):
        found = trainer(tmp_path / str(grace), max_steps=1)
        found.grace = grace
        found.train()
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == former


def train_until_signal(folder: Path) -> None:
    """Send TERM to this process at the start of its second step. Only a process of its own calls this function."""
    trainer(folder, SendTerm(2), num_train_epochs=LONG, save_strategy="no", eval_strategy="no").train()


def test_a_stop_signal_saves_a_step_that_is_not_due(tmp_path: Path) -> None:
    """The ranks agree on a step after at most 64 steps."""
    code = f"import pathlib, test_trainer; test_trainer.train_until_signal(pathlib.Path({str(tmp_path)!r}))"
    folders = [str(ROOT / "core"), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    (folder,) = (tmp_path / "checkpoints").iterdir()
    resumed = trainer(tmp_path, num_train_epochs=LONG, save_strategy="no", eval_strategy="no")
    resumed.train()
    steps = [entry["step"] for entry in resumed.state.log_history[:-1]]
    assert steps == list(range(1, LONG * STEPS_PER_EPOCH + 1))
    assert 2 <= int(folder.name[len("step-") :]) <= 2 + 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' would be ignored"),
        ({"accelerator_config": {"dispatch_batches": True}}, "set dispatch_batches=False"),
        ({"accelerator_config": {"split_batches": True}}, "set split_batches=False"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2: .*: set it to 1"),
        ({"load_best_model_at_end": True, "save_strategy": "epoch"}, "load_best_model_at_end=True .*: leave it out"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False .* set it to True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True .*: leave it out"),
        ({"torch_compile": True}, "torch_compile=True .*: leave it out"),
    ],
)
def test_settings_that_change_the_steps_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_training_arguments(settings(tmp_path, **given))


def test_a_loss_over_the_rows_of_a_rank_is_refused(tmp_path: Path) -> None:
    no_evaluation = settings(tmp_path, eval_strategy="no")
    with pytest.raises(ValueError, match="Model computes its loss without num_items_in_batch: pass compute_loss_func"):
        ExactTrainer(Model(), no_evaluation, train_dataset=Examples(), global_batch_size=BATCH)
    ignored = ExactTrainer(
        Model(),
        no_evaluation,
        train_dataset=Examples(),
        compute_loss_func=lambda outputs, labels, num_items_in_batch: functional.cross_entropy(
            outputs["logits"], labels
        ),
        global_batch_size=BATCH,
    )
    with pytest.raises(ValueError, match="the loss of Model is not divided by num_items_in_batch"):
        ignored.train()
    other_names = [{"inputs": torch.zeros(5), "targets": torch.tensor(0)}] * EXAMPLES
    renamed = ExactTrainer(
        Model(),
        settings(tmp_path, eval_strategy="no", remove_unused_columns=False),
        train_dataset=other_names,
        compute_loss_func=mean_loss,
        global_batch_size=BATCH,
    )
    with pytest.raises(ValueError, match=r'cannot count the labels of a batch, .*: name them "labels"'):
        renamed.train()


def test_overrides_that_change_the_steps_and_datasets_without_numbers_are_refused(tmp_path: Path) -> None:
    class OwnLoss(ExactTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class OwnOrder(ExactTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args)

    given = {"train_dataset": Examples(), "compute_loss_func": mean_loss, "global_batch_size": BATCH}
    no_evaluation = settings(tmp_path, eval_strategy="no")
    with pytest.raises(ValueError, match=r"OwnLoss overrides compute_loss, .*: pass compute_loss_func instead"):
        OwnLoss(Model(), no_evaluation, **given)
    with pytest.raises(ValueError, match="OwnOrder overrides _get_train_sampler, but GlobalBatchSampler decides"):
        OwnOrder(Model(), no_evaluation, **given)
    with pytest.raises(ValueError, match="train_dataset is a NoneType, without examples by number"):
        ExactTrainer(Model(), no_evaluation, **{**given, "train_dataset": None}).train()


def test_an_evaluation_counts_all_examples_if_the_training_drops_the_last_batch(tmp_path: Path) -> None:
    found = trainer(tmp_path, dataloader_drop_last=True, per_device_eval_batch_size=EXAMPLES - 1)
    assert len(found.predict(Examples()).predictions) == EXAMPLES
    assert found.args.dataloader_drop_last


def test_a_training_that_has_stopped_early_takes_no_further_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without improvements of at least 100, the training stops after the second evaluation."""

    def start() -> int:
        stopping = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)
        found = trainer(tmp_path, stopping, num_train_epochs=9, save_strategy="epoch", metric_for_best_model="loss")
        found.train()
        return int(found.state.global_step)

    assert start() == 2 * STEPS_PER_EPOCH
    capfd.readouterr()
    assert start() == 2 * STEPS_PER_EPOCH
    assert f"has stopped early at step {2 * STEPS_PER_EPOCH}: it takes no step" in capfd.readouterr().err


def test_a_collator_that_draws_from_its_own_generator_is_refused(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)

    def collate(examples: list[Any]) -> dict[str, torch.Tensor]:
        batch = dict(default_data_collator(examples))
        return {**batch, "inputs": batch["inputs"] + float(generator.random())}

    found = trainer(tmp_path)
    found.data_collator = collate
    with pytest.raises(RuntimeError, match="collate_fn draws from a generator of its own"):
        found.train()


def test_other_settings_and_a_checkpoint_of_trainer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torch_compile"):
        trainer(tmp_path, torch_compile=True)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True, .* leave it out"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="hyperparameter search would resume each trial"):
        trainer(tmp_path).train(trial={})
