"""Count the ranks that the lighthouse removes from overloaded jobs of mnist_elastic, in which no rank is killed.

    PYTHON=.venvs/mnist_elastic/bin/python python3 benchmarks/elastic_load.py [--jobs 4] [--ranks 2] [--minutes 25]

A rank without a heartbeat for SILENT_MS of apps/mnist_elastic/launcher.py is removed. On a machine with more ranks than
processors, a heartbeat may be late although the rank is alive.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from arguments import at_least
from elastic import Job

EVERY = 5.0  # seconds between two readings of the load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=at_least(1), default=4, help="default: %(default)s")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="ranks of each job (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=25.0, help="default: %(default)g")
    options = parser.parse_args()
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        run = "--epochs=10000", "--log-every=16", "--checkpoint-every=10"
        jobs = [Job("mnist_elastic", options.ranks, Path(folder), *run) for _ in range(options.jobs)]
        for job in jobs:
            job.wait_for(lambda job=job: len(job.ranks(1)) == options.ranks)
        deadline = time.monotonic() + 60 * options.minutes
        while time.monotonic() < deadline:
            time.sleep(EVERY)
            loads.append(os.getloadavg()[0])
        steps = sum(job.step() for job in jobs)
        groups = 0
        failures = 0
        for job in jobs:
            events = (job.run_dir / "log" / "events.jsonl").read_text().splitlines()
            kinds = [json.loads(event)["kind"] for event in events]
            groups += kinds.count("members")
            failures += kinds.count("failure")
            job.end()
    print(f"{steps} steps at a load of {min(loads):.0f} to {max(loads):.0f}")
    print(f"{groups - options.jobs} changes of members, {failures} failed ranks")


if __name__ == "__main__":
    main()
