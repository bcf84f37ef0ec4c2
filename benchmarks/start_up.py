"""Measure the seconds from a launch script's start to the first training step, compared with bare torchrun.

    python benchmarks/start_up.py [--rounds 7] [--ranks 2] [--venv] [--quick] [--json FILE]

The launch script forks its ranks from a process that has imported the program, or starts a Python process per rank if
--start-method is exec. The script checks its options, finds and verifies the data, locks the run directory, looks for a
checkpoint, and monitors the job. Bare torchrun starts a minimal script, which joins the ranks and takes one step of a
DDP model of the same size. Both jobs use this Python (with --venv, the Python in .venvs/mnist_ddp) and the same number
of threads. Rank 0 writes a file after the first step. The starts take turns. An uncounted first round creates the
environment and the data, and fills the system's file cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]


def bare(first_step: Path) -> None:
    """Run a rank of the bare torchrun job. After the step, rank 0 writes the file ``first_step``."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    front = [nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()]
    model = nn.Sequential(*front, nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.03, momentum=0.9)
    m = 128 // dist.get_world_size()
    F.cross_entropy(ddp(torch.rand(m, 1, 28, 28)), torch.randint(10, [m])).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        first_step.write_text("done")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a normal exit


def seconds_until(done: Callable[[], bool], command: list[str], environ: dict[str, str], log: Path) -> float:
    """Run a job to its end, and return the seconds from the job's start until ``done`` returns True.

    Args:
        done: function that returns True after the first step.
        command: words of the job's command line.
        environ: environment variables of the job.
        log: file for the job's stdout and stderr.
    """
    with log.open("wb") as output:
        begun = time.perf_counter()
        job = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        while not done() and job.poll() is None:
            time.sleep(0.002)
        taken = time.perf_counter() - begun
        if job.wait() != 0 or not done():
            sys.exit(f"error: {' '.join(command)} ended with {job.returncode}: {log.read_text()[-2000:]}")
    return taken


def launch_script(method: str, ranks: int, python: str | None, environ: dict[str, str], folder: Path) -> float:
    run_dir = folder / method
    options = ["--dataset=mnist-5k", "--log-every=1", "--max-steps=1", f"--run-dir={run_dir}"]
    options += [f"--start-method={method}"]
    metrics = run_dir / "metrics.jsonl"

    def done() -> bool:
        return metrics.exists() and '{"step": 1,' in metrics.read_text()

    command = ["bash", str(ROOT / "scripts" / "run_mnist_ddp.sh"), str(ranks), *options]
    return seconds_until(done, command, {**environ, "PYTHON": python} if python else environ, folder / "launch.log")


def torchrun(ranks: int, python: str, environ: dict[str, str], folder: Path) -> float:
    first_step = folder / "first-step"
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [__file__, f"--bare={first_step}"]
    return seconds_until(first_step.exists, command, environ, folder / "bare.log")


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=7, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="(default: %(default)s)")
    parser.add_argument("--venv", action="store_true", help="use .venvs/mnist_ddp; the uncounted start makes it")
    parser.add_argument("--quick", action="store_true", help="one round, none before it: that it still runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's seconds there, too")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        bare(options.bare)
        return
    rounds, uncounted = (1, 0) if options.quick else (options.rounds, 1)
    python = str(ROOT / ".venvs" / "mnist_ddp" / "bin" / "python") if options.venv else sys.executable
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    environ.setdefault("OMP_NUM_THREADS", "1")

    taken: dict[str, list[float]] = {"fork": [], "exec": [], "torchrun": []}
    for number in range(uncounted + rounds):
        with tempfile.TemporaryDirectory() as name:
            settings = options.ranks, None if options.venv else python, environ, Path(name)
            seconds = {method: launch_script(method, *settings) for method in ("fork", "exec")}
            seconds["torchrun"] = torchrun(options.ranks, python, environ, Path(name))
        for kind in taken if number >= uncounted else ():
            taken[kind].append(seconds[kind])

    facts = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"
    versions = json.loads(subprocess.run([python, "-c", facts], capture_output=True, check=True).stdout)
    machine = {
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        **dict(zip(("python", "torch"), versions)),
    }
    machine["threads"] = environ["OMP_NUM_THREADS"]
    print(f"{', '.join(f'{name} {value}' for name, value in machine.items())}, {rounds} rounds, seconds\n")
    print("To the first step:\n")
    print("| ranks | launch script, fork | launch script, exec | bare torchrun | fork / exec | fork / torchrun |")
    print("|---|---|---|---|---|---|")
    ratios = [[ours / other for ours, other in zip(taken["fork"], taken[kind])] for kind in ("exec", "torchrun")]
    print(f"| {options.ranks} | {' | '.join(shown(each) for each in (*taken.values(), *ratios))} |")
    if options.json:
        result = {"machine": machine, "ranks": options.ranks, "seconds": taken}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
