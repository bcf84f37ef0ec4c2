"""Copy a run's metrics to trackers, each step exactly once.

    samestep track RUN_DIR --to tensorboard,mlflow,wandb [--follow]

tensorboard  RUN_DIR/track/tensorboard, an event file
mlflow       MLFLOW_TRACKING_URI, or else RUN_DIR/track/mlflow.db; gets a step
             once a checkpoint has it
wandb        RUN_DIR/track/wandb, an offline run, for `wandb sync`

It reads metrics.jsonl, and ranks do not wait for it. A launch script with
--track starts it beside the job. After a failure a tracker restarts from the
file's beginning, so a kill of this process or the job neither loses nor
duplicates a step.

Without --follow it exits when the trackers have all lines of the file. With
--follow it continues until the run has its result, or until Ctrl-C or TERM.

Exit codes: 0 done, 1 a tracker is incomplete, 2 a mistake in the call.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from samestep import ConfigError, checkpoint
from samestep.options import Options
from samestep.root import Root, try_lock
from samestep.untrusted import shown

from samestep_observe import run_reader
from samestep_observe.command import new_parser, run_command
from samestep_observe.run_reader import FileTail
from samestep_observe.tracker import Line, MetricsBatch, Tracker

# Each tracker's module and class, and the modules that it needs.
TRACKERS = {
    "tensorboard": ("samestep_observe.track_tensorboard", "TensorBoard", ("tensorboard",)),
    "mlflow": ("samestep_observe.track_mlflow", "MLflow", ("mlflow", "sqlalchemy", "alembic")),
    "wandb": ("samestep_observe.track_wandb", "Wandb", ("wandb",)),
}
POLL_SECONDS = 1.0
MAX_RETRY_SECONDS = 15.0  # between two tries while a tracker fails
FINISH_SECONDS = 30.0  # from the end of the job to the end of this process, complete or not
CHUNK_BYTES = 2**22  # of metrics.jsonl in one batch
# Keep the packages from waiting for minutes in a request, and from sending usage data to their makers.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
}


class BatchReader:
    """Read ``metrics.jsonl`` in batches as it grows. A resume replaces the file; it is then read from its beginning."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tail = FileTail(run_dir / "metrics.jsonl", CHUNK_BYTES, keep_open=True)
        self._reset()

    def _reset(self) -> None:
        self._is_new_file, self.last_step = True, 0
        self._header: dict[str, Any] | None = None
        self._key, self._time, self._samples = "", 0.0, 0

    def read(self) -> MetricsBatch:
        """Return the new lines; none if the file is missing. Raises OSError."""
        committed = committed_step(self._run_dir)  # first: the file that a later checkpoint is of is then in place
        self._is_new_file = False
        lines = [line for text in self._tail.new_lines(self._reset, blocks=1) if (line := self._parse(text))]
        if self._tail.problem not in ("", "empty", "missing"):  # --no-resume moves it away
            raise OSError(f"{self._tail.path}: {self._tail.problem}")
        self.last_step = lines[-1].step if lines else self.last_step
        return MetricsBatch(self._is_new_file, self._header or {}, self._key, lines, not self._tail.at_end, committed)

    def _parse(self, text: bytes) -> Line | None:
        """Return None for a header, and for an incomplete line of a killed process or a damaged disk."""
        values = run_reader.parse(text)
        if self._header is None:
            self._header, self._key = values or {}, hashlib.sha256(text).hexdigest()[:16]
        if values is None:
            return None
        if not isinstance(values.get("step"), int):
            header = values.get("resumed", values)
            with contextlib.suppress(ValueError, TypeError, LookupError):  # later lines give seconds since this time
                self._time = float(calendar.timegm(time.strptime(header["time"], "%Y-%m-%dT%H:%M:%SZ")))
            return None
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        step, samples, rate = numbers.pop("step"), numbers.get("samples_seen", 0), numbers.get("samples_per_second", 0)
        self._time += (samples - self._samples) / rate if rate > 0 else 0.0
        self._samples = samples
        return Line(step, self._time, numbers)


def committed_step(run_dir: Path) -> int:
    """Return the step that no resume takes back: the newest checkpoint's, or the last one of a run with a result."""
    newest, result = next(iter(checkpoint.folders(run_dir)), None), _result(run_dir)
    return max(int(newest.name[5:]) if newest else 0, int(result.get("steps", 0)))


def _result(run_dir: Path) -> dict[str, Any]:
    result, _ = run_reader.read_object(run_dir / "result.json")
    return result if isinstance(result.get("steps"), int) else {}


