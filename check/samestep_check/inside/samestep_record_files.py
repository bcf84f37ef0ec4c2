"""Record the writes and reads of checkpoints, and refuse writes outside of the copy and the allowed folders."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import sys
from types import ModuleType
from typing import Any

from samestep_record import config, generators, guarded, line, on_import, record

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_checkpoint_folders: set[str] = set()
_read_files: set[str] = set()
_saves: dict[int, int] = {}  # number of writes to checkpoints, by PID, because a fork inherits this variable


def start() -> None:
    """Watch the files that Python opens, renames and deletes, and the files that torch.save writes."""
    sys.addaudithook(_audit)
    on_import("torch.serialization", _watch_saves)


def _audit(event: str, values: Any) -> None:
    if event == "open":
        path, _, flags = values
        if path is None or isinstance(path, int):
            return
        if flags & _WRITES:
            full = _inside(path)
            _written(full, "open", flags)
            _announce("open", full)
        else:
            _read(path)
    elif event == "os.rename":
        source = _inside(_below(values[2], values[0]), follow=False)
        target = _below(values[3], values[1])
        full = _inside(target, follow=False)  # a rename replaces a symbolic link, not the file to which the link leads
        of_checkpoint = source in _checkpoint_folders or _is_checkpoint(source, target)
        _written(full, "rename", 0, source, of_checkpoint)
        _announce("rename", source, full)
    elif event in ("os.link", "os.symlink"):
        _announce("symlink", _inside(_below(values[-1], values[1]), follow=False))
    elif event in ("os.remove", "os.rmdir", "shutil.rmtree"):
        path, descriptor = (*values, None)[:2]
        full = _inside(_below(descriptor, path), follow=False)
        if descriptor in (-1, None):  # other descriptors come from an announced shutil.rmtree
            _announce("unlink", full)
    elif event == "os.mkdir":
        _inside(_below(values[2], values[0]))
    elif event == "os.truncate":
        _inside(values[0])


def _below(descriptor: int | None, path: Any) -> Any:
    """Return the path of a file in the folder of an open descriptor; -1 and None mean the current folder."""
    if descriptor in (-1, None):
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))


def _is_checkpoint(source: str | None, target: Any) -> bool:
    """Return whether a rename moves a folder into a folder of checkpoints, for example to checkpoints/step-3."""
    folder = os.path.basename(os.path.dirname(os.path.abspath(os.fsdecode(target))))
    is_folder = source is not None and os.path.isdir(source)
    return is_folder and bool(re.search(config["checkpoint"], folder))


@functools.cache
def is_covered() -> bool:
    """Return whether the copy is mounted over the script's folder in this process."""
    try:
        return os.path.samefile(config["source"], config["work"])
    except OSError:
        return False


def _own_path(path: str) -> str:
    """Return a path's real place under the mounted copy: in the folder for a path in ``kept``, else in the copy."""
    for folder in (config["source"], config["work"]):
        if _is_below(path, folder):
            name = path.removeprefix(folder)
            is_kept = any(_is_below(name, os.sep + each) for each in config.get("kept", ()))
            owner: str = config["source" if is_kept else "work"]
            return owner + name
    return path


def _real_path(path: Any, follow: bool) -> str:
    """Return the path of a file in the copy. Without ``follow``, a symbolic link at the end of the path stays."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    full = os.path.join(os.path.realpath(folder), name)
    if follow:
        full = os.path.realpath(full)
    return _own_path(full) if is_covered() else full


def _inside(path: Any, follow: bool = True) -> str | None:
    """Return the real path that a call writes to, or None for a file of the recorder or a file descriptor.

    Raises:
        PermissionError: the path is neither in the copy nor in an allowed folder.
    """
    if isinstance(path, int):
        return None
    full = _real_path(path, follow)
    if _is_below(full, config["records"]):
        return None
    # One of these folders may contain another, so the innermost folder that contains the path decides.
    allowed = [each for each in (*config["allowed"], config["work"]) if _is_below(full, each)]
    longest = max(map(len, allowed), default=0)
    in_source = _is_below(full, config["source"]) and longest < len(config["source"])
    if in_source or not (allowed or "__pycache__" in full):
        record("outside", path=full)
        raise PermissionError(f"samestep check: a write outside of the copied folder: {full}: --allow-write allows it")
    return full


def _is_below(path: str, folder: str) -> bool:
    return (path + os.sep).startswith(folder + os.sep)


@guarded
def _read(path: Any) -> None:
    """Record the first read of a checkpoint file in this process."""
    if not re.search(config["checkpoint"], os.path.basename(os.fsdecode(path))):
        return
    full = _real_path(path, follow=True)
    if full not in _read_files and _is_below(full, config["work"]):
        _read_files.add(full)
        record("read", path=full)


def _written(full: str | None, kind: str, flags: int, source: str | None = None, of_checkpoint: bool = False) -> None:
    if full is None or "__pycache__" in full:
        return
    if not of_checkpoint and not re.search(config["checkpoint"], os.path.basename(full)):
        return
    _checkpoint_folders.add(os.path.dirname(full))
    record("save", kind=kind, path=full, source=source, random=generators(), line=line())
    if kind == config.get("kill_at"):
        _kill_in_save(full, kind, flags)


@guarded
def _announce(name: str, path: str | None, target: str | None = None) -> None:
    """Announce a call on a path in the copy to the check's socket, if there is a socket, and wait for the answer."""
    address = config.get("announce")
    if not address or path is None or not _is_below(path, config["work"]):
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(json.dumps([name, path, target]).encode() + b"\n")
        connection.recv(1)


def _kill_in_save(path: str, kind: str, flags: int) -> None:
    """Kill this process if this open or rename of a checkpoint has the number that the check has chosen."""
    number = _saves.get(os.getpid(), 0) + 1
    _saves[os.getpid()] = number
    marker = os.path.join(config["records"], "killed")
    if number != config.get("kill_save") or os.path.exists(marker):
        return
    os.close(os.open(marker, os.O_CREAT))
    if kind == "open":  # create or empty the file first, as the open would
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | (flags & os.O_TRUNC)))
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_saves(module: ModuleType) -> None:
    """Make torch.save raise an audit event for the saved file, because torch's C++ writer raises none."""
    describe = guarded(_path_of_save)
    save = module.save

    def announced(obj: Any, f: Any, *args: Any, **named: Any) -> Any:
        path = describe(f)
        if path is not None:
            sys.audit("open", path, "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return save(obj, f, *args, **named)

    module.save = announced  # type: ignore[attr-defined]


def _path_of_save(file: Any) -> str | bytes | None:
    if isinstance(file, (str, os.PathLike)):
        return os.fspath(file)
    return None
