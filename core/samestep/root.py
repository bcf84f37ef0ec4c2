"""Open, create, rename and delete files below an untrusted folder, such as a run dir.

`Root` opens a path one folder at a time, each relative to its parent's descriptor and with O_NOFOLLOW. `Root` does not
follow links below the root folder. Therefore a name in a run dir cannot lead to a file outside, even if another program
replaces a folder in the meantime. This module uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

# Errors of operations that a file system does not support, such as locks without a lock server, or sync of a folder.
NOT_SUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_RENAME_EXCHANGE = 2  # flag of renameat2(2)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class Root:
    """A folder and its files. The folder itself may be a link, but links below it are not followed.

    Names are relative paths, such as "log/rank-0.log". Every method raises OSError, with the path, if a folder on the
    path is a link or a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def folder(self, name: str = "") -> Iterator[int]:
        """Open a folder, by default the root, and yield its descriptor.

        Raises:
            OSError: the name is absolute or contains "..", or a folder on the path is a link or a file.
        """
        if ".." in Path(name).parts or os.path.isabs(name):
            raise OSError(errno.EINVAL, "leads out of its folder", name)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        walked = self.path
        try:
            for part in Path(name).parts:
                walked = walked / part
                inner = self._open_part(descriptor, part, walked)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @staticmethod
    def _open_part(descriptor: int, part: str, path: Path) -> int:
        try:
            return os.open(part, _FOLDER, dir_fd=descriptor)
        except OSError as error:
            if _is_link(part, descriptor):
                raise LinkError(path) from error
            raise OSError(error.errno, error.strerror, str(path)) from error

    @contextlib.contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Open the folder of a file, and yield (the folder's descriptor, the file's name in the folder)."""
        path = Path(name)
        with self.folder(str(path.parent)) as descriptor:
            try:
                yield descriptor, path.name
            except OSError as error:
                if error.filename not in (None, path.name):
                    raise
                raise OSError(error.errno, error.strerror, str(self.path / path)) from error

    def open(self, name: str, flags: int, mode: int = 0o644) -> int:
        """Open or create a file for writing, and return its descriptor.

        Args:
            name: path below the root.
            flags: flags for `os.open`, without O_TRUNC.
            mode: permissions of a new file.

        Raises:
            OSError: the file is not a regular file, or has a second name (a hard link), which may be outside the root.
        """
        with self._parent(name) as (descriptor, leaf):
            with contextlib.suppress(FileNotFoundError):
                _check_writable(os.stat(leaf, dir_fd=descriptor, follow_symlinks=False))
            flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(leaf, flags, mode, dir_fd=descriptor)
            try:
                _check_writable(os.fstat(file))
            except OSError:
                os.close(file)
                raise
            return file

    def append(self, name: str) -> IO[bytes]:
        """Open or create a file for appending, without a buffer.

        Raises:
            OSError: as in `open`.
        """
        return os.fdopen(self.open(name, os.O_RDWR | os.O_APPEND), "ab", buffering=0)

    def create(self, name: str, mode: int = 0o666) -> IO[bytes]:
        """Delete any file or link with this name, then create a file and open it for writing."""
        with self._parent(name) as (descriptor, leaf):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leaf, dir_fd=descriptor)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            return os.fdopen(os.open(leaf, flags, mode, dir_fd=descriptor), "wb")

    def make_folder(self, name: str, exist_ok: bool = True) -> None:
        """Create a folder and its parents.

        Raises:
            FileExistsError: the folder exists, and ``exist_ok`` is False.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        parts = Path(name).parts
        for depth in range(1, len(parts) + 1):
            may_exist = exist_ok or depth < len(parts)
            with _allow_existing(may_exist), self._parent(str(Path(*parts[:depth]))) as (descriptor, leaf):
                os.mkdir(leaf, dir_fd=descriptor)
        with self.folder(name):  # raises OSError if the path is a link or a file
            pass

    def names(self, name: str = "") -> list[str]:
        """Return the names of the files and folders in a folder."""
        with self.folder(name) as descriptor:
            return os.listdir(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder. An existing file with the new name is replaced."""
        with self._parent(old) as (source, old_leaf), self._parent(new) as (target, new_leaf):
            os.rename(old_leaf, new_leaf, src_dir_fd=source, dst_dir_fd=target)

    def exchange_folders(self, one: str, other: str) -> bool:
        """Exchange the names of two folders atomically.

        Returns:
            True if the names are exchanged; False if a folder is missing, or the system cannot exchange names (only
            Linux can).

        Raises:
            NotADirectoryError: a name is a file or a link.
        """
        rename = getattr(ctypes.CDLL(None), "renameat2", None)
        if rename is None:
            return False
        with self._parent(one) as (source, leaf), self._parent(other) as (target, other_leaf):
            if not _is_folder(leaf, source) or not _is_folder(other_leaf, target):
                return False
            result: int = rename(source, os.fsencode(leaf), target, os.fsencode(other_leaf), _RENAME_EXCHANGE)
        return result == 0

    def unlink(self, name: str) -> None:
        """Delete a file or a link, if it exists."""
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (descriptor, leaf):
            os.unlink(leaf, dir_fd=descriptor)

    def delete(self, name: str) -> None:
        """Delete a file, a link, or a folder with its content, if it exists."""
        try:
            self.delete_folder(name)
        except NotADirectoryError:
            self.unlink(name)

    def delete_folder(self, name: str) -> None:
        """Delete a folder with its content, if it exists.

        Raises:
            NotADirectoryError: the name is a file or a link.
        """
        with contextlib.suppress(FileNotFoundError), self._parent(name) as (descriptor, leaf):
            _is_folder(leaf, descriptor)
            if sys.version_info >= (3, 11):
                shutil.rmtree(leaf, dir_fd=descriptor)
            else:
                shutil.rmtree(self.path / name)

    def touch(self, name: str) -> None:
        """Set a file's modification time to now."""
        with self._parent(name) as (descriptor, leaf):
            os.utime(leaf, dir_fd=descriptor, follow_symlinks=False)

    def sync(self, name: str = "") -> bool:
        """Sync a folder's entries to the disk, so that they survive a crash of the machine.

        Returns:
            False if this file system cannot sync folders, else True.

        Raises:
            OSError: the sync fails for another reason, such as EIO.
        """
        with self.folder(name) as descriptor:
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
                return False
        return True


def try_lock(lock: Callable[..., object], *arguments: int) -> bool | None:
    """Try to acquire a lock by ``fcntl.lockf`` or ``fcntl.flock``.

    Returns:
        Whether the lock was acquired; None if the file system does not support locks.

    Raises:
        OSError: the lock fails for another reason, such as EIO.
    """
    try:
        lock(*arguments)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, depending on the system
        return False
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return None
    return True


class LinkError(OSError):
    """A folder on a path is a link."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.ELOOP, "is a link", str(path))


@contextlib.contextmanager
def _allow_existing(allowed: bool) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        if not allowed:
            raise


def _is_folder(leaf: str, descriptor: int) -> bool:
    """Return whether the folder exists.

    Raises:
        NotADirectoryError: the name is a file or a link.
    """
    try:
        status = os.stat(leaf, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder")
    return True


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of ``content`` to an open file, because a single call of `os.write` may write only a part."""
    while content:
        content = content[os.write(descriptor, content) :]


def _is_link(part: str, descriptor: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(part, dir_fd=descriptor, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _check_writable(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EEXIST, "not a regular file (remove it)")
    if status.st_nlink > 1:
        raise OSError(errno.EEXIST, "a hard link: another name has the same content (remove it)")
