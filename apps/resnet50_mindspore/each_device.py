"""Start one rank for each Ascend device that a rank table, in place of msrun, lists for this machine.

    RANK_TABLE_FILE=rank_table.json python apps/resnet50_mindspore/each_device.py N TRAIN.PY --run-dir=DIR [options]

The launch script calls it. A rank finds in its environment what the table says of its device (DEVICE_ID, RANK_ID,
RANK_SIZE) and runs in a folder of its own, ``<run-dir>/device<device_id>`` (``<run-dir>/server<k>/device<device_id>``
where the table has several servers), with its env.log, its train.log, and what Ascend's compiler leaves in the folder
in which it works. The first failure ends the others.

Standard library alone, as options.py: the launch script asks `find_place` before anything is installed.
Exit codes: that of the rank that failed first (128 + the signal by which it was killed); 2 a mistake in the call or in
the table, told in one line; 130 and 143 stopped by INT and TERM.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Of a program its own folder is first on sys.path; in the launch script, which imports this file too, it is last.
from make_rank_table import Device, RankTableError, read
from options import TABLE_VARIABLES, build_parser
from samestep import ConfigError

# By these, what placed this process on its machine would place its ranks (samestep.env), and before their table does.
PLACED = ("OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "SLURM_STEP")
STOP_SECONDS = 10.0  # from TERM to KILL
POLL_SECONDS = 0.1  # between looks whether a rank has ended


@dataclass(frozen=True)
class Place:
    """What a rank table says of this machine."""

    table: Path  # absolute
    devices: Sequence[Device]  # of this machine, in the order of their ranks
    rank_size: int  # devices of the whole table
    node_rank: int  # which of its servers this machine is, in the order of their ranks
    node_count: int

    def folder(self, run_dir: Path, device: Device) -> Path:
        """Of one device; servers may have the run dir on a common disk, and each has a device 0."""
        of_server = run_dir / f"server{self.node_rank}" if self.node_count > 1 else run_dir
        return of_server / f"device{device.device_id}"


# --- which devices are this machine's? -----------------------------------------------------------------------------


def table_variable(environ: Mapping[str, str]) -> str | None:
    """The variable that names a rank table; None where none does. Raises UserError where two name different ones."""
    given = [name for name in TABLE_VARIABLES if environ.get(name)]
    if len({os.path.abspath(environ[name]) for name in given}) > 1:
        raise ConfigError(
            f"{' and '.join(f'{name}={environ[name]}' for name in given)} are two tables: unset one of them"
        )
    return given[0] if given else None


def find_place(environ: Mapping[str, str], ranks: int) -> Place | None:
    """This machine's place in the rank table of ``environ``; None where there is none.

    Raises UserError where the table is wrong, does not list this machine, lists other than ``ranks`` devices for it, or
    is contradicted by NNODES or NODE_RANK.
    """
    variable = table_variable(environ)
    if variable is None:
        return None
    try:
        table = read(Path(environ[variable]), to_start=True)
    except RankTableError as error:
        raise ConfigError(f"{variable}={error}") from None
    title = f"{variable}={environ[variable]}"
    servers = replace(table, devices=sorted(table.devices, key=lambda device: device.rank)).servers()
    node_rank = _this_server(list(servers), title, environ)
    devices = list(servers.values())[node_rank]
    if len(devices) != ranks:
        ids = ", ".join(str(each.device_id) for each in devices)
        raise ConfigError(f"N={ranks}, but {title} lists {len(devices)} for this machine ({ids}): give N={len(devices)}")
    return Place(Path(environ[variable]).absolute(), devices, len(table.devices), node_rank, len(servers))


def _this_server(server_ids: Sequence[str], title: str, environ: Mapping[str, str]) -> int:
    """Which of the servers this machine is: by its addresses and name, and where these cannot tell, by NODE_RANK."""
    count, host = len(server_ids), socket.gethostname()
    shown = f"{', '.join(map(ascii, server_ids[:8]))}{', ...' if count > 8 else ''}"
    listed = f"{title} lists {count} server{'s'[: count > 1]}: {shown}"
    if environ.get("NNODES") not in (None, "", str(count)):
        raise ConfigError(f"NNODES={environ['NNODES']}, but {listed}: unset NNODES, or set it to {count}")
    own = [is_own(server_id) for server_id in server_ids]
    # HCCL compares server_ids and never connects to them: any string may stand for a server that is alone.
    certain = [i for i in range(count) if own[i] or (count == 1 and own[i] is None)]
    possible = certain or [i for i in range(count) if own[i] is None]
    if not possible:
        raise ConfigError(f"{listed}: none is this machine ({host}): start the job on those, or correct server_id")
    given = environ.get("NODE_RANK")
    if given:
        if given not in map(str, possible):
            may_be = " or ".join(map(str, possible[:8]))
            raise ConfigError(
                f"NODE_RANK={given}, but {listed}, of which this machine ({host}) is number {may_be} "
                "(from 0, in the order of ranks): unset NODE_RANK, or correct it"
            )
        return int(given)
    if len(certain) != 1:
        raise ConfigError(
            f"{listed}: which is this machine ({host}) cannot be told: set NODE_RANK to its number there, from 0 in "
            "the order of ranks"
        )
    return certain[0]


def is_own(server_id: str) -> bool | None:
    """Whether it is an address or the name of this machine; None for what is neither an address nor this name."""
    try:
        address = ipaddress.ip_address(server_id)
    except ValueError:
        host = socket.gethostname()
        return True if server_id in (host, host.partition(".")[0]) else None
    try:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((server_id, 0))  # nothing is sent; only to an address of its own a machine can bind
    except OSError:
        return False
    return True


# --- its ranks -----------------------------------------------------------------------------------------------------


def environment(place: Place, device: Device, folder: Path) -> dict[str, str]:
    """What the rank of one device finds in its environment, beside what this process found."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PLACED)}
    for name in TABLE_VARIABLES:
        if name in environ:
            environ[name] = str(place.table)
    if environ.get("PYTHONPATH"):  # the rank runs elsewhere
        environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, environ["PYTHONPATH"].split(os.pathsep)))
    environ.update(
        RANK_TABLE_FILE=str(place.table),
        RANK_ID=str(device.rank),
        RANK_SIZE=str(place.rank_size),
        DEVICE_ID=str(device.device_id),
        ASCEND_WORK_PATH=str(folder),
    )
    return environ


