"""Write text as a run's weights would go on, for the eye.

    python generate.py RUN_DIR [--text ":hacker:"] [--bytes 400] [--temperature 0.8] [--seed 1]

In one process, from RUN_DIR/model.safetensors, which a run leaves at its end and gather_weights.py makes before it.
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
    """The model with its weights, and its context. Raises UserError where the run dir lacks either."""
    try:
        with (run_dir / "metrics.jsonl").open() as file:
            options: dict[str, Any] = json.loads(file.readline())["options"]
        model = GPT(options["layers"], options["width"], options["heads"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{run_dir} does not say what model it is of ({error}): name a run dir of this app"
        ) from error
    if not (run_dir / "model.safetensors").exists():
        raise ConfigError(f"{run_dir} has no model.safetensors: gather_weights.py {run_dir} makes it of a checkpoint")
    arrays = checkpoint.load_weights(run_dir / "model.safetensors")
    try:
        model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except RuntimeError as error:
        raise ConfigError(f"{run_dir}/model.safetensors is not of this run: {str(error).splitlines()[0]}") from error
    return model, int(options["context"])


@torch.inference_mode()
def go_on(model: GPT, context: int, text: bytes, count: int, temperature: float, seed: int) -> bytes:
    """``count`` bytes after ``text``, each drawn by its chance given ``context`` before it; 0: the most likely."""
    generator = torch.Generator().manual_seed(seed)
    written = list(text)
    for _ in range(count):
        scores = model(torch.tensor([written[-context:]]))[0, -1]
        if temperature == 0:
            written.append(int(scores.argmax()))
        else:
            written.append(int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)))
    return bytes(written)


def main() -> None:
    default = "(default: %(default)s)"
    parser = argparse.ArgumentParser(description="write text as a run's weights would go on")
    parser.add_argument("run_dir", type=Path, help="of a run that came to its end")
    parser.add_argument("--text", default="\n\n:", help="what it begins with (default: an empty line and a colon)")
    parser.add_argument("--bytes", type=bounded_int(0), default=400, metavar="B", help=default)
    parser.add_argument(
        "--temperature", type=bounded_float(0.0), default=0.8, metavar="T", help=f"0: the most likely {default}"
    )
    parser.add_argument("--seed", type=bounded_int(0), default=1, help=default)
    options = parser.parse_args()
    if not options.text:
        raise ConfigError("--text is empty: the model goes on from at least one byte")
    model, context = load(options.run_dir)
    written = go_on(model, context, options.text.encode(), options.bytes, options.temperature, options.seed)
    sys.stdout.write(written.decode(errors="replace") + "\n")


if __name__ == "__main__":
    log.run(main)
