"""Define the options of a test run (app, device, number of cases) and the fixtures that tests share."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "common"))

from harness import APPS, ROOT, Harness, app_spec, faulty
from interrupts import Interrupts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--app", choices=APPS, default="mnist_ddp", help="the app that tests/common drives")
    parser.addoption("--device", default="cpu", help="its --device")
    parser.addoption("--start-method", choices=("fork", "exec"), help="its --start-method, if it has one")
    parser.addoption("--every-case", action="store_true", help="all cases, with low counts")
    parser.addoption("--soak", action="store_true", help="the high counts, for hours rather than minutes")


def pytest_configure(config: pytest.Config) -> None:
    check_paths(config)
    config.pluginmanager.register(Interrupts(config))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's "&" ignores SIGINT, and a started job would too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(100_000, 50, 100)  # with higher thresholds, garbage of passed tests would hold open files
    for mark in (
        "soak: only with --soak or --every-case",
        "core_only: core alone decides it, so few apps run it",
        "torchrun: of apps that torchrun starts",
        "stored_run: of apps that store a run of an earlier version in the form of tests/common/test_stored.py",
        "compared: of apps whose ranks hold the same weights, and compare them",
        "virtual_ranks: of apps that have --virtual-ranks",
        "replayed: of apps whose steps samestep replay runs again",
        "fixed_world: of apps whose world size stays the same during a run",
        "slow: its start or its steps take long; an app may leave it to the soak",
        "best, faults, kills, launcher, stall, stragglers, weights: an app may leave it to the soak",
    ):
        for name in mark.partition(":")[0].split(", "):
            config.addinivalue_line("markers", f"{name}:{mark.partition(':')[2]}")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Run the programs in ``prepare`` of the app under test, once for all workers."""
    if hasattr(session.config, "workerinput"):
        return
    for words in app_spec(session.config.getoption("--app")).prepare:
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=120)


def check_paths(config: pytest.Config) -> None:
    """Refuse to collect the tests of all apps in one process, because test folders have modules of the same names."""
    paths = {Path(config.invocation_params.dir, path.partition("::")[0]).resolve() for path in config.args}
    if len(APPS) > 1 and paths & {ROOT, ROOT / "tests"}:
        raise pytest.UsageError(
            "the tests of each app need an environment of their own: run `bash scripts/test.sh` "
            "(--help lists the environments), or name a folder, such as tests/core"
        )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Let a session end although another pytest ends at the same moment.

    Its last step deletes a link that every pytest of this user shares, and the other one may have deleted it already
    (``cleanup_dead_symlinks`` of pytest 9.2).
    """
    succeed_without_a_selected_test(session, exitstatus)
    try:
        yield
    except FileNotFoundError as error:
        if not str(error.filename).endswith("/pytest-current"):
            raise


def succeed_without_a_selected_test(session: pytest.Session, exitstatus: int) -> None:
    """Succeed if MATRIX_MATCHED is set. tools/run_tox.py checks that an environment has a selected test."""
    matched = os.environ.get("MATRIX_MATCHED")
    if not matched or hasattr(session.config, "workerinput"):
        return
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
    elif exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        Path(matched, os.environ.get("TOX_ENV_NAME", "tests")).touch()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    app = app_spec(config.getoption("--app"))
    applies = {"torchrun": app.launcher == "torchrun", "compared": app.compared}
    applies["fixed_world"] = app.launcher != "torchft"
    applies["replayed"] = app.launcher not in ("msrun", "torchft")
    applies["virtual_ranks"] = app.virtual_ranks is not None
    applies["stored_run"] = any((ROOT / f"tests/{app.name}/stored").glob("*/options"))
    marks = [mark for mark, does in applies.items() if not does]
    if not config.getoption("--soak") and not config.getoption("--every-case"):
        marks += ["soak", *app.skipped_marks]
    skipped_marks = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    items[:] = [item for item in items if item not in skipped_marks]
    config.hook.pytest_deselected(items=skipped_marks)


@pytest.fixture
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Yield a harness that runs the app under test, and check at the end that none of its processes is left."""
    option = request.config.getoption
    made = Harness(app_spec(option("--app")), option("--device"), tmp_path, option("--start-method"))
    yield made
    made.check_nothing_left()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--soak"):
        faulthandler.cancel_dump_traceback_later()  # a soak may exceed the timeout of pytest.ini


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def table() -> Iterator[list[str]]:
    """Yield a list for a soak's result lines (app, ranks, fault, runs, passed runs), which tools/soak.py collects."""
    lines: list[str] = []
    yield lines
    path = os.environ.get("MATRIX_SOAK_TABLE")
    if path:
        with open(path, "a") as file:  # other workers also append to the file
            file.write("".join(f"{line}\n" for line in lines))


@pytest.fixture
def undisturbed(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the result of an undisturbed run, made once per world size and options."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # the folder of all workers

    def reference(n: int, *options: str) -> dict[str, Any]:
        key = hashlib.sha256(repr((harness.app.name, n, options)).encode()).hexdigest()[:8]
        folder = shared / f"undisturbed-{key}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = folder / "done.json"
            if not done.exists():
                shutil.rmtree(folder / "run", ignore_errors=True)
                modules = faulty({"modules": str(folder / "modules")})  # injects no fault, but records imports
                modules["PYTHONWARNINGS"] = "always"
                outcome = harness.run(n, *harness.app.small, *options, run_dir=folder / "run", **modules)
                result = harness.checked(outcome, n)
                done.write_text(json.dumps(result))
            found: dict[str, Any] = json.loads(done.read_text())
        return found

    return reference


# --- several apps (new_app.sh leaves the rest of this file out of a project) -----------------------------------------


def beside(harness: Harness, app: str) -> Iterator[Harness]:
    """Yield a harness for another app than the app under test, in the same Python."""
    folder = harness.folder / app
    folder.mkdir()
    made = Harness(app_spec(app), harness.device, folder)
    yield made
    made.check_nothing_left()


@pytest.fixture
def ddp(harness: Harness) -> Iterator[Harness]:
    yield from beside(harness, "mnist_ddp")


@pytest.fixture
def cifar(harness: Harness) -> Iterator[Harness]:
    yield from beside(harness, "cifar_ddp")
