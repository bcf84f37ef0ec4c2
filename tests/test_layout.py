"""Test the layout of the repository: functions of each train.py, imports of apps, and files of each app.

The layers of the package `samestep` are in .importlinter, which `lint-imports` checks.
"""

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
ALL_APPS = sorted(path.parent.name for path in ROOT.glob("apps/*/options.py"))
APPS = sorted(path.parent.name for path in ROOT.glob("tests/*/app_spec.py"))  # The apps that train.
FOLDERS = "apps benchmarks check core deploy docs launch observe scripts tools".split()  # without tests
MOST_VARIABLES = 10  # environment variables named SAMESTEP_*
FUNCTIONS = ["build_optimizer", "train_step", "evaluate", "train", "main"]  # The order of these functions in train.py.
FRAMEWORKS = {"jax", "mindspore", "paddle", "tensorflow", "torch"}  # Horovod and Lightning use torch
# Calls of collectives as train.py makes them: the framework's own, and calls of `run` and `distributed`.
COLLECTIVE = re.compile(
    r"\b(dist|hvd|fleet|distributed)\.(all_reduce|all_gather|allreduce|allgather|broadcast|broadcast_parameters)$"
    r"|\bdistributed\.(rendezvous|distribute|all_reduce_gradients)$"
    r"|\brun\.(restore|sync|save|finish)$|\bDistributedDataParallel$|^(evaluate|train_step|update)$|\btrainer\.fit$"
    r"|\bmembers\.(all_reduce|regroup)$|\btree\.all_reduce$"
)


def parse_train(app: str) -> tuple[str, ast.Module]:
    source = (ROOT / "apps" / app / "train.py").read_text()
    return source, ast.parse(source)


