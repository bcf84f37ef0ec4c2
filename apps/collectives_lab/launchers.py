"""The same small job by torchrun, multiprocessing.spawn and Process: what each sets, how each fails.

    bash scripts/run_collectives_lab.sh 2 launchers

Each runs the job twice: once to its end, and once with its last rank killed halfway. small_job.py is the job.
DataParallel, which has no ranks to start, is compared with DDP by data_parallel.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from ranks import write_json
from samestep import FatalError, log
from show import Picture, Table, duration, ranks_of

HERE = Path(__file__).resolve().parent
LIMIT = 300  # seconds for one job
WAYS = {
    "torchrun": "starts processes; gives them places and a meeting point by the environment",
    "multiprocessing.spawn": "starts processes; gives each its number as an argument, no more",
    "Process": "one process each; nobody watches them, exit codes are the caller's to read",
}
CLOSE = 1e-12  # between float64 gradients, and weights, that differ by the order of summation alone
CLOSE_STEPS = 100  # as long as weights stay so: training makes rounding grow


def command(way: str, n: int, run_dir: Path, steps: int, dying: int) -> list[str]:
    job = [str(HERE / "small_job.py"), {"torchrun": "rank", "multiprocessing.spawn": "spawn"}.get(way, way.lower())]
    job += [str(n), str(run_dir), str(steps), str(dying)]
    return torchrun(n, *job) if way == "torchrun" else [sys.executable, *job]


def torchrun(n: int, *job: str) -> list[str]:
    """Words that start n ranks of a program on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={n}"]
    return [*words, "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0", *job]


