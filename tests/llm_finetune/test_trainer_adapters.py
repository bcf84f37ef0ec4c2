"""Test that an ExactTrainer saves only what an adapter trains, and resumes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from peft import LoraConfig, get_peft_model
from samestep.torch.trainer import ExactTrainer
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

ROWS = [{"input_ids": torch.arange(8) + number, "labels": torch.arange(8) + number} for number in range(8)]


def trained(folder: Path, max_steps: int) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Train to a step, and return the adapter's tensors and the names of the tensors in the newest checkpoint."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    options: dict[str, Any] = {"save_steps": 1, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(
        str(folder), max_steps=max_steps, use_cpu=True, report_to="none", disable_tqdm=True, **options
    )
    ExactTrainer(model, arguments, train_dataset=ROWS, global_batch_size=4).train()
    newest = max((folder / "checkpoints").iterdir())
    saved = safetensors.numpy.load((newest / "model.safetensors").read_bytes())
    return {name: value for name, value in model.state_dict().items() if "lora" in name}, set(saved)


def test_only_the_adapter_is_saved_and_a_resume_continues_it(tmp_path: Path) -> None:
    """The base model comes from the script at each start."""
    whole, _ = trained(tmp_path / "whole", 4)
    trained(tmp_path / "resumed", 2)
    resumed, saved = trained(tmp_path / "resumed", 4)
    assert saved == set(whole)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
