"""Copy a run's metrics to trackers, each step exactly once.

    samestep track RUN_DIR --to tensorboard,mlflow,wandb [--follow]

tensorboard  RUN_DIR/track/tensorboard, an event file
mlflow       MLFLOW_TRACKING_URI, or else RUN_DIR/track/mlflow.db; gets a step
             once a checkpoint has it
wandb        RUN_DIR/track/wandb, an offline run, for `wandb sync`

The command reads metrics.jsonl, and ranks do not wait for it. A launch script
with --track starts the command beside the job. After a failure, a tracker
restarts from the file's beginning. So a kill of the command or the job neither
loses nor duplicates a step.

Without --follow, the command exits when the trackers have all lines of the
file. With --follow, it continues until the run has its result, or until Ctrl-C
or TERM.

Exit codes: 0 done, 1 a tracker is incomplete, 2 a mistake in the call.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from samestep import ConfigError, checkpoint
from samestep.options import Options
from samestep.root import Root, try_lock
from samestep.untrusted import shown

from samestep_observe import run_reader
from samestep_observe.command import new_parser, run_command
from samestep_observe.run_reader import FileTail
from samestep_observe.tracker import Line, MetricsBatch, Tracker


class TrackerClass(NamedTuple):
    """The module and name of a tracker's class, which `create` imports, and the modules that the class needs."""

    module: str
    name: str
    needs: tuple[str, ...]

    def create(self, run_dir: Path) -> Tracker:
        """Return a new tracker of a run."""
        tracker: Tracker = getattr(importlib.import_module(self.module), self.name)(run_dir)
        return tracker


TRACKERS = {
    "tensorboard": TrackerClass("samestep_observe.track_tensorboard", "TensorBoard", needs=("tensorboard",)),
    "mlflow": TrackerClass("samestep_observe.track_mlflow", "MLflow", needs=("mlflow", "sqlalchemy", "alembic")),
    "wandb": TrackerClass("samestep_observe.track_wandb", "Wandb", needs=("wandb",)),
}
POLL_SECONDS = 1.0
MAX_RETRY_SECONDS = 15.0  # maximum time in seconds between two attempts while a tracker fails
FINISH_SECONDS = 30.0  # default time limit in seconds from the end of the job to the end of this process
CHUNK_BYTES = 2**22  # maximum number of bytes of metrics.jsonl in one batch
# Variables that limit MLflow's requests and log, and disable usage and error reports of the packages.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
}


