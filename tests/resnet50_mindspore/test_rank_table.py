"""Test that make_rank_table.py accepts the tables that it makes in both forms, and refuses broken tables by rule."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPT = Path(__file__).resolve().parents[2] / "apps" / "resnet50_mindspore" / "make_rank_table.py"
SPEC = importlib.util.spec_from_file_location("make_rank_table", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
TOOL = importlib.util.module_from_spec(SPEC)
sys.modules["make_rank_table"] = TOOL  # dataclasses looks up a class's module in sys.modules
SPEC.loader.exec_module(TOOL)

IPS = [f"192.{1 + i % 4}.27.{6 + i // 4}" for i in range(8)]
# MindSpore's tutorial on distributed training prints this table for 8 devices, with a comma before "]".
SEED = Path(__file__).with_name("tutorial_rank_table.json").read_text()
MENDED = SEED.replace("},\n]", "}\n]")


def run(*arguments: object, cwd: Path | None = None, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the tool in a process, and return the process. Without ``path``, PATH has no hccn_tool."""
    command = [sys.executable, "-S", str(SCRIPT), *map(str, arguments)]
    env = {"PATH": str(path or "/nowhere")}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)


def call(*arguments: object) -> tuple[int, str, str]:
    """Run the tool in this process, which is faster. Return its exit code, stdout and stderr."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = TOOL.main([str(each) for each in arguments])
    return code, out.getvalue(), err.getvalue()


def refused(code: int, out: str, err: str, *words: str) -> None:
    assert code == 2, (out, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err, (word, err)


def check_text(text: str, *options: str) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "table.json")
        file.write_text(text)
        return call("check", file, *options)


def make(*arguments: object) -> Any:
    code, out, err = call("make", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def ranks(table: Any) -> list[str]:
    if "version" in table:
        return [device["rank_id"] for server in table["server_list"] for device in server["device"]]
    return [instance["rank_id"] for group in table["group_list"] for instance in group["instance_list"]]


# --- the table of the tutorial -------------------------------------------------------------------------------------


def test_the_trailing_comma_is_named() -> None:
    code, out, err = check_text(SEED)
    refused(code, out, err, "line 10 column", "trailing comma before ']'", "delete")
    assert int(err.split("column ")[1].split(":")[0]) == len(SEED.splitlines()[9])


def test_the_tutorials_table_is_right_once_mended() -> None:
    code, out, err = check_text(MENDED)
    assert code == 0, err
    assert "right, form group, servers: 1, ranks: 8" in out
    assert err.startswith("warning: ")
    assert "'10.*.*.*' is a placeholder" in err
    code, out, err = check_text(MENDED.replace("10.*.*.*", "10.0.0.1"))
    assert (code, err) == (0, "")


def test_make_writes_the_tutorials_table() -> None:
    arguments = ("--server", "10.0.0.1", "--device-ips", ",".join(IPS), "--form", "group", "--board-id", "0x0000")
    assert make(*arguments) == json.loads(MENDED.replace("10.*.*.*", "10.0.0.1"))


def test_a_placeholder_is_no_address() -> None:
    refused(*call("make", "--server", "10.*.*.*", "--device-ips", ",".join(IPS)), "placeholder", "real address")
    for other in ("10.0.0.2", "10.0.0.xx"):
        names = {"10.0.0.1": "10.*.*.*", "10.0.0.2": other}
        two = make_two(names.__getitem__)
        refused(*check_text(two), "'10.*.*.*' is a placeholder", "real address")


def make_two(rename: Callable[[str], str]) -> str:
    ips = [",".join(f"192.168.{server}.{i + 1}" for i in range(8)) for server in (1, 2)]
    table = make("--server", "10.0.0.1", "--server", "10.0.0.2", "--device-ips", ips[0], "--device-ips", ips[1])
    for server in table["server_list"]:
        server["server_id"] = rename(server["server_id"])
    return json.dumps(table)


# --- properties ----------------------------------------------------------------------------------------------------

LEGAL = [
    ids
    for n in (1, 2, 4, 8)
    for ids in itertools.combinations(range(8), n)
    if n in (1, 8) or (ids[0] < 4) == (ids[-1] < 4)
]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, list[int], list[str], list[list[str]]]:
    """Draw a product, the devices of each server, the names of servers, and the addresses of each server's devices."""
    product = draw(st.sampled_from(["training", "training-cann7", "a2", "a3", "300i-duo"]))
    servers = draw(st.integers(1, 4))
    if product.startswith("training"):
        legal = LEGAL
        if product == "training" and servers > 1:
            legal = [tuple(range(8))]
        ids = list(draw(st.sampled_from(legal)))
    else:
        most = {1: 16}.get(servers, 8)
        ids = draw(st.lists(st.integers(0, 15), min_size=1, max_size=most, unique=True))
    ids = draw(st.permutations(ids))
    ips = draw(
        st.lists(
            st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).filter(lambda ip: not ip.is_unspecified),
            min_size=servers * len(ids),
            max_size=servers * len(ids),
            unique=True,
        )
    )
    texts = [str(ip) for ip in ips]
    names = [f"10.0.{i}.{draw(st.integers(1, 254))}" for i in range(servers)]
    return product, list(ids), names, [texts[i * len(ids) : (i + 1) * len(ids)] for i in range(servers)]


