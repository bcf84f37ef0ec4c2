"""Test that each rank of a rank table gets its device's entry, and that errors are reported before a rank starts.

The ranks are small programs in real processes. Each rank writes its environment, and tests compare it with the table.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, Job, Outcome, losses, python_path, relative_difference
from samestep import env
from samestep.job_info import JobInfo

APP = ROOT / "apps" / "resnet50_mindspore"
HOST = socket.gethostname()
ELSEWHERE = "203.0.113.7"
FURTHER = "203.0.113.8"  # both addresses are reserved for documentation

UTF8 = {"LC_ALL": "C.UTF-8"}  # with this locale, Python adds no variable to its environment

Servers = dict[str, dict[int, int]]  # rank_id by server_id and device_id
# {device_id: rank_id} of a server. The order of ranks may differ from the order of devices.
FOUR = {0: 0, 1: 1, 2: 2, 3: 3}
UPPER = {4: 3, 5: 1, 6: 0, 7: 2}
FIRST = dict(zip(range(8), range(8)))
SECOND = dict(zip(range(8), (9, 8, 15, 14, 10, 11, 13, 12)))

RANK = """
import json, os, subprocess, sys, time
with open("told.json.tmp", "w") as file:
    json.dump({"environ": dict(os.environ), "folder": os.getcwd(), "words": sys.argv, "pid": os.getpid()}, file)
os.rename("told.json.tmp", "told.json")
print("this is rank", os.environ["RANK_ID"])
"""
# LASTING runs until a signal ends it. Each rank starts the child DEAF, which ignores TERM.
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
LASTING = (
    RANK.partition("os.rename")[0]
    + f"""
child = subprocess.Popen([sys.executable, "-S", "-c", {DEAF!r}], stdout=subprocess.PIPE)
child.stdout.readline()
os.rename("told.json.tmp", "told.json")
if os.environ["RANK_ID"] == os.environ.get("FAILS"):
    while not all(os.path.exists(f"../device{{i}}/told.json") for i in (4, 5, 6, 7)):
        time.sleep(0.02)
    sys.exit(7)
if os.environ["RANK_ID"] == os.environ.get("DEAF"):
    exec({DEAF!r})
time.sleep(600)
"""
)


def document(form: str, servers: Servers) -> Any:
    """Return a rank table of these servers in one of the two forms, as a JSON object."""
    ips = {(name, device): f"10.1.{i}.{device + 1}" for i, name in enumerate(servers) for device in range(16)}
    if form == "1.0":
        lists = {
            name: [
                {"device_id": str(device), "device_ip": ips[name, device], "rank_id": str(rank)}
                for device, rank in devices.items()
            ]
            for name, devices in servers.items()
        }
        listed = [{"server_id": name, "device": each} for name, each in lists.items()]
        return {"version": "1.0", "server_count": str(len(listed)), "server_list": listed, "status": "completed"}
    instances = [
        {
            "devices": [{"device_id": str(device), "device_ip": ips[name, device]}],
            "rank_id": str(rank),
            "server_id": name,
        }
        for name, devices in servers.items()
        for device, rank in devices.items()
    ]
    total = {"device_num": str(len(instances)), "instance_count": str(len(instances))}
    group = {**total, "server_num": str(len(servers)), "group_name": "", "instance_list": instances}
    nics = {"para_plane_nic_location": "device", "para_plane_nic_name": ["eth0"], "para_plane_nic_num": "1"}
    header = {"board_id": "0x0000", "chip_info": "910", "deploy_mode": "lab", "status": "completed"}
    return {**header, "group_count": "1", "group_list": [group], **nics}


def listed(table: Path, server_id: str) -> list[tuple[str, str]]:
    """Return (device_id, rank_id) of each device of a server in a rank table, in order of rank."""
    content = json.loads(table.read_text())
    if "version" in content:
        (server,) = (each for each in content["server_list"] if each["server_id"] == server_id)
        found = [(each["device_id"], each["rank_id"]) for each in server["device"]]
    else:
        instances = [each for each in content["group_list"][0]["instance_list"] if each["server_id"] == server_id]
        found = [(each["devices"][0]["device_id"], each["rank_id"]) for each in instances]
    return sorted(found, key=lambda each: int(each[1]))


def write(path: Path, form: str, servers: Servers) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(form, servers), indent=1))
    return path


def start(harness: Harness, app: Path, program: str, n: int | str, *options: str, **environ: str) -> Job:
    """Start an app's each_device.py in the test's folder. Each rank runs ``program``."""
    (harness.folder / "rank.py").write_text(program)
    command = [sys.executable, str(app / "each_device.py"), str(n), "rank.py", "--run-dir=run", *options]
    return harness.start_command(command, harness.folder / "run", harness.folder, **UTF8, **environ)


def record_of(folder: Path) -> Any:
    return json.loads((folder / "told.json").read_text())


def of_server(run_dir: Path, table: Path, server_id: str) -> Path:
    """Return the parent folder of the folders of a server's devices."""
    content = json.loads(table.read_text())
    listing = content["server_list"] if "version" in content else content["group_list"][0]["instance_list"]
    names = {each["server_id"] for each in listing}
    order = sorted(names, key=lambda name: min(int(rank) for _, rank in listed(table, name)))
    if len(order) > 1:
        return run_dir / f"server{order.index(server_id)}"
    return run_dir


