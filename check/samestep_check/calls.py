"""Pause a job before each system call that changes or syncs files below a folder.

A seccomp filter reports the calls of all processes of the job, in any language (filter_calls.py). If the kernel refuses
the filter, an audit hook in each Python process reports calls (inside/samestep_record_files.py). The hook reports only
the opens for writing, renames, links and deletions of Python code.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import platform
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Union

from samestep_check.filter_calls import MACHINES, numbers
from samestep_check.verdicts import NotSeen

# Effect of each system call on files, by the call's name.
KINDS = {
    "open": "open",
    "openat": "open",
    "creat": "open",
    "write": "write",
    "pwrite64": "write",
    "writev": "write",
    "pwritev": "write",
    "pwritev2": "write",
    "sendfile": "write",
    "copy_file_range": "write",
    "truncate": "truncate",
    "ftruncate": "truncate",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "link": "link",
    "linkat": "link",
    "symlink": "symlink",
    "symlinkat": "symlink",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "rmdir": "unlink",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "sync": "sync",
    "syncfs": "sync",
}
HANDSHAKE = 20.0  # time limit in seconds, for the filter's installation and for the arrival of an announcement
PATH_BYTES = 4096

_FILTER = Path(__file__).with_name("filter_calls.py")
# SECCOMP_IOCTL_NOTIF_RECV, _SEND and _ID_VALID.
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_IS_VALID = 0x40082102
_NOTIFICATION = struct.Struct("QIIiIQ6Q")  # struct seccomp_notif
_ANSWER = struct.Struct("QqiI")  # struct seccomp_notif_resp
_CONTINUE = 1
_HERE = -100  # AT_FDCWD


class Call(NamedTuple):
    """A file system call that the kernel is about to execute.

    Attributes:
        kind: effect of the call, a value of KINDS. The filter reports an ``open`` only if the call empties the file.
        path: absolute path, in which links to folders are resolved; ``/`` for a ``sync``.
        target: new path of a rename or a hard link, else None.
    """

    kind: str
    path: str
    target: str | None = None


# A handler returns an errno, with which the call fails, or 0, with which the call continues. AnnouncedCalls ignores the
# returned number.
Handler = Callable[[Call], int]


class Refused(NotSeen):
    """The seccomp filter is not in use: the kernel refuses it, or its descriptor does not arrive in time."""


# Argument positions of each call's (folder descriptor or None, path). A second pair has the positions of the target.
_PATHS: dict[str, tuple[tuple[int | None, int], ...]] = {
    "open": ((None, 0),),
    "openat": ((0, 1),),
    "creat": ((None, 0),),
    "truncate": ((None, 0),),
    "rename": ((None, 0), (None, 1)),
    "renameat": ((0, 1), (2, 3)),
    "renameat2": ((0, 1), (2, 3)),
    "link": ((None, 0), (None, 1)),
    "linkat": ((0, 1), (2, 3)),
    "symlink": ((None, 1),),
    "symlinkat": ((1, 2),),
    "unlink": ((None, 0),),
    "unlinkat": ((0, 1),),
    "rmdir": ((None, 0),),
}
_DESCRIPTOR_PLACES = {"copy_file_range": 2}  # argument position of a written file's descriptor; 0 for other calls


class FilteredCalls:
    """Report a job's file system calls to a handler, by a seccomp filter.

    Args:
        folder: the handler receives each ``sync``, and each call on a path below this folder except ``__pycache__``.
        handler: function that receives each call in a thread, while the process that makes the call waits.
        covered: the path at which ``folder`` is mounted for the job; None if the folder is not mounted.
    """

    def __init__(self, folder: Path, handler: Handler, covered: str | None = None) -> None:
        self._folder = str(folder)
        self._covered = covered
        self._handler = handler
        self._names = numbers(platform.machine())
        self._channel, self._far_end = socket.socketpair()
        self._listener = -1
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.error: BaseException | None = None

    def wrapped(self, command: Sequence[str]) -> list[str]:
        """Return the words of a command that installs the filter and then executes ``command``."""
        # The options -I and -S prevent a second run of the job's sitecustomize.
        return [sys.executable, "-I", "-S", str(_FILTER), str(self._far_end.fileno()), *command]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors that the command must inherit."""
        return (self._far_end.fileno(),)

    def start(self) -> None:
        """Receive the filter's descriptor from the started command, and start the thread that answers the job's calls.

        Raises:
            Refused: the kernel does not accept the filter, or no descriptor arrives within `HANDSHAKE` seconds.
        """
        self._far_end.close()
        self._channel.settimeout(HANDSHAKE)
        try:
            words, ancillary, _, _ = self._channel.recvmsg(1000, socket.CMSG_SPACE(4))
        except OSError:
            raise Refused(f"the filter of calls is not installed within {HANDSHAKE:g} s") from None
        if not ancillary:
            raise Refused(f"the kernel refuses the filter of calls: {words.decode(errors='replace')}")
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        self._listener = descriptors[0]
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that answers calls, and close the filter. Call this method after the job has ended."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._listener >= 0:
            os.close(self._listener)
        self._channel.close()
        self._far_end.close()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._is_over.is_set():
            events = poll.poll(100)
            if not events:
                continue
            if not events[0][1] & select.POLLIN:
                return  # no process has the filter any more
            with suppress(OSError):  # the process was killed meanwhile
                self._answer()

    def _answer(self) -> None:
        buffer = bytearray(_NOTIFICATION.size)
        fcntl.ioctl(self._listener, _RECEIVE, buffer, True)
        identity, process, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
        failure = 0
        try:
            failure = self._decide(identity, process, self._names[number], arguments)
        except Exception as error:
            self.error = error
        flags = 0 if failure else _CONTINUE
        answer = _ANSWER.pack(identity, 0, -failure, flags)
        fcntl.ioctl(self._listener, _SEND, bytearray(answer), True)

    def _decide(self, identity: int, process: int, name: str, arguments: list[int]) -> int:
        try:
            call = read_call(process, name, arguments, self._own)
            # If the waiting process was killed, another process may have its ID now.
            fcntl.ioctl(self._listener, _IS_VALID, struct.pack("Q", identity))
        except OSError:
            return 0
        if not _is_followed(call, self._folder):
            return 0
        return self._handler(call)

    def _own(self, path: str) -> str:
        """Return this process's path of a file, from the job's path of the same file."""
        if self._covered is not None and _is_below(path, self._covered):
            return self._folder + path.removeprefix(self._covered)
        return path