def try_one(what: str, words: list[str], run_dir: Path) -> dict[str, Any]:
    """Run a job; how it ended, in figures and in its own words."""
    (run_dir / "log").mkdir(parents=True, exist_ok=True)
    for old in run_dir.glob("*.json"):
        old.unlink()
    mark = uuid.uuid4().hex
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SAMESTEP_LAB": mark}
    environ.pop("SAMESTEP_ERRORS", None)  # what these ranks say is to be read here, not by the launch script
    begun = time.monotonic()
    process = subprocess.Popen(
        words,
        env=environ,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, stderr = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        raise FatalError(f"the job by {what} was not done after {LIMIT} s") from None
    ended = time.monotonic()
    (run_dir / "log" / "stderr.log").write_text(stderr)
    ranks = [json.loads(path.read_text()) for path in sorted(run_dir.glob("rank-*.json"))]
    set_by_it = {
        name: value
        for path in sorted(run_dir.glob("environ-*.json"))[-1:]
        for name, value in json.loads(path.read_text()).items()
        if name not in environ
    }
    died = run_dir / "died.json"
    return {
        "code": process.returncode,
        "seconds": ended - begun,
        "seconds_after_death": ended - json.loads(died.read_text()) if died.exists() else None,
        "ranks_done": len(ranks),
        "weights_sha256": sorted({rank["weights_sha256"] for rank in ranks if "weights_sha256" in rank}),
        "sets": set_by_it,
        "left_running": len(marked(mark)),
        "said": [line for line in stderr.splitlines() if line.startswith("error: ")],
        "traceback_lines": max(0, len(stderr.splitlines()) - len(re.findall("^error: ", stderr, re.MULTILINE))),
    }


def marked(mark: str) -> list[int]:
    """Processes that carry this mark in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SAMESTEP_LAB={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def compare(n: int, options: Namespace) -> None:
    """Each way, whole and with a rank killed; writes launchers.json."""
    folder = options.run_dir / "launchers"
    found: dict[str, Any] = {"facts": {"torch": torch.__version__, "world_size": n}, "ways": {}}
    for way in WAYS:
        log.info(f"the small job by {way} on {ranks_of(n)}")
        folders = {dying: folder / f"{way}-{name}" for dying, name in ((-1, "whole"), (n - 1, "killed"))}
        whole, killed = (
            try_one(way, command(way, n, run_dir, options.steps, dying), run_dir) for dying, run_dir in folders.items()
        )
        if whole["code"] != 0 or whole["ranks_done"] != n or len(whole["weights_sha256"]) != 1:
            raise FatalError(f"the small job by {way} failed: {whole['said']}")
        found["ways"][way] = {"whole": whole, "killed": killed}
    weights = {sha256 for way in found["ways"].values() for sha256 in way["whole"]["weights_sha256"]}
    if len(weights) > 1:
        raise FatalError("the same job ended with different weights under different launchers")
    found["data_parallel"] = compare_data_parallel(n, options, folder / "DataParallel")
    write_json(options.run_dir, "launchers", found)
    for table in tables([found]):
        log.info("\n" + table.text())


def compare_data_parallel(n: int, options: Namespace, run_dir: Path) -> dict[str, Any]:
    """DataParallel, and DDP on n ranks, against the plain step. Raises FatalError where they do not take it too: by the
    first gradients, and up to CLOSE_STEPS steps by the weights."""
    log.info(f"DataParallel, and DDP on {ranks_of(n)}, beside the plain step")
    kept = [f"--run-dir={run_dir}", f"--steps={options.steps}", f"--device={options.device}", "--quiet"]
    ended = try_one("DataParallel", torchrun(n, str(HERE / "data_parallel.py"), *kept), run_dir)
    if ended["code"] != 0:
        raise FatalError(f"DataParallel beside DDP failed: {ended['said']}")
    found: dict[str, Any] = json.loads((run_dir / "data_parallel.json").read_text())
    for each in found["ways"]:
        checked = [each["gradients_difference"]]
        if found["steps"] <= CLOSE_STEPS:
            checked.append(each["weights_difference"])
        if not all(difference <= CLOSE for difference in checked):  # nor is NaN close
            raise FatalError(f"{each['way']} does not take the plain step: {each}")
    return found


# --- as tables -----------------------------------------------------------------------------------------------------


def tables(results: list[dict[str, Any]]) -> list[Table]:
    made = []
    for found in results:
        n = found["facts"]["world_size"]
        rows, failures = [], []
        for way, runs in found["ways"].items():
            whole, killed = runs["whole"], runs["killed"]
            names = sorted(name for name in whole["sets"] if not name.startswith("TORCHELASTIC_"))
            elastic = len(whole["sets"]) - len(names)
            sets = ", ".join(names) + (f", {elastic} TORCHELASTIC_*" if elastic else "")
            done = f"{whole['ranks_done']} of {n} ranks in {duration(whole['seconds'])}"
            rows.append([way, WAYS[way], sets or "nothing", done])
            others = [line for line in killed["said"] if line.startswith("error: rank ")]
            failures.append(
                [
                    way,
                    str(killed["code"]),
                    duration(killed["seconds_after_death"]) if killed["seconds_after_death"] else "",
                    str(killed["left_running"]),
                    str(killed["traceback_lines"]),
                    others[0].removeprefix("error: ") if others else "nothing",
                ]
            )
        note = "Variables that a rank found and its launcher did not have."
        header = ["launcher", "how", "sets", "the job"]
        made.append(Table(f"What each launcher does, {ranks_of(n)}", note, header, rows))
        note = "Time is from the kill to the launcher's end; lines are those on stderr beside the ranks' own."
        header = ["launcher", "exit code", "after", "left running", "lines", "what a surviving rank says"]
        made.append(Table("When the last rank is killed halfway", note, header, failures))
        if "data_parallel" in found:  # not in those of earlier versions
            made.append(data_parallel_table(found["data_parallel"]))
    return made


def data_parallel_table(found: dict[str, Any]) -> Table:
    rows = [
        [
            each["way"],
            str(each["processes"]),
            f"{each['calls_per_step']:g}",
            *(
                f"{difference:.1e}" if difference else "the same bits"
                for difference in (each["gradients_difference"], each["weights_difference"])
            ),
        ]
        for each in found["ways"]
    ]
    devices = found["devices_of_data_parallel"]
    does = f"It uses GPUs {devices}" if devices else "Without a GPU it calls the module as it is"
    note = f"{does}. Differences are the largest from the plain step, in float64: of the first gradients, and of the "
    note += f"weights after {found['steps']} steps; calls are of the model, in one process and step."
    if found["steps"] > CLOSE_STEPS:
        note += f" Beyond {CLOSE_STEPS} steps rounding has grown: the weights are told, not checked."
    header = ["how", "processes", "calls", "gradients", "weights"]
    return Table("DataParallel beside DDP", note, header, rows)


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    return []
