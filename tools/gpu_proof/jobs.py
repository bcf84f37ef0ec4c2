"""Run the apps' launch scripts in parallel, with faults and time limits, and report the reasons for failures."""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
FORKED = (
    "mnist_ddp",
    "cifar_ddp",
    "gpt_fsdp",
    "llm_finetune",
    "mnist_lightning",
    "mnist_elastic",
)  # apps whose ranks are forked by default
FAULTS = Path(__file__).resolve().parent / "faults"  # folder of the faults' sitecustomize.py
ERROR = re.compile(r"(\S+ )?(error: |(\[rank\d+\]: ?)?[\w.]+(Error|Exception): )|.* NCCL WARN ")
END_SECONDS = 10.0  # time for a launch script to end its processes after a second signal, in seconds
MAX_REASON = 1500  # characters
MAX_LOG = 2**18  # maximum size of the copied end of a log, in bytes
Value = TypeVar("Value")
Fault = Mapping[str, Any]


class NotRunError(Exception):
    """A row cannot run. The message is the reason."""


class Slots:
    """Limit the number of ranks of all jobs that run in parallel."""

    def __init__(self, count: int) -> None:
        self._count = self._free = max(1, count)
        self._waiting: list[tuple[int, int]] = []  # (priority, ticket) of each waiting job
        self._tickets = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, wanted: int, priority: int) -> Iterator[None]:
        """Hold ``wanted`` slots. Wait until they are free, and until no job with a lower ``priority`` number waits."""
        wanted = min(wanted, self._count)
        with self._changed:
            self._tickets += 1
            own = (priority, self._tickets)
            heapq.heappush(self._waiting, own)
            self._changed.wait_for(lambda: self._waiting[0] == own and self._free >= wanted)
            heapq.heappop(self._waiting)
            self._free -= wanted
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


@dataclass
class Proof:
    """The settings of a proof, and the results that its rows share.

    Attributes:
        folder: temporary folder for the runs and the compiler's cache.
        device: "cuda" or "cpu".
        quick: whether the rows take fewer steps.
        mnist: a folder of MNIST's files, or None.
        logs: folder for the logs of failed jobs, or None.
        job_limit: time limit of one job, including its restarts, in seconds.
        deadline: end of all jobs, on the clock `time.monotonic`.
        slots: limit of the ranks that run in parallel.
    """

    folder: Path
    device: str
    quick: bool
    mnist: Path | None
    logs: Path | None
    job_limit: float
    deadline: float
    slots: Slots
    _numbers: int = 0
    _shared: dict[Any, Future[Any]] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def new_folder(self) -> Path:
        """Return the path of a folder that does not exist yet."""
        with self._lock:
            self._numbers += 1
            return self.folder / f"run-{self._numbers}"

    def once(self, key: Any, call: Callable[[], Value]) -> Value:
        """Return the result of ``call``, which runs only for the first caller with this key."""
        with self._lock:
            is_first = key not in self._shared
            future: Future[Value] = self._shared.setdefault(key, Future())
        if is_first:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        return future.result()


