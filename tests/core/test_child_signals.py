"""Test stop signals to a process group: a rank's workers survive them, and other child processes end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import is_running, wait_for
from programs import LIMIT, start

# TOOLS holds functions for a rank and its worker. A child has called exec when its process name is "sleep".
TOOLS = """
import os, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
SLEEP = ["sleep", "600"]
STARTS = {
    "Popen": lambda: subprocess.Popen(SLEEP).pid,
    "Popen with preexec_fn": lambda: subprocess.Popen(SLEEP, preexec_fn=lambda: None).pid,
    "posix_spawn": lambda: os.posix_spawnp("sleep", SLEEP, os.environ),
    "fork and exec": lambda: os.fork() or os.execvp("sleep", SLEEP),
}

def start_all():
    pids = {name: start() for name, start in STARTS.items()}
    while not all(open(f"/proc/{pid}/comm").read() == "sleep" + chr(10) for pid in pids.values()):
        time.sleep(0.01)
    return pids

def share_memory():  # starts multiprocessing's resource tracker
    memory = SharedMemory(create=True, size=1)
    memory.close()
    memory.unlink()

def ends(pids):
    return {os.waitpid(pid, 0)[1] for pid in pids.values()}

def terminate(pids):
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    return ends(pids)
"""
# RANK is a rank in its own process group, with a worker. ``ask`` sends the worker an expression and returns its value.
RANK = (
    f"""
import multiprocessing
from samestep import stop

TOOLS = {TOOLS!r}
"""
    + """
WORKER = TOOLS + '''
connection.send(os.getpid())
while True:
    connection.send(eval(connection.recv()))
'''
exec(TOOLS)

def main():
    os.setsid()
    log.start(run_dir, 0, False)
    request = stop.StopRequest(600.0, lambda stopped: log.exit_process(stopped, False))
    request.install()
    request.in_training = True
    context = multiprocessing.get_context(sys.argv[2])
    ours, theirs = context.Pipe()
    worker = context.Process(target=exec, args=(WORKER, {"connection": theirs}))
    worker.start()
    theirs.close()
    worker_id = ours.recv()

    def ask(expression):
        ours.send(expression)
        return ours.recv()

    def wait_for_test():
        log.info(f"here {worker_id}")
        sys.stdin.readline()

    BODY

log.run(main)
"""
)


@contextlib.contextmanager
def rank(tmp_path: Path, method: str, body: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a rank that waits in ``wait_for_test``, and kill its process group when the block ends.

    Yields: the rank's process and the process ID of its worker.
    """
    lines = "".join(f"\n    {line}" for line in body.strip().splitlines())
    with start(RANK.replace("\n    BODY", lines), tmp_path, method, stdin=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], LIMIT)[0], "the rank is not ready in time"
            here, worker = process.stdout.readline().split()
            assert here == "here"
            yield process, int(worker)
        finally:
            kill(-process.pid)
            process.kill()


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def result(process: subprocess.Popen[str]) -> str:
    """Let the rank continue to its end, and return its output."""
    out, err = process.communicate("\n", timeout=LIMIT)
    assert (process.returncode, err) == (0, "")
    return out.strip()


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("fork", signal.SIGTERM),
        ("spawn", signal.SIGUSR1),
        ("forkserver", signal.SIGINT),
        *(
            pytest.param(method, number, marks=pytest.mark.soak)
            for method in ("fork", "spawn", "forkserver")
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        ),
    ],
)
def test_a_worker_outlives_a_signal_to_the_group_and_its_parent_can_terminate_it(
    tmp_path: Path, method: str, number: int
) -> None:
    body = """
ask("share_memory()")
wait_for_test()
answer = ask("6 * 7")
worker.terminate()
worker.join(20)
while not request.number:  # a thread sets it, which may get its turn later
    time.sleep(0.001)
log.info(f"{answer} {worker.exitcode} {request.number}")
"""
    with rank(tmp_path, method, body) as (process, _):
        os.killpg(process.pid, number)
        assert result(process) == f"42 -15 {number}"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_worker_whose_parent_ends_obeys_the_signal_to_the_group(tmp_path: Path, method: str) -> None:
    """A launcher signals the group of a dead rank only once, so a worker that ignored this signal would never end."""
    with rank(tmp_path, method, "wait_for_test()") as (process, worker):
        os.killpg(process.pid, signal.SIGTERM)
        process.kill()
        process.wait(LIMIT)
        wait_for(lambda: not is_running(worker), LIMIT)


@pytest.mark.parametrize(
    ("place", "method"),
    [("rank", "fork"), ("worker", "fork"), pytest.param("worker", "spawn", marks=pytest.mark.soak)],
)
def test_a_program_that_a_rank_or_its_worker_starts_gets_its_signals(tmp_path: Path, place: str, method: str) -> None:
    """The program inherits no blocked signals, so its parent process and Ctrl-C can end the program."""
    body = f"""
call = {{"rank": eval, "worker": ask}}["{place}"]
terminated = call("terminate(start_all())")
shell = call("os.system('kill $$')")
call("globals().update(pids=start_all())")
wait_for_test()
log.info(f"{{terminated}} {{shell}} {{call('ends(pids)')}}")
"""
    with rank(tmp_path, method, body) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        assert result(process) == "{15} 15 {2}"
