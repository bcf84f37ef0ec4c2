"""Fixtures for the rendered manifests of deploy/kubernetes."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from debian import unpacked

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def render() -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that renders an overlay of deploy/kubernetes by ``kubectl kustomize``, without a server."""

    @functools.cache
    def rendered(overlay: str) -> list[dict[str, Any]]:
        folder = REPOSITORY / "deploy" / "kubernetes" / "overlays" / overlay
        done = subprocess.run(
            [kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return list(yaml.safe_load_all(done.stdout))

    return rendered


def kubectl() -> str:
    """Return the path of kubectl: the one on PATH, or else an unpacked copy of Debian's."""
    return shutil.which("kubectl") or str(unpacked("kubernetes-client") / "usr" / "bin" / "kubectl")