def make_job(job: tuple[str, list[int], list[str], list[list[str]]], form: str) -> Any:
    product, ids, names, ips = job
    arguments = ["--product", product, "--form", form, "--devices", ",".join(map(str, ids))]
    for name, own in zip(names, ips):
        arguments += ["--server", name, "--device-ips", ",".join(own)]
    return make(*arguments)


FORMS = st.sampled_from(["group", "1.0"])


@settings(max_examples=30, deadline=None)
@given(jobs(), FORMS)
def test_what_make_writes_check_accepts(job: tuple[str, list[int], list[str], list[list[str]]], form: str) -> None:
    product, ids, names, _ = job
    if not product.startswith("training"):
        form = "1.0"
    table = make_job(job, form)
    assert check_text(json.dumps(table), "--product", product)[0] == 0
    assert ranks(table) == [str(i) for i in range(len(ids) * len(names))]
    assert all(isinstance(leaf, str) for leaf in leaves(table))


def leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, (dict, list)):
        for key in keys_of(node):
            yield from leaves(node[key])
    else:
        yield node


def keys_of(node: dict[str, Any] | list[Any]) -> list[Any]:
    """Return the keys of an object, or the indices of a list."""
    if isinstance(node, dict):
        return list(node)
    return list(range(len(node)))


@settings(max_examples=20, deadline=None)
@given(jobs(), st.randoms(use_true_random=False), st.data())
def test_merging_in_any_order_gives_valid_ranks(
    job: tuple[str, list[int], list[str], list[list[str]]], shuffled: random.Random, data: st.DataObject
) -> None:
    product, ids, names, ips = job
    forms = st.just("1.0")
    if product.startswith("training"):
        forms = FORMS
    out_form = data.draw(forms)
    order = list(range(len(names)))
    shuffled.shuffle(order)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i in order:
            # For these products, a layout that is legal for one server is also legal for several servers.
            one = make_job((product, ids, [names[i]], [ips[i]]), data.draw(forms))
            files.append(Path(folder, f"{i}.json"))
            files[-1].write_text(json.dumps(one))
        merged = Path(folder, "merged.json")
        code, _, err = call("merge", *files, "--form", out_form, "--product", product, "--out", merged)
        assert code == 0, err
        assert call("check", merged, "--product", product)[0] == 0
        table = json.loads(merged.read_text())
    assert ranks(table) == [str(i) for i in range(len(ids) * len(names))]
    if out_form == "1.0":
        assert [server["server_id"] for server in table["server_list"]] == [names[i] for i in order]
    assert table == make_job((product, ids, [names[i] for i in order], [ips[i] for i in order]), out_form)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(LEGAL), FORMS)
def test_a_form_converted_there_and_back_is_the_same(ids: tuple[int, ...], form: str) -> None:
    other = {"group": "1.0", "1.0": "group"}[form]
    first = make_job(("training", list(ids), ["10.0.0.1"], [IPS[: len(ids)]]), form)
    with tempfile.TemporaryDirectory() as folder:
        a, b, c = (Path(folder, name) for name in ("a.json", "b.json", "c.json"))
        a.write_text(json.dumps(first))
        assert call("merge", a, "--form", other, "--out", b)[0] == 0
        assert call("merge", b, "--form", form, "--out", c)[0] == 0
        assert json.loads(c.read_text()) == first


