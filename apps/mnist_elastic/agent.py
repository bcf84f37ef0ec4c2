"""Start ranks on this machine for the launcher on machine 0, and report their exit codes to the launcher."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from channel import connect
from samestep import RetryableError, stop
from start import Process, Starter

CONNECT_SECONDS = 60.0  # time limit for the first connection to the launcher


def serve(nproc: int, address: str, port: int, key: bytes, program: Sequence[str]) -> None:
    """Execute the launcher's requests until the launcher sends "end".

    If a stop signal ends the last rank of this machine, this process ends by the same signal.

    Args:
        nproc: number of ranks to start on this machine.
        address: host of the launcher.
        port: port of the launcher.
        key: the job's key.
        program: path of train.py and its arguments.

    Raises:
        RetryableError: the connection to the launcher failed, so the launch scripts of all machines must restart.
    """
    connection = _connect(address, port, key)
    starter = Starter(program, f"{address} {port} {key.hex()}")
    processes: dict[int, Process] = {}
    try:
        _send(connection, kind="agent", ranks=nproc)
        while True:
            message: dict[str, Any] = {}
            if connection.poll(0.1):
                message = json.loads(connection.recv_bytes())
            kind = message.get("kind")
            if kind == "end":
                return
            if kind == "start":
                rank = message["rank"]
                processes[rank] = starter.start(rank, message["name"], ranks=message["ranks"])
            if kind == "kill" and message["rank"] in processes:
                processes[message["rank"]].kill()
            _report_ended(processes, connection)
    except (EOFError, OSError) as error:
        raise RetryableError(f"the launcher at {address}:{port} is gone") from error
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _report_ended(processes: dict[int, Process], connection: Connection) -> None:
    """Send the exit codes of ended ranks to the launcher, and remove these ranks from ``processes``.

    If a stop signal ended the last rank, end this process by the same signal.
    """
    for rank, process in [*processes.items()]:
        code = process.poll()
        if code is None:
            continue
        _send(connection, kind="exit", rank=rank, code=code)
        del processes[rank]
        if not processes and code - 128 in stop.STOP_SIGNALS:
            signal.signal(code - 128, signal.SIG_DFL)
            os.kill(os.getpid(), code - 128)


def _connect(address: str, port: int, key: bytes) -> Connection:
    try:
        return connect((address, port), key, CONNECT_SECONDS)
    except (EOFError, OSError) as error:
        raise RetryableError(f"no launcher listens at {address}:{port}") from error


def _send(connection: Connection, **message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())
