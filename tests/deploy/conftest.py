"""What the manifests of deploy/kubernetes are once an overlay is rendered."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    """The one on PATH; else Debian's, unpacked into the user's cache, so that nothing is installed."""
    found = shutil.which("kubectl")
    if found:
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep" / "kubectl"
    binary = cache / "usr" / "bin" / "kubectl"
    if not binary.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            fetched = run_in(folder, "apt-get", "download", "kubernetes-client") or (
                run_in(folder, "apt-get", "update") and run_in(folder, "apt-get", "download", "kubernetes-client")
            )
            packages = [str(path) for path in Path(folder).glob("*.deb")] if fetched else []
            if not packages or not run_in(folder, "dpkg", "-x", packages[0], "unpacked"):
                pytest.fail("there is no kubectl, and apt-get has no kubernetes-client: install kubectl", pytrace=False)
            if not binary.exists():  # of another test process, meanwhile
                Path(folder, "unpacked").replace(cache)
    return str(binary)


def run_in(folder: str, *command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=300, check=False).returncode == 0
