"""Start the same small job by torchrun, launch, spawn and Process, and compare their variables and failures.

    bash scripts/run_collectives_lab.sh 2 launchers

Each launcher runs the job (small_job.py) twice: once to its end, and once with its last rank killed halfway.
data_parallel.py compares DataParallel, which has no ranks, with DDP.
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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from options import device_argument
from samestep import NonRetryableError, log
from samestep.job_info import JobInfo
from samestep.options import Options
from samestep.root import Root
from show import Picture, Table, duration, publish, ranks_of, size

HERE = Path(__file__).resolve().parent
LIMIT = 300  # time limit of one job, in seconds
MARK = "COLLECTIVES_LAB_JOB"  # environment variable that identifies the processes of one job
WAYS = {  # small_job.py's argument WAY for each launcher, and a description
    "torchrun": ("rank", "starts processes; gives them their places and an address by the environment"),
    "torch.distributed.launch": ("rank", "torchrun's deprecated predecessor; also gives each an argument --local-rank"),
    "multiprocessing.spawn": ("spawn", "starts processes; gives each its number as an argument, no more"),
    "Process": ("process", "one process each; no process watches them, and the caller must read exit codes"),
}
CLOSE = 1e-12  # limit of the differences that the order of summation causes in float64 gradients and weights
CLOSE_STEPS = 100  # maximum number of steps for a comparison of weights, because training amplifies rounding


def command(way: str, n: int, run_dir: Path, steps: int, dying: int) -> list[str]:
    """Return the command line that runs the small job by the launcher ``way``.

    Args:
        way: key of WAYS.
        n: number of ranks.
        run_dir: run dir of the job.
        steps: number of steps.
        dying: rank that kills itself, or -1.
    """
    kind, _ = WAYS[way]
    job = [str(HERE / "small_job.py"), kind, str(n), str(run_dir), str(steps), str(dying)]
    if kind != "rank":
        return [sys.executable, *job]
    if way == "torchrun":
        return torchrun(n, *job)
    return torchrun(n, *job, module=way)


def torchrun(n: int, *job: str, module: str = "torch.distributed.run") -> list[str]:
    """Return the command line that starts ``n`` ranks of ``job`` by the launcher ``module``, with a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [sys.executable, "-m", module, "--nnodes=1", f"--nproc-per-node={n}"]
    return [*words, "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0", *job]


