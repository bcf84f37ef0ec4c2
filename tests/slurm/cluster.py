"""Run a real Slurm on this machine: Debian's controller and one daemon per node, unpacked but not installed.

The packages are unpacked into a cache folder, and the programs run with the libraries in it. Each node has its own
loopback address, which is also its name, because no other name would resolve to it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import debian
from processes import free_port

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ["munged", "sbatch", "scancel", "scontrol", "sinfo", "slurmctld", "slurmd", "slurmstepd", "squeue", "srun"]
LIMIT = 60  # seconds for one command, and for the start of the daemons

# A job's port depends on the job's id. The ids begin at the controller's port, which two clusters of the tests never
# share, because both clusters have their nodes on this machine.
# Two partitions share the nodes: a job in `urgent` preempts a job in `normal`. The second half has the settings that
# docs/slurm.md requires of a cluster.
CONFIGURATION = """\
ClusterName=samestep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
PluginDir={plugins}
CommunicationParameters=NoCtldInAddrAny{listen}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
DebugFlags=NO_CONF_HASH
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=normal Nodes=ALL OverSubscribe=EXCLUSIVE PriorityTier=1 GraceTime=60 Default=YES
PartitionName=urgent Nodes=ALL OverSubscribe=EXCLUSIVE PriorityTier=2 PreemptMode=OFF

PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{settings}
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its folder with a log of each daemon, and the environment of its commands."""

    folder: Path
    environ: Mapping[str, str]

    def run(self, *command: str) -> str:
        """Run a Slurm command, which must succeed, and return its stdout."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the job's fields in ``scontrol show job``, by name."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", number, "--oneliner")))


@contextlib.contextmanager
def running(mark: Mapping[str, str], nodes: int = 2, settings: str = "") -> Iterator[Cluster]:
    """Yield a cluster with nodes at 127.0.0.2 and so on. ``mark`` is in the environment of all processes.

    ``settings`` are more lines of slurm.conf. At the end, all jobs are canceled and all daemons are shut down.
    """
    # pytest's folder is too long for a socket's path. munged requires a folder that no other user can write to.
    folder = Path(tempfile.mkdtemp(prefix="samestep-slurm-"))
    root = debian.unpacked(*PACKAGES)
    libraries = debian.libraries(root)
    addresses = [f"127.0.0.{2 + i}" for i in range(nodes)]
    host = socket.gethostname()
    values = {
        "host": host,
        "user": pwd.getpwuid(os.getuid()).pw_name,
        "port": free_port("127.0.0.1"),
        "folder": folder,
        "plugins": libraries / "slurm-wlm",
        "nodes": "\n".join(f"NodeName={at} NodeHostname={host} Port={free_port(at)} CPUs=4" for at in addresses),
        "settings": settings,
    }
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**values, listen=""))
    # Node daemons listen on their own addresses. srun has no address, so it listens on all addresses.
    (folder / "nodes.conf").write_text(CONFIGURATION.format(**values, listen=",NoInAddrAny"))
    _write_programs(folder, root, libraries)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        **mark,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _start_munge(folder, environ, daemons)
        daemons.append(_start(["slurmctld", "-D", "-i"], environ, folder))
        for at in addresses:
            command = ["slurmd", "-D", "-N", at, "-f", f"{folder}/nodes.conf", "-d", f"{folder}/bin/slurmstepd"]
            daemons.append(_start(command, environ, folder))
        cluster = Cluster(folder, environ)
        _wait_until_idle(cluster, nodes, daemons)
        try:
            yield cluster
        finally:
            _end_jobs(cluster)
    finally:
        _stop(daemons, environ)
        shutil.rmtree(folder, ignore_errors=True)


def _write_programs(folder: Path, root: Path, libraries: Path) -> None:
    """Write a script for each program to ``folder/bin``. The script runs the program with the unpacked libraries."""
    (folder / "bin").mkdir()
    path = f"{libraries}:{libraries / 'slurm-wlm'}"
    loader = next(each for folder in ("/lib64", "/lib") for each in Path(folder).glob("ld-linux-*.so.?"))
    for name in PROGRAMS:
        places = [root / "usr" / part / f"{name}{suffix}" for part in ("bin", "sbin") for suffix in ("", "-wlm")]
        found = next(place for place in places if place.exists())
        # In a job, the environment has the settings of the node, so commands set their own SLURM_CONF.
        settings = "" if name.startswith("slurm") else f"SLURM_CONF={folder}/slurm.conf "
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\n{settings}exec {loader} --library-path {path} --argv0 {name} {found} "$@"\n')
        script.chmod(0o755)


def _start_munge(folder: Path, environ: Mapping[str, str], daemons: list[subprocess.Popen[bytes]]) -> None:
    """Start munged, with which Slurm's processes authenticate each other, and wait for its socket."""
    with open(os.open(folder / "munge.key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as key:
        key.write(secrets.token_bytes(128))
    files = [("socket", "socket"), ("key-file", "key"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed")]
    options = [f"--{option}={folder}/munge.{name}" for option, name in files]
    daemons.append(_start(["munged", "--foreground", "--force", *options], environ, folder))
    deadline = time.monotonic() + LIMIT
    while not (folder / "munge.socket").exists():
        assert time.monotonic() < deadline, f"munged does not start: {_logs(folder)}"
        time.sleep(0.02)


def _start(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "daemons.out").open("ab") as log:
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _wait_until_idle(cluster: Cluster, count: int, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        assert all(daemon.poll() is None for daemon in daemons), f"a daemon ended: {_logs(cluster.folder)}"
        with contextlib.suppress(AssertionError):
            if cluster.run("sinfo", "--noheader", "--Node", "--format=%t", "--partition=normal") == "\n".join(
                ["idle"] * count
            ):
                return
        time.sleep(0.1)
    raise AssertionError(f"the nodes do not come up: {_logs(cluster.folder)}")


def _end_jobs(cluster: Cluster) -> None:
    """Cancel all jobs and wait for their end, because without the controller their daemons would wait forever."""
    cluster.run("scancel", "--me")
    deadline = time.monotonic() + LIMIT
    while jobs := cluster.run("squeue", "--noheader"):
        assert time.monotonic() < deadline, f"jobs do not end: {jobs}"
        time.sleep(0.1)


def _logs(folder: Path) -> str:
    return "\n".join(
        path.read_text(errors="replace")[-3000:] for path in [*folder.glob("*.log"), folder / "daemons.out"]
    )


def _stop(daemons: Sequence[subprocess.Popen[bytes]], environ: Mapping[str, str]) -> None:
    """Stop the controller and the nodes by ``scontrol shutdown``, and munged by a signal."""
    with contextlib.suppress(subprocess.SubprocessError):
        subprocess.run(["scontrol", "shutdown"], env=environ, capture_output=True, timeout=LIMIT, check=False)
    for daemon in reversed(daemons):  # munged last
        if daemon is daemons[0]:
            daemon.terminate()
        try:
            daemon.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
