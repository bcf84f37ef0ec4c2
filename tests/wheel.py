"""Build the package as it is published, and run commands without the repository on Python's path."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600.0  # seconds; a package index may be slow


class Built(NamedTuple):
    """The two files that are published."""

    sdist: Path
    wheel: Path


def clean_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without PYTHONPATH and MYPYPATH, and with ``variables``."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return {**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    """Run a command in ``folder`` with `clean_environment`, and return its stdout. The command must exit with 0."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def build(folder: Path) -> Built:
    """Build the sdist in ``folder``, and the wheel from the content of the sdist."""
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    tools = str(folder / "tools")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", tools, *backend, folder=folder)
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", folder)
    run(*hatchling, "-t", "sdist", folder=ROOT, PYTHONPATH=tools)
    sdist = next(folder.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(*hatchling, "-t", "wheel", folder=folder / sdist.name.removesuffix(".tar.gz"), PYTHONPATH=tools)
    return Built(sdist, next(folder.glob("*.whl")))
