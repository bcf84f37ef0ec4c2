"""Export a finished run as a folder that transformers or peft can load.

    python export.py RUN_DIR OUT             # the adapter with LoRA, otherwise the whole model
    python export.py RUN_DIR OUT --merge     # the whole model, with LoRA's matrices added to its weights

The program creates OUT atomically. OUT/README.md is a model card with the data, the options and the held-out loss.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from data import data_path
from finished import load_base, load_trained
from model import causal_model
from options import model_folder
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from samestep import ConfigError, log
from samestep.options import Options
from torch import nn
from transformers import AutoTokenizer

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CARD = """\
# {title}

{base}, fine-tuned by Samestep's app llm_finetune: {method}, {steps} steps of {step_tokens} tokens of {data}.
The mean loss over the target tokens of {test_examples} held-out samples is {test_loss:.4f}.
{origin}
Options: `{options}`
"""
DEQUANTIZED = """
The base model's weights were dequantized from 4-bit numbers (GGUF Q4_1) before training. Its license is Apache-2.0.
"""


def base_name(options: Options) -> str:
    """Return the name of the base model for published files: the name on the Hub, or the name of a local folder."""
    if options.model == "smollm2-135m":
        return HUB_NAME
    return Path(options.model).name


def card(options: Options, run_dir: Path, is_adapter: bool) -> str:
    """Return the text of the model card.

    Args:
        options: options of the run.
        run_dir: run dir of the run.
        is_adapter: whether the exported folder contains only LoRA's matrices.

    Raises:
        ConfigError: the run has no result.
    """
    try:
        result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{run_dir} has no result.json: finish the run by its command") from None
    base = base_name(options)
    title = f"{base}, an adapter" if is_adapter else f"{base}, fine-tuned"
    method = f"LoRA of rank {options.lora}" if options.lora else "all weights"
    values = {name: value for name, value in sorted(vars(options).items()) if name not in ("run_dir", "data_file")}
    return CARD.format(
        title=title,
        base=base,
        method=method,
        steps=result["steps"],
        step_tokens=options.step_tokens,
        data=data_path(options).name,
        test_examples=result["test_examples"],
        test_loss=result["test_loss"],
        origin=DEQUANTIZED if options.model == "smollm2-135m" else "",
        options=json.dumps(values, default=str),
    )


def write_adapter(options: Options, run_dir: Path, model: PeftModel, folder: Path) -> None:
    """Write the adapter's configuration and the run's weights to ``folder``, in the format of peft."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = base_name(options)  # the published name instead of the local folder
    config.target_modules = sorted(config.target_modules)  # a set, whose order differs between processes
    config.inference_mode = True
    config.save_pretrained(folder)
    shutil.copyfile(run_dir / "model.safetensors", folder / "adapter_model.safetensors")


def untie_head(causal: Any) -> None:
    """Give lm_head a weight of its own if it has LoRA, so that merging does not change the input embedding too."""
    head = causal.lm_head
    if isinstance(head, BaseTunerLayer) and head.weight is causal.get_input_embeddings().weight:
        head.get_base_layer().weight = nn.Parameter(head.weight.detach().clone())
        causal.config.tie_word_embeddings = False


def write_model(options: Options, model: nn.Module, folder: Path) -> None:
    """Write the model with all weights to ``folder``, and the tokenizer's files unless --model is tiny."""
    if isinstance(model, PeftModel):
        untie_head(causal_model(model))
        model.merge_and_unload().save_pretrained(folder)
    else:
        causal_model(model).save_pretrained(folder)
    source = model_folder(options.model)
    if source is not None:
        AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="export a finished run in Hugging Face's or peft's format")
    parser.add_argument("run_dir", type=Path, help="run dir of a finished run")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    parser.add_argument("--merge", action="store_true", help="add LoRA's matrices to the model's weights")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if out.exists():
        raise ConfigError(f"{out} exists: name a new folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder: make it first")
    options, _, model = load_base(arguments.run_dir)
    load_trained(arguments.run_dir, model)
    is_adapter = isinstance(model, PeftModel) and not arguments.merge
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        made = Path(name, "made")
        made.mkdir()
        (made / "README.md").write_text(card(options, arguments.run_dir, is_adapter))
        if is_adapter:
            write_adapter(options, arguments.run_dir, model, made)
        else:
            write_model(options, model, made)
        for path in made.iterdir():  # safetensors creates files that only their owner can read
            path.chmod((made / "README.md").stat().st_mode)
        made.rename(out)
    print(f"wrote {out}", flush=True)


if __name__ == "__main__":
    log.run(main)
