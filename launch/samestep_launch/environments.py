"""Find or create an app's Python: the interpreter that PYTHON names, or the environment ``.venvs/<app>`` from a lock.

A lock, ``apps/<app>/requirements-cpu.txt`` or ``-cuda.txt``, lists every package with the SHA-256 of its files, and
pip installs only these files. tools/lock.py makes the locks from ``requirements.in``. SAMESTEP_LOCK selects a lock, and
SAMESTEP_ALLOW adds the hash of another file.

This module runs on the system's Python, without third-party packages.
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
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from samestep import ConfigError, NonRetryableError
from samestep.root import try_lock

from samestep_launch.supervise import block_signals, print_stderr, read_text

TRACKERS = "trackers"  # name of the environment of --track, whose requirements are part of this package
STAMP = "samestep-stamp"
END_SECONDS = 2.0  # seconds to wait for the end of a set-up step after TERM, and again after KILL
IS_PYTHON = ["-c", "import sys; print(sys.version_info >= (3, 9))"]
PACKAGE_FOLDERS = ("core", "launch", "observe", "check")
# A program that runs the command ``samestep``. Unlike ``python -m samestep``, it imports no module from the current
# folder, which may be a stranger's run dir. sys.path begins with "", unless Python has a safe path.
START = "import sys; sys.path[0] or sys.path.pop(0); from samestep.__main__ import main; sys.exit(main())"
# The command ``samestep`` of an environment, run by sh because a #! line cannot contain a path with spaces.
COMMAND = """\
#!/bin/sh
exec {python} -c {start} "$@"
"""
BUILD = r"^([\w.-]+)==(\S+\+\S+)"  # a line of a lock with a local version label, such as torch==2.13.0+cpu
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # index of the CPU builds that PyPI lacks, such as torch 2.13.0+cpu
# pip's message for a file whose hash is not in the lock, and the pattern of the file's package, URL and hash.
MISMATCH = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
WHICH = re.compile(r"^ +([\w.-]+)\S* from (\S+).*?Got +([0-9a-f]{64})", re.DOTALL | re.MULTILINE)


def find_wheel(root: Path) -> Path | None:
    """Return the wheel of samestep in ``vendor``, for a project that is a copy of one app; None without a wheel.

    Raises:
        ConfigError: ``vendor`` has several wheels of samestep.
    """
    wheels = sorted(root.glob("vendor/samestep-*.whl"))
    if not wheels:
        return None
    if len(wheels) > 1:
        names = " and ".join(path.name for path in wheels)
        raise ConfigError(f"vendor/ has {names}: leave one of them there, and name it in tox.ini")
    return wheels[0]


def source_path(root: Path) -> list[str]:
    """Return the project's folders with packages of samestep, as entries of PYTHONPATH."""
    return [str(root / folder) for folder in PACKAGE_FOLDERS]


def given_python(root: Path) -> str | None:
    """Return the interpreter that PYTHON names; None if the variable is not set.

    If PYTHON or PYTHONPATH is set, the function puts the project's packages first on PYTHONPATH. If the project has a
    wheel in ``vendor``, the function leaves PYTHONPATH unchanged. The wheel must then be installed in the interpreter,
    because Python cannot read the wheel's data files from PYTHONPATH.

    Raises:
        ConfigError: PYTHON does not name a Python 3.9 or newer.
    """
    given = os.environ.get("PYTHON")
    path = os.environ.get("PYTHONPATH")
    if (given or path) and find_wheel(root) is None:
        folders = source_path(root)
        if path:
            folders.append(path)
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    if not given:
        return None
    python = shutil.which(given)
    if python is None:
        raise ConfigError(f"PYTHON={given} is not an executable: name a Python interpreter, or unset it")
    was_started = os.path.abspath(python) == sys.executable  # launch.sh has checked the version of sys.executable
    if not was_started and not _is_python(python):
        raise ConfigError(f"PYTHON={given} is not a Python of at least 3.9: name one, or unset PYTHON")
    return python


