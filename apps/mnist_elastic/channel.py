"""Exchange messages with the processes of a job, at the launcher. Pickle is never loaded."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from authentication import StoreServer
from samestep.run import Parts


class Channel:
    """A connection to a rank, to an agent or to join.py. Messages are JSON, and arrays are safetensors."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, *parts: bytes, **message: Any) -> None:
        """Send a message and parts that follow it; a rank that has ended gets none."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.send_bytes(json.dumps(message).encode())
            for part in parts:
                self._connection.send_bytes(part)

    def receive(self, key: bytes, inbox: queue.Queue[Message], store: StoreServer) -> None:
        """Put each message into the inbox, and {} at its end, or answer requests for keys of the store.

        Args:
            key: the job's key, which the other process must know.
            inbox: gets the messages.
            store: the store by which members connect to each other.
        """
        try:
            deliver_challenge(self._connection, key)
            answer_challenge(self._connection, key)
            while True:
                values = json.loads(self._connection.recv_bytes())
                if values.get("kind") == "store":
                    store.serve(self._connection)
                elif "digest" in values:
                    self._receive_offer(values, inbox)
                else:
                    inbox.put(Message(self, values))
        except Exception:  # a stranger, or the rank has ended
            inbox.put(Message(self, {}))

    def _receive_offer(self, values: dict[str, Any], inbox: queue.Queue[Message]) -> None:
        """Put an offer of arrays into the inbox, and the arrays too if the launcher wants them."""
        answer: queue.Queue[bool] = queue.Queue()
        inbox.put(Message(self, values, answer=answer))
        if answer.get():
            contents = {group: self._connection.recv_bytes() for group in Parts.names}
            inbox.put(Message(self, values, contents=contents))


@dataclass
class Message:
    """A message of a process.

    Attributes:
        channel: where it came from.
        values: the message; {} at the end of the connection.
        answer: of an offer of arrays: whether they are wanted.
        contents: the arrays of an offer that was wanted, as safetensors by group.
    """

    channel: Channel
    values: dict[str, Any]
    answer: queue.Queue[bool] | None = None
    contents: dict[str, bytes] | None = None

    def reply(self, wanted: bool) -> None:
        """Answer an offer of arrays; other messages need no answer."""
        if self.answer:
            self.answer.put(wanted)
