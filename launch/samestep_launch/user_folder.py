"""Manage the folders samestep-<uid> of this user: in /tmp for port locks, and in TMPDIR for temporary files of jobs.

Other users may write to /tmp and TMPDIR, too, so this module does not use a folder that belongs to another user. The
module imports no third-party package.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from samestep import NonRetryableError
from samestep.root import try_lock
from samestep.untrusted import open_regular, own_folder

from samestep_launch.supervise import block_signals, print_stderr

BASE = Path("/tmp")  # TMPDIR may differ, but all jobs of a user must find the same locks
# These ports are below Linux's default ephemeral ports, so that no outgoing connection uses a reserved port.
PORTS = range(20_000, 32_768)
PORT_TRIES = 1000
# Maximum length of TMPDIR in bytes. Frameworks make Unix sockets in TMPDIR, and a socket's path has at most 107 bytes.
MAX_TMPDIR = 60


def user_folder(base: Path) -> Path | None:
    """Create the folder ``base/samestep-<uid>`` if it is missing, and return it.

    Returns:
        The folder; None if it is a link, belongs to another user, or cannot be created.
    """
    folder = base / f"samestep-{os.getuid()}"
    with contextlib.suppress(OSError):
        if own_folder(folder):
            folder.chmod(0o700)  # an older version created the folder with the user's umask
            return folder
    return None


# --- ports -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reserved_port(given: int | None) -> Iterator[int]:
    """Yield ``given`` if it is set; otherwise yield a free port that a file lock reserves until the context ends.

    Raises:
        NonRetryableError: none of `PORT_TRIES` random ports is free.
    """
    if given:
        yield given
        return
    locks = _open_locks()
    try:
        free = (port for port in random.sample(PORTS, PORT_TRIES) if _lock_port(locks, port) and port_is_free(port))
        port = next(free, None)
        if port is None:
            ports = f"{PORT_TRIES} of the ports from {PORTS.start} to {PORTS.stop - 1}"
            raise NonRetryableError(f"no port is free: {ports} are in use: set MASTER_PORT to a free port")
        yield port
    finally:
        if locks is not None:
            os.close(locks)


def _open_locks() -> int | None:
    """Return a descriptor of ports.lock, in which each port has a byte to lock.

    If the file cannot be used, the function prints a warning and returns None.
    """
    folder = user_folder(BASE)
    with contextlib.suppress(OSError):
        if folder is not None:
            locks = open_regular(folder / "ports.lock", os.O_RDWR, 0o600)
            if os.fstat(locks).st_uid == os.getuid():
                return locks
            os.close(locks)
    _warn_once()
    return None


@functools.cache
def _warn_once() -> None:
    folder = BASE / f"samestep-{os.getuid()}"
    risk = "simultaneous jobs may choose the same port"
    print_stderr(f"warning: cannot use {folder}, {risk}: make it, and ports.lock in it, your own, or remove it")


def _lock_port(locks: int | None, port: int) -> bool:
    if locks is None:
        return True
    try:
        # The end of this process releases the lock.
        taken = try_lock(fcntl.lockf, locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    if taken is None:
        _warn_of_no_locks()
    return taken is not False


@functools.cache
def _warn_of_no_locks() -> None:
    risk = "simultaneous jobs may choose the same port: set MASTER_PORT for each"
    print_stderr(f"warning: the file system of {BASE} has no locks, {risk}")


def port_is_free(port: int) -> bool:
    """Return whether a socket can be bound to the port on all IPv4 addresses of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def check_loopback(address: str = "127.0.0.1") -> None:
    """Check that this machine can connect to ``address``, by which its ranks connect to each other.

    Raises:
        NonRetryableError: the connection failed.
    """
    try:
        with socket.socket() as listener:
            listener.bind((address, 0))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=5.0).close()
    except OSError as error:
        remedy = "bring the loopback interface up (ip link set lo up), with IPv4"
        raise NonRetryableError(
            f"this machine cannot connect to {address}: {error.strerror or error}: {remedy}"
        ) from None


# --- temporary files ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def job_tmpdir(is_local: bool) -> Iterator[dict[str, str]]:
    """Create a temporary folder for one start of the job, and delete the folder at the end of the context.

    The deletion also removes the files of killed launchers and ranks. A killed launch script leaves its folder
    unlocked, and the next launch script removes the folder.

    Args:
        is_local: whether all ranks that this launcher starts run on this machine.

    Yields:
        The environment variables TMPDIR and TORCHINDUCTOR_CACHE_DIR. The result is {} if ``is_local`` is False, if this
        process's TMPDIR is relative or longer than `MAX_TMPDIR`, or if the folder cannot be created.
    """
    base = Path(os.environ.get("TMPDIR") or BASE)
    is_short = base.is_absolute() and len(os.fsencode(base)) <= MAX_TMPDIR
    parent = user_folder(base) if is_local and is_short else None
    variables: dict[str, str] = {}
    folder = None
    lock = None
    try:
        with contextlib.suppress(OSError):
            if parent is not None:
                _remove_leftovers(parent)
                folder = tempfile.mkdtemp(prefix="job-", dir=parent)
                lock = _lock(folder)
                cache = "TORCHINDUCTOR_CACHE_DIR"  # torch.compile's cache must outlive the job
                variables = {"TMPDIR": folder, cache: os.environ.get(cache) or str(parent / "torchinductor")}
        yield variables
    finally:
        with block_signals():
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders that no process has locked, because their launch scripts were killed."""
    for folder in parent.glob("job-*"):
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: str | Path) -> int:
    """Lock a folder, and return the descriptor that holds the lock.

    Raises:
        OSError: another process has locked or removed the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)  # another process may have removed the folder after the open
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
