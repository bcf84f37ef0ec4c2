"""Give a run's numbers to trackers: TensorBoard, MLflow, W&B.

    python -m samestep.track RUN_DIR --to tensorboard,mlflow,wandb [--follow]

reads ``metrics.jsonl``, and nothing that a rank does waits for it: no rank imports this. A launch script with --track
starts it beside the job. A tracker that fails is tried again, from what is in the file; so nothing is lost, and nothing
is there twice, when this or the job is killed.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Protocol

from samestep import UserError, checkpoint

# Each tracker's module and class here, and the modules that it needs.
TRACKERS = {
    "tensorboard": ("samestep.track_tensorboard", "TensorBoard", ("tensorboard",)),
    "mlflow": ("samestep.track_mlflow", "MLflow", ("mlflow", "sqlalchemy", "alembic")),
    "wandb": ("samestep.track_wandb", "Wandb", ("wandb",)),
}
POLL_SECONDS = 1.0
MOST_SECONDS = 15.0  # between two tries, while a tracker fails
LAST_SECONDS = 30.0  # from the end of the job to the end of this, done or not
PART = 1 << 22  # bytes of metrics.jsonl that are read at once
# What the packages are not to do here: wait for minutes within a request, or tell their makers of it.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
}

HELP = """\
tensorboard  RUN_DIR/track/tensorboard, an event file
mlflow       MLFLOW_TRACKING_URI, or else RUN_DIR/track/mlflow.db; a step once a checkpoint vouches for it
wandb        RUN_DIR/track/wandb, an offline run, for `wandb sync`

Without --follow it ends when all that is there is given. With --follow it goes on until the run has its result, or at
Ctrl-C or TERM. exit codes: 0 done, 1 a tracker has not got all, 2 a mistake in the call
"""


class Line(NamedTuple):
    """A step's line of metrics.jsonl."""

    step: int  # updates done
    time: float  # seconds since 1970 at which it was written, as far as the file tells: a function of its content
    values: dict[str, float]


@dataclass(frozen=True)
class News:
    """What `Reader.read` found. Where it is ``anew``, what was found before counts no more."""

    anew: bool
    header: dict[str, Any]  # the file's first line
    key: str  # 16 hexadecimal digits of that line: which run it is
    lines: list[Line]
    more: bool  # there is more to be read at once
    vouched: int = 0  # nothing up to this step is taken back; known before the lines were read


class Tracker(Protocol):
    """What is given to a tracker's class, which is made with the run dir. Whatever it raises, it is made again."""

    def take(self, news: News) -> None:
        """Take what was read; called again and again, also where nothing is new."""

    def end(self, result: dict[str, Any] | None) -> None:
        """No more comes for now; ``result`` is the run's, None where it has not ended well."""


class Reader:
    """``metrics.jsonl`` as it grows. A resume puts another file, cut back, in its place: then all is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._begin()

    def _begin(self) -> None:
        self._rest = b""  # of a line that has no end yet
        self._header: dict[str, Any] | None = None
        self._key, self._time, self._samples = "", 0.0, 0
        self.last_step = 0

    def read(self) -> News:
        """What is new; nothing where there is no file. Raises OSError."""
        sure = vouched(self._path.parent)  # first: a checkpoint of later steps is of a file that is in place by then
        anew = self._open()
        if self._file is None:
            return News(False, {}, "", [], False)
        content = self._file.read(PART)
        *whole, self._rest = (self._rest + content).split(b"\n")
        lines = [line for text in whole if (line := self._line(text))]
        self.last_step = lines[-1].step if lines else self.last_step
        return News(anew, self._header or {}, self._key, lines, len(content) == PART, sure)

    def _open(self) -> bool:
        """Whether the file is another one than it was. That it is held open keeps its inode from being used again."""
        try:
            there = self._path.stat()
        except FileNotFoundError:  # not yet there, or --no-resume has set it aside
            return False
        if self._file:
            held = os.fstat(self._file.fileno())
            if (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino) and there.st_size >= self._file.tell():
                return False
            self._file.close()
        self._file = self._path.open("rb", buffering=0)
        self._begin()
        return True

    def _line(self, text: bytes) -> Line | None:
        """None for a header, and for what a process that was killed, or a disk, left of a line."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if self._header is None:
            self._header = values if isinstance(values, dict) else {}
            self._key = hashlib.sha256(text).hexdigest()[:16]
        if not isinstance(values, dict):
            return None
        if not isinstance(values.get("step"), int):
            self._start(values.get("resumed", values))
            return None
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        step, samples, rate = numbers.pop("step"), numbers.get("samples_seen", 0), numbers.get("samples_per_second", 0)
        self._time += (samples - self._samples) / rate if rate > 0 else 0.0
        self._samples = samples
        return Line(step, self._time, numbers)

    def _start(self, header: Any) -> None:
        """From each start's time on, lines tell by their samples a second when they were written."""
        with contextlib.suppress(ValueError, TypeError, LookupError):
            self._time = float(calendar.timegm(time.strptime(header["time"], "%Y-%m-%dT%H:%M:%SZ")))


