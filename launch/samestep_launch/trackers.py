"""Run the process of --track, which sends a run's metrics to trackers.

The process runs `samestep_observe.track`, which reads the run dir. Training never waits for the process, and
continues if the process fails. The process uses the Python of ``.venvs/trackers``, or the Python that PYTHON names.
The process shares no pipe or lock with the ranks, and has the lowest priority. The process ends when its standard input
closes. This module imports no third-party package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from samestep import ConfigError
from samestep.options import bounded_float
from samestep.root import Root
from samestep.untrusted import shown

from samestep_launch.environments import START, Environment
from samestep_launch.environments import TRACKERS as NAME
from samestep_launch.supervise import Stopped, print_stderr

TRACKERS = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow-skinny", "sqlalchemy", "alembic"), "wandb": ("wandb",)}
MODULES = {"mlflow-skinny": "mlflow"}  # import names that differ from the package's name
FINISH_SECONDS = 30.0  # default time limit in seconds for sending the last metrics after the job
STOP_SECONDS = 10.0  # default time limit in seconds for sending the last metrics after a stop signal
NICE = 19  # ranks come first if no core is idle


def parse_names(text: str) -> list[str]:
    """Return the trackers that --track names, without duplicates.

    Raises:
        ConfigError: a tracker is unknown, or SAMESTEP_TRACK_SECONDS is malformed.
    """
    seconds = os.environ.get("SAMESTEP_TRACK_SECONDS") or "0"
    try:
        bounded_float(0.0, 1e7)(seconds)
    except argparse.ArgumentTypeError:
        raise ConfigError(f"SAMESTEP_TRACK_SECONDS={seconds}: give seconds from 0 to 1e7, or unset it") from None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"--track: unknown tracker {name!r}: name some of {','.join(TRACKERS)}, with commas")
    return list(dict.fromkeys(names))


def find_python(root: Path, names: Sequence[str]) -> str:
    """Return the path of a Python that has these trackers; create the environment of --track if it is missing.

    Raises:
        ConfigError: the Python that PYTHON names lacks a package.
        NonRetryableError: the environment could not be made.
    """
    environment = Environment(root, NAME)
    if not os.environ.get("PYTHON"):
        return environment.ensure({})
    missing = []
    for name in names:
        missing += [package for package in TRACKERS[name] if not _is_installed(package)]
    if missing:
        pins = {name: f"{name}=={version}" for name, version, _ in environment.pins()}
        install = f"{sys.executable} -m pip install {' '.join(pins[each] for each in missing)}"
        raise ConfigError(
            f"--track: {sys.executable} lacks {' and '.join(missing)}: {install}; or unset PYTHON to have "
            f".venvs/{NAME} made"
        )
    return sys.executable


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(MODULES.get(package, package)) is not None


class TrackerProcess:
    """The tracker process. `start` starts the process, also after a crash; `finish` waits for its end."""

    def __init__(self, root: Path, names: Sequence[str], python: str) -> None:
        self._root = root
        self._names = names
        self._python = python
        self._run_dir: Path | None = None
        self._process: subprocess.Popen[str] | None = None

    def start(self, run_dir: Path) -> None:
        """Start the process if it does not run; call this method before each start of the job."""
        self._run_dir = run_dir
        if self._process and self._process.poll() is not None:
            self._report_end("it is started again")
        if self._process is None:
            self._process = self._popen(run_dir)

    def _popen(self, run_dir: Path) -> subprocess.Popen[str] | None:
        command = [self._python, "-c", START, "track", str(run_dir), "--to", ",".join(self._names)]
        try:
            descriptor = Root(run_dir).open("log/track.log", os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "ab") as log:
                process = subprocess.Popen(
                    [*command, "--until-stdin-ends"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,  # one line for each incomplete tracker
                    stderr=log,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C must not end the process
                )
            with contextlib.suppress(OSError):  # a sandbox may forbid setpriority
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
            return process
        except OSError as error:
            what = error.filename or self._python
            print_stderr(f"warning: --track: cannot start with {what}: {error.strerror}; training continues")
            return None

    def _report_end(self, then: str) -> None:
        """Print a warning that the process has ended too early; ``then`` is the end of the warning."""
        if self._process is None:
            return
        self._process.communicate()  # this call closes the pipes
        code = self._process.returncode
        self._process = None
        print_stderr(f"warning: --track: its process ended with code {code}, see {self._run_dir}/log/track.log; {then}")

    def finish(self, stopped: bool) -> None:
        """Wait until the process has sent the last metrics, end it, and warn of each incomplete tracker.

        A signal ends the wait.

        Args:
            stopped: whether a signal has stopped the job, which shortens the wait.
        """
        if self._run_dir is None:
            return
        if self._process and self._process.poll() is not None:
            self._report_end("once more, for the rest")
        limit = STOP_SECONDS if stopped else FINISH_SECONDS
        limit = float(os.environ.get("SAMESTEP_TRACK_SECONDS") or limit)
        for name, problem in self._wait_for_end(self._run_dir, limit).items():
            print_stderr(
                f"warning: --track: {name} is incomplete ({problem}): to complete it, run {self._command(name)}"
            )

    def _wait_for_end(self, run_dir: Path, limit: float) -> dict[str, str]:
        """Wait up to ``limit`` seconds for the process's end; return each incomplete tracker's problem, by name."""
        late = dict.fromkeys(self._names, f"not done {limit:g} s after the job")
        try:
            if self._process is None:
                self._process = self._popen(run_dir)
            if self._process is None:  # the process could not be started
                return late
            output, _ = self._process.communicate(timeout=limit)
        except (Stopped, subprocess.TimeoutExpired):
            return late
        finally:
            if self._process and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        problems = {}
        for line in output.splitlines():
            name, separator, problem = shown(line, limit=500).partition(": ")
            if separator:
                problems[name] = problem
        has_ended = self._process.returncode in (0, 1)
        return problems if has_ended else {**late, **problems}

    def _command(self, name: str) -> str:
        """Return the command that completes a tracker."""
        command = shlex.join([self._python, "-m", "samestep", "track", str(self._run_dir), "--to", name])
        if os.environ.get("PYTHON"):
            return f"PYTHONPATH={shlex.quote(str(self._root / 'core'))} {command}"
        return command
