"""Write, merge and check HCCL rank tables: the file that tells a job on Ascend which devices it runs on.

    python apps/resnet50_mindspore/make_rank_table.py make --server 10.0.0.1 --devices "[0,8)" --out rank_table.json
    python apps/resnet50_mindspore/make_rank_table.py merge server1.json server2.json --out rank_table.json
    python apps/resnet50_mindspore/make_rank_table.py check rank_table.json

A table lists every device of the job: its rank, its number within its server (device_id) and the address of its own
network card (device_ip). HCCL reads two forms: "group", the older one with group_list, and "1.0", with server_list.

Standard library only, on any Python from 3.9, because tables are made on the servers, before anything is installed.
Exit codes: 0 done; 2 a mistake in the input, told in one line ``error: ...`` that names the thing and the remedy.
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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

HCCN_CONF = Path("/etc/hccn.conf")
HCCN_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"  # where the driver puts it, often not on PATH
HCCN_TOOL_SECONDS = 30


class RankTableError(Exception):
    """The input is wrong: one line that names the thing and the remedy."""


@dataclass(frozen=True)
class Device:
    server_id: str
    device_id: int
    device_ip: str  # "" where the table gives none
    rank: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of form 1.0, such as device_port

    def __str__(self) -> str:
        return f"device {self.device_id} of server {_q(self.server_id)}"


@dataclass(frozen=True)
class Table:
    form: str  # "group" or "1.0"
    devices: list[Device]  # those of one server in a row
    header: dict[str, str] = field(default_factory=dict)  # group: board_id, chip_info, deploy_mode
    server_extra: dict[str, dict[str, Any]] = field(default_factory=dict)  # 1.0: further fields, such as host_ip

    def servers(self) -> dict[str, list[Device]]:
        found: dict[str, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.server_id, []).append(device)
        return found

    def __str__(self) -> str:
        return f"form {self.form}, servers: {len(self.servers())}, ranks: {len(self.devices)}"


@dataclass(frozen=True)
class Product:
    """How many devices, and which, may take part. The sources are in :func:`check_layout`."""

    title: str
    devices: int  # device_id is below this
    alone: Sequence[int]  # how many one server may list
    each: Sequence[int]  # how many each of several servers may list
    equal: str = ""  # "must" or "should": several servers list the same number
    halves: bool = False  # 0-3 and 4-7 are a network each; and the group form may be used


PRODUCTS = {
    "training": Product("Atlas training servers", 8, (1, 2, 4, 8), (8,), halves=True),
    "training-cann7": Product("Atlas training servers from CANN 7.0", 8, (1, 2, 4, 8), (1, 2, 4, 8), "must", True),
    "a2": Product("Atlas A2", 16, range(1, 17), range(1, 9), "should"),
    "a3": Product("Atlas A3 without SuperPoD", 16, range(1, 17), range(1, 17), "should"),
    "300i-duo": Product("Atlas 300I Duo", 16, range(1, 17), range(1, 17)),
}


# --- the rules -----------------------------------------------------------------------------------------------------


def check(table: Table, product: Product) -> list[str]:
    """Warnings; raises RankTableError for the first rule that is broken.

    Sources: the rank table pages of the HCCL user guide (CANN 9.0, hcclug_000066 to 000069) and the parsers in CANN's
    open source (topoinfo_ranktableStandard.cc for the group form, topoinfo_ranktableConcise.cc for form 1.0): server_id
    of at most 64 characters, device_ip a unique IPv4 or IPv6 address, rank_id unique and from 0 without holes, and the
    ranks of one server follow each other.
    """
    warnings = check_job(table)
    _require(table.form == "1.0" or product.halves, f"{product.title} takes form 1.0 alone: convert: merge --form 1.0")
    return warnings + check_layout(table, product)


def check_job(table: Table) -> list[str]:
    """Warnings; raises RankTableError for the first rule that is broken of those that hold on every product."""
    warnings = _check_servers(table)
    _check_addresses(table)
    _check_ranks(table)
    return warnings


def check_layout(table: Table, product: Product) -> list[str]:
    """Warnings; raises RankTableError unless these devices may form a job on this product.

    - training: one server 1, 2, 4 or 8 devices, 2 or 4 of them within 0-3 or within 4-7; several servers 8 each
      (MindSpore's tutorial on distributed training; CANN 5.0.4 and 6.0.RC1, tfmigr_mprtg_0011).
    - training-cann7: n servers n, 2n, 4n or 8n devices in all (CANN 7.0, tfmigr1_000026; TensorFlow migration guide
      8.5, tfmigr2_000030); the same number on each, 2 or 4 within a half (create_group, hcclpython_07_0003).
    - a2: one server any number, n servers 1 to 8 each, better the same (tfmigr2_000030).
    - a3: better the same number on each server (tfmigr2_000030). A SuperPoD needs form 1.2, which is not known here.
    - 300i-duo: form 1.0 (hcclug_000069), no rule on numbers.
    - the group form: training alone, as no page of the HCCL user guide shows a group_list for another product.
    - device_id is at most 7 on the 910, at most 15 on A2, A3 and 300I Duo (topoinfo_ranktableConcise.cc).
    """
    servers = table.servers()
    allowed, whose = (product.each, "each of several servers") if len(servers) > 1 else (product.alone, "one server")
    for name, devices in servers.items():
        ids = sorted(device.device_id for device in devices)
        here = f"server {_q(name)} lists {len(ids)} device{'s'[: len(ids) > 1]} ({_join(ids)})"
        on, remedy = f"on {product.title}", "list others, or name another --product"
        if product is PRODUCTS["training"] and len(servers) > 1:
            remedy += ", such as training-cann7, which takes 1, 2, 4 or 8"
        _require(ids[-1] < product.devices, f"{here}: {on} device_id is from 0 to {product.devices - 1}; {remedy}")
        _require(len(ids) in allowed, f"{here}: {on} {whose} takes {_join(allowed)}; {remedy}")
        split = product.halves and len(ids) in (2, 4) and ids[0] < 4 <= ids[-1]
        _require(not split, f"{here}: {on} 2 or 4 lie within 0-3 or within 4-7, a network each; {remedy}")
    counts = [len(devices) for devices in servers.values()]
    if len(set(counts)) == 1 or not product.equal:
        return []
    unequal = f"servers list {_join(counts)} devices: on {product.title} list as many on each"
    _require(product.equal == "should", unequal)
    return [f"{unequal}, or it is slower"]


def _check_servers(table: Table) -> list[str]:
    warnings = []
    for name, devices in table.servers().items():
        _require(name.strip() and len(name) <= 64, f"server_id {_q(name)} has not 1 to 64 characters: give an address")
        if re.fullmatch("[0-9.]+", name):
            _require(_is_address(name), f"server_id {_q(name)} is not an IP address: correct it")
        if is_placeholder(name):
            # HCCL compares server_ids and never connects to them, so on one server any string does.
            _require(len(table.servers()) == 1, f"server_id {_q(name)} is a placeholder: write its real address")
            warnings.append(f"server_id {_q(name)} is a placeholder: write its real address before a merge")
        twice = _repeated(device.device_id for device in devices)
        _require(twice is None, f"device {twice} of server {_q(name)} is listed twice: list it once, with one rank_id")
    return warnings


def _check_addresses(table: Table) -> None:
    if table.form == "1.0" and len(table.servers()) == 1 and not any(device.device_ip for device in table.devices):
        return  # a server alone communicates over its own links: its table may leave the addresses out
    found: dict[Any, Device] = {}
    for device in table.devices:
        ip = device.device_ip
        _require(ip, f"{device} has no device_ip: add it, hccn_tool -i {device.device_id} -ip -g tells it there")
        _require(_is_address(ip), f"{device} has device_ip {_q(ip)}, which is no IP address: correct it")
        first = found.setdefault(ipaddress.ip_address(ip), device)
        _require(first is device, f"device_ip {_q(ip)} is given to {first} and to {device}: correct one of them")


def _check_ranks(table: Table) -> None:
    remedy = 'number the ranks from "0", each once, without holes'
    ranks = [device.rank for device in table.devices]
    twice = _repeated(ranks)
    _require(twice is None, f"rank_id '{twice}' is given to two devices: {remedy}")
    missing = min(set(range(len(ranks) + 1)) - set(ranks))
    _require(missing == len(ranks), f"rank_id '{missing}' is missing, but there is '{max(ranks)}': {remedy}")
    for name, devices in table.servers().items():
        own = sorted(device.rank for device in devices)
        follow = own[-1] - own[0] < len(own)
        _require(follow, f"server {_q(name)} has ranks {_join(own)}, among them another's: let them follow")


def is_placeholder(server_id: str) -> bool:
    """Documentation writes addresses as 10.*.*.* or 10.0.0.xx."""
    return "*" in server_id or re.search(r"(^|\.)x+(\.|$)", server_id, re.IGNORECASE) is not None


# --- reading -------------------------------------------------------------------------------------------------------


def read(path: Path, product: Product | None = None, to_start: bool = False) -> Table:
    """The table in a file, checked for a product, or before a merge, which numbers anew, its ranks alone.

    ``to_start``: checked before a job is started with it, on a product that is not known.
    """
    try:
        table = parse(load_json(path))
        _check_ranks(table)
        if to_start:
            _require(path.suffix == ".json", "HCCL reads rank tables only from files named *.json: rename it")
            check_job(table)  # what it warns of matters before a merge
            most = max(each.devices for each in PRODUCTS.values())
            unknown = next((device for device in table.devices if device.device_id >= most), None)
            _require(unknown is None, f"{unknown}: no product has a device_id above {most - 1}: correct it")
        warn(f"{path}: {each}" for each in (check(table, product) if product else ()))
    except RankTableError as error:
        raise RankTableError(f"{path}: {error}") from None
    except RecursionError:  # lists in lists, a thousand deep
        raise RankTableError(f"{path}: not a rank table: write it with make") from None
    return table


def load_json(path: Path) -> Any:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        _fail("not a text file in UTF-8: write it with make")
    except OSError as error:
        _fail(f"{error.strerror}: name a rank table that can be read")
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        at, reason = error.pos, f"{error.msg}: correct it there"
        comma = text.rfind(",", 0, at + 1)
        trailing = re.compile(r",\s*([]}])").match(text, comma) if comma >= 0 else None
        if trailing:
            at, reason = comma, f"a trailing comma before {trailing[1]!r}: delete the comma"
        elif text[at : at + 1] in ("/", "#"):
            reason = "a comment: delete it, JSON has none"
        elif at >= len(text.rstrip()):
            reason = "the file ends too early: make it again, or copy it whole"
        _fail(f"line {text.count(chr(10), 0, at) + 1} column {at - text.rfind(chr(10), 0, at)}: {reason}")
    except ValueError:  # a number of 5,000 digits
        _fail("not a rank table: write it with make")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = _repeated(key for key, _ in pairs)
    _require(twice is None, f"{_q(str(twice))} is given twice in one object: delete one of them")
    return dict(pairs)


def parse(document: Any) -> Table:
    """The table in decoded JSON: its structure, counts and status are checked here, the rules in :func:`check`."""
    _require(isinstance(document, dict), "not a rank table: write it with make")
    _only_strings(document, "")
    grouped = "version" not in document and "server_list" not in document  # as HCCL tells them apart
    _require(not grouped or "group_list" in document, "neither server_list nor group_list: write the table with make")
    status = _text(document, "status")
    # HCCL reads the file again each second for 30 minutes, then gives up.
    _require(status == "completed", f'status is {_q(status)}, so HCCL waits: write "completed" once the table is whole')
    return _parse_groups(document) if grouped else _parse_servers(document)


def _parse_servers(document: dict[str, Any]) -> Table:
    version = _text(document, "version")
    unknown = "the SuperPoD form of Atlas A3, not known here" if version == "1.2" else "not known"
    _require(version == "1.0", f'version {_q(version)} is {unknown}: write "1.0"')
    devices, extra = [], {}
    for i, node in enumerate(_list(document, "server_list")):
        where = f"server_list[{i}]."
        name = _text(node, "server_id", where)
        _require(name not in extra, f"server_id {_q(name)} is listed twice: give each server once, by its own address")
        extra[name] = {key: node[key] for key in node if key not in ("server_id", "device")}
        for j, each in enumerate(_list(node, "device", where)):
            inner = f"{where}device[{j}]."
            devices.append(_device(each, inner, name, _number(each, "rank_id", inner)))
    _count(document, "server_count", "", len(extra), "servers")
    return Table("1.0", devices, server_extra=extra)


def _parse_groups(document: dict[str, Any]) -> Table:
    # HCCL tells its two group forms apart by deploy_mode: without it, it expects pod_name in place of rank_id.
    header = {key: _text(document, key) for key in ("board_id", "chip_info", "deploy_mode")}
    location = _text(document, "para_plane_nic_location")
    _require(location == "device", f'para_plane_nic_location is {_q(location)}: write "device", HCCL takes no other')
    _count(document, "para_plane_nic_num", "", len(_list(document, "para_plane_nic_name")), "names")
    groups = _list(document, "group_list")
    _count(document, "group_count", "", len(groups), "groups")
    twice = _repeated(_text(group, "group_name", f"group_list[{i}].") for i, group in enumerate(groups))
    _require(twice is None, f"group_name {_q(str(twice))} is given twice: name each group once")
    devices: list[Device] = []
    for i, group in enumerate(groups):
        where = f"group_list[{i}]."
        start = len(devices)
        for j, instance in enumerate(_list(group, "instance_list", where)):
            inner = f"{where}instance_list[{j}]."
            nodes = _list(instance, "devices", inner)
            _require(len(nodes) == 1, f"{inner}devices lists {len(nodes)}: give each an instance of its own")
            name, rank = _text(instance, "server_id", inner), _number(instance, "rank_id", inner)
            devices.append(_device(nodes[0], f"{inner}devices[0].", name, rank))
        _count(group, "device_num", where, len(devices) - start, "devices")
        _count(group, "instance_count", where, len(devices) - start, "instances")
        _count(group, "server_num", where, len({device.server_id for device in devices[start:]}), "servers")
    return Table("group", devices, header)


def _device(node: Any, where: str, server_id: str, rank: int) -> Device:
    device_id = _number(node, "device_id", where)
    ip = _text(node, "device_ip", where) if "device_ip" in node else ""
    extra = {key: node[key] for key in node if key not in ("device_id", "device_ip", "rank_id")}
    return Device(server_id, device_id, ip, rank, extra)


def _only_strings(node: Any, where: str) -> None:
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _only_strings(value, f"{where}[{key}]" if isinstance(node, list) else f"{where}.{key}".lstrip("."))
    else:
        shown = json.dumps(node)[:60]
        _require(isinstance(node, str), f'{where} is {shown}, but HCCL reads strings alone: write "{shown}", in quotes')


def _get(node: Any, key: str, where: str, kind: type) -> Any:
    _require(isinstance(node, dict), f"{where.rstrip('.')} is not an object: write one with {key} in it")
    _require(key in node, f"{where}{key} is missing: add it")
    _require(isinstance(node[key], kind), f"{where}{key} is not a {'list' if kind is list else 'string'}: write one")
    return node[key]


def _text(node: Any, key: str, where: str = "") -> str:
    return str(_get(node, key, where, str))


def _list(node: Any, key: str, where: str = "") -> list[Any]:
    value: list[Any] = _get(node, key, where, list)
    _require(value, f"{where}{key} is empty: list one or more there")
    return value


def _number(node: Any, key: str, where: str) -> int:
    text = _text(node, key, where)
    whole = re.fullmatch("0|[1-9][0-9]{0,5}", text)
    _require(whole, f'{where}{key} is {_q(text)}: write a whole number in quotes, such as "0"')
    return int(text)


def _count(node: Any, key: str, where: str, listed: int, what: str) -> None:
    value = _text(node, key, where)
    _require(value == str(listed), f'{where}{key} is {_q(value)}, but {listed} {what} are listed: write "{listed}"')


# --- writing -------------------------------------------------------------------------------------------------------


def as_servers(table: Table) -> dict[str, Any]:
    servers = []
    for name, devices in table.servers().items():
        listed = []
        for device in devices:
            ip = {"device_ip": device.device_ip} if device.device_ip else {}
            listed.append({"device_id": str(device.device_id), **ip, "rank_id": str(device.rank), **device.extra})
        # host_nic_ip is what hccl_tools.py writes; HCCL does not read it.
        extra = {"host_nic_ip": "reserve", **table.server_extra.get(name, {})}
        servers.append({"server_id": name, "device": listed, **extra})
    return {"version": "1.0", "server_count": str(len(servers)), "server_list": servers, "status": "completed"}


def as_groups(table: Table) -> dict[str, Any]:
    extras = [device.extra for device in table.devices] + list(table.server_extra.values())
    lost = sorted({key for extra in extras for key in extra} - {"host_nic_ip"})
    _require(not lost, f"the group form has no place for {', '.join(lost)}: keep --form 1.0, or delete it")
    instances = []
    for device in table.devices:
        listed = [{"device_id": str(device.device_id), "device_ip": device.device_ip}]
        instances.append({"devices": listed, "rank_id": str(device.rank), "server_id": device.server_id})
    group = {"device_num": str(len(instances)), "server_num": str(len(table.servers())), "group_name": ""}
    # The names are those of one server: HCCL looks each of them up on every server.
    nics = [f"eth{nic}" for nic in sorted({device.device_id for device in table.devices})]
    return {
        **table.header,
        "group_count": "1",
        "group_list": [{**group, "instance_count": str(len(instances)), "instance_list": instances}],
        "para_plane_nic_location": "device",
        "para_plane_nic_name": nics,
        "para_plane_nic_num": str(len(nics)),
        "status": "completed",
    }


def finish(table: Table, product: Product, out: Path | None) -> None:
    """Number the ranks, check what would be written like any other table, and write it whole or not at all."""
    table = replace(table, devices=[replace(device, rank=rank) for rank, device in enumerate(table.devices)])
    document = as_groups(table) if table.form == "group" else as_servers(table)
    warn(check(parse(document), product))
    text = json.dumps(document, indent=4) + "\n"
    if out is None:
        print(text, end="")
        return
    _require(out.suffix == ".json", f"--out {out}: HCCL reads rank tables only from files named *.json: rename it")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        _fail(f"--out {out}: {error.strerror}: name a file in a folder that can be written")
    print(f"{out}: {table}")


# --- the addresses of a server's devices ---------------------------------------------------------------------------


def parse_devices(text: str) -> list[int]:
    """Device ids from "0,1,2,3", "0-3", "[0,4)" with or without blanks, or a mixture such as "0-3,6"."""
    compact = "".join(text.split())
    half_open = re.fullmatch(r"\[([0-9]{1,3}),([0-9]{1,3})\)", compact)
    ids = list(range(int(half_open[1]), int(half_open[2]))) if half_open else []
    for part in [] if half_open else compact.split(","):
        match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        _require(span, f'--devices {_q(text)} is not a list of devices: write "0,1,2,3", "0-3" or "[0,4)"')
        ids += span
    _require(ids, f"--devices {_q(text)} is empty, b is not in [a,b): write b greater than a")
    twice = _repeated(ids)
    _require(twice is None, f"--devices {_q(text)} names device {twice} twice: name each once")
    return ids


def read_hccn_conf(path: Path) -> dict[int, str]:
    """The addresses in a server's hccn.conf, by device: lines ``address_N=ADDRESS`` among netmasks and others."""
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines()
    except OSError as error:
        _fail(f"{path}: {error.strerror}: name the server's hccn.conf")
    found: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        setting = line.partition("#")[0].strip()
        if not setting.startswith("address_"):
            continue
        match = re.fullmatch(r"address_([0-9]{1,3})\s*=\s*(\S+)", setting)
        if match is None or not _is_address(match[2]):
            _fail(f"{path} line {number}: {_q(setting)} is not address_N=ADDRESS: correct it")
        device = int(match[1])
        _require(device not in found, f"{path} line {number}: address_{device} is given again: delete one of them")
        found[device] = match[2]
    return found


def ask_hccn_tool(tool: str, device: int) -> str:
    """The address that the driver's own tool reports for a device of this machine."""
    command = [tool, "-i", str(device), "-ip", "-g"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=-1, stderr=subprocess.STDOUT, timeout=HCCN_TOOL_SECONDS
        )
        output = result.stdout.decode(errors="replace").strip() or f"exit code {result.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    match = re.search(r"^\s*ipaddr\s*:\s*(\S+)", output, re.MULTILINE)
    if match is None:
        _fail(f"{' '.join(command)} gave no address ({_q(output)}): set it, or give --device-ips or --hccn-conf")
    return match[1]


def device_addresses(options: argparse.Namespace, index: int, ids: Sequence[int]) -> list[str]:
    """The addresses of one server's devices: given by hand, else by a file, else asked of this machine."""
    if options.device_ips:
        given = options.device_ips[index]
        addresses = [""] * len(ids) if given == "none" else [part.strip() for part in given.split(",")]
        _require(len(addresses) == len(ids), f"--device-ips {_q(given)} is not {len(ids)} addresses: give one each")
        return addresses
    tool = shutil.which("hccn_tool") or shutil.which(HCCN_TOOL)
    if tool and not options.hccn_conf:
        return [ask_hccn_tool(tool, device) for device in ids]
    path = options.hccn_conf[index] if options.hccn_conf else HCCN_CONF
    if not options.hccn_conf and not path.exists():
        _fail(f"no hccn_tool and no {path} on this machine: give --hccn-conf FILE or --device-ips A,B,...")
    found = read_hccn_conf(path)
    for device in ids:
        _require(device in found, f"{path} has no address_{device}: add it, or name other --devices")
    return [found[device] for device in ids]


# --- the command line ----------------------------------------------------------------------------------------------

MAKE = """Write the table of one server, or of several with --server repeated.

  make --server 10.0.0.1 --out rank_table.json                      this machine's 8 devices, asked of hccn_tool
  make --server 10.0.0.1 --devices 4-7 --hccn-conf hccn.conf        from a copy of that server's /etc/hccn.conf
  make --server 10.0.0.1 --hccn-conf a.conf --server 10.0.0.2 --hccn-conf b.conf
  make --server 10.0.0.1 --devices 0,1 --device-ips 192.168.1.8,192.168.1.9 --form group

Addresses come from --device-ips or --hccn-conf (once for each server, in their order), else from hccn_tool, else from
/etc/hccn.conf. Ranks follow the order of servers and devices. One server in form 1.0 needs none: --device-ips none."""

MERGE = """Join tables into one, ranks numbered anew in the order of the files. Every server must get the same result.
With one table and --form it converts that table into the other form."""

CHECK = """Say of each table whether it is right, and if not which rule it breaks and what to do.
A server_id such as 10.*.*.* is taken on one server, with a warning, because HCCL only compares it; else refused."""


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        _fail(f"{message.removeprefix('argument ')} (see --help)")


def command_line() -> Parser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{make,merge,check}")
    make = commands.add_parser("make", help="write the table of one or several servers", description=MAKE)
    make.add_argument("--server", action="append", required=True, metavar="ADDRESS", help="the server's own address")
    make.add_argument(
        "--devices", default="[0,8)", metavar="LIST", help='on each server: "[0,8)" (default), 0-7 or 0,1'
    )
    source = make.add_mutually_exclusive_group()
    source.add_argument("--device-ips", action="append", metavar="A,B,...", help="the devices' addresses, or none")
    source.add_argument("--hccn-conf", action="append", type=Path, metavar="FILE", help="the server's /etc/hccn.conf")
    merge = commands.add_parser("merge", help="join tables, or convert one", description=MERGE)
    checks = commands.add_parser("check", help="say whether tables are right", description=CHECK)
    for command in (merge, checks):
        command.add_argument("tables", nargs="+", type=Path, metavar="TABLE.json")
    for command in (make, merge):
        command.add_argument("--form", choices=("group", "1.0"), help="default: 1.0; in a merge, that of the tables")
        command.add_argument(
            "--board-id", metavar="ID", help="form group: 0x0000 is x86, 0x0020 arm (default: as here)"
        )
        command.add_argument(
            "--out", type=Path, metavar="FILE.json", help="written whole or not at all (default: print)"
        )
    for command in (make, merge, checks):
        command.add_argument(
            "--product", choices=PRODUCTS, default="training", help="whose rules (default: %(default)s)"
        )
        command.epilog = "products:\n" + "\n".join(f"  {name:15} {each.title}" for name, each in PRODUCTS.items())
    return parser


def run_make(options: argparse.Namespace) -> None:
    ids, servers = parse_devices(options.devices), options.server
    given = options.device_ips or options.hccn_conf
    remedy = "give --device-ips or --hccn-conf once for each, in their order"
    _require(given or len(servers) == 1, f"this machine knows its own devices alone: {remedy}")
    count = len(given or servers)
    _require(count == len(servers), f"{count} lists of addresses for {len(servers)} servers: {remedy}")
    twice = _repeated(servers)
    _require(twice is None, f"--server {_q(str(twice))} is given twice: give each server once, by its own address")
    devices = []
    for index, name in enumerate(servers):
        _require(not is_placeholder(name), f"--server {_q(name)} is a placeholder: give the server's real address")
        addresses = device_addresses(options, index, ids)
        devices += [Device(name, device, ip) for device, ip in zip(ids, addresses)]
    finish(Table(options.form or "1.0", devices, new_header(options)), PRODUCTS[options.product], options.out)


def run_merge(options: argparse.Namespace) -> None:
    devices: list[Device] = []
    header: dict[str, str] = {}
    extra: dict[str, dict[str, Any]] = {}
    form = options.form
    for path in options.tables:
        table = read(path)
        form = form or table.form
        _require(options.form or form == table.form, f"{path}: is not in form {form}: say which --form to write")
        own = {**table.header, **({"board_id": options.board_id} if table.header and options.board_id else {})}
        header = header or own
        _require(own in ({}, header), f"{path}: {own} elsewhere is {header}: make them agree, or give --board-id")
        known = {device.server_id for device in devices}
        for name in table.servers():
            _require(
                name not in known, f"{path}: server_id {_q(name)} is in two tables: give each server its own, once"
            )
        devices += sorted(table.devices, key=lambda device: device.rank)
        extra.update(table.server_extra)
    finish(Table(form, devices, header or new_header(options), extra), PRODUCTS[options.product], options.out)


def run_check(options: argparse.Namespace) -> int:
    broken = 0
    for path in options.tables:
        try:
            print(f"{path}: right, {read(path, PRODUCTS[options.product])}")
        except RankTableError as error:
            report(error)
            broken = 2
    return broken


def new_header(options: argparse.Namespace) -> dict[str, str]:
    arm = platform.machine().lower() in ("aarch64", "arm64")
    return {"board_id": options.board_id or ("0x0020" if arm else "0x0000"), "chip_info": "910", "deploy_mode": "lab"}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = command_line().parse_args(arguments)
        if options.command == "check":
            return run_check(options)
        (run_make if options.command == "make" else run_merge)(options)
    except RankTableError as error:
        report(error)
        return 2
    return 0


# --- small things --------------------------------------------------------------------------------------------------


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def _repeated(values: Iterable[Any]) -> Any:
    """The first value that occurs more than once, or None."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _join(values: Sequence[int]) -> str:
    return f"{values[0]} to {values[-1]}" if isinstance(values, range) else ", ".join(map(str, values))


def _q(text: str) -> str:
    """Quoted, on one line, and short, whatever it holds."""
    return f"{text[:60]!a}{'...' if len(text) > 60 else ''}"


def _require(true: object, message: str) -> None:
    if not true:
        raise RankTableError(message)


def _fail(message: str) -> NoReturn:
    raise RankTableError(message)


def warn(warnings: Iterable[str]) -> None:
    for each in warnings:
        print(f"warning: {each}", file=sys.stderr)


def report(error: RankTableError) -> None:
    print("error:", " ".join(str(error).split()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
