"""Simulate hosts on one machine by network namespaces, each with its own address, name and processes, on one switch.

A pair of veth devices connects each host to a bridge in another namespace. This machine's own network does not change.
A program on a host sees the host's name, only the host's processes, and a hosts file with the names of the other hosts.
This module needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN, and iproute2, as CI has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# This script enters a host. The namespaces for files, names and processes are new at each entry.
ENTER = """
set -e
mount --make-rprivate /
hostname "$1"
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """A host that all hosts of its network reach by ``name`` and by ``address``."""

    network: Network
    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` on this host. A kill of the command also kills its children."""
        enter = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", ENTER]
        return ["ip", "netns", "exec", self.namespace, *enter, "enter", self.name, str(self.names), *words]

    @property
    def names(self) -> Path:
        """Return the path of this host's hosts file."""
        return self.network.folder / f"hosts-{self.name}"

    @property
    def namespace(self) -> str:
        return f"{self.network.prefix}-{self.name}"

    def cut(self) -> None:
        """Disconnect this host, as if its cable were pulled."""
        _ip("-n", f"{self.network.prefix}-switch", "link", "set", self.name, "down")

    def join(self) -> None:
        _ip("-n", f"{self.network.prefix}-switch", "link", "set", self.name, "up")


class Network:
    """A switch and its hosts: node0 with the address 10.209.0.1, node1 with 10.209.0.2, and so on."""

    def __init__(self, folder: Path, count: int) -> None:
        self.prefix = f"samestep-{uuid.uuid4().hex[:8]}"
        self.folder = folder
        self.hosts = [Host(self, f"node{i}", f"10.209.0.{i + 1}") for i in range(count)]
        self.write_names(self.hosts)

    def write_names(self, hosts: Sequence[Host], own: bool = False) -> None:
        """Write all hosts files, so that the names of ``hosts`` resolve from now on.

        A host's own name resolves to loopback, as in Debian, or to its address if ``own`` is true.
        """
        for host in self.hosts:
            here = {other.name: "127.0.1.1" if other is host and not own else other.address for other in hosts}
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in here.items())]
            host.names.write_text("\n".join(lines) + "\n")

    def make(self) -> None:
        _ip("netns", "add", switch := f"{self.prefix}-switch")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", switch, "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", host.name, "master", "bridge0", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")

    def remove(self) -> None:
        for name in [*(host.namespace for host in self.hosts), f"{self.prefix}-switch"]:
            with contextlib.suppress(AssertionError):
                _ip("netns", "delete", name)


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Yield ``count`` hosts, and remove them at the end."""
    assert shutil.which("ip"), "these tests need iproute2: apt-get install iproute2"
    assert os.geteuid() == 0, "these tests make network namespaces: run them as root, with CAP_NET_ADMIN"
    folder = Path(tempfile.mkdtemp(prefix="samestep-hosts-"))
    made = Network(folder, count)
    try:
        made.make()
        yield made.hosts
    finally:
        made.remove()
        shutil.rmtree(folder)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}: this needs CAP_NET_ADMIN"
