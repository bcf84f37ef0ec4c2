"""The machines of a job meet before their launchers start: is everyone here, with the same code, options and data?

Frameworks find each other by an address and a port, and where that fails most say nothing for minutes, or name a
connection. So the launch scripts of all machines meet there first. Machine 0's listens at MASTER_PORT, where its
launcher will listen in a moment; the others connect, as often as it takes: machines come up at different times, and
names may resolve late. Each says who it is and what it would run; machine 0 compares, and tells all of them what was
decided. They look whether they can do that (``prepare``), and all start together. What does not fit is told by one
line, the same on all machines. They meet anew for each start after a failure.

A machine that will not come to the next meeting says so there as well (`part`), or the others would wait for it.

By these connections each machine also learns its own address among the others, which its host name may not lead to.

One JSON object a line. Nothing secret is said, and nothing that comes in is run; whoever else connects is ignored.
It uses the standard library alone.
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

from samestep import FatalError, UserError

from launcher.supervise import Stopped, say

PROTOCOL = "samestep meeting 1"
PATIENCE = 5.0  # seconds of waiting after which the console is told for whom
RETRY = 0.5  # seconds between attempts to connect
ANSWER = 5.0  # seconds in which a launch script answers; what does not is another program
MOST = 2**20  # bytes of one line


@dataclass(frozen=True)
class Card:
    """What a machine says of itself: JSON values. ``files`` maps paths of code to digests."""

    app: str
    machine: int
    machines: int
    ranks: int
    options: Mapping[str, Any]
    files: Mapping[str, str]
    versions: Mapping[str, str]
    host: str = ""
    nonce: str = ""  # tells two machines of one number from one that connects twice
    after: str = ""  # the job's name at the start before, which failed
    protocol: str = PROTOCOL

    @property
    def name(self) -> str:
        return f"machine {self.machine} ({self.host})"


@dataclass(frozen=True)
class Met:
    """What all machines know when they start: each one's number of ranks, this machine's address, machine 0's, a plan.

    The addresses are those by which they have met: numbers, as not every launcher finds itself by a name.
    """

    ranks: tuple[int, ...]
    address: str
    master: str
    plan: Mapping[str, Any]


def digests(root: Path, paths: Iterable[Path]) -> dict[str, str]:
    """The first digits of each file's SHA-256, by its path in ``root`` (its last two names, where it is not there)."""
    found = {}
    for path in sorted(paths):
        name = path.relative_to(root) if path.is_relative_to(root) else Path(*path.parts[-2:])
        found[str(name)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def difference(first: Card, other: Card, equal_ranks: bool = False) -> str:
    """Why two machines cannot run one job, in words that name both; "" where they can."""

    def both(what: str, mine: Any, its: Any, remedy: str) -> str:
        return f"{what} is {mine} on {first.name} and {its} on {other.name}: {remedy}"

    if first.machine == other.machine:
        return f"{first.host} and {other.host} both have NODE_RANK={other.machine}: give each machine its own"
    if first.app != other.app:
        return both("the app", first.app, other.app, "start the same script on all machines")
    if first.machines != other.machines:
        return both("NNODES", first.machines, other.machines, "set it to the number of machines on all")
    if name := _differs(first.files, other.files):
        return f"{name} differs between {first.name} and {other.name}: check out the same commit on all machines"
    if name := _differs(first.versions, other.versions):
        same = "install the same on all machines"
        return both(name, first.versions.get(name, "missing"), other.versions.get(name, "missing"), same)
    if name := _differs(first.options, other.options):
        mine, its = (json.dumps(card.options.get(name)) for card in (first, other))
        return both(f"--{name.replace('_', '-')}", mine, its, "give all machines the same options")
    if equal_ranks and first.ranks != other.ranks:
        return both("N", first.ranks, other.ranks, "this app's launcher wants as many ranks on each machine")
    return ""


def _differs(mine: Mapping[str, Any], its: Mapping[str, Any]) -> str:
    return next((name for name in sorted(mine.keys() | its.keys()) if mine.get(name) != its.get(name)), "")


def meet(
    card: Card,
    address: str,
    port: int,
    limit: float,
    plan: Callable[[], Mapping[str, Any]],
    prepare: Callable[[Mapping[str, Any]], None],
    equal_ranks: bool = False,
) -> Met:
    """Meet the other machines of the job, which may be ``limit`` seconds apart, and may take as long to prepare.

    When all are here, machine 0 makes its ``plan`` and the others ``prepare`` for it: what they raise ends all. Raises
    UserError where something does not fit, FatalError where a machine does not come or fails; the same on all machines.
    """
    card, where = _own(card), Place(address, port, time.monotonic() + limit, limit)
    if card.machine == 0:
        return _Host(card, where, equal_ranks).run(plan)
    return _join(card, where, prepare)


def part(card: Card, address: str, port: int, words: str, limit: float) -> None:
    """Tell all that take part in the job ``card.after`` that this machine will not start again with them, and why.

    It takes until each has been told, or says the same of itself, and at most ``limit`` seconds.
    """
    card, where = _own(card), Place(address, port, time.monotonic() + limit, limit)
    farewell = {**asdict(card), "problem": f"{card.name} {words}", "fatal": True}
    with contextlib.suppress(OSError, UserError):
        if card.machine == 0:
            _receive(card, where, farewell)
            return
        while where.left > 0:  # what listens there may still be machine 0's launcher
            line, _ = _connect(where)
            if line:
                line.say(**farewell)
                with contextlib.suppress(TimeoutError):
                    if "problem" in line.hear(ANSWER):
                        return
                line.close()
            time.sleep(RETRY)


def _receive(card: Card, where: Place, farewell: Mapping[str, Any]) -> None:
    told: set[int] = set()
    listener = _listen(where)
    with listener:
        while len(told) < card.machines - 1 and where.left > 0:
            listener.settimeout(where.left)
            with contextlib.suppress(OSError):  # a TimeoutError too
                line = Line(listener.accept()[0])
                hello = line.hear(1.0)
                if hello.get("protocol") == PROTOCOL and hello.get("after") == card.after:
                    line.say(**farewell)
                    told.add(hello.get("machine", 0))
                line.close()


def _own(card: Card) -> Card:
    return replace(card, host=card.host or socket.gethostname(), nonce=uuid.uuid4().hex)


@dataclass(frozen=True)
class Place:
    """Where machines meet, and until when, on the clock `time.monotonic`."""

    address: str
    port: int
    deadline: float
    limit: float

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.address} MASTER_PORT={self.port}"


