"""Find the devices that a rank table lists for this machine.

The launch script calls `find_placement` before it installs packages, so this module uses only the standard library
and samestep.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from make_rank_table import PRODUCTS, Device, RankTableError, check, load_json, parse
from samestep import ConfigError

MAX_DEVICE_ID = max(product.devices for product in PRODUCTS.values()) - 1


@dataclass(frozen=True)
class Placement:
    """A rank table's entries for this machine."""

    table: Path  # absolute path
    devices: Sequence[Device]  # devices of this machine, in rank order
    world_size: int  # number of devices in the table
    node_rank: int  # this machine's number among the servers, which are in rank order
    node_count: int

    def folder(self, run_dir: Path, device: Device) -> Path:
        """Return a device's folder, which lies in a folder of the device's server if the table has several servers."""
        if self.node_count > 1:
            run_dir = run_dir / f"server{self.node_rank}"
        return run_dir / f"device{device.device_id}"


def find_placement(variable: str, environ: Mapping[str, str], ranks: int) -> Placement:
    """Return this machine's placement from the rank table whose path is in an environment variable.

    Args:
        variable: name of the environment variable.
        environ: the environment. NNODES and NODE_RANK, if set, must agree with the table.
        ranks: number of devices that the table must list for this machine.

    Raises:
        ConfigError: the table is invalid, does not list ``ranks`` devices for this machine, or contradicts NNODES or
            NODE_RANK.
    """
    path = Path(environ[variable])
    title = f"{variable}={environ[variable]}"
    try:
        table = parse(load_json(path))
        check(table)  # the returned warnings concern only merges
    except RankTableError as error:
        raise ConfigError(f"{title}: {error}") from None
    if path.suffix != ".json":
        raise ConfigError(f"{title}: HCCL reads rank tables only from files named *.json: rename it")
    for device in table.devices:
        if device.device_id > MAX_DEVICE_ID:
            raise ConfigError(f"{title}: {device}: no product has a device_id above {MAX_DEVICE_ID}: correct it")
    in_order = sorted(table.devices, key=lambda device: device.rank)
    servers = replace(table, devices=in_order).servers()
    node_rank = _find_server(list(servers), title, environ)
    devices = list(servers.values())[node_rank]
    if len(devices) != ranks:
        count = len(devices)
        ids = ", ".join(str(each.device_id) for each in devices)
        raise ConfigError(f"N={ranks}, but {title} lists {count} for this machine ({ids}): give N={count}")
    return Placement(
        path.absolute(),
        devices,
        world_size=len(table.devices),
        node_rank=node_rank,
        node_count=len(servers),
    )


def _find_server(server_ids: Sequence[str], title: str, environ: Mapping[str, str]) -> int:
    """Find this machine by its addresses and name, or by NODE_RANK, and return its index in ``server_ids``."""
    count = len(server_ids)
    host = socket.gethostname()
    listed = f"{title} lists {_shown(server_ids)}"
    if environ.get("NNODES") not in (None, "", str(count)):
        raise ConfigError(f"NNODES={environ['NNODES']}, but {listed}: unset NNODES, or set it to {count}")
    own = [is_own(server_id) for server_id in server_ids]
    certain = [i for i in range(count) if own[i]]
    unknown = [i for i in range(count) if own[i] is None]
    if count == 1:  # HCCL compares server_ids, so a single server may have any string
        certain += unknown
    possible = certain or unknown
    if not possible:
        raise ConfigError(f"{listed}: none is this machine ({host}): start the job on those, or correct server_id")
    node_rank = environ.get("NODE_RANK")
    if not node_rank and len(certain) == 1:
        return certain[0]
    if not node_rank:
        raise ConfigError(f"{listed}: any may be this machine ({host}): set NODE_RANK to its number by rank, from 0")
    if node_rank not in map(str, possible):
        numbers = " or ".join(map(str, possible[:8]))
        raise ConfigError(
            f"NODE_RANK={node_rank}, but {listed}, of which this machine ({host}) is number {numbers} "
            "(from 0, in the order of ranks): unset NODE_RANK, or correct it"
        )
    return int(node_rank)


def _shown(server_ids: Sequence[str]) -> str:
    """Return the number of servers and the names of the first 8, as text."""
    if len(server_ids) == 1:
        return f"1 server: {server_ids[0]!a}"
    names = [ascii(server_id) for server_id in server_ids[:8]]
    if len(server_ids) > 8:
        names.append("...")
    return f"{len(server_ids)} servers: {', '.join(names)}"


def is_own(server_id: str) -> bool | None:
    """Return whether ``server_id`` is an address or the name of this machine, or None if it is an unknown name."""
    try:
        version = ipaddress.ip_address(server_id).version
    except ValueError:
        host = socket.gethostname()
        if server_id in (host, host.partition(".")[0]):
            return True
        return None
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((server_id, 0))  # a machine can bind only its own addresses; bind sends no data
        return True
    return False
