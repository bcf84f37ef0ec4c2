"""Write, merge and check HCCL rank tables, the files that list the devices of a job on Ascend.

    python apps/resnet50_mindspore/make_rank_table.py make --server 10.0.0.1 --devices "[0,8)" --out rank_table.json
    python apps/resnet50_mindspore/make_rank_table.py merge server1.json server2.json --out rank_table.json
    python apps/resnet50_mindspore/make_rank_table.py check rank_table.json

A table lists each device of the job with its rank, its number within its server (device_id) and the address of its
network card (device_ip). HCCL reads two forms: the older "group" with group_list, and "1.0" with server_list.

The program needs only Python 3.9 or later and the standard library, because tables are written on servers before
packages are installed. If the input is invalid, the program prints one line ``error: ...`` with the cause and the
remedy, and exits with 2.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

HCCN_CONF = Path("/etc/hccn.conf")
HCCN_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"  # path of the driver's tool, which is often not on PATH
HCCN_TOOL_SECONDS = 30


class RankTableError(Exception):
    """The input is invalid. The message is one line with the cause and the remedy."""


@dataclass(frozen=True)
class Device:
    """A device of the job, with its rank and the address of its network card."""

    server_id: str
    device_id: int
    device_ip: str  # the address, or "" if the table has none
    rank: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of form 1.0, such as device_port

    def __str__(self) -> str:
        return f"device {self.device_id} of server {_q(self.server_id)}"


@dataclass(frozen=True)
class Table:
    """A rank table in either form."""

    form: str  # "group" or "1.0"
    devices: list[Device]  # the devices, grouped by server
    header: dict[str, str] = field(default_factory=dict)  # board_id, chip_info and deploy_mode of the group form
    server_extra: dict[str, dict[str, Any]] = field(default_factory=dict)  # more fields of form 1.0, such as host_ip

    def servers(self) -> dict[str, list[Device]]:
        """Return the devices of each server, by server_id."""
        found: dict[str, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.server_id, []).append(device)
        return found

    def __str__(self) -> str:
        return f"form {self.form}, servers: {len(self.servers())}, ranks: {len(self.devices)}"


@dataclass(frozen=True)
class Product:
    """A product's rules for the devices of a job. The docstring of `_check_layout` has the sources."""

    title: str
    devices: int  # upper limit of device_id, exclusive
    alone: Sequence[int]  # allowed numbers of devices on a single server
    each: Sequence[int]  # allowed numbers of devices on each of several servers
    equal: str = ""  # whether servers "must" or "should" list the same number of devices
    halves: bool = False  # whether devices 0-3 and 4-7 are separate networks, and the group form is allowed


PRODUCTS = {
    "training": Product("Atlas training servers", 8, (1, 2, 4, 8), (8,), halves=True),
    "training-cann7": Product("Atlas training servers from CANN 7.0", 8, (1, 2, 4, 8), (1, 2, 4, 8), "must", True),
    "a2": Product("Atlas A2", 16, range(1, 17), range(1, 9), "should"),
    "a3": Product("Atlas A3 without SuperPoD", 16, range(1, 17), range(1, 17), "should"),
    "300i-duo": Product("Atlas 300I Duo", 16, range(1, 17), range(1, 17)),
}


# --- the rules -----------------------------------------------------------------------------------------------------


def check(table: Table, product: Product | None = None) -> list[str]:
    """Check a table by the rules of all products, and by the rules of ``product``.

    A server_id has at most 64 characters, and a device_ip is a unique IPv4 or IPv6 address. Each rank_id from 0 on
    occurs once, and the ranks of a server are consecutive.

    Sources: the HCCL user guide (CANN 9.0, hcclug_000066 to 000069) and the parsers in CANN's open source. The parser
    of the group form is topoinfo_ranktableStandard.cc, and the parser of form 1.0 is topoinfo_ranktableConcise.cc.

    Returns:
        Warnings.

    Raises:
        RankTableError: the table breaks a rule. The message describes the first broken rule.
    """
    warnings = _check_servers(table)
    _check_addresses(table)
    _check_ranks(table)
    if product is None:
        return warnings
    if table.form != "1.0" and not product.halves:
        raise RankTableError(f"{product.title} takes form 1.0 alone: convert: merge --form 1.0")
    return warnings + _check_layout(table, product)