def imported_names(path: Path) -> set[str]:
    """Return the top-level packages and modules that a file imports, also within functions."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_programs_know_few_variables_of_this_project() -> None:
    """A launch script passes its values to ranks in one variable, SAMESTEP_JOB_INFO."""
    names: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".sh"):
                names |= {*re.findall("SAMESTEP_[A-Z_]+", path.read_text())}
    assert "SAMESTEP_JOB_INFO" in names
    assert len(names) <= MOST_VARIABLES, sorted(names)


@pytest.mark.parametrize("app", APPS)
def test_each_train_py_has_the_same_functions_in_the_same_order(app: str) -> None:
    _, tree = parse_train(app)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS]
    assert names == [name for name in FUNCTIONS if name in names]
    assert {"build_optimizer", "train", "main"} <= set(names)
    assert ast.get_docstring(tree), "the docstring is the launch manual"


@pytest.mark.parametrize("app", APPS)
def test_each_collective_of_a_train_py_is_marked(app: str) -> None:
    """The comment shows readers each call in which a rank waits for the other ranks."""
    source, tree = parse_train(app)
    lines = source.splitlines()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    collectives = [node for node in calls if COLLECTIVE.search(ast.unparse(node.func))]
    if "hvd." not in source:  # Horovod reduces after backward(), in a separate call
        backward = [node for node in calls if ast.unparse(node.func).endswith(".backward")]
        # If a tree collects the gradients, ranks communicate after the backward pass.
        collectives += [node for node in backward if not lines[node.end_lineno or 0].lstrip().startswith("tree.add(")]
    assert len(collectives) > 4
    for node in collectives:
        marked = any("# collective" in line for line in lines[node.lineno - 1 : node.end_lineno])
        named = ".collective(" in lines[node.lineno - 2]  # `with run.monitor.collective("backward"):`
        assert marked or named, ast.unparse(node)


def test_ddp_and_horovod_differ_only_by_the_migration() -> None:
    done = subprocess.run(["bash", "docs/diff_sizes.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = dict(re.findall(r"^(\S+): (\d+) changed lines", done.stdout, re.MULTILINE))
    assert int(changed["mnist_horovod/train.py"]) <= 40
    assert int(changed["mnist_horovod/model.py"]) == int(changed["mnist_lightning/model.py"]) == 0  # copies
    remedy = "docs/migrating.md shows what `bash docs/diff_sizes.sh` prints: copy it there"
    assert done.stdout in (ROOT / "docs" / "migrating.md").read_text(), remedy


@pytest.mark.parametrize("app", ALL_APPS)
def test_an_app_imports_samestep_one_framework_and_its_own_files(app: str) -> None:
    files = {path: path.parent.name for path in ROOT.glob("apps/*/*.py")}
    own = {path.stem for path, folder in files.items() if folder == app}
    of_others = {path.stem for path in files} - own - sys.stdlib_module_names | {"apps", *files.values()}
    frameworks = set()
    for path in (path for path, folder in files.items() if folder == app):
        names = imported_names(path)
        assert names & of_others == set(), path
        assert not re.search(r"\bsamestep_(launch|observe|check)\b", path.read_text()), path
        frameworks |= names & FRAMEWORKS
    assert len(frameworks) == 1


def test_scripts_hold_only_doors() -> None:
    listed = subprocess.run(["git", "ls-files", "scripts"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name for name in listed.stdout.split() if (ROOT / name).exists()}
    doors = {"launch.sh", "launch.py", "new_app.sh", "test.sh", "verify_horovod.sh"}
    doors |= {f"run_{path.name}.sh" for path in ROOT.glob("apps/*")}
    assert found <= {f"scripts/{name}" for name in doors}


def test_each_file_of_tests_is_run_in_an_environment() -> None:
    command = ["git", "ls-files", "tests/test_*.py", "tests/**/test_*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    named = {*re.findall(r"\btests/[\w/.]*\w", (ROOT / "tox.ini").read_text())}
    for name in listed.stdout.splitlines():
        places = {name, *map(str, Path(name).parents)}
        assert places & named, f"no testpaths in tox.ini has {name}"


def test_each_app_has_its_specification_its_script_and_its_environment() -> None:
    environments = (ROOT / "tox.ini").read_text()
    for app in (path.parent.name for path in ROOT.glob("apps/*/train.py")):
        assert app in APPS, f"tests/{app}/app_spec.py is missing"
        assert (ROOT / "scripts" / f"run_{app}.sh").exists()
        assert re.search(rf"^\[testenv:{app}-", environments, re.MULTILINE), f"tox.ini lacks {app}"
    for app in ALL_APPS:
        assert (ROOT / "tests" / app / "device_paths.py").exists()


def test_the_pythons_of_each_app_follow_from_the_record_of_its_pins() -> None:
    """`tox -e pythons` makes the record, for which it needs a package index."""
    tool = runpy.run_path(str(ROOT / "tools" / "python_versions.py"))
    differences = tool["differences"]
    recorded = json.loads(tool["RECORD"].read_text())
    assert recorded.keys() == {tool["app_of"](path) for path in tool["requirements"]()}
    for path in tool["requirements"]():
        text = path.read_text()
        record = recorded[tool["app_of"](path)]
        assert differences(text, record) == [], path
        assert differences(text + "numpy==2.4.7\n", record)  # the record lacks this pin
        assert differences(text.replace("# python: 3.11", "# python: 3.10 3.11"), record)


def test_each_lock_lists_every_pin_with_hashes_and_nothing_of_a_machine() -> None:
    """`tox -e locks -- --check` compares the locks with PyPI."""
    tool, pythons = (runpy.run_path(str(ROOT / "tools" / f"{name}.py")) for name in ("lock", "python_versions"))
    line = re.compile(
        r"[a-z0-9-]+==[\w.+]+( ; [\w.'() =<>!]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?|"
        r"    # +(via )?([a-z0-9-]+|-r (apps/\w+|launch/samestep_launch/tracker_locks)/\w+\.in)|    # via|"
        r"# Made by `bash scripts/test\.sh -e locks -- .*"
    )
    for source in [*ROOT.glob("apps/*/*.in"), *tool["TRACKERS"].glob("*.in")]:
        whole = source.name == "requirements.in"
        locks = [*source.parent.glob("requirements-*.txt")] if whole else [source.with_suffix(".txt")]
        pins = pythons["pins"](source.read_text())
        needed = {re.split("[=><]", pin)[0].lower() for pin in (pins if whole else pins[:-3])}
        assert source.with_name("requirements-cpu.txt") in locks or not whole
        for lock in locks:
            text = lock.read_text()
            entries = tool["entries"](lock.read_text())
            assert [each for each in text.splitlines() if not line.fullmatch(each)] == [], lock
            assert all(entry.hashes for entry in entries), lock
            assert needed <= {entry.name for entry in entries}, lock
            found = {f"{entry.name}=={entry.version}" for entry in entries}
            assert {pin.lower() for pin in pins if "==" in pin} <= found, f"{lock}: bash scripts/test.sh -e locks"
            gpu = {entry.name for entry in entries if tool["GPU"].fullmatch(entry.name)}
            assert bool(gpu) == lock.name.endswith("-cuda.txt"), lock
            for entry in entries:
                listed = {*tool["CPU_INDEX"].get((entry.name, entry.version), "").split()[::2]}
                if entry.name == "torch":  # the build for CPUs, or the build for GPUs
                    assert ("+cpu " in f"{entry.requirement} ", listed == {*entry.hashes}) == (not gpu, not gpu), lock
                elif entry.name == "torchvision" and not gpu:
                    assert listed < {*entry.hashes}, lock


@pytest.mark.parametrize("program", ["device_paths.py", "app_tables.py"])
def test_the_tables_of_a_page_are_those_that_its_program_makes(program: str) -> None:
    """docs/devices.md has each device path with its evidence, and README.md has the scoreboard's newest verdicts."""
    command = [sys.executable, f"docs/{program}", "--check"]
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
            ("cuda", "NCCL", "", "run", "tests/test_layout.py::test_no_such"),
            ["no test tests/test_layout.py::test_no_such"],
        ),
        (("cuda", "NCCL", "", "run", "tests/test_layout.py::test_scripts_hold_only_doors"), []),
    ],
    ids=str,
)
def test_a_wrong_device_path_is_named(path: tuple[str, ...], words: list[str]) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "device_paths.py"))
    paths = [script["DevicePath"](*each) for each in (("cpu", "gloo", "", "run", "tests/common"), path)]
    found = list(script["mistakes"]("mnist_ddp", paths))
    assert len(found) == len(words), found
    assert all(each in problem for each, problem in zip(words, found)), found


# Programs of cifar_ddp, collectives_lab and mnist_horovod that measure or compare, and do not train as an app does.
MEASURING = {"wrong_ways.py", "training.py", "verify.py"}


def test_no_torch_app_but_mnist_elastic_names_global_batches() -> None:
    """Loops use `GlobalBatchSampler`. mnist_elastic repeats steps, and changes the number of ranks between steps."""
    naming = set()
    for path in ROOT.glob("apps/*/*.py"):
        uses_torch = "\ntorch==" in path.with_name("requirements.in").read_text()
        if uses_torch and "GlobalBatches" in path.read_text():
            naming.add(path)
    others = {path.name for path in naming if path.parent.name != "mnist_elastic"}
    assert others == MEASURING
    assert len(naming) > len(others)


def test_core_names_no_library_of_llm_finetune() -> None:
    """Only the kit's subclass of Hugging Face's Trainer may mention transformers."""
    for path in sorted((ROOT / "core" / "samestep").rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"\b(llm_finetune|peft)\b", text), path
        assert "transformers" not in text or path.name == "trainer.py", path