def test_fields_of_form_1_0_survive_a_merge_and_are_not_dropped_in_silence(tmp_path: Path) -> None:
    table = make("--server", "10.0.0.1", "--devices", "0", "--device-ips", "192.168.0.1")
    table["server_list"][0]["host_ip"] = "172.16.0.1"
    table["server_list"][0]["device"][0]["device_port"] = "16666"
    (tmp_path / "a.json").write_text(json.dumps(table))
    code, out, _ = call("merge", tmp_path / "a.json")
    assert code == 0
    assert json.loads(out) == table
    refused(*call("merge", tmp_path / "a.json", "--form", "group"), "device_port, host_ip", "--form 1.0")


# --- rules ---------------------------------------------------------------------------------------------------------


def test_one_training_server_takes_exactly_the_legal_sets_of_devices() -> None:
    for n in range(1, 9):
        for ids in itertools.combinations(range(8), n):
            arguments = ("--server", "a", "--devices", ",".join(map(str, ids)), "--device-ips", ",".join(IPS[:n]))
            result = call("make", *arguments)
            if ids in LEGAL:
                assert result[0] == 0, result
            else:
                rule = "takes 1, 2, 4, 8"
                if n in (2, 4):
                    rule = "0-3 or within 4-7"
                refused(*result, "server 'a' lists", rule)


