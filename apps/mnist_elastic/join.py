"""Add ranks to a running job on this machine.

    python apps/mnist_elastic/join.py RUN_DIR [NUMBER]

The job's launcher starts the ranks. Only the user who started the job can read the job's key, which is in the run dir.
This program uses only the standard library.
"""

from __future__ import annotations

import json
import sys
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Request the ranks from the launcher, and return the exit code."""
    if len(arguments) == 1:
        arguments = [*arguments, "1"]
    if len(arguments) != 2 or not arguments[1].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    run_dir, number = arguments
    try:
        host, port, key = Path(run_dir, "log", "members").read_text().split()
        connection = Client((host, int(port)), authkey=bytes.fromhex(key))
    except (OSError, ValueError, EOFError, AuthenticationError) as error:
        print(f"error: no job runs in {run_dir}: {error}", file=sys.stderr)
        return 2
    for _ in range(int(number)):
        connection.send_bytes(json.dumps({"kind": "join"}).encode())
        answer = json.loads(connection.recv_bytes())
        if "refusal" in answer:
            print(f"error: {answer['refusal']}", file=sys.stderr)
            return 2
        print(f"rank {answer['rank']} starts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
