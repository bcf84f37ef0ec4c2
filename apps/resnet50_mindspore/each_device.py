"""Start one rank for each Ascend device that a rank table lists for this machine, without msrun.

    RANK_TABLE_FILE=rank_table.json python apps/resnet50_mindspore/each_device.py N TRAIN.PY --run-dir=DIR [options]

The launch script calls this program. Each rank gets DEVICE_ID, RANK_ID and RANK_SIZE in its environment, and runs in
its own folder: ``<run-dir>/device<device_id>``, or ``<run-dir>/server<k>/device<device_id>`` if the table has several
servers. The folder contains env.log, train.log, and the files of Ascend's compiler. The first failure ends the other
ranks.

``--device=cpu`` starts the same ranks with the same folders and logs on the CPU, as a rehearsal. The ranks connect
through MindSpore's scheduler. The first server runs the scheduler, with logs in ``<run-dir>/scheduler``. If the table
has several servers, set MASTER_ADDR and MASTER_PORT.

The program exits with the exit code of the first failed rank, or with 128 + the number of the signal that killed this
rank. It prints one line and exits with 2 if the call or the table is invalid. If it receives a stop signal, it exits
with 128 + the number of the signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from make_rank_table import Device
from options import TABLE_VARIABLES, Options, build_parser, table_variable
from placement import Placement, find_placement
from samestep import ConfigError, env
from samestep.job_info import JobInfo
from samestep.options import parse_as
from samestep.root import Root
from samestep.untrusted import write_json

STOP_SECONDS = 10.0  # time from SIGTERM to SIGKILL, in seconds
POLL_SECONDS = 0.1  # time between two checks for ended ranks, in seconds

Rank = tuple[Device, "subprocess.Popen[bytes]"]


def environment(placement: Placement, device: Device, folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a device's rank.

    Args:
        placement: the table's entries for this machine.
        device: the rank's device.
        folder: the rank's folder.
        more: variables of a rehearsal, or an empty dict.
    """
    # Remove the variables that a launcher set for this process, because a rank would read a wrong number from them.
    placed = env.launcher_variables()
    environ = {name: value for name, value in os.environ.items() if name not in placed}
    environ |= {name: str(placement.table) for name in TABLE_VARIABLES if name in environ}
    if environ.get("PYTHONPATH"):  # the rank runs in another folder
        folders = environ["PYTHONPATH"].split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
    environ["RANK_TABLE_FILE"] = str(placement.table)
    environ["ASCEND_WORK_PATH"] = str(folder)
    environ["RANK_ID"] = str(device.rank)
    environ["RANK_SIZE"] = str(placement.world_size)
    environ["DEVICE_ID"] = str(device.device_id)
    if more:
        environ |= {**more, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(device.rank)}
    return environ


def rehearsal(placement: Placement) -> dict[str, str]:
    """Return the variables by which ranks on the CPU connect through their scheduler.

    Raises:
        ConfigError: the table has several servers, and MASTER_ADDR or MASTER_PORT is not set.
    """
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    has_place = address and port
    if placement.node_count > 1 and not has_place:
        raise ConfigError("a rehearsal on several servers needs MASTER_ADDR and MASTER_PORT: set both to the first's")
    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
    return {
        "MS_WORKER_NUM": str(placement.world_size),
        "MS_SCHED_HOST": address or "127.0.0.1",
        "MS_SCHED_PORT": port,
    }