class WholeFile:
    """A tracker that is a file: written whole under another name, put in place by a rename, and then appended to.

    What a killed process left of it, or a resume has cut back, is thereby replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = None
        self._place: Path | None = None  # where it is yet to be put

    def place(self, news: News) -> Path:
        """Where the file is to be; what is to replace it was deleted by `sweep`."""
        raise NotImplementedError

    def sweep(self, place: Path) -> None:
        """Delete all files but the one in ``place``."""
        raise NotImplementedError

    def head(self, news: News) -> bytes:
        raise NotImplementedError

    def body(self, lines: Sequence[Line]) -> bytes:
        raise NotImplementedError

    def write(self, content: bytes) -> None:
        if self._file:
            self._file.write(content)

    def take(self, news: News) -> None:
        temporary = self._folder / ".new"
        if news.anew:
            if self._file:
                self._file.close()
            self._file, self._place = temporary.open("wb"), self.place(news)
            self.write(self.head(news))
        if self._file is None:
            return
        if news.lines:
            self.write(self.body(news.lines))
        self._file.flush()
        if self._place and not news.more:
            self._place.parent.mkdir(exist_ok=True)
            temporary.replace(self._place)
            self.sweep(self._place)
            self._place = None

    def end(self, result: dict[str, Any] | None) -> None:
        if self._file:
            self._file.flush()


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one: ``{"options": {"lr": 1}}`` as ``{"options.lr": 1}``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def vouched(run_dir: Path) -> int:
    """Up to which step nothing is taken back: the newest checkpoint's, or all, once the run has its result."""
    newest, result = next(iter(checkpoint.folders(run_dir)), None), _result(run_dir)
    return max(int(newest.name[5:]) if newest else 0, int(result["steps"]) if result else 0)


