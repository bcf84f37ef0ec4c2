"""Import the packages that this process and its ranks need, and explain a failed import.

Importing this module needs no third-party package.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from samestep import ConfigError

NEEDED = ("numpy", "safetensors")  # packages that samestep itself imports


def check_imports(names: Sequence[str] = NEEDED) -> None:
    """Import the packages ``names``.

    Raises:
        ConfigError: an import failed; the message has the cause and the remedy.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(_problem(name, error)) from error


def _problem(name: str, error: Exception) -> str:
    """Return the cause and the remedy of a failed import."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return f"{sys.executable} lacks {name}: install it there"
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    problem = f"{spec.origin} cannot be imported ({reason[:200]})"
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry and Path(os.path.realpath(entry)) in Path(os.path.realpath(spec.origin)).parents:
            return f"{problem}: take {entry} off PYTHONPATH"
    return f"{problem}: install {name} again for {sys.executable}"
