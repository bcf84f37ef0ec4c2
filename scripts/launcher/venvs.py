"""Which Python: the one that PYTHON names, as it is, or ``.venvs/<app>``, made from one of the app's locks.

A lock, ``apps/<app>/requirements-cpu.txt`` or ``-cuda.txt``, lists every package with the SHA-256 of its files, and
pip installs nothing else. tools/lock.py makes them of ``requirements.in``; SAMESTEP_LOCK chooses one; SAMESTEP_ALLOW
allows a file of one's own.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from samestep import FatalError, UserError

from launcher.supervise import read_text, say

ROOT = Path(__file__).resolve().parents[2]
STAMP = "samestep-stamp"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # has the builds for CPUs that PyPI has not: torch 2.13.0+cpu
# What pip says where a file has another hash than those of the lock, and how it names that file.
MISMATCH = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
WHICH = re.compile(r"^ +([\w.-]+)\S* from (\S+).*?Got +([0-9a-f]{64})", re.DOTALL | re.MULTILINE)


def wheel() -> Path | None:
    """The shared package in a project that is a copy of one app; None where it is the folder ``core``."""
    found = sorted(ROOT.glob("vendor/samestep-*.whl"))
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise UserError(f"vendor/ has {names}: leave one of them there, and name it in tox.ini")
    return found[0] if found else None


def source_of(app: str) -> Path:
    """The folder with an app's requirements and locks; or those of what --track starts, which has its own."""
    return ROOT / "scripts" / "launcher" / app if app == "trackers" else ROOT / "apps" / app


def folder(app: str) -> Path:
    """Where the app finds its environment: a link to one that is shared by all apps with equal locks."""
    return ROOT / ".venvs" / app


def given_python() -> str | None:
    """The interpreter named by PYTHON, with core on PYTHONPATH; None when the variable is not set.

    A wheel of core is not put there: it is to be installed like what the app pins, as its data are read from files.
    """
    given = os.environ.get("PYTHON")
    if not given:
        return None
    python = shutil.which(given)
    if python is None:
        raise UserError(f"PYTHON={given} is not an executable: name a Python interpreter, or unset it")
    if wheel() is None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "core"), os.environ.get("PYTHONPATH")]))
    return python


def ensure(app: str, settings: Mapping[str, str]) -> str:
    """The Python of the app's environment, which is made unless there is one of the same Python and locks.

    ``settings`` are variables that the app's setup.sh builds by: others make another environment.

    An environment is never changed: other locks make another one, so a running job keeps what it started with.
    That is also why the Python is named by the environment's own folder and not by the link.
    """
    link = folder(app)
    venv = link.resolve()
    version = _stamp(venv)
    locks = [_allow(path.read_text(), _allowed()) for path in _locks(app)]
    _check_pins(app, locks[0])
    if version is None or venv.name != _key(app, version, settings, locks):
        base, version = _find_python(app)
        venv = link.with_name(_key(app, version, settings, locks))
        with _lock(venv):  # two first starts at once: the second waits and finds it made
            if _stamp(venv) is None:
                say(f"first start: making .venvs/{app} with Python {version}; pip's own progress follows")
                _make(app, venv, base, settings, locks)
                (venv / STAMP).write_text(version)
            _link(link, venv)
    return str(venv / "bin" / "python")


def _stamp(venv: Path) -> str | None:
    """The version of its Python, written last: only a whole environment has a stamp."""
    return read_text(venv / STAMP) if (venv / "bin" / "python").exists() else None