class BatchReader:
    """A reader of a growing ``metrics.jsonl``. If a resume replaces the file, reading restarts at line 1."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tail = FileTail(run_dir / "metrics.jsonl", CHUNK_BYTES, keep_open=True)
        self._reset()

    def _reset(self) -> None:
        self._is_new_file = True
        self.last_step = 0
        self._header: dict[str, Any] | None = None
        self._key = ""
        self._time = 0.0  # time of the last line, in seconds since 1970
        self._samples = 0  # samples_seen of the last line

    def read(self) -> MetricsBatch:
        """Return the new lines of the next CHUNK_BYTES bytes; a batch without lines if the file is missing.

        Raises:
            OSError: the file cannot be read.
        """
        committed = committed_step(self._run_dir)  # read first, so that the lines are not older than the checkpoint
        self._is_new_file = False
        lines = []
        for text in self._tail.new_lines(self._reset, blocks=1):
            line = self._parse(text)
            if line:
                lines.append(line)
        if self._tail.problem not in ("", "empty", "missing"):  # --no-resume archives the file
            raise OSError(f"{self._tail.path}: {self._tail.problem}")
        if lines:
            self.last_step = lines[-1].step
        return MetricsBatch(
            is_new_file=self._is_new_file,
            header=self._header or {},
            key=self._key,
            lines=lines,
            has_more=not self._tail.at_end,
            committed_step=committed,
        )

    def _parse(self, text: bytes) -> Line | None:
        """Return the line of a step; None for a header, and for an incomplete or damaged line."""
        values = run_reader.parse(text)
        if self._header is None:
            self._header = values or {}
            self._key = hashlib.sha256(text).hexdigest()[:16]
        if values is None:
            return None
        if isinstance(values.get("step"), int):
            return self._parse_step(values)
        header = values.get("resumed", values)
        seconds = run_reader.start_seconds(header) if isinstance(header, dict) else None
        if seconds is not None:  # without a valid time, the last time stays
            self._time = seconds
        return None

    def _parse_step(self, values: dict[str, Any]) -> Line:
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        step = numbers.pop("step")
        samples = numbers.get("samples_seen", 0)
        rate = numbers.get("samples_per_second", 0)
        if rate > 0:
            self._time += (samples - self._samples) / rate
        self._samples = samples
        return Line(step, self._time, numbers)


def committed_step(run_dir: Path) -> int:
    """Return the last step that no resume repeats: the larger of the newest checkpoint's and the result's step."""
    step = int(_result(run_dir).get("steps", 0))
    for newest in itertools.islice(checkpoint.folders(run_dir), 1):
        step = max(step, int(newest.name.removeprefix("step-")))
    return step


def _result(run_dir: Path) -> dict[str, Any]:
    result, _ = run_reader.read_object(run_dir / "result.json")
    if not isinstance(result.get("steps"), int):
        return {}
    return result


class TrackerThread(threading.Thread):
    """A thread that updates one tracker until the event ``ended`` is set, and then once more.

    Attributes:
        problem: the error of the last attempt; None if this attempt succeeded.
        done: whether the thread has ended without a problem.
    """

    def __init__(self, name: str, run_dir: Path, ended: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._run_dir = run_dir
        self._ended = ended
        self._tracker: Tracker | None = None
        self._reader = BatchReader(run_dir)
        self.problem: str | None = "it has not started"
        self.done = False

    def run(self) -> None:
        """Update the tracker until ``ended`` is set, and then once more. Retry after each error."""
        wait = POLL_SECONDS
        while True:
            is_last = self._ended.is_set()
            try:
                self._copy(is_last)
                self.problem = None
                wait = POLL_SECONDS
            except Exception as error:  # an error of a server, disk or package must not affect training
                self._report(error)
                self._tracker = None
                wait = min(2 * wait, MAX_RETRY_SECONDS)
            if is_last:
                self.done = self.problem is None
                return
            self._ended.wait(wait)

    def _copy(self, is_last: bool) -> None:
        """Copy the new lines to the tracker, or all lines to a new tracker."""
        if self._tracker is None:
            self._tracker = TRACKERS[self.name].create(self._run_dir)
            self._reader = BatchReader(self._run_dir)
        has_more = True
        while has_more:
            batch = self._reader.read()
            self._tracker.add(batch)
            has_more = batch.has_more
        if is_last:
            result = _result(self._run_dir)
            was_resumed = result.get("steps") != self._reader.last_step
            self._tracker.finish(None if was_resumed else result)

    def _report(self, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if len(text) > 300:
            text = f"{text[:300]}..."
        if self.problem != text:
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} warning: {self.name}: {text}", file=sys.stderr, flush=True)
        self.problem = text


# --- the program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run ``samestep track``. Return the exit code after a mistake in the call; otherwise exit this process."""
    parser = new_parser("track", __doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder that holds metrics.jsonl")
    parser.add_argument("--to", required=True, metavar="NAMES", help=f"some of {','.join(TRACKERS)}")
    parser.add_argument("--follow", action="store_true", help="continue while the run does")
    # The launch script holds the pipe to stdin, so stdin ends when the launch script closes the pipe or is killed.
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    return run_command(parser, arguments, _run)


def _run(options: Options) -> None:
    names = names_of(options.to)
    _check_installed(names)
    run_dir = options.run_dir.resolve()
    follows = options.follow or options.until_stdin_ends
    is_run = run_dir.is_dir() if follows else (run_dir / "metrics.jsonl").exists()
    if not is_run:
        raise ConfigError(f"{options.run_dir} holds no metrics.jsonl: name the run dir of a run that trains")
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(10, priority))
    ended = threading.Event()
    _end_at_signals(ended)
    if options.until_stdin_ends:
        threading.Thread(target=_until_stdin_ends, args=(ended,), daemon=True).start()
    elif not follows:
        ended.set()
    with _lock(run_dir, ended if follows else None):
        _track(run_dir, names, ended, options)