def _check_layout(table: Table, product: Product) -> list[str]:
    """Check the numbers of devices by the rules of ``product``.

    - training: one server has 1, 2, 4 or 8 devices, and each of several servers has 8. If a server has 2 or 4 devices,
      they lie within 0-3 or within 4-7. Sources: MindSpore's tutorial on distributed training, and tfmigr_mprtg_0011
      of CANN 5.0.4 and 6.0.RC1.
    - training-cann7: n servers have n, 2n, 4n or 8n devices in total, and each server has the same number. Sources:
      CANN 7.0, tfmigr1_000026, and the TensorFlow migration guide 8.5, tfmigr2_000030. If a server has 2 or 4 devices,
      they lie within 0-3 or within 4-7 (create_group, hcclpython_07_0003).
    - a2: one server has any number of devices. Each of several servers has 1 to 8 devices, and equal numbers are faster
      (tfmigr2_000030).
    - a3: equal numbers of devices on each server are faster (tfmigr2_000030). A SuperPoD needs form 1.2, which this
      program does not support.
    - 300i-duo: the form is 1.0 (hcclug_000069), and any number of devices is allowed.
    - The group form is allowed only for training. The HCCL user guide shows a group_list for no other product.
    - The largest device_id is 7 on the 910, and 15 on A2, A3 and 300I Duo (topoinfo_ranktableConcise.cc).

    Returns:
        Warnings.

    Raises:
        RankTableError: these devices cannot form a job on this product.
    """
    servers = table.servers()
    allowed = product.alone
    whose = "one server"
    remedy = "list others, or name another --product"
    if len(servers) > 1:
        allowed = product.each
        whose = "each of several servers"
        if product is PRODUCTS["training"]:
            remedy = "list others, or name another --product, such as training-cann7, which takes 1, 2, 4 or 8"
    on = f"on {product.title}"
    for name, devices in servers.items():
        ids = sorted(device.device_id for device in devices)
        listed = f"{len(ids)} device" if len(ids) == 1 else f"{len(ids)} devices"
        here = f"server {_q(name)} lists {listed} ({_join(ids)})"
        if ids[-1] >= product.devices:
            raise RankTableError(f"{here}: {on} device_id is from 0 to {product.devices - 1}; {remedy}")
        if len(ids) not in allowed:
            raise RankTableError(f"{here}: {on} {whose} takes {_join(allowed)}; {remedy}")
        if product.halves and _is_split(ids):
            raise RankTableError(f"{here}: {on} 2 or 4 lie within 0-3 or within 4-7, a network each; {remedy}")
    counts = [len(devices) for devices in servers.values()]
    if len(set(counts)) == 1 or not product.equal:
        return []
    unequal = f"servers list {_join(counts)} devices: on {product.title} list as many on each"
    if product.equal != "should":
        raise RankTableError(unequal)
    return [f"{unequal}, or it is slower"]


def _is_split(ids: Sequence[int]) -> bool:
    """Return whether ``ids``, in ascending order, are 2 or 4 devices that lie in both halves of a server."""
    return len(ids) in (2, 4) and ids[0] < 4 <= ids[-1]


def _check_servers(table: Table) -> list[str]:
    warnings = []
    for name in table.servers():
        if not name.strip() or len(name) > 64:
            raise RankTableError(f"server_id {_q(name)} has not 1 to 64 characters: give an address")
        if re.fullmatch("[0-9.]+", name) and not _is_address(name):
            raise RankTableError(f"server_id {_q(name)} is not an IP address: correct it")
        if is_placeholder(name):
            # HCCL compares server_ids, but does not connect to them, so a table of one server may have any string.
            if len(table.servers()) != 1:
                raise RankTableError(f"server_id {_q(name)} is a placeholder: write its real address")
            warnings.append(f"server_id {_q(name)} is a placeholder: write its real address before a merge")
    keys = [(device.device_id, device.server_id) for device in table.devices]
    _unique(keys, lambda key: f"device {key[0]} of server {_q(key[1])} is listed twice: list it once, with one rank_id")
    return warnings


