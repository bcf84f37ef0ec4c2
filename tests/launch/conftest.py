"""Provide the scratch project in which the launch scripts are tested."""

from __future__ import annotations

from scratch_project import project, project_root

__all__ = ["project", "project_root"]
