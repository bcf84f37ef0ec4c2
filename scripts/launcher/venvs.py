"""Which Python: the one that PYTHON names, as it is, or ``.venvs/<app>``, made from the app's pinned requirements.

It runs on the system's Python, with the standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from samestep import FatalError, UserError

from launcher.supervise import read_text, say

ROOT = Path(__file__).resolve().parents[2]
STAMP = "samestep-stamp"


def folder(app: str) -> Path:
    """Where the app finds its environment: a link to one that is shared by all apps with equal requirements."""
    return ROOT / ".venvs" / app


def given_python() -> str | None:
    """The interpreter named by PYTHON, with core on PYTHONPATH; None when the variable is not set."""
    given = os.environ.get("PYTHON")
    if not given:
        return None
    python = shutil.which(given)
    if python is None:
        raise UserError(f"PYTHON={given} is not an executable: name a Python interpreter, or unset it")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "core"), os.environ.get("PYTHONPATH")]))
    return python


def ensure(app: str, settings: Mapping[str, str]) -> str:
    """The Python of the app's environment, which is made unless there is one of the same Python and requirements.

    ``settings`` are variables that the app's setup.sh builds by: others make another environment.

    An environment is never changed: other requirements make another one, so a running job keeps what it started with.
    That is also why the Python is named by the environment's own folder and not by the link.
    """
    link = folder(app)
    venv = link.resolve()
    version = _stamp(venv)
    if version is None or venv.name != _key(app, version, settings):
        base, version = _find_python(app)
        venv = link.with_name(_key(app, version, settings))
        with _lock(venv):  # two first starts at once: the second waits and finds it made
            if _stamp(venv) is None:
                say(f"first start: making .venvs/{app} with Python {version}; pip's own progress follows")
                _make(app, venv, base, settings)
                (venv / STAMP).write_text(version)
            _link(link, venv)
    return str(venv / "bin" / "python")


def _stamp(venv: Path) -> str | None:
    """The version of its Python, written last: only a whole environment has a stamp."""
    return read_text(venv / STAMP) if (venv / "bin" / "python").exists() else None


def _key(app: str, version: str, settings: Mapping[str, str]) -> str:
    """The name of the environment: 12 hexadecimal digits of what decides its content."""
    source = ROOT / "apps" / app
    requirements, setup = (source / "requirements.txt").read_text(), read_text(source / "setup.sh") or ""
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in requirements.splitlines()]
    built = re.findall(r"^# (\S+==\S+) is built by setup\.sh", requirements, re.MULTILINE)
    built_from = " ".join(re.findall(r"^# builds from: (.*)", setup, re.MULTILINE)).split()
    decides = [
        version,
        sorted(filter(None, lines)),
        sorted(built),
        (ROOT / "core" / "pyproject.toml").read_text(),
        [setup, *((source / name).read_text() for name in built_from)],
        *([dict(sorted(settings.items()))] if settings else []),
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


def _lock(venv: Path) -> IO[str]:
    """Lock the making of an environment until the file that is returned is closed."""
    path = venv.with_name(f".{venv.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as problem:
        raise UserError(f"cannot make {path}: {problem.strerror}: or name an interpreter by PYTHON=") from problem
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _make(app: str, venv: Path, base: str, settings: Mapping[str, str]) -> None:
    """Make it with the Python ``base``, all but its stamp. Raises FatalError."""
    shutil.rmtree(venv, ignore_errors=True)  # half of one, of a start that was stopped
    requirements, setup = ROOT / "apps" / app / "requirements.txt", ROOT / "apps" / app / "setup.sh"
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    commands = [[base, "-m", "venv", str(venv)], [*pip, "-r", str(requirements), "-e", str(ROOT / "core")]]
    if setup.exists():  # what no wheel is published of
        commands.append(["bash", str(setup), python])
    for command in commands:
        # pip talks on stdout; ours belongs to the result.
        if subprocess.run(command, env={**os.environ, **settings}, stdout=sys.stderr, check=False).returncode != 0:
            raise FatalError(f"could not make .venvs/{app}: `{shlex.join(command)}` failed, as it says above")


def _link(link: Path, venv: Path) -> None:
    """Let ``link`` lead to ``venv``, at once for whoever follows it."""
    if link.is_dir() and not link.is_symlink():  # the environment itself, as it was before they were shared
        shutil.rmtree(link)
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(venv.name)
    temporary.replace(link)


def _find_python(app: str) -> tuple[str, str]:
    """A Python that can make environments, and its version, one that the app's pins have wheels for: 3.11 first."""
    requirements = (ROOT / "apps" / app / "requirements.txt").read_text()
    line = re.search(r"^# python: (.*)$", requirements, re.MULTILINE)
    versions = line.group(1).split() if line else ["3.11"]
    for command in [*(f"python{version}" for version in versions), "python3", "python"]:
        probe = "import platform, venv, ensurepip; print(platform.python_version())"
        with contextlib.suppress(OSError):
            answer = subprocess.run([command, "-c", probe], capture_output=True, text=True, check=False)
            version = answer.stdout.strip()
            if answer.returncode == 0 and ".".join(version.split(".")[:2]) in versions:
                return command, version
    raise UserError(
        f"no Python {', '.join(versions)} with the venv module was found: install one (Debian: apt-get install "
        "python3.11-venv), or name an interpreter that has the requirements by PYTHON=/path/to/python"
    )


def check_requirements(app: str) -> None:
    """Every pinned package must be there; another version than the tested one is said.

    A pin in a comment is of what the app's setup.sh builds. ``name==pin  # or other`` may be satisfied by ``other``,
    the same package built for other hardware.
    """
    setup = ROOT / "apps" / app / "setup.sh"
    for name, pin, other in _pins(app):
        names = [name, other] if other else [name]
        found = next(((each, version) for each in names if (version := _installed(each))), None)
        if found is None:
            install = f"{sys.executable} -m pip install -r apps/{app}/requirements.txt"
            install += f", then bash {setup} {sys.executable}" if setup.exists() else ""
            raise UserError(
                f"{sys.executable} lacks {' or '.join(names)}: {install}; or unset PYTHON to have .venvs/{app} made"
            )
        if found[1].partition("+")[0] != pin:
            say(f"warning: {found[0]} {found[1]} is installed; this app was tested with {pin}")


def _pins(app: str) -> list[tuple[str, str, str]]:
    """Each pinned package of an app: name, version, and what else may stand for it, or ""."""
    requirements = (ROOT / "apps" / app / "requirements.txt").read_text()
    return re.findall(r"^(?:# )?([\w.-]+)==(\S+)(?: +# or ([\w.-]+))?", requirements, re.MULTILINE)


def versions(app: str) -> dict[str, str]:
    """Python's version, and those of the pinned packages that are installed: what machines of one job must share."""
    found = {name: _installed(name) for name, _, _ in _pins(app)}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, **{name: version for name, version in found.items() if version}}


def _installed(name: str) -> str | None:
    """The version of a package in this Python; None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
