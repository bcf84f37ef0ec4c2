"""Share between environments the large files that they have in common, and the bytecode of their frameworks.

    python tools/share_files.py .tox/store .tox/core/lib/python3.11/site-packages [MODULE ...]

tox runs this after it has installed an environment. Most environments hold the same framework: they take 8 GB instead
of 21. The first one compiles the framework's modules, which takes 6 s of a processor; without this, all ranks of the
first tests would compile them. A file in the store has the SHA-256 of its content as its name. The bytecode of a module
has the module's SHA-256, and ends in .pyc.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MIN_BYTES = 2**14  # smaller files are many and take little
TAG = sys.implementation.cache_tag  # bytecode is one Python version's
HEADER_BYTES = 16  # of bytecode: the magic number, flags, and the source's time and size or hash (PEP 552)
UNCHECKED = (0b01).to_bytes(4, "little") + bytes(8)  # Python ignores the source's time, which differs by environment


def share(store: Path, folder: Path) -> None:
    """Link each large file below ``folder`` to the file in ``store`` whose name is its SHA-256."""
    for path in folder.rglob("*"):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size < MIN_BYTES or status.st_nlink > 1:
            continue
        copy = store / _sha256(path)
        with contextlib.suppress(FileExistsError):
            os.link(path, copy)
            continue
        link = path.with_name(f"{path.name}.link")
        os.link(copy, link)
        link.replace(path)


def compile_modules(store: Path, folder: Path, modules: Sequence[str]) -> None:
    """Import each of ``modules`` that ``folder`` has, so that Python compiles those that ``store`` lacks."""
    present = [module for module in modules if (folder / module.partition(".")[0]).is_dir()]
    files = [*_bytecode(store, folder)] if present else []
    with contextlib.suppress(OSError):  # no hard links
        for bytecode, copy in files:
            if copy.exists() and not bytecode.exists():
                bytecode.parent.mkdir(exist_ok=True)
                os.link(copy, bytecode)
    for module in present:  # each in its own process
        subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False)
    for bytecode, copy in files:
        if bytecode.exists() and not copy.exists():
            content, temporary = bytecode.read_bytes(), copy.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(content[:4] + UNCHECKED + content[HEADER_BYTES:])
            temporary.replace(copy)


def _bytecode(store: Path, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the file of each module's bytecode below ``folder``, with its copy in ``store``; neither need exist."""
    for path in folder.rglob("*.py"):
        if path.is_file():
            yield Path(importlib.util.cache_from_source(path)), store / f"{_sha256(path)}.{TAG}.pyc"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    store, folder = Path(sys.argv[1]), Path(sys.argv[2])
    store.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a file system without hard links, or two of them
        share(store, folder)
    compile_modules(store, folder, sys.argv[3:])
