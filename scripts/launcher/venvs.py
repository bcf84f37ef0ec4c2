"""Which Python: the one that PYTHON names, as it is, or ``.venvs/<app>``, made from the app's pinned requirements.

It runs on the system's Python, with the standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from samestep import FatalError, UserError
from launcher.supervise import read_text, say

ROOT = Path(__file__).resolve().parents[2]


def folder(app: str) -> Path:
    """Where the app's own environment is, or will be."""
    return ROOT / ".venvs" / app


def make_folder(path: Path) -> None:
    """Raises UserError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"cannot make {path}: {problem.strerror}: name another place") from problem


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


def ensure(app: str) -> str:
    """Make ``.venvs/<app>`` from the app's requirements and core, unless its stamp says that it is up to date."""
    venv = folder(app)
    requirements, setup = ROOT / "apps" / app / "requirements.txt", ROOT / "apps" / app / "setup.sh"
    sources = [path for path in (requirements, setup, ROOT / "core" / "pyproject.toml") if path.exists()]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp, python = venv / "samestep-stamp", venv / "bin" / "python"
    if read_text(stamp) == wanted and python.exists():
        return str(python)
    make_folder(venv.parent)
    with (venv.parent / f".{app}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two first starts at once: the second waits and finds it made
        if read_text(stamp) == wanted and python.exists():
            return str(python)
        base, version = _find_python(requirements)
        say(f"first start: making .venvs/{app} with Python {version}; pip's own progress follows")
        shutil.rmtree(venv, ignore_errors=True)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        commands = [[base, "-m", "venv", str(venv)], [*pip, "-r", str(requirements), "-e", str(ROOT / "core")]]
        if setup.exists():  # what no wheel is published of
            commands.append(["bash", str(setup), str(python)])
        for command in commands:
            # pip talks on stdout; ours belongs to the result.
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
                raise FatalError(f"could not make .venvs/{app}: `{shlex.join(command)}` failed, as it says above")
        stamp.write_text(wanted)
    return str(python)


def _find_python(requirements: Path) -> tuple[str, str]:
    """A Python that can make environments, of a version the app's pins have wheels for: 3.11 first."""
    line = re.search(r"^# python: (.*)$", requirements.read_text(), re.MULTILINE)
    versions = line.group(1).split() if line else ["3.11"]
    for command in [*(f"python{version}" for version in versions), "python3", "python"]:
        probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        with contextlib.suppress(OSError):
            answer = subprocess.run([command, "-c", probe], capture_output=True, text=True, check=False)
            if answer.returncode == 0 and answer.stdout.strip() in versions:
                return command, answer.stdout.strip()
    raise UserError(
        f"no Python {', '.join(versions)} with the venv module was found: install one (Debian: apt-get install "
        "python3.11-venv), or name an interpreter that has the requirements by PYTHON=/path/to/python"
    )


def check_requirements(app: str) -> None:
    """Every pinned package must be there; another version than the tested one is said.

    A pin in a comment is of what the app's setup.sh builds.
    """
    from importlib.metadata import PackageNotFoundError, version

    setup = ROOT / "apps" / app / "setup.sh"
    for name, pin in re.findall(
        r"^(?:# )?([\w.-]+)==(\S+)", (ROOT / "apps" / app / "requirements.txt").read_text(), re.MULTILINE
    ):
        try:
            found = version(name)
        except PackageNotFoundError:
            install = f"{sys.executable} -m pip install -r apps/{app}/requirements.txt"
            install += f", then bash {setup} {sys.executable}" if setup.exists() else ""
            raise UserError(
                f"{sys.executable} lacks {name}: {install}; or unset PYTHON to have .venvs/{app} made"
            ) from None
        if found.partition("+")[0] != pin:
            say(f"warning: {name} {found} is installed; this app was tested with {pin}")
