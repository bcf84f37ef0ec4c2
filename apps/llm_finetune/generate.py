"""Complete a prompt with the model of a run, before and after training.

    python generate.py RUN_DIR --prompt "Define skylight." [--tokens 26]

The program runs in one process, and always selects the most likely token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from finished import load_base, load_trained
from model import write
from samestep import ConfigError, log
from samestep.options import bounded_int


def main() -> None:
    default = "(default: %(default)s)"
    parser = argparse.ArgumentParser(description="complete a prompt with the model of a run, before and after training")
    parser.add_argument("run_dir", type=Path, help="run dir of a finished run")
    parser.add_argument("--prompt", default="Define skylight.", metavar="TEXT", help=f"the user's text {default}")
    parser.add_argument("--tokens", type=bounded_int(1), default=26, metavar="T", help=f"tokens to write {default}")
    options = parser.parse_args()
    if not options.prompt.strip():
        raise ConfigError("--prompt is empty: give a text")
    _, tokenizer, model = load_base(options.run_dir)
    print(f"before: {write(model, tokenizer, options.prompt, options.tokens)}")
    load_trained(options.run_dir, model)
    print(f"after:  {write(model, tokenizer, options.prompt, options.tokens)}", flush=True)


if __name__ == "__main__":
    log.run(main)
