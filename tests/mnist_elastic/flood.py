"""Flood a launcher with connections that send nothing, and print whether the launcher still answers, as JSON.

For each case, the result has the launcher's answers to a process with the job's key, during and after the flood. In the
case ``deadline``, only the time limit of a connection frees file descriptors. In the case ``limit``, only the limit of
connections without a proof does. In the case ``displaced``, the launcher ends the first connection of the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Listener, answer_challenge, deliver_challenge
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_elastic")]

import channel  # type: ignore[import-not-found]  # noqa: E402
import launcher  # type: ignore[import-not-found]  # noqa: E402

CONNECTIONS = 100
FREE = 50  # number of file descriptors that the launcher can open
NEVER = 1000.0
LIMIT_SECONDS = 60  # time limit of each process


def serve(listener: Listener, switchboard: Any) -> None:
    """Answer each message by its text, with few file descriptors."""
    count = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + FREE, hard))
    Thread(target=switchboard._accept, args=[listener], daemon=True).start()
    while True:
        message = switchboard.inbox.get()
        if message.values:
            message.channel.send(text=message.values["text"])


def ask(address: tuple[str, int], key: bytes, text: str) -> str:
    """Return the launcher's answer to a process with the key."""
    with channel.connect(address, key, LIMIT_SECONDS) as connection:
        connection.send_bytes(json.dumps({"text": text}).encode())
        return str(json.loads(connection.recv_bytes())["text"])


def flood(proof_seconds: float, max_unproven: int) -> list[str]:
    """Return the answers during and after the flood of a launcher with these limits."""
    channel.PROOF_SECONDS = proof_seconds
    launcher.MAX_UNPROVEN = max_unproven
    listener = Listener(("127.0.0.1", 0), backlog=2 * CONNECTIONS)
    address = listener.address
    switchboard = launcher.Switchboard(*address)
    pid = os.fork()
    signal.alarm(LIMIT_SECONDS)
    if pid == 0:
        serve(listener, switchboard)
    connections = [socket.create_connection(address) for _ in range(CONNECTIONS)]
    answers = [ask(address, switchboard._key, "during")]
    for connection in connections:
        connection.close()
    answers.append(ask(address, switchboard._key, "after"))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return answers


def displaced() -> str:
    """Return the answer to a process whose first connection the launcher ends."""
    key = b"k" * 32
    listener = Listener(("127.0.0.1", 0))

    def accept_second() -> None:
        listener.accept().close()
        connection = listener.accept()
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        connection.send_bytes(connection.recv_bytes())
        connection.recv_bytes()  # the end of the connection

    Thread(target=accept_second, daemon=True).start()
    return ask(listener.address, key, "second")


def main() -> None:
    cases = {"deadline": flood(0.5, 2 * CONNECTIONS), "limit": flood(NEVER, FREE // 2), "displaced": displaced()}
    print(json.dumps(cases), flush=True)


if __name__ == "__main__":
    main()