def _result(run_dir: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((run_dir / "result.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("steps"), int) else None


def result_of(run_dir: Path, last_step: int) -> dict[str, Any] | None:
    """The run's result, which a run that goes on behind it has no more; None where there is none."""
    found = _result(run_dir)
    return found if found and found["steps"] == last_step else None


class Follower(threading.Thread):
    """Keeps one tracker up with a run, until ``ended`` is set and it has all, or has failed once more.

    ``problem`` is what stands between it and that, None once it has all there was; ``done`` that it has ended so.
    """

    def __init__(self, name: str, run_dir: Path, ended: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._run_dir, self._ended = run_dir, ended
        self.problem: str | None = "it has not begun"
        self.done = False

    def run(self) -> None:
        tracker: Tracker | None = None
        reader, wait = Reader(self._run_dir / "metrics.jsonl"), POLL_SECONDS
        while True:
            last = self._ended.is_set()
            try:
                if tracker is None:
                    module, name, _ = TRACKERS[self.name]
                    tracker = getattr(importlib.import_module(module), name)(self._run_dir)
                    reader = Reader(self._run_dir / "metrics.jsonl")
                while True:
                    news = reader.read()
                    tracker.take(news)
                    if not news.more:
                        break
                if last:
                    tracker.end(result_of(self._run_dir, reader.last_step))
                self.problem, wait = None, POLL_SECONDS
            except Exception as problem:  # a server, a disk, a package: whatever it is, training is not to hear of it
                self._failed(problem)
                tracker, wait = None, min(2 * wait, MOST_SECONDS)
            if last:
                self.done = self.problem is None
                return
            self._ended.wait(wait)

    def _failed(self, problem: Exception) -> None:
        text = " ".join(f"{type(problem).__name__}: {problem}".split())
        text = text if len(text) <= 300 else f"{text[:300]}..."
        if self.problem != text:
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} warning: {self.name}: {text}", file=sys.stderr, flush=True)
        self.problem = text


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m samestep.track",
        description="Give a run's metrics.jsonl to trackers: each step once, whatever happens to the run.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="what holds metrics.jsonl")
    parser.add_argument("--to", required=True, metavar="NAMES", help=f"some of {','.join(TRACKERS)}")
    parser.add_argument("--follow", action="store_true", help="go on while the run does")
    # The launch script's way: it ends the job, and the pipe ends with the launch script, however that ends.
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        names = names_of(options.to)
        if missing := [each for name in names for each in TRACKERS[name][2] if importlib.util.find_spec(each) is None]:
            raise UserError(
                f"{sys.executable} lacks {' and '.join(missing)}: install them there, or use another Python"
            )
        run_dir = options.run_dir.resolve()
        follows = options.follow or options.until_stdin_ends
        if not run_dir.is_dir() or not (follows or (run_dir / "metrics.jsonl").exists()):
            raise UserError(f"{options.run_dir} holds no metrics.jsonl: name the run dir of a run that trains")
        os.setpriority(os.PRIO_PROCESS, 0, max(10, os.getpriority(os.PRIO_PROCESS, 0)))
        ended = threading.Event()
        _end_at_signals(ended)
        if options.until_stdin_ends:
            threading.Thread(target=_until_stdin_ends, args=(ended,), daemon=True).start()
        elif not follows:
            ended.set()
        with _alone(run_dir, ended if follows else None):
            _follow(run_dir, names, ended, options)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


def names_of(text: str) -> list[str]:
    """The trackers in ``text``, with commas between them. Raises UserError."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise UserError(f"there is no tracker {unknown[0]!r}: name some of {','.join(TRACKERS)}, with commas")
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def _alone(run_dir: Path, ended: threading.Event | None) -> Any:
    """Two that give the same run would give steps twice: the second waits, as long as it follows, or LAST_SECONDS."""
    try:
        (run_dir / "track").mkdir(exist_ok=True)
        lock = (run_dir / "track" / ".lock").open("w")
    except OSError as problem:
        raise UserError(f"cannot write to {run_dir / 'track'}: {problem.strerror}") from None
    deadline = time.monotonic() + LAST_SECONDS + 5
    with lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline and (ended is None or ended.is_set()):
                raise UserError(f"another process gives {run_dir} to trackers: wait for it, or end it")
            time.sleep(0.2)
        yield


def _follow(run_dir: Path, names: Sequence[str], ended: threading.Event, options: argparse.Namespace) -> NoReturn:
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    followers = [Follower(name, run_dir, ended) for name in names]
    limit: float | None = None  # an export takes its time
    if options.until_stdin_ends:
        limit = float(os.environ.get("SAMESTEP_TRACK_SECONDS") or LAST_SECONDS)
    for follower in followers:
        follower.start()
    while not ended.wait(POLL_SECONDS):
        if options.follow and _has_ended(run_dir):
            ended.set()
    deadline = None if limit is None else time.monotonic() + limit
    for follower in followers:
        follower.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    late = [follower for follower in followers if not follower.done]
    with contextlib.suppress(OSError):  # the launch script may be gone
        for follower in late:
            why = follower.problem or f"it needs more than {limit:g} s"
            if options.until_stdin_ends:  # for the launch script, which has more to say of it
                print(f"{follower.name}: {why}")
            else:
                print(f"error: {follower.name} has not got all: {why}", file=sys.stderr)
        sys.stdout.flush()
    os._exit(1 if late else 0)  # a thread that waits for a server is not waited for


def _end_at_signals(ended: threading.Event) -> None:
    """INT and TERM ask for the end; where it is asked for already, they are the end."""

    def end(number: int, frame: object) -> None:
        if ended.is_set():
            os._exit(128 + number)
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _until_stdin_ends(ended: threading.Event) -> None:
    while os.read(0, 1024):
        pass
    ended.set()


def _has_ended(run_dir: Path) -> bool:
    """Whether the run has its result, and has not gone on since."""
    with contextlib.suppress(OSError):
        return (run_dir / "result.json").stat().st_mtime >= (run_dir / "metrics.jsonl").stat().st_mtime
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
