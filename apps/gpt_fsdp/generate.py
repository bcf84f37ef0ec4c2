"""Continue a text with the weights of a run.

    python generate.py RUN_DIR [--text ":hacker:"] [--bytes 400] [--temperature 0.8] [--seed 1]

The program runs in one process and reads RUN_DIR/model.safetensors. A finished run has this file. If the run was
stopped, create the file by gather_weights.py first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from model import GPT
from samestep import ConfigError, checkpoint, log
from samestep.options import bounded_float, bounded_int


def load(run_dir: Path) -> tuple[GPT, int]:
    """Return a run's model with the trained weights, and the context of the run (--context), in bytes.

    Raises:
        ConfigError: a file is missing, or belongs to another app or run.
    """
    try:
        with (run_dir / "metrics.jsonl").open() as file:
            options: dict[str, Any] = json.loads(file.readline())["options"]
        model = GPT(options["layers"], options["width"], options["heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run_dir} is not a run dir of this app ({error}): name another") from error
    if not (run_dir / "model.safetensors").exists():
        raise ConfigError(f"{run_dir} has no model.safetensors: write it by gather_weights.py {run_dir}")
    arrays = checkpoint.load_weights(run_dir / "model.safetensors")
    try:
        model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except RuntimeError as error:
        mismatch = str(error).splitlines()[0]
        raise ConfigError(f"{run_dir}/model.safetensors belongs to another run: {mismatch}") from error
    return model, int(options["context"])


@torch.inference_mode()
def generate(model: GPT, context: int, text: bytes, count: int, temperature: float, seed: int) -> bytes:
    """Return ``text`` and ``count`` more bytes, which are drawn from the model's distribution one at a time.

    Args:
        model: the unsharded model.
        context: the model's window, in bytes.
        text: the bytes to continue, at least one.
        count: number of bytes to draw.
        temperature: divisor of the scores; 0 selects the most likely byte.
        seed: seed of the random draws.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(text)
    for _ in range(count):
        scores = model(torch.tensor([written[-context:]]))[0, -1]
        if temperature == 0:
            written.append(int(scores.argmax()))
        else:
            probabilities = (scores / temperature).softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            written.append(int(drawn))
    return bytes(written)


def main() -> None:
    default = "(default: %(default)s)"
    parser = argparse.ArgumentParser(description="continue a text with the weights of a run")
    parser.add_argument("run_dir", type=Path, help="run dir of a finished run")
    parser.add_argument("--text", default="\n\n:", help="text to continue (default: an empty line and a colon)")
    parser.add_argument("--bytes", type=bounded_int(0), default=400, metavar="B", help=f"bytes to write {default}")
    temperature = f"randomness of the draws; 0 takes the most likely byte {default}"
    parser.add_argument("--temperature", type=bounded_float(0.0), default=0.8, metavar="T", help=temperature)
    parser.add_argument("--seed", type=bounded_int(0, 2**63 - 1), default=1, help=f"seed of the draws {default}")
    options = parser.parse_args()
    if not options.text:
        raise ConfigError("--text is empty: give at least one byte")
    model, context = load(options.run_dir)
    written = generate(model, context, options.text.encode(), options.bytes, options.temperature, options.seed)
    sys.stdout.write(written.decode(errors="replace") + "\n")


if __name__ == "__main__":
    log.run(main)