def _is_below(path: str, folder: str) -> bool:
    return (path + os.sep).startswith(folder + os.sep)


def _is_followed(call: Call, folder: str) -> bool:
    if call.kind == "sync":
        return True
    paths = [call.path, call.target or call.path]
    is_below = any(path.startswith(folder + os.sep) for path in paths)
    return is_below and "__pycache__" not in call.path


def read_call(process: int, name: str, arguments: Sequence[int], own: Callable[[str], str]) -> Call:
    """Return a system call as a `Call`, with the paths to which its arguments refer.

    Args:
        process: ID of the waiting thread.
        name: the kernel's name of the call.
        arguments: the six arguments of the call, as unsigned 64-bit integers.
        own: function that translates a path of the waiting process to this process's path of the same file.

    Raises:
        OSError: the process has ended, its memory is not readable, or an argument is not an open descriptor.
    """
    kind = KINDS[name]
    if kind == "sync":
        return Call(kind, os.sep)
    if name not in _PATHS:
        descriptor = arguments[_DESCRIPTOR_PLACES.get(name, 0)]
        return Call(kind, own(os.readlink(f"/proc/{process}/fd/{_signed(descriptor)}")))
    paths = []
    for folder_place, path_place in _PATHS[name]:
        folder = _HERE if folder_place is None else _signed(arguments[folder_place])
        paths.append(_real_path(process, folder, _text(process, arguments[path_place]), own))
    return Call(kind, *paths)


def _signed(value: int) -> int:
    """Return the C int in an argument, which the kernel reports as unsigned 64 bits."""
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def _text(process: int, address: int) -> str:
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        # A read across the end of mapped memory returns the bytes before that end.
        return os.fsdecode(memory.read(PATH_BYTES).partition(b"\0")[0])


def _real_path(process: int, folder: int, path: str, own: Callable[[str], str]) -> str:
    link = f"/proc/{process}/cwd" if folder == _HERE else f"/proc/{process}/fd/{folder}"
    full = os.path.join(os.readlink(link), path)
    parent, name = os.path.split(os.path.normpath(full))
    real = os.path.realpath(own(parent))
    return os.path.join(own(real), name)  # a link may lead to the covered folder


class AnnouncedCalls:
    """Report the opens, renames, links and deletions that a job's Python processes announce on a Unix socket.

    Args:
        path: path of the Unix socket, which the constructor creates.
        handler: function that receives each call in a thread, while the process that makes the call waits.
    """

    def __init__(self, path: Path, handler: Handler) -> None:
        self.path = path
        self._handler = handler
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.error: BaseException | None = None
        self.descriptors: tuple[int, ...] = ()

    def wrapped(self, command: Sequence[str]) -> list[str]:
        """Return the command unchanged."""
        return [*command]

    def start(self) -> None:
        """Start the thread that answers announcements."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread that answers announcements."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread.is_alive():
            self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(HANDSHAKE)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        words = connection.makefile().readline()
        try:
            kind, path, target = json.loads(words)
            self._handler(Call(kind, path, target))
        except Exception as error:
            self.error = error
        connection.sendall(b".")


Calls = Union[FilteredCalls, AnnouncedCalls]


def is_supported(parent: Path | None = None) -> bool:
    """Return whether the filter reports a test call. The kernel may refuse the filter, or deny access to the path.

    Args:
        parent: folder in which this function creates and deletes a folder; by default the system's temporary folder.
    """
    if platform.machine() not in MACHINES:
        return False
    found: list[str] = []

    def handle(call: Call) -> int:
        found.append(os.path.basename(call.path))
        return 0

    with tempfile.TemporaryDirectory(prefix="samestep-check-", dir=parent) as folder:
        probe = os.path.join(os.path.realpath(folder), "probe")
        os.mkdir(probe)
        calls = FilteredCalls(Path(probe).parent, handle)
        command = calls.wrapped([sys.executable, "-I", "-S", "-c", f"import os; os.rmdir({probe!r})"])
        process = subprocess.Popen(command, pass_fds=calls.descriptors, stdin=subprocess.DEVNULL)
        try:
            calls.start()
        except Refused:
            return False
        finally:
            process.wait(HANDSHAKE)
            calls.stop()
    return found == ["probe"]
