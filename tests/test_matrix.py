"""Test `bash scripts/test.sh`: success means that tests ran, words select tests, and an interrupt leaves no process."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
from processes import is_running, kill_marked, marked, wait_for
from repository import Ended, ran

ROOT = Path(__file__).resolve().parents[1]
TOX = ROOT / ".venvs" / "tox" / "bin" / "python"
LIMIT = 120.0
MARK = "MATRIX_MARK"
NO_TESTS = 5  # pytest's exit code
# A small tox.ini, whose environments run this environment's pytest with tests/conftest.py.
SMALL = """
[tox]
env_list = one, two
no_package = true

[testenv]
allowlist_externals = *
interrupt_timeout = 20
pass_env = MATRIX_MARK, MATRIX_MATCHED
set_env = PYTHONPATH = {tests}
commands = {python} -m pytest -q -p conftest --rootdir={{tox_root}} {{tox_root}}/test_{{env_name}}.py {{posargs}}

[testenv:no_pytest]
commands = bash -c '{python} wait.py; true'
"""
WAIT = """
import pathlib, time
for n in range(2):
    pathlib.Path(f"tests/started-{n}").touch()
time.sleep(300)
"""
LONG = """
import time
import pytest

@pytest.mark.parametrize("n", range(2))
def test_long(harness, n):
    harness.start_command(["bash", "-c", "trap '' INT TERM; sleep 300 & sleep 300 & wait"], harness.folder)
    (harness.folder.parents[1] / f"started-{n}").touch()
    time.sleep(300)
"""


# A plugin that deletes pytest's link to the newest folder at the worst moment, as a second pytest can.
SECOND_PYTEST = """
from pathlib import Path

unlink = Path.unlink


def unlink_second(path, missing_ok=False):
    if path.name == "pytest-current":
        unlink(path, missing_ok=True)
    unlink(path, missing_ok)


def pytest_configure():
    Path.unlink = unlink_second
"""


def environ(**more: str) -> dict[str, str]:
    """Return the environment without the variables of this test run, as in a shell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "SAMESTEP_", "TOX_"))}
    return {**kept, **more}


def tox(*words: str, folder: Path = ROOT, **more: str) -> Ended:
    return ran(folder, str(TOX), str(ROOT / "tools" / "run_tox.py"), *words, environ=environ(**more), limit=LIMIT)


def sections() -> Mapping[str, str]:
    """Return the commands of tox.ini's sections that run pytest."""
    config = configparser.RawConfigParser()
    config.read(ROOT / "tox.ini")
    commands = {name: config.get(name, "commands", fallback="") for name in config.sections()}
    return {name: lines for name, lines in commands.items() if re.search(r"(^|: )pytest ", lines, re.MULTILINE)}


@pytest.fixture
def run_tox() -> ModuleType:
    """Return tools/run_tox.py as a module."""
    spec = importlib.util.spec_from_file_location("run_tox", ROOT / "tools" / "run_tox.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_matrix(folder: Path, **tests: str) -> Path:
    """Write the small tox.ini and these test files to ``folder``, and return the folder."""
    (folder / "tox.ini").write_text(SMALL.format(tests=ROOT / "tests", python=sys.executable))
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


# --- names -----------------------------------------------------------------------------------------------------------


def test_an_environment_without_tests_fails(tmp_path: Path) -> None:
    names = ["mnist_ddp", "core-cpu"]
    done = tox("--workdir", str(tmp_path), "-e", ",".join(names))
    assert done.returncode != 0
    remedy = "name an environment that bash scripts/test.sh --help lists"
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: {name} has no tests: {remedy}" for name in names
    ]
    for name in names:
        assert f"  {name}: FAIL code 2" in done.stdout


@pytest.mark.parametrize("option", ["-h", "-l"])
def test_help_describes_each_environment(option: str) -> None:
    done = ran(ROOT, "bash", "scripts/test.sh", option, environ=environ(), limit=LIMIT)
    assert done.returncode == 0, done.stderr
    listed = dict(re.findall(r"^(\S+) +-> (.*)$", done.stdout, re.MULTILINE))
    assert {"core", "trackers", "mnist_ddp-cpu", "mnist_ddp-gpu", "fast"} <= listed.keys()
    assert [name for name in listed if name.startswith("-")] == []
    assert [name for name, description in listed.items() if description == "[no description]"] == []


@pytest.mark.parametrize("end", ["gpu", "ascend"])
def test_an_environment_without_its_device_ends_at_once(run_tox: ModuleType, tmp_path: Path, end: str) -> None:
    words = run_tox.Words(["-e", f"core,mnist_ddp-{end}"])
    run_tox.DRIVERS[end] = (str(tmp_path / "driver"),)
    assert words.without_device() == (
        f"error: mnist_ddp-{end}: this machine has no driver of such a device: name a -cpu environment"
    )
    (tmp_path / "driver").touch()
    assert words.without_device() == ""


def test_pytest_without_a_path_names_the_script() -> None:
    for words in ([], ["tests"]):
        done = ran(ROOT, sys.executable, "-m", "pytest", *words, environ=environ(), limit=LIMIT)
        assert done.returncode == pytest.ExitCode.USAGE_ERROR
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert "run `bash scripts/test.sh`" in line