@pytest.mark.parametrize("form", ["group", "1.0"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("product", ["training", "training-cann7"])
def test_several_training_servers_need_the_numbers_of_devices_of_their_product(product: str, n: int, form: str) -> None:
    arguments = ["--product", product, "--form", form, "--devices", f"[0,{n})"]
    for server in (1, 2):
        ips = ",".join(f"192.168.{server}.{i + 1}" for i in range(n))
        arguments += ["--server", f"10.0.0.{server}", "--device-ips", ips]
    if n == 8 or (product == "training-cann7" and n in (1, 2, 4)):
        make(*arguments)
    else:
        refused(
            *call("make", *arguments), "each of several servers", "takes 8" if product == "training" else "1, 2, 4, 8"
        )


OTHER_RULES = {
    "device 8": (["--devices", "8"], "device_id is from 0 to 7"),
    "device 16 of A2": (["--devices", "16", "--product", "a2"], "device_id is from 0 to 15"),
    "the group form on A2": (["--devices", "0", "--product", "a2", "--form", "group"], "form 1.0 alone"),
}


@pytest.mark.parametrize("case", OTHER_RULES)
def test_other_rules_of_products(case: str) -> None:
    arguments, words = OTHER_RULES[case]
    refused(*call("make", "--server", "10.0.0.1", "--device-ips", "192.168.0.1", *arguments), words)


def test_servers_of_unequal_size(tmp_path: Path) -> None:
    for server, n in ((1, 4), (2, 2)):
        ips = ",".join(f"192.168.{server}.{i + 1}" for i in range(n))
        table = make("--server", f"10.0.0.{server}", "--devices", f"[0,{n})", "--device-ips", ips)
        (tmp_path / f"{server}.json").write_text(json.dumps(table))
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    refused(*call("merge", *files), "takes 8", "training-cann7")
    refused(*call("merge", *files, "--product", "training-cann7"), "4, 2 devices", "as many on each")
    refused(*call("merge", *files, "--product", "a2", "--form", "group"), "form 1.0 alone")
    code, _, err = call("merge", *files, "--product", "a2")
    assert code == 0
    assert err.startswith("warning: servers list 4, 2 devices")
    refused(*call("merge", files[0], files[0]), "1.json", "'10.0.0.1' is in two tables")


def test_addresses_may_be_left_out_on_one_server_in_form_1_0() -> None:
    table = make("--server", "node_0", "--device-ips", "none")
    assert check_text(json.dumps(table))[0] == 0
    table["server_list"][0]["device"][5]["device_ip"] = "192.168.0.1"
    refused(*check_text(json.dumps(table)), "device 0 of server 'node_0' has no device_ip", "hccn_tool -i 0 -ip -g")
    refused(*call("make", "--server", "node_0", "--device-ips", "none", "--form", "group"), "has no device_ip")
    two = ("--server", "a", "--server", "b", "--device-ips", "none", "--device-ips", "none")
    refused(*call("make", *two), "has no device_ip")


def instance(table: Any, i: int) -> Any:
    return table["group_list"][0]["instance_list"][i]


def device(table: Any, i: int) -> Any:
    n = len(table["server_list"][0]["device"])
    return table["server_list"][i // n]["device"][i % n]


def put(key: str, value: Any) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        node, last = place_of(table, key)
        node[last] = value

    return change


def drop(key: str) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        node, last = place_of(table, key)
        del node[last]

    return change


def place_of(table: Any, key: str) -> tuple[Any, str | int]:
    """Return the object or list in which the path ``key`` ends, and the last key or index of the path."""
    *way, last = (as_index(step) for step in key.split("."))
    for step in way:
        table = table[step]
    return table, last


def as_index(step: str) -> str | int:
    if step.isdigit():
        return int(step)
    return step


G = "group_list.0"
I0 = "group_list.0.instance_list.0"
GROUP_BREAKS: dict[str, tuple[Callable[[Any], None], str]] = {
    "rank twice": (lambda t: instance(t, 1).update(rank_id="0"), "rank_id '0' is given to two devices"),
    "rank hole": (lambda t: instance(t, 1).update(rank_id="99"), "rank_id '1' is missing, but there is '99'"),
    "rank an integer": (put(f"{I0}.rank_id", 0), "group_list[0].instance_list[0].rank_id is 0, but HCCL reads strings"),
    "rank a word": (put(f"{I0}.rank_id", "first"), "rank_id is 'first': write a whole number"),
    "rank with a zero before it": (put(f"{I0}.rank_id", "00"), "rank_id is '00'"),
    "rank missing": (drop(f"{I0}.rank_id"), "group_list[0].instance_list[0].rank_id is missing"),
    "device twice": (
        lambda t: instance(t, 1)["devices"][0].update(device_id=instance(t, 0)["devices"][0]["device_id"]),
        "is listed twice",
    ),
    "address twice": (
        lambda t: instance(t, 1)["devices"][0].update(device_ip=instance(t, 0)["devices"][0]["device_ip"]),
        "is given to device",
    ),
    "address invalid": (put(f"{I0}.devices.0.device_ip", "192.168.1.256"), "'192.168.1.256', which is no IP address"),
    "address missing": (drop(f"{I0}.devices.0.device_ip"), "has no device_ip"),
    "server invalid": (put(f"{I0}.server_id", "10.0.0.999"), "'10.0.0.999' is not an IP address|server_num"),
    "device_num": (put(f"{G}.device_num", "99"), "device_num is '99', but"),
    "instance_count": (put(f"{G}.instance_count", "99"), "instance_count is '99', but"),
    "server_num": (put(f"{G}.server_num", "99"), "server_num is '99', but"),
    "group_name twice": (
        lambda t: t.update(group_list=t["group_list"] * 2, group_count="2"),
        "group_name '' is given twice",
    ),
    "group_count": (put("group_count", "2"), "group_count is '2', but 1 groups are listed"),
    "para_plane_nic_num": (put("para_plane_nic_num", "99"), "para_plane_nic_num is '99', but"),
    "para_plane_nic_location": (
        put("para_plane_nic_location", "host"),
        "para_plane_nic_location is 'host': write \"device\"",
    ),
    "two devices in an instance": (lambda t: instance(t, 0)["devices"].append({}), "instance_list[0].devices lists 2"),
    "an instance gone": (drop(I0), "device_num is|instance_list is empty"),
    "status": (put("status", "initializing"), "status is 'initializing'"),
    "status missing": (drop("status"), "status is missing"),
    "deploy_mode missing": (drop("deploy_mode"), "deploy_mode is missing"),
    "a list for an object": (put("group_list", [[]]), "group_list[0] is not an object"),
    "a string for a list": (put("group_list", "x"), "group_list is not a list"),
}
S = "server_list.0"
D0 = "server_list.0.device.0"
SERVER_BREAKS: dict[str, tuple[Callable[[Any], None], str]] = {
    "rank twice": (lambda t: device(t, 1).update(rank_id="0"), "rank_id '0' is given to two devices"),
    "rank hole": (lambda t: device(t, 1).update(rank_id="99"), "rank_id '1' is missing, but there is '99'"),
    "rank an integer": (put(f"{D0}.rank_id", 0), "server_list[0].device[0].rank_id is 0, but HCCL reads strings"),
    "device_id null": (put(f"{D0}.device_id", None), "server_list[0].device[0].device_id is null"),
    "device_id negative": (put(f"{D0}.device_id", "-1"), "device_id is '-1': write a whole number"),
    "device twice": (lambda t: device(t, 1).update(device_id=device(t, 0)["device_id"]), "is listed twice"),
    "address twice": (lambda t: device(t, 1).update(device_ip=device(t, 0)["device_ip"]), "is given to device"),
    "address invalid": (put(f"{D0}.device_ip", "nowhere"), "'nowhere', which is no IP address"),
    "server twice": (lambda t: t["server_list"].append(t["server_list"][0]), "server_id '10.0.0.1' is listed twice"),
    "server without a name": (put(f"{S}.server_id", " "), "server_id ' ' has not 1 to 64 characters"),
    "server with a long name": (put(f"{S}.server_id", "n" * 65), "has not 1 to 64 characters"),
    "server_count": (put("server_count", "99"), "server_count is '99', but"),
    "server_count an integer": (put("server_count", 1), "server_count is 1, but HCCL reads strings alone"),
    "status": (put("status", "initializing"), "status is 'initializing'"),
    "version 1.2": (put("version", "1.2"), "SuperPoD"),
    "version missing": (drop("version"), "version is missing"),
    "no devices": (put(f"{S}.device", []), "server_list[0].device is empty"),
    "no servers": (put("server_list", []), "server_list is empty"),
    "neither form": (lambda t: t.clear(), "neither server_list nor group_list"),
}
BREAKS = [("group", name, *each) for name, each in GROUP_BREAKS.items()]
BREAKS += [("1.0", name, *each) for name, each in SERVER_BREAKS.items()]


@pytest.mark.parametrize(("form", "name", "change", "words"), BREAKS, ids=[f"{each[0]}: {each[1]}" for each in BREAKS])
@settings(max_examples=4, deadline=None)
@given(servers=st.integers(1, 3), half=st.sampled_from([(0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8))]))
def test_each_broken_rule_is_named(
    form: str, name: str, change: Callable[[Any], None], words: str, servers: int, half: tuple[int, ...]
) -> None:
    ids = list(half)
    if servers > 1:
        ids = list(range(8))
    names = [f"10.0.0.{i + 1}" for i in range(servers)]
    ips = [[f"192.168.{i}.{j + 1}" for j in range(len(ids))] for i in range(servers)]
    table = make_job(("training", ids, names, ips), form)
    change(table)
    code, out, err = check_text(json.dumps(table))
    refused(code, out, err, "table.json: ")
    assert any(word in err for word in words.split("|")), err


def test_ranks_of_two_servers_may_not_mix() -> None:
    table = json.loads(make_two(lambda server: server))
    device(table, 7)["rank_id"] = "8"
    device(table, 8)["rank_id"] = "7"
    refused(*check_text(json.dumps(table)), "server '10.0.0.1' has ranks 0, 1, 2, 3, 4, 5, 6, 8")


# --- files that are no tables --------------------------------------------------------------------------------------

NOT_TABLES = {
    "empty": ("", "line 1 column 1", "ends too early"),
    "cut": (MENDED[: len(MENDED) // 2], "ends too early|column"),
    "a comment": (MENDED.replace("[\n", "[ // eight devices\n"), "line 1 column", "a comment", "delete"),
    "a comma in an object": (MENDED.replace('"completed"', '"completed", '), "trailing comma before '}'", "delete"),
    "two commas": (MENDED.replace('"8", "status"', '"8",, "status"'), "line 12 column"),
    "a key twice": (MENDED.replace('"chip_info"', '"board_id"'), "'board_id' is given twice"),
    "a list": ("[]", "not a rank table"),
    "a number": ("1", "not a rank table"),
    "a huge number": ("9" * 5000, "not a rank table"),
    "deep": ("[" * 100_000, "not a rank table"),
    "deep but whole": ('{"x":' + "[" * 900 + "]" * 900 + "}", "not a rank table|neither"),
    "not a number": (MENDED.replace('"910"', "NaN"), "chip_info is NaN"),
    "text": ("rank 0 is here", "line 1 column 1"),
}


@pytest.mark.parametrize("name", NOT_TABLES)
def test_what_is_no_table_is_one_line(name: str) -> None:
    text, *words = NOT_TABLES[name]
    result = check_text(text)
    refused(*result, "table.json: ")
    for word in words:
        assert any(each in result[2] for each in word.split("|")), result[2]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    refused(*call("check", tmp_path / "binary.json"), "binary.json", "UTF-8")
    refused(*call("check", tmp_path), "Is a directory")
    refused(*call("check", tmp_path / "no\nsuch.json"), "No such file")
    code, out, err = call("check", tmp_path / "absent.json", tmp_path / "binary.json")
    assert (code, out, err.count("error: ")) == (2, "", 2)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["0", "1", "8", "10.0.0.1", "1.0"]),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["group", "1.0"]), st.data())
def test_no_change_anywhere_makes_a_traceback(form: str, data: st.DataObject) -> None:
    table = make_job(("training", [0, 1], ["10.0.0.1"], [IPS[:2]]), form)
    node = table
    while True:
        key = data.draw(st.sampled_from(keys_of(node)))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.integers(0, 2)) == 0:
            break
        node = node[key]
    node[key] = data.draw(JSON)
    code, out, err = check_text(json.dumps(table))
    if code == 0:
        assert "right" in out
    else:
        refused(code, out, err)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, len(MENDED) - 3))
