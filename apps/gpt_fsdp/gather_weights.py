"""Write the weights of a run's newest good checkpoint as one file, model.safetensors, a block of 16 MB at a time.

    python gather_weights.py RUN_DIR [--output FILE]

For a run that was stopped: one that came to its end has the file. Prints the digest that a result has as
``weights_sha256``, and needs no framework and no memory of the model's size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samestep import UserError, checkpoint, log, sharded


def gather(run_dir: Path, output: Path) -> tuple[int, str]:
    """Updates done, and the weights' digest. Raises UserError for a run dir without checkpoints."""
    found = checkpoint.newest(run_dir, log.warning, reader=sharded.read)
    if found is None or not found.pieces:
        raise UserError(
            f"{run_dir} has no sharded checkpoint: name the run dir of a run of {Path(__file__).parent.name}"
        )
    return found.step, sharded.gather(sharded.shards_of(found)["model"], output)


def main() -> None:
    parser = argparse.ArgumentParser(description="gather a run's weights in one file")
    parser.add_argument("run_dir", type=Path, help="of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: RUN_DIR/model.safetensors)")
    options = parser.parse_args()
    output = options.output or options.run_dir / "model.safetensors"
    step, digest = gather(options.run_dir, output)
    print(f"{output}: the weights after step {step}, SHA-256 {digest}", flush=True)


if __name__ == "__main__":
    log.run(main)
