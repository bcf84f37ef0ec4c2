"""Exchange messages between the launcher and the processes of a job, without pickle."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

from authentication import StoreServer
from samestep.run import Parts

PROOF_SECONDS = 10.0  # time limit for a process to prove that it has the job's key, in seconds
RETRY_SECONDS = 0.2  # time between two attempts to connect to the launcher, in seconds


class Channel:
    """A connection to a rank, an agent or join.py. It transfers messages as JSON, and arrays as safetensors.

    Attributes:
        is_unproven: whether the process at the other end must still prove that it has the job's key.
    """

    def __init__(self, connection: Connection) -> None:
        self.is_unproven = True
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

        Put no message if the other process does not prove within PROOF_SECONDS that it has the key.

        If a message has the kind "store", the connection serves requests of the store from then on.

        Args:
            key: the job's key, by which the other process authenticates.
            inbox: queue for the messages.
            store: the store by which members connect to each other.
        """
        if not self._verify(key):
            return
        try:
            while True:
                values = json.loads(self._connection.recv_bytes())
                if values.get("kind") == "store":
                    store.serve(self._connection)
                elif "digest" in values:
                    self._receive_offer(values, inbox)
                else:
                    inbox.put(Message(self, values))
        except Exception:  # a message is invalid, or the connection ended
            inbox.put(Message(self, {}))

    def _verify(self, key: bytes) -> bool:
        """Exchange proofs of the key. Return whether the other process has the key; otherwise, end the connection."""
        timer = threading.Timer(PROOF_SECONDS, self.end)
        try:
            timer.start()
            deliver_challenge(self._connection, key)
            answer_challenge(self._connection, key)
            return True
        except Exception:  # another key, an invalid message, no free thread, or the connection ended
            self.end()
            return False
        finally:
            self.is_unproven = False
            timer.cancel()

    def end(self) -> None:
        """Shut the connection down from any thread. The thread that waits for a message then finds its end.

        The file descriptor stays open until Python deletes this object, so that no other connection gets its number
        while a thread uses it.
        """
        with contextlib.suppress(OSError):  # the other process has already ended the connection
            end = socket.socket(fileno=self._connection.fileno())
            try:
                end.shutdown(socket.SHUT_RDWR)
            finally:
                end.detach()

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


def connect(place: tuple[str, int], key: bytes, seconds: float) -> Connection:
    """Connect to the launcher. Both sides prove by an HMAC that they have the job's key.

    If the attempt fails, try again. The launcher may not yet listen, or a flood of connections may have displaced this
    one.

    Args:
        place: host and port of the launcher.
        key: the job's key.
        seconds: time limit for all attempts.

    Raises:
        EOFError, OSError: the last attempt failed.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return Client(place, authkey=key)
        except (EOFError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
