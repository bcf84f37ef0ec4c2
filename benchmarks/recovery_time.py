"""Measure the seconds from a SIGKILL to the restarted job's first step, with --start-method fork and exec.

    python benchmarks/recovery_time.py [--faults rank ranks save] [--methods fork exec] [--kills 10] [--json FILE]

Each row is one job of mnist_ddp, whose ranks are killed repeatedly before the job trains to its end. The faults are a
SIGKILL to a random rank, to all ranks, and to rank 0 while it writes a checkpoint. The measured time ends when rank 0
has logged a step after the restart. Each job must end with the weights of an undisturbed job. All jobs use this Python,
which needs the app's packages. ``--json`` replaces only the measured rows of its file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]
FAULTS = {"rank": "a rank", "ranks": "all ranks", "save": "rank 0 during a save"}
METHODS = ("fork", "exec")
BETWEEN = 20  # minimum number of steps between a restart and the next kill
LIMIT = 120.0  # timeout of each wait, in seconds


class Job:
    """A job of mnist_ddp in a new run directory."""

    def __init__(self, ranks: int, folder: Path, *options: str) -> None:
        self.ranks = ranks
        self.run_dir = Path(tempfile.mkdtemp(dir=folder))
        self._metrics = self.run_dir / "metrics.jsonl"
        self._console = self.run_dir.with_suffix(".log")
        command = ["bash", str(ROOT / "scripts" / "run_mnist_ddp.sh"), str(ranks), f"--run-dir={self.run_dir}"]
        command += ["--dataset=mnist-5k", "--log-every=1", "--checkpoint-every=10", "--max-restarts=1000", *options]
        environ = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
            )

    def wait_for(self, condition: Callable[[], Any], interval: float = 0.005) -> Any:
        """Poll until ``condition`` returns a true value, and return this value. Exit if the job ends or hangs."""
        deadline = time.monotonic() + LIMIT
        while not (found := condition()):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"error: the job has ended or hangs: {self._console.read_text()[-2000:]}")
            time.sleep(interval)
        return found

    def last_step(self) -> int:
        """Return the newest logged step of the current start, or 0 if no step is logged."""
        if not self._metrics.exists():
            return 0
        last = self._metrics.read_text().rpartition("\n")[0].rpartition("\n")[2]
        if last:
            return int(json.loads(last).get("step", 0))
        return 0

    def pids(self) -> list[int]:
        """Return the PIDs of the ranks."""
        beats = [self.run_dir / "log" / f"alive-{rank}" for rank in range(self.ranks)]
        return [json.loads(beat.read_text())["pid"] for beat in beats]

    def unfinished_save(self) -> Path | None:
        """Return the temporary folder of a checkpoint that is being written, or None."""
        folder = self.run_dir / "checkpoints"
        complete = [path.name for path in folder.glob("step-*")]
        for path in folder.glob(".step-*.tmp"):
            # An old checkpoint has such a name while the job deletes it.
            if path.name.removeprefix(".") > max(complete, default=""):
                return path
        return None

    def kill(self, fault: str, chance: random.Random) -> float | None:
        """Kill ranks, and return the seconds until a step after the restart; None if the save ended before the kill."""
        first = self.last_step() + BETWEEN
        self.wait_for(lambda: self.last_step() >= first)
        pids = self.pids()
        victims = {"rank": [chance.choice(pids)], "ranks": pids, "save": pids[:1]}[fault]
        if fault == "save":
            save = self.wait_for(self.unfinished_save, interval=0.0001)
        else:
            time.sleep(chance.uniform(0, 0.2))
        before = self._metrics.stat().st_ino
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        begun = time.perf_counter()
        was_hit = fault != "save" or save.exists()
        # Each start of the job replaces metrics.jsonl, and writes a line without a step before its first step.
        self.wait_for(lambda: self._metrics.stat().st_ino != before and self.last_step() > 0)
        seconds = time.perf_counter() - begun
        if was_hit:
            return seconds
        return None

    def end(self) -> str:
        """Wait for the end of the job, and return its weights_sha256."""
        code = self._process.wait(timeout=10 * LIMIT)
        if code != 0:
            raise SystemExit(f"error: the job ended with {code}: {self._console.read_text()[-2000:]}")
        result = json.loads((self.run_dir / "result.json").read_text())
        return str(result["weights_sha256"])


def measure(fault: str, method: str, options: argparse.Namespace, folder: Path, length: str) -> dict[str, Any]:
    """Kill one job ``options.kills`` times, and return its row of results.

    Args:
        fault: the fault, a key of FAULTS.
        method: value of --start-method, one of METHODS.
        options: options of this script, such as the number of ranks.
        folder: folder for the job's run directory.
        length: the app's option for the length of the training.
    """
    chance = random.Random(f"{fault} {method}")
    job = Job(options.ranks, folder, length, f"--start-method={method}")
    seconds: list[float] = []
    late = 0
    while len(seconds) < options.kills:
        taken = job.kill(fault, chance)
        if taken is None:
            late += 1
        else:
            seconds.append(round(taken, 3))
    return {"fault": fault, "method": method, "seconds": seconds, "late": late, "weights": job.end()}


def write(path: Path, machine: dict[str, Any], row: dict[str, Any]) -> None:
    """Write a row to the file. The row replaces an older row of the same fault and method."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [old for old in rows if (old["fault"], old["method"]) != (row["fault"], row["method"])]
    path.write_text(json.dumps({"machine": machine, "rows": [*kept, row]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    parser.add_argument("--kills", type=at_least(1), default=10, help="per job (default: %(default)s)")
    parser.add_argument("--ranks", type=at_least(1), default=3, help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one kill during a save: that it still runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of all kills there, too")
    options = parser.parse_args()
    if options.quick:
        options.faults = ["save"]
        options.kills = 1

    steps_per_kill = 50  # the fault "save" waits for the next save
    length = f"--epochs={1 + options.kills * steps_per_kill // 32}"  # an epoch has 32 steps
    machine = {"arch": platform.machine(), "cores": len(os.sched_getaffinity(0)), "ranks": options.ranks}
    are_equal = True
    print("| killed | method | kills | median, s | least | most | equal weights |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = Job(options.ranks, folder, length).end()
        for fault in options.faults:
            for method in options.methods:
                row = measure(fault, method, options, folder, length)
                row["equal"] = row["weights"] == undisturbed
                row["load"] = round(os.getloadavg()[0], 1)
                are_equal = are_equal and row["equal"]
                seconds = row["seconds"]
                figures = f"{statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f}"
                is_equal = "yes" if row["equal"] else "no"
                print(f"| {FAULTS[fault]} | {method} | {len(seconds)} | {figures} | {is_equal} |", flush=True)
                if options.json:
                    write(options.json, machine, row)
    if not are_equal:
        sys.exit("error: the weights of a killed job differ from those of an undisturbed one")


if __name__ == "__main__":
    main()
