"""Test that other programs cannot end a job through MASTER_PORT, without the secret or by an invalid message."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest
from amounts import amount
from attempts import Attempt, check
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import connect, free_port
from samestep import ConfigError, NonRetryableError
from samestep_launch import preflight
from samestep_launch.preflight import PROTOCOL, JsonConnection, NodeInfo, Rendezvous
from scratch_project import CORE, ScratchProject, end_of

SECRET = b"what the machines of this job have in common"
LIMIT = 20.0
NODE = NodeInfo("toy", 0, 2, 2, {"epochs": 3}, {"train.py": "ab"}, {"Python": "3.11"}, host="alpha")
OTHER = replace(NODE, machine=1, host="beta")
ESCAPE = "\x1b]0;title\x07\x1b[2J\r\n"
Future_ = Future[Rendezvous]


def join(node: NodeInfo, port: int, secret: bytes = b"", limit: float = LIMIT) -> Rendezvous:
    return preflight.preflight(node, "127.0.0.1", port, limit, lambda: {"job": "j"}, lambda plan: None, secret=secret)


def call(port: int, message: Any, secret: bytes = b"") -> Mapping[str, Any]:
    """Return machine 0's reply to a first message, or {} if machine 0 closes the connection."""
    connection = JsonConnection(connect(port), secret)
    try:
        return connection.introduce(message, time.monotonic() + 10)
    finally:
        connection.close()


@contextlib.contextmanager
def machine_0(secret: bytes = b"", limit: float = LIMIT) -> Iterator[tuple[int, Future_]]:
    """Run machine 0 of 2 in a thread; yield its port and the future of its result."""
    port = int(free_port())
    with ThreadPoolExecutor(1) as pool:
        yield port, pool.submit(join, NODE, port, secret, limit)


HOST = """
import json, sys
from samestep_launch import preflight
node, port, limit = json.loads(sys.argv[1])
preflight.preflight(preflight.NodeInfo(**node), "127.0.0.1", port, limit, lambda: {"job": "j"}, lambda plan: None)
"""


def host_process(port: int, files: int = 1024, machines: int = 2, limit: float = LIMIT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOST, json.dumps([asdict(replace(NODE, machines=machines)), port, limit])],
        env={**os.environ, "PYTHONPATH": str(CORE)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )


# --- strangers -------------------------------------------------------------------------------------------------------


def test_idle_connections_do_not_use_up_the_file_descriptors() -> None:
    port = int(free_port())
    host = host_process(port, files=64)
    try:
        idle = [connect(port) for _ in range(100)]
        assert join(OTHER, port).plan == {"job": "j"}
        assert host.wait(LIMIT) == 0
    finally:
        host.kill()
        error = host.communicate()[1]
    assert "Traceback" not in error
    for each in idle:
        each.close()


