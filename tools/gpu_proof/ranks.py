"""Start the ranks of a program without an app and without a launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gpu_proof.jobs import ROOT, Row, last_errors, start_process

Outputs = list[tuple[str, str]]  # stdout and stderr of each rank


def run_ranks(row: Row, words: Sequence[str], ranks: int, killed: int | None = None, device: str = "") -> Outputs:
    """Run a Python program as the ranks of one job, and return each rank's stdout and stderr.

    Args:
        row: row that starts the ranks.
        words: the program and its arguments.
        ranks: number of ranks.
        killed: a rank that kills itself. The function then kills the other ranks, as a launcher would, and returns an
            empty list.
        device: "cpu" or "cuda"; by default the proof's device.

    Raises:
        RuntimeError: a rank failed.
        TimeoutError, NotRunError: the ranks did not end in time.
    """
    device = device or row.proof.device
    with row.proof.slots.take(ranks, row.priority):
        deadline = row.begin_job()
        started = [
            start_process([sys.executable, *words], row.proof.folder, device, variables=place)
            for place in places(ranks)
        ]
        try:
            if killed is not None:
                row.communicate(started[killed], deadline)
                if started[killed].returncode != -signal.SIGKILL:
                    raise RuntimeError(f"rank {killed} ended with {started[killed].returncode}, not by SIGKILL")
                return []
            outputs = [row.communicate(process, deadline) for process in started]
        except subprocess.TimeoutExpired:
            raise row.late(f"not done in time: {end_all(started)}") from None
        finally:
            end_all(started)
    if any(process.returncode for process in started):
        texts = [f"rank {rank}: {' / '.join(last_errors(err, 2))[:600]}" for rank, (_, err) in enumerate(outputs)]
        raise RuntimeError(" | ".join(texts))
    return outputs


def places(ranks: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank of a job on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "core"), os.environ.get("PYTHONPATH")]))
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def end_all(started: Sequence[subprocess.Popen[str]]) -> str:
    """Kill the processes that still run, and return the last errors that each of them printed."""
    texts = []
    for rank, process in enumerate(started):
        if process.poll() is None:
            process.kill()
            texts.append(f"rank {rank}: {' / '.join(last_errors(process.communicate()[1], 2))[:600]}")
    return " | ".join(texts)


def printed(outputs: Outputs) -> dict[str, Any]:
    """Return the JSON object that rank 0 printed. Libraries such as NCCL may print other lines."""
    (line,) = [line for line in outputs[0][0].splitlines() if line.startswith("{")]
    values: dict[str, Any] = json.loads(line)
    return values