def names_of(text: str) -> list[str]:
    """Return the trackers of a comma-separated text, without duplicates.

    Raises:
        ConfigError: a tracker is unknown.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}: name some of {','.join(TRACKERS)}, with commas")
    return list(dict.fromkeys(names))


def _check_installed(names: Sequence[str]) -> None:
    missing = []
    for name in names:
        missing += [module for module in TRACKERS[name].needs if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(f"{sys.executable} lacks {' and '.join(missing)}: install them there, or use another Python")


@contextlib.contextmanager
def _lock(run_dir: Path, ended: threading.Event | None) -> Iterator[None]:
    """Hold a lock that prevents other processes from copying the same steps.

    If another process holds the lock, wait for the lock until the run has ended, and at least FINISH_SECONDS + 5 s.

    Args:
        run_dir: the run's folder.
        ended: event that is set when the run has ended; None if the run has ended already.

    Raises:
        ConfigError: the other process still holds the lock, or the run dir cannot be written.
    """
    try:
        Root(run_dir).make_folder("track")
        file = Root(run_dir).open("track/.lock", os.O_WRONLY)
    except OSError as error:
        raise ConfigError(f"cannot write to {run_dir / 'track'}: {error.strerror}: make it a writable folder") from None
    deadline = time.monotonic() + FINISH_SECONDS + 5
    with os.fdopen(file, "wb"):
        while try_lock(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB) is False:
            run_has_ended = ended is None or ended.is_set()
            if run_has_ended and time.monotonic() > deadline:
                raise ConfigError(f"another process gives {run_dir} to trackers: wait for it, or end it")
            time.sleep(0.2)
        yield


def _track(run_dir: Path, names: Sequence[str], ended: threading.Event, options: Options) -> NoReturn:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    threads = [TrackerThread(name, run_dir, ended) for name in names]
    for thread in threads:
        thread.start()
    while not ended.wait(POLL_SECONDS):
        if options.follow and _has_ended(run_dir):
            ended.set()
    limit = math.inf  # without a job, the copy has no time limit
    if options.until_stdin_ends:
        limit = float(os.environ.get("SAMESTEP_TRACK_SECONDS") or FINISH_SECONDS)
    _join(threads, limit)
    reasons = {}
    for thread in threads:
        if not thread.done:
            reasons[thread.name] = thread.problem or f"it needs more than {limit:g} s"
    with contextlib.suppress(OSError):  # the launch script may be gone
        _print_reasons(reasons, options.until_stdin_ends)
    os._exit(1 if reasons else 0)  # a thread may still wait for a server


def _print_reasons(reasons: Mapping[str, str], for_launch_script: bool) -> None:
    for name, reason in reasons.items():
        if for_launch_script:  # the launch script prints the rest of the line
            print(f"{name}: {reason}")
        else:
            print(f"error: {name} is incomplete: {shown(reason, limit=500)}", file=sys.stderr)
    sys.stdout.flush()


def _join(threads: Sequence[threading.Thread], limit: float) -> None:
    """Wait until all threads have ended, for at most ``limit`` seconds."""
    if limit == math.inf:
        for thread in threads:
            thread.join()
        return
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _end_at_signals(ended: threading.Event) -> None:
    """Install handlers of INT and TERM that set ``ended``, or exit this process if ``ended`` is set already."""

    def end(number: int, frame: object) -> None:
        if ended.is_set():
            os._exit(128 + number)
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _until_stdin_ends(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _has_ended(run_dir: Path) -> bool:
    """Return whether the run has a result that is at least as new as metrics.jsonl."""
    try:
        result = (run_dir / "result.json").stat()
        metrics = (run_dir / "metrics.jsonl").stat()
    except OSError:
        return False
    return result.st_mtime >= metrics.st_mtime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
