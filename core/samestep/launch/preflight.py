"""Check, before any launcher starts, that all machines of a job are there with the same code, options and data.

Frameworks connect by an address and a port. If that fails, most are silent for minutes, or name a connection. So the
launch scripts of all machines connect first. Machine 0 listens at MASTER_PORT, where its launcher will listen
afterwards; the others retry until they reach it, because machines start at different times and names may resolve late.
Each sends its `NodeInfo`; machine 0 compares them and sends its plan. The others check that they can follow the plan
(``prepare``), and all start together. A mismatch is one error line, the same on all machines. This happens anew before
each restart.

A machine that will not restart reports that by `abort`, because the others would wait for it.

By these connections each machine also learns its own address among the others, to which its host name may not resolve.

The protocol is one JSON object per line. It carries no secrets, nothing received is executed, and connections of other
programs are ignored. This module uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from samestep import ConfigError, NonRetryableError
from samestep.launch.supervise import Stopped, print_stderr

PROTOCOL = "samestep meeting 1"
WAIT_NOTICE_AFTER = 5.0  # seconds of waiting after which the console names the missing machines
RETRY = 0.5  # seconds between attempts to connect
REPLY_TIMEOUT = 5.0  # seconds in which a launch script replies; what does not is another program
MAX_BYTES = 2**20  # of one line
Message = Mapping[str, Any]


@dataclass(frozen=True)
class NodeInfo:
    """One machine of a job, as JSON values.

    Attributes:
        app: the app.
        machine: this machine's number, from 0.
        machines: how many machines the job has.
        ranks: ranks on this machine.
        options: options that must be the same on all machines.
        files: paths of code and their digests.
        versions: packages and their versions.
        host: the host name.
        nonce: distinguishes two machines with one number from one that connects twice.
        after: the name of the start before this one, which failed; "" at the first start.
        protocol: PROTOCOL.
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
    protocol: str = PROTOCOL

    @property
    def name(self) -> str:
        return f"machine {self.machine} ({self.host})"


@dataclass(frozen=True)
class Rendezvous:
    """What all machines share when they start.

    Attributes:
        ranks: each machine's number of ranks.
        address: this machine's address: a number, because some launchers do not find themselves by a name.
        master: machine 0's address, a number.
        plan: machine 0's plan.
    """

    ranks: tuple[int, ...]
    address: str
    master: str
    plan: Mapping[str, Any]


def digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return the first digits of each file's SHA-256, by its path in ``root``, or by its last two names outside."""
    digest = {}
    for path in sorted(paths):
        name = path.relative_to(root) if path.is_relative_to(root) else Path(*path.parts[-2:])
        digest[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return digest


def difference(first: NodeInfo, other: NodeInfo, equal_ranks: bool = False) -> str:
    """Return why two machines cannot run one job, in a line that names both; "" if they can."""

    def both(what: str, here: Any, there: Any, remedy: str) -> str:
        return f"{what} is {here} on {first.name} and {there} on {other.name}: {remedy}"

    if first.machine == other.machine:
        return f"{first.host} and {other.host} both have NODE_RANK={other.machine}: give each machine its own"
    if first.app != other.app:
        return both("the app", first.app, other.app, "start the same script on all machines")
    if first.machines != other.machines:
        return both("NNODES", first.machines, other.machines, "set it to the number of machines on all")
    if name := _first_difference(first.files, other.files):
        return f"{name} differs between {first.name} and {other.name}: check out the same commit on all machines"
    if name := _first_difference(first.versions, other.versions):
        same = "install the same on all machines"
        return both(name, first.versions.get(name, "missing"), other.versions.get(name, "missing"), same)
    if name := _first_difference(first.options, other.options):
        here, there = (json.dumps(node.options.get(name)) for node in (first, other))
        return both(f"--{name.replace('_', '-')}", here, there, "give all machines the same options")
    if equal_ranks and first.ranks != other.ranks:
        return both("N", first.ranks, other.ranks, "this app's launcher wants as many ranks on each machine")
    return ""


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return next((name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)), "")