@dataclass
class Row:
    """A running row, with its time limits and the functions that start its jobs."""

    proof: Proof
    name: str
    priority: int = 0
    patience: float = 1.0  # factor of a job's time limit
    begun: float | None = None  # start of the first job, on the clock `time.monotonic`

    def begin_job(self) -> float:
        """Return the deadline of a job that begins now.

        Raises:
            NotRunError: the proof's time is over before the row's first job.
            TimeoutError: the proof's time is over before a later job.
        """
        now = time.monotonic()
        if now >= self.proof.deadline and self.begun is None:
            raise NotRunError("the proof's time was over")
        if now >= self.proof.deadline:
            raise TimeoutError("the proof's time is over")
        self.begun = self.begun or now
        return min(now + self.patience * self.proof.job_limit, self.proof.deadline)

    def left(self, deadline: float) -> float:
        """Return the seconds until a job's ``deadline``, or until an earlier deadline of the proof."""
        return min(deadline, self.proof.deadline) - time.monotonic()

    def communicate(self, process: subprocess.Popen[str], deadline: float) -> tuple[str, str]:
        """Wait until a process ends, and return its stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: the process still runs at the deadline.
        """
        while True:
            left = self.left(deadline)
            try:
                return process.communicate(timeout=max(0.0, min(1.0, left)))
            except subprocess.TimeoutExpired:
                if left <= 0:
                    raise

    def need(self, seconds: float) -> None:
        """Raise NotRunError if fewer than ``seconds`` are left until the proof's deadline."""
        left = self.proof.deadline - time.monotonic()
        if left < seconds:
            raise NotRunError(f"{max(0.0, left):.0f} s were left, and it needs about {seconds:.0f} s")

    def late(self, text: str) -> Exception:
        """Return the error for a late job: NotRunError after the proof's deadline, otherwise TimeoutError."""
        if time.monotonic() >= self.proof.deadline:
            return NotRunError(f"the proof's time was over: {text}")
        return TimeoutError(text)

    def together(self, calls: Sequence[Callable[[], Value]]) -> list[Value]:
        """Run ``calls`` in parallel, and return their results in the same order."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]

    @contextlib.contextmanager
    def start(
        self,
        app: str,
        ranks: int,
        options: Sequence[str],
        run_dir: Path | None = None,
        faults: Sequence[Fault] = (),
        share: bool = True,
        device: str = "",
    ) -> Iterator[Job]:
        """Start an app's launch script, and yield the job. When the context ends, end the script and all its processes.

        Args:
            app: name of the app, such as mnist_ddp.
            ranks: number of ranks.
            options: further options of the app.
            run_dir: run directory; by default a new folder.
            faults: faults of faults/sitecustomize.py, by default with ``start`` 0 and a new file as ``path``.
            share: whether the ranks share the GPU by --share-gpu.
            device: "cpu" or "cuda"; by default the proof's device.
        """
        run_dir = run_dir or self.proof.new_folder()
        device = device or self.proof.device
        given = [{"start": 0, "path": f"{run_dir}-fault-{i}", **fault} for i, fault in enumerate(faults)]
        words = ["bash", str(ROOT / "scripts" / f"run_{app}.sh"), str(ranks), *options]
        words += [f"--run-dir={run_dir}", f"--device={device}"]
        words += ["--share-gpu"] if device == "cuda" and share else []
        if app in FORKED:  # a forked rank does not import faults/sitecustomize.py
            words.append("--start-method=exec")
        with self.proof.slots.take(ranks, self.priority):
            deadline = self.begin_job()
            job = Job(self, run_dir, start_process(words, self.proof.folder, device, given), given, deadline)
            try:
                yield job
            except BaseException:
                job.keep_logs()
                raise
            finally:
                job.end()

    def run(self, app: str, ranks: int, options: Sequence[str], code: int = 0, **others: Any) -> Path:
        """Run a launch script to its end, and return the run directory. ``others`` are further arguments of `start`."""
        with self.start(app, ranks, options, **others) as job:
            job.wait(code)
            return job.run_dir

    def result(self, app: str, ranks: int, options: Sequence[str], **others: Any) -> dict[str, Any]:
        """Run a launch script to its end, and return the content of the run's result.json."""
        return result(self.run(app, ranks, options, **others))

    def undisturbed(self, app: str, ranks: int, options: Sequence[str], **others: Any) -> Path:
        """Return the run directory of an undisturbed run. Rows that need the same run share it."""
        key = app, ranks, tuple(options), tuple(sorted(others.items()))
        return self.proof.once(key, lambda: self.run(app, ranks, options, **others))