def compare(harness: Harness, table: Path, server_id: str, ranks: int, given: dict[str, str]) -> None:
    """Compare the environment, folder and logs of each rank on a server with the table."""
    folders = of_server(harness.folder / "run", table, server_id)
    devices = listed(table, server_id)
    assert sorted(path.name for path in folders.glob("device*")) == sorted(f"device{device}" for device, _ in devices)
    for device, rank in devices:
        folder = folders / f"device{device}"
        record = record_of(folder)
        expected = {"DEVICE_ID": device, "RANK_ID": rank, "RANK_SIZE": str(ranks), "ASCEND_WORK_PATH": str(folder)}
        assert record["environ"] == {**harness.environ(**given), **UTF8, **expected, "RANK_TABLE_FILE": str(table)}
        lines = [f"{name}={value}" for name, value in sorted(record["environ"].items())]
        assert (folder / "env.log").read_text().splitlines() == lines
        assert (folder / "env.log").stat().st_mode & 0o777 == 0o600, "an environment may hold secrets"
        assert record["folder"] == str(folder)
        assert f"this is rank {rank}\n" in (folder / "train.log").read_text()
        world = env.detect(record["environ"])
        assert (world.rank, world.world_size, world.launcher) == (int(rank), ranks, "rank table")


@pytest.mark.parametrize(
    ("servers", "this", "environ", "form"),
    [
        ({"10.*.*.*": FOUR}, "10.*.*.*", {}, "group"),  # HCCL compares server_ids only as text
        ({"127.0.0.1": UPPER}, "127.0.0.1", {"NNODES": "1", "NODE_RANK": "0"}, "1.0"),
        (
            {"127.0.0.1": FIRST, "127.0.0.2": SECOND},
            "127.0.0.1",
            {"NODE_RANK": "0"},
            "group",
        ),  # both addresses belong to this machine
        ({"127.0.0.1": FIRST, "127.0.0.2": SECOND}, "127.0.0.2", {"NNODES": "2", "NODE_RANK": "1"}, "1.0"),
        # Machine 0 is the server with rank 0.
        ({"127.0.0.1": SECOND, "127.0.0.2": FIRST}, "127.0.0.2", {"NODE_RANK": "0"}, "group"),
        ({ELSEWHERE: {0: 0, 1: 1}, "127.0.0.1": {5: 3, 6: 2}}, "127.0.0.1", {}, "1.0"),
        ({HOST: {5: 3, 6: 2}, ELSEWHERE: {0: 0, 1: 1}}, HOST, {}, "group"),
        ({"rack-1": {5: 0}, "rack-2": {6: 1}}, "rack-2", {"NODE_RANK": "1"}, "1.0"),
    ],
    ids=["devices 0-3", "4-7", "machine 0", "machine 1", "by ranks", "address", "name", "neither"],
)
def test_each_rank_gets_what_the_table_lists(
    harness: Harness, servers: Servers, this: str, environ: dict[str, str], form: str
) -> None:
    table = write(harness.folder / "tables" / "rank_table.json", form, servers)
    given = {"RANK_TABLE_FILE": "tables/rank_table.json", "SAMESTEP_JOB_INFO": f'{{"job":"{harness.mark}"}}', **environ}
    outcome = start(harness, APP, RANK, len(servers[this]), **given).finish()
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")
    compare(harness, table, this, sum(map(len, servers.values())), given)


