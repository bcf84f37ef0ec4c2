"""Run an app as its users do: by its launch script, in real processes, under a time limit."""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from processes import environments, free_port, marked
from samestep import checkpoint, env

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds for one run
FAULTS = Path(__file__).parent / "faults"  # every Python that a test starts loads the sitecustomize.py in this folder


@dataclass(frozen=True)
class App:
    """Settings of the common tests for one app. The common tests run for each app with an app_spec.py."""

    dataset: str  # the embedded dataset
    test_examples: int
    # Options of a run of at least two epochs and a few seconds. They include --log-every=1, and a --checkpoint-every
    # that saves twice in each epoch, besides the checkpoint at its end.
    small: Sequence[str]
    exact: Sequence[str]  # Options under which losses at all world sizes agree within ``tolerance``.
    variants: Sequence[Sequence[str]]  # Lists of options to add to ``exact``: models and optimizers.
    batch_option: str = "--global-batch-size"  # The option that sets the size of a global batch.
    train_examples: int | None = None  # Number of training examples; None if no test checks it.
    metric: str = "test_loss"  # Name of the value in the result that measures the quality.
    direction: str = "min"  # "max" if a higher value of ``metric`` is better, "min" if a lower value is.
    metric_limit: float | None = None  # The worst ``metric`` that the defaults may reach, or None.
    prepare: Sequence[Sequence[str]] = ()  # Programs with arguments; Python runs each before the tests.
    loss_factor: float = 1.0  # For the app's own tests: an upper bound of lowest loss / first loss.
    tolerance: float = 1e-9
    resume_invariants: Sequence[str] = ()  # Options that change a small run. A resume must refuse each of them.
    virtual_ranks: int | None = 3  # The most ranks with --virtual-ranks in a soak; None if the app refuses the option.
    defaults: Sequence[str] = ()  # Options that limit a run with the defaults to a few minutes.
    evaluates_first: bool = False  # Whether a new run logs an evaluation before its first step.
    parts: tuple[int, int] = (32, 3)  # Numbers of batches in the training set, for `Shape.odd_batch`.
    exact_steps: Sequence[int] = (100, 6)  # Numbers of steps of the first variant, and of the others.
    first_steps: Sequence[str] = ()  # Options under which the first losses are the same at any world size.
    first_tolerance: float = 1e-5  # The largest relative difference of the first losses, by rounding in float32.
    diverges: Sequence[str] = ("--lr=1e30",)  # Options under which the loss soon becomes NaN or infinite.
    patience: int = 20  # A --timeout, in seconds, that only a hung rank exceeds.
    delay: int = 60  # The sleep of a slow rank, in ms: much longer than a step of few samples.
    slow_phases: Sequence[str] = ("input", "computing", "optimizer")  # The phases that the app times on each rank.
    kills: int = 20  # The number of kills of each kind at random steps in a soak.
    replayed_steps: int = 3  # The number of random steps that a soak replays.
    launcher: str = "torchrun"  # The launcher that the app's launch script starts.
    refused_machines: str | None = None  # Words of the error that rejects NNODES=2; None if the app accepts it.
    preload: Sequence[str] = ("torch",)  # Modules with a slow import; see rank_server.py.
    compared: bool = True  # Whether all ranks hold the same weights and compare them.
    # Marks of tests that pytest skips for this app, except with --soak or --every-case. ``core_only``: core alone
    # decides the result, and another app runs the test. ``slow``: a start is slow. All others: another app, or a
    # test of this app's own, covers the case.
    skipped_marks: Sequence[str] = ()
    name: str = ""

    @property
    def batch_field(self) -> str:
        """The attribute of the parsed options that `batch_option` sets."""
        return self.batch_option.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Shape:
    """The sizes that decide when a run saves and ends an epoch."""

    examples: int  # examples in the training set, or tokens if batches are counted in tokens
    batch: int  # global batch size, in examples or tokens
    every: int  # steps between checkpoints

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Shape:
        """Return the `Shape` of the run that has this result."""
        header = json.loads((Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()[0])
        every = header["options"]["checkpoint_every"]
        if "step_tokens" in result:  # batches are counted in tokens
            return cls(result["train_tokens"], result["step_tokens"], every)
        return cls(result["train_examples"], result["global_batch_size"], every)

    @property
    def epoch(self) -> int:
        """Return the number of steps in an epoch."""
        return -(-self.examples // self.batch)

    def odd_batch(self, parts: int) -> int:
        """Return a global batch size near examples / ``parts`` that neither 2 nor 3 divides."""
        return next(size for size in range(self.examples // parts, 0, -1) if size % 2 and size % 3)


def options_of(app: str) -> Any:
    """Return the app's options.py as a module."""
    return _module(ROOT / "apps" / app / "options.py")


def app_spec(name: str) -> App:
    """Return ``SPEC`` of ``tests/<name>/app_spec.py``, with ``name`` as the app's name."""
    found: App = replace(_module(ROOT / "tests" / name / "app_spec.py").SPEC, name=name)
    return found


def _module(path: Path) -> Any:
    """Import the file ``path`` under a unique module name, because apps share file names. Return the module."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses looks up a class's module in sys.modules
    spec.loader.exec_module(found)
    return found


APPS = sorted(path.parent.name for path in ROOT.glob("tests/*/app_spec.py"))


@dataclass
class Outcome:
    """The end of a run: exit code, console output and duration in seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def result(self) -> dict[str, Any]:
        last = self.stdout.rstrip("\n").rpartition("\n")[2]
        assert last.startswith("RESULT {"), f"no RESULT line at the end of {self.stdout!r}; stderr: {self.stderr}"
        found: dict[str, Any] = json.loads(last.removeprefix("RESULT "))
        return found

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


@dataclass
class Job:
    """A running job."""

    process: subprocess.Popen[str]
    run_dir: Path
    begun: float = field(default_factory=time.monotonic)

    def finish(self, limit: float = LIMIT) -> Outcome:
        try:
            stdout, stderr = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, stderr = self.process.communicate()
            raise AssertionError(f"not finished after {limit} s; stdout: {stdout}; stderr: {stderr}") from None
        return Outcome(self.process.returncode, stdout, stderr, time.monotonic() - self.begun)

    def alive(self, rank: int) -> dict[str, Any]:
        """Return the content of the rank's heartbeat file, or {} if the file is missing or damaged."""
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.run_dir / "log" / f"alive-{rank}").read_text())
            return found
        return {}

    def wait_for(self, condition: Callable[[], Any], limit: float = 120) -> Any:
        """Poll until ``condition`` returns a true value, and return it. Fail at the limit, or if the job ends."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"the job ended early: {self.process.communicate()}"
            time.sleep(0.02)
        raise AssertionError("waited in vain")

    def wait_for_step(self, step: int) -> int:
        """Wait until metrics.jsonl has a step of at least ``step``, and return the last step."""
        return int(self.wait_for(lambda: (found := last_step(self.run_dir)) >= step and found))

    def ranks(self) -> dict[int, int]:
        """Return ``{rank: process id}`` of the job. A rank's children have the same environment, but are left out."""
        found: dict[int, int] = {}
        for pid, environ in environments().items():
            if f'"launcher":"{self.process.pid}@' not in environ.get("SAMESTEP_JOB_INFO", ""):
                continue
            try:
                world = env.detect(environ)
            except env.EnvError:  # a launcher of several machines has NNODES, and no rank
                continue
            is_rank = world.launcher != "none" and world.role == "worker"  # omit launchers and schedulers
            if is_rank and (world.rank not in found or pid == self.alive(world.rank).get("pid")):
                found[world.rank] = pid
        return found


@functools.cache
def rank_server(modules: Sequence[str]) -> subprocess.Popen[str]:
    """Return the process of rank_server.py with these imported modules. The first call starts the process."""
    command = [sys.executable, str(Path(__file__).parent / "rank_server.py"), *modules]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Harness:
    def __init__(self, app: App, device: str, folder: Path, start_method: str | None = None) -> None:
        self.app = app
        self._start_words = [f"--start-method={start_method}"] if start_method else []
        self.device = device
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._jobs: list[Job] = []

    def environ(self, **more: str) -> dict[str, str]:
        """Return the environment of a run: this Python, the test's mark, and no rank variables of the caller."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not re.match(r"(SAMESTEP_|PET_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|NNODES$|NODE_RANK$|NPROC_)", name)
        }
        kept |= {"PYTHON": sys.executable, "PYTHONPATH": python_path(FAULTS), "SAMESTEP_TEST": self.mark}
        # Each rank has one thread: on a busy machine, several threads spend most of the time waiting for each other.
        return {**kept, "OMP_NUM_THREADS": "1", **more}

    def start(self, n: int | str, *options: str, run_dir: Path | None = None, **environ: str) -> Job:
        """Start ``scripts/run_<app>.sh n options`` in a new session."""
        run_dir = run_dir or self.folder / "run"
        script = str(ROOT / "scripts" / f"run_{self.app.name}.sh")
        common = [f"--run-dir={run_dir}", f"--device={self.device}", *self._start_words]
        command = ["bash", script, str(n), *common, *options]
        return self.start_command(command, run_dir, **environ)

    def start_command(self, command: Sequence[str], run_dir: Path, cwd: Path | None = None, /, **environ: str) -> Job:
        process = subprocess.Popen(
            command,
            cwd=cwd or self.folder,
            env=self.environ(**environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A test run in the background ignores SIGINT, and its child processes would inherit this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        job = Job(process, run_dir)
        self._jobs.append(job)
        return job

    def run(self, n: int | str, *options: str, run_dir: Path | None = None, **environ: str) -> Outcome:
        return self.start(n, *options, run_dir=run_dir, **environ).finish()

    def train(self, n: int, *options: str, run_dir: Path | None = None, **environ: str) -> dict[str, Any]:
        """Run the app to its end, check the run with `checked`, and return its result.

        If the app uses torchrun, the ranks start without it, because torchrun starts as slowly as a rank.
        """
        if self.app.launcher == "torchrun":
            return self.checked(self._run_ranks(n, *options, run_dir=run_dir, **environ), n)
        return self.checked(self.run(n, *options, run_dir=run_dir, **environ), n)

    def _run_ranks(self, n: int, *options: str, run_dir: Path | None, **environ: str) -> Outcome:
        """Run ``n`` ranks without a launcher. Return the outcome of the first failed rank, or else of rank 0."""
        program = str(ROOT / "apps" / self.app.name / "train.py")
        place = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks = list[dict[str, Any]]()
        begun = time.monotonic()
        for rank in range(n):
            own = dict(environ)
            if n > 1:
                own |= {**place, "RANK": str(rank)}
            files = {name: str(self.folder / f"{uuid.uuid4().hex}.{name}") for name in ("stdout", "stderr")}
            ranks.append({"environ": self.environ(**own), **files})
        arguments = [f"--run-dir={run_dir or self.folder / 'run'}", f"--device={self.device}", *options]
        job = {"program": program, "arguments": arguments, "cwd": str(self.folder), "limit": LIMIT, "ranks": ranks}
        server = rank_server(self.app.preload)
        assert server.stdin
        assert server.stdout
        server.stdin.write(f"{json.dumps(job)}\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        ended = [
            Outcome(code, Path(rank["stdout"]).read_text(), Path(rank["stderr"]).read_text(), time.monotonic() - begun)
            for code, rank in zip(codes, ranks)
        ]
        return next((each for each in ended if each.code), ended[0])

    def checked(self, outcome: Outcome, n: int) -> dict[str, Any]:
        """Return the result of a finished run, after comparing it with the files in its run dir."""
        assert outcome.code == 0, outcome
        result = outcome.result
        run_dir = Path(result["run_dir"])
        assert result["world_size"] == n
        assert result["test_examples"] == self.app.test_examples
        assert self.app.train_examples in (None, result["train_examples"])
        assert result == json.loads((run_dir / "result.json").read_text())
        assert result["weights_sha256"] == checkpoint.weights_sha256(
            checkpoint.load_weights(run_dir / "model.safetensors")
        )
        assert "Traceback" not in outcome.stderr
        return result

    def check_nothing_left(self) -> None:
        for job in self._jobs:
            if job.process.poll() is None:
                job.process.kill()
                job.process.communicate()
        # A rank ends within 5 s after its launcher was killed.
        deadline = time.monotonic() + 10
        while left := self.left_running():
            if time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"left running: {left}")
            time.sleep(0.1)

    def kill_all(self) -> None:
        """Kill every process of this test at once, as a machine failure does."""
        for pid in self.left_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left_running(self) -> dict[int, str]:
        """Return the commands of this test's processes by process id, including processes with a new parent."""
        commands = {}
        for pid in marked("SAMESTEP_TEST", self.mark):
            with contextlib.suppress(OSError):  # the process may end meanwhile
                commands[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return commands


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that have a step. Lines that are not JSON, such as a torn one, are left out."""
    lines = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if "step" in values:
                    lines.append(values)
    return lines


def last_step(run_dir: Path) -> int:
    lines = metrics(run_dir)
    if lines:
        return int(lines[-1]["step"])
    return 0


def losses(run_dir: Path) -> list[float]:
    """Return the losses of all steps. Fail unless metrics.jsonl has each step once, in order (with --log-every=1)."""
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step lines of metrics.jsonl without durations and speeds."""
    return [{name: value for name, value in line.items() if "second" not in name} for line in metrics(run_dir)]


def evaluation(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a result whose names begin with ``test_``: the evaluation at the end of the run."""
    return {name: value for name, value in result.items() if name.startswith("test_")}


def relative_difference(one: Sequence[float], other: Sequence[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) / max(abs(a), 1e-300) for a, b in zip(one, other))


# --- for the tests of one app --------------------------------------------------------------------------------------


def bare(harness: Harness, command: Sequence[str], **environ: str) -> Outcome:
    """Run a command instead of the launch script for at most 120 s, and return its outcome."""
    return harness.start_command(command, harness.folder / "run", **environ).finish(limit=120)


def faulty(fault: Mapping[str, Any]) -> dict[str, Any]:
    """Return environment variables that inject ``fault`` into the ranks (see faults/sitecustomize.py)."""
    return {"SAMESTEP_FAULT": json.dumps(fault)}


def python_path(folder: Path) -> str:
    """Return the value of PYTHONPATH with ``folder`` in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def told_by(app: str, program: str, given: Any = None) -> Any:
    """Run a program that imports the app's files, and return its last line of output, parsed as JSON.

    The program runs in a new process, because apps share file names. ``sys.argv[1]`` is ``given`` as JSON.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": python_path(ROOT / "apps" / app), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_fashion(folder: Path) -> None:
    """Write Fashion-MNIST's files in full size: copies of Debian's package if installed, else generated images."""
    folder.mkdir(parents=True)
    installed = Path("/usr/share/datasets/fashion-mnist")
    if installed.is_dir():
        for file in installed.glob("*.gz"):
            shutil.copy(file, folder)
        return
    random = np.random.default_rng(0)
    patterns = random.integers(0, 256, (10, 28, 28))
    for split, count in (("train", 60_000), ("t10k", 10_000)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = (patterns[labels] + random.integers(0, 128, (count, 1, 1))) // 2
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", images.astype(np.uint8))
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", labels)


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes(), compresslevel=1, mtime=0))