def _key(app: str, version: str, settings: Mapping[str, str], locks: Sequence[str]) -> str:
    """The name of the environment: 12 hexadecimal digits of what decides its content.

    ``locks`` are those that it may be made of: which of them it is depends on what pip finds.
    """
    source = source_of(app)
    requirements, setup = (source / "requirements.in").read_text(), read_text(source / "setup.sh") or ""
    lines = [[re.sub(r"(^|\s+)#.*", "", line).strip() for line in lock.splitlines()] for lock in locks]
    built = re.findall(r"^# (\S+==\S+) is built by setup\.sh", requirements, re.MULTILINE)
    built_from = " ".join(re.findall(r"^# builds from: (.*)", setup, re.MULTILINE)).split()
    core = wheel()
    decides = [
        version,
        [sorted(filter(None, each)) for each in lines],
        sorted(built),
        hashlib.sha256(core.read_bytes()).hexdigest() if core else str(ROOT / "core"),
        [setup, *((source / name).read_text() for name in built_from)],
        *([dict(sorted(settings.items()))] if settings else []),
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


def _locks(app: str) -> list[Path]:
    """The locks of which this machine can use one, the preferred one first.

    On a machine with an NVIDIA driver that is -cuda, where the app has it; on another one -cpu, or -cuda where no build
    for CPUs is found, as that runs on a CPU too. SAMESTEP_LOCK names another.
    """
    source = source_of(app)
    named = os.environ.get("SAMESTEP_LOCK")
    if named and app != "trackers":  # which has one
        lock = source / f"requirements-{named}.txt"
        if not lock.is_file():
            there = ", ".join(sorted(path.stem.partition("-")[2] for path in source.glob("requirements-*.txt")))
            raise UserError(f"SAMESTEP_LOCK={named}: there is no {lock}: name one of {there}, or unset it")
        return [lock]
    cpu, cuda = source / "requirements-cpu.txt", source / "requirements-cuda.txt"
    if _has_nvidia() and cuda.is_file():
        return [cuda]
    found = [path for path in (cpu, cuda) if path.is_file()]
    if not found:
        raise UserError(f"there is no {cpu}: `bash scripts/test.sh -e locks -- {app}` makes it")
    return found


def _has_nvidia() -> bool:
    """Whether this machine has NVIDIA's driver."""
    driver = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
    return any(path.exists() for path in driver) or shutil.which("nvidia-smi") is not None


def _check_pins(app: str, lock: str) -> None:
    """Raises UserError where requirements.in has what its lock has not, as it was changed since that was made."""
    locked = {(_normal(name), version) for name, version in re.findall(r"^([\w.-]+)==([^\s;+]+)", lock, re.MULTILINE)}
    requirements = (source_of(app) / "requirements.in").read_text()
    for name, more, version in re.findall(r"^([A-Za-z][\w.-]*)(\S*?(?:==(\S+))?)(?= |$)", requirements, re.MULTILINE):
        if (_normal(name), version) not in locked if version else _normal(name) not in dict(locked):
            raise UserError(
                f"{source_of(app).relative_to(ROOT)}/requirements.in has {name}{more}, and its lock has not: "
                f"`bash scripts/test.sh -e locks -- {app}` makes it anew"
            )


def _allowed() -> dict[str, list[str]]:
    """The SHA-256 of files that SAMESTEP_ALLOW, such as "torch sha256:<64 digits>", allows besides the lock's."""
    allowed: dict[str, list[str]] = {}
    words = os.environ.get("SAMESTEP_ALLOW", "")
    pair = r"([\w.-]+) sha256:([0-9a-f]{64})"
    if not re.fullmatch(rf"\s*({pair}\s*)*", words):
        raise UserError(f'SAMESTEP_ALLOW={words}: write "NAME sha256:<64 hexadecimal digits>", as often as it needs')
    for name, digest in re.findall(pair, words):
        allowed.setdefault(_normal(name), []).append(digest)
    return allowed


def _allow(lock: str, allowed: Mapping[str, Sequence[str]]) -> str:
    """The lock with these hashes too; a build under another label (torch 2.13.0+ours) is then taken as well."""
    if not allowed:
        return lock

    def entry(found: re.Match[str]) -> str:
        hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in allowed.get(_normal(found[1]), ()))
        return f"{found[1]}=={found[2]}{found[4]}{hashes}{found[5]}" if hashes else found[0]

    return re.sub(r"^([\w.-]+)==([^\s+;]+)(\+\S+)?(.*?)( \\)$", entry, lock, flags=re.MULTILINE)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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


def _make(app: str, venv: Path, base: str, settings: Mapping[str, str], locks: Sequence[str]) -> None:
    """Make it with the Python ``base``, all but its stamp, or leave nothing. Raises FatalError."""
    shutil.rmtree(venv, ignore_errors=True)  # half of one, of a start that was killed
    setup, python = source_of(app) / "setup.sh", str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    core = wheel()
    try:
        _run(app, [base, "-m", "venv", str(venv)], settings)
        lock, index = _obtainable(python, locks)
        chosen = venv / "requirements.txt"
        chosen.write_text(lock)
        # What it lists and nothing else. Nothing is built from source, as a build would fetch what no lock lists.
        _run(app, [*pip, "--require-hashes", "--only-binary=:all:", *index, "-r", str(chosen)], settings)
        if core:  # it came with the project, and the environment's name tells its content
            _run(app, [*pip, "--no-index", str(core)], settings)
        else:  # all that an editable install does, without a build
            next(venv.glob("lib/python*/site-packages")).joinpath("samestep.pth").write_text(f"{ROOT / 'core'}\n")
        if setup.exists():  # what no wheel is published of
            _run(app, ["bash", str(setup), python], settings)
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise


