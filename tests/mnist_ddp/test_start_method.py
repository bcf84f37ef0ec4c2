"""Test ``--start-method fork``: one process forks the ranks, and a restart reuses this process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from harness import Harness, Outcome
from processes import parent

NO_GUARD = """
import os, sys
def main():
    print("argv", sys.argv[1:], "rank", os.environ["RANK"], "as", __name__, flush=True)
    {end}
"""


def run(harness: Harness, program: str, *words: str, **environ: str) -> Outcome:
    """Run ``program`` on 2 ranks by ``samestep run --start-method fork``."""
    path = harness.folder / "program.py"
    path.write_text(program)
    run_dir = harness.folder / "own"
    command = [sys.executable, "-m", "samestep", "run", "-n2", "--start-method=fork", f"--run-dir={run_dir}"]
    return harness.start_command([*command, str(path), *words], run_dir, **environ).finish()


def log_of(harness: Harness) -> str:
    return (harness.folder / "own" / "log" / "launcher.log").read_text()


@pytest.mark.parametrize("n", [1, 3])
def test_fork_and_exec_end_with_the_same_weights(harness: Harness, n: int) -> None:
    """Other tests of this file and the common tests compare both methods on two ranks."""
    digests = []
    for method in ("fork", "exec"):
        options = ["--max-steps=20", "--dataset=mnist-5k", f"--start-method={method}"]
        result = harness.checked(harness.run(n, *options, run_dir=harness.folder / method), n)
        digests.append(result["weights_sha256"])
    assert digests[0] == digests[1]


def test_a_restart_forks_from_the_process_that_has_imported_the_program(harness: Harness) -> None:
    """The killed run ends with the weights of an undisturbed run without fork. ps shows each rank's number."""
    options = [*harness.app.small]
    job = harness.start(2, *options)
    job.wait_for_step(5)
    first = job.ranks()[1]
    server = parent(parent(first))
    os.kill(first, signal.SIGKILL)
    second = job.wait_for(lambda: (pid := job.ranks().get(1)) != first and pid)
    assert parent(parent(second)) == server
    job.wait_for(lambda: job.alive(1).get("pid") == second)
    title = Path(f"/proc/{second}/cmdline").read_bytes().rstrip(b"\0")
    assert title == b"rank 1: mnist_ddp train.py"
    killed = harness.checked(job.finish(), 2)
    assert killed["restarts"] == 1
    undisturbed = harness.run(2, *options, "--start-method=exec", run_dir=harness.folder / "exec")
    assert killed["weights_sha256"] == harness.checked(undisturbed, 2)["weights_sha256"]


@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "sys.exit()"])
def test_a_program_without_a_main_block_runs_its_main_function(harness: Harness, end: str) -> None:
    """torch's agent detects the success of a rank that ends in any of these three ways."""
    outcome = run(harness, NO_GUARD.format(end=end), "--a", "b")
    assert outcome.code == 0, outcome
    for rank in range(2):
        assert f"argv ['--a', 'b'] rank {rank} as __main__" in outcome.stdout


@pytest.mark.parametrize("end", ["os._exit(3)", "raise ValueError('bad')", "raise KeyboardInterrupt"])
def test_a_rank_that_fails_fails_the_job(harness: Harness, end: str) -> None:
    outcome = run(harness, NO_GUARD.format(end=end))
    assert outcome.code == 1, outcome
    assert "the job failed" in outcome.stderr or "the job ended" in outcome.stderr


def test_a_program_that_starts_a_thread_at_its_import_runs_as_programs(harness: Harness) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    outcome = run(harness, thread + NO_GUARD.format(end="pass") + "if __name__ == '__main__':\n    main()\n")
    assert outcome.code == 0, outcome
    why = "program.py started 1 thread at its import: the ranks start as programs (--start-method exec)"
    assert outcome.stderr.count(f"warning: {why}\n") == log_of(harness).count(why) == 1
    assert outcome.stdout.count("argv []") == 2


def test_a_program_that_raises_at_its_import_reports_it_once_and_is_not_restarted(harness: Harness) -> None:
    outcome = run(harness, "import math\nmath.sqrt('x')\ndef main(): pass\n")
    assert outcome.code == 1, outcome
    assert outcome.errors == ["error: program.py failed at its import: TypeError: must be real number, not str"]
    assert log_of(harness).count("Traceback") == 1
    assert "math.sqrt('x')" in log_of(harness)


def test_fork_needs_a_program_that_can_be_imported(harness: Harness) -> None:
    outcome = run(harness, "print('trains')\n")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("error: PROGRAM program.py has no function main(): ")
    assert outcome.stderr.count("\n") == 1


def test_an_unknown_start_method_is_one_line(harness: Harness) -> None:
    outcome = harness.run(2, "--start-method=spawn")
    assert outcome.code == 2
    assert len(outcome.stderr.splitlines()) == 1, outcome
    assert "--start-method: invalid choice: 'spawn'" in outcome.stderr
