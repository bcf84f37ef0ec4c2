"""Show who waited for whom: with --trace, each rank writes when it entered and left each collective.

    bash scripts/run_collectives_lab.sh 2 straggler --trace

``<run-dir>/trace-<command>-<N>/rank-<r>.jsonl`` has a line for each collective. Times are seconds of the machine's
clock, which all ranks read. A rank waits in a collective until the last rank has entered it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from samestep.options import Options
from show import SHOWN_RANKS, Picture, Table, duration, publish, ranks_of

Calls = dict[tuple[str, str], list[tuple[float, float]]]  # by (condition, collective): (before, after) of each call


def publish_waits(options: Options, facts: dict[str, Any]) -> None:
    """Write and print what the files of all ranks show. Only rank 0 calls this, after the other ranks' last step."""
    if not options.trace or facts["node_count"] != 1:  # several machines have several clocks
        return
    name = f"trace-{options.command}-{facts['world_size']}"
    ranks = [calls_of(options.run_dir / name / f"rank-{rank}.jsonl") for rank in range(facts["world_size"])]
    found = []
    for condition, collective in ranks[0]:
        if collective == "backward" or condition == "warm-up":  # a backward pass without communication
            continue
        times = np.array(list(zip(*(rank.get((condition, collective), []) for rank in ranks))))  # [calls, ranks, 2]
        if len(times) == 0:
            continue
        before, after = np.moveaxis(times, 2, 0)
        waited = np.minimum(before.max(axis=1, keepdims=True), after) - before
        last = np.bincount(before.argmax(axis=1), minlength=len(ranks))
        shown = {"condition": condition, "collective": collective}
        found.append({**shown, "waited": waited.sum(axis=0).tolist(), "last": last.tolist()})
    result = {"facts": facts, "command": options.command, "collectives": found}
    publish(options.run_dir, name, result, tables(result), pictures)


def calls_of(path: Path) -> Calls:
    """Return the calls in a rank's file."""
    calls: Calls = {}
    for line in path.read_text().splitlines():
        call = json.loads(line)
        calls.setdefault((call.get("condition", ""), call["collective"]), []).append((call["before"], call["after"]))
    return calls


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each condition of one command and one number of ranks."""
    n = result["facts"]["world_size"]
    header = ["collective", "calls", *(f"rank {rank} waited" for rank in range(min(n, SHOWN_RANKS))), "waited for"]
    note = "All calls together. The last column has the rank that entered most of the calls last."
    by_condition: dict[str, list[list[str]]] = {}
    for each in result["collectives"]:
        slowest = max(range(n), key=lambda rank: each["last"][rank])
        waited = [duration(seconds) for seconds in each["waited"][:SHOWN_RANKS]]
        whom = f"rank {slowest}: {each['last'][slowest]} of {sum(each['last'])}"
        row = [each["collective"], str(sum(each["last"])), *waited, whom]
        by_condition.setdefault(each.get("condition", ""), []).append(row)
    for condition, rows in by_condition.items():
        where = f": {condition}" if condition else ""
        yield Table(f"Who waited for whom in {result['command']}, {ranks_of(n)}{where}", note, header, rows)


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    """Return no pictures: the tables are all."""
    return []
