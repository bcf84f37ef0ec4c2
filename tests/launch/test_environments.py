"""Test environments: apps with equal locks share one, which is made once, atomically, and never changed.

The launch script makes environments in a scratch project. In this project, `venv` installs no pip, and a fake
`pip` records its arguments. The tests of hashes use the real pip.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from repository import PACKAGES
from samestep import ConfigError
from samestep_launch import environments
from samestep_launch.environments import Environment
from scratch_project import ScratchProject, end_of, gone, wait_for

# BASE is on PATH as python3 and python3.X. If the file ``version`` exists, BASE reports the version in this file.
BASE = """#!/usr/bin/env bash
if [ "$1 $2" = "-m venv" ]; then
  echo "venv $3" >> {notes}
  exec {python} -m venv --without-pip "$3"
elif [ -e {version} ] && [[ "$2" = *python_version* ]]; then
  exec cat {version}
fi
exec {python} "$@"
"""
# PIP is on PYTHONPATH. It records its interpreter and arguments. The files pip.fails, pip.kills and pip.waits make it
# fail, kill its process group, or wait.
PIP = """
import os, signal, sys, time
from pathlib import Path
work = Path({work!r})
with (work / "pip.notes").open("a") as file:
    file.write(" ".join([sys.executable, *sys.argv[1:]]) + chr(10))
time.sleep(0.1)
if (work / "pip.fails").exists():
    sys.exit(3)
if (work / "pip.kills").exists():
    os.kill(os.getppid(), signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)
if (work / "pip.waits").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (work / "pip.waits").unlink()
    time.sleep(600)
"""
WHICH = "import json, os, sys; print(json.dumps([sys.executable, os.environ['PATH'].split(':')[0]]))"
VERSION = platform.python_version()


class Street:
    """A scratch project whose launch script makes environments, because PYTHON is empty."""

    def __init__(self, project: ScratchProject, root: Path) -> None:
        shutil.copytree(project.root, root, symlinks=True)
        self.root = root
        self.work = project.work
        self.venvs = root / ".venvs"
        self.project = ScratchProject(root, project.work)
        self.project.mark = project.mark
        packages = self.work / "packages"
        (packages / "pip").mkdir(parents=True)
        (packages / "pip" / "__init__.py").write_text("")
        (packages / "pip" / "__main__.py").write_text(PIP.format(work=str(self.work)))
        self.bin = self.work / "bin"
        self.bin.mkdir()
        python = self.bin / f"python{'.'.join(VERSION.split('.')[:2])}"
        base = os.path.realpath(Path(sys.base_prefix, "bin", "python3"))
        notes = self.work / "pip.notes"
        version = self.work / "version"
        python.write_text(BASE.format(python=base, notes=notes, version=version))
        python.chmod(0o755)
        (self.bin / "python3").symlink_to(python.name)  # pyenv's python3 would put its own folder before this folder
        installed = Path(numpy.__file__).parents[1]  # what pip would have installed
        self.environ = {
            "PYTHON": "",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": f"{packages}:{root / 'core'}:{installed}",
        }
        for app in ("toy", "bench"):
            self.require(app, "torch==1.0")

    def require(self, app: str, *lines: str, lock: str = "requirements-cpu.txt") -> None:
        """Write ``lines`` as the pins of an app, and as its lock without hashes."""
        python = f"# python: {'.'.join(VERSION.split('.')[:2])}"
        source = self.root / "apps" / app
        (source / "requirements.in").write_text("\n".join([f"# {app}'s own words", python, *lines, ""]))
        (source / lock).write_text("\n".join([f"# Made of {app}'s", *lines, ""]))

    def start(self, app: str = "toy", run: str = "run") -> subprocess.Popen[str]:
        words = ["weigh"] if app == "bench" else ["--dataset=mnist-5k"]
        words = ["1", *words, f"--run-dir={self.work / run}-{app}"]
        return self.project.script(app, "{python}", "-c", WHICH, "--", *words, environ=self.environ)

    def python(self, app: str = "toy") -> Path:
        """Run the app, and return the folder of its environment."""
        done = end_of(self.start(app))
        assert done.returncode == 0, done.stderr
        executable, first_on_path = json.loads(done.stdout)
        assert Path(executable).parent == Path(first_on_path)
        return Path(executable).parents[1]

    def notes(self) -> list[str]:
        path = self.work / "pip.notes"
        if path.exists():
            return path.read_text().splitlines()
        return []

    def made(self) -> int:
        return sum(note.startswith("venv ") for note in self.notes())


@pytest.fixture
def street(project: ScratchProject, tmp_path: Path) -> Iterator[Street]:
    made = Street(project, tmp_path / "street")
    # The fake pip installs nothing, so the launch script must not check the installed packages.
    source = made.root / "launch" / "samestep_launch" / "environments.py"
    text, count = re.subn(r"(def check_requirements\(.*?\) -> None:\n)", r"\1        return\n", source.read_text())
    assert count == 1
    source.write_text(text)
    yield made
    assert gone(made.project.processes)


def test_the_command_of_an_environment_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """The current folder may be a stranger's run dir."""
    (tmp_path / "importlib.py").write_text("raise SystemExit('a stranger')")
    (tmp_path / "samestep.py").write_text("raise SystemExit('a stranger')")
    command = environments.COMMAND.format(python=sys.executable, start=shlex.quote(environments.START))
    shell = ["sh", "-c", command.replace('"$@"', "--version")]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("samestep ")


