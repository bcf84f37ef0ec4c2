"""Check before a job's start that all its machines are reachable and have the same code, options and data.

If a framework cannot connect to another machine, it often prints nothing for minutes, and then reports only the failed
connection. So the launch scripts of all machines connect first. Machine 0 listens at MASTER_PORT, where its launcher
will listen afterwards. The other machines retry until they reach machine 0, because machines start at different times
and host names may resolve late. Each machine sends its `NodeInfo` to machine 0, which compares the descriptions and
sends its plan. The other machines check that they can follow the plan (``prepare``), and all machines start together.
All machines report a mismatch by the same error line. The preflight is repeated before each restart. If an app can
continue without a lost machine, machine 0 also admits machines during training (`admit_late`).

A machine that will not restart reports this by `abort`, because the other machines would wait for it. The connections
also reveal the numeric address of each machine; its host name may resolve to another address.

The protocol is one JSON object per line. Each end first sends a nonce. All later lines carry an HMAC, whose key
depends on both nonces and on SAMESTEP_SECRET. The HMAC proves that the sender has the secret, and that no line was
changed, repeated or reordered in transit. The secret itself is never sent. Without a secret the HMAC proves nothing:
any host that reaches MASTER_PORT can take part. Every message is checked when it arrives, and connections of other
programs are ignored. The module never executes received text, and escapes it before printing. This module imports
no third-party package.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import queue
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from samestep import ConfigError, NonRetryableError, untrusted

from samestep_launch.supervise import Stopped, print_stderr

PROTOCOL = "samestep preflight 3"
WAIT_NOTICE_AFTER = 5.0  # seconds until the launch script prints which machines are missing
RETRY = 0.5  # seconds between attempts to connect
REPLY_TIMEOUT = 5.0  # seconds; a peer that replies later does not count as a launch script
ALIVE = 2.0  # seconds between messages by which machine 0 shows that it still runs
MAX_BYTES = 2**20  # maximum length of a line in bytes
MAX_STRANGERS = 32  # maximum number of connections without a valid message, in addition to the number of machines
MAX_WARNINGS = 10  # maximum number of warnings about refused addresses
MAX_PROBLEM = 2000  # maximum number of characters of an error that another machine reports
DIFFERENT_SECRETS = "the secrets differ: set the same SAMESTEP_SECRET on all machines"
OTHER_VERSION = "the machines have different versions of Samestep: check out the same commit on all machines"
Message = Mapping[str, Any]


def _is_text(value: Any) -> bool:
    """Return whether a value is printable text of at most 4096 characters, including bytes that are not UTF-8."""
    if not isinstance(value, str) or len(value) > 4096:
        return False
    return all(each.isprintable() or "\udc80" <= each <= "\udcff" for each in value)


def _is_option(value: Any, depth: int = 0) -> bool:
    """Return whether a value can be an option's JSON value, with at most 5 nested levels."""
    if isinstance(value, list) and depth < 5:
        return all(_is_option(each, depth + 1) for each in value)
    if isinstance(value, dict) and depth < 5:
        return all(_is_option(each, depth + 1) for each in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


def _by_name(of: untrusted.Check) -> untrusted.Check:
    return lambda value: isinstance(value, dict) and all(_is_text(name) and of(value[name]) for name in value)


_MANY = 2**20  # maximum number of machines and of ranks, far above any real job
FIELDS: Mapping[str, untrusted.Check] = {  # checks of the fields of all kinds of messages
    "protocol": untrusted.text(100),
    "nonce": untrusted.text(100),
    "app": _is_text,
    "machine": untrusted.integer(0, _MANY),
    "machines": untrusted.integer(1, _MANY),
    "ranks": untrusted.integer(1, _MANY),
    "options": _by_name(_is_option),
    "files": _by_name(_is_text),
    "versions": _by_name(_is_text),
    "host": _is_text,
    "after": untrusted.text(100),
    "here": lambda value: value is True,
    "plan": _by_name(_is_text),
    "ready": lambda value: value is True,
    "start": lambda value: isinstance(value, list) and all(map(untrusted.integer(1, _MANY), value)),
    "problem": untrusted.text(MAX_BYTES),
    "fatal": lambda value: value is None or isinstance(value, bool),
}


@dataclass(frozen=True)
class NodeInfo:
    """The description of one machine of a job, as JSON values.

    Attributes:
        app: name of the app.
        machine: this machine's number, from 0.
        machines: number of machines of the job.
        ranks: number of ranks on this machine.
        options: options that must be the same on all machines.
        files: digest of each code file, by path.
        versions: version of each package, by name.
        host: host name.
        nonce: random text by which machine 0 detects a connection to itself.
        after: name of the previous start, which failed; "" at the first start.
    """

    app: str
    machine: int
    machines: int
    ranks: int
    options: Mapping[str, Any]
    files: Mapping[str, str]
    versions: Mapping[str, str]
    host: str = ""
    nonce: str = ""
    after: str = ""

    @property
    def name(self) -> str:
        return f"machine {self.machine} ({self.host})"


@dataclass(frozen=True)
class Rendezvous:
    """The values that all machines share when they start.

    Attributes:
        ranks: each machine's number of ranks.
        address: this machine's numeric address, because some launchers cannot find their own machine by a name.
        master: machine 0's numeric address.
        plan: machine 0's plan.
    """

    ranks: tuple[int, ...]
    address: str
    master: str
    plan: Mapping[str, Any]


def digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return the first 16 hexadecimal digits of each file's SHA-256, by the file's path relative to ``root``.

    A file outside ``root`` is listed by the last two components of its path.
    """
    digest = {}
    for path in sorted(paths):
        name = Path(*path.parts[-2:])
        if path.is_relative_to(root):
            name = path.relative_to(root)
        digest[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return digest


def difference(first: NodeInfo, other: NodeInfo, equal_ranks: bool = False) -> str:
    """Return one line that explains why two machines cannot run the same job; "" if they can.

    Args:
        first: the description of one machine.
        other: the description of another machine.
        equal_ranks: whether the launcher needs the same number of ranks on each machine.
    """

    def both(what: str, here: Any, there: Any, remedy: str) -> str:
        return f"{what} is {here} on {first.name} and {there} on {other.name}: {remedy}"

    if first.machine == other.machine:
        return f"{first.host} and {other.host} both have NODE_RANK={other.machine}: give each machine its own"
    if first.app != other.app:
        return both("the app", first.app, other.app, "start the same script on all machines")
    if first.machines != other.machines:
        return both("NNODES", first.machines, other.machines, "set it to the number of machines on all")
    file = _first_difference(first.files, other.files)
    if file:
        return f"{file} differs between {first.name} and {other.name}: check out the same commit on all machines"
    package = _first_difference(first.versions, other.versions)
    if package:
        here = first.versions.get(package, "missing")
        there = other.versions.get(package, "missing")
        return both(package, here, there, remedy="install the same on all machines")
    option = _first_difference(first.options, other.options)
    if option:
        here = json.dumps(first.options.get(option))
        there = json.dumps(other.options.get(option))
        return both(f"--{option.replace('_', '-')}", here, there, remedy="give all machines the same options")
    if equal_ranks and first.ranks != other.ranks:
        return both("N", first.ranks, other.ranks, "this app's launcher wants as many ranks on each machine")
    return ""


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first name, in sorted order, whose values differ; "" if all values are equal."""
    for name in sorted(first.keys() | other.keys()):
        if first.get(name) != other.get(name):
            return name
    return ""


def read_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret of the job's machines, from SAMESTEP_SECRET or the file that SAMESTEP_SECRET_FILE names.

    The secret is b"" if neither variable is set.

    Raises:
        ConfigError: the file is unreadable, empty, or open to other users.
    """
    path = environ.get("SAMESTEP_SECRET_FILE")
    secret = os.fsencode(environ.get("SAMESTEP_SECRET", "")).strip()
    if secret or not path:
        return secret
    shown = untrusted.shown(path, limit=200)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # without O_NONBLOCK, a FIFO would block
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError(
            f"SAMESTEP_SECRET_FILE={shown}: {error.strerror}: name a file that holds the secret"
        ) from None
    if mode & 0o077:
        raise ConfigError(f"SAMESTEP_SECRET_FILE={shown} is open to other users: chmod 600 it")
    if not secret:
        raise ConfigError(
            f"SAMESTEP_SECRET_FILE={shown} is empty: write a secret to it, such as the output of `openssl rand -hex 32`"
        )
    return secret


def preflight(
    node: NodeInfo,
    address: str,
    port: int,
    limit: float,
    plan: Callable[[], Mapping[str, Any]],
    prepare: Callable[[Mapping[str, Any]], None],
    equal_ranks: bool = False,
    secret: bytes = b"",
) -> Rendezvous:
    """Connect to the other machines of the job and return the shared values.

    Args:
        node: this machine's description.
        address: machine 0's address, from MASTER_ADDR.
        port: port at machine 0, from MASTER_PORT.
        limit: seconds to wait until all machines have connected, and again until all are prepared.
        plan: function that returns the plan. It is called on machine 0 when all machines are connected.
        prepare: function that is called on the other machines with the plan. An error in ``plan`` or ``prepare`` ends
            the preflight on all machines.
        equal_ranks: whether all machines need the same number of ranks.
        secret: secret that all machines share; b"" for none.

    Raises:
        ConfigError: the machines cannot run the same job, or machine 0 cannot listen at ``port``.
        NonRetryableError: a machine is missing or has failed. All connected machines raise the same error.
    """
    node = _with_host(node)
    place = Place(address, port, deadline=time.monotonic() + limit, limit=limit, secret=secret)
    if node.machine == 0:
        if not secret and not node.after:
            risk = "any host that reaches MASTER_PORT can stop this job"
            print_stderr(f"warning: SAMESTEP_SECRET is not set: {risk}: set the same secret on all machines")
        return _Host(node, place, equal_ranks).run(plan)
    return _join(node, place, prepare)


@contextlib.contextmanager
def admit_late(node: NodeInfo, address: str, port: int, met: Rendezvous, secret: bytes = b"") -> Iterator[None]:
    """Admit machines that reconnect while machine 0 is in this context, and send them the plan of ``met``.

    Args:
        node: this machine's description.
        address: machine 0's address.
        port: the port to listen at.
        met: the rendezvous that the preflight returned.
        secret: secret that all machines share; b"" for none.
    """
    listener = _Listener(_with_host(node), Place(address, port, math.inf, REPLY_TIMEOUT, secret))

    def answer() -> None:
        while True:
            connection, message = listener.inbox.get()
            other = _as_node(message)
            problem = message.get("problem")  # a machine has stopped; the other machines continue
            if other and problem is None:
                problem = difference(node, other) or None
            if problem is not None:
                connection.send({"problem": problem})
            elif other:
                connection.send({"here": True})
                connection.send({"plan": met.plan})
            elif message:  # the machine is ready
                connection.send({"start": met.ranks})
            else:
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield
    finally:
        listener.close()


def abort(node: NodeInfo, address: str, port: int, reason: str, limit: float, secret: bytes = b"") -> None:
    """Report to the job's other machines that this machine will not restart.

    The function returns when machine 0 has received the report, at the latest after ``limit`` seconds. On machine 0,
    the function waits until all other machines have received the report.

    Args:
        node: this machine's description.
        address: machine 0's address.
        port: machine 0's port.
        reason: the predicate of the report, such as "has finished".
        limit: maximum time in seconds.
        secret: secret that all machines share; b"" for none.
    """
    node = _with_host(node)
    place = Place(address, port, deadline=time.monotonic() + limit, limit=limit, secret=secret)
    abort_message = {**asdict(node), "problem": f"{node.name} {reason}", "fatal": True}
    with contextlib.suppress(OSError, ConfigError):
        if node.machine == 0:
            _send_to_all(node, place, abort_message)
            return
        while place.left > 0:  # machine 0's launcher may still use the port
            connection, _ = _connect(place)
            if connection:
                with contextlib.suppress(TimeoutError):
                    deadline = time.monotonic() + min(REPLY_TIMEOUT, place.left)
                    if "problem" in connection.introduce(abort_message, deadline):
                        return
                connection.close()
            time.sleep(RETRY)


def _send_to_all(node: NodeInfo, place: Place, message: Message) -> None:
    """Send a message to each machine of the same start that connects to machine 0."""
    informed: set[int] = set()
    listener = _Listener(node, place)
    try:
        while len(informed) < node.machines - 1 and place.left > 0:
            with contextlib.suppress(queue.Empty):
                connection, hello = listener.inbox.get(timeout=min(0.2, max(0.0, place.left)))
                if hello.get("after") == node.after:
                    connection.send(message)
                    informed.add(hello.get("machine", 0))
                connection.close()
    finally:
        listener.close()


def _with_host(node: NodeInfo) -> NodeInfo:
    return replace(node, host=node.host or socket.gethostname(), nonce=uuid.uuid4().hex)


@dataclass(frozen=True)
class Place:
    """The address and port at which machines connect.

    Attributes:
        deadline: end of the attempts, on the clock `time.monotonic`.
        limit: time limit in seconds, for messages.
        secret: secret that all machines share; b"" for none.
    """

    address: str
    port: int
    deadline: float
    limit: float
    secret: bytes = field(default=b"", repr=False)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.address} MASTER_PORT={self.port}"


class JsonConnection:
    """A connection with one JSON object per line."""

    def __init__(self, connection: socket.socket, secret: bytes = b"") -> None:
        """Enable TCP keepalive on the connection.

        Args:
            connection: a connected socket.
            secret: secret that all machines share; b"" for none.

        Raises:
            OSError: the peer has disconnected.
        """
        self._connection = connection
        self._secret = secret
        self._received = bytearray()
        self._keys: tuple[bytes, bytes] | None = None  # HMAC keys for sent and received lines; None without nonces
        self._counts = [0, 0]  # numbers of lines with an HMAC: sent, received
        self._sending = threading.Lock()
        self.here = _plain(connection.getsockname()[0])
        self.there = _plain(connection.getpeername()[0])
        # Keepalive detects after 9 s that the other host has lost power or network.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def introduce(self, message: Message, deadline: float) -> Message:
        """Send the first message to machine 0 and return the reply; {} if the peer lacks this protocol.

        Raises:
            TimeoutError: the deadline has passed without a reply.
            ConfigError: the peer has another secret.
        """
        nonce = self._send_nonce()
        hello = self.receive(deadline)
        if hello.get("protocol") != PROTOCOL:
            return {}
        self._set_keys(False, nonce, hello.get("nonce", ""))
        self.send(message)
        return self.receive(deadline)

    def accept(self, deadline: float) -> Message:
        """Return the first message of another machine; {} if the peer is another program.

        Raises:
            TimeoutError: the deadline has passed without a message.
            ConfigError: the peer has another secret or another version of the protocol.
        """
        hello = self.receive(deadline)
        if hello.get("protocol") != PROTOCOL:
            if "protocol" in hello:
                raise ConfigError(OTHER_VERSION)
            return {}
        self._set_keys(True, self._send_nonce(), hello.get("nonce", ""))
        return self.receive(deadline)

    def refuse(self, problem: str) -> None:
        """Send an error to an unauthenticated peer, without an HMAC, which would help the peer guess the secret."""
        self._keys = None
        self.send({"problem": problem})

    def _send_nonce(self) -> str:
        nonce = secrets.token_hex(16)
        self.send({"protocol": PROTOCOL, "nonce": nonce})
        return nonce

    def _set_keys(self, is_host: bool, own: str, other: str) -> None:
        nonces = [own, other] if is_host else [other, own]
        keys = [hmac.digest(self._secret, json.dumps([end, *nonces]).encode(), "sha256") for end in ("host", "other")]
        self._keys = (keys[0], keys[1]) if is_host else (keys[1], keys[0])

    def _proof(self, end: int, line: bytes) -> bytes:
        """Return the prefix of the next line, an HMAC of the line's number and content; b"" without nonces."""
        if self._keys is None:
            return b""
        self._counts[end] += 1
        return hmac.new(self._keys[end], b"%d " % self._counts[end] + line, "sha256").hexdigest().encode() + b" "

    def send(self, message: Message) -> None:
        with self._sending, contextlib.suppress(OSError):  # the missing reply reveals the error later
            line = json.dumps(message).encode()
            self._connection.sendall(self._proof(0, line) + line + b"\n")

    def receive(self, deadline: float = float("inf")) -> Message:
        """Return the next message; {} at the end of the connection, or if the line is not a valid message.

        Args:
            deadline: time by which the end of the line must arrive, on the clock `time.monotonic`.

        Raises:
            TimeoutError: the line did not end before the deadline.
            ConfigError: the sender does not have the secret.
        """
        line = self._read_line(deadline)
        if line and self._keys:
            proof = line[:65]  # hexadecimal digits of SHA-256, and a space
            line = line[65:]
            if not hmac.compare_digest(proof, self._proof(1, line)):
                raise ConfigError(DIFFERENT_SECRETS)
        try:
            message = untrusted.parse_object(line)
            untrusted.check(message, {name: FIELDS[name] for name in message})
        except (ValueError, KeyError):
            return {}
        return message

    def _read_line(self, deadline: float) -> bytes:
        """Return the next line; b"" at the end of the connection, or if the line is too long.

        Raises:
            TimeoutError: the line did not end before the deadline.
        """
        content = bytes(self._received)
        while b"\n" not in content:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                self._connection.settimeout(None if deadline == float("inf") else left)
                content = self._connection.recv(2**16)
            except TimeoutError:
                raise
            except OSError:
                return b""
            self._received += content
            if not content or len(self._received) > MAX_BYTES:
                return b""
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    @property
    def ended(self) -> bool:
        """Whether the peer has disconnected, and all its data has been read."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Listener:
    """Machine 0's listener. A thread for each connection puts the messages of a machine into the queue ``inbox``.

    A connection's first message in the queue describes a machine, and the last message is {}. A new connection must
    send this first message within `REPLY_TIMEOUT` seconds. If too many new connections wait, the listener closes the
    oldest.
    """

    def __init__(self, node: NodeInfo, place: Place) -> None:
        self.inbox: queue.Queue[tuple[JsonConnection, Message]] = queue.Queue()
        self._node = node
        self._secret = place.secret
        self._strangers: list[JsonConnection] = []
        self._refused: set[str] = set()
        self._socket = _listen(place)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # this call ends the thread's wait in accept
        self._socket.close()

    def _accept(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # the listener is closed, or no file descriptor is left
                self._drop_strangers(0)
                time.sleep(0.1)
                continue
            with contextlib.suppress(OSError, RuntimeError):  # the peer has disconnected, or no thread can be started
                stranger = JsonConnection(connection, self._secret)
                self._strangers.append(stranger)
                self._drop_strangers(MAX_STRANGERS + self._node.machines)
                threading.Thread(target=self._read, args=(stranger,), daemon=True).start()

    def _drop_strangers(self, most: int) -> None:
        while len(self._strangers) > most:
            self._strangers.pop(0).close()

    def _read(self, connection: JsonConnection) -> None:
        message = self._first_message(connection)
        if not message:
            connection.close()
            return
        while message:
            self.inbox.put((connection, message))
            try:
                message = connection.receive()
            except ConfigError:  # the line is not from the authenticated machine
                break
        self.inbox.put((connection, {}))

    def _first_message(self, connection: JsonConnection) -> Message:
        """Return the first message if it describes another machine; {} for any other peer."""
        try:
            message = connection.accept(time.monotonic() + REPLY_TIMEOUT)
            node = _as_node(message)
            return message if node and node.nonce != self._node.nonce else {}
        except ConfigError as error:
            connection.refuse(str(error))
            self._warn(connection.there, str(error))
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ValueError):  # `_drop_strangers` has removed the connection
                self._strangers.remove(connection)
        return {}

    def _warn(self, address: str, reason: str) -> None:
        if address not in self._refused and len(self._refused) < MAX_WARNINGS:
            self._refused.add(address)
            print_stderr(f"warning: {address} was refused at MASTER_PORT: {reason}")


class _Host:
    """Machine 0's part of the preflight."""

    def __init__(self, node: NodeInfo, place: Place, equal_ranks: bool) -> None:
        self._node = node
        self._place = place
        self._equal_ranks = equal_ranks
        self._peers: dict[int, tuple[NodeInfo, JsonConnection]] = {}  # peers by machine number
        self._over = threading.Event()

    def run(self, make_plan: Callable[[], Message]) -> Rendezvous:
        listener = _Listener(self._node, self._place)
        self._inbox = listener.inbox
        for target in (self._call_myself, self._show_alive):
            threading.Thread(target=target, daemon=True).start()
        try:
            self._wait_for("did not come", lambda message: True, self._place.deadline, may_reconnect=True)
            listener.close()  # an open listener would mislead other machines' launchers
            with _named(self._node):
                plan = make_plan()
            self._send(plan=plan)
            deadline = time.monotonic() + self._place.limit
            self._wait_for("did not get ready", lambda message: "ready" in message, deadline)
            ranks = [self._node.ranks] + [self._peers[number][0].ranks for number in sorted(self._peers)]
            self._send(start=ranks)
        except BaseException as error:
            self._send(**_problem_message(self._node, error))
            raise
        finally:
            self._over.set()
            listener.close()
            self._close_peers()
        here = next(iter(self._peers.values()))[1].here
        return Rendezvous(tuple(ranks), here, here, plan)

    def _show_alive(self) -> None:
        """Send messages to the waiting machines, because making a plan may take longer than their time limit."""
        while not self._over.wait(min(ALIVE, self._place.limit / 4)):
            self._send(here=True)

    def _call_myself(self) -> None:
        """Connect to MASTER_ADDR. If another machine 0 listens there, both machines report the error."""
        while not self._over.wait(RETRY):  # the other machine may start later, and names may resolve late
            connection, _ = _connect(self._place)
            if connection and not self._over.is_set():
                with contextlib.suppress(TimeoutError, ConfigError):
                    reply = connection.introduce(asdict(self._node), time.monotonic() + REPLY_TIMEOUT)
                    if "problem" in reply:
                        self._inbox.put((connection, {**asdict(self._node), **reply}))
                connection.close()
                return

    def _wait_for(
        self, failed: str, counts: Callable[[Message], bool], deadline: float, may_reconnect: bool = False
    ) -> None:
        """Wait until each other machine has sent a message for which ``counts`` returns True.

        Args:
            failed: the predicate of the error about missing machines, such as "did not come".
            counts: function that returns whether a message is the expected message.
            deadline: end of the wait, on the clock `time.monotonic`.
            may_reconnect: whether a machine may disconnect and connect again.

        Raises:
            ConfigError: the machines cannot run the same job.
            NonRetryableError: a machine is missing, was lost or has failed.
        """
        missing = set(range(1, self._node.machines))
        notice = time.monotonic() + WAIT_NOTICE_AFTER
        while missing:
            if time.monotonic() > deadline:
                names = ", ".join(map(self._name, sorted(missing)))
                within = f"within {self._place.limit:g} s{self._hint(missing)}"
                raise NonRetryableError(f"{names} of {self._node.machines} {failed} {within}")
            if time.monotonic() > notice:
                notice = math.inf
                self._print_missing(missing)
            try:
                connection, message = self._inbox.get(timeout=0.2)
            except queue.Empty:
                continue
            number = self._identify(connection, message)
            if number is None:
                continue
            if not message:
                self._lose(number, may_reconnect)
                missing.add(number)
            elif counts(message):
                missing.discard(number)

    def _print_missing(self, missing: set[int]) -> None:
        noun = "machines" if len(missing) > 1 else "machine"
        numbers = ", ".join(map(str, sorted(missing)))
        print_stderr(f"waiting for {noun} {numbers} of {self._node.machines} at {self._place}")

    def _lose(self, number: int, may_reconnect: bool) -> None:
        """Remove a disconnected machine from the peers.

        Raises:
            NonRetryableError: the machine may not reconnect.
        """
        if not may_reconnect:
            raise NonRetryableError(f"{self._name(number)} was lost before the start: see its messages there")
        del self._peers[number]

    def _identify(self, connection: JsonConnection, message: Message) -> int | None:
        """Return the number of the machine that sent a message, and admit a new machine; None for another program.

        Raises:
            ConfigError: the machine reports a ConfigError, or cannot run the same job.
            NonRetryableError: the machine reports another error.
        """
        number = self._number_of(connection)
        if "problem" in message and (number is not None or message.get("after") == self._node.after):
            connection.send({"problem": message["problem"], "fatal": message.get("fatal")})  # `abort` waits for it
            raise _as_error(message)
        if number is not None:
            return number
        node = _as_node(message)
        if node is None:
            return None
        return self._admit(node, connection)

    def _number_of(self, connection: JsonConnection) -> int | None:
        for number, (_, each) in self._peers.items():
            if each is connection:
                return number
        return None

    def _admit(self, node: NodeInfo, connection: JsonConnection) -> int:
        """Compare a new machine with the others and add it to the peers.

        Raises:
            ConfigError: the machines cannot run the same job. The new machine raises the same error.
        """
        if node.machine in self._peers:
            _, earlier = self._peers[node.machine]
            if earlier.ended:  # the last message of the connection is still in the queue
                del self._peers[node.machine]
        peers = [peer for peer, _ in self._peers.values()]
        for other in (self._node, *peers):
            problem = difference(other, node, self._equal_ranks)
            if problem:
                connection.send({"problem": problem})
                raise ConfigError(problem)
        self._peers[node.machine] = (node, connection)
        connection.send({"here": True})
        return node.machine

    def _close_peers(self) -> None:
        """Let each peer close its connection first, because the kernel reserves the port of the side that closes first.

        After 2 seconds, the method closes the other connections.
        """
        leaving = {connection for _, connection in self._peers.values() if not connection.ended}
        deadline = time.monotonic() + 2.0
        while leaving and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                connection, message = self._inbox.get(timeout=0.1)
                if not message:
                    leaving.discard(connection)
        for _, connection in self._peers.values():
            connection.close()

    def _send(self, **values: Any) -> None:
        for _, connection in list(self._peers.values()):
            connection.send(values)

    def _name(self, number: int) -> str:
        if number not in self._peers:
            return f"machine {number}"
        node, _ = self._peers[number]
        return node.name

    def _hint(self, missing: set[int]) -> str:
        if missing <= self._peers.keys():
            return ": see its messages there"
        if self._place.address == "localhost" or self._place.address.startswith("127."):
            return f": {self._place} is a loopback address, by which no other machine is reached"
        return f": start the script there too, with {self._place}; if it runs there, a firewall may be in between"


def _join(node: NodeInfo, place: Place, prepare: Callable[[Message], None]) -> Rendezvous:
    """Run the preflight on a machine other than machine 0."""
    notice = time.monotonic() + WAIT_NOTICE_AFTER
    while True:
        connection, trouble = _connect(place)
        if connection:
            try:
                rendezvous = _follow(node, place, connection=connection, prepare=prepare)
                if rendezvous:
                    return rendezvous
                trouble = "the peer ended the connection: it may be another program, or another version"
            except TimeoutError:
                trouble = "the peer does not answer: it may be another program"
            except BaseException as error:
                connection.send(_problem_message(node, error))
                raise
            finally:
                connection.close()
        if place.left <= 0:
            raise NonRetryableError(
                f"{node.name} did not reach machine 0 at {place} within {place.limit:g} s: {trouble}"
            )
        if time.monotonic() > notice:
            notice = math.inf
            print_stderr(f"waiting for machine 0 at {place}: {trouble}")
        time.sleep(RETRY)


def _follow(
    node: NodeInfo, place: Place, connection: JsonConnection, prepare: Callable[[Message], None]
) -> Rendezvous | None:
    """Exchange the preflight's messages with machine 0.

    Returns:
        The shared values; None if the peer was not machine 0, or disconnected before it sent a plan.
    """
    reply = _check(connection.introduce(asdict(node), time.monotonic() + REPLY_TIMEOUT))
    message = _wait_for_host(place, connection) if "here" in reply else {}
    if "plan" not in message:
        return None
    with _named(node):
        prepare(message["plan"])
    connection.send({"ready": True})
    ready = _wait_for_host(place, connection)
    if "start" not in ready:
        raise NonRetryableError(f"machine 0 at {place} was lost before the start: see its messages there")
    return Rendezvous(tuple(ready["start"]), connection.here, connection.there, message["plan"])


def _wait_for_host(place: Place, connection: JsonConnection) -> Message:
    """Return machine 0's next message other than ``here``.

    Raises:
        ConfigError: machine 0 reported a ConfigError.
        NonRetryableError: machine 0 reported another error, or has sent nothing for ``place.limit`` seconds.
    """
    message: Message = {"here": True}
    while "here" in message:
        try:
            message = _check(connection.receive(time.monotonic() + place.limit))
        except TimeoutError:
            silent = f"machine 0 at {place} has sent nothing for {place.limit:g} s"
            raise NonRetryableError(f"{silent}: see whether its script still runs there") from None
    return message


def _check(message: Message) -> Message:
    """Return ``message``, a message of machine 0, or raise the error that the message reports."""
    if "problem" in message:
        raise _as_error(message)
    return message


def _as_error(message: Message) -> ConfigError | NonRetryableError:
    kind = NonRetryableError if message.get("fatal") else ConfigError
    return kind(untrusted.shown(message["problem"], limit=MAX_PROBLEM))


def _as_node(message: Message) -> NodeInfo | None:
    """Return the machine that a message describes; None if the message is not such a description."""
    names = {each.name for each in fields(NodeInfo)}
    values = {name: value for name, value in message.items() if name in names}
    try:
        node = NodeInfo(**values)
    except TypeError:  # a field is missing
        return None
    if node.machine >= node.machines:
        return None
    return node


@contextlib.contextmanager
def _named(node: NodeInfo) -> Iterator[None]:
    """Prefix the errors inside this context with the machine's name, because all machines report them."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{node.name}: {error}") from error
    except (ConfigError, NonRetryableError) as error:
        raise type(error)(f"{node.name}: {error}") from None


def _problem_message(node: NodeInfo, error: BaseException) -> Message:
    """Return the message that reports this machine's error to the other machines."""
    problem = str(error)
    if isinstance(error, Stopped):
        problem = f"{node.name} was stopped by signal {error.number}"
    elif not isinstance(error, (ConfigError, NonRetryableError)):
        problem = f"{node.name}: {type(error).__name__}: {error}"
    return {"problem": problem[:MAX_PROBLEM], "fatal": not isinstance(error, ConfigError)}


def _connect(place: Place) -> tuple[JsonConnection | None, str]:
    """Return (connection to machine 0, ""), or (None, reason) if the connection fails."""
    timeout = max(0.1, min(REPLY_TIMEOUT, place.left))
    try:
        addresses = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
        addresses.sort(key=lambda each: each[0] != socket.AF_INET)  # IPv4 first: some launchers lack IPv6
        connection = socket.create_connection((str(addresses[0][4][0]), place.port), timeout=timeout)
        return JsonConnection(connection, place.secret), ""
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
        return None, f"the name does not resolve ({getattr(error, 'strerror', None) or error})"
    except TimeoutError:
        return None, "nothing answers there: a firewall, or the wrong address"
    except OSError as error:
        reason = str(error.strerror).lower()
        if _is_loopback(place.address):
            reason += "; that is a loopback address, by which no other machine is reached"
        return None, f"{reason}: is the script running on machine 0?"


def _listen(place: Place) -> socket.socket:
    """Return a socket that listens on all addresses.

    The function retries for up to `REPLY_TIMEOUT` seconds, because the previous launcher may still use the port.

    Raises:
        ConfigError: the port cannot be used.
    """
    deadline = time.monotonic() + min(REPLY_TIMEOUT, place.left)
    while True:
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", place.port), family=family, backlog=128, dualstack_ipv6=both)
        except OSError as error:
            if time.monotonic() > deadline:
                reason = str(error.strerror).lower()
                raise ConfigError(f"MASTER_PORT={place.port}: {reason} on this machine: choose another") from None
        time.sleep(RETRY)


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]


def _is_loopback(address: str) -> bool:
    try:
        addresses = {_plain(str(each[4][0])) for each in socket.getaddrinfo(address, None)}
    except (OSError, UnicodeError):
        return False
    return all(each == "::1" or each.startswith("127.") for each in addresses)
