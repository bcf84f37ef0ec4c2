"""Find the devices that a rank table lists for this machine.

Standard library only, like options.py: the launch script calls `find_placement` before anything is installed.
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
    """Hold a rank table's entries for this machine."""

    table: Path  # absolute
    devices: Sequence[Device]  # of this machine, in the order of their ranks
    world_size: int  # devices in the whole table
    node_rank: int  # this machine's place among the servers, in the order of their ranks
    node_count: int

    def folder(self, run_dir: Path, device: Device) -> Path:
        """Return a device's folder. Several servers may share the disk of the run dir, and each has a device 0."""
        if self.node_count > 1:
            run_dir = run_dir / f"server{self.node_rank}"
        return run_dir / f"device{device.device_id}"


def find_placement(variable: str, environ: Mapping[str, str], ranks: int) -> Placement:
    """Return this machine's placement by the rank table that an environment variable names.

    Args:
        variable: the variable that names the table.
        environ: the environment. NNODES and NODE_RANK, if set, must agree with the table.
        ranks: the devices that the table must list for this machine.

    Raises:
        ConfigError: the table breaks a rule that holds on every product, does not list this machine, or lists another
            number of devices for it; or NNODES or NODE_RANK contradicts it.
    """
    path = Path(environ[variable])
    title = f"{variable}={environ[variable]}"
    try:
        table = parse(load_json(path))
        check(table)  # its warnings are for a merge
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
    """Return which of the servers this machine is: by its addresses and name, else by NODE_RANK."""
    count = len(server_ids)
    host = socket.gethostname()
    listed = f"{title} lists {_shown(server_ids)}"
    if environ.get("NNODES") not in (None, "", str(count)):
        raise ConfigError(f"NNODES={environ['NNODES']}, but {listed}: unset NNODES, or set it to {count}")
    own = [is_own(server_id) for server_id in server_ids]
    certain = [i for i in range(count) if own[i]]
    unknown = [i for i in range(count) if own[i] is None]
    if count == 1:  # HCCL compares server_ids and never connects to them: any string may stand for it
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
    """Return how many servers there are, and the names of the first."""
    if len(server_ids) == 1:
        return f"1 server: {server_ids[0]!a}"
    names = [ascii(server_id) for server_id in server_ids[:8]]
    if len(server_ids) > 8:
        names.append("...")
    return f"{len(server_ids)} servers: {', '.join(names)}"


def is_own(server_id: str) -> bool | None:
    """Return whether it is an address or the name of this machine; None for any other name."""
    try:
        version = ipaddress.ip_address(server_id).version
    except ValueError:
        host = socket.gethostname()
        if server_id in (host, host.partition(".")[0]):
            return True
        return None
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((server_id, 0))  # sends nothing; a machine can bind only its own addresses
        return True
    return False