def run_job(name: str, words: list[str], run_dir: Path) -> dict[str, Any]:
    """Run a job, and return its exit code, duration, error messages and results.

    Args:
        name: name of the launcher, for messages.
        words: command line of the job.
        run_dir: run dir of the job.

    Raises:
        NonRetryableError: the job runs for more than LIMIT seconds.
    """
    root = Root(run_dir)
    root.make_folder("log")
    for old in run_dir.glob("*.json"):
        old.unlink()
    mark = uuid.uuid4().hex
    info = replace(JobInfo.from_environ(os.environ), errors=None)  # errors go to stderr, which this function reads
    environ = {**os.environ, **info.to_environ(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", MARK: mark}
    begun = time.monotonic()
    process = subprocess.Popen(words, env=environ, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, stderr = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        kill_marked(mark)
        process.communicate()
        raise NonRetryableError(f"the job by {name} was not done after {LIMIT} s") from None
    ended = time.monotonic()
    with root.create("log/stderr.log") as file:
        file.write(stderr.encode(errors="replace"))
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return {
        "code": process.returncode,
        "seconds": ended - begun,
        "left_running": len(marked(mark)),
        "said": errors,
        "traceback_lines": len(lines) - len(errors),
        **read_results(run_dir, environ, ended),
    }


def read_results(run_dir: Path, environ: Mapping[str, str], ended: float) -> dict[str, Any]:
    """Return the results that the ranks of the small job have written.

    Args:
        run_dir: run dir of the job.
        environ: environment of the job's launcher.
        ended: time at which the launcher ended, by time.monotonic().
    """
    ranks = [json.loads(path.read_text()) for path in sorted(run_dir.glob("rank-*.json"))]
    found: dict[str, Any] = {
        "seconds_after_death": None,
        "ranks_done": len(ranks),
        "weights_sha256": sorted({rank["weights_sha256"] for rank in ranks}),
        "sets": {},
        "arguments": [],
    }
    died = run_dir / "died.json"
    if died.exists():
        found["seconds_after_death"] = ended - json.loads(died.read_text())
    environs = sorted(run_dir.glob("environ-*.json"))
    if environs:
        last = json.loads(environs[-1].read_text())
        found["sets"] = {name: value for name, value in last.items() if name not in environ}
    if ranks:
        found["arguments"] = ranks[-1].get("arguments", [])
    return found


def kill_marked(mark: str) -> None:
    """Kill the processes that have the value ``mark`` in the environment variable MARK."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the PIDs of the processes that have the value ``mark`` in the environment variable MARK."""
    entry_of_mark = f"{MARK}={mark}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry_of_mark in entry.read_bytes().split(b"\0"):
                pids.append(int(entry.parent.name))
    return pids


def compare(n: int, options: Options) -> None:
    """Run the job by each launcher, to its end and with a killed rank, and write launchers.json.

    Raises:
        NonRetryableError: a job failed, or ended with other weights than by another launcher.
    """
    folder = options.run_dir / "launchers"
    facts = {"torch": version("torch"), "world_size": n}
    result: dict[str, Any] = {"facts": facts, "ways": {}}
    hashes = set()
    for way in options.launchers:
        log.info(f"the small job by {way} on {ranks_of(n)}")
        runs = {}
        for name, dying in (("whole", -1), ("killed", n - 1)):
            run_dir = folder / f"{way}-{name}"
            words = command(way, n, run_dir, steps=options.steps, dying=dying)
            runs[name] = run_job(way, words, run_dir)
        whole = runs["whole"]
        if not is_complete(whole, n):
            raise NonRetryableError(f"the small job by {way} failed: {whole['said']}")
        hashes.update(whole["weights_sha256"])
        result["ways"][way] = runs
    if len(hashes) > 1:
        raise NonRetryableError("the same job ended with different weights under different launchers")
    result["data_parallel"] = compare_data_parallel(n, options, folder / "DataParallel")
    publish(options.run_dir, "launchers", result, tables(result), pictures)


def is_complete(job: dict[str, Any], n: int) -> bool:
    """Return whether a job succeeded and all of its ``n`` ranks ended with the same weights."""
    if job["code"] != 0 or job["ranks_done"] != n:
        return False
    return len(job["weights_sha256"]) == 1


def compare_data_parallel(n: int, options: Options, run_dir: Path) -> dict[str, Any]:
    """Compare DataParallel, and DDP on ``n`` ranks, with the plain step of one process.

    Raises:
        NonRetryableError: the job failed, or gradients or weights differ from the plain step's by more than CLOSE. The
            function compares the weights only if the job has at most CLOSE_STEPS steps.
    """
    log.info(f"DataParallel, and DDP on {ranks_of(n)}, beside the plain step")
    arguments = [f"--run-dir={run_dir}", f"--steps={options.steps}", device_argument(options), "--quiet"]
    words = torchrun(n, str(HERE / "data_parallel.py"), *arguments)
    job = run_job("DataParallel", words, run_dir)
    if job["code"] != 0:
        raise NonRetryableError(f"DataParallel beside DDP failed: {job['said']}")
    result: dict[str, Any] = json.loads((run_dir / "data_parallel.json").read_text())
    checked = ["gradients_difference"]
    if result["steps"] <= CLOSE_STEPS:
        checked.append("weights_difference")
    for each in result["ways"]:
        if not all(each[name] <= CLOSE for name in checked):  # NaN fails this check too
            raise NonRetryableError(f"{each['way']} does not take the plain step: {each}")
    return result


# --- as tables -----------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield all tables of the command."""
    n = result["facts"]["world_size"]
    rows = []
    failures = []
    for way, runs in result["ways"].items():
        rows.append(_whole_row(way, runs["whole"], n))
        failures.append(_killed_row(way, runs["killed"]))
    note = "Variables that a rank found and its launcher did not have, and an argument that its launcher added."
    header = ["launcher", "how", "sets", "the job"]
    yield Table(f"What each launcher does, {ranks_of(n)}", note, header=header, rows=rows)
    note = "Time is from the kill to the launcher's end; lines are those on stderr beside the ranks' own."
    header = ["launcher", "exit code", "after", "left running", "lines", "message of a surviving rank"]
    yield Table("When the last rank is killed halfway", note, header=header, rows=failures)
    if "data_parallel" not in result:  # results of earlier versions lack this key
        return
    yield data_parallel_table(result["data_parallel"])
    if n > 1 and "memory" in result["data_parallel"]:
        yield memory_table(result["data_parallel"]["memory"], n)


def _whole_row(way: str, job: dict[str, Any], n: int) -> list[str]:
    """Return a row with the variables that a launcher set, and the duration of the job without a kill."""
    names = sorted(name for name in job["sets"] if not name.startswith("TORCHELASTIC_"))
    elastic = len(job["sets"]) - len(names)
    if elastic:
        names.append(f"{elastic} TORCHELASTIC_*")
    names += job.get("arguments", [])
    sets = ", ".join(names) or "nothing"
    _, how = WAYS[way]
    return [way, how, sets, f"{job['ranks_done']} of {n} ranks in {duration(job['seconds'])}"]


def _killed_row(way: str, job: dict[str, Any]) -> list[str]:
    """Return a row about a launcher's behavior after a rank was killed."""
    after = ""
    if job["seconds_after_death"]:
        after = duration(job["seconds_after_death"])
    errors = [line.removeprefix("error: ") for line in job["said"] if line.startswith("error: rank ")]
    errors.append("nothing")
    return [way, str(job["code"]), after, str(job["left_running"]), str(job["traceback_lines"]), errors[0]]


def data_parallel_table(result: dict[str, Any]) -> Table:
    """Return the table of differences between each way and the plain step."""
    rows = []
    for each in result["ways"]:
        gradients = _difference(each["gradients_difference"])
        weights = _difference(each["weights_difference"])
        rows.append([each["way"], str(each["processes"]), f"{each['calls_per_step']:g}", gradients, weights])
    notes = ["Without a GPU DataParallel calls the module as it is."]
    if result["devices_of_data_parallel"]:
        notes = [f"DataParallel uses GPUs {result['devices_of_data_parallel']}."]
    notes.append(
        "Differences are the largest from the plain step, in float64: of the first gradients, and of the weights after "
        f"{result['steps']} steps; calls are of the model, in one process and step."
    )
    if result["steps"] > CLOSE_STEPS:
        notes.append(f"Beyond {CLOSE_STEPS} steps rounding has grown: the weights are reported, not checked.")
    header = ["how", "processes", "calls", "gradients", "weights"]
    return Table("DataParallel beside DDP", " ".join(notes), header=header, rows=rows)


def _difference(value: float) -> str:
    if not value:
        return "the same bits"
    return f"{value:.1e}"


def memory_table(memory: dict[str, Any], n: int) -> Table:
    """Return the table of DataParallel's memory on its output device and on each other device."""
    computed = memory["computed"]
    rows = [[what, *map(size, each)] for what, each in computed.items()]
    sums = [sum(each) for each in zip(*computed.values())]
    rows.append(["sum", *map(size, sums)])
    if memory["measured"]:
        rows.append(["measured peak", *map(size, memory["measured"][:2])])
    note = (
        "From torch's source, without activations: DataParallel gathers all outputs on its output device, the first "
        "by default. There it also reduces the gradients, and the optimizer has its state there."
    )
    header = ["what", "output device", "each other device"]
    return Table(f"DataParallel's memory on {n} devices", note, header=header, rows=rows)


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    """Return no pictures, because this command has only tables."""
    return []