class Line:
    """A connection that carries one JSON object a line. Raises OSError where the other end is gone already."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader: IO[bytes] = connection.makefile("rb")
        self.here, self.there = (_plain(each[0]) for each in (connection.getsockname(), connection.getpeername()))
        # A host that has lost its power or its cable says nothing more: known after 9 s.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def say(self, **values: Any) -> None:
        with contextlib.suppress(OSError):  # the other end will be missed when it has to answer
            self._connection.sendall(json.dumps(values).encode() + b"\n")

    def hear(self, seconds: float | None = None) -> dict[str, Any]:
        """What comes next; {} where the connection ends or says what no launch script would. Raises TimeoutError."""
        try:
            self._connection.settimeout(seconds if seconds is None else max(0.01, seconds))
            found = json.loads(self._reader.readline(MOST) or "{}")
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def ended(self) -> bool:
        """Whether the other end is gone, and nothing that it said is still to be read."""
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
    """Machine 0's part. A thread for each connection puts what it hears into one queue."""

    def __init__(self, card: Card, where: Place, equal_ranks: bool) -> None:
        self._card, self._where, self._equal_ranks = card, where, equal_ranks
        self._heard: queue.Queue[tuple[Line, dict[str, Any]]] = queue.Queue()
        self._guests: dict[int, tuple[Card, Line]] = {}  # by their machine's number
        self._over = threading.Event()

    def run(self, make_plan: Callable[[], Mapping[str, Any]]) -> Met:
        listener = _listen(self._where)
        for target, arguments in ((self._accept, (listener,)), (self._call_myself, ())):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        try:
            self._wait_for("did not come", lambda said: True, self._where.deadline, may_come_again=True)
            _close(listener)  # before any launcher looks for ours
            with _named(self._card):
                plan = make_plan()
            self._tell(plan=plan)
            until = time.monotonic() + self._where.limit
            self._wait_for("did not get ready", lambda said: said.get("ready") is True, until)
            ranks = [self._card.ranks] + [self._guests[number][0].ranks for number in sorted(self._guests)]
            self._tell(start=ranks)
        except BaseException as problem:
            self._tell(**_told(self._card, problem))
            raise
        finally:
            self._over.set()
            _close(listener)
            self._see_off()
        here = next(iter(self._guests.values()))[1].here
        return Met(tuple(ranks), here, here, plan)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError):  # who came is gone already
                threading.Thread(target=self._listen_to, args=(Line(connection),), daemon=True).start()

    def _listen_to(self, line: Line) -> None:
        said: dict[str, Any] = {"": ""}
        while said:
            said = line.hear()
            self._heard.put((line, said))

    def _call_myself(self) -> None:
        """Is MASTER_ADDR this machine? Where another one that takes itself for machine 0 answers, both are told."""
        while not self._over.wait(RETRY):  # the other may come later, and names may resolve late
            line, _ = _connect(self._where)
            if line and not self._over.is_set():
                line.say(**asdict(self._card))
                with contextlib.suppress(TimeoutError):
                    if "problem" in (said := line.hear(ANSWER)):
                        self._heard.put((line, {**asdict(self._card), **said}))
                line.close()
                return

    def _wait_for(
        self, failed: str, counts: Callable[[dict[str, Any]], bool], deadline: float, may_come_again: bool = False
    ) -> None:
        """Until each other machine has said something that ``counts``. Raises UserError, FatalError."""
        missing, told = set(range(1, self._card.machines)), time.monotonic() + PATIENCE
        while missing:
            if time.monotonic() > deadline:
                names, within = ", ".join(map(self._name, sorted(missing))), f"within {self._where.limit:g} s"
                raise FatalError(f"{names} of {self._card.machines} {failed} {within}{self._hint(missing)}")
            if time.monotonic() > told:
                told = float("inf")
                names = ", ".join(str(number) for number in sorted(missing))
                say(f"waiting for machine{'s' * (len(missing) > 1)} {names} of {self._card.machines} at {self._where}")
            with contextlib.suppress(queue.Empty):
                line, said = self._heard.get(timeout=0.2)
                number = self._number(line, said)
                if number is not None and said and counts(said):
                    missing.discard(number)
                elif number is not None and not said:
                    if not may_come_again:
                        raise FatalError(f"{self._name(number)} was lost before the start: see what it says there")
                    del self._guests[number]
                    missing.add(number)

    def _number(self, line: Line, said: dict[str, Any]) -> int | None:
        """Whose words these are: a guest's, or a new one's, who is compared and taken in. Raises as `_wait_for`."""
        number = next((number for number, (_, its) in self._guests.items() if its is line), None)
        parts = said.get("protocol") == PROTOCOL and said.get("after") == self._card.after
        if "problem" in said and (number is not None or parts):
            line.say(problem=said["problem"], fatal=said.get("fatal"))  # it waits for that, where it is no guest
            raise _problem(said)
        if number is not None:
            return number
        try:
            guest = Card(**said) if said.get("protocol") == PROTOCOL else None
        except TypeError:
            guest = None
        if guest is None or guest.nonce == self._card.nonce:
            if said:
                line.close()
            return None
        if guest.machine in self._guests and self._guests[guest.machine][1].ended:  # its end is still in the queue
            del self._guests[guest.machine]
        others = [self._card, *(card for card, _ in self._guests.values())]
        for other in others:
            if problem := difference(other, guest, self._equal_ranks):
                line.say(problem=problem)
                raise UserError(problem)
        self._guests[guest.machine] = guest, line
        line.say(here=True)
        return guest.machine

    def _see_off(self) -> None:
        """The others close first: the kernel keeps a connection's port for a while on the side that did."""
        leaving, until = {line for _, line in self._guests.values()}, time.monotonic() + 2.0
        while leaving and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                line, said = self._heard.get(timeout=0.1)
                leaving -= set() if said else {line}
        for _, line in self._guests.values():
            line.close()

    def _tell(self, **values: Any) -> None:
        for _, line in self._guests.values():
            line.say(**values)

    def _name(self, number: int) -> str:
        return self._guests[number][0].name if number in self._guests else f"machine {number}"

    def _hint(self, missing: set[int]) -> str:
        if missing <= self._guests.keys():
            return ": see what it says there"
        if self._where.address == "localhost" or self._where.address.startswith("127."):
            return f": {self._where} is a loopback address, by which no other machine is reached"
        return f": start the script there too, with {self._where}; if it runs there, a firewall may be in between"