def test_a_second_pytest_that_ends_does_not_fail_this_one(tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text(SECOND_PYTEST)
    (tmp_path / "test_passed.py").write_text("def test_passed(tmp_path): pass")
    roots = {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}
    words = ["-p", "second", "-p", "conftest", f"--rootdir={tmp_path}", "-o", "tmp_path_retention_policy=failed"]
    done = ran(tmp_path, sys.executable, "-m", "pytest", *words, environ=environ(**roots), limit=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "1 passed" in done.stdout


def test_the_fast_environments_run_each_app_of_pytorch() -> None:
    config = configparser.RawConfigParser()
    config.read(ROOT / "tox.ini")
    commands = " ".join(config[f"testenv:{name}"]["commands"] for name in ("fast", "fast-cifar"))
    requirements = {path.parent.name: path.read_text() for path in ROOT.glob("apps/*/requirements.in")}
    apps = {app for app, text in requirements.items() if re.search(r"^torch(ft)?==", text, re.MULTILINE)}
    listed = re.findall(r"short_runs\.sh \{env_tmp_dir\} (.*?)(?: bash|$)", commands, re.MULTILINE)
    assert {app for line in listed for app in line.split()} == apps - {"mnist_horovod"}  # built from source
    assert "-e fast,fast-cifar" in (ROOT / "scripts" / "test.sh").read_text()


# --- words -----------------------------------------------------------------------------------------------------------


def test_words_do_not_replace_the_paths_of_an_environment() -> None:
    found = sections()
    assert len(found) > 15
    for name, lines in found.items():
        for command in re.findall(r"(?m)(?:^|: )(pytest .*)$", lines):
            words = shlex.split(command)
            assert words[-1] == "{posargs}", name
            (paths,) = (word.removeprefix("testpaths=").split() for word in words if word.startswith("testpaths="))
            assert [path for path in paths if not (ROOT / path).exists()] == [], name
            assert [word for word in words[1:] if word.startswith("tests")] == [], name


def collected(command: str, *words: str) -> set[str]:
    """Return the tests that an environment's command selects with these words."""
    program = [sys.executable, "-m", *shlex.split(command.replace("{posargs}", "")), "-n0", "--collect-only", "-q"]
    done = ran(ROOT, *program, *words, environ=environ(), limit=LIMIT)
    assert done.returncode == 0, done.stdout
    return set(re.findall(r"^tests/.*::.*$", done.stdout, re.MULTILINE))


def test_words_and_paths_narrow_an_environment() -> None:
    command = sections()["testenv:mnist_elastic-cpu"]
    path = "tests/common/test_training.py"
    evaluated = {f"{path}::test_evaluate_only_leaves_the_run_as_it_is"}
    assert collected(command, "-k", "evaluate_only") == evaluated
    assert collected(command, path) == evaluated | {f"{path}::test_a_run_leaves_what_the_design_says"}
    # The world size of mnist_elastic changes during a run, so some common tests do not apply, even in the soak.
    every = {f"{path}::test_evaluations_between_epochs_change_no_step_and_the_best_is_kept"}
    assert collected(command, path, "--every-case") == collected(command, path) | every


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "run-parallel --parallel 2"),
        ("-p 4", "run-parallel -p 4"),
        ("--notest", "run-parallel --parallel 2 --notest"),
        ("-- -k resume", "run-parallel --parallel 2 --skip-env ^lint$ -- -k resume"),
        ("-e core", "run -e core"),
        ("-ecore,lint -- -k resume", "run -ecore,lint -- -k resume"),
        ("-e core,docs -p 2", "run-parallel -e core,docs -p 2"),
        ("-e core -- -p no:randomly", "run -e core -- -p no:randomly"),
    ],
)
def test_the_words_of_a_call_make_the_command_of_tox(run_tox: ModuleType, arguments: str, expected: str) -> None:
    assert run_tox.Words(arguments.split()).for_tox() == expected.split()


def test_words_must_select_a_test_of_an_environment(tmp_path: Path) -> None:
    folder = small_matrix(tmp_path, one="def test_a(): pass", two="def test_b(): pass")
    both = tox("--", "-n1", "-k", "test_b", folder=folder)
    assert both.returncode == 0, both.stdout
    one = tox("-e", "one", "--", "-k", "test_b", folder=folder)
    assert one.returncode == NO_TESTS, one.stdout
    none = tox("-e", "one,two", "--", "-k", "test_c", folder=folder)
    assert none.returncode == NO_TESTS, none.stdout
    assert none.stderr.endswith("error: '-k test_c' selects no test: change the words after --\n")


# --- interrupts ------------------------------------------------------------------------------------------------------


def commands_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def send(process: subprocess.Popen[str], number: int, to_group: bool) -> None:
    (os.killpg if to_group else os.kill)(process.pid, number)


@pytest.mark.parametrize(
    ("environment", "number", "to_group"),
    [
        ("one", signal.SIGINT, True),  # Ctrl-C
        ("one", signal.SIGINT, False),
        ("one", signal.SIGTERM, False),
        ("one", signal.SIGKILL, False),
        ("no_pytest", signal.SIGTERM, False),
    ],
    ids=["Ctrl-C", "INT", "TERM", "KILL", "TERM of another program"],
)
def test_an_interrupt_leaves_no_process(tmp_path: Path, environment: str, number: int, to_group: bool) -> None:
    folder = small_matrix(tmp_path, one=LONG)
    mark = uuid.uuid4().hex
    words = [
        str(TOX),
        str(ROOT / "tools" / "run_tox.py"),
        "-e",
        environment,
        "--",
        "-n2",
        f"--basetemp={folder / 'tests'}",
    ]
    (folder / "tests").mkdir()
    (folder / "wait.py").write_text(WAIT)
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environ(**{MARK: mark}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        try:
            wait_for(lambda: len(list(folder.glob("tests/started-*"))) == 2 or not is_running(process.pid), LIMIT)
            assert process.poll() is None, (folder / "output").read_text()
            send(process, number, to_group)
            assert process.wait(LIMIT) != 0
            deadline = time.monotonic() + 20
            while (left := marked(MARK, mark)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert [commands_of(pid) for pid in left] == [], (folder / "output").read_text()
        finally:
            kill_marked(MARK, mark, LIMIT)
            process.wait(LIMIT)
