"""Unpack programs of Debian's packages for tests into a cache folder, without installing them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep" / "debian"


def unpacked(*packages: str) -> Path:
    """Return the folder of these packages and their missing dependencies, which are downloaded once.

    Raises:
        RuntimeError: the packages cannot be downloaded; the message has the remedy.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            made = Path(tempfile.mkdtemp(prefix=".making.", dir=CACHE))
            try:
                _fetch(made, packages)
                (made / "root").rename(folder)
            finally:
                shutil.rmtree(made)
    return folder


def libraries(root: Path) -> Path:
    """Return the folder of the unpacked packages' libraries, for LD_LIBRARY_PATH."""
    return next((root / "usr" / "lib").glob("*-linux-gnu"))


def _fetch(work: Path, packages: Sequence[str]) -> None:
    """Download the packages, and unpack all into ``work/root``."""
    archives = work / "archives"
    (archives / "partial").mkdir(parents=True)
    settings = [f"Dir::Cache::archives={archives}", "Debug::NoLocking=1", "APT::Sandbox::User=root"]
    # --reinstall downloads a package even if this machine has it.
    command = ["apt-get", "install", "--download-only", "--reinstall", "--yes", "--no-install-recommends", *packages]
    command += [word for setting in settings for word in ("-o", setting)]
    try:
        if subprocess.run(command, capture_output=True, timeout=600, check=False).returncode:  # the lists may be old
            subprocess.run(["apt-get", "update"], capture_output=True, timeout=600, check=True)
            subprocess.run(command, capture_output=True, timeout=600, check=True)
        for package in archives.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, work / "root"], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        message = getattr(problem, "stderr", None) or b""
        raise RuntimeError(
            f"Debian's {', '.join(packages)} are missing ({problem}; {message.decode(errors='replace').strip()}): run "
            "this on Debian or Ubuntu, as root, with their package index"
        ) from None