def _run(app: str, command: Sequence[str], settings: Mapping[str, str]) -> None:
    """Run a step of the set-up, which must succeed. Raises FatalError."""
    held = ""  # what pip says of hashes, in many lines of which we make one
    locked = "--require-hashes" in command
    # pip talks on stdout; ours belongs to the result.
    stderr = subprocess.PIPE if locked else None  # a build's is left to it: it may be a terminal
    with subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=sys.stderr, stderr=stderr, text=True, errors="replace"
    ) as step:
        for line in step.stderr or ():
            if held or line.startswith(MISMATCH):
                held += line
            else:
                print(line, end="", file=sys.stderr, flush=True)
    if step.returncode == 0:
        return
    if found := WHICH.search(held):
        name, file, digest = found[1], unquote(found[2].partition("#")[0]).replace("file://", ""), found[3]
        raise FatalError(
            f"{name}: {file} has SHA-256 {digest}, which {app}'s lock does not list: it is not what was published; "
            f'if it is yours, export SAMESTEP_ALLOW="{name} sha256:{digest}" allows it'
        )
    print(held, end="", file=sys.stderr, flush=True)
    raise FatalError(f"could not make .venvs/{app}: `{shlex.join(command)}` failed, as it says above")


def _obtainable(python: str, locks: Sequence[str]) -> tuple[str, list[str]]:
    """The first of ``locks`` whose builds for CPUs pip finds, and pip's options for that. Raises FatalError.

    They are looked for where pip is set up to look, and then at PyTorch's index too, which may be out of reach. pip is
    asked for versions alone: what it is told to install it would download, GB of it, before it says that hashes differ.
    """
    index, patience = [f"--extra-index-url={CPU_INDEX}"], ["--retries=1", "--timeout=10"]
    wanted = [re.findall(r"^([\w.-]+)==(\S+\+\S+)", lock, re.MULTILINE) for lock in locks]
    for lock, builds in zip(locks, wanted):
        for options in ([], index):
            if all(version in _offered(python, name, [*options, *patience]) for name, version in builds):
                if lock != locks[0]:
                    say(
                        f"no {' '.join(wanted[0][0])} is found, nor at {CPU_INDEX}: taking the build for NVIDIA GPUs, "
                        "which runs on a CPU too and is GB larger"
                    )
                return lock, options
    raise FatalError(
        f"no {' '.join(wanted[0][0])} is found, nor at {CPU_INDEX}: tell pip where, by PIP_FIND_LINKS or PIP_INDEX_URL"
    )


def _offered(python: str, name: str, options: Sequence[str]) -> list[str]:
    """The versions of a package, with their labels, of which pip finds a wheel for this Python."""
    command = [python, "-m", "pip", "index", "versions", name, "--only-binary=:all:", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=False)
    line = re.search(r"^Available versions: (.*)", done.stdout, re.MULTILINE)
    return line[1].split(", ") if line else []


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
    requirements = (source_of(app) / "requirements.in").read_text()
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
    setup, core = source_of(app) / "setup.sh", wheel()
    for name, pin, other in pins(app):
        names = [name, other] if other else [name]
        found = next(((each, version) for each in names if (version := _installed(each))), None)
        if found is None:
            install = f"{sys.executable} -m pip install -r {source_of(app).relative_to(ROOT)}/requirements.in"
            install += f" {core}" if core else ""
            install += f", then bash {setup} {sys.executable}" if setup.exists() else ""
            raise UserError(
                f"{sys.executable} lacks {' or '.join(names)}: {install}; or unset PYTHON to have .venvs/{app} made"
            )
        if found[1].partition("+")[0] != pin:
            say(f"warning: {found[0]} {found[1]} is installed; this app was tested with {pin}")


def pins(app: str) -> list[tuple[str, str, str]]:
    """Each pinned package of an app, and a wheel of core: name, version, and what else may stand for it, or ""."""
    requirements = (source_of(app) / "requirements.in").read_text()
    pins = re.findall(r"^(?:# )?([\w.-]+)==(\S+)(?: +# or ([\w.-]+))?", requirements, re.MULTILINE)
    core = wheel()
    return [*pins, ("samestep", core.name.split("-")[1], "")] if core else pins


def versions(app: str) -> dict[str, str]:
    """Python's version, and those of the pinned packages that are installed: what machines of one job must share."""
    found = {name: _installed(name) for name, _, _ in pins(app)}
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, **{name: version for name, version in found.items() if version}}


def _installed(name: str) -> str | None:
    """The version of a package in this Python; None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
