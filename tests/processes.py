"""Find processes in /proc, even if their parents have changed, and find free ports."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def environments() -> dict[int, dict[str, str]]:
    """Return ``{process ID: environment}`` of all readable processes; the environment of a zombie is empty."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pairs = (item.partition("=") for item in path.read_bytes().decode(errors="replace").split("\0") if item)
            found[int(path.parent.name)] = {name: value for name, _, value in pairs}
    return found


def marked(name: str, value: str) -> list[int]:
    """Return the IDs of the processes with this variable in their environment."""
    return [pid for pid, environ in environments().items() if environ.get(name) == value]


def kill_marked(name: str, value: str, limit: float) -> None:
    """Kill the processes of any session that have this variable; fail after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while left := marked(name, value):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Return whether this process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_for(what: Callable[[], Any], limit: float) -> Any:
    """Call ``what`` until it returns a true value, and return this value; fail after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def free_port(address: str = "127.0.0.1") -> str:
    """Return a free port below the ports that the kernel chooses for connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            return str(port)


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses on which these processes listen, as in /proc/net/tcp and tcp6: 0100007F is 127.0.0.1."""
    return {address for address, _ in _listening_sockets(pids)}


def listening_ports(pids: Iterable[int]) -> list[int]:
    """Return the ports on which these processes listen, in order."""
    return sorted({int(port, 16) for _, port in _listening_sockets(pids)})


def _listening_sockets(pids: Iterable[int]) -> set[tuple[str, str]]:
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                addresses[f"socket:[{fields[9]}]"] = address, port
    found = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found |= {addresses[link]} if (link := os.readlink(descriptor)) in addresses else set()
    return found


def connect(port: int, timeout: float = 10.0) -> socket.socket:
    """Connect to a port of this machine; retry for 10 s until a program listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=timeout)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