def _check_addresses(table: Table) -> None:
    has_addresses = any(device.device_ip for device in table.devices)
    if table.form == "1.0" and len(table.servers()) == 1 and not has_addresses:
        return  # a single server communicates over internal links, so its table may omit the addresses
    found: dict[Any, Device] = {}
    for device in table.devices:
        ip = device.device_ip
        if not ip:
            raise RankTableError(
                f"{device} has no device_ip: add it, hccn_tool -i {device.device_id} -ip -g tells it there"
            )
        if not _is_address(ip):
            raise RankTableError(f"{device} has device_ip {_q(ip)}, which is no IP address: correct it")
        first = found.setdefault(ipaddress.ip_address(ip), device)
        if first is not device:
            raise RankTableError(f"device_ip {_q(ip)} is given to {first} and to {device}: correct one of them")


def _check_ranks(table: Table) -> None:
    remedy = 'number the ranks from "0", each once, without holes'
    ranks = [device.rank for device in table.devices]
    _unique(ranks, lambda rank: f"rank_id '{rank}' is given to two devices: {remedy}")
    missing = min(set(range(len(ranks) + 1)) - set(ranks))
    if missing != len(ranks):
        raise RankTableError(f"rank_id '{missing}' is missing, but there is '{max(ranks)}': {remedy}")
    for name, devices in table.servers().items():
        own = sorted(device.rank for device in devices)
        if own[-1] - own[0] >= len(own):
            raise RankTableError(f"server {_q(name)} has ranks {_join(own)}, among them another's: let them follow")


def is_placeholder(server_id: str) -> bool:
    """Return whether ``server_id`` is a placeholder from documentation, such as 10.*.*.* or 10.0.0.xx."""
    return "*" in server_id or re.search(r"(^|\.)x+(\.|$)", server_id, re.IGNORECASE) is not None


# --- reading -------------------------------------------------------------------------------------------------------


def read(path: Path, product: Product | None = None) -> Table:
    """Read and check the table in a file.

    Args:
        path: path of the file.
        product: product whose rules apply. If ``product`` is None, check only the structure and the ranks.

    Raises:
        RankTableError: the file cannot be read, or the table breaks a rule.
    """
    try:
        table = parse(load_json(path))
        _check_ranks(table)
        if product:
            warn(f"{path}: {each}" for each in check(table, product))
    except RankTableError as error:
        raise RankTableError(f"{path}: {error}") from None
    return table


