"""Record a process of a checked script from its start, then run the sitecustomize that this file shadows."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

import samestep_record

samestep_record.start()
_here = os.path.dirname(os.path.abspath(__file__))
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != _here])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