def test_a_process_without_file_descriptors_continues_when_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code may hold the descriptors, so closing the connections of strangers does not always help."""
    accept = socket.socket.accept
    failures = iter(range(3))

    def fails_first(listener: socket.socket) -> Any:
        if next(failures, None) is not None:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_first)
    with machine_0() as (port, host):
        assert join(OTHER, port) == host.result(LIMIT)


@pytest.mark.parametrize("words", [b"", b'{"protocol": '], ids=["nothing", "half a line"])
def test_a_connection_without_a_first_message_is_closed(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REPLY_TIMEOUT", 0.4)
    with machine_0() as (port, host):
        stranger = connect(port)
        stranger.sendall(words)
        assert stranger.recv(100) == b""  # closed before the connection's timeout of 10 s
        stranger.close()
        assert join(OTHER, port) == host.result(LIMIT)


def test_silent_connections_do_not_use_up_the_time_in_which_machine_0_reports_its_end() -> None:
    port = int(free_port())
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(preflight.abort, replace(NODE, after="job"), "127.0.0.1", port, "has finished", 6.0)
        strangers = [connect(port) for _ in range(20)]
        with pytest.raises(NonRetryableError, match=r"^machine 0 \(alpha\) has finished$"):
            join(replace(OTHER, after="job"), port)
        gone.result(LIMIT)
    for each in strangers:
        each.close()


CARD = asdict(replace(OTHER, nonce="n"))
INVALID: dict[str, Any] = {
    "no object": [1],
    "a number": 7,
    "deep JSON": None,  # the test sends its bytes
    "a field is missing": {"app": "toy"},
    "an unknown field": {**CARD, "rank": 1},
    "a negative machine": {**CARD, "machine": -1},
    "a machine that is too many": {**CARD, "machine": 2},
    "a machine that is text": {**CARD, "machine": "1"},
    "a huge number of machines": {**CARD, "machines": 10**30},
    "ranks as a list": {**CARD, "ranks": [2]},
    "no ranks": {**CARD, "ranks": 0},
    "options as a list": {**CARD, "options": []},
    "deep options": {**CARD, "options": {"epochs": [[[[[[[[1]]]]]]]]}},
    "files as text": {**CARD, "files": "train.py"},
    "a file of a number": {**CARD, "files": {"train.py": 1}},
    "a version of null": {**CARD, "versions": {"Python": None}},
    "a host as an object": {**CARD, "host": {}},
    "a long host": {**CARD, "host": "h" * 5000},
    "a problem as a list": {**CARD, "problem": ["a"], "after": ""},
    "a long app": {**CARD, "app": "a" * 5000},
    "an app with an escape sequence": {**CARD, "app": ESCAPE},
    "a host with an escape sequence": {**CARD, "host": ESCAPE, "app": "other"},
    "an option with an escape sequence": {**CARD, "options": {ESCAPE: 1}},
    "a file with an escape sequence": {**CARD, "files": {ESCAPE: "a"}},
    "a version with an escape sequence": {**CARD, "versions": {"Python": ESCAPE}},
    "a line that is too long": {**CARD, "app": "a" * 2**20},
}


@pytest.mark.parametrize("message", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_message_ends_nothing_but_its_connection(message: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with machine_0() as (port, host):
        if message is None:
            stranger = connect(port)
            stranger.sendall(b"[" * 500_000 + b"\n")
            assert stranger.recv(100) == b""
            stranger.close()
        else:
            assert call(port, message) == {}
        assert join(OTHER, port) == host.result(LIMIT)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "card", [{**CARD, "app": "other"}, {**CARD, "problem": "leave", "fatal": True}, {"here": True}]
)
@pytest.mark.parametrize("secret", [b"", b"a guess"], ids=["none", "a guess"])
def test_without_the_secret_nobody_ends_a_job(
    card: dict[str, Any], secret: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with machine_0(SECRET) as (port, host):
        for _ in range(3):
            with pytest.raises(
                ConfigError, match=r"^the secrets differ: set the same SAMESTEP_SECRET on all machines$"
            ):
                call(port, card, secret)
        assert join(OTHER, port, SECRET) == host.result(LIMIT)
    refused = "warning: 127.0.0.1 was refused at MASTER_PORT: the secrets differ: set the same SAMESTEP_SECRET"
    assert capfd.readouterr().err == f"{refused} on all machines\n"


def test_a_machine_with_another_secret_ends_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with machine_0(SECRET) as (port, host):
        with pytest.raises(ConfigError, match="the secrets differ"):
            join(OTHER, port, b"another")
        assert join(OTHER, port, SECRET) == host.result(LIMIT)
    with machine_0(limit=1.0) as (port, host):
        with pytest.raises(ConfigError, match="the secrets differ"):
            join(OTHER, port, SECRET)
        assert "machine 1 of 2 did not come" in str(host.exception(LIMIT))
    error = capfd.readouterr().err
    assert error.count("warning: SAMESTEP_SECRET is not set: any host that reaches MASTER_PORT can stop this job") == 1


def test_a_refusal_has_nothing_by_which_a_secret_could_be_guessed() -> None:
    with machine_0(SECRET) as (port, host):
        stranger = connect(port)
        stranger.sendall(json.dumps({"protocol": PROTOCOL, "nonce": "n"}).encode() + b"\nno proof\n")
        lines = b"".join(iter(lambda: stranger.recv(1000), b"")).splitlines()
        stranger.close()
        assert [json.loads(line).keys() for line in lines] == [{"protocol", "nonce"}, {"problem"}]
        assert join(OTHER, port, SECRET) == host.result(LIMIT)


def test_an_earlier_version_is_refused_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    with machine_0() as (port, host):
        earlier = connect(port)
        earlier.sendall(json.dumps({**CARD, "protocol": "samestep meeting 1"}).encode() + b"\n")
        assert json.loads(earlier.makefile().readline()) == {"problem": preflight.OTHER_VERSION}
        earlier.close()
        assert join(OTHER, port) == host.result(LIMIT)
    assert (
        "warning: 127.0.0.1 was refused at MASTER_PORT: the machines have different versions" in capfd.readouterr().err
    )


def test_what_another_machine_reports_is_printable() -> None:
    with machine_0() as (port, host):
        assert call(port, {**CARD, "options": {"epochs": ESCAPE}})["problem"] == str(host.exception(LIMIT))
    assert str(host.exception()).isprintable()
    with machine_0() as (port, host):
        call(port, {**CARD, "problem": ESCAPE * 10**4, "fatal": True})
        problem = str(host.exception(LIMIT))
    assert problem.isprintable()
    assert len(problem) == preflight.MAX_PROBLEM


# --- a machine 0 that is none ----------------------------------------------------------------------------------------

Serve = Callable[[JsonConnection], object]


@contextlib.contextmanager
def served(serve: Serve) -> Iterator[int]:
    """Run a server that calls ``serve`` for each connection; yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection = JsonConnection(listener.accept()[0])
            except OSError:
                return
            with contextlib.suppress(OSError, ConfigError):
                serve(connection)
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(LIMIT)


