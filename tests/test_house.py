"""The house keeps its shape: what each train.py looks like, what the torch family shares, and who may import whom."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
APPS = sorted(path.parent.name for path in ROOT.glob("tests/*/row.py"))  # those that train
LINES = {"mnist_ddp": 133, "mnist_horovod": 133, "mnist_lightning": 200, "lenet_paddle": 190, "resnet50_mindspore": 190}
FUNCTIONS = ["build_optimizer", "train_step", "evaluate", "train", "main"]  # in this order, where the app has them
# Calls at which ranks talk, whatever the framework; those of Run and ranks.py by what they are called on.
TALK = re.compile(
    r"(\b(dist|hvd|fleet)\.(all_reduce|all_gather|broadcast|allreduce|allgather|broadcast_parameters)"
    r"|\b(ranks\.)?(all_reduce|all_gather|broadcast|rendezvous|order_sums|add_up|distribute|averaged_buffers|evaluate|fit"
    r"|loss_of|clip)"
    r"|\brun\.(restore|save|finish)|\bself\.record|\b(DistributedDataParallel|DataParallel|train_step)|\.backward)$"
)


def train_of(app: str) -> tuple[str, ast.Module]:
    source = (ROOT / "apps" / app / "train.py").read_text()
    return source, ast.parse(source)


@pytest.mark.parametrize("app", APPS)
def test_a_train_py_is_a_page_or_two(app: str) -> None:
    source, tree = train_of(app)
    assert len(source.splitlines()) <= LINES.get(app, 200)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in functions:
        assert (function.end_lineno or 0) - function.lineno < 60, function.name
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS]
    assert names == [name for name in FUNCTIONS if name in names]
    assert {"build_optimizer", "train", "main"} <= set(names)


@pytest.mark.parametrize("app", APPS)
def test_every_call_at_which_ranks_talk_is_marked(app: str) -> None:
    """In train.py, and in the files to which a framework that owns the loop sends it."""
    found = 0
    for path in (ROOT / "apps" / app / name for name in ("train.py", "callback.py", "highlevel.py")):
        source = path.read_text() if path.exists() else ""
        lines = source.splitlines()
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        for node in (node for node in calls if TALK.search(ast.unparse(node.func))):
            found += 1
            shown = lines[node.lineno - 1 : node.end_lineno]
            assert any("ranks talk" in line.lower() for line in shown), shown
    assert found > 5


def test_the_torch_family_shares_its_files() -> None:
    """An app never imports another, so what they share is copied, and the copies are one."""
    weights = {app: (ROOT / "apps" / app / "weights.py").read_text() for app in APPS}
    holds_all = {app: source for app, source in weights.items() if "samestep.sharded" not in source}
    family = [app for app, source in holds_all.items() if re.search(r"^import torch$", source, re.MULTILINE)]
    assert {"mnist_ddp", "mnist_horovod", "mnist_lightning"} <= set(family)
    assert len({weights[app] for app in family}) == 1, family
    for name, apps in (
        ("model.py", ["mnist_horovod", "mnist_lightning"]),
        ("ranks.py", ["mnist_lightning", "cifar_ddp"]),
    ):
        for app in apps:
            assert (ROOT / "apps" / app / name).read_text() == (ROOT / "apps" / "mnist_ddp" / name).read_text()


def test_ddp_and_horovod_differ_where_one_migrates() -> None:
    done = subprocess.run(["bash", "docs/diff_sizes.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = dict(re.findall(r"^(\S+): (\d+) changed lines", done.stdout, re.MULTILINE))
    assert int(changed["mnist_horovod/train.py"]) <= 45
    remedy = "docs/migrating.md shows what `bash docs/diff_sizes.sh` prints: put that there"
    assert done.stdout in (ROOT / "docs" / "migrating.md").read_text(), remedy


def test_nobody_imports_what_is_not_theirs() -> None:
    """An app: samestep, its framework, its own folder. A rank never needs the launcher."""
    apps = {path.name for path in ROOT.glob("apps/*") if path.is_dir()}
    for path in [*ROOT.glob("apps/*/*.py"), *ROOT.glob("core/samestep/*.py")]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        roots = {name.split(".")[0] for name in named}
        assert not roots & {"launcher", "apps", *apps}, path


def test_scripts_holds_doors_only() -> None:
    listed = subprocess.run(["git", "ls-files", "scripts"], cwd=ROOT, capture_output=True, text=True, check=True)
    outside = {name for name in listed.stdout.split() if not name.startswith("scripts/launcher/")}
    doors = {"scripts/new_app.sh", "scripts/test.sh", "scripts/verify_horovod.sh"} | {
        f"scripts/run_{path.name}.sh" for path in ROOT.glob("apps/*")
    }
    assert outside <= doors


def test_every_app_has_its_row_its_door_and_its_environment() -> None:
    environments = (ROOT / "tox.ini").read_text()
    for app in (path.parent.name for path in ROOT.glob("apps/*/train.py")):
        assert app in APPS, f"tests/{app}/row.py is missing"
        assert (ROOT / "scripts" / f"run_{app}.sh").exists()
        assert re.search(rf"^\[testenv:{app}-", environments, re.MULTILINE), f"tox.ini lacks {app}"
    for app in (path.parent.name for path in ROOT.glob("apps/*/options.py")):
        assert (ROOT / "tests" / app / "device_paths.py").exists()


def test_the_pythons_of_an_app_follow_from_what_was_recorded_of_its_pins() -> None:
    """The record itself needs a package index: `tox -e pythons`."""
    tool = runpy.run_path(str(ROOT / "tools" / "python_versions.py"))
    differences, recorded = tool["differences"], json.loads(tool["RECORD"].read_text())
    assert recorded.keys() == {path.parent.name for path in tool["requirements"]()}
    for path in tool["requirements"]():
        text, record = path.read_text(), recorded[path.parent.name]
        assert differences(text, record) == [], path
        assert differences(text + "numpy==2.4.7\n", record)  # another pin was not resolved
        assert differences(text.replace("# python: 3.11", "# python: 3.10 3.11"), record)


def test_each_lock_lists_every_pin_with_hashes_and_nothing_of_a_machine() -> None:
    """Whether it is all that PyPI has needs PyPI: `tox -e locks -- --check`."""
    tool, pythons = (runpy.run_path(str(ROOT / "tools" / f"{name}.py")) for name in ("lock", "python_versions"))
    line = re.compile(
        r"[a-z0-9-]+==[\w.+]+( ; [\w.'() =<>!]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?|"
        r"    # +(via )?([a-z0-9-]+|-r (apps|scripts/launcher)/\w+/\w+\.in)|    # via|"
        r"# Made by `bash scripts/test\.sh -e locks -- .*"
    )
    for source in [*ROOT.glob("apps/*/*.in"), *ROOT.glob("scripts/launcher/*/*.in")]:
        whole = source.name == "requirements.in"
        locks = [*source.parent.glob("requirements-*.txt")] if whole else [source.with_suffix(".txt")]
        pins = pythons["pins"](source.read_text())
        needed = {re.split("[=><]", pin)[0].lower() for pin in (pins if whole else pins[:-3])}
        assert source.with_name("requirements-cpu.txt") in locks or not whole
        for lock in locks:
            text, entries = lock.read_text(), tool["entries"](lock.read_text())
            assert [each for each in text.splitlines() if not line.fullmatch(each)] == [], lock
            assert all(entry.hashes for entry in entries), lock
            assert needed <= {entry.name for entry in entries}, lock
            found = {f"{entry.name}=={entry.version}" for entry in entries}
            assert {pin.lower() for pin in pins if "==" in pin} <= found, f"{lock}: bash scripts/test.sh -e locks"
            gpu = {entry.name for entry in entries if tool["GPU"].fullmatch(entry.name)}
            assert bool(gpu) == lock.name.endswith("-cuda.txt"), lock
            for entry in entries:
                listed = {*tool["CPU_INDEX"].get((entry.name, entry.version), "").split()[::2]}
                if entry.name == "torch":  # the one build, or the other
                    assert ("+cpu " in f"{entry.requirement} ", listed == {*entry.hashes}) == (not gpu, not gpu), lock
                elif entry.name == "torchvision" and not gpu:
                    assert listed < {*entry.hashes}, lock


def test_every_device_path_is_listed_with_what_shows_it() -> None:
    command = [sys.executable, "docs/device_paths.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (("cuda", "NCCL", "", "read", ""), []),
        (("gpu", "NCCL", "", "read", ""), ["devices ['cpu', 'gpu'], but --device takes ['cpu', 'cuda']"]),
        (("cuda", "NCCL", "", "seen", ""), ["'seen' is not one of run, simulated, read"]),
        (("cuda", "NCCL", "", "simulated", "tests/nowhere"), ["no test tests/nowhere"]),
        (
            ("cuda", "NCCL", "", "run", "tests/test_house.py::test_no_such"),
            ["no test tests/test_house.py::test_no_such"],
        ),
        (("cuda", "NCCL", "", "run", "tests/test_house.py::test_scripts_holds_doors_only"), []),
    ],
    ids=str,
)
def test_a_wrong_device_path_is_named(path: tuple[str, ...], words: list[str]) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "device_paths.py"))
    paths = [script["DevicePath"](*each) for each in (("cpu", "gloo", "", "run", "tests/common"), path)]
    found = list(script["mistakes"]("mnist_ddp", paths))
    assert len(found) == len(words), found
    assert all(each in problem for each, problem in zip(words, found)), found
