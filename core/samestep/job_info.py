"""Pass values from a launch script to its ranks by a JSON document in the environment variable SAMESTEP_JOB_INFO.

`JobInfo` is the content of the document. The fields ``run_dir`` and ``restarts`` are separate variables,
SAMESTEP_RUN_DIR and SAMESTEP_RESTARTS, for programs that do not use this package. Processes must not cache the values,
because a process that forks ranks gets new values at each start of the job. This module uses the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

from samestep import ConfigError, untrusted

DOCUMENT = "SAMESTEP_JOB_INFO"
RUN_DIR = "SAMESTEP_RUN_DIR"
RESTARTS = "SAMESTEP_RESTARTS"

_count = untrusted.optional(untrusted.integer(0, 2**31 - 1))
_seconds = untrusted.optional(untrusted.number(0.0))
_SCHEMA = {
    "job": untrusted.text(255),
    "launcher": untrusted.text(300),
    "ranks": _count,
    "machines": _count,
    "errors": _count,
    "tmpdir": untrusted.text(4096),
    "timeout": _seconds,
    "grace": _seconds,
    "control": _count,
    "room": untrusted.text(2**16),
    "forker": _count,
    "members": untrusted.text(1000),
    "rank": _count,
    "name": untrusted.text(255),
}


@dataclass(frozen=True)
class JobInfo:
    """The values that a launch script passes to the processes of one start of a job.

    Without a launch script, all values are the defaults.

    Attributes:
        job: name of this start, which is the same on all machines.
        launcher: process id and host of this machine's launch script, such as "123@node-1".
        run_dir: folder of the run.
        restarts: number of starts before this one.
        ranks: requested number of ranks; None if the job uses several machines.
        machines: requested number of machines; None if the job uses one machine.
        errors: descriptor, in the launch script, to which ranks write errors.
        tmpdir: the user's TMPDIR; the job's TMPDIR is a new folder.
        timeout: seconds without progress until a job ends as hung, the default of --timeout.
        grace: seconds from a stop request until the job is killed, the default of --grace.
        control: descriptor of a fork server's socket to the launch script; not passed to ranks.
        room: padding that reserves memory in the environment for later values (`samestep_launch.process_info`).
        forker: descriptor of a launcher's socket to the process that forks its ranks; not passed to ranks.
        members: address and key of the launcher in an elastic job, whose ranks may join and leave.
        rank: number of this rank in an elastic job.
        name: name of this rank in an elastic job's group.
    """

    job: str = ""
    launcher: str = ""
    run_dir: str = ""
    restarts: int = 0
    ranks: int | None = None
    machines: int | None = None
    errors: int | None = None
    tmpdir: str = ""
    timeout: float | None = None
    grace: float | None = None
    control: int | None = None
    room: str = ""
    forker: int | None = None
    members: str = ""
    rank: int | None = None
    name: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> JobInfo:
        """Read the values from ``environ``.

        Raises:
            ConfigError: the document or the number of restarts is damaged.
        """
        restarts = environ.get(RESTARTS) or "0"
        if not (restarts.isdecimal() and restarts.isascii() and len(restarts) < 10):
            raise ConfigError(f"{RESTARTS}={untrusted.shown(restarts)} is not a number of restarts: unset it")
        values = {name: value for name, value in asdict(cls()).items() if name in _SCHEMA}
        try:
            found = untrusted.parse_object(environ.get(DOCUMENT) or "{}")
            values.update({name: value for name, value in found.items() if name in _SCHEMA})
            untrusted.check(values, _SCHEMA)
        except ValueError as error:
            raise ConfigError(
                f"{DOCUMENT} is damaged ({untrusted.shown(error)}): unset it, as launch scripts alone set it"
            ) from None
        return cls(run_dir=environ.get(RUN_DIR, ""), restarts=int(restarts), **values)

    def to_environ(self) -> dict[str, str]:
        """Return these values as environment variables. The document is ASCII, without blanks outside its strings."""
        empty = asdict(JobInfo())
        values = {name: value for name, value in asdict(self).items() if name in _SCHEMA and value != empty[name]}
        environ = {DOCUMENT: json.dumps(values, separators=(",", ":")), RESTARTS: str(self.restarts)}
        if self.run_dir:
            environ[RUN_DIR] = self.run_dir
        return environ

    def launch_script(self) -> int | None:
        """Return the process id of the launch script; None without a launch script, or if it runs on another host."""
        pid, _, host = self.launcher.partition("@")
        if not pid.isdecimal() or host != socket.gethostname():
            return None
        return int(pid)


def this_launcher() -> str:
    """Return the value of the field ``launcher`` for jobs that this process starts."""
    return f"{os.getpid()}@{socket.gethostname()}"


def leave_job(environ: MutableMapping[str, str]) -> None:
    """Remove a job's variables, because a program that starts jobs may itself run in another job."""
    for name in (DOCUMENT, RUN_DIR, RESTARTS):
        environ.pop(name, None)
