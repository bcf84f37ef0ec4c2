"""Replace large files that environments have in common by hard links to one copy in a store.

    python tools/share_files.py .tox/store .tox/core/lib/python3.11/site-packages

tox runs this after it has installed an environment: most of them hold the same framework, and the test suite's
environments would take 21 GB instead of 8.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
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


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # a file system without hard links, or two of them
        share(Path(sys.argv[1]), Path(sys.argv[2]))
