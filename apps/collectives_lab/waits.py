"""Show each rank's waits in collectives, and the rank that most often entered last, from the files of --trace.

    bash scripts/run_collectives_lab.sh 2 straggler --trace

``<run-dir>/trace-<command>-<N>/rank-<r>.jsonl`` has a line for each collective. Times are seconds of time.monotonic(),
a clock that all ranks of a machine share. A rank waits in a collective until the last rank has entered it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from samestep.options import Options
from show import SHOWN_RANKS, Picture, Table, duration, publish, ranks_of

Calls = dict[tuple[str, str], list[tuple[float, float]]]  # (before, after) of each call, by (condition, collective)


def publish_waits(options: Options, facts: dict[str, Any]) -> None:
    """Analyze all ranks' trace files, and write and print the waits. Call this function on rank 0 at the end."""
    if not options.trace or facts["node_count"] != 1:  # clocks of several machines cannot be compared
        return
    name = f"trace-{options.command}-{facts['world_size']}"
    folder = options.run_dir / name
    ranks = [calls_of(folder / f"rank-{rank}.jsonl") for rank in range(facts["world_size"])]
    found = []
    for condition, collective in ranks[0]:
        if collective == "backward" or condition == "warm-up":  # a pass with this name does not communicate
            continue
        of_ranks = [rank.get((condition, collective), []) for rank in ranks]
        calls = list(zip(*of_ranks))
        if calls:
            found.append({"condition": condition, "collective": collective, **measure_waits(calls)})
    result = {"facts": facts, "command": options.command, "collectives": found}
    publish(options.run_dir, name, result, tables(result), pictures)


def measure_waits(calls: Sequence[Sequence[tuple[float, float]]]) -> dict[str, list[Any]]:
    """Return each rank's total seconds of waiting ("waited"), and the number of calls that it entered last ("last").

    Args:
        calls: (before, after) of each call on each rank.
    """
    times = np.array(calls)  # [calls, ranks, 2]
    before = times[:, :, 0]
    after = times[:, :, 1]
    last_before = before.max(axis=1, keepdims=True)
    waited = np.minimum(last_before, after) - before
    last = np.bincount(before.argmax(axis=1), minlength=before.shape[1])
    return {"waited": waited.sum(axis=0).tolist(), "last": last.tolist()}


def calls_of(path: Path) -> Calls:
    """Return the calls in a rank's trace file."""
    calls: Calls = {}
    for line in path.read_text().splitlines():
        call = json.loads(line)
        key = (call.get("condition", ""), call["collective"])
        calls.setdefault(key, []).append((call["before"], call["after"]))
    return calls


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each condition of a command at one world size."""
    n = result["facts"]["world_size"]
    waits = [f"rank {rank} waited" for rank in range(min(n, SHOWN_RANKS))]
    header = ["collective", "calls", *waits, "waited for"]
    note = "All calls together. The last column has the rank that entered most of the calls last."
    by_condition: dict[str, list[list[str]]] = {}
    for each in result["collectives"]:
        slowest = max(range(n), key=lambda rank: each["last"][rank])
        waited = [duration(seconds) for seconds in each["waited"][:SHOWN_RANKS]]
        calls = sum(each["last"])
        whom = f"rank {slowest}: {each['last'][slowest]} of {calls}"
        row = [each["collective"], str(calls), *waited, whom]
        by_condition.setdefault(each.get("condition", ""), []).append(row)
    for condition, rows in by_condition.items():
        title = f"Who waited for whom in {result['command']}, {ranks_of(n)}"
        if condition:
            title = f"{title}: {condition}"
        yield Table(title, note, header=header, rows=rows)


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    """Return no pictures, because this command has only tables."""
    return []