@dataclass
class Job:
    """A running launch script."""

    row: Row
    run_dir: Path
    process: subprocess.Popen[str]
    faults: Sequence[Mapping[str, Any]]
    deadline: float
    _errors: str = ""

    def path(self, fault: int = 0) -> Path:
        """Return the path of the file that a fault writes when the fault happens."""
        return Path(self.faults[fault]["path"])

    def wait_for(self, what: str, until: Callable[[], Value]) -> Value:
        """Poll ``until`` until it returns a true value, and return this value.

        Raises:
            RuntimeError: the job ended first. ``what`` describes the awaited event in the message.
            TimeoutError, NotRunError: the job's time or the proof's time is over.
        """
        while True:
            found = until()
            if found:
                return found
            if self.process.poll() is not None:
                self._errors = self.process.communicate()[1]
                raise RuntimeError(f"{what} was not seen: the script ended with {self.reason()}")
            if self.row.left(self.deadline) <= 0:
                raise self.row.late(f"{what} was not seen in time: {self.reason()}")
            time.sleep(0.02)

    def wait(self, code: int) -> str:
        """Wait for the script's end, and return its stderr.

        Raises:
            RuntimeError: the exit code is not ``code``.
            TimeoutError, NotRunError: the script did not end in time.
        """
        try:
            _, self._errors = self.row.communicate(self.process, self.deadline)
        except subprocess.TimeoutExpired:
            raise self.row.late(f"the script did not end in time: {self.reason()}") from None
        if self.process.returncode != code:
            raise RuntimeError(f"exit code {self.process.returncode}, not {code}: {self.reason()}")
        return self._errors

    def pids(self) -> dict[int, int]:
        """Return each rank's PID from its heartbeat file, by rank."""
        found = {}
        for path in (self.run_dir / "log").glob("alive-*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                found[int(path.name.partition("-")[2])] = int(json.loads(path.read_text())["pid"])
        return found

    def reason(self) -> str:
        """Return the last errors of the script and of each rank as the reason for a row's failure."""
        parts = [f"script: {line}" for line in last_errors(self._errors, 2)]
        for path in sorted((self.run_dir / "log").glob("*.log")):
            with contextlib.suppress(OSError):
                parts += [f"{path.stem}: {line[:300]}" for line in last_errors(path.read_text(errors="replace"), 1)]
        return " | ".join(parts)[:MAX_REASON]

    def keep_logs(self) -> None:
        """Copy the ends of the logs to the proof's folder of logs, if the proof has such a folder."""
        if not self.row.proof.logs:
            return
        folder = self.row.proof.logs / re.sub(r"\W+", "-", self.row.name) / self.run_dir.name
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "stderr.log").write_text(self._errors)
            for path in [*(self.run_dir / "log").iterdir(), self.run_dir / "metrics.jsonl"]:
                if path.is_file():
                    (folder / path.name).write_bytes(path.read_bytes()[-MAX_LOG:])

    def end(self) -> None:
        """End the script and all its processes."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):  # the second signal ends the ranks at once
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.communicate(timeout=2.0 if number == signal.SIGTERM else END_SECONDS)


def start_process(
    words: Sequence[str],
    folder: Path,
    device: str,
    faults: Sequence[Fault] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str]:
    """Start a program with the environment variables of jobs, and return its process.

    By default, the variables select this interpreter, one thread, and the caller's PYTHONPATH.

    Args:
        words: words of the command line.
        folder: working directory of the program, which also contains the compiler's cache.
        device: "cpu" or "cuda".
        faults: faults of faults/sitecustomize.py.
        variables: environment variables to add or replace.
    """
    path = [str(FAULTS)] if faults else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(path)}
    environ |= {"GPU_PROOF_FAULTS": json.dumps(list(faults)), **variables}
    # All jobs share one compiler cache. By default, the cache is in TMPDIR, and the launch script creates a TMPDIR for
    # each job.
    environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    if device != "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environ, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def last_errors(text: str, count: int) -> list[str]:
    """Return the last ``count`` lines of ``text`` that match ERROR. If no line matches, return its last lines."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return ([line for line in lines if ERROR.match(line)] or lines)[-count:]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the values of each complete line of a run's metrics.jsonl that has a step."""
    lines = []
    with contextlib.suppress(FileNotFoundError, ValueError):
        for text in (run_dir / "metrics.jsonl").read_text().splitlines():
            lines.append(json.loads(text))
    return [line for line in lines if "step" in line]


def losses(run_dir: Path) -> list[float]:
    """Return the logged losses of a run, in the order of the steps."""
    return [line["loss"] for line in metrics(run_dir)]


def result(run_dir: Path) -> dict[str, Any]:
    """Return the content of a finished run's result.json."""
    values: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return values


def resumes(run_dir: Path) -> int:
    """Return how often a run has resumed."""
    return (run_dir / "metrics.jsonl").read_text().count('{"resumed": ')


def copy_run(run_dir: Path, to: Path) -> Path:
    """Copy a run directory without its lock file, and return the path of the copy."""
    shutil.copytree(run_dir, to)
    (to / ".lock").unlink(missing_ok=True)
    return to


def check_equal(what: str, values: Mapping[str, Any]) -> None:
    """Raise RuntimeError if two of ``values`` differ. ``what`` describes the values in the message."""
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{name} {str(value)[:12]}" for name, value in values.items())
        raise RuntimeError(f"{what} differ: {shown}")


def largest_difference(curves: Sequence[Sequence[float]], steps: int) -> float:
    """Return the largest difference between the first curve and another, relative to max(1, the first curve's value).

    Raises:
        RuntimeError: the number of values of a curve is not ``steps``.
    """
    if any(len(curve) != steps for curve in curves):
        raise RuntimeError(f"not {steps} losses, but {[len(curve) for curve in curves]}")
    pairs = [(a, b) for curve in curves[1:] for a, b in zip(curves[0], curve)]
    return max((abs(a - b) / max(1.0, abs(a)) for a, b in pairs), default=0.0)