def load_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        RankTableError: the file cannot be read, or is not a JSON object of strings, lists and objects.
    """
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        _fail("not a text file in UTF-8: write it with make")
    except OSError as error:
        _fail(f"{error.strerror}: name a rank table that can be read")
    try:
        document: dict[str, Any] = json.loads(text, object_pairs_hook=_once_each)
        if not isinstance(document, dict):
            raise RankTableError("not a rank table: write it with make")
        _only_strings(document, "")
    except json.JSONDecodeError as error:
        at, reason = _json_mistake(text, error)
        line = text.count("\n", 0, at) + 1
        column = at - text.rfind("\n", 0, at)
        _fail(f"line {line} column {column}: {reason}")
    except (ValueError, RecursionError):  # a number with too many digits, or too deeply nested lists
        _fail("not a rank table: write it with make")
    return document


def _json_mistake(text: str, error: json.JSONDecodeError) -> tuple[int, str]:
    """Return the position of a syntax error in ``text``, and a message with the remedy."""
    at = error.pos
    comma = max(0, text.rfind(",", 0, at + 1))
    trailing = re.compile(r",\s*([]}])").match(text, comma)
    if trailing:
        return comma, f"a trailing comma before {trailing[1]!r}: delete the comma"
    if text[at : at + 1] in ("/", "#"):
        return at, "a comment: delete it, JSON has none"
    if at >= len(text.rstrip()):
        return at, "the file ends too early: make it again, or copy it whole"
    return at, f"{error.msg}: correct it there"


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _unique([key for key, _ in pairs], lambda key: f"{_q(key)} is given twice in one object: delete one of them")
    return dict(pairs)


def parse(document: dict[str, Any]) -> Table:
    """Check the structure, counts and status of a table in decoded JSON, and return the table.

    Raises:
        RankTableError: a field is missing or invalid.
    """
    grouped = "version" not in document and "server_list" not in document  # HCCL distinguishes the forms by these keys
    if grouped and "group_list" not in document:
        raise RankTableError("neither server_list nor group_list: write the table with make")
    status = Node(document).text("status")
    # If the status differs, HCCL rereads the file each second, and gives up after 30 minutes.
    if status != "completed":
        raise RankTableError(f'status is {_q(status)}, so HCCL waits: write "completed" once the table is whole')
    if grouped:
        return _parse_groups(Node(document))
    return _parse_servers(Node(document))


@dataclass(frozen=True)
class Node:
    """An object in the document, with its location for messages. Methods raise RankTableError for invalid content."""

    value: Any
    where: str = ""

    def get(self, key: str, kind: type) -> Any:
        """Return the value at ``key``, which must have the type ``kind`` (str or list)."""
        if not isinstance(self.value, dict):
            raise RankTableError(f"{self.where.rstrip('.')} is not an object: write one with {key} in it")
        if key not in self.value:
            raise RankTableError(f"{self.where}{key} is missing: add it")
        value = self.value[key]
        if not isinstance(value, kind):
            name = "list" if kind is list else "string"
            raise RankTableError(f"{self.where}{key} is not a {name}: write one")
        return value

    def text(self, key: str) -> str:
        """Return the string at ``key``."""
        return str(self.get(key, str))

    def nodes(self, key: str) -> list[Node]:
        """Return the items of the list at ``key``, which must not be empty."""
        values = self.get(key, list)
        if not values:
            raise RankTableError(f"{self.where}{key} is empty: list one or more there")
        return [Node(value, f"{self.where}{key}[{i}].") for i, value in enumerate(values)]

    def number(self, key: str) -> int:
        """Return the number in the string at ``key``."""
        text = self.text(key)
        number = re.fullmatch("0|[1-9][0-9]{0,5}", text)
        if not number:
            raise RankTableError(f'{self.where}{key} is {_q(text)}: write a whole number in quotes, such as "0"')
        return int(text)

    def check_count(self, key: str, count: int, things: str) -> None:
        """Raise RankTableError unless the value at ``key`` is ``count``, the number of listed ``things``."""
        given = self.text(key)
        if given != str(count):
            raise RankTableError(f'{self.where}{key} is {_q(given)}, but {count} {things} are listed: write "{count}"')

    def without(self, *keys: str) -> dict[str, Any]:
        """Return the fields except ``keys``."""
        return {key: value for key, value in self.value.items() if key not in keys}


def _parse_servers(document: Node) -> Table:
    version = document.text("version")
    if version == "1.2":
        raise RankTableError(f'version {_q(version)} is the SuperPoD form of Atlas A3, not known here: write "1.0"')
    if version != "1.0":
        raise RankTableError(f'version {_q(version)} is not known: write "1.0"')
    devices = []
    extra = {}
    for server in document.nodes("server_list"):
        name = server.text("server_id")
        if name in extra:
            raise RankTableError(f"server_id {_q(name)} is listed twice: give each server once, by its own address")
        for node in server.nodes("device"):
            devices.append(_device(node, name, node.number("rank_id")))
        extra[name] = server.without("server_id", "device")
    document.check_count("server_count", len(extra), "servers")
    return Table("1.0", devices, server_extra=extra)


def _parse_groups(document: Node) -> Table:
    # HCCL has two group forms. Without deploy_mode, HCCL expects pod_name instead of rank_id.
    header = {key: document.text(key) for key in ("board_id", "chip_info", "deploy_mode")}
    location = document.text("para_plane_nic_location")
    if location != "device":
        raise RankTableError(f'para_plane_nic_location is {_q(location)}: write "device", HCCL takes no other')
    document.check_count("para_plane_nic_num", len(document.nodes("para_plane_nic_name")), "names")
    groups = document.nodes("group_list")
    document.check_count("group_count", len(groups), "groups")
    names = [group.text("group_name") for group in groups]
    _unique(names, lambda name: f"group_name {_q(name)} is given twice: name each group once")
    devices: list[Device] = []
    for group in groups:
        instances = group.nodes("instance_list")
        for instance in instances:
            nodes = instance.nodes("devices")
            if len(nodes) != 1:
                raise RankTableError(f"{instance.where}devices lists {len(nodes)}: give each an instance of its own")
            devices.append(_device(nodes[0], instance.text("server_id"), instance.number("rank_id")))
        servers = {device.server_id for device in devices[-len(instances) :]}
        group.check_count("device_num", len(instances), "devices")
        group.check_count("instance_count", len(instances), "instances")
        group.check_count("server_num", len(servers), "servers")
    return Table("group", devices, header)


def _device(node: Node, server_id: str, rank: int) -> Device:
    device_id = node.number("device_id")
    extra = node.without("device_id", "device_ip", "rank_id")
    device_ip = ""
    if "device_ip" in node.value:
        device_ip = node.text("device_ip")
    return Device(server_id, device_id, device_ip, rank=rank, extra=extra)


def _only_strings(node: Any, where: str) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            _only_strings(value, f"{where}.{key}".lstrip("."))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            _only_strings(value, f"{where}[{i}]")
    elif not isinstance(node, str):
        shown = json.dumps(node)[:60]
        raise RankTableError(f'{where} is {shown}, but HCCL reads strings alone: write "{shown}", in quotes')


# --- writing -------------------------------------------------------------------------------------------------------


def as_servers(table: Table) -> dict[str, Any]:
    """Return the table as a JSON object in form 1.0."""
    servers = []
    for name, devices in table.servers().items():
        listed = []
        for device in devices:
            entry = {"device_id": str(device.device_id)}
            if device.device_ip:
                entry["device_ip"] = device.device_ip
            listed.append({**entry, "rank_id": str(device.rank), **device.extra})
        # hccl_tools.py also writes host_nic_ip, which HCCL does not read.
        extra = {"host_nic_ip": "reserve", **table.server_extra.get(name, {})}
        servers.append({"server_id": name, "device": listed, **extra})
    return {"version": "1.0", "server_count": str(len(servers)), "server_list": servers, "status": "completed"}


def as_groups(table: Table) -> dict[str, Any]:
    """Return the table as a JSON object in the group form.

    Raises:
        RankTableError: the table has a field that this form lacks.
    """
    extra: set[str] = set()
    for fields in [*(device.extra for device in table.devices), *table.server_extra.values()]:
        extra.update(fields)
    lost = sorted(extra - {"host_nic_ip"})
    if lost:
        raise RankTableError(f"the group form has no place for {', '.join(lost)}: keep --form 1.0, or delete it")
    instances = []
    for device in table.devices:
        listed = [{"device_id": str(device.device_id), "device_ip": device.device_ip}]
        instances.append({"devices": listed, "rank_id": str(device.rank), "server_id": device.server_id})
    group = {
        "device_num": str(len(instances)),
        "server_num": str(len(table.servers())),
        "group_name": "",
        "instance_count": str(len(instances)),
        "instance_list": instances,
    }
    # The names of one server are enough, because HCCL looks up each name on every server.
    device_ids = {device.device_id for device in table.devices}
    nics = [f"eth{nic}" for nic in sorted(device_ids)]
    return {
        **table.header,
        "group_count": "1",
        "group_list": [group],
        "para_plane_nic_location": "device",
        "para_plane_nic_name": nics,
        "para_plane_nic_num": str(len(nics)),
        "status": "completed",
    }


def finish(table: Table, product: Product, out: Path | None) -> None:
    """Assign the ranks, check the table, and write it to ``out`` atomically, or print it if ``out`` is None.

    Raises:
        RankTableError: the table breaks a rule, or ``out`` cannot be written.
    """
    devices = [replace(device, rank=rank) for rank, device in enumerate(table.devices)]
    table = replace(table, devices=devices)
    document = as_groups(table) if table.form == "group" else as_servers(table)
    warn(check(parse(document), product))
    text = json.dumps(document, indent=4) + "\n"
    if out is None:
        print(text, end="")
        return
    if out.suffix != ".json":
        raise RankTableError(f"--out {out}: HCCL reads rank tables only from files named *.json: rename it")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        with temporary.open() as file:
            os.fsync(file.fileno())
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        _fail(f"--out {out}: {error.strerror}: name a file in a folder that can be written")
    print(f"{out}: {table}")


# --- the addresses of a server's devices ---------------------------------------------------------------------------


def parse_devices(text: str) -> list[int]:
    """Return the device ids in a list such as "0,1,2,3", "0-3", "[0,4)" or "0-3,6". Ignore blanks.

    Raises:
        RankTableError: ``text`` is not such a list, or contains a device twice.
    """

    def close(half_open: re.Match[str]) -> str:
        return f"{half_open[1]}-{int(half_open[2]) - 1}"

    without_blanks = "".join(text.split())
    closed = re.sub(r"\[([0-9]{1,3}),([0-9]{1,3})\)", close, without_blanks)
    ids: list[int] = []
    for part in closed.split(","):
        match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part)
        span = range(0)
        if match:
            first = int(match[1])
            last = int(match[2] or first)
            span = range(first, last + 1)
        if not span:
            raise RankTableError(f'--devices {_q(text)} is not a list of devices: write "0,1,2,3", "0-3" or "[0,4)"')
        ids += span
    _unique(ids, lambda device: f"--devices {_q(text)} names device {device} twice: name each once")
    return ids


def read_hccn_conf(path: Path) -> dict[int, str]:
    """Return the addresses in a server's hccn.conf by device id, from its lines ``address_N=ADDRESS``.

    Raises:
        RankTableError: the file cannot be read, or a line ``address_N`` is invalid or repeated.
    """
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines()
    except OSError as error:
        _fail(f"{path}: {error.strerror}: name the server's hccn.conf")
    found: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        setting = line.partition("#")[0].strip()
        match = re.fullmatch(r"address_([0-9]{1,3})\s*=\s*(\S+)", setting)
        if match and _is_address(match[2]):
            device = int(match[1])
            if device in found:
                raise RankTableError(f"{path} line {number}: address_{device} is given again: delete one of them")
            found[device] = match[2]
        elif setting.startswith("address_"):
            raise RankTableError(f"{path} line {number}: {_q(setting)} is not address_N=ADDRESS: correct it")
    return found


def ask_hccn_tool(tool: str, device: int) -> str:
    """Return the address that the driver's hccn_tool prints for a device of this machine.

    Raises:
        RankTableError: hccn_tool prints no address.
    """
    command = [tool, "-i", str(device), "-ip", "-g"]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=HCCN_TOOL_SECONDS)
        output = (result.stdout + result.stderr).decode(errors="replace").strip()
        output = output or f"exit code {result.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    match = re.search(r"^\s*ipaddr\s*:\s*(\S+)", output, re.MULTILINE)
    if match is None:
        _fail(f"{' '.join(command)} gave no address ({_q(output)}): set it, or give --device-ips or --hccn-conf")
    return match[1]


def device_addresses(options: argparse.Namespace, index: int, ids: Sequence[int]) -> list[str]:
    """Return the addresses of one server's devices from --device-ips, from --hccn-conf, or from this machine.

    Args:
        options: options of `make`.
        index: index of the server in --server.
        ids: device ids of this server.

    Raises:
        RankTableError: the options or the server's files do not give an address for each device.
    """
    if options.device_ips:
        given = options.device_ips[index]
        if given == "none":
            return [""] * len(ids)
        addresses = [part.strip() for part in given.split(",")]
        if len(addresses) != len(ids):
            raise RankTableError(f"--device-ips {_q(given)} is not {len(ids)} addresses: give one each")
        return addresses
    path = HCCN_CONF
    if options.hccn_conf:
        path = options.hccn_conf[index]
    else:
        tool = shutil.which("hccn_tool") or shutil.which(HCCN_TOOL)
        if tool:
            return [ask_hccn_tool(tool, device) for device in ids]
        if not path.exists():
            raise RankTableError(
                f"no hccn_tool and no {path} on this machine: give --hccn-conf FILE or --device-ips A,B,..."
            )
    found = read_hccn_conf(path)
    for device in ids:
        if device not in found:
            raise RankTableError(f"{path} has no address_{device}: add it, or name other --devices")
    return [found[device] for device in ids]


# --- the command line ----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An argument parser that raises RankTableError for an invalid command line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        _fail(f"{message.removeprefix('argument ')} (see --help)")


def run_make(options: argparse.Namespace) -> None:
    """Write the table of one server, or of several with --server repeated.

      make --server 10.0.0.1 --out rank_table.json                      this machine's 8 devices, from hccn_tool
      make --server 10.0.0.1 --devices 4-7 --hccn-conf hccn.conf        from a copy of that server's /etc/hccn.conf
      make --server 10.0.0.1 --hccn-conf a.conf --server 10.0.0.2 --hccn-conf b.conf
      make --server 10.0.0.1 --devices 0,1 --device-ips 192.168.1.8,192.168.1.9 --form group

    Give --device-ips or --hccn-conf once for each server, in the order of the servers. If both options are missing, the
    addresses come from hccn_tool, or from /etc/hccn.conf if hccn_tool is missing too. Ranks are in the order of servers
    and devices. One server in form 1.0 needs no addresses (--device-ips none).
    """
    ids = parse_devices(options.devices)
    servers = options.server
    given = options.device_ips or options.hccn_conf
    remedy = "give --device-ips or --hccn-conf once for each, in their order"
    if not given and len(servers) != 1:
        raise RankTableError(f"this machine knows its own devices alone: {remedy}")
    count = len(given or servers)
    if count != len(servers):
        raise RankTableError(f"{count} lists of addresses for {len(servers)} servers: {remedy}")
    _unique(servers, lambda name: f"--server {_q(name)} is given twice: give each server once, by its own address")
    devices = []
    for index, name in enumerate(servers):
        if is_placeholder(name):
            raise RankTableError(f"--server {_q(name)} is a placeholder: give the server's real address")
        addresses = device_addresses(options, index, ids)
        devices += [Device(name, device, ip) for device, ip in zip(ids, addresses)]
    table = Table(options.form or "1.0", devices, header=new_header(options))
    finish(table, PRODUCTS[options.product], options.out)


def run_merge(options: argparse.Namespace) -> None:
    """Join tables into one, with new ranks in the order of the files. You must copy the result to every server.

    If only one table is given, the command converts it to --form.
    """
    devices: list[Device] = []
    header: dict[str, str] = {}
    extra: dict[str, dict[str, Any]] = {}
    form = options.form
    for path in options.tables:
        table = read(path)
        form = form or table.form
        if not options.form and form != table.form:
            raise RankTableError(f"{path}: is not in form {form}: say which --form to write")
        own = dict(table.header)
        if own and options.board_id:
            own["board_id"] = options.board_id
        header = header or own
        if own not in ({}, header):
            raise RankTableError(f"{path}: {own} elsewhere is {header}: make them agree, or give --board-id")
        known = {device.server_id for device in devices}
        shared = sorted(known.intersection(table.servers()))
        if shared:
            named = ", ".join(map(_q, shared))
            raise RankTableError(f"{path}: server_id {named} is in two tables: give each server its own, once")
        devices += sorted(table.devices, key=lambda device: device.rank)
        extra.update(table.server_extra)
    merged = Table(form, devices, header=header or new_header(options), server_extra=extra)
    finish(merged, PRODUCTS[options.product], options.out)


def run_check(options: argparse.Namespace) -> int:
    """Report whether each table is right. If a table is wrong, print the broken rule and the remedy.

    A placeholder as server_id, such as 10.*.*.*, is an error in a table of several servers. A placeholder in a table of
    one server gives a warning, because HCCL compares server_ids, but does not connect to them.
    """
    exit_code = 0
    for path in options.tables:
        try:
            table = read(path, PRODUCTS[options.product])
            print(f"{path}: right, {table}")
        except RankTableError as error:
            exit_code = report(error)
    return exit_code


def command_line() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{make,merge,check}")
    products = "\n".join(f"  {name:15} {each.title}" for name, each in PRODUCTS.items())

    def new_command(name: str, text: str, run: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(
            name,
            help=text,
            description=textwrap.dedent(f"    {run.__doc__}"),
            epilog=f"products:\n{products}",
        )
        command.set_defaults(run=run)
        return command

    make = new_command("make", "write the table of one or several servers", run=run_make)
    add = make.add_argument
    add("--server", action="append", required=True, metavar="ADDRESS", help="the server's own address")
    add("--devices", default="[0,8)", metavar="LIST", help='on each server: "[0,8)" (default), 0-7 or 0,1')
    source = make.add_mutually_exclusive_group().add_argument
    source("--device-ips", action="append", metavar="A,B,...", help="the devices' addresses, or none")
    source("--hccn-conf", action="append", type=Path, metavar="FILE", help="the server's /etc/hccn.conf")
    _add_output(make)

    merge = new_command("merge", "join tables, or convert one", run=run_merge)
    merge.add_argument("tables", nargs="+", type=Path, metavar="TABLE.json")
    _add_output(merge)

    checker = new_command("check", "report whether tables are right", run=run_check)
    checker.add_argument("tables", nargs="+", type=Path, metavar="TABLE.json")
    _add_product(checker)
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes a table."""
    add = parser.add_argument
    add("--form", choices=("group", "1.0"), help="default: 1.0; in a merge, that of the tables")
    add("--board-id", metavar="ID", help="form group: 0x0000 is x86, 0x0020 arm (default: as here)")
    add("--out", type=Path, metavar="FILE.json", help="file to write atomically (default: print)")
    _add_product(parser)