def test_the_first_start_makes_the_environment_and_the_next_finds_it(street: Street) -> None:
    done = end_of(street.start())
    assert done.returncode == 0, done.stderr
    first, *_ = done.stderr.splitlines()
    assert first == f"first start: making .venvs/toy with Python {VERSION}, which takes minutes"
    venv = Path(json.loads(done.stdout)[0]).parents[1]
    assert re.fullmatch("[0-9a-f]{12}", venv.name)
    assert os.readlink(street.venvs / "toy") == venv.name
    venv_note, pip_note = street.notes()
    assert venv_note == f"venv {venv}"
    assert pip_note.startswith(f"{venv}/bin/python install --quiet ")
    assert pip_note.endswith(f" --no-deps --require-hashes --only-binary=:all: -r {venv / 'requirements.txt'}")
    assert (venv / "requirements.txt").read_text() == "# Made of toy's\ntorch==1.0\n"
    (path_file,) = venv.glob("lib/python*/site-packages/samestep.pth")
    assert path_file.read_text().splitlines() == [str(street.root / folder) for folder in PACKAGES]
    start = shlex.quote(environments.START)
    assert (venv / "bin" / "samestep").read_text().endswith(f'exec {venv}/bin/python -c {start} "$@"\n')
    again = end_of(street.start())
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
    assert len(street.notes()) == 2


