"""Replace large files that environments have in common by hard links to one copy, and compile the frameworks.

    python tools/share_files.py .tox/store .tox/core/lib/python3.11/site-packages [MODULE ...]

tox runs this after it has installed an environment. Most of them hold the same framework, and the test suite's
environments would take 21 GB instead of 8. The first import compiles a framework's modules, which takes 6 s of a
processor. Otherwise all ranks of the first tests would do so at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MIN_BYTES = 2**14  # smaller files are many and take little


def share(store: Path, folder: Path) -> None:
    """Link each large file below ``folder`` to the file in ``store`` whose name is its SHA-256."""
    store.mkdir(parents=True, exist_ok=True)
    for path in folder.rglob("*"):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size < MIN_BYTES or status.st_nlink > 1:
            continue
        with path.open("rb") as file:
            copy = store / hashlib.file_digest(file, "sha256").hexdigest()
        with contextlib.suppress(FileExistsError):
            os.link(path, copy)
            continue
        link = path.with_name(f"{path.name}.link")
        os.link(copy, link)
        link.replace(path)


def compile_modules(folder: Path, modules: Sequence[str]) -> None:
    """Import each of ``modules`` that ``folder`` has, in its own process, so that Python writes its bytecode."""
    for module in modules:
        if (folder / module.partition(".")[0]).is_dir():
            subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False)


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # a file system without hard links, or two of them
        share(Path(sys.argv[1]), Path(sys.argv[2]))
    compile_modules(Path(sys.argv[2]), sys.argv[3:])
