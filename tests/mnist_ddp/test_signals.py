"""Test stop signals and failures with torch's loader workers, torch's launcher and forked ranks."""

from __future__ import annotations

import itertools
import os
import signal
import sys

import pytest
from harness import ROOT, Harness

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
RUN = [sys.executable, "-m", "samestep", "run", "--max-restarts=0"]
STARTS = {
    "alone": [sys.executable],
    "exec": [*RUN, "-n1", "--start-method=exec"],
    "fork": [*RUN, "-n1", "--start-method=fork"],
}


def loop_with_loader(workers: int, method: str) -> str:
    """Return the program of docs/own_loop_run.py, changed to draw a batch from a DataLoader at each step."""
    context = f", multiprocessing_context={method!r}" if workers else ""
    loader = f"iter(torch.utils.data.DataLoader(range(10**8), batch_size=4, num_workers={workers}{context}))"
    changes = {
        "    for step in range(": f"    loader = {loader}\n    for step in range(",
        "        optimizer.zero_grad()": "        next(loader)\n        optimizer.zero_grad()",
        "log.run(main)": 'if __name__ == "__main__":\n    log.run(main)',
    }
    text = (ROOT / "docs" / "own_loop_run.py").read_text()
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


QUICK = [
    ("alone", signal.SIGUSR1, 2, "spawn"),
    ("exec", signal.SIGINT, 2, "fork"),
    ("fork", signal.SIGTERM, 2, "fork"),
]
PRODUCT = [
    (start, number, workers, method)
    for start, number, (workers, method) in itertools.product(STARTS, NUMBERS, [(0, "fork"), (2, "fork"), (2, "spawn")])
]
SOAK = [pytest.param(*case, marks=pytest.mark.soak) for case in PRODUCT if case not in QUICK]


@pytest.mark.parametrize(("start", "number", "workers", "method"), [*QUICK, *SOAK])
def test_a_signal_to_the_ranks_group_saves_a_step(
    harness: Harness, start: str, number: int, workers: int, method: str
) -> None:
    """The process group contains a rank and its loader workers. With forked ranks, it also contains torch's agent."""
    program = harness.folder / "loop.py"
    program.write_text(loop_with_loader(workers, method))
    run_dir = harness.folder / "run"
    words = [*STARTS[start], str(program), "--max-steps=1000000", "--epochs=100000", f"--run-dir={run_dir}"]
    if start != "alone":
        words = [*STARTS[start], f"--run-dir={run_dir}", *words[len(STARTS[start]) : -1]]
    job = harness.start_command(words, run_dir)
    job.wait_for_step(10)
    os.killpg(os.getpgid(job.alive(0)["pid"]), number)
    outcome = job.finish()
    assert outcome.code == 128 + number, outcome
    assert "which is saved" in outcome.stdout + outcome.stderr, outcome
    assert any((run_dir / "checkpoints").iterdir())


LOSES_A_RANK = """
import os, signal
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    if dist.get_rank() == int(os.environ["LOST"]):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("method", "lost"),
    [
        ("exec", 0),
        ("fork", 1),  # torch's agent then reports rank 0, which lost its connection
        pytest.param("exec", 1, marks=pytest.mark.soak),
        pytest.param("fork", 0, marks=pytest.mark.soak),
    ],
)
def test_the_last_line_names_the_rank_that_was_killed(harness: Harness, method: str, lost: int) -> None:
    program = harness.folder / "program.py"
    program.write_text(LOSES_A_RANK)
    run_dir = harness.folder / "run"
    words = [*RUN, "-n2", f"--start-method={method}", f"--run-dir={run_dir}", str(program)]
    outcome = harness.start_command(words, run_dir, LOST=str(lost)).finish()
    assert outcome.code == 1
    expected = f"error: the job ended with code 1; rank {lost} was ended by SIGKILL: "
    assert outcome.stderr.splitlines()[-1].startswith(expected), outcome
