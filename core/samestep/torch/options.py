"""Accept the option that torch.distributed.launch adds to a command line.

The launch script imports this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from samestep import ConfigError


class _LocalRank(argparse.Action):
    """Compare the value with LOCAL_RANK, and store nothing: it does not belong to the run."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        expected = os.environ.get("LOCAL_RANK")
        if values != expected:
            raise ConfigError(
                f"--local-rank {values}, but LOCAL_RANK is {expected or 'not set'}: start the ranks with torchrun"
            )


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """Add --local-rank, which torch.distributed.launch passes beside LOCAL_RANK; before torch 2.0 as --local_rank.

    Parsing raises ConfigError if the two differ.
    """
    hidden = argparse.SUPPRESS
    parser.add_argument("--local-rank", "--local_rank", action=_LocalRank, default=hidden, help=hidden)