def test_a_project_of_its_own_has_core_as_a_wheel(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage imports core from the wheel. If the wheel changes, the script makes a new environment."""
    wheel = street.root / "vendor" / "samestep-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        for folder, package in PACKAGES.items():
            for path in (street.root / folder / package).rglob("*.py"):
                file.write(path, path.relative_to(street.root / folder))
    (street.work / "installed").mkdir()
    installed = [(street.root / folder).rename(street.work / "installed" / folder) for folder in PACKAGES]
    lacking = {**street.environ, "PYTHONPATH": street.environ["PYTHONPATH"].replace(f":{street.root / 'core'}:", ":")}
    street.environ["PYTHONPATH"] += "".join(f":{folder}" for folder in installed)
    first = street.python()
    assert street.notes()[-1].endswith(f" --no-deps --no-index {wheel}")

    street.environ, complete = lacking, street.environ
    done = end_of(street.start())
    assert (done.returncode, done.stdout) == (2, "")
    install = f"{first}/bin/python -m pip install {wheel}"
    assert done.stderr == f"error: {first}/bin/python lacks samestep: {install}; or unset PYTHON to have one made\n"

    street.environ = {**complete, "PYTHONPATH": f"{street.root}:{complete['PYTHONPATH']}"}
    for other in (street.root / "samestep.py", street.root / "samestep" / "__init__.py"):
        other.parent.mkdir(exist_ok=True)
        other.touch()
        done = end_of(street.start())
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: {other} hides the package samestep: take it off PYTHONPATH\n"

    street.environ = complete
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr("samestep/more.py", "")
    assert street.python() != first
    assert [pin[:2] for pin in Environment(street.root, "toy").pins()] == [("torch", "1.0"), ("samestep", "0.1.0")]


def test_what_is_there_is_used_without_the_python_that_made_it(street: Street) -> None:
    venv = street.python()
    shutil.rmtree(street.bin)
    assert street.python() == venv


def test_apps_with_equal_locks_share_one(street: Street) -> None:
    """Comments, blank lines and the order of a lock's lines do not count."""
    street.require("toy", "torch==1.0", "numpy==2.0")
    street.require("bench", "", "numpy==2.0  # arrays", "# python: 3", "torch==1.0", "")
    assert street.python("toy") == street.python("bench")
    assert street.made() == 1
    assert {os.readlink(street.venvs / app) for app in ("toy", "bench")} == {street.python().name}


def test_first_starts_at_once_make_one(street: Street) -> None:
    """Three concurrent first starts of two apps make one environment."""
    done = [end_of(job) for job in [street.start("toy"), street.start("bench"), street.start("bench", "other")]]
    assert [each.returncode for each in done] == [0, 0, 0]
    assert len({json.loads(each.stdout)[0] for each in done}) == 1
    assert sum("first start: " in each.stderr for each in done) == 1
    assert street.made() == 1


def test_another_lock_makes_another_and_leaves_the_old_one_as_it_was(street: Street) -> None:
    old = street.python()
    (old / "mine").write_text("")
    street.require("toy", "torch==1.1")
    new = street.python()
    assert new != old
    assert os.readlink(street.venvs / "toy") == new.name
    assert (old / "mine").exists()
    assert (old / "bin" / "python").exists()
    assert street.made() == 2


LOCK = "torch==1.0 \\\n    --hash=sha256:01\n    # via x\nnumpy==2.0 \\\n    --hash=sha256:02\n"
CONTENT = {
    "apps/toy/requirements.in": "# horovod==0.1 is built by setup.sh\n",
    "apps/toy/requirements-cpu.txt": LOCK,
    "apps/toy/requirements-cuda.txt": "torch==1.0\n",
    "apps/toy/setup.sh": "# builds from: build.py tools/more.txt\n",
    "apps/toy/build.py": "0",
    "apps/toy/tools/more.txt": "0",
    "apps/toy/other.py": "0",
    "pyproject.toml": "[project]\n",
}


@pytest.mark.parametrize(
    ("path", "content", "counts"),
    [
        ("apps/toy/requirements.in", "# horovod==0.2 is built by setup.sh\n", True),
        ("apps/toy/requirements.in", "# horovod==0.1 is built by setup.sh\ntorch==1.0\n", False),  # the lock decides
        ("apps/toy/requirements-cpu.txt", LOCK.replace("2.0", "2.1"), True),
        ("apps/toy/requirements-cpu.txt", LOCK.replace("02", "03"), True),
        ("apps/toy/requirements-cpu.txt", f"# Some words.\n\n{LOCK}", False),
        ("apps/toy/requirements-cpu.txt", LOCK.replace("via x", "via y"), False),
        ("apps/toy/requirements-cuda.txt", "torch==1.1\n", True),  # the environment may use this lock
        ("apps/toy/setup.sh", CONTENT["apps/toy/setup.sh"] + "exit 1\n", True),
        ("apps/toy/build.py", "1", True),
        ("apps/toy/tools/more.txt", "1", True),
        ("apps/toy/other.py", "1", False),
        ("pyproject.toml", "[project]\nname = 'x'\n", False),  # only the lock counts
    ],
)
def test_what_decides_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, content: str, counts: bool
) -> None:
    monkeypatch.setattr(environments, "has_nvidia", lambda: False)
    monkeypatch.delenv("SAMESTEP_LOCK", raising=False)
    for name, text in CONTENT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def key(version: str = "3.11.7", settings: dict[str, str] | None = None, allowed: tuple[str, ...] = ()) -> str:
        environment = Environment(tmp_path, "toy")
        locks = [environments._allow(lock.read_text(), {"torch": allowed}) for lock in environment.locks()]
        return environment._key(version, settings or {}, locks)

    before = key()
    assert re.fullmatch("[0-9a-f]{12}", before)
    assert before not in {key("3.11.8"), key(settings={"WITH": "1"}), key(allowed=("03",))}
    monkeypatch.setattr(environments, "has_nvidia", lambda: True)
    assert key() != before
    monkeypatch.setattr(environments, "has_nvidia", lambda: False)
    (tmp_path / path).write_text(content)
    assert (key() != before) == counts


