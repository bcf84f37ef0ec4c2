"""Test signals to a rank: a stop request that reaches all ranks, and an exit that no hang delays."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from programs import LIMIT, child, rank_log, running, verdict
from samestep.stop import REPEAT_SECONDS, STOP_SIGNALS, Stopped, StopRequest, decode

# RANK runs a rank. Its function wait() prints "here" and then waits in C, as in a collective, where no Python signal
# handler runs.
RANK = """
import ctypes
from samestep import stop

def wait():
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    log.info("here")
    libc.pthread_mutex_lock(mutex)  # for ever

def main():
    log.start(run_dir, 0, False)
    is_final = sys.argv[3:] == ["final"]
    request = stop.StopRequest(float(sys.argv[2]), lambda stopped: log.exit_process(stopped, is_final))
    request.install()
    BODY

log.run(main)
"""
TRAINS = RANK.replace("BODY", "request.in_training = True; wait()")


def never(stopped: Stopped) -> NoReturn:
    raise AssertionError("this process is not to end")


def total(*votes: tuple[int, tuple[float, ...]]) -> list[float]:
    """Return the sum of the slots over ranks. Each of ``votes`` is (number of ranks, slots of each of these ranks)."""
    return [sum(count * slots[slot] for count, slots in votes) for slot in range(len(STOP_SIGNALS) + 1)]


def test_stop_requests_of_all_ranks_are_one_vector() -> None:
    for number in STOP_SIGNALS:
        request = StopRequest(1.0, never)
        assert decode(total((3, request.encode()))) == (0, False)
        request.number = number
        assert decode(total((8_000, request.encode()))) == (number, False)
        assert decode(total((8_000, request.encode()), (1, request.encode(launcher_died=True)))) == (number, True)
    assert decode([7.0, 3.0, 0.0, 0.0]) == (signal.SIGTERM, False)  # TERM at seven ranks, USR1 at three


class EndedError(Exception):
    """Raised in place of ending the process."""


@pytest.mark.parametrize(
    ("in_training", "words"),
    [
        (False, "stopped by SIGTERM before the first step"),
        (True, "stopped by SIGTERM, unsaved: no step could be saved within 0.05 s (--grace)"),
    ],
)
def test_a_rank_that_ends_itself_lets_the_launch_script_restart(
    monkeypatch: pytest.MonkeyPatch, in_training: bool, words: str
) -> None:
    """Call the function of the signal thread, which must wait no longer than the grace."""
    ended: list[Stopped] = []
    timeouts: list[float | None] = []
    wait = select.select

    def recorded(*arguments: Any) -> Any:
        timeouts.append(arguments[3])
        return wait(*arguments)

    def end(stopped: Stopped) -> NoReturn:
        ended.append(stopped)
        raise EndedError

    monkeypatch.setattr(select, "select", recorded)
    request = StopRequest(0.05, end)
    request.in_training = in_training
    request._read_end, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM]))
    with pytest.raises(EndedError):
        request._signal_thread()
    assert [(str(each), each.is_final, each.exit_code) for each in ended] == [(words, False, 128 + signal.SIGTERM)]
    assert all(timeout is None or timeout <= 0.05 for timeout in timeouts)
    assert Stopped(signal.SIGTERM, "").is_final
    os.close(request._read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("lost", "why"), [(True, "another rank has ended"), (False, "no step could be saved within 0.2 s")]
)
def test_a_rank_ends_before_the_grace_if_another_has_ended(
    monkeypatch: pytest.MonkeyPatch, lost: bool, why: str
) -> None:
    """NCCL would wait for the ended rank until the grace is over, which would delay the restart."""
    ended: list[Stopped] = []
    asked: list[bool] = []

    def end(stopped: Stopped) -> NoReturn:
        ended.append(stopped)
        raise EndedError

    def rank_is_lost() -> bool:
        asked.append(lost)
        return lost

    monkeypatch.setattr("samestep.stop.LOST_SECONDS", 0.1)
    request = StopRequest(0.2, end, rank_is_lost)
    request.in_training = True
    request._read_end, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM]))
    with pytest.raises(EndedError):
        request._signal_thread()
    assert [(str(each).partition("unsaved: ")[2].partition(" (")[0], each.is_final) for each in ended] == [(why, False)]
    assert asked == ([True] if lost else [False, False])
    os.close(request._read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("lost_seconds", "lost"),
    [(60.0, True), (0.1, False)],
    ids=["before other ranks are checked", "after they were found alive"],
)
def test_a_rank_that_waits_notices_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, lost_seconds: float, lost: bool
) -> None:
    ended: list[Stopped] = []

    def end(stopped: Stopped) -> NoReturn:
        ended.append(stopped)
        raise EndedError

    monkeypatch.setattr("samestep.stop.LOST_SECONDS", lost_seconds)
    monkeypatch.setattr("samestep.stop.REPEAT_SECONDS", 0.1)
    request = StopRequest(60.0, end, lambda: lost)
    request.in_training = True
    request._read_end, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM]))
    second = threading.Timer(0.5, os.write, (write_end, bytes([signal.SIGTERM])))
    second.start()
    with pytest.raises(EndedError):
        request._signal_thread()
    second.join()
    assert str(ended[0]) == "stopped by SIGTERM, unsaved: a second signal"
    os.close(request._read_end)
    os.close(write_end)


BLOCKED = """
import signal
from samestep import stop

