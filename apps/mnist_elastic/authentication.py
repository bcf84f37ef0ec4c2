"""Restrict a group to processes that have the job's key.

Any user of the machine can connect to the ports of a job. torch's TCPStore does not authenticate connections. Members
therefore find each other by a store at the launcher, which requires an HMAC of the key from each connection. gloo does
not authenticate connections either, so members exchange HMACs over each new connection of gloo.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

PROOF_BYTES = 32  # length of an HMAC-SHA256


class StrangerFound(Exception):
    """A process without the job's key is connected in place of a member."""


class StoreServer:
    """A key-value store at the launcher, by which members connect to each other."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def serve(self, connection: Connection) -> None:
        """Answer the requests of one member until its connection ends.

        Raises:
            EOFError, OSError: the connection has ended.
        """
        while True:
            request = json.loads(connection.recv_bytes())
            if "value" in request:
                connection.send_bytes(json.dumps(self._set(**request)).encode())
            else:
                connection.send_bytes(json.dumps(self._get(**request)).encode())

    def _set(self, key: str, value: str) -> bool:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        return True

    def _get(self, keys: Sequence[str], seconds: float) -> list[str] | None:
        """Return the values of ``keys``, or None if a key is still missing after ``seconds``."""
        with self._changed:
            is_complete = self._changed.wait_for(lambda: self._values.keys() >= {*keys}, seconds)
            if not is_complete:
                return None
            return [self._values[key] for key in keys]


class LauncherStore(Store):
    """A torch Store that keeps its values in the launcher's `StoreServer`.

    torch calls the store from C++. The class has the methods that gloo needs to connect ranks.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        """Use an authenticated connection to a `StoreServer`. `get` waits up to ``timeout`` seconds for a key."""
        super().__init__()
        self._connection = connection
        self._timeout = timeout
        self._asking = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        content = value
        if isinstance(content, str):
            content = content.encode()
        self._ask(key=key, value=content.hex())

    def get(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            RuntimeError: no member set the key in time, or the connection to the launcher has ended.
        """
        values = self._wait([key], self._timeout)
        return bytes.fromhex(values[0])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return self._ask(keys=[*keys], seconds=0.0) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set, for at most ``timeout`` or the store's time limit.

        Raises:
            RuntimeError: no member set a key in time, or the connection to the launcher has ended.
        """
        seconds = self._timeout
        if timeout:
            seconds = timeout.total_seconds()
        self._wait(keys, seconds)

    def clone(self) -> LauncherStore:
        """Return this store itself, because a lock serializes the requests of threads."""
        return self

    def _wait(self, keys: Sequence[str], seconds: float) -> list[str]:
        values = self._ask(keys=[*keys], seconds=seconds)
        if values is None:
            raise RuntimeError(f"a member has not connected in {seconds:g} s")
        return [*values]

    def _ask(self, **request: Any) -> Any:
        try:
            with self._asking:
                self._connection.send_bytes(json.dumps(request).encode())
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RuntimeError("the launcher's store is gone") from error


def group_name(key: bytes, nonces: Sequence[str]) -> str:
    """Return the secret, unique name (64 hex digits) of the group whose members have the ``nonces``."""
    return sign(key, "group", *sorted(nonces)).hex()


def sign(key: bytes, *words: str) -> bytes:
    """Return the HMAC-SHA256 of ``words`` as 32 bytes."""
    return hmac.digest(key, json.dumps(words).encode(), "sha256")


def prove_key(key: bytes, group: str) -> None:
    """Exchange proofs of the key with each member of torch's default group, and verify them.

    A proof is an HMAC of the group's name, the sender's rank and the receiver's rank.

    Args:
        key: the job's key.
        group: the group's name.

    Raises:
        StrangerFound: the process at the other end of a connection does not have the key.
    """
    rank = dist.get_rank()
    peers = range(dist.get_world_size())
    mine = b"".join(sign(key, group, str(rank), str(peer)) for peer in peers)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).view(-1, PROOF_BYTES)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)  # collective: uses the connection to each member
    for peer in peers:
        expected = sign(key, group, str(peer), str(rank))
        if not hmac.compare_digest(bytes(received[peer].tolist()), expected):
            raise StrangerFound(f"the process connected as member {peer} does not know this job's key")