class TrackerThread(threading.Thread):
    """Keep one tracker up to date with a run until ``ended`` is set; then try once more to complete it.

    ``problem`` is the reason for missing lines, or None. ``done`` is whether the thread ended without a problem.
    """

    def __init__(self, name: str, run_dir: Path, ended: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._run_dir, self._ended = run_dir, ended
        self.problem: str | None = "it has not started"
        self.done = False

    def run(self) -> None:
        """Run until the end, whatever fails."""
        tracker: Tracker | None = None
        reader, wait = BatchReader(self._run_dir), POLL_SECONDS
        while True:
            is_last = self._ended.is_set()
            try:
                if tracker is None:
                    module, name, _ = TRACKERS[self.name]
                    tracker = getattr(importlib.import_module(module), name)(self._run_dir)
                    reader = BatchReader(self._run_dir)
                while True:
                    batch = reader.read()
                    tracker.add(batch)
                    if not batch.has_more:
                        break
                if is_last:
                    result = _result(self._run_dir)
                    tracker.finish(result if result.get("steps") == reader.last_step else None)  # else it was resumed
                self.problem, wait = None, POLL_SECONDS
            except Exception as error:  # of a server, a disk or a package: training must not notice it
                self._report(error)
                tracker, wait = None, min(2 * wait, MAX_RETRY_SECONDS)
            if is_last:
                self.done = self.problem is None
                return
            self._ended.wait(wait)

    def _report(self, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        text = text if len(text) <= 300 else f"{text[:300]}..."
        if self.problem != text:
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} warning: {self.name}: {text}", file=sys.stderr, flush=True)
        self.problem = text


# --- the program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Return the exit code of a mistake; without one the process exits here."""
    parser = new_parser("track", __doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder that holds metrics.jsonl")
    parser.add_argument("--to", required=True, metavar="NAMES", help=f"some of {','.join(TRACKERS)}")
    parser.add_argument("--follow", action="store_true", help="continue while the run does")
    # For the launch script: it ends the job, and the pipe ends with the launch script, however that ends.
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    return run_command(parser, arguments, _run)


def _run(options: Options) -> None:
    names = names_of(options.to)
    if missing := [each for name in names for each in TRACKERS[name][2] if importlib.util.find_spec(each) is None]:
        raise ConfigError(f"{sys.executable} lacks {' and '.join(missing)}: install them there, or use another Python")
    run_dir = options.run_dir.resolve()
    follows = options.follow or options.until_stdin_ends
    if not run_dir.is_dir() or not (follows or (run_dir / "metrics.jsonl").exists()):
        raise ConfigError(f"{options.run_dir} holds no metrics.jsonl: name the run dir of a run that trains")
    os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))
    ended = threading.Event()
    _end_at_signals(ended)
    if options.until_stdin_ends:
        threading.Thread(target=_until_stdin_ends, args=(ended,), daemon=True).start()
    elif not follows:
        ended.set()
    with _lock(run_dir, ended if follows else None):
        _track(run_dir, names, ended, options)


def names_of(text: str) -> list[str]:
    """Return the trackers in ``text``, which separates them by commas. Raises ConfigError."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ConfigError(f"unknown tracker {unknown[0]!r}: name some of {','.join(TRACKERS)}, with commas")
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def _lock(run_dir: Path, ended: threading.Event | None) -> Iterator[None]:
    """Keep other processes from copying the same steps. If one does, wait while the run lasts, then FINISH_SECONDS."""
    try:
        Root(run_dir).make_folder("track")
        file = Root(run_dir).open("track/.lock", os.O_WRONLY)
    except OSError as error:
        raise ConfigError(f"cannot write to {run_dir / 'track'}: {error.strerror}: make it a writable folder") from None
    deadline = time.monotonic() + FINISH_SECONDS + 5
    with os.fdopen(file, "wb"):
        while try_lock(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB) is False:
            if time.monotonic() > deadline and (ended is None or ended.is_set()):
                raise ConfigError(f"another process gives {run_dir} to trackers: wait for it, or end it")
            time.sleep(0.2)
        yield


def _track(run_dir: Path, names: Sequence[str], ended: threading.Event, options: Options) -> NoReturn:
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    threads = [TrackerThread(name, run_dir, ended) for name in names]
    # Without a job, a copy may take as long as it needs.
    limit = float(os.environ.get("SAMESTEP_TRACK_SECONDS") or FINISH_SECONDS) if options.until_stdin_ends else None
    for thread in threads:
        thread.start()
    while not ended.wait(POLL_SECONDS):
        if options.follow and _has_ended(run_dir):
            ended.set()
    deadline = None if limit is None else time.monotonic() + limit
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    incomplete = [thread for thread in threads if not thread.done]
    with contextlib.suppress(OSError):  # the launch script may be gone
        for thread in incomplete:
            reason = thread.problem or f"it needs more than {limit:g} s"
            if options.until_stdin_ends:  # the launch script adds more
                print(f"{thread.name}: {reason}")
            else:
                print(f"error: {thread.name} is incomplete: {shown(reason, limit=500)}", file=sys.stderr)
        sys.stdout.flush()
    os._exit(1 if incomplete else 0)  # do not wait for a thread that waits for a server


def _end_at_signals(ended: threading.Event) -> None:
    """Set ``ended`` at the first INT or TERM; exit at the second."""

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
    """Return whether the run has its result and was not resumed since."""
    with contextlib.suppress(OSError):
        return (run_dir / "result.json").stat().st_mtime >= (run_dir / "metrics.jsonl").stat().st_mtime
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