def test_what_a_call_names_is_the_same_for_a_rank_elsewhere(harness: Harness) -> None:
    """Ranks get absolute paths and the variable with the table's path, but not this process's launcher variables."""
    table = write(harness.folder / "rank_table.json", "1.0", {"127.0.0.1": {6: 0, 2: 1}})
    (harness.folder / "run" / "device6").mkdir(parents=True)
    (harness.folder / "run" / "device6" / "kept").touch()
    (harness.folder / "run" / "device6" / "env.log").touch(0o644)
    places = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_RANK": "0"}
    words = ["--epochs=1", "--init-from=../weights.safetensors", "--init-from", "weights.safetensors", "--timeout=9"]
    python_path = f"packages{os.pathsep}{os.environ.get('PYTHONPATH', '/nowhere')}"
    environ = {"MINDSPORE_HCCL_CONFIG_PATH": "rank_table.json", "SLURM_JOB_ID": "7", "PYTHONPATH": python_path}
    assert start(harness, APP, RANK, 2, *words, **environ, **places).finish().code == 0
    given = {"MINDSPORE_HCCL_CONFIG_PATH": str(table), "SLURM_JOB_ID": "7"}
    given["PYTHONPATH"] = f"{harness.folder}/{python_path}"
    compare(harness, table, "127.0.0.1", 2, given)
    program, *options = record_of(harness.folder / "run" / "device2")["words"]
    assert program == str(harness.folder / "rank.py")
    assert options[:6] == ["--run-dir=run", *words]
    assert {f"--{name}={harness.folder / path}" for name, path in (("run-dir", "run"), ("data-dir", "data"))} <= {
        *options[6:]
    }
    assert f"--init-from={harness.folder / 'weights.safetensors'}" in options[6:]
    assert (harness.folder / "run" / "device6" / "kept").exists()


# --- what is refused -----------------------------------------------------------------------------------------------

ONE: Servers = {"127.0.0.1": UPPER}
TWO: Servers = {"127.0.0.1": {0: 0, 1: 1}, "127.0.0.2": {0: 2, 1: 3}}
FOREIGN: Servers = {ELSEWHERE: {0: 0, 1: 1}, FURTHER: {0: 2, 1: 3}}
NAMES: Servers = {"rack-1": {0: 0, 1: 1}, "rack-2": {0: 2, 1: 3}}


def changed(servers: Servers, old: str, new: str, form: str = "1.0") -> str:
    text = json.dumps(document(form, servers))
    assert old in text
    return text.replace(old, new)