def preflight(
    node: NodeInfo,
    address: str,
    port: int,
    limit: float,
    plan: Callable[[], Mapping[str, Any]],
    prepare: Callable[[Mapping[str, Any]], None],
    equal_ranks: bool = False,
) -> Rendezvous:
    """Connect to the other machines of the job and return what all share.

    Args:
        node: this machine.
        address: MASTER_ADDR.
        port: MASTER_PORT.
        limit: seconds between the first and the last machine, and seconds in which all must be prepared.
        plan: called on machine 0 when all are connected.
        prepare: called on the others with the plan. What ``plan`` and ``prepare`` raise ends all machines.
        equal_ranks: whether all machines need as many ranks.

    Raises:
        ConfigError: something does not fit; the same on all machines.
        NonRetryableError: a machine is missing or fails; the same on all machines.
    """
    node, place = _with_host(node), Place(address, port, time.monotonic() + limit, limit)
    if node.machine == 0:
        return _Host(node, place, equal_ranks).run(plan)
    return _join(node, place, prepare)


def abort(node: NodeInfo, address: str, port: int, reason: str, limit: float) -> None:
    """Report to all machines of the job ``node.after`` that this one will not restart.

    It returns when each has received the message or reports the same of itself, and after ``limit`` seconds.
    """
    node, place = _with_host(node), Place(address, port, time.monotonic() + limit, limit)
    abort_message = {**asdict(node), "problem": f"{node.name} {reason}", "fatal": True}
    with contextlib.suppress(OSError, ConfigError):
        if node.machine == 0:
            _send_to_all(node, place, abort_message)
            return
        while place.left > 0:  # machine 0's launcher may still listen there
            connection, _ = _connect(place)
            if connection:
                connection.send(abort_message)
                with contextlib.suppress(TimeoutError):
                    if "problem" in connection.receive(REPLY_TIMEOUT):
                        return
                connection.close()
            time.sleep(RETRY)


def _send_to_all(node: NodeInfo, place: Place, message: Message) -> None:
    """Send a message to each machine that connects to machine 0."""
    informed: set[int] = set()
    with _listen(place) as listener:
        while len(informed) < node.machines - 1 and place.left > 0:
            listener.settimeout(place.left)
            with contextlib.suppress(OSError):  # a TimeoutError too
                connection = JsonConnection(listener.accept()[0])
                hello = connection.receive(1.0)
                if hello.get("protocol") == PROTOCOL and hello.get("after") == node.after:
                    connection.send(message)
                    informed.add(hello.get("machine", 0))
                connection.close()


def _with_host(node: NodeInfo) -> NodeInfo:
    return replace(node, host=node.host or socket.gethostname(), nonce=uuid.uuid4().hex)


@dataclass(frozen=True)
class Place:
    """Where machines connect, and until when, on the clock `time.monotonic`."""

    address: str
    port: int
    deadline: float
    limit: float

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.address} MASTER_PORT={self.port}"


class JsonConnection:
    """A connection that carries one JSON object per line. Raises OSError if the other end is gone already."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader: IO[bytes] = connection.makefile("rb")
        self.here, self.there = (_plain(each[0]) for each in (connection.getsockname(), connection.getpeername()))
        # A host without power or cable sends nothing more: keepalive detects it after 9 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the other end's reply will be missing
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Message:
        """Return the next message; {} at the end, or if a line is none of a launch script. Raises TimeoutError."""
        try:
            self._connection.settimeout(seconds if seconds is None else max(0.01, seconds))
            message = json.loads(self._reader.readline(MAX_BYTES) or "{}")
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return {}
        return message if isinstance(message, dict) else {}

    @property
    def ended(self) -> bool:
        """Whether the other end is gone, and nothing from it is left to read."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self._connection.close()


