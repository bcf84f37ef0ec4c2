"""Mount a copied folder over the folder itself, for this process and its children alone, and execute a command there.

    python -I -S mount_copy.py COPY FOLDER KEPT COMMAND [ARGS...]

KEPT is a JSON list of relative paths, such as a virtual environment, whose content comes from FOLDER; COPY has empty
folders or files in their places. Other processes see no mount. It needs CAP_SYS_ADMIN, or else a user namespace, which
maps the user's own number. If the kernel refuses both, the exit code is REFUSED, and the command does not run.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence

REFUSED = 125
_NEW_MOUNTS = 0x20000
_NEW_USER = 0x10000000
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18

_library = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    """Raise the OSError of a call of the library that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount(source: str | None, target: str, flags: int) -> None:
    path = None if source is None else os.fsencode(source)
    _check(_library.mount(path, os.fsencode(target), None, ctypes.c_ulong(flags), None))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter() -> None:
    """Give this process mounts of its own.

    Raises:
        OSError: the kernel refuses it.
    """
    user = os.geteuid()
    group = os.getegid()
    if _library.unshare(_NEW_MOUNTS) != 0:
        _check(_library.unshare(_NEW_USER | _NEW_MOUNTS))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    _mount(None, "/", _RECURSIVE | _PRIVATE)  # else other processes would see the mounts below


def cover(copy: str, folder: str, kept: Sequence[str]) -> None:
    """Mount parts of a folder over places of its copy, and the copy over the folder.

    Args:
        copy: the copied folder.
        folder: the folder.
        kept: relative paths that stay the folder's.

    Raises:
        OSError: the kernel refuses it.
    """
    for name in kept:
        _mount(os.path.join(folder, name), os.path.join(copy, name), _BIND | _RECURSIVE)
    _mount(copy, folder, _BIND | _RECURSIVE)


def main(copy: str, folder: str, kept: str, command: list[str]) -> None:
    """Mount the copy over the folder, and execute the command.

    Args:
        copy: the copied folder.
        folder: the folder.
        kept: a JSON list of relative paths that stay the folder's.
        command: the words of the command.
    """
    try:
        enter()
        cover(copy, folder, json.loads(kept))
    except OSError as error:
        print(f"error: the copy cannot be mounted over {folder}: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}: name a command on PATH", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
