"""Signals to a rank: a wish that the others hear of, and an end that nothing can hold up."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from programs import LIMIT, rank_log, running, verdict
from samestep.signals import SAME, WISHES, Stopped, Wish, heard

# A rank that has said "here". Main threads wait in C, where no handler of Python's is run: in a framework's collective.
RANK = """
import ctypes
from samestep import signals

def wait():
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    log.info("here")
    libc.pthread_mutex_lock(mutex)  # for ever

def main():
    log.start(run_dir, 0, False)
    stands = sys.argv[3:] == ["stands"]
    wish = signals.Wish(float(sys.argv[2]), lambda stopped: log.leave(stopped, stands))
    wish.listen()
    BODY

log.run(main)
"""
TRAINS = RANK.replace("BODY", "wish.waits = True; wait()")


def never(stopped: Stopped) -> NoReturn:
    raise AssertionError("this process is not to end")


def test_wishes_of_all_ranks_are_one_number() -> None:
    for number in WISHES:
        wish = Wish(1.0, never)
        assert heard(3 * wish.as_number()) == (0, False)
        wish.number = number
        assert heard(8_000 * wish.as_number()) == (number, False)
        assert heard(8_000 * wish.as_number() + wish.as_number(orphaned=True)) == (number, True)
    both = 3.0 * 2**13 + 7  # USR1 at three ranks, TERM at seven
    assert heard(both) == (signal.SIGTERM, False)


@pytest.mark.parametrize("number", WISHES)
def test_before_the_first_step_a_signal_ends_the_rank_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with running(RANK.replace("BODY", "wait()"), tmp_path, "600", until="here") as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    said = f"stopped by {number.name} before the first step"
    assert (process.returncode, out, err) == (128 + number, f"{said}\n", "")
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
    """What comes within a second of the first signal is the same: launchers repeat theirs."""
    with running(TRAINS, tmp_path, grace, "stands", until="here") as process:
        for number in sent:
            if number is None:
                time.sleep(SAME + 0.3)
            else:
                process.send_signal(number)
                time.sleep(0.2)  # of several that wait, the system delivers the least first
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (138, f"stopped by SIGUSR1, unsaved: {why}\n", "")
    assert verdict(tmp_path) == {"code": 138}


def test_a_signal_to_a_forked_child_ends_that_alone(tmp_path: Path) -> None:
    """A loader's worker, say, that its parent terminates."""
    body = """
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b".")
        time.sleep(600)
    os.read(ready, 1)
    os.kill(child, 15)
    print("here", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), wish.number, file=sys.stderr)
    wish.waits = True
    log.info("here")
    time.sleep(0.2)
    raise signals.Stopped(0, f"heard {wish.number}")
"""
    with running(RANK.replace("    BODY\n", body), tmp_path, "600", until="here") as process:
        out, _ = process.communicate(timeout=LIMIT)
    assert out == "heard 0\n"
    assert "here -15 0\n" in rank_log(tmp_path)


def test_listening_again_takes_back_what_a_framework_took(tmp_path: Path) -> None:
    body = """
    import signal
    for number in signals.WISHES:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: None)  # a handler of the framework's own, of no meaning here
    signal.set_wakeup_fd(-1)  # as asyncio does
    wish.waits = True
    wish.listen()
    log.info("here")
    os.kill(os.getpid(), signal.SIGUSR2)
    while not wish.number:
        time.sleep(0.01)
    raise signals.Stopped(wish.number, f"saved after {signal.Signals(wish.number).name}")
"""
    with running(RANK.replace("    BODY\n", body), tmp_path, "600", until="here") as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (143, "saved after SIGTERM\n")
    assert "Traceback" not in rank_log(tmp_path)