def test_a_table_cut_short_is_refused(end: int) -> None:
    refused(*check_text(MENDED[:end]), "line ", "column ")


# --- which devices -------------------------------------------------------------------------------------------------


@given(st.integers(0, 15), st.integers(1, 16), st.sampled_from(["", " "]))
def test_ways_to_write_devices(start: int, count: int, blank: str) -> None:
    ids = list(range(start, start + count))
    assert TOOL.parse_devices(f"[{blank}{start},{blank}{start + count}{blank})") == ids
    assert TOOL.parse_devices(f"{start}{blank}-{blank}{start + count - 1}") == ids
    assert TOOL.parse_devices(f"{blank},{blank}".join(map(str, ids))) == ids


@pytest.mark.parametrize(
    "text",
    ["", "[0,0)", "[4,0)", "[0,8]", "(0,8)", "[0,8", "0,", "a", "-1", "3-1", "0,0", "0-3,2", "[0,9999)", "0.5", "٣"],
)
def test_devices_that_are_none(text: str) -> None:
    refused(*call("make", "--server", "a", f"--devices={text}", "--device-ips", "none"), "--devices")


# --- where addresses come from, as a process -----------------------------------------------------------------------

CONF = "# the cards of server 1\n\n" + "".join(
    f"address_{i} = {ip}   # card {i}\nnetmask_{i}=255.255.255.0\n\nnetdetect_{i}=192.168.0.9\n"
    for i, ip in enumerate(IPS)
)