def _is_python(program: str) -> bool:
    try:
        done = subprocess.run([program, *IS_PYTHON], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.stdout.strip() == "True"


class Environment:
    """The Python environment of an app or of --track.

    Attributes:
        root: the project's folder, with ``apps``, ``.venvs``, and ``core`` or ``vendor``.
        name: the app's name, or TRACKERS.
        source: the folder with requirements and locks, as a Path or as a part of this package, which may be zipped.
        link: the symbolic link ``.venvs/<name>`` to the environment, which apps with equal locks share.
        setup: path of the app's setup.sh, which builds packages without a published wheel; the file may be missing.
    """

    def __init__(self, root: Path, name: str) -> None:
        app = root / "apps" / name
        self.root = root
        self.name = name
        self.link = root / ".venvs" / name
        self.source: Any = app
        if name == TRACKERS:
            self.source = files(__package__) / "tracker_locks"
        self.setup = app / "setup.sh"
        self._shown = f"apps/{name}/requirements.in"  # path in messages
        self._requirements = read_text(self.source / "requirements.in") or ""

    def ensure(self, settings: Mapping[str, str]) -> str:
        """Return the path of the environment's Python; create the environment unless an equal environment exists.

        An existing environment never changes, because a running job may use it: other locks lead to a new environment.
        The returned path does not contain the link, because the link may change.

        Args:
            settings: variables for the app's setup.sh; other values lead to a new environment.
        """
        os.environ.pop("PYTHONHOME", None)  # PYTHONHOME would mislead the environment's Python
        venv = Path(os.path.realpath(self.link))
        version = _stamp(venv)
        locks = [_allow(path.read_text(), _allowed()) for path in self.locks()]
        self._check_pins(locks[0])
        if version is None or venv.name != self._key(version, settings, locks):
            venv = self._new(settings, locks)
        return str(venv / "bin" / "python")

    def _new(self, settings: Mapping[str, str], locks: Sequence[str]) -> Path:
        """Create or find the environment, point the link at it, and return the environment's folder."""
        base, version = self._find_python()
        venv = self.link.with_name(self._key(version, settings, locks))
        try:
            with _lock(venv):  # a concurrent start waits here, and then finds the environment complete
                if _stamp(venv) is None:
                    print_stderr(f"first start: making .venvs/{self.name} with Python {version}, which takes minutes")
                    self._make(venv, base, settings=settings, locks=locks)
                    (venv / STAMP).write_text(version)
                _link(self.link, venv)
        except OSError as error:
            raise NonRetryableError(
                f"cannot make .venvs/{self.name}: {error}: or name an interpreter by PYTHON="
            ) from error
        return venv

    def _key(self, version: str, settings: Mapping[str, str], locks: Sequence[str]) -> str:
        """Return the folder's name: 12 hexadecimal digits of the SHA-256 of settings and files that define the content.

        Args:
            version: version of Python.
            settings: variables for the app's setup.sh.
            locks: text of all candidate locks, because pip's index decides which of them is installed.
        """
        setup = read_text(self.setup) or ""
        built = re.findall(r"^# (\S+==\S+) is built by setup\.sh", self._requirements, re.MULTILINE)
        built_from = " ".join(re.findall(r"^# builds from: (.*)", setup, re.MULTILINE)).split()
        wheel = find_wheel(self.root)
        content: list[Any] = [
            version,
            [_requirement_lines(lock) for lock in locks],
            sorted(built),
            [hashlib.sha256(wheel.read_bytes()).hexdigest(), str(self.root)] if wheel else source_path(self.root),
            [setup, *((self.source / name).read_text() for name in built_from)],
        ]
        if settings:
            content.append(dict(sorted(settings.items())))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    def locks(self) -> list[Any]:
        """Return the paths of this machine's candidate locks, the preferred one first.

        With an NVIDIA driver, the only candidate is requirements-cuda.txt, if the app has this lock. Otherwise
        requirements-cpu.txt precedes requirements-cuda.txt, whose packages run on a CPU, too. SAMESTEP_LOCK overrides
        the choice.

        Raises:
            ConfigError: the app has no lock, or lacks the lock that SAMESTEP_LOCK selects.
        """
        named = os.environ.get("SAMESTEP_LOCK")
        if named and self.name != TRACKERS:  # the trackers have one lock for all machines
            lock = self.source / f"requirements-{named}.txt"
            names = sorted(path.stem.partition("-")[2] for path in self.source.glob("requirements-*.txt"))
            if named not in names:
                raise ConfigError(
                    f"SAMESTEP_LOCK={named}: {lock} is missing: name one of {', '.join(names)}, or unset it"
                )
            return [lock]
        cpu = self.source / "requirements-cpu.txt"
        cuda = self.source / "requirements-cuda.txt"
        if has_nvidia() and cuda.is_file():
            return [cuda]
        locks = [path for path in (cpu, cuda) if path.is_file()]
        if not locks:
            raise ConfigError(f"{cpu} is missing: `bash scripts/test.sh -e locks -- {self.name}` makes it")
        return locks

    def _check_pins(self, lock: str) -> None:
        """Raise ConfigError if the lock lacks a requirement of requirements.in."""
        pinned = re.findall(r"^([\w.-]+)==([^\s;+]+)", lock, re.MULTILINE)
        locked = {(_normal(name), version) for name, version in pinned}
        pattern = r"^([A-Za-z][\w.-]*)(\S*?(?:==(\S+))?)(?= |$)"
        locked_names = {name for name, _ in locked}
        for name, more, version in re.findall(pattern, self._requirements, re.MULTILINE):
            is_locked = _normal(name) in locked_names
            if version:
                is_locked = (_normal(name), version) in locked
            if not is_locked:
                raise ConfigError(
                    f"{self._shown} has {name}{more}, but its lock lacks it: "
                    f"`bash scripts/test.sh -e locks -- {self.name}` updates the lock"
                )

    def _make(self, venv: Path, base: str, settings: Mapping[str, str], locks: Sequence[str]) -> None:
        """Create an environment without its stamp.

        Args:
            venv: the environment's folder.
            base: command of the Python that creates the environment.
            settings: variables for the app's setup.sh.
            locks: text of the candidate locks.

        Raises:
            NonRetryableError: a step failed; the folder is deleted.
        """
        shutil.rmtree(venv, ignore_errors=True)  # a killed start may have left the folder
        python = str(venv / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wheel = find_wheel(self.root)
        try:
            self._run([base, "-m", "venv", str(venv)], settings)
            lock, index = _obtainable(python, locks)
            chosen = venv / "requirements.txt"
            chosen.write_text(lock)
            # Nothing is built from source, because a build would fetch packages that no lock lists.
            self._run([*pip, "--require-hashes", "--only-binary=:all:", *index, "-r", str(chosen)], settings)
            if wheel:  # the wheel needs no hash, because it is part of the project
                self._run([*pip, "--no-index", str(wheel)], settings)
            else:
                self._link_packages(venv)
            if self.setup.exists():
                self._run(["bash", str(self.setup), python], settings)
        except BaseException:
            with block_signals():
                shutil.rmtree(venv, ignore_errors=True)
            raise

    def _link_packages(self, venv: Path) -> None:
        """Make the project's packages importable in an environment, as an editable install does, without a build."""
        site_packages = next(venv.glob("lib/python*/site-packages"))
        (site_packages / "samestep.pth").write_text("".join(f"{path}\n" for path in source_path(self.root)))
        command = venv / "bin" / "samestep"
        python = shlex.quote(str(venv / "bin" / "python"))
        command.write_text(COMMAND.format(python=python, start=shlex.quote(START)))
        command.chmod(0o755)

    def _run(self, command: Sequence[str], settings: Mapping[str, str]) -> None:
        """Run a step of the set-up.

        Raises:
            NonRetryableError: the step failed.
        """
        held = ""  # pip's lines about wrong hashes, printed only if no error of this method replaces them
        # The step's stdout becomes stderr, because this process's stdout is for the job's results.
        stderr = None  # setup.sh inherits stderr, which may be a terminal
        if "--require-hashes" in command:
            stderr = subprocess.PIPE
        with _start(command, env={**os.environ, **settings}, stdout=sys.stderr, stderr=stderr) as step:
            for line in step.stderr or ():
                if held or line.startswith(MISMATCH):
                    held += line
                else:
                    print(line, end="", file=sys.stderr, flush=True)
        if step.returncode == 0:
            return
        match = WHICH.search(held)
        if match:
            name, url, digest = match.groups()
            file = unquote(url.partition("#")[0]).replace("file://", "")
            raise NonRetryableError(
                f"{name}: {file} has SHA-256 {digest}, which {self.name}'s lock does not list: it is not the "
                f'published file; if it is yours, export SAMESTEP_ALLOW="{name} sha256:{digest}" allows it'
            )
        print(held, end="", file=sys.stderr, flush=True)
        raise NonRetryableError(f"could not make .venvs/{self.name}: `{shlex.join(command)}` failed: see above")

    def _find_python(self) -> tuple[str, str]:
        """Return the command and the version of a Python that requirements.in allows and that has the venv module.

        Raises:
            ConfigError: this machine has no such Python.
        """
        line = re.search(r"^# python: (.*)$", self._requirements, re.MULTILINE)
        versions = line[1].split() if line else ["3.11"]
        commands = [f"python{version}" for version in versions]
        for command in [*commands, "python3", "python"]:
            version = _python_version(command)
            major_minor = ".".join(version.split(".")[:2])
            if major_minor in versions:
                return command, version
        raise ConfigError(
            f"no Python {', '.join(versions)} with the venv module was found: install one (Debian: apt-get install "
            "python3.11-venv), or name an interpreter that has the requirements by PYTHON=/path/to/python"
        )

    def check_requirements(self) -> None:
        """Raise ConfigError if a pinned package is missing; warn if its version differs from the tested version.

        A pin in a comment names a package that the app's setup.sh builds. For ``name==pin  # or other``, the package
        ``other`` is enough: it is the same package, built for other hardware.
        """
        for name, pin, other in self.pins():
            names = [name, other] if other else [name]
            versions = {each: _installed(each) for each in names}
            present = [each for each in names if versions[each]]
            if not present:
                raise ConfigError(
                    f"{sys.executable} lacks {' or '.join(names)}: {self._install_command()}; or unset PYTHON to have "
                    f".venvs/{self.name} made"
                )
            version = versions[present[0]] or ""
            if version.partition("+")[0] != pin:
                print_stderr(f"warning: {present[0]} {version} is installed; this app was tested with {pin}")

    def _install_command(self) -> str:
        command = f"{sys.executable} -m pip install -r {self._shown}"
        wheel = find_wheel(self.root)
        if wheel:
            command += f" {wheel}"
        if self.setup.exists():
            command += f", then bash {self.setup} {sys.executable}"
        return command

    def pins(self) -> list[tuple[str, str, str]]:
        """Return (name, version, alternative or "") of each pinned package, and of samestep's wheel in ``vendor``."""
        pins = re.findall(r"^(?:# )?([\w.-]+)==(\S+)(?: +# or ([\w.-]+))?", self._requirements, re.MULTILINE)
        wheel = find_wheel(self.root)
        if wheel:
            version = wheel.name.split("-")[1]
            pins.append(("samestep", version, ""))
        return pins

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and of the installed pinned packages, which machines of one job must share."""
        versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
        for name, _, _ in self.pins():
            version = _installed(name)
            if version:
                versions[name] = version
        return versions


def _requirement_lines(lock: str) -> list[str]:
    """Return the sorted lines of a lock without comments and blank lines."""
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lock.splitlines()]
    return sorted(line for line in lines if line)


def _python_version(command: str) -> str:
    """Return the version of a Python command; "" if the command fails or the Python lacks the venv module."""
    probe = "import platform, venv, ensurepip; print(platform.python_version())"
    try:
        done = subprocess.run([command, "-c", probe], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout.strip()


def _stamp(venv: Path) -> str | None:
    """Return the Python version in an environment's stamp, which is written last; None for an incomplete environment.

    Raises:
        ConfigError: this user has no permission to run the environment's Python.
    """
    python = venv / "bin" / "python"
    try:
        python.stat()
    except PermissionError:
        raise ConfigError(
            f"{python} leads to {os.path.realpath(python)}, which this user cannot run: name an interpreter by PYTHON="
        ) from None
    except OSError:
        return None
    return read_text(venv / STAMP)


@contextlib.contextmanager
def _start(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a set-up step, yield its process, and wait for its end.

    An exception inside the context ends the step and its children.
    """

    def end(exception: object, *_: object) -> None:
        if exception is None:
            return
        with block_signals():
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(step.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(END_SECONDS)

    with contextlib.ExitStack() as stack:
        with block_signals():  # no signal may arrive before ``end`` is registered
            settings |= {"text": True, "errors": "replace", "start_new_session": True}
            step = stack.enter_context(subprocess.Popen(command, **settings))
            stack.push(end)
        yield step
        step.wait()


def has_nvidia() -> bool:
    """Return whether this machine has an NVIDIA driver."""
    driver = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
    return any(map(os.path.exists, driver)) or shutil.which("nvidia-smi") is not None


def _allowed() -> dict[str, list[str]]:
    """Parse SAMESTEP_ALLOW, such as "torch sha256:<64 digits>"; return SHA-256 digests by package name.

    Raises:
        ConfigError: the variable is malformed.
    """
    allowed: dict[str, list[str]] = {}
    words = os.environ.get("SAMESTEP_ALLOW", "")
    pair = r"([\w.-]+) sha256:([0-9a-f]{64})"
    if not re.fullmatch(rf"\s*({pair}\s*)*", words):
        raise ConfigError(f'SAMESTEP_ALLOW={words}: write "NAME sha256:<64 hexadecimal digits>", as often as it needs')
    for name, digest in re.findall(pair, words):
        allowed.setdefault(_normal(name), []).append(digest)
    return allowed


def _allow(lock: str, allowed: Mapping[str, Sequence[str]]) -> str:
    """Return the lock with the allowed hashes. The packages of these hashes lose their local labels, such as +cpu."""
    if not allowed:
        return lock

    def entry(match: re.Match[str]) -> str:
        hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in allowed.get(_normal(match[1]), ()))
        if not hashes:
            return match[0]
        return f"{match[1]}=={match[2]}{match[4]}{hashes}{match[5]}"

    return re.sub(r"^([\w.-]+)==([^\s+;]+)(\+\S+)?(.*?)( \\)$", entry, lock, flags=re.MULTILINE)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _lock(venv: Path) -> IO[str]:
    """Wait for the lock that allows one process to create an environment.

    Returns:
        The lock's file. Closing the file releases the lock.

    Raises:
        ConfigError: the lock's file cannot be created.
    """
    path = venv.with_name(f".{venv.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}: or name an interpreter by PYTHON=") from error
    try_lock(fcntl.flock, lock.fileno(), fcntl.LOCK_EX)  # this call has no effect on a file system without locks
    return lock


def _obtainable(python: str, locks: Sequence[str]) -> tuple[str, list[str]]:
    """Return the first lock whose builds with local labels are available, and the pip options that find these builds.

    The function searches pip's configured index first, and then also PyTorch's index, which may be out of reach. The
    function uses `pip index`, because `pip install` would download gigabytes before it reports a wrong hash.

    Raises:
        NonRetryableError: the builds of no lock are available.
    """
    for lock in locks:
        builds = re.findall(BUILD, lock, re.MULTILINE)
        for index in ([], [f"--extra-index-url={CPU_INDEX}"]):
            options = [*index, "--retries=1", "--timeout=10"]
            if all(version in _offered(python, name, options) for name, version in builds):
                if lock != locks[0]:
                    print_stderr(
                        f"no {_first_build(locks)} is found, nor at {CPU_INDEX}: taking the build for NVIDIA GPUs, "
                        "which runs on a CPU too and is GB larger"
                    )
                return lock, index
    raise NonRetryableError(
        f"no {_first_build(locks)} is found, nor at {CPU_INDEX}: set PIP_FIND_LINKS or PIP_INDEX_URL for pip"
    )


def _first_build(locks: Sequence[str]) -> str:
    """Return name and version of the preferred lock's first package with a local label, such as "torch 2.13.0+cpu"."""
    return " ".join(re.findall(BUILD, locks[0], re.MULTILINE)[0])


def _offered(python: str, name: str, options: Sequence[str]) -> list[str]:
    """Return the versions, including local labels, of a package's wheels for this Python; [] if none is found."""
    command = [python, "-m", "pip", "index", "versions", name, "--only-binary=:all:", *options]
    with _start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as step:
        output, errors = step.communicate()
    sys.stderr.write(re.sub("(?m)^WARNING: pip index is currently an experimental command.*\n", "", errors))
    line = re.search(r"^Available versions: (.*)", output, re.MULTILINE)
    if line is None:
        return []
    return line[1].split(", ")


def _link(link: Path, venv: Path) -> None:
    """Point the symbolic link ``link`` at ``venv``, atomically."""
    if link.is_dir() and not link.is_symlink():  # an older version created the environment itself at this path
        shutil.rmtree(link)
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(venv.name)
    temporary.replace(link)


def _installed(name: str) -> str | None:
    """Return the version of a package in this Python; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
