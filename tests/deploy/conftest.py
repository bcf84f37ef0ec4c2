"""Fixtures: the manifests of deploy/kubernetes after an overlay is rendered."""

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
    """The objects of an overlay of deploy/kubernetes, as ``kubectl kustomize``, which needs no server, renders them."""

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
    """Return the kubectl on PATH, or else Debian's, unpacked but not installed."""
    return shutil.which("kubectl") or str(unpacked("kubernetes-client") / "usr" / "bin" / "kubectl")