def test_the_addresses_of_hccn_conf_are_taken(tmp_path: Path) -> None:
    (tmp_path / "hccn.conf").write_text(CONF)
    made = run("make", "--server", "10.0.0.1", "--hccn-conf", "hccn.conf", "--out", "table.json", cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == "table.json: form 1.0, servers: 1, ranks: 8\n"
    table = json.loads((tmp_path / "table.json").read_text())
    assert [each["device_ip"] for each in table["server_list"][0]["device"]] == IPS
    checked = run("check", "table.json", cwd=tmp_path)
    assert (checked.returncode, checked.stdout) == (0, "table.json: right, form 1.0, servers: 1, ranks: 8\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hccn.conf", "table.json"]


BAD_CONF = {
    "a device missing": (CONF.replace("address_5", "adress_5"), "hccn.conf has no address_5"),
    "nothing in it": ("", "hccn.conf has no address_0"),
    "a device twice": (CONF + "address_3=192.168.9.9\n", "line 35: address_3 is given again"),
    "the same line twice": (CONF + f"address_3={IPS[3]}\n", "line 35: address_3 is given again"),
    "no address": (CONF.replace(IPS[2], "none"), "line 11: 'address_2 = none' is not address_N=ADDRESS"),
    "half an address": (CONF.replace(IPS[2], "192.168"), "line 11: "),
    "no equals sign": (CONF.replace("address_2 =", "address_2"), "line 11: "),
    "an address of two devices": (CONF.replace(IPS[2], IPS[1]), f"device_ip '{IPS[1]}' is given to device 1"),
}


@pytest.mark.parametrize("name", BAD_CONF)
def test_a_wrong_hccn_conf_is_refused_and_the_table_stays(name: str, tmp_path: Path) -> None:
    text, words = BAD_CONF[name]
    (tmp_path / "hccn.conf").write_text(text)
    (tmp_path / "table.json").write_text("before")
    made = run("make", "--server", "a", "--hccn-conf", "hccn.conf", "--out", "table.json", cwd=tmp_path)
    refused(made.returncode, made.stdout, made.stderr, words)
    assert (tmp_path / "table.json").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


def hccn_tool(folder: Path, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "hccn_tool").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "hccn_tool").chmod(0o755)
    return folder


