"""Environments: shared by apps with equal requirements, made once, whole or not at all, and never changed.

The launch script makes them in a house of its own, with a base Python whose `venv` leaves out pip, and a `pip` that
notes what it was asked to install. Everything else is real.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from house import House, end_of, gone
from launcher import venvs
from samestep import UserError

# On PATH as python3 and python3.11. It claims to be of another version where a file says so.
BASE = """#!/usr/bin/env bash
if [ "$1 $2" = "-m venv" ]; then
  echo "venv $3" >> {notes}
  exec {python} -m venv --without-pip "$3"
elif [ -e {version} ] && [[ "$2" = *python_version* ]]; then
  exec cat {version}
fi
exec {python} "$@"
"""
# On PYTHONPATH: notes its words and the interpreter; fails, or dies, where a file tells it to.
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
    os.killpg(0, signal.SIGKILL)
"""
WHICH = "import json, os, sys; print(json.dumps([sys.executable, os.environ['PATH'].split(':')[0]]))"
VERSION = platform.python_version()


class Street:
    """A house in which no PYTHON is given."""

    def __init__(self, house: House, root: Path) -> None:
        shutil.copytree(house.root, root, symlinks=True)
        self.root, self.work, self.venvs, self.house = root, house.work, root / ".venvs", House(root, house.work)
        self.house.mark = house.mark
        packages = self.work / "packages"
        (packages / "pip").mkdir(parents=True)
        (packages / "pip" / "__init__.py").write_text("")
        (packages / "pip" / "__main__.py").write_text(PIP.format(work=str(self.work)))
        self.bin = self.work / "bin"
        self.bin.mkdir()
        python = self.bin / f"python{'.'.join(VERSION.split('.')[:2])}"
        base = os.path.realpath(Path(sys.base_prefix, "bin", "python3"))
        notes, version = self.work / "pip.notes", self.work / "version"
        python.write_text(BASE.format(python=base, notes=notes, version=version))
        python.chmod(0o755)
        (self.bin / "python3").symlink_to(python.name)  # pyenv's would put its own folder before this one
        installed = Path(numpy.__file__).parents[1]  # what pip would have brought
        self.environ = {
            "PYTHON": "",
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": f"{packages}:{root / 'core'}:{installed}",
        }
        for app in ("toy", "bench"):
            self.require(app, "torch==1.0")

    def require(self, app: str, *lines: str) -> None:
        python = f"# python: {'.'.join(VERSION.split('.')[:2])}"
        text = "\n".join([f"# {app}'s own words", python, *lines, ""])
        (self.root / "apps" / app / "requirements.txt").write_text(text)

    def start(self, app: str = "toy", run: str = "run") -> subprocess.Popen[str]:
        words = ["weigh"] if app == "bench" else ["--dataset=mnist-5k"]
        words = ["1", *words, f"--run-dir={self.work / run}-{app}"]
        return self.house.script(app, "{python}", "-c", WHICH, "--", *words, environ=self.environ)

    def python(self, app: str = "toy") -> Path:
        """Run the app; returns the folder of the environment in which it ran."""
        done = end_of(self.start(app))
        assert done.returncode == 0, done.stderr
        executable, first_on_path = json.loads(done.stdout)
        assert Path(executable).parent == Path(first_on_path)
        return Path(executable).parents[1]

    def notes(self) -> list[str]:
        path = self.work / "pip.notes"
        return path.read_text().splitlines() if path.exists() else []

    def made(self) -> int:
        return sum(note.startswith("venv ") for note in self.notes())


@pytest.fixture
def street(house: House, tmp_path: Path) -> Iterator[Street]:
    made = Street(house, tmp_path / "street")
    # Nothing is installed in it: requirements are compared with the imported packages elsewhere.
    venvs = made.root / "scripts" / "launcher" / "venvs.py"
    text, count = re.subn(r"(def check_requirements\(.*?\) -> None:\n)", r"\1    return\n", venvs.read_text())
    assert count == 1
    venvs.write_text(text)
    yield made
    assert gone(made.house.processes)


