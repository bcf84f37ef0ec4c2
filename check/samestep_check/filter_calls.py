"""Install a filter of file system calls in this process, send the filter's descriptor to the check, and run COMMAND.

    python -I -S filter_calls.py SOCKET COMMAND [ARGS...]

SOCKET is the descriptor of a Unix socket. The kernel then pauses this process and its children before each call in
CALLS, until the check allows or refuses the call (seccomp_unotify(2)). An open pauses the process only if the open
empties the file. The filter needs no privilege. If the kernel refuses the filter, the exit code is REFUSED, and the
command does not run.
"""

from __future__ import annotations

import array
import ctypes
import os
import platform
import socket
import struct
import sys

REFUSED = 125
# The numbers of the calls for x86_64 and aarch64; None if an architecture lacks the call.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None),
    "openat": (257, 56),
    "creat": (85, None),
    "write": (1, 64),
    "pwrite64": (18, 68),
    "writev": (20, 66),
    "pwritev": (296, 70),
    "pwritev2": (328, 287),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sync": (162, 81),
    "syncfs": (306, 267),
}
# For each machine: the column in CALLS, AUDIT_ARCH, and the number of the system call seccomp.
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}

# BPF opcodes.
_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_SET = 0x45
_RETURN = 0x06
# Return values of the filter: SECCOMP_RET_ALLOW and SECCOMP_RET_USER_NOTIF.
_ALLOW = 0x7FFF0000
_NOTIFY = 0x7FC00000
# Offsets in struct seccomp_data.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_FLAGS_PLACES = {"open": 1, "openat": 2}  # argument position of the open flags
_EMPTIES = 0o1000  # O_TRUNC
_NO_NEW_PRIVILEGES = 38
_SET_FILTER = 1
_NEW_LISTENER = 8
_WAIT_KILLABLE = 32


def numbers(machine: str) -> dict[int, str]:
    """Return the names in CALLS, keyed by the call numbers of a machine."""
    column = MACHINES[machine][0]
    found = {}
    for name, of_machines in CALLS.items():
        number = of_machines[column]
        if number is not None:
            found[number] = name
    return found


def program(machine: str) -> bytes:
    """Return the filter's BPF program.

    The kernel notifies the check of each call in CALLS, except an open that does not empty its file. All other calls
    continue, including calls of another architecture.
    """
    lines = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_IF_EQUAL, MACHINES[machine][1], if_so=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD, _NUMBER),
    ]
    for number, name in numbers(machine).items():
        if name in _FLAGS_PLACES:
            flags = _ARGUMENTS + 8 * _FLAGS_PLACES[name]
            lines += [
                _instruction(_JUMP_IF_EQUAL, number, if_not=4),
                _instruction(_LOAD, flags),
                _instruction(_JUMP_IF_SET, _EMPTIES, if_not=1),
                _instruction(_RETURN, _NOTIFY),
                _instruction(_RETURN, _ALLOW),
            ]
        else:
            lines += [_instruction(_JUMP_IF_EQUAL, number, if_not=1), _instruction(_RETURN, _NOTIFY)]
    return b"".join([*lines, _instruction(_RETURN, _ALLOW)])


def _instruction(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_so, if_not, value)


def install() -> int:
    """Install the filter for this process and its children; return the descriptor that reports calls.

    Raises:
        OSError: the kernel refuses the filter, or CALLS has no numbers for this machine.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(f"no numbers of calls for {machine}")
    library = ctypes.CDLL(None, use_errno=True)
    code = program(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)))
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    seccomp = MACHINES[machine][2]
    # With _WAIT_KILLABLE, which Linux has since 5.19, only a fatal signal interrupts a waiting call.
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        descriptor = int(library.syscall(seccomp, _SET_FILTER, flags, header))
        if descriptor >= 0:
            return descriptor
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def main(channel: int, command: list[str]) -> None:
    """Install the filter, send its descriptor, and execute the command."""
    connection = socket.socket(fileno=channel)
    try:
        listener = install()
    except OSError as error:
        connection.sendall(str(error).encode())
        sys.exit(REFUSED)
    descriptors = array.array("i", [listener])
    connection.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.close()
    os.close(listener)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
