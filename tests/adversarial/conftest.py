"""Provide the scratch project of tests/launch for attempts to break launch scripts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))

from scratch_project import project, project_root

__all__ = ["project", "project_root"]