def _add_product(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--product", choices=PRODUCTS, default="training", help="whose rules (default: %(default)s)")


def new_header(options: argparse.Namespace) -> dict[str, str]:
    """Return board_id, chip_info and deploy_mode for the header of the group form."""
    board_id = options.board_id
    if not board_id:
        is_arm = platform.machine().lower() in ("aarch64", "arm64")
        board_id = "0x0020" if is_arm else "0x0000"
    return {"board_id": board_id, "chip_info": "910", "deploy_mode": "lab"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    try:
        options = command_line().parse_args(arguments)
        return int(options.run(options) or 0)
    except RankTableError as error:
        return report(error)


# --- small things --------------------------------------------------------------------------------------------------


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def _unique(values: Sequence[Any], message: Callable[[Any], str]) -> None:
    """Raise RankTableError with the result of ``message`` for the first value that occurs more than once."""
    for value, count in Counter(values).items():
        if count != 1:
            raise RankTableError(message(value))


def _join(values: Sequence[int]) -> str:
    if isinstance(values, range):
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


def _q(text: str) -> str:
    """Return ``text`` in quotes, on one line, and shortened to 60 characters."""
    if len(text) > 60:
        return f"{text[:60]!a}..."
    return f"{text!a}"


def _fail(message: str) -> NoReturn:
    raise RankTableError(message)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for each in warnings:
        print(f"warning: {each}", file=sys.stderr)


def report(error: RankTableError) -> int:
    """Print an error to stderr on one line, and return the exit code 2."""
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