def _join(card: Card, where: Place, prepare: Callable[[Mapping[str, Any]], None]) -> Met:
    """Another machine's part."""
    told = time.monotonic() + PATIENCE
    while True:
        line, trouble = _connect(where)
        if line:
            line.say(**asdict(card))
            try:
                if met := _take_part(card, where, line, prepare):
                    return met
                trouble = "what listens there ended the connection: it may be another program"
            except TimeoutError:
                trouble = "what listens there does not answer: it may be another program"
            except BaseException as problem:
                line.say(**_told(card, problem))
                raise
            finally:
                line.close()
        if where.left <= 0:
            raise FatalError(f"{card.name} did not reach machine 0 at {where} within {where.limit:g} s: {trouble}")
        if time.monotonic() > told:
            told = float("inf")
            say(f"waiting for machine 0 at {where}: {trouble}")
        time.sleep(RETRY)


def _take_part(card: Card, where: Place, line: Line, prepare: Callable[[Mapping[str, Any]], None]) -> Met | None:
    """None where it was not machine 0, or that ended before all had come."""
    said = _heard(line, ANSWER)
    if "here" not in said or not (said := _heard(line)):
        return None
    with _named(card):
        prepare(said["plan"])
    line.say(ready=True)
    if "start" not in (ready := _heard(line)):
        raise FatalError(f"machine 0 at {where} was lost before the start: see what it says there")
    return Met(tuple(ready["start"]), line.here, line.there, said["plan"])


