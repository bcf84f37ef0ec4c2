"""Install the probes of a replay in this process, then run the sitecustomize module that this module hides."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

import samestep_probe

samestep_probe.start()
_here = os.path.dirname(os.path.abspath(__file__))
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