def test_what_no_wheel_is_published_of_is_built_into_it(street: Street) -> None:
    note = f'echo "setup $1" >> {shlex.quote(str(street.work / "pip.notes"))}'
    (street.root / "apps" / "toy" / "setup.sh").write_text(f"{note}\n")
    python = street.python() / "bin" / "python"
    assert street.notes()[-1] == f"setup {python}"


@pytest.mark.soak
def test_the_options_may_say_what_is_built(street: Street) -> None:
    """Each requested build has a separate environment, made once."""
    note = f'echo "setup ${{WITH-nothing}}" >> {shlex.quote(str(street.work / "pip.notes"))}'
    (street.root / "apps" / "toy" / "setup.sh").write_text(f"{note}\n")
    with (street.root / "apps" / "toy" / "options.py").open("a") as file:
        file.write("\ndef setup_environment(options):\n    return {'WITH': 'more'} if options.seed == 2 else {}\n")
        file.write("\nHOOKS = AppHooks(setup_environment=setup_environment)\n")
    found: list[str] = []
    for seed in (1, 2, 1, 2):
        words = ["1", "--dataset=mnist-5k", f"--run-dir={street.work / str(len(found))}", f"--seed={seed}"]
        done = end_of(street.project.script("toy", "{python}", "-c", WHICH, "--", *words, environ=street.environ))
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)[0])
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert [note for note in street.notes() if note.startswith("setup")] == ["setup nothing", "setup more"]


@pytest.mark.soak
def test_another_full_version_of_python_makes_another(street: Street) -> None:
    """The existing environment stays in use, because its Python is the same."""
    venv = street.python("toy")
    (street.work / "version").write_text(f"{VERSION}99")
    assert street.python("bench") != venv
    assert street.python("toy") == venv
    assert street.made() == 2


def test_a_failed_one_is_said_and_made_anew(street: Street) -> None:
    (street.work / "pip.fails").write_text("")
    done = end_of(street.start())
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^error: could not make \.venvs/toy: `.* -m pip .*` failed", done.stderr, re.MULTILINE)
    assert [path for path in street.venvs.iterdir() if path.is_dir()] == []
    (street.work / "pip.fails").unlink()
    assert street.python().exists()


def test_one_whose_making_was_killed_is_made_anew(street: Street) -> None:
    (street.work / "pip.kills").write_text("")
    assert end_of(street.start()).returncode == -9
    (half,) = [path for path in street.venvs.iterdir() if path.is_dir()]
    (half / "left").write_text("")
    (street.work / "pip.kills").unlink()
    assert street.python() == half
    assert (half / "samestep-stamp").exists()
    assert not (half / "left").exists()
    assert street.made() == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", ["pip", "an index that never answers", "setup.sh"])