def test_without_hccn_conf_hccn_tool_gives_the_addresses(tmp_path: Path) -> None:
    path = hccn_tool(tmp_path / "bin", 'echo "ipaddr:192.168.$2.1$3$4"; echo netmask:255.255.255.0')
    made = run("make", "--server", "a", "--devices", "4-7", path=path)
    refused(made.returncode, made.stdout, made.stderr, "'192.168.4.1-ip-g', which is no IP address")
    hccn_tool(path, 'echo "ipaddr:192.168.$2.1"; echo netmask:255.255.255.0')
    made = run("make", "--server", "a", "--devices", "4-7", path=path)
    assert (made.returncode, made.stderr) == (0, "")
    devices = json.loads(made.stdout)["server_list"][0]["device"]
    assert [each["device_ip"] for each in devices] == [f"192.168.{i}.1" for i in range(4, 8)]
    (tmp_path / "hccn.conf").write_text(CONF)
    made = run("make", "--server", "a", "--hccn-conf", tmp_path / "hccn.conf", path=path)  # the option takes precedence
    assert [each["device_ip"] for each in json.loads(made.stdout)["server_list"][0]["device"]] == IPS


@pytest.mark.parametrize(
    "body", ["echo 'device not found' >&2; exit 1", "exit 0", "echo netmask:255.255.255.0", "kill $$"]
)
def test_a_failing_hccn_tool_is_reported_with_the_remedy(body: str, tmp_path: Path) -> None:
    made = run("make", "--server", "a", path=hccn_tool(tmp_path / "bin", body))
    refused(made.returncode, made.stdout, made.stderr, "hccn_tool -i 0 -ip -g gave no address", "--hccn-conf")


def test_this_machines_own_hccn_conf_is_the_last_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(TOOL, "HCCN_TOOL", str(tmp_path / "hccn_tool"))
    monkeypatch.setattr(TOOL, "HCCN_CONF", tmp_path / "hccn.conf")
    refused(*call("make", "--server", "a"), "no hccn_tool and no", "hccn.conf on this machine", "--device-ips")
    (tmp_path / "hccn.conf").write_text(CONF)
    devices = make("--server", "a")["server_list"][0]["device"]
    assert [each["device_ip"] for each in devices] == IPS
    hccn_tool(tmp_path, 'echo "ipaddr:192.168.$2.1"')  # the path at which the driver installs hccn_tool
    devices = make("--server", "a")["server_list"][0]["device"]
    assert [each["device_ip"] for each in devices] == [f"192.168.{i}.1" for i in range(8)]


# --- the command line, as a process --------------------------------------------------------------------------------