def _heard(line: Line, seconds: float | None = None) -> dict[str, Any]:
    """What machine 0 says; {} where it goes away. Raises what it says does not fit, and TimeoutError."""
    said = line.hear(seconds)
    if "problem" in said:
        raise _problem(said)
    return said


def _problem(said: Mapping[str, Any]) -> UserError | FatalError:
    return FatalError(str(said["problem"])) if said.get("fatal") else UserError(str(said["problem"]))


@contextlib.contextmanager
def _named(card: Card) -> Iterator[None]:
    """What goes wrong on one machine is told on all: with its name."""
    try:
        yield
    except OSError as problem:
        raise UserError(f"{card.name}: {problem}") from problem
    except (UserError, FatalError) as problem:
        raise type(problem)(f"{card.name}: {problem}") from None


def _told(card: Card, problem: BaseException) -> dict[str, Any]:
    """What the other machines are to hear of it."""
    words = str(problem)
    if isinstance(problem, Stopped):
        words = f"{card.name} was stopped by signal {problem.number}"
    elif not isinstance(problem, (UserError, FatalError)):
        words = f"{card.name}: {type(problem).__name__}: {problem}"
    return {"problem": words, "fatal": not isinstance(problem, UserError)}


def _connect(where: Place) -> tuple[Line | None, str]:
    """A connection to machine 0, or why there is none."""
    patience = max(0.1, min(ANSWER, where.left))
    try:
        found = socket.getaddrinfo(where.address, where.port, type=socket.SOCK_STREAM)
        found.sort(key=lambda each: each[0] != socket.AF_INET)  # not every launcher understands another address
        return Line(socket.create_connection((str(found[0][4][0]), where.port), timeout=patience)), ""
    except (socket.gaierror, UnicodeError) as problem:  # a label that is empty, or too long
        return None, f"the name does not resolve ({getattr(problem, 'strerror', None) or problem})"
    except TimeoutError:
        return None, "nothing answers there: a firewall, or the wrong address"
    except OSError as problem:
        reason = str(problem.strerror).lower()
        if _is_loopback(where.address):
            reason += "; that is a loopback address, by which no other machine is reached"
        return None, f"{reason}: is the script running on machine 0?"


def _listen(where: Place) -> socket.socket:
    """On all addresses; as the launcher of the start before may still be ending, for some time. Raises UserError."""
    until = time.monotonic() + min(ANSWER, where.left)
    while True:
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", where.port), family=family, backlog=128, dualstack_ipv6=both)
        except OSError as problem:
            if time.monotonic() > until:
                reason = str(problem.strerror).lower()
                raise UserError(f"MASTER_PORT={where.port}: {reason} on this machine: choose another") from None
        time.sleep(RETRY)


def _close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
    listener.close()


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]


def _is_loopback(address: str) -> bool:
    try:
        found = {_plain(str(each[4][0])) for each in socket.getaddrinfo(address, None)}
    except (OSError, UnicodeError):
        return False
    return all(each == "::1" or each.startswith("127.") for each in found)
