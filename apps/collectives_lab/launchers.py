"""Start the same small job by torchrun, launch, spawn and Process: what each sets, and how each fails.

    bash scripts/run_collectives_lab.sh 2 launchers

Each runs the job twice: once to its end, and once with its last rank killed halfway. The script small_job.py
is the job. The script data_parallel.py compares DataParallel, which has no ranks to start, with DDP.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from options import device_argument
from samestep import NonRetryableError, log
from samestep.options import Options
from samestep.root import Root
from show import Picture, Table, duration, publish, ranks_of, size

HERE = Path(__file__).resolve().parent
LIMIT = 300  # seconds for one job
WAYS = {  # name: small_job.py's WAY, and a description
    "torchrun": ("rank", "starts processes; gives them their places and an address by the environment"),
    "torch.distributed.launch": ("rank", "torchrun's deprecated predecessor; also gives each an argument --local-rank"),
    "multiprocessing.spawn": ("spawn", "starts processes; gives each its number as an argument, no more"),
    "Process": ("process", "one process each; no process watches them, and the caller must read exit codes"),
}
CLOSE = 1e-12  # between float64 gradients, and weights, that differ by the order of summation alone
CLOSE_STEPS = 100  # so many steps weights stay so: training makes rounding grow


def command(way: str, n: int, run_dir: Path, steps: int, dying: int) -> list[str]:
    """Return the command line that runs the small job."""
    job = [str(HERE / "small_job.py"), WAYS[way][0], *map(str, (n, run_dir, steps, dying))]
    if WAYS[way][0] != "rank":
        return [sys.executable, *job]
    return torchrun(n, *job, module="torch.distributed.run" if way == "torchrun" else way)


def torchrun(n: int, *job: str, module: str = "torch.distributed.run") -> list[str]:
    """Return the command line that starts n ranks of a program on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", module, "--nnodes=1", f"--nproc-per-node={n}"]
    return [*words, "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0", *job]