def test_a_signal_ends_a_set_up_and_all_that_it_started(street: Street, step: str, number: signal.Signals) -> None:
    """Only the launch script gets the signal."""
    waits = street.work / "pip.waits"
    with socket.create_server(("127.0.0.1", 0)) as index:
        if step == "pip":
            waits.touch()
        elif step == "setup.sh":
            child = shlex.quote("trap '' TERM INT; sleep 600")
            lines = f"bash -c {child} &\ntouch {waits}\nwait\n"
            (street.root / "apps" / "toy" / "setup.sh").write_text(lines)
        else:
            street.environ["PYTHONPATH"] = street.environ["PYTHONPATH"].partition(":")[2]  # removes the fake pip
            url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
            street.environ |= {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
            street.environ |= {"PIP_CONFIG_FILE": os.devnull}
            street.require("toy", f"torch==1.0 \\\n    --hash=sha256:{'0' * 64}")

        def begun() -> bool:
            if step.startswith("an index"):
                return bool(select.select([index], [], [], 0)[0])
            return waits.exists() == (step == "setup.sh")

        process = street.start()
        wait_for(begun)
        assert len(street.project.processes()) > 1
        process.send_signal(number)
        done = end_of(process)
    assert (done.returncode, done.stdout) == (128 + number, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert street.project.processes() == []
    assert [path for path in street.venvs.iterdir() if path.is_dir()] == []


def test_a_samestep_on_pythonpath_does_not_hide_the_projects(street: Street) -> None:
    (street.root / "samestep.py").write_text("raise SystemExit('another samestep')")
    street.environ["PYTHONPATH"] = f"{street.root}:{street.environ['PYTHONPATH']}"
    words = ["-c", "import samestep; print(samestep.__file__)", "--", "1", "--dataset=mnist-5k"]
    words = ["toy", "{python}", *words, f"--run-dir={street.work / 'run'}"]
    done = end_of(street.project.script(*words, environ=street.environ))
    assert (done.returncode, done.stdout) == (0, f"{street.root}/core/samestep/__init__.py\n"), done.stderr


def test_a_pythonhome_is_not_that_of_the_environment(street: Street) -> None:
    street.environ["PYTHONHOME"] = sys.base_prefix
    words = ["toy", "{python}", "-c", "import os; print(os.environ.get('PYTHONHOME'))", "--", "1", "--dataset=mnist-5k"]
    done = end_of(street.project.script(*words, f"--run-dir={street.work / 'run'}", environ=street.environ))
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_a_folder_from_before_they_were_shared_becomes_a_link(street: Street) -> None:
    (street.venvs / "toy" / "bin").mkdir(parents=True)
    (street.venvs / "toy" / "bin" / "python").symlink_to(sys.executable)
    (street.venvs / "toy" / "samestep-stamp").write_text("0" * 64)
    venv = street.python()
    assert (street.venvs / "toy").is_symlink()
    assert (street.venvs / "toy").resolve() == venv


def test_a_link_that_leads_nowhere_is_replaced(street: Street) -> None:
    street.venvs.mkdir()
    (street.venvs / "toy").symlink_to("gone")
    assert (street.venvs / "toy").resolve() != street.python()
    assert (street.venvs / "toy").exists()


def test_a_dry_run_names_the_link_and_makes_nothing(street: Street) -> None:
    done = end_of(street.project.script("toy", "{python}", "--", "1", "--dry-run", environ=street.environ))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{street.venvs / 'toy' / 'bin' / 'python'}\n", "")
    assert not street.venvs.exists()


def test_without_a_place_or_a_python_it_is_one_line(street: Street) -> None:
    street.venvs.write_text("")
    done = end_of(street.start())
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot make {street.venvs}/")
    assert len(done.stderr.splitlines()) == 1
    (street.root / "apps" / "toy" / "requirements.in").write_text("# python: 3.0 2.7\n")
    done = end_of(street.start())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("error: no Python 3.0, 2.7 with the venv module was found: ")


def test_a_pin_may_be_satisfied_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A build for other hardware has another name, and satisfies the pin too."""
    (tmp_path / "apps" / "toy").mkdir(parents=True)
    pins = "# Some words.\nno-such-package==1.0  # or no-such-package-gpu\n# or so\n"
    (tmp_path / "apps" / "toy" / "requirements.in").write_text(pins)
    with pytest.raises(ConfigError, match=r" lacks no-such-package or no-such-package-gpu: .* unset PYTHON"):
        Environment(tmp_path, "toy").check_requirements()
    monkeypatch.syspath_prepend(tmp_path)
    for name, version, message in (
        ("no-such-package-gpu", "1.0+cu126", ""),
        ("no-such-package-gpu", "1.1", "warning: no-such-package-gpu 1.1 is installed; this app was tested with 1.0\n"),
        ("no-such-package", "1.0", ""),
    ):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()
        Environment(tmp_path, "toy").check_requirements()
        assert capfd.readouterr().err == message
        shutil.rmtree(folder)


# --- locks ---------------------------------------------------------------------------------------------------------


class Index:
    """A folder of generated wheels. The real pip searches no other place."""

    def __init__(self, street: Street) -> None:
        self.folder = street.work / "wheels"
        self.street = street
        self.folder.mkdir()
        street.environ["PYTHONPATH"] = street.environ["PYTHONPATH"].partition(":")[2]  # removes the fake pip
        street.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder), "PIP_CONFIG_FILE": os.devnull}

    def wheel(self, version: str, content: str = "") -> str:
        """Write the wheel of a version, or replace it, and return its SHA-256."""
        path = self.folder / f"tiny-{version}-py3-none-any.whl"
        info = f"tiny-{version}.dist-info"
        files = {
            "tiny.py": content,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        }
        with zipfile.ZipFile(path, "w") as file:
            for name, text in files.items():
                file.writestr(zipfile.ZipInfo(name), text)  # a fixed date, so that equal files have equal hashes
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def installed(self, **environ: str) -> str:
        """Start the app, and return the source of the installed module tiny."""
        self.street.environ |= environ
        (module,) = self.street.python().glob("lib/python*/site-packages/tiny.py")
        return module.read_text()

    def refused(self, **environ: str) -> str:
        """Start the app, check that no environment is made, and return the last line of stderr."""
        self.street.environ |= environ
        before = {*self.street.venvs.glob("*/bin")}
        done = end_of(self.street.start())
        assert (done.returncode, done.stdout) == (1, ""), done
        assert {*self.street.venvs.glob("*/bin")} == before
        *others, last = done.stderr.splitlines()
        assert not [line for line in others if re.search("(?i)error|hash", line)], done.stderr
        return last


def test_a_wheel_that_the_lock_does_not_list_is_refused_until_it_is_allowed(street: Street) -> None:
    """The wheel has the same name and version but other content. The script reports pip's lines as one line."""
    index = Index(street)
    published = index.wheel("1.0", "# published")
    street.require("toy", f"tiny==1.0 \\\n    --hash=sha256:{published}")
    ours = index.wheel("1.0", "# ours")
    message = (
        f"error: tiny: {index.folder}/tiny-1.0-py3-none-any.whl has SHA-256 {ours}, which toy's lock does not list: "
        f'it is not the published file; if it is yours, export SAMESTEP_ALLOW="tiny sha256:{ours}" allows it'
    )
    assert index.refused() == message
    assert index.refused(SAMESTEP_ALLOW=f"tiny sha256:{'0' * 64} other sha256:{ours}") == message
    assert index.installed(SAMESTEP_ALLOW=f"other sha256:{published} Tiny sha256:{ours}") == "# ours"
    assert index.refused(SAMESTEP_ALLOW="") == message  # without the variable, the script does not use that environment
    index.wheel("1.0", "# published")
    assert index.installed() == "# published"
    street.environ["SAMESTEP_ALLOW"] = f"tiny {ours}"
    done = end_of(street.start())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith(f"error: SAMESTEP_ALLOW=tiny {ours}: write ")


@pytest.mark.soak
def test_where_there_is_no_build_for_cpus_the_other_lock_is_taken(street: Street) -> None:
    """The script reports the choice before it downloads anything."""
    path = street.root / "launch" / "samestep_launch" / "environments.py"
    text, count = re.subn(r'(?m)^CPU_INDEX = ".*"', 'CPU_INDEX = "file:///nowhere"', path.read_text())
    text, more = re.subn(r"(def has_nvidia\(\) -> bool:\n)", r"\1    return False\n", text)
    assert (count, more) == (1, 1)
    path.write_text(text)
    index = Index(street)
    cpu = index.wheel("1.0+cpu", "# for CPUs")
    plain = index.wheel("1.0", "# for GPUs")
    street.require("toy", f"tiny==1.0+cpu \\\n    --hash=sha256:{cpu}")
    street.require("toy", f"tiny==1.0 \\\n    --hash=sha256:{plain}", lock="requirements-cuda.txt")
    assert index.installed() == "# for CPUs"

    shutil.rmtree(street.venvs)
    (index.folder / "tiny-1.0+cpu-py3-none-any.whl").unlink()
    nowhere = "no tiny 1.0+cpu is found, nor at file:///nowhere: "
    assert index.refused(SAMESTEP_LOCK="cpu").startswith(f"error: {nowhere}set PIP_FIND_LINKS")
    street.environ["SAMESTEP_LOCK"] = ""
    done = end_of(street.start())
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith(f"{nowhere}taking the build for NVIDIA GPUs") for line in done.stderr.splitlines()) == 1
    assert index.installed() == "# for GPUs"
    ours = index.wheel("1.0+ours", "# ours")  # any local version is allowed
    assert index.installed(SAMESTEP_LOCK="cpu", SAMESTEP_ALLOW=f"tiny sha256:{ours}") == "# ours"


def test_what_a_machine_has_or_is_told_chooses_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMESTEP_LOCK", raising=False)
    app = tmp_path / "apps" / "toy"
    app.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"requirements-cpu.txt is missing: `bash scripts/test.sh -e locks -- toy` makes it"
    ):
        Environment(tmp_path, "toy").locks()

    def names(nvidia: bool) -> list[str]:
        monkeypatch.setattr(environments, "has_nvidia", lambda: nvidia)
        return [path.name for path in Environment(tmp_path, "toy").locks()]

    (app / "requirements-cpu.txt").touch()
    assert names(nvidia=False) == names(nvidia=True) == ["requirements-cpu.txt"]
    (app / "requirements-cuda.txt").touch()
    assert names(nvidia=True) == ["requirements-cuda.txt"]
    assert names(nvidia=False) == ["requirements-cpu.txt", "requirements-cuda.txt"]
    monkeypatch.setenv("SAMESTEP_LOCK", "cpu")
    assert names(nvidia=True) == ["requirements-cpu.txt"]
    monkeypatch.setenv("SAMESTEP_LOCK", "rocm")
    with pytest.raises(ConfigError, match=r"^SAMESTEP_LOCK=rocm: .*-rocm.txt is missing: name one of cpu, cuda"):
        names(nvidia=True)


def test_a_pin_that_was_changed_without_its_lock_is_told(street: Street) -> None:
    (street.root / "apps" / "toy" / "requirements-cpu.txt").write_text("torch==1.1+cpu\n")
    done = end_of(street.start())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: apps/toy/requirements.in has torch==1.0, but its lock lacks it: `bash scripts/test.sh -e locks -- toy` "
        "updates the lock\n"
    )
    assert street.made() == 0
