"""Make imports of frameworks faster in a test environment.

    python tools/quick_imports.py ~/.cache/samestep/bytecode .tox/core/lib/python3.11/site-packages [MODULE ...]

tox runs this program after it has installed an environment. The tests start hundreds of ranks, and each rank imports a
framework. The program saves time in two ways:

* It compiles the modules once for all environments and clones of a user. Compiling torch needs 6 processor seconds. uv
  hard-links the files of all environments to its cache, so environments with equal packages share inodes.
* It prevents most garbage collections, and excludes existing objects from the collection at exit.
  Otherwise, these collections use a third of the processor time of a process that imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TAG = sys.implementation.cache_tag  # bytecode depends on the Python version
HEADER_BYTES = 16  # bytecode's header: the magic number, flags, and the source's time and size or hash (PEP 552)
# Python runs this line of a .pth file at each start. At exit, Python does not collect frozen objects.
FEWER_COLLECTIONS = "import atexit, gc; gc.set_threshold(1_000_000, 50, 100); atexit.register(gc.freeze)\n"
UNCHECKED = (0b01).to_bytes(4, "little") + bytes(8)  # Python ignores the source's time, which differs by environment


def compile_modules(store: Path, folder: Path, modules: Sequence[str]) -> None:
    """Link bytecode of ``store`` into ``folder``, compile modules that lack bytecode, and copy their bytecode back.

    Args:
        store: folder of bytecode for all environments.
        folder: site-packages of an environment.
        modules: import names of the packages to compile.
    """
    sources = {module: folder / module.replace(".", "/") / "__init__.py" for module in modules}
    sources = {module: source for module, source in sources.items() if source.is_file()}
    files = [*_bytecode(store, folder)] if sources else []
    with contextlib.suppress(OSError):  # the file system has no hard links
        for bytecode, copy in files:
            if copy.exists() and not bytecode.exists():
                bytecode.parent.mkdir(exist_ok=True)
                os.link(copy, bytecode)
    for module, source in sources.items():  # an import in a separate process compiles the module
        if not Path(importlib.util.cache_from_source(source)).exists():
            subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False)
    for bytecode, copy in files:
        if bytecode.exists() and not copy.exists():
            content = bytecode.read_bytes()
            temporary = copy.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(content[:4] + UNCHECKED + content[HEADER_BYTES:])
            temporary.replace(copy)


def _bytecode(store: Path, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the paths of each hard-linked module's bytecode, in ``folder`` and in ``store``. Files may be missing."""
    for path in folder.rglob("*.py"):
        file = path.lstat()
        if file.st_nlink > 1:
            identity = path.relative_to(folder), file.st_dev, file.st_ino, file.st_mtime_ns, file.st_size
            digest = hashlib.sha256(repr(identity).encode()).hexdigest()
            yield Path(importlib.util.cache_from_source(path)), store / f"{digest}.{TAG}.pyc"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make imports of frameworks faster in a test environment.")
    parser.add_argument("store", type=Path, help="folder of bytecode for all environments, which is made if missing")
    parser.add_argument("folder", type=Path, help="site-packages of the environment")
    parser.add_argument("modules", nargs="*", metavar="module", help="import name of a package to compile")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    options.store.mkdir(parents=True, exist_ok=True)
    (options.folder / "fewer_collections.pth").write_text(FEWER_COLLECTIONS)
    compile_modules(options.store, options.folder, options.modules)
