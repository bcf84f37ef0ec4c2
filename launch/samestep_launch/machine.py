"""Find the processors that a job may use, and the network interfaces of this machine.

This module imports no third-party package.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from samestep import ConfigError

ROOT = Path("/")
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def processors(root: Path = ROOT) -> int:
    """Return the number of processors that this job may use: the minimum of affinity and cgroup quotas, at least 1.

    Args:
        root: the folder with ``proc`` and ``sys``; tests pass another folder.
    """
    limits = [math.ceil(quota) for quota in _quotas(root)]
    return max(1, min([_affinity(), *limits]))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in processors, of this process's cgroup and its ancestors. A cgroup may have no quota.

    Inside a container, a path of /proc/self/cgroup may begin outside the container. The container's own cgroup is then
    the mount folder, which `_levels` always returns.
    """
    mount = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            for folder in _levels(mount, path):
                yield from _quota(*_read(folder / "cpu.max").split()[:2])
        elif "cpu" in controllers.split(","):  # version 1
            for folder in _levels(mount / controllers, path):
                quota = _read(folder / "cpu.cfs_quota_us").strip()
                yield from _quota(quota, _read(folder / "cpu.cfs_period_us").strip())


def _levels(mount: Path, path: str) -> list[Path]:
    """Return the folders of a cgroup and of all cgroups that contain it."""
    folder = mount / path.strip("/")
    return [each for each in (folder, *folder.parents) if each == mount or mount in each.parents]


def _quota(quota: str = "", period: str = "") -> Iterator[float]:
    """Yield the quota in processors, from ``quota`` and ``period`` in microseconds; yield nothing for "max"."""
    with contextlib.suppress(ValueError, ArithmeticError):
        processors_allowed = int(quota) / int(period)
        if processors_allowed > 0:
            yield processors_allowed


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def interface_of(address: str | None) -> str | None:
    """Return the name of the network interface with this IPv4 address; None if no interface has the address."""
    if address is None:
        return None
    if address.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # SIOCGIFADDR of netdevice(7): the address is at byte 20 of struct ifreq
                request = fcntl.ioctl(probe, 0x8915, struct.pack("256s", os.fsencode(name)[:15]))
                if socket.inet_ntoa(request[20:24]) == address:
                    return name
    return None


def check_interface(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if GLOO_SOCKET_IFNAME names an interface that this machine lacks.

    The variable has one name, or several names separated by commas. gloo rejects NCCL's patterns, such as `^lo`.
    """
    value = environ.get(GLOO_INTERFACE, "")
    if not value:
        return
    present = [name for _, name in socket.if_nameindex()]
    for name in value.split(","):
        if name not in present:
            raise ConfigError(
                f"{GLOO_INTERFACE}={value}: this machine has no interface {name!a}: name one of "
                f"{', '.join(present)}, or unset {GLOO_INTERFACE}"
            )
