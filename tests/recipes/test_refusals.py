"""Test that settings of frameworks that contradict the kit cause an error with a remedy on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from lightning.fabric.utilities.data import _set_sampler_epoch
from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler


@pytest.mark.parametrize("sampler", [GlobalBatchSampler(10, 4), EvalSampler(10, 4)])
def test_accelerate_does_not_prepare_a_loader_of_the_kit(sampler: Any) -> None:
    loader = DataLoader(torch.arange(10.0), batch_sampler=sampler)
    with pytest.raises(RuntimeError, match=r"cut this DataLoader's batches .* again: leave it out of prepare"):
        Accelerator(cpu=True).prepare(loader)


def test_accelerate_prepares_a_loader_without_a_sampler_of_the_kit() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(10.0), batch_size=4))
    assert [len(batch) for batch in loader] == [4, 4, 2]


class Module(lightning.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("no step is expected")

    def configure_optimizers(self) -> None:
        return None


def test_lightning_sets_the_epoch_of_the_kits_sampler() -> None:
    """After a resume at the end of an epoch, Lightning restores only its own epoch."""
    sampler = GlobalBatchSampler(10, 4)
    loader = DataLoader(torch.arange(10.0), batch_sampler=sampler)
    batches = iter(loader)  # Lightning creates this iterator first
    _set_sampler_epoch(loader, 3)
    expected = GlobalBatchSampler(10, 4)
    expected.set_epoch(3)
    assert torch.cat([*batches]).tolist() == [index for batch in expected for index in batch]
    assert (sampler.epoch, sampler.batch) == (4, 0)


def test_lightning_names_its_option_for_samplers(tmp_path: Path) -> None:
    """Check Lightning's own error message, which the page quotes."""
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, default_root_dir=tmp_path)
    loader = DataLoader(torch.arange(10.0), batch_sampler=GlobalBatchSampler(10, 4, 0, 2))
    with pytest.raises(TypeError, match=r"use_distributed_sampler=False"):
        trainer._data_connector._prepare_dataloader(loader, shuffle=True, mode=None)  # type: ignore[arg-type]