def drip(connection: JsonConnection) -> object:
    for _ in range(200):
        connection._connection.sendall(b" ")
        time.sleep(0.02)
    return None


def greet(*messages: Any) -> Serve:
    def serve(connection: JsonConnection) -> None:
        connection.accept(time.monotonic() + 5)
        for message in messages:
            connection.send(message)

    return serve


def test_a_stopped_machine_0_is_noticed() -> None:
    port = int(free_port())
    host = host_process(port, machines=3, limit=3.0)
    try:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(join, replace(OTHER, machines=3), port, b"", 3.0)
            connect(port).close()
            time.sleep(1.0)
            host.send_signal(signal.SIGSTOP)
            error = str(waits.exception(LIMIT))
    finally:
        host.kill()
        host.communicate()
    assert error.startswith("machine 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT="), error
    assert error.endswith(" has sent nothing for 3 s: see whether its script still runs there")


@pytest.mark.parametrize(
    ("serve", "problem"),
    [
        (drip, "did not reach machine 0"),
        (lambda connection: (greet({"here": True})(connection), drip(connection)), "has sent nothing for 0.5 s"),
        (greet({"here": True}, {"plan": 7}), "did not reach machine 0"),
        (greet({"here": True}, {"plan": {"job": ["a"]}}), "did not reach machine 0"),
        (greet({"here": True}, {"plan": {"run_dir": "a\0b"}}), "did not reach machine 0"),
        (greet({"here": True}, {"plan": {}}, {"start": "12"}), "was lost before the start"),
        (greet({"here": True}, {"plan": {}}, {"start": [1, -1]}), "was lost before the start"),
        (greet({"problem": ESCAPE}), "title"),
        (greet({"problem": {}}), "did not reach machine 0"),
    ],
)
def test_what_listens_there_does_not_extend_the_time(
    serve: Serve, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "REPLY_TIMEOUT", 0.3)
    begun = time.monotonic()
    with served(serve) as port, pytest.raises((ConfigError, NonRetryableError), match=problem) as error:
        join(OTHER, port, limit=0.5)
    assert str(error.value).isprintable()
    assert time.monotonic() - begun < LIMIT


