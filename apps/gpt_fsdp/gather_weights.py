"""Write the weights of a run's newest intact checkpoint to one file, model.safetensors.

    python gather_weights.py RUN_DIR [--output FILE]

Use this program for a stopped run, because a finished run already has the file. The program prints the weights'
SHA-256, which results contain as ``weights_sha256``. It copies 16 MiB at a time, and needs no deep-learning framework.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samestep import ConfigError, checkpoint, log
from samestep.sharded import storage


def gather(run_dir: Path, output: Path) -> tuple[int, str]:
    """Write the weights to ``output``, and return the checkpoint's step and the weights' SHA-256.

    Raises:
        ConfigError: the run has no sharded checkpoint.
        NonRetryableError: all checkpoints are corrupt, or a file cannot be read or written.
    """
    found = checkpoint.newest(run_dir, log.warning, reader=storage.read)
    if found is None or not found.pieces:
        raise ConfigError(f"{run_dir} has no sharded checkpoint: name a run dir of {Path(__file__).parent.name}")
    return found.step, storage.consolidate(storage.stored_groups(found)["model"], output)


def main() -> None:
    parser = argparse.ArgumentParser(description="gather a run's weights in one file")
    parser.add_argument("run_dir", type=Path, help="run dir of any run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: RUN_DIR/model.safetensors)")
    options = parser.parse_args()
    output = options.output or options.run_dir / "model.safetensors"
    step, digest = gather(options.run_dir, output)
    print(f"{output}: the weights after step {step}, SHA-256 {digest}", flush=True)


if __name__ == "__main__":
    log.run(main)
