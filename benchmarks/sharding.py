"""Compare samestep.sharding with torch's DistributedSampler in speed, memory, and time to the first batch.

    python benchmarks/sharding.py [--rounds 3] [--quick] [--json FILE]

DistributedSampler makes a list of all indices of the epoch on every rank, before it returns the first index. sharding
computes only the requested indices, and stores no list. Both methods shuffle the samples of a job with one rank. Each
measurement runs in a new process, and counts time and memory after the imports. DistributedSampler runs with up to
10,000,000 samples. The sampler's bytes per sample show whether more samples would fit into this machine's memory. The
memory of sharding is measured with batches of 128. A block of 2^20 indices needs some arrays of this size at any number
of samples. If this Python lacks torch, the columns of DistributedSampler are empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "core"))
BLOCK = 1 << 20
BATCH = 128
SAMPLES = (60_000, 10_000_000, 10**9, 10**12)
LARGEST_LIST = 10_000_000  # largest number of samples for which DistributedSampler runs
Figures = dict[str, float]


def resident(field: str) -> float:
    """Return this process's resident memory in MiB: the current size for field ``VmRSS``, the peak for ``VmHWM``."""
    status = Path("/proc/self/status").read_text()
    return next(float(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(field))


def measure_sharding(n: int, seconds: float) -> Figures:
    """Return sharding's milliseconds to the first batch, memory in MiB, and indices per second, for ``n`` samples."""
    import numpy as np
    from samestep.sharding import GlobalBatches, permute

    before = resident("VmRSS")
    begun = time.perf_counter()
    batches = GlobalBatches(n, BATCH, seed=1)
    batches.indices(0)
    first = time.perf_counter() - begun

    begun = time.perf_counter()
    middle = batches.steps_per_epoch // 2
    for step in itertools.count(middle):
        batches.indices(step)
        if time.perf_counter() - begun > seconds:
            break
    in_batches = (step - middle + 1) * BATCH / (time.perf_counter() - begun)
    memory = resident("VmHWM") - before

    positions = (n // 2 + np.arange(BLOCK)) % n
    taken: list[float] = []
    while sum(taken) < seconds:
        begun = time.perf_counter()
        permute(positions, n, 1, 0)
        taken.append(time.perf_counter() - begun)
    in_blocks = BLOCK / statistics.median(taken)
    return {"first": 1000 * first, "memory": memory, "in_batches": in_batches, "in_blocks": in_blocks}


def measure_sampler(n: int) -> Figures:
    """Return the same values for torch's sampler. The speed covers an epoch, including the time to make the list."""
    from torch.utils.data import Dataset, DistributedSampler

    class Samples(Dataset[int]):
        def __len__(self) -> int:
            return n

    before = resident("VmRSS")
    begun = time.perf_counter()
    sampler: DistributedSampler[int] = DistributedSampler(Samples(), num_replicas=1, rank=0, seed=1)
    indices = iter(sampler)
    list(itertools.islice(indices, BATCH))
    first = time.perf_counter() - begun
    for _ in indices:
        pass
    speed = n / (time.perf_counter() - begun)
    return {"first": 1000 * first, "memory": resident("VmHWM") - before, "in_batches": speed}


def in_fresh_process(kind: str, n: int, seconds: float) -> Figures:
    command = [sys.executable, __file__, f"--measure={kind}", f"--samples={n}", f"--seconds={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout)
    return figures


def versions(*names: str) -> dict[str, str]:
    """Return the versions of Python and of each package in ``names`` that is installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def shown(figures: list[Figures], name: str, unit: str, scale: float = 1.0, digits: int = 1) -> str:
    """Return the median and the range over the rounds as text."""
    values = [each[name] / scale for each in figures]
    low = f"{min(values):,.{digits}f}"
    high = f"{max(values):,.{digits}f}"
    return f"{statistics.median(values):,.{digits}f} {unit} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=at_least(1), default=3, help="fresh processes for each figure (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one short round, a smaller list: that it still runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there, too")
    parser.add_argument("--measure", choices=("sharding", "sampler"), help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=at_least(1), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sampler = options.measure == "sampler"
        print(
            json.dumps(
                measure_sampler(options.samples) if sampler else measure_sharding(options.samples, options.seconds)
            )
        )
        return
    rounds, seconds = (1, 0.05) if options.quick else (options.rounds, options.seconds)
    all_samples = tuple(n // 10 if options.quick and n == LARGEST_LIST else n for n in SAMPLES)
    machine = {"arch": platform.machine(), "cores": len(os.sched_getaffinity(0)), **versions("numpy", "torch")}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    print(
        f"{', '.join(f'{name} {value}' for name, value in machine.items())}, {memory:.0f} GB memory, {rounds} rounds\n"
    )

    ours: dict[int, list[Figures]] = {n: [] for n in all_samples}
    theirs: dict[int, list[Figures]] = {n: [] for n in all_samples if n <= LARGEST_LIST and "torch" in machine}
    for _ in range(rounds):
        for n in all_samples:
            ours[n].append(in_fresh_process("sharding", n, seconds))
            if n in theirs:
                theirs[n].append(in_fresh_process("sampler", n, seconds))

    largest = max(theirs, default=0)
    a_sample = statistics.median(each["memory"] for each in theirs[largest]) * 2**20 / largest if theirs else 0.0
    print("| samples | sharding: first batch | memory | in batches of 128 | in blocks of 2^20 ", end="")
    print("| DistributedSampler: first batch | memory | indices |")
    print("|---|---|---|---|---|---|---|---|")
    for n in all_samples:
        cells = [f"{n:,}", shown(ours[n], "first", "ms", digits=2), shown(ours[n], "memory", "MiB")]
        cells += [shown(ours[n], "in_batches", "M/s", 1e6), shown(ours[n], "in_blocks", "M/s", 1e6)]
        if n in theirs:
            cells += [shown(theirs[n], "first", "ms"), shown(theirs[n], "memory", "MiB")]
            cells += [shown(theirs[n], "in_batches", "M/s", 1e6)]
        elif not theirs:
            cells += ["no torch here", "", ""]
        else:
            verdict = "does not fit" if n * a_sample / 1e9 > memory else "not run"
            cells += [verdict, f"{n * a_sample / 1e9:,.0f} GB", ""]
        print(f"| {' | '.join(cells)} |")
    if theirs:
        print(f"\nDistributedSampler's memory: {a_sample:.0f} bytes a sample, measured at {largest:,}.")
    if options.json:
        result = {
            "machine": machine,
            "memory_gb": memory,
            "sharding": ours,
            "sampler": theirs,
            "bytes_a_sample": a_sample,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