# Values: N, the table's text, environment, words of the message.
MISTAKES: dict[str, tuple[int | str, str | None, dict[str, str], Sequence[str]]] = {
    "no table": (4, None, {}, ["No such file", "name a rank table that can be read"]),
    "no JSON": (4, "rank 0: device 0", {}, ["line 1 column 1", "correct it there"]),
    "trailing comma": (4, changed(ONE, "]}]", ",]}]"), {}, ["a trailing comma before ']': delete the comma"]),
    "wrong count": (4, changed(ONE, 'm": "4"', 'm": "8"', "group"), {}, ["device_num is '8'", 'write "4"']),
    "rank missing": (4, changed(ONE, 'rank_id": "3"', 'rank_id": "4"'), {}, ["rank_id '3' is missing", "number the"]),
    "rank twice": (4, changed(ONE, 'rank_id": "3"', 'rank_id": "2"'), {}, ["rank_id '2' is given to two devices"]),
    "device twice": (4, changed(ONE, 'e_id": "5"', 'e_id": "4"'), {}, ["device 4 of server '127.0.0.1'", "list it"]),
    "address twice": (4, changed(ONE, '.6"', '.7"'), {}, ["device_ip '10.1.0.7' is given to", "correct one of them"]),
    "no such device": (4, changed(ONE, 'e_id": "5"', 'e_id": "99"'), {}, ["device 99 of", "above 15"]),
    "still empty": (4, changed(ONE, "completed", "initializing"), {}, ["status is 'initializing'"]),
    "deep": (4, "[" * 100_000, {}, ["not a rank table: write it with make"]),
    "placeholder": (2, changed(TWO, "127.0.0.1", "10.*.*.*"), {}, ["'10.*.*.*' is a placeholder"]),
    "N too small": (3, changed(ONE, "", ""), {}, ["N=3", "lists 4 for this machine (6, 5, 7, 4): give N=4"]),
    "N too large": (8, changed(ONE, "", "", "group"), {}, ["N=8", "lists 4 for this machine", "give N=4"]),
    "another N": (4, changed(TWO, "", ""), {"NODE_RANK": "1"}, ["N=4", "lists 2 for this machine (0, 1): give N=2"]),
    "another machine": (
        4,
        changed({ELSEWHERE: UPPER}, "", ""),
        {},
        [f"lists 1 server: '{ELSEWHERE}': none is this machine ({HOST})", "correct server_id"],
    ),
    "other machines": (
        2,
        changed(FOREIGN, "", ""),
        {"NODE_RANK": "1"},
        [f"lists 2 servers: '{ELSEWHERE}', '{FURTHER}': none is this machine ({HOST})", "start the job on those"],
    ),
    "NNODES": (4, changed(ONE, "", ""), {"NNODES": "2"}, ["NNODES=2", "lists 1 server: '127.0.0.1'", "unset NNODES"]),
    "NODE_RANK of one": (4, changed(ONE, "", ""), {"NODE_RANK": "1"}, ["NODE_RANK=1", "is number 0", "unset"]),
    "NODE_RANK's number": (2, changed(TWO, "", ""), {"NODE_RANK": "2"}, ["NODE_RANK=2", "is number 0 or 1", "correct"]),
    "NODE_RANK's word": (2, changed(TWO, "", ""), {"NODE_RANK": "one"}, ["NODE_RANK=one", "from 0"]),
    "NODE_RANK's machine": (
        2,
        changed({"127.0.0.1": {0: 0, 1: 1}, ELSEWHERE: {0: 2, 1: 3}}, "", ""),
        {"NODE_RANK": "1"},
        ["NODE_RANK=1", f"this machine ({HOST}) is number 0", "unset NODE_RANK, or correct it"],
    ),
    "no NODE_RANK": (
        2,
        changed(TWO, "", ""),
        {},
        ["'127.0.0.1', '127.0.0.2'", f"any may be this machine ({HOST}): set"],
    ),
    "names": (
        2,
        changed(NAMES, "", ""),
        {"NNODES": "2"},
        ["'rack-1', 'rack-2'", f"any may be this machine ({HOST}): set"],
    ),
    "two tables": (4, changed(ONE, "", ""), {"MINDSPORE_HCCL_CONFIG_PATH": "b.json"}, ["b.json are two tables", "uns"]),
    "no number": ("four", changed(ONE, "", ""), {}, ["call: each_device.py N TRAIN.PY"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_started(harness: Harness, name: str) -> None:
    n, text, environ, words = MISTAKES[name]
    if text is not None:
        (harness.folder / "rank_table.json").write_text(text)
    outcome = start(harness, APP, RANK, n, RANK_TABLE_FILE="rank_table.json", **environ).finish(limit=60)
    refused(outcome, *words, *(["RANK_TABLE_FILE=rank_table.json"] if n != "four" else []))
    assert {path.name for path in harness.folder.iterdir()} <= {"rank.py", "rank_table.json"}


def test_a_table_that_hccl_would_not_read_is_refused(harness: Harness) -> None:
    write(harness.folder / "rank_table", "1.0", ONE)
    outcome = start(harness, APP, RANK, 4, RANK_TABLE_FILE="rank_table").finish(limit=60)
    refused(outcome, "RANK_TABLE_FILE=rank_table: HCCL reads rank tables only from files named *.json: rename it")


def refused(outcome: Outcome, *words: str) -> None:
    assert (outcome.code, outcome.stdout) == (2, ""), outcome
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    for word in words:
        assert word in outcome.stderr


def test_a_missing_table_or_run_dir_is_refused(harness: Harness) -> None:
    refused(start(harness, APP, RANK, 4, RANK_TABLE_FILE="").finish(), "RANK_TABLE_FILE is not set")
    table = str(write(harness.folder / "rank_table.json", "1.0", ONE))
    command = [sys.executable, str(APP / "each_device.py"), "4", "rank.py"]
    outcome = harness.start_command(command, harness.folder, RANK_TABLE_FILE=table).finish()
    refused(outcome, "--run-dir is missing: name")
    (harness.folder / "run").mkdir()
    (harness.folder / "run" / "device5").touch()  # the script starts this device second
    outcome = start(harness, APP, LASTING, 4, RANK_TABLE_FILE=table).finish()
    refused(outcome, f"{harness.folder}/run/device5: Not a directory: name a --run-dir")


def test_which_addresses_are_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = placement(monkeypatch)
    addresses = {"127.0.0.1": True, "127.0.0.2": True, ELSEWHERE: False, "2001:db8::1": False}
    assert {address: tool.is_own(address) for address in addresses} == addresses
    v6 = Path("/proc/net/if_inet6")
    assert tool.is_own("::1") is (v6.exists() and re.search(r"^0{31}1 ", v6.read_text(), re.MULTILINE) is not None)
    assert tool.is_own(HOST) is True
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.cluster.example")
    names = {"node-7": True, "node-7.cluster.example": True, "node-70": None, "10.*.*.*": None, "cluster.example": None}
    assert {name: tool.is_own(name) for name in names} == names


def placement(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(APP))
    spec = importlib.util.spec_from_file_location("placement", APP / "placement.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "placement", module)  # dataclasses looks up a class's module in sys.modules
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["each_device", "make_rank_table", "options", "placement"])
def test_what_the_first_stage_runs_is_written_in_the_language_of_python_3_9(name: str) -> None:
    ast.parse((APP / f"{name}.py").read_text(), feature_version=(3, 9))


# --- how ranks end -------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return an app in a new repository with a stub as train.py. The machine appears to have Ascend's driver."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    for name in ("launch.py", "launch.sh", "run_resnet50_mindspore.sh"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    (root / "core").symlink_to(ROOT / "core")
    app = root / "apps" / "resnet50_mindspore"
    app.mkdir(parents=True)
    for name in ("make_rank_table.py", "placement.py"):
        shutil.copy(APP / name, app)
    for name, constant, value in (
        ("options.py", "ASCEND_DRIVER", 'Path("/dev/null")'),
        ("each_device.py", "STOP_SECONDS", "1.0"),
    ):
        source = (APP / name).read_text()
        text, count = re.subn(rf"^{constant} = .*", f"{constant} = {value}", source, flags=re.MULTILINE)
        assert count == 1
        (app / name).write_text(text)
    (app / "requirements.in").write_text("# a stub needs nothing\n")
    (app / "train.py").write_text(RANK)
    return app


def test_a_failed_rank_ends_the_others_and_its_code_is_kept(harness: Harness, project: Path) -> None:
    """Rank 1 on device 5 fails. Rank 2 and each rank's child ignore TERM. The harness finds processes that are left."""
    table = str(write(harness.folder / "rank_table.json", "1.0", ONE))
    outcome = start(harness, project, LASTING, 4, RANK_TABLE_FILE=table, FAILS="1", DEAF="2").finish(limit=60)
    assert (outcome.code, outcome.stdout) == (7, "")
    log = harness.folder / "run" / "device5" / "train.log"
    assert outcome.stderr == f"rank 1 (device 5) ended with code 7: see {log}\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda job: os.kill(job.process.pid, signal.SIGTERM), 143),
        (lambda job: os.kill(job.process.pid, signal.SIGINT), 130),
        (lambda job: os.kill(record_of(job.run_dir / "device7")["pid"], signal.SIGKILL), 137),
    ],
    ids=["TERM", "INT", "a rank killed"],
)
def test_a_job_that_is_ended_leaves_nothing(
    harness: Harness, project: Path, end: Callable[[Job], None], code: int
) -> None:
    table = str(write(harness.folder / "rank_table.json", "group", ONE))
    job = start(harness, project, LASTING, 4, RANK_TABLE_FILE=table)
    job.wait_for(lambda: len([*job.run_dir.glob("device*/told.json")]) == 4)
    end(job)
    assert job.finish(limit=60).code == code


# --- ranks that train ----------------------------------------------------------------------------------------------


def test_a_rehearsal_has_what_msrun_sets(harness: Harness) -> None:
    """Check each rank's variables on a CPU, and which server starts MindSpore's scheduler."""
    table = write(harness.folder / "rank_table.json", "1.0", {"127.0.0.1": {6: 0}, "127.0.0.2": {3: 1}})
    given = {"RANK_TABLE_FILE": str(table), "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"}
    refused(
        start(harness, APP, RANK, 1, "--device=cpu", **given).finish(),
        "a rehearsal on several servers needs MASTER_ADDR and MASTER_PORT: set both to the first's",
    )
    assert not (harness.folder / "run").exists()
    common = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "29400"}
    for device, rank in ((6, "0"), (3, "1")):
        given |= {"MASTER_PORT": "29400", "NODE_RANK": rank}
        outcome = start(harness, APP, RANK, 1, "--device=cpu", **given).finish()
        assert (outcome.code, outcome.stderr) == (0, ""), outcome
        environ = record_of(harness.folder / "run" / f"server{rank}" / f"device{device}")["environ"]
        variables = {**common, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": str(device)}
        assert {name: environ[name] for name in variables} == variables
    environ = record_of(harness.folder / "run" / "scheduler")["environ"]
    assert {name: environ[name] for name in common} == common
    assert (environ["MS_ROLE"], environ["NODE_RANK"]) == ("MS_SCHED", "0")


# The second rank dies at its start. After the restart, its training and its evaluation compile for longer.
SECOND_RANK = """
import os, pathlib, signal, time
if os.environ.get("RANK_ID") == "1":
    if not (died := pathlib.Path("died")).exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    import mindspore as ms
    compile = ms.nn.Cell.compile
    def slow(cell, *batch, **others):
        if not cell.compile_cache:
            time.sleep(20 if "Step" in type(cell).__name__ else 10)
        compile(cell, *batch, **others)
    ms.nn.Cell.compile = slow
"""


def test_a_rehearsal_on_cpu_takes_the_steps_of_one_process(harness: Harness) -> None:
    """Compare the losses of two ranks and one, with `Model` and shards of 2 and 1 samples.

    No other quick test trains by each_device.py or ``python train.py``. A rank compiles for 20 s, which
    --first-step-timeout allows and --timeout would not.
    """
    options = [*harness.app.exact, *harness.app.variants[1], "--global-batch-size=3", "--max-steps=4"]
    alone = [sys.executable, str(APP / "train.py"), f"--run-dir={harness.folder / 'alone'}", *options]
    reference = harness.checked(harness.start_command(alone, harness.folder / "alone").finish(), 1)
    assert reference["launcher"] == "none"

    table = write(harness.folder / "rank_table.json", "1.0", {"127.0.0.1": {6: 1, 2: 0}})
    (harness.folder / "python").mkdir()
    (harness.folder / "python" / "sitecustomize.py").write_text(SECOND_RANK)
    environ: dict[str, Any] = {"RANK_TABLE_FILE": str(table), "PYTHONPATH": python_path(harness.folder / "python")}
    job = harness.start(2, *options, "--timeout=8", "--first-step-timeout=120", **environ)
    check_rehearsal(harness.checked(job.finish(), 2), table)
    assert relative_difference(losses(harness.folder / "alone"), losses(job.run_dir)) < harness.app.tolerance
    assert "epoch: 1 step: 4, loss is" in (job.run_dir / "log" / "rank-0.log").read_text()


@pytest.mark.soak  # in the quick tests, the rank dies before its first step
def test_a_rehearsal_on_cpu_survives_a_killed_rank(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The job resumes from a checkpoint and ends with the weights of a job by msrun."""
    table = write(harness.folder / "rank_table.json", "1.0", {"127.0.0.1": {6: 1, 2: 0}})
    job = harness.start(2, *harness.app.small, RANK_TABLE_FILE=str(table))
    job.wait_for_step(3)
    os.kill(job.ranks()[1], signal.SIGKILL)
    result = harness.checked(job.finish(), 2)
    check_rehearsal(result, table)
    assert result["resumed_from_step"] in (2, 4, 6)
    assert result["weights_sha256"] == undisturbed(2)["weights_sha256"]


def check_rehearsal(result: dict[str, Any], table: Path) -> None:
    """Check that the job restarted once, and check the logs of both devices and of MindSpore's scheduler."""
    run_dir = Path(result["run_dir"])
    assert result["restarts"] == 1
    ended = f"rank 1 (device 6) ended with code 137: see {run_dir}/device6/train.log\n"
    assert (run_dir / "log" / "launcher.log").read_text().count(ended) == 1
    assert {path.name for path in run_dir.glob("*/*.log") if path.parent.name != "log"} == {"env.log", "train.log"}
    assert {path.parent.name for path in run_dir.glob("*/train.log")} == {"device2", "device6", "scheduler"}
    for device, rank in ((2, 0), (6, 1)):
        lines = (run_dir / f"device{device}" / "env.log").read_text().splitlines()
        wanted = {f"DEVICE_ID={device}", f"RANK_ID={rank}", "RANK_SIZE=2", f"RANK_TABLE_FILE={table}"}
        assert {*lines} >= {*wanted, f"MS_NODE_ID={rank}", "MS_ROLE=MS_WORKER"}


# --- through the launch script -------------------------------------------------------------------------------------


def launch(harness: Harness, project: Path, n: int, *options: str, **environ: str) -> Outcome:
    script = project.parents[1] / "scripts" / "run_resnet50_mindspore.sh"
    command = ["bash", str(script), str(n), "--run-dir=run", "--dataset=synthetic-cifar10", *options]
    return harness.start_command(command, harness.folder / "run", harness.folder, **environ).finish(limit=60)


@pytest.mark.parametrize(
    ("servers", "this", "environ"),
    [
        ({"10.*.*.*": UPPER}, "10.*.*.*", {}),
        ({ELSEWHERE: {0: 0}, "127.0.0.1": {7: 1, 3: 2}}, "127.0.0.1", {}),
        ({"127.0.0.1": {7: 0, 3: 1}, "127.0.0.2": {2: 2}}, "127.0.0.1", {"NODE_RANK": "0"}),
    ],
    ids=["one", "machine 1", "machine 0"],
)
def test_the_launch_script_needs_the_table_alone(
    harness: Harness, project: Path, servers: Servers, this: str, environ: dict[str, str]
) -> None:
    """The launch script runs without NNODES, MASTER_ADDR and MASTER_PORT."""
    table = write(harness.folder / "rank_table.json", "1.0", servers)
    outcome = launch(harness, project, len(servers[this]), RANK_TABLE_FILE="rank_table.json", **environ)
    assert (outcome.code, outcome.stderr) == (0, ""), outcome
    devices = listed(table, this)
    ranks = sum(map(len, servers.values()))
    folders = of_server(harness.folder / "run", table, this)
    assert sorted(path.name for path in folders.glob("device*")) == sorted(f"device{device}" for device, _ in devices)
    for device, rank in devices:
        record = record_of(folders / f"device{device}")
        shown = {name: record["environ"][name] for name in ("DEVICE_ID", "RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE")}
        assert shown == {"DEVICE_ID": device, "RANK_ID": rank, "RANK_SIZE": str(ranks), "RANK_TABLE_FILE": str(table)}
        info = JobInfo.from_environ(record["environ"])
        assert info.launcher
        assert info.machines == (len(servers) if len(servers) > 1 else None)
        assert record["words"][0] == str(project / "train.py")
        assert f"--data-dir={harness.folder / 'data'}" in record["words"]
        assert ("--resume" in record["words"]) == ("0" in [rank for _, rank in devices])  # machine 0 resolves --resume


def test_a_folder_that_cannot_be_made_is_reported_and_not_tried_again(harness: Harness, project: Path) -> None:
    write(harness.folder / "rank_table.json", "1.0", ONE)
    (harness.folder / "run").mkdir()
    (harness.folder / "run" / "device5").write_text("a file")
    outcome = launch(harness, project, 4, RANK_TABLE_FILE="rank_table.json")
    refused(outcome, f"{harness.folder}/run/device5: Not a directory: name a --run-dir to write in")
    assert (harness.folder / "run" / "log" / "launcher.log").read_text().count("each_device.py") == 1


def test_the_launch_script_refuses_what_contradicts_the_table_first(harness: Harness, project: Path) -> None:
    """The script reports the contradiction before it makes an environment; PYTHON is empty, so it would make one."""
    write(harness.folder / "rank_table.json", "1.0", ONE)
    for n, words, environ in (
        (8, "N=8, but RANK_TABLE_FILE=rank_table.json lists 4 for this machine (6, 5, 7, 4): give N=4", {}),
        (4, "NNODES=2, but RANK_TABLE_FILE=rank_table.json lists 1 server", {"NNODES": "2"}),
        (4, "gone.json: No such file or directory", {"RANK_TABLE_FILE": "gone.json"}),
    ):
        outcome = launch(harness, project, n, **{"RANK_TABLE_FILE": "rank_table.json", "PYTHON": "", **environ})
        refused(outcome, words)
    assert not (harness.folder / "run").exists()
    assert not (project.parents[1] / ".venvs").exists()
    dry = launch(harness, project, 4, "--dry-run", RANK_TABLE_FILE="rank_table.json").stdout
    assert f"{project}/each_device.py 4 {project}/train.py --run-dir=run" in dry