@contextlib.contextmanager
def on_the_way(port: int, change: Callable[[list[bytes]], bytes]) -> Iterator[int]:
    """Forward one connection to ``port``; ``change`` gets all lines of machine 0 and returns the line to forward."""
    listener = socket.create_server(("127.0.0.1", 0))
    lines = list[bytes]()

    def copy(source: socket.socket, target: socket.socket, from_host: bool) -> None:
        with contextlib.suppress(OSError):
            for line in source.makefile("rb"):
                lines.extend([line] if from_host else [])
                target.sendall(change(lines) if from_host else line)
            target.shutdown(socket.SHUT_RDWR)

    def run() -> None:
        near = listener.accept()[0]
        far = connect(port)
        for pair in ((near, far, False), (far, near, True)):
            threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[-1].replace(b'"job": "j"', b'"job": "k"'),
        lambda lines: lines[-2] if b'"plan"' in lines[-1] else lines[-1],
        lambda lines: lines[-1][65:] if b'"plan"' in lines[-1] else lines[-1],
    ],
    ids=["changes a plan", "repeats a line", "takes the proof away"],
)
def test_nobody_on_the_way_can_change_a_message(change: Callable[[list[bytes]], bytes]) -> None:
    with machine_0(SECRET) as (port, host), on_the_way(port, change) as near:
        with pytest.raises(ConfigError, match="the secrets differ"):
            join(OTHER, near, SECRET)
        assert "machine 1 (beta)" in str(host.exception(LIMIT)) or isinstance(host.exception(), ConfigError)


# --- the secret ------------------------------------------------------------------------------------------------------


def secret_file(mode: int, content: str | None = "secret\n") -> Callable[[ScratchProject], Mapping[str, str]]:
    def prepare(project: ScratchProject) -> Mapping[str, str]:
        path = project.work / "secret"
        if content is None:
            os.mkfifo(path)
        else:
            path.write_text(content)
        path.chmod(mode)
        return {"SAMESTEP_SECRET_FILE": str(path), "MASTER_PORT": free_port()}

    return prepare


SEVERAL = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def secret_attempt(what: str, error: str, name: str = "", **settings: Any) -> Attempt:
    environ = {**SEVERAL, "SAMESTEP_SECRET_FILE": name} if name else SEVERAL
    return Attempt(7, what, 2, error, environ=environ, **settings)


ATTEMPTS = [
    secret_attempt(
        "a secret that others can read", r"secret is open to other users: chmod", prepare=secret_file(0o640)
    ),
    secret_attempt("an empty file of the secret", r"secret is empty: write", prepare=secret_file(0o600, " ")),
    secret_attempt("a FIFO for the secret", r"secret is empty: write", prepare=secret_file(0o600, None)),
    secret_attempt("no file of the secret", r"SAMESTEP_SECRET_FILE=\S+: No such file", "missing\x1b[2J"),
    secret_attempt("a folder for the secret", r"=/tmp: Is a directory: name a file", "/tmp"),
]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=str)
def test_an_attempt_ends_as_the_table_says(project: ScratchProject, attempt: Attempt) -> None:
    check(project, attempt)


