"""Show who waited for whom: with --trace, each rank writes when it entered and left each collective.

    bash scripts/run_collectives_lab.sh 2 straggler --trace

``<run-dir>/trace-<command>-<N>/rank-<r>.jsonl`` has a line for each collective. Times are seconds of the machine's
clock, which all ranks read. A rank waits in a collective until the last rank has entered it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from samestep.options import Options
from show import SHOWN_RANKS, Picture, Table, duration, publish, ranks_of


def publish_waits(options: Options, facts: dict[str, Any]) -> None:
    """Write and print what the files of all ranks show. Only rank 0 calls this, after the other ranks' last step."""
    if not options.trace or facts["node_count"] != 1:  # several machines have several clocks
        return
    name = f"trace-{options.command}-{facts['world_size']}"
    ranks: list[dict[str, list[tuple[float, float]]]] = []  # by name, (before, after) of each call
    for rank in range(facts["world_size"]):
        ranks.append({})
        for line in (options.run_dir / name / f"rank-{rank}.jsonl").read_text().splitlines():
            call = json.loads(line)
            ranks[rank].setdefault(call["collective"], []).append((call["before"], call["after"]))
    found = []
    for collective in [each for each in ranks[0] if each != "backward"]:  # a backward pass without communication
        times = np.array(list(zip(*(rank.get(collective, []) for rank in ranks))))  # [calls, ranks, 2]
        if len(times):
            before, after = np.moveaxis(times, 2, 0)
            waited = np.minimum(before.max(axis=1, keepdims=True), after) - before
            last = np.bincount(before.argmax(axis=1), minlength=len(ranks))
            found.append({"collective": collective, "waited": waited.sum(axis=0).tolist(), "last": last.tolist()})
    result = {"facts": facts, "command": options.command, "collectives": found}
    publish(options.run_dir, name, result, tables(result), pictures)


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of one command and one number of ranks."""
    n, rows = result["facts"]["world_size"], []
    for each in result["collectives"]:
        slowest = max(range(n), key=lambda rank: each["last"][rank])
        waited = [duration(seconds) for seconds in each["waited"][:SHOWN_RANKS]]
        whom = f"rank {slowest}: {each['last'][slowest]} of {sum(each['last'])}"
        rows.append([each["collective"], str(sum(each["last"])), *waited, whom])
    header = ["collective", "calls", *(f"rank {rank} waited" for rank in range(min(n, SHOWN_RANKS))), "waited for"]
    note = "All calls together. The last column has the rank that entered most of the calls last."
    yield Table(f"Who waited for whom in {result['command']}, {ranks_of(n)}", note, header, rows)


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    """Return no pictures: the tables are all."""
    return []