def start(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """One rank, in its folder, as the leader of a session: what it starts is ended with it. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        environment_log = folder / "env.log"
        environment_log.unlink(missing_ok=True)
        # An environment may hold secrets.
        descriptor = os.open(environment_log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.writelines(os.fsencode(f"{name}={value}\n") for name, value in sorted(environ.items()))
        log = (folder / "train.log").open("ab")  # behind what an earlier start said
    except OSError as problem:
        raise ConfigError(f"{problem.filename or folder}: {problem.strerror}: name a --run-dir to write in") from problem
    with log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(place: Place, command: Sequence[str], run_dir: Path) -> int:
    """Start the ranks of this machine, and return the exit code when none of them is left."""
    stopped: list[int] = []  # signals; looked for between starts, so that no rank is started and then forgotten
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores HUP
            signal.signal(number, lambda number, frame: stopped.append(number))
    running: list[tuple[Device, subprocess.Popen[bytes]]] = []
    try:
        for device in place.devices:
            folder = place.folder(run_dir, device)
            running.append((device, start(command, environment(place, device, folder), folder)))
        while running and not stopped:
            for device, process in running.copy():
                code = process.poll()
                if code is None:
                    continue
                running.remove((device, process))
                _signal(process, signal.SIGKILL)  # what it left behind
                if code != 0:
                    code = code if code > 0 else 128 - code
                    log = place.folder(run_dir, device) / "train.log"
                    told = f"rank {device.rank} (device {device.device_id}) ended with code {code}: see {log}"
                    print(told, file=sys.stderr)
                    return code
            time.sleep(POLL_SECONDS)
    finally:
        _end([process for _, process in running])
    return 128 + stopped[0] if stopped else 0


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """TERM to these ranks and what they started; KILL to what remains after 10 s."""
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        _signal(process, signal.SIGTERM)
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


# --- the command line ----------------------------------------------------------------------------------------------


def absolute_paths(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The run dir, and the options with every path in them made absolute, as ranks run in other folders."""
    options = build_parser().parse(arguments)
    paths = {name: value.absolute() for name, value in vars(options).items() if isinstance(value, Path)}
    if "run_dir" not in paths:
        raise ConfigError("--run-dir is missing: name the folder of the run")
    # Of an option that is given twice the last counts.
    return paths["run_dir"], [*arguments, *(f"--{name.replace('_', '-')}={path}" for name, path in paths.items())]


def main(argv: Sequence[str]) -> int:
    try:
        if len(argv) < 2 or not (argv[0].isdecimal() and argv[0].isascii()):
            raise ConfigError("call: each_device.py N TRAIN.PY --run-dir=DIR [options], with RANK_TABLE_FILE set")
        place = find_place(os.environ, int(argv[0]))
        if place is None:
            raise ConfigError("RANK_TABLE_FILE is not set: name a rank table, or start the ranks with msrun")
        run_dir, arguments = absolute_paths(argv[2:])
        return run(place, [sys.executable, os.path.abspath(argv[1]), *arguments], run_dir)
    except ConfigError as problem:
        print(f"error: {problem}", file=sys.stderr)
        if "SAMESTEP_LAUNCHER" in os.environ:  # the launch script started no rank for it, and is not to try again
            with contextlib.suppress(OSError, ConfigError):
                (absolute_paths(argv[2:])[0] / "log" / "no-restart").write_text(json.dumps({"code": 2}))
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