def start(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start one rank in its folder and in a new session, so that `run` can also kill the rank's child processes.

    Raises:
        ConfigError: the rank's logs cannot be written.
    """
    try:
        root = Root(folder.parent)
        root.make_folder(folder.name)
        lines = [os.fsencode(f"{name}={environ[name]}\n") for name in sorted(environ)]
        with root.create(f"{folder.name}/env.log", mode=0o600) as file:  # an environment may contain secrets
            file.write(b"".join(lines))
        # Append to the output of earlier starts.
        log = os.fdopen(root.open(f"{folder.name}/train.log", os.O_WRONLY | os.O_APPEND), "ab")
    except OSError as problem:
        where = problem.filename or folder
        raise ConfigError(f"{where}: {problem.strerror}: name a --run-dir to write in") from problem
    with log:
        return subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def run(placement: Placement, command: Sequence[str], run_dir: Path, more: Mapping[str, str]) -> int:
    """Start the ranks of this machine, wait for their end, and return the exit code.

    Args:
        placement: the table's entries for this machine.
        command: command of a rank.
        run_dir: run dir of the job.
        more: result of `rehearsal`, or an empty dict.
    """
    stopped: list[int] = []  # stop signals that the handler has recorded; `run` then ends every started rank
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores HUP
            signal.signal(number, lambda number, frame: stopped.append(number))
    running: list[Rank] = []
    scheduler: list[subprocess.Popen[bytes]] = []  # the scheduler of a rehearsal, which exits after the last rank
    try:
        if more and placement.node_rank == 0:
            folder = run_dir / "scheduler"
            environ = environment(placement, placement.devices[0], folder, more)
            scheduler.append(start(command, {**environ, "MS_ROLE": "MS_SCHED"}, folder))
        for device in placement.devices:
            folder = placement.folder(run_dir, device)
            environ = environment(placement, device, folder, more)
            running.append((device, start(command, environ, folder)))
        while running and not stopped:
            time.sleep(POLL_SECONDS)
            for device, process in _ended(running):
                running.remove((device, process))
                _signal(process, signal.SIGKILL)  # kills the rank's remaining child processes
                if process.returncode:
                    log = placement.folder(run_dir, device) / "train.log"
                    return _report(device, process.returncode, log)
    finally:
        _end([process for _, process in running])
        _end(scheduler)
    if stopped:
        return 128 + stopped[0]
    return 0


def _ended(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks that have ended."""
    return [(device, process) for device, process in ranks if process.poll() is not None]


def _report(device: Device, returncode: int, log: Path) -> int:
    """Print the failed rank, and return its exit code, or 128 + the number of the signal that killed it."""
    code = returncode
    if code < 0:
        code = 128 - code
    print(f"rank {device.rank} (device {device.device_id}) ended with code {code}: see {log}", file=sys.stderr)
    return code


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to ranks and their child processes, and SIGKILL after at most STOP_SECONDS."""
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        _signal(process, signal.SIGTERM)
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in processes:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def absolute_paths(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the run dir, and the options with absolute paths, because each rank runs in another folder.

    Raises:
        ConfigError: an option is invalid, or --run-dir is missing.
    """
    options = parse_as(Options, build_parser(), arguments)
    paths = {name: value.absolute() for name, value in vars(options).items() if isinstance(value, Path)}
    if "run_dir" not in paths:
        raise ConfigError("--run-dir is missing: name the folder of the run")
    # If an option is given twice, the last value applies.
    absolute = [f"--{name.replace('_', '-')}={path}" for name, path in paths.items()]
    return paths["run_dir"], [*arguments, *absolute]


def main(argv: Sequence[str]) -> int:
    """Start the ranks, and return the exit code."""
    try:
        if len(argv) < 2 or not is_number(argv[0]):
            raise ConfigError("call: each_device.py N TRAIN.PY --run-dir=DIR [options], with RANK_TABLE_FILE set")
        variable = table_variable(os.environ)
        if not variable:
            raise ConfigError("RANK_TABLE_FILE is not set: name a rank table, or start the ranks with msrun")
        placement = find_placement(variable, os.environ, int(argv[0]))
        run_dir, arguments = absolute_paths(argv[2:])
        more: dict[str, str] = {}
        if parse_as(Options, build_parser(), arguments).device == "cpu":
            more = rehearsal(placement)
        command = [sys.executable, os.path.abspath(argv[1]), *arguments]
        return run(placement, command, run_dir, more)
    except ConfigError as problem:
        print(f"error: {problem}", file=sys.stderr)
        if JobInfo.from_environ(os.environ).launcher:  # prevent restarts by the launch script
            with contextlib.suppress(OSError, ConfigError):
                run_dir, _ = absolute_paths(argv[2:])
                write_json(run_dir / "log", "no-restart", {"code": 2}, writer=0)
        return 2


def is_number(text: str) -> bool:
    """Return whether ``text`` consists of ASCII digits."""
    return text.isdecimal() and text.isascii()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