class _Host:
    """Machine 0's part. A thread for each connection puts its messages into one queue."""

    def __init__(self, node: NodeInfo, place: Place, equal_ranks: bool) -> None:
        self._node, self._place, self._equal_ranks = node, place, equal_ranks
        self._inbox: queue.Queue[tuple[JsonConnection, Message]] = queue.Queue()
        self._peers: dict[int, tuple[NodeInfo, JsonConnection]] = {}  # by their machine's number
        self._over = threading.Event()

    def run(self, make_plan: Callable[[], Message]) -> Rendezvous:
        listener = _listen(self._place)
        for target, arguments in ((self._accept, (listener,)), (self._call_myself, ())):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        try:
            self._wait_for("did not come", lambda message: True, self._place.deadline, may_reconnect=True)
            _close(listener)  # before any launcher looks for ours
            with _named(self._node):
                plan = make_plan()
            self._send(plan=plan)
            deadline = time.monotonic() + self._place.limit
            self._wait_for("did not get ready", lambda message: message.get("ready") is True, deadline)
            ranks = [self._node.ranks] + [self._peers[number][0].ranks for number in sorted(self._peers)]
            self._send(start=ranks)
        except BaseException as error:
            self._send(**_problem_message(self._node, error))
            raise
        finally:
            self._over.set()
            _close(listener)
            self._close_peers()
        here = next(iter(self._peers.values()))[1].here
        return Rendezvous(tuple(ranks), here, here, plan)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError):  # the peer is gone already
                threading.Thread(target=self._read, args=(JsonConnection(connection),), daemon=True).start()

    def _read(self, connection: JsonConnection) -> None:
        message: Message = {"": ""}
        while message:
            message = connection.receive()
            self._inbox.put((connection, message))

    def _call_myself(self) -> None:
        """Connect to MASTER_ADDR: if another machine there takes itself for machine 0, both report the problem."""
        while not self._over.wait(RETRY):  # the other may start later, and names may resolve late
            connection, _ = _connect(self._place)
            if connection and not self._over.is_set():
                connection.send(asdict(self._node))
                with contextlib.suppress(TimeoutError):
                    if "problem" in (reply := connection.receive(REPLY_TIMEOUT)):
                        self._inbox.put((connection, {**asdict(self._node), **reply}))
                connection.close()
                return

    def _wait_for(
        self, failed: str, counts: Callable[[Message], bool], deadline: float, may_reconnect: bool = False
    ) -> None:
        """Wait until each other machine has sent a message that ``counts``. Raises ConfigError, NonRetryableError."""
        missing, notice = set(range(1, self._node.machines)), time.monotonic() + WAIT_NOTICE_AFTER
        while missing:
            if time.monotonic() > deadline:
                names = ", ".join(map(self._name, sorted(missing)))
                within = f"within {self._place.limit:g} s{self._hint(missing)}"
                raise NonRetryableError(f"{names} of {self._node.machines} {failed} {within}")
            if time.monotonic() > notice:
                notice = float("inf")
                machines = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))}"
                print_stderr(f"waiting for {machines} of {self._node.machines} at {self._place}")
            with contextlib.suppress(queue.Empty):
                connection, message = self._inbox.get(timeout=0.2)
                number = self._identify(connection, message)
                if number is not None and message and counts(message):
                    missing.discard(number)
                elif number is not None and not message:
                    if not may_reconnect:
                        raise NonRetryableError(
                            f"{self._name(number)} was lost before the start: see its messages there"
                        )
                    del self._peers[number]
                    missing.add(number)

    def _identify(self, connection: JsonConnection, message: Message) -> int | None:
        """Return the number of the machine that sent a message; None for another program. Admits new machines."""
        number = next((number for number, (_, each) in self._peers.items() if each is connection), None)
        aborts = message.get("protocol") == PROTOCOL and message.get("after") == self._node.after
        if "problem" in message and (number is not None or aborts):
            connection.send({"problem": message["problem"], "fatal": message.get("fatal")})  # what an abort waits for
            raise _as_error(message)
        if number is None and (node := self._validate(connection, message)):
            number = self._admit(node, connection)
        return number

    def _validate(self, connection: JsonConnection, message: Message) -> NodeInfo | None:
        """Return the machine that a first message describes; None, and close, for another program or this machine."""
        with contextlib.suppress(TypeError):
            if message.get("protocol") == PROTOCOL and (node := NodeInfo(**message)).nonce != self._node.nonce:
                return node
        if message:
            connection.close()
        return None

    def _admit(self, node: NodeInfo, connection: JsonConnection) -> int:
        """Compare a new machine with the others and add it to the peers. Raises ConfigError, also on that machine."""
        if node.machine in self._peers and self._peers[node.machine][1].ended:  # its end is still in the queue
            del self._peers[node.machine]
        for other in (self._node, *(peer for peer, _ in self._peers.values())):
            if problem := difference(other, node, self._equal_ranks):
                connection.send({"problem": problem})
                raise ConfigError(problem)
        self._peers[node.machine] = node, connection
        connection.send({"here": True})
        return node.machine

    def _close_peers(self) -> None:
        """Let the others close first, because the kernel keeps the port for a while on the side that does."""
        leaving, deadline = {connection for _, connection in self._peers.values()}, time.monotonic() + 2.0
        while leaving and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                connection, message = self._inbox.get(timeout=0.1)
                leaving -= set() if message else {connection}
        for _, connection in self._peers.values():
            connection.close()

    def _send(self, **values: Any) -> None:
        for _, connection in self._peers.values():
            connection.send(values)

    def _name(self, number: int) -> str:
        return self._peers[number][0].name if number in self._peers else f"machine {number}"

    def _hint(self, missing: set[int]) -> str:
        if missing <= self._peers.keys():
            return ": see its messages there"
        if self._place.address == "localhost" or self._place.address.startswith("127."):
            return f": {self._place} is a loopback address, by which no other machine is reached"
        return f": start the script there too, with {self._place}; if it runs there, a firewall may be in between"