def test_the_first_start_makes_the_environment_and_the_next_finds_it(street: Street) -> None:
    done = end_of(street.start())
    assert done.returncode == 0, done.stderr
    first, *_ = done.stderr.splitlines()
    assert first == f"first start: making .venvs/toy with Python {VERSION}; pip's own progress follows"
    venv = Path(json.loads(done.stdout)[0]).parents[1]
    assert re.fullmatch("[0-9a-f]{12}", venv.name)
    assert os.readlink(street.venvs / "toy") == venv.name
    venv_note, pip_note = street.notes()
    assert venv_note == f"venv {venv}"
    requirements = street.root / "apps" / "toy" / "requirements.txt"
    assert pip_note.startswith(f"{venv}/bin/python install ")
    assert pip_note.endswith(f" -r {requirements} -e {street.root / 'core'}")
    again = end_of(street.start())
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
    assert len(street.notes()) == 2


def test_what_is_there_is_used_without_the_python_that_made_it(street: Street) -> None:
    venv = street.python()
    shutil.rmtree(street.bin)
    assert street.python() == venv


def test_apps_with_equal_requirements_share_one(street: Street) -> None:
    """Comments, blank lines and order do not count."""
    street.require("toy", "torch==1.0", "numpy==2.0")
    street.require("bench", "", "numpy==2.0  # arrays", "# python: 3", "torch==1.0", "")
    assert street.python("toy") == street.python("bench")
    assert street.made() == 1
    assert {os.readlink(street.venvs / app) for app in ("toy", "bench")} == {street.python().name}


def test_first_starts_at_once_make_one(street: Street) -> None:
    """Also those of two apps."""
    done = [end_of(job) for job in [street.start("toy"), street.start("bench"), street.start("bench", "other")]]
    assert [each.returncode for each in done] == [0, 0, 0]
    assert len({json.loads(each.stdout)[0] for each in done}) == 1
    assert sum("first start: " in each.stderr for each in done) == 1
    assert street.made() == 1


def test_other_requirements_make_another_and_leave_the_old_one_as_it_was(street: Street) -> None:
    old = street.python()
    (old / "mine").write_text("")
    street.require("toy", "torch==1.1")
    new = street.python()
    assert new != old
    assert os.readlink(street.venvs / "toy") == new.name
    assert (old / "mine").exists()
    assert (old / "bin" / "python").exists()
    assert street.made() == 2


REQUIREMENTS = "# horovod==0.1 is built by setup.sh\ntorch==1.0\nnumpy==2.0\n"
CONTENT = {
    "apps/toy/requirements.txt": REQUIREMENTS,
    "apps/toy/setup.sh": "# builds from: build.py tools/more.txt\n",
    "apps/toy/build.py": "0",
    "apps/toy/tools/more.txt": "0",
    "apps/toy/other.py": "0",
    "core/pyproject.toml": "[project]\n",
}


@pytest.mark.parametrize(
    ("path", "content", "counts"),
    [
        ("apps/toy/requirements.txt", REQUIREMENTS.replace("2.0", "2.1"), True),
        ("apps/toy/requirements.txt", REQUIREMENTS.replace("0.1", "0.2"), True),
        ("apps/toy/requirements.txt", REQUIREMENTS.replace("torch==1.0\n", ""), True),
        ("apps/toy/requirements.txt", f"# Some words.\n\n{REQUIREMENTS}", False),
        ("apps/toy/requirements.txt", REQUIREMENTS.replace("2.0", "2.0  # arrays"), False),
        ("apps/toy/requirements.txt", "".join(sorted(REQUIREMENTS.splitlines(keepends=True))), False),
        ("apps/toy/setup.sh", CONTENT["apps/toy/setup.sh"] + "exit 1\n", True),
        ("apps/toy/build.py", "1", True),
        ("apps/toy/tools/more.txt", "1", True),
        ("apps/toy/other.py", "1", False),
        ("core/pyproject.toml", "[project]\nname = 'x'\n", True),
    ],
)
def test_what_decides_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, content: str, counts: bool
) -> None:
    monkeypatch.setattr(venvs, "ROOT", tmp_path)
    for name, text in CONTENT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = venvs._key("toy", "3.11.7", {})
    assert re.fullmatch("[0-9a-f]{12}", before)
    assert venvs._key("toy", "3.11.8", {}) != before
    assert venvs._key("toy", "3.11.7", {"WITH": "1"}) != before
    (tmp_path / path).write_text(content)
    assert (venvs._key("toy", "3.11.7", {}) != before) == counts