COMMAND_LINES = {
    "nothing": ([], "required: {make,merge,check}"),
    "no server": (["make"], "required: --server"),
    "unknown command": (["mend", "a.json"], "invalid choice: 'mend'"),
    "unknown option": (["check", "a.json", "--strict"], "unrecognized arguments: --strict"),
    "an option cut short": (
        ["make", "--server", "a", "--device-ip", "192.168.0.1"],
        "unrecognized arguments: --device-ip",
    ),
    "unknown product": (["check", "a.json", "--product", "910"], "invalid choice: '910'"),
    "unknown form": (["merge", "a.json", "--form", "2.0"], "invalid choice: '2.0'"),
    "two sources": (["make", "--server", "a", "--device-ips", "none", "--hccn-conf", "x"], "not allowed with"),
    "too few addresses": (["make", "--server", "a", "--device-ips", "192.168.0.1"], "is not 8 addresses"),
    "one source for two": (
        ["make", "--server", "a", "--server", "b", "--device-ips", "none"],
        "1 lists of addresses for 2 servers",
    ),
    "no source for two": (["make", "--server", "a", "--server", "b"], "this machine knows its own devices alone"),
    "a server twice": (
        ["make", "--server", "a", "--server", "a", "--device-ips", "none", "--device-ips", "none"],
        "'a' is given twice",
    ),
    "not an address": (["make", "--server", "10.0.0.256", "--device-ips", "none"], "'10.0.0.256' is not an IP address"),
    "no conf": (["make", "--server", "a", "--hccn-conf", "absent"], "absent: No such file"),
    "no folder": (
        ["make", "--server", "a", "--device-ips", "none", "--out", "absent/t.json"],
        "--out absent/t.json: No such",
    ),
    "a folder": (["make", "--server", "a", "--device-ips", "none", "--out", "folder.json"], "Is a directory"),
    "not .json": (["make", "--server", "a", "--device-ips", "none", "--out", "table.txt"], "named *.json: rename it"),
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_mistake_on_the_command_line_is_one_line_and_writes_nothing(name: str, tmp_path: Path) -> None:
    arguments, words = COMMAND_LINES[name]
    (tmp_path / "folder.json").mkdir()
    result = run(*arguments, cwd=tmp_path)
    refused(result.returncode, result.stdout, result.stderr, words)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


@pytest.mark.parametrize("command", ["", "make", "merge", "check"])
def test_help_teaches(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.returncode == 0
    for word in {"": ("make_rank_table.py make", "HCCL"), "make": ("hccn.conf", "a2"), "merge": ("order", "form")}.get(
        command, ("rule", "10.*.*.*")
    ):
        assert word in result.stdout


def test_two_servers_from_two_files_equal_two_tables_merged(tmp_path: Path) -> None:
    for server in (1, 2):
        conf = "".join(f"address_{i}=192.168.{server}.{i + 1}\n" for i in range(8))
        (tmp_path / f"{server}.conf").write_text(conf)
        source = ("--server", f"10.0.0.{server}", "--hccn-conf", f"{server}.conf")
        assert run("make", *source, "--form", "group", "--out", f"{server}.json", cwd=tmp_path).returncode == 0
    both = [each for i in (1, 2) for each in ("--server", f"10.0.0.{i}", "--hccn-conf", f"{i}.conf")]
    made = run("make", *both, "--form", "group", cwd=tmp_path)
    merged = run("merge", "1.json", "2.json", cwd=tmp_path)
    assert (made.returncode, merged.returncode) == (0, 0)
    assert made.stdout == merged.stdout
    table = json.loads(merged.stdout)
    assert ranks(table) == [str(i) for i in range(16)]
    group = table["group_list"][0]
    assert (group["device_num"], group["server_num"], group["instance_count"]) == ("16", "2", "16")


def test_merge_wants_to_know_the_form_and_the_board(tmp_path: Path) -> None:
    for server, form, board in ((1, "group", "0x0000"), (2, "group", "0x0020"), (3, "1.0", "0x0000")):
        ips = ",".join(f"192.168.{server}.{i + 1}" for i in range(8))
        table = make("--server", f"10.0.0.{server}", "--device-ips", ips, "--form", form, "--board-id", board)
        (tmp_path / f"{server}.json").write_text(json.dumps(table))
    one, two, three = (tmp_path / f"{i}.json" for i in (1, 2, 3))
    refused(*call("merge", one, three), "3.json", "--form")
    refused(*call("merge", one, two), "2.json", "0x0020", "--board-id")
    code, out, _ = call("merge", one, two, three, "--board-id", "0x0020", "--form", "group")
    assert code == 0
    assert json.loads(out)["board_id"] == "0x0020"
    assert len(ranks(json.loads(out))) == 24
