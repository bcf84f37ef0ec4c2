"""Exchange messages between the launcher and the processes of a job, without pickle."""

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
    """A connection to a rank, an agent or join.py. It transfers messages as JSON, and arrays as safetensors."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, *parts: bytes, **message: Any) -> None:
        """Send a message as JSON, then ``parts``. If the process at the other end has ended, do nothing."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.send_bytes(json.dumps(message).encode())
            for part in parts:
                self._connection.send_bytes(part)

    def receive(self, key: bytes, inbox: queue.Queue[Message], store: StoreServer) -> None:
        """Put each message into the inbox until the connection ends, then put an empty message.

        If a message has the kind "store", the connection serves requests of the store from then on.

        Args:
            key: the job's key, by which the other process authenticates.
            inbox: queue for the messages.
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
        except Exception:  # authentication failed, a message is invalid, or the connection ended
            inbox.put(Message(self, {}))

    def _receive_offer(self, values: dict[str, Any], inbox: queue.Queue[Message]) -> None:
        """Put an offer of arrays into the inbox. If the launcher accepts the offer, receive the arrays too."""
        answer: queue.Queue[bool] = queue.Queue()
        inbox.put(Message(self, values, answer=answer))
        if answer.get():
            contents = {group: self._connection.recv_bytes() for group in Parts.names}
            inbox.put(Message(self, values, contents=contents))


@dataclass
class Message:
    """A message that the launcher received from another process.

    Attributes:
        channel: connection on which the message arrived.
        values: content of the message; {} at the end of the connection.
        answer: queue for the launcher's answer to an offer of arrays; None for other messages.
        contents: arrays of an accepted offer, as safetensors by group.
    """

    channel: Channel
    values: dict[str, Any]
    answer: queue.Queue[bool] | None = None
    contents: dict[str, bytes] | None = None

    def reply(self, wanted: bool) -> None:
        """Accept or reject an offer of arrays. Do nothing for other messages."""
        if self.answer:
            self.answer.put(wanted)
