"""Attack a job of mnist_elastic, as a process of another user without the job's key.

    python stranger.py PORT ...

The arguments are the ports that /proc/net/tcp shows to each user. Until stdin is closed, the program requests groups
from the lighthouse, under its own name with a high progress and under the names of members. It also sends a hello with
another key to the launcher, and reads from all ports. It prints a line as soon as the lighthouse answers, and JSON at
the end. ``groups`` has the members of the groups that the lighthouse proposed, ``most_bytes`` the most bytes that a
connection received, and ``accepted`` the number of connections that the launcher accepted.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # another user may not be able to read Python's files
import hmac  # noqa: F401
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

from torchft.coordination import LighthouseClient

NOBODY = 65534
NAMES = ["stranger", "000000", "000001", "000002"]
STATE = {"progress": 10**6, "digest": "0" * 64, "nonce": "0" * 32, "rank": 1}


class Stranger:
    """Run the attacks, and collect their results."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self._is_over = threading.Event()
        self.groups: set[tuple[str, ...]] = set()
        self.most_bytes = self.accepted = 0

    def run(self) -> dict[str, Any]:
        """Attack all ports at once until stdin is closed."""
        threads: list[threading.Thread] = []
        for port in self._ports:
            threads += [threading.Thread(target=self.propose, args=[port, name]) for name in NAMES]
            threads += [threading.Thread(target=attack, args=[port]) for attack in (self.greet, self.read)]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self._is_over.set()
        for thread in threads:
            thread.join()
        return {"groups": sorted(self.groups), "most_bytes": self.most_bytes, "accepted": self.accepted}

    def propose(self, port: int, name: str) -> None:
        """Request a group from the lighthouse under a name, until the attack is over."""
        second = timedelta(seconds=1)
        try:
            client = LighthouseClient(f"http://127.0.0.1:{port}", second)
            client.heartbeat(name, second)
        except Exception:
            return
        print("the lighthouse answers", flush=True)
        while not self._is_over.is_set():
            with contextlib.suppress(Exception):  # the request may time out
                quorum = client.quorum(replica_id=name, timeout=second, data={**STATE, "name": name})
                self.groups.add(tuple(sorted(each.replica_id for each in quorum.participants)))

    def greet(self, port: int) -> None:
        """Send a hello to the launcher under the first member's name, with another key."""
        while not self._is_over.is_set():
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                connection = Client(("127.0.0.1", port), authkey=b"another")
                self.accepted += 1
                connection.send_bytes(json.dumps({"kind": "hello", "rank": 1, "name": NAMES[1]}).encode())
            time.sleep(0.2)

    def read(self, port: int) -> None:
        """Send eight bytes 0xFF to a port, and record the most bytes received, until the attack is over."""
        while not self._is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.sendall(b"\xff" * 8)  # gloo reads these bytes as the number of an unknown connection
                content = connection.recv(2**20)
                self.most_bytes = max(self.most_bytes, len(content))
            time.sleep(0.2)


def main() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    print(json.dumps(Stranger([int(port) for port in sys.argv[1:]]).run()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
