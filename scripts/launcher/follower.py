"""--track: the process that gives a run's numbers to trackers, beside the job. The standard library alone.

It is `samestep.track`, which reads metrics.jsonl and nothing else; so training neither waits for it nor ends with it.
Its Python is that of ``.venvs/trackers``, or the one that PYTHON names. It has no part in the job's environment, pipes
or locks, the least priority, and ends when its standard input does: with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from samestep import UserError

from launcher import supervise, venvs
from launcher.supervise import say

NAME = "trackers"  # of its environment, and of the folder that has the lock
TRACKERS = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow-skinny", "sqlalchemy", "alembic"), "wandb": ("wandb",)}
MODULES = {"mlflow-skinny": "mlflow"}  # where it has another name than the package
PATIENCE = 30.0  # seconds for trackers to get the rest, when the job has ended
STOP_PATIENCE = 10.0  # when it was stopped
NICE = 19  # where there is no core to spare, ranks go first


def names_of(text: str) -> list[str]:
    """The trackers that --track names. Raises UserError."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise UserError(f"--track: there is no tracker {unknown[0]!r}: name some of {','.join(TRACKERS)}, with commas")
    return list(dict.fromkeys(names))


def find_python(names: Sequence[str]) -> str:
    """The Python that has what they need; its environment is made where there is none. Raises UserError, FatalError."""
    if not os.environ.get("PYTHON"):
        return venvs.ensure(NAME, {})
    missing = [
        package
        for name in names
        for package in TRACKERS[name]
        if importlib.util.find_spec(MODULES.get(package, package)) is None
    ]
    if missing:
        pins = {name: f"{name}=={version}" for name, version, _ in venvs.pins(NAME)}
        install = f"{sys.executable} -m pip install {' '.join(pins[each] for each in missing)}"
        raise UserError(
            f"--track: {sys.executable} lacks {' and '.join(missing)}: {install}; or unset PYTHON to have "
            f".venvs/{NAME} made"
        )
    return sys.executable


class Follower:
    """The process: `start` starts it where there is none, as it may have died; `finish` waits for the rest."""

    def __init__(self, names: Sequence[str], python: str) -> None:
        self._names, self._python = names, python
        self._run_dir: Path | None = None
        self._process: subprocess.Popen[str] | None = None

    def start(self, run_dir: Path) -> None:
        """Before each start of the job."""
        self._run_dir = run_dir
        if self._process and self._process.poll() is not None:
            self._forget("it is started again")
        if self._process is None:
            self._process = self._popen(run_dir)

    def _popen(self, run_dir: Path) -> subprocess.Popen[str] | None:
        command = [self._python, "-m", "samestep.track", str(run_dir), "--to", ",".join(self._names)]
        try:
            with (run_dir / "log" / "track.log").open("ab") as log:
                process = subprocess.Popen(
                    [*command, "--until-stdin-ends"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,  # what it has to say in the end
                    stderr=log,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for the job
                )
            with contextlib.suppress(OSError):  # it has started, whatever a sandbox says to this
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
            return process
        except OSError as problem:
            say(f"warning: --track: cannot start {self._python}: {problem.strerror}; training goes on")
            return None

    def _forget(self, then: str) -> None:
        """Of a process that has ended by itself: say so."""
        assert self._process is not None
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()
        self._process = None
        say(f"warning: --track: its process ended with code {code}, see {self._run_dir}/log/track.log; {then}")

    def finish(self, stopped: bool) -> None:
        """Give it some seconds for the rest, then end it; what is then missing is said, with the remedy.

        A signal that comes in meanwhile ends it at once.
        """
        if self._run_dir is None:
            return
        if self._process and self._process.poll() is not None:
            self._forget("once more, for the rest")
        patience = float(os.environ.get("SAMESTEP_TRACK_SECONDS") or (STOP_PATIENCE if stopped else PATIENCE))
        said, late = "", True
        try:
            self._process = self._process or self._popen(self._run_dir)
            if self._process:
                said = self._process.communicate(timeout=patience)[0]
                late = self._process.returncode not in (0, 1)
        except (supervise.Stopped, subprocess.TimeoutExpired):
            pass
        finally:
            if self._process and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        problems = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
        if late:
            problems = dict.fromkeys(self._names, f"not done {patience:g} s after the job") | problems
        for name, problem in problems.items():
            say(f"warning: --track: {name} has not got all ({problem}); this brings it: {self._command(name)}")

    def _command(self, name: str) -> str:
        path = [f"PYTHONPATH={shlex.quote(str(venvs.ROOT / 'core'))}"] if os.environ.get("PYTHON") else []
        command = [self._python, "-m", "samestep.track", str(self._run_dir), "--to", name]
        return " ".join([*path, shlex.join(command)])