def test_what_no_wheel_is_published_of_is_built_into_it(street: Street) -> None:
    note = f'echo "setup $1" >> {shlex.quote(str(street.work / "pip.notes"))}'
    (street.root / "apps" / "toy" / "setup.sh").write_text(f"{note}\n")
    python = street.python() / "bin" / "python"
    assert street.notes()[-1] == f"setup {python}"


def test_the_options_may_say_what_is_built(street: Street) -> None:
    """What they ask for has an environment of its own, and each is made once."""
    note = f'echo "setup ${{WITH-nothing}}" >> {shlex.quote(str(street.work / "pip.notes"))}'
    (street.root / "apps" / "toy" / "setup.sh").write_text(f"{note}\n")
    with (street.root / "apps" / "toy" / "options.py").open("a") as file:
        file.write("\ndef setup_environment(options):\n    return {'WITH': 'more'} if options.seed == 2 else {}\n")
    found: list[str] = []
    for seed in (1, 2, 1, 2):
        words = ["1", "--dataset=mnist-5k", f"--run-dir={street.work / str(len(found))}", f"--seed={seed}"]
        done = end_of(street.house.script("toy", "{python}", "-c", WHICH, "--", *words, environ=street.environ))
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)[0])
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert [note for note in street.notes() if note.startswith("setup")] == ["setup nothing", "setup more"]


def test_another_full_version_of_python_makes_another(street: Street) -> None:
    """What is there stays in use: its Python has not changed."""
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
    assert not (street.venvs / "toy").exists()
    (half,) = [path for path in street.venvs.iterdir() if path.is_dir()]
    (half / "left").write_text("")
    (street.work / "pip.fails").unlink()
    assert street.python() == half
    assert not (half / "left").exists()


def test_one_whose_making_was_killed_is_made_anew(street: Street) -> None:
    (street.work / "pip.kills").write_text("")
    assert end_of(street.start()).returncode == -9
    (street.work / "pip.kills").unlink()
    assert (street.python() / "samestep-stamp").exists()
    assert street.made() == 2


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
    done = end_of(street.house.script("toy", "{python}", "--", "1", "--dry-run", environ=street.environ))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{street.venvs / 'toy' / 'bin' / 'python'}\n", "")
    assert not street.venvs.exists()


def test_without_a_place_or_a_python_it_is_one_line(street: Street) -> None:
    street.venvs.write_text("")
    done = end_of(street.start())
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot make {street.venvs}/")
    assert len(done.stderr.splitlines()) == 1
    (street.root / "apps" / "toy" / "requirements.txt").write_text("# python: 3.0 2.7\n")
    done = end_of(street.start())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("error: no Python 3.0, 2.7 with the venv module was found: ")


def test_a_pin_may_be_satisfied_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same package built for other hardware: neither is refused for lack of the other."""
    monkeypatch.setattr(venvs, "ROOT", tmp_path)
    (tmp_path / "apps" / "toy").mkdir(parents=True)
    pins = "# Some words.\nno-such-package==1.0  # or no-such-package-gpu\n# or so\n"
    (tmp_path / "apps" / "toy" / "requirements.txt").write_text(pins)
    with pytest.raises(UserError, match=r" lacks no-such-package or no-such-package-gpu: .* unset PYTHON"):
        venvs.check_requirements("toy")
    monkeypatch.syspath_prepend(tmp_path)
    for name, version, said in (
        ("no-such-package-gpu", "1.0+cu126", ""),
        ("no-such-package-gpu", "1.1", "warning: no-such-package-gpu 1.1 is installed; this app was tested with 1.0\n"),
        ("no-such-package", "1.0", ""),
    ):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()
        venvs.check_requirements("toy")
        assert capsys.readouterr().err == said
        shutil.rmtree(folder)
