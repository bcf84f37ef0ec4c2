"""Measure how long a kill delays the other ranks, how soon the killed rank's successor trains, and images per second.

    PYTHON=.venvs/mnist_elastic/bin/python python3 benchmarks/elastic.py [--rounds 3]

The first table has the seconds from a SIGKILL of ranks until the job logs a step that began after the kill. Its rows
are jobs of mnist_elastic, which continue after the kill, and of mnist_ddp, which restart. The second table has the
seconds from a SIGKILL of one of three ranks of mnist_elastic until the successor of this rank has made an update, by
--start-method. The third table has the images per second of mnist_elastic and mnist_ddp, both with 8 virtual ranks, and
the median of their ratios. Jobs take turns in each round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]
JOBS = [  # app, ranks, and how many of them are killed at once
    ("mnist_elastic", 2, 1),
    ("mnist_elastic", 3, 1),
    ("mnist_elastic", 4, 1),
    ("mnist_elastic", 4, 2),
    ("mnist_elastic", 4, 3),
    ("mnist_ddp", 3, 1),
]
METHODS = ("fork", "exec")
RETURNING = 3  # number of ranks of the jobs in the second table
KILLS = 4  # number of kills in each job
FIRST = 30  # steps before the first kill
LIMIT = 120.0  # timeout of each wait, in seconds


class Job:
    """A job of an app in a new run directory."""

    def __init__(self, app: str, ranks: int, folder: Path, *options: str) -> None:
        self.run_dir = Path(tempfile.mkdtemp(dir=folder))
        command = ["bash", str(ROOT / "scripts" / f"run_{app}.sh"), str(ranks), f"--run-dir={self.run_dir}"]
        command += ["--dataset=mnist-5k", "--virtual-ranks=8", "--quiet", "--max-restarts=100", *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet)  # type: ignore[call-overload]

    def lines(self) -> list[dict[str, Any]]:
        """Return the values of each line of metrics.jsonl that has a step."""
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [values for line in text.split("\n")[:-1] if "step" in (values := json.loads(line))]

    def step(self) -> int:
        """Return the newest logged step."""
        return max((line["step"] for line in self.lines()[-1:]), default=0)

    def ranks(self, first: int) -> dict[int, int]:
        """Return, by rank, the PIDs of running ranks from ``first`` on that have made an update."""
        found = {}
        for path in (self.run_dir / "log").glob("alive-[0-9]"):
            beat = json.loads(path.read_text())
            if beat["rank"] >= first and beat["updates"] > 0 and Path(f"/proc/{beat['pid']}").exists():
                found[beat["rank"]] = beat["pid"]
        return found

    def wait_for(self, condition: Any) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"error: the job of {self.run_dir} has ended or hangs")
            time.sleep(0.005)

    def pause(self, ranks: int, first: int, killed: int) -> float:
        """Kill ranks, and return the seconds until the job logs a step that began after the kill.

        Args:
            ranks: number of running ranks from ``first`` on.
            first: lowest rank that may be killed.
            killed: number of ranks to kill at once.
        """
        self.wait_for(lambda: self.step() > FIRST and len(self.ranks(first)) == ranks)
        time.sleep(random.uniform(0.2, 1.0))
        for pid in random.sample([*self.ranks(first).values()], killed):
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        before = self.step()
        self.wait_for(lambda: self.step() > before + 1)  # the ranks may complete one step that began before the kill
        return time.monotonic() - begun

    def absence(self, ranks: int) -> float:
        """Kill one rank, and return the seconds until its successor has made an update."""
        self.wait_for(lambda: self.step() > FIRST and len(self.ranks(1)) == ranks)
        time.sleep(random.uniform(0.2, 1.0))
        rank, pid = random.choice([*self.ranks(1).items()])
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        self.wait_for(lambda: self.ranks(1).get(rank, pid) != pid)
        return time.monotonic() - begun

    def end(self) -> None:
        """Terminate the job if it still runs, and wait for its end."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(timeout=LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="default: %(default)s")
    rounds = parser.parse_args().rounds
    pauses: dict[tuple[str, int, int], list[float]] = {}
    absences: dict[str, list[float]] = {method: [] for method in METHODS}
    speeds: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for app, ranks, killed in JOBS:
                job = Job(app, ranks, Path(folder), "--epochs=1000", "--log-every=1", "--checkpoint-every=10")
                first = 1 if app == "mnist_elastic" else 0  # rank 0 of mnist_elastic is the launcher
                seconds = [job.pause(ranks, first, killed) for _ in range(KILLS)]
                pauses.setdefault((app, ranks, killed), []).extend(seconds)
                job.end()
            for method in METHODS:
                options = "--epochs=1000", "--log-every=1", "--checkpoint-every=10", f"--start-method={method}"
                job = Job("mnist_elastic", RETURNING, Path(folder), *options)
                absences[method] += [job.absence(RETURNING) for _ in range(KILLS)]
                job.end()
            for ranks in (1, 2, 4):
                for app in ("mnist_elastic", "mnist_ddp"):
                    job = Job(app, ranks, Path(folder), "--epochs=30", "--log-every=16", "--checkpoint-every=0")
                    job._process.wait(timeout=LIMIT)
                    lines = [line["samples_per_second"] for line in job.lines() if "test_loss" not in line]
                    speeds.setdefault((app, ranks), []).append(statistics.median(lines[3:]))
    print("| job | ranks | killed at once | times | median pause | longest pause |\n|---|---|---|---|---|---|")
    for (app, ranks, killed), seconds in pauses.items():
        figures = f"{statistics.median(seconds):.2f} s | {max(seconds):.2f} s"
        print(f"| {app} | {ranks} | {killed} | {len(seconds)} | {figures} |")
    print("\n| start method | kills | median until the rank is back | longest |\n|---|---|---|---|")
    for method, seconds in absences.items():
        print(f"| {method} | {len(seconds)} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s |")
    print("\n| ranks | mnist_elastic, images/s | mnist_ddp, images/s | ratio |\n|---|---|---|---|")
    for ranks in (1, 2, 4):
        elastic = speeds["mnist_elastic", ranks]
        ddp = speeds["mnist_ddp", ranks]
        ratio = statistics.median(one / other for one, other in zip(elastic, ddp))
        print(f"| {ranks} | {statistics.median(elastic):,.0f} | {statistics.median(ddp):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