def test_the_secret_is_in_no_file_no_output_and_no_rank(project: ScratchProject) -> None:
    secret = "Gh5vXk2-of-this-test"
    path = project.work / "secret"
    path.write_text(secret)
    path.chmod(0o600)
    given = [{"SAMESTEP_SECRET": secret}, {"SAMESTEP_SECRET_FILE": str(path)}]
    several = {**SEVERAL, "MASTER_PORT": free_port()}
    code = "note(environ=dict(os.environ), argv=sys.argv)\nsys.exit(attempt == 0)"
    started = [
        project.start(code, "2", environ={**several, "NODE_RANK": str(number), **environ})
        for number, environ in enumerate(given)
    ]
    done = [end_of(process) for process in started]
    assert [each.returncode for each in done] == [0, 0], done
    assert len(project.notes()) == 4
    assert all("SAMESTEP_SECRET" not in name for note in project.notes() for name in note["environ"])
    path.unlink()
    texts = [each.stdout + each.stderr for each in done]
    texts += [each.read_text() for each in project.work.rglob("*") if each.is_file()]
    assert all(secret not in text for text in texts)
    shown = project.run("", "2", "--dry-run", environ={**several, **given[0]})
    assert (shown.returncode, secret in shown.stdout + shown.stderr) == (0, False)


# --- fuzz ------------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted(preflight.FIELDS))
MESSAGES = st.dictionaries(NAMES, VALUES, max_size=4) | st.dictionaries(NAMES, VALUES, max_size=4).map(
    lambda changes: {**CARD, **changes}
)


def test_any_first_message_is_answered_and_machine_0_lives_or_ends_in_order(soak: bool) -> None:
    with contextlib.ExitStack() as stack:
        hosts: list[tuple[int, Future_]] = []

        @given(MESSAGES, st.booleans())
        @settings(max_examples=amount(soak, few=150, many=2000), deadline=None, database=None)
        def attempt(message: dict[str, Any], has_proof: bool) -> None:
            if not hosts or hosts[-1][1].done():
                hosts.append(stack.enter_context(machine_0()))
            port, host = hosts[-1]
            if has_proof:
                reply = call(port, message)
                assert reply.keys() <= {"here", "problem", "fatal", "plan"}
                if reply:  # the message described a machine that does not fit, or that is lost before the start
                    assert isinstance(host.exception(LIMIT), (ConfigError, NonRetryableError))
            else:
                stranger = connect(port)
                stranger.sendall(json.dumps(message).encode() + b"\n")
                stranger.close()

        attempt()
        port, host = hosts[-1]
        if not host.done():
            assert join(OTHER, port) == host.result(LIMIT)


def test_whatever_machine_0_sends_the_others_start_or_end_in_order(soak: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "REPLY_TIMEOUT", 0.2)
    monkeypatch.setattr(preflight, "RETRY", 0.01)
    texts = st.dictionaries(st.text(max_size=5), VALUES | st.text(), max_size=3)
    plans = st.fixed_dictionaries({"plan": texts | VALUES})
    starts = st.fixed_dictionaries({"start": st.lists(st.integers()) | VALUES})
    problems = st.fixed_dictionaries({"problem": st.text() | VALUES}, optional={"fatal": VALUES})
    messages: list[Any] = []

    def serve(connection: JsonConnection) -> None:
        greet({"here": True}, *messages)(connection)

    with served(serve) as port:

        @given(st.lists(plans | starts | problems | MESSAGES, max_size=3))
        @settings(max_examples=amount(soak, few=50, many=2000), deadline=None, database=None)
        def attempt(sent: list[Any]) -> None:
            messages[:] = sent
            try:
                found = join(OTHER, port, limit=0.02)
                assert all(type(each) is int for each in found.ranks)
            except (ConfigError, NonRetryableError) as error:
                problem = str(error)
                assert problem.isprintable()

        attempt()


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(preflight.FIELDS, VALUES)))
@settings(max_examples=100, deadline=None, database=None)
def test_what_differs_is_one_printable_line(changes: dict[str, Any]) -> None:
    node = preflight._as_node(
        {**CARD, **{name: value for name, value in changes.items() if preflight.FIELDS[name](value)}}
    )
    if node:
        assert preflight.difference(NODE, node, equal_ranks=True).isprintable()