def run_job(name: str, words: list[str], run_dir: Path) -> dict[str, Any]:
    """Run a job; return how it ended, in numbers and in its own words."""
    root = Root(run_dir)
    root.make_folder("log")
    for old in run_dir.glob("*.json"):
        old.unlink()
    mark = uuid.uuid4().hex
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SAMESTEP_LAB": mark}
    environ.pop("SAMESTEP_ERRORS", None)  # this function reads the ranks' errors, not the launch script
    begun = time.monotonic()
    process = subprocess.Popen(words, env=environ, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, stderr = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        raise NonRetryableError(f"the job by {name} was not done after {LIMIT} s") from None
    ended = time.monotonic()
    with root.create("log/stderr.log") as file:
        file.write(stderr.encode(errors="replace"))
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    results = {path.stem: json.loads(path.read_text()) for path in sorted(run_dir.glob("*.json"))}
    ranks = [result for stem, result in results.items() if stem.startswith("rank-")]
    environs = [result for stem, result in results.items() if stem.startswith("environ-")]
    return {
        "code": process.returncode,
        "seconds": ended - begun,
        "seconds_after_death": ended - results["died"] if "died" in results else None,
        "ranks_done": len(ranks),
        "weights_sha256": sorted({rank["weights_sha256"] for rank in ranks}),
        "sets": {key: value for each in environs[-1:] for key, value in each.items() if key not in environ},
        "arguments": ranks[-1].get("arguments", []) if ranks else [],
        "left_running": len(marked(mark)),
        "said": errors,
        "traceback_lines": len(lines) - len(errors),
    }


def marked(mark: str) -> list[int]:
    """Return the processes that carry this mark in their environment."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SAMESTEP_LAB={mark}".encode() in entry.read_bytes().split(b"\0"):
                pids.append(int(entry.parent.name))
    return pids


def compare(n: int, options: Options) -> None:
    """Run the job in each way, whole and with a rank killed; write launchers.json."""
    folder = options.run_dir / "launchers"
    result: dict[str, Any] = {"facts": {"torch": version("torch"), "world_size": n}, "ways": {}}
    for way in options.launchers:
        log.info(f"the small job by {way} on {ranks_of(n)}")
        runs = {}
        for name, dying in (("whole", -1), ("killed", n - 1)):
            run_dir = folder / f"{way}-{name}"
            runs[name] = run_job(way, command(way, n, run_dir, options.steps, dying), run_dir)
        whole = runs["whole"]
        if whole["code"] != 0 or whole["ranks_done"] != n or len(whole["weights_sha256"]) != 1:
            raise NonRetryableError(f"the small job by {way} failed: {whole['said']}")
        result["ways"][way] = runs
    if len({sha256 for runs in result["ways"].values() for sha256 in runs["whole"]["weights_sha256"]}) > 1:
        raise NonRetryableError("the same job ended with different weights under different launchers")
    result["data_parallel"] = compare_data_parallel(n, options, folder / "DataParallel")
    publish(options.run_dir, "launchers", result, tables(result), pictures)


def compare_data_parallel(n: int, options: Options, run_dir: Path) -> dict[str, Any]:
    """Compare DataParallel, and DDP on n ranks, with the plain step.

    Raises:
        NonRetryableError: the first gradients, or the weights within CLOSE_STEPS steps, differ from the plain step's.
    """
    log.info(f"DataParallel, and DDP on {ranks_of(n)}, beside the plain step")
    arguments = [f"--run-dir={run_dir}", f"--steps={options.steps}", device_argument(options), "--quiet"]
    job = run_job("DataParallel", torchrun(n, str(HERE / "data_parallel.py"), *arguments), run_dir)
    if job["code"] != 0:
        raise NonRetryableError(f"DataParallel beside DDP failed: {job['said']}")
    result: dict[str, Any] = json.loads((run_dir / "data_parallel.json").read_text())
    checked = ["gradients_difference", *(["weights_difference"] if result["steps"] <= CLOSE_STEPS else [])]
    for each in result["ways"]:
        if not all(each[name] <= CLOSE for name in checked):  # false for NaN, too
            raise NonRetryableError(f"{each['way']} does not take the plain step: {each}")
    return result


# --- as tables -----------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of the command."""
    n = result["facts"]["world_size"]
    rows, failures = [], []
    for way, runs in result["ways"].items():
        whole, killed = runs["whole"], runs["killed"]
        names = sorted(name for name in whole["sets"] if not name.startswith("TORCHELASTIC_"))
        elastic = len(whole["sets"]) - len(names)
        names += [f"{elastic} TORCHELASTIC_*"] if elastic else []
        sets = ", ".join([*names, *whole.get("arguments", [])])
        done = f"{whole['ranks_done']} of {n} ranks in {duration(whole['seconds'])}"
        rows.append([way, WAYS[way][1], sets or "nothing", done])
        after = duration(killed["seconds_after_death"]) if killed["seconds_after_death"] else ""
        counts = [str(killed["left_running"]), str(killed["traceback_lines"])]
        errors = [line.removeprefix("error: ") for line in killed["said"] if line.startswith("error: rank ")]
        failures.append([way, str(killed["code"]), after, *counts, *(errors or ["nothing"])[:1]])
    note = "Variables that a rank found and its launcher did not have, and an argument that its launcher added."
    yield Table(f"What each launcher does, {ranks_of(n)}", note, ["launcher", "how", "sets", "the job"], rows)
    note = "Time is from the kill to the launcher's end; lines are those on stderr beside the ranks' own."
    header = ["launcher", "exit code", "after", "left running", "lines", "message of a surviving rank"]
    yield Table("When the last rank is killed halfway", note, header, failures)
    if "data_parallel" in result:  # earlier versions did not write it
        yield data_parallel_table(result["data_parallel"])
    if n > 1 and (memory := result.get("data_parallel", {}).get("memory")):
        yield memory_table(memory, n)


def data_parallel_table(result: dict[str, Any]) -> Table:
    """Return how far each way is from the plain step."""
    rows = []
    for each in result["ways"]:
        differences = (each["gradients_difference"], each["weights_difference"])
        cells = [f"{difference:.1e}" if difference else "the same bits" for difference in differences]
        rows.append([each["way"], str(each["processes"]), f"{each['calls_per_step']:g}", *cells])
    devices = result["devices_of_data_parallel"]
    note = f"DataParallel uses GPUs {devices}" if devices else "Without a GPU DataParallel calls the module as it is"
    note += ". Differences are the largest from the plain step, in float64: of the first gradients, and of the "
    note += f"weights after {result['steps']} steps; calls are of the model, in one process and step."
    if result["steps"] > CLOSE_STEPS:
        note += f" Beyond {CLOSE_STEPS} steps rounding has grown: the weights are reported, not checked."
    return Table("DataParallel beside DDP", note, ["how", "processes", "calls", "gradients", "weights"], rows)


def memory_table(memory: dict[str, Any], n: int) -> Table:
    """Return what DataParallel keeps on its output device, and on each other device."""
    rows = [[what, *map(size, each)] for what, each in memory["computed"].items()]
    rows.append(["sum", *(size(sum(each)) for each in zip(*memory["computed"].values()))])
    if memory["measured"]:
        rows.append(["measured peak", *map(size, memory["measured"][:2])])
    note = "From torch's source, without activations: DataParallel gathers all outputs on its output device, the first "
    note += "by default. There it also reduces the gradients, and the optimizer has its state there."
    return Table(f"DataParallel's memory on {n} devices", note, ["what", "output device", "each other device"], rows)


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    """Return no pictures: the tables are all."""
    return []