def _join(node: NodeInfo, place: Place, prepare: Callable[[Message], None]) -> Rendezvous:
    """Run another machine's part."""
    notice = time.monotonic() + WAIT_NOTICE_AFTER
    while True:
        connection, trouble = _connect(place)
        if connection:
            connection.send(asdict(node))
            try:
                if rendezvous := _follow(node, place, connection, prepare):
                    return rendezvous
                trouble = "what listens there ended the connection: it may be another program"
            except TimeoutError:
                trouble = "what listens there does not answer: it may be another program"
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
            notice = float("inf")
            print_stderr(f"waiting for machine 0 at {place}: {trouble}")
        time.sleep(RETRY)


def _follow(
    node: NodeInfo, place: Place, connection: JsonConnection, prepare: Callable[[Message], None]
) -> Rendezvous | None:
    """Follow machine 0; return None if the peer was not machine 0 or closed before all machines joined."""
    greeting = _receive(connection, REPLY_TIMEOUT)
    if "here" not in greeting or not (message := _receive(connection)):
        return None
    with _named(node):
        prepare(message["plan"])
    connection.send({"ready": True})
    if "start" not in (ready := _receive(connection)):
        raise NonRetryableError(f"machine 0 at {place} was lost before the start: see its messages there")
    return Rendezvous(tuple(ready["start"]), connection.here, connection.there, message["plan"])


def _receive(connection: JsonConnection, seconds: float | None = None) -> Message:
    """Return machine 0's message; {} at its end. Raises the problem that machine 0 reports, and TimeoutError."""
    message = connection.receive(seconds)
    if "problem" in message:
        raise _as_error(message)
    return message


def _as_error(message: Message) -> ConfigError | NonRetryableError:
    return (NonRetryableError if message.get("fatal") else ConfigError)(str(message["problem"]))


@contextlib.contextmanager
def _named(node: NodeInfo) -> Iterator[None]:
    """Put the machine's name before errors that all machines report."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{node.name}: {error}") from error
    except (ConfigError, NonRetryableError) as error:
        raise type(error)(f"{node.name}: {error}") from None


def _problem_message(node: NodeInfo, error: BaseException) -> Message:
    """Return the message by which the other machines report this one's error."""
    problem = str(error)
    if isinstance(error, Stopped):
        problem = f"{node.name} was stopped by signal {error.number}"
    elif not isinstance(error, (ConfigError, NonRetryableError)):
        problem = f"{node.name}: {type(error).__name__}: {error}"
    return {"problem": problem, "fatal": not isinstance(error, ConfigError)}


def _connect(place: Place) -> tuple[JsonConnection | None, str]:
    """Return a connection to machine 0, or None and the reason."""
    timeout = max(0.1, min(REPLY_TIMEOUT, place.left))
    try:
        addresses = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
        addresses.sort(key=lambda each: each[0] != socket.AF_INET)  # some launchers understand no other address
        connection = socket.create_connection((str(addresses[0][4][0]), place.port), timeout=timeout)
        return JsonConnection(connection), ""
    except (socket.gaierror, UnicodeError) as error:  # a label that is empty, or too long
        return None, f"the name does not resolve ({getattr(error, 'strerror', None) or error})"
    except TimeoutError:
        return None, "nothing answers there: a firewall, or the wrong address"
    except OSError as error:
        reason = str(error.strerror).lower()
        if _is_loopback(place.address):
            reason += "; that is a loopback address, by which no other machine is reached"
        return None, f"{reason}: is the script running on machine 0?"


def _listen(place: Place) -> socket.socket:
    """Listen on all addresses. It retries, because the launcher of the previous start may not have ended yet."""
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


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
    listener.close()


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]


def _is_loopback(address: str) -> bool:
    try:
        addresses = {_plain(str(each[4][0])) for each in socket.getaddrinfo(address, None)}
    except (OSError, UnicodeError):
        return False
    return all(each == "::1" or each.startswith("127.") for each in addresses)