signal.pthread_sigmask(signal.SIG_BLOCK, stop.STOP_SIGNALS)
stop.StopRequest(1.0, print).install()
print(signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*stop.STOP_SIGNALS})
"""


def test_a_rank_receives_signals_that_its_parent_blocked_for_its_children(tmp_path: Path) -> None:
    assert child(BLOCKED, tmp_path).stdout == "set()\n"


RELEASED = """
import signal
import threading
from samestep import stop

received = threading.Event()
former = signal.signal(signal.SIGUSR1, lambda *_: received.set())
request = stop.StopRequest(600.0, print)
request.install()
request.in_training = True
signal.raise_signal(signal.SIGUSR1)
request.release(is_answered=IS_ANSWERED)
for thread in threading.enumerate():
    if thread.name == "signals":
        thread.join(10)
print(received.wait(0.1), signal.getsignal(signal.SIGINT) is signal.default_int_handler, threading.active_count())
"""


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_release_installs_the_former_handlers_and_repeats_a_signal_without_an_answer(
    tmp_path: Path, is_answered: bool
) -> None:
    done = child(RELEASED.replace("IS_ANSWERED", str(is_answered)), tmp_path)
    assert (done.stdout, done.stderr) == (f"{not is_answered} True 1\n", "")


def test_two_signals_at_once_are_two() -> None:
    request = StopRequest(1.0, never)
    request._read_end, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM]))
    found = [request._next_signal(deadline=time.monotonic()) for _ in range(3)]
    assert found == [signal.SIGUSR1, signal.SIGTERM, 0]
    os.close(request._read_end)
    os.close(write_end)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_first_step_a_signal_ends_the_rank_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with running(RANK.replace("BODY", "wait()"), tmp_path, "600", until="here") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    message = f"stopped by {number.name} before the first step"
    assert (process.returncode, out, err) == (128 + number, f"{message}\n", "")
    assert verdict(tmp_path) is None


@pytest.mark.parametrize(
    ("grace", "sent", "why"),
    [
        ("0.5", [signal.SIGUSR1], "no step could be saved within 0.5 s (--grace)"),
        ("2.5", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], "no step could be saved within 2.5 s (--grace)"),
        ("600", [signal.SIGUSR1, None, signal.SIGINT], "a second signal"),
    ],
)
def test_a_rank_that_hangs_ends_all_the_same(tmp_path: Path, grace: str, sent: Sequence[int | None], why: str) -> None:
    """A signal within a second of the first counts as a repeat, because launchers repeat their signals."""
    with running(TRAINS, tmp_path, grace, "final", until="here") as process:
        for number in sent:
            if number is None:
                time.sleep(REPEAT_SECONDS + 0.3)
            else:
                process.send_signal(number)
                time.sleep(0.2)  # Linux delivers the lowest of several pending signals first
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (138, f"stopped by SIGUSR1, unsaved: {why}\n", "")
    assert verdict(tmp_path) == {"code": 138}


def test_a_signal_to_a_forked_child_ends_that_alone(tmp_path: Path) -> None:
    """A DataLoader, for example, terminates its workers with a signal."""
    body = """
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b".")
        time.sleep(600)
    os.read(ready, 1)
    os.kill(child, 15)
    print("here", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), request.number, file=sys.stderr)
    request.in_training = True
    log.info("here")
    time.sleep(0.2)
    raise stop.Stopped(0, f"received {request.number}")
"""
    with running(RANK.replace("    BODY\n", body), tmp_path, "600", until="here") as process:
        out, _ = process.communicate(timeout=LIMIT)
    assert out == "received 0\n"
    assert "here -15 0\n" in rank_log(tmp_path)


def test_listening_again_takes_back_what_a_framework_took(tmp_path: Path) -> None:
    body = """
    import signal
    for number in stop.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: None)  # a handler of the framework's own, of no meaning here
    signal.set_wakeup_fd(-1)  # as asyncio does
    request.in_training = True
    request.install()
    log.info("here")
    os.kill(os.getpid(), signal.SIGUSR2)
    while not request.number:
        time.sleep(0.01)
    raise stop.Stopped(request.number, f"saved after {signal.Signals(request.number).name}")
"""
    with running(RANK.replace("    BODY\n", body), tmp_path, "600", until="here") as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (143, "saved after SIGTERM\n")
    assert "Traceback" not in rank_log(tmp_path)
