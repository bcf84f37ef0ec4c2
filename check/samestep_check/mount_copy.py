"""Mount a copy over its original folder, only for this process and its children, and execute a command.

    python -I -S mount_copy.py COPY FOLDER KEPT COMMAND [ARGS...]

KEPT is a JSON list of relative paths, such as a virtual environment, whose content comes from FOLDER. COPY must
have empty folders or files at these paths. The mount needs CAP_SYS_ADMIN, or else a user namespace, in which the user
keeps the user ID. If the kernel refuses both, the exit code is REFUSED, and the command does not run.
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
    """Raise OSError with the C library's errno if a call did not return 0."""
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
    """Move this process to a new mount namespace.

    Raises:
        OSError: the kernel refuses the namespace.
    """
    user = os.geteuid()
    group = os.getegid()
    if _library.unshare(_NEW_MOUNTS) != 0:
        _check(_library.unshare(_NEW_USER | _NEW_MOUNTS))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    _mount(None, "/", _RECURSIVE | _PRIVATE)  # later mounts of this process do not propagate to other processes


def cover(copy: str, folder: str, kept: Sequence[str]) -> None:
    """Mount the kept paths of a folder into its copy, and the copy over the folder.

    Args:
        copy: path of the copy to mount.
        folder: path of the original folder, the mount point.
        kept: relative paths whose content comes from the original folder.

    Raises:
        OSError: the kernel refuses a mount.
    """
    for name in kept:
        _mount(os.path.join(folder, name), os.path.join(copy, name), _BIND | _RECURSIVE)
    _mount(copy, folder, _BIND | _RECURSIVE)


def main(copy: str, folder: str, kept: str, command: list[str]) -> None:
    """Mount the copy over the folder, and execute the command.

    Args:
        copy: path of the copy to mount.
        folder: path of the original folder, the mount point.
        kept: JSON list of relative paths whose content comes from the original folder.
        command: words of the command to execute.
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
