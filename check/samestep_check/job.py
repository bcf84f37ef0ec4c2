"""Start a checked script in a copy of the script's folder, read the records, and end all processes of the script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep import ConfigError

from samestep_check import cleanup
from samestep_check.calls import AnnouncedCalls, Calls
from samestep_check.records import Records

# Time limit for a job's other processes to end after the launcher, in seconds. Workers of a torch DataLoader notice the
# end of their rank after up to 5 seconds.
LEFT_GRACE = 8.0
INSIDE = Path(__file__).with_name("inside")
MOST_CHARACTERS = 120  # maximum length of an error line
KILL_SECONDS = 5.0  # time limit of `stop` for its repeated kills, and for the launcher's end, in seconds
# The pattern excludes torchrun's ChildFailedError, which only repeats the error of a rank.
ERROR = re.compile(r"(error: |(?!.*ChildFailed)[\w.]*(Error|Exception)\b)")


class Job:
    """A script that runs in its own session. `started` describes the arguments."""

    def __init__(
        self,
        command: Sequence[str],
        work: Path,
        records: Path,
        config: Mapping[str, Any],
        calls: Calls | None = None,
    ) -> None:
        self._work = work
        self.records_folder = records
        self.output_path = records.with_suffix(".txt")
        self.mark = uuid.uuid4().hex
        records.mkdir()
        # This path is short, because the path of a socket has at most 107 bytes. Ray's sockets need 65 after TMPDIR.
        own_temporary = records.with_name("t" + records.name.rpartition("-")[2])
        own_temporary.mkdir()
        self._begun = time.time()
        self.duration = 0.0  # seconds from the start to the launcher's end, or to the limit of `wait_for_end`
        self.left_behind = 0
        # Each child inherits the mark in SAMESTEP_INSIDE, by which `pids` finds children in other sessions.
        shared = {**config, "work": str(work), "records": str(records), "mark": self.mark}
        if isinstance(calls, AnnouncedCalls):
            shared["announce"] = str(calls.path)
        # The file sitecustomize.py in INSIDE starts the recorder in each Python process.
        path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": path, "SAMESTEP_INSIDE": json.dumps(shared)}
        environ["TMPDIR"] = str(own_temporary)  # without --keep, the check deletes this folder and all files in it
        try:
            with self.output_path.open("wb") as file:
                self.process = subprocess.Popen(
                    calls.wrapped(command) if calls else command,
                    cwd=work,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=calls.descriptors if calls else (),
                )
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]}: {error.strerror}: name a command on PATH") from None

    @property
    def code(self) -> int | None:
        """Return the launcher's exit code, which is 128 + N after signal N; None while the launcher runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def read(self) -> Records:
        return Records(self.records_folder)

    def output(self) -> str:
        """Return the stdout and stderr of all processes."""
        return self.output_path.read_text(errors="replace")

    def error_line(self) -> str:
        """Return the first output line with an error, or else the last line.

        The paths in the script's folder are relative to this folder. The line is shortened to `MOST_CHARACTERS`.
        """
        lines = [re.sub(r"^\[\S+\]:? *", "", line.strip()) for line in self.output().splitlines()]
        errors = [line for line in lines if ERROR.match(line)]
        errors.sort(key=lambda line: line.endswith(":"))  # mp.spawn prints a rank's traceback after its own exception
        codes = [line for line in lines if line.startswith("exitcode")]
        errors += codes[-1:]  # torchrun prints a code for each rank, and the code of the first failed rank last
        found = errors[:1] or lines[-1:] or [""]
        return found[0].replace(f"{self._work}{os.sep}", "")[:MOST_CHARACTERS]

    def progress(self, pattern: str) -> int:
        """Return the fastest rank's number of steps, or the number of matches of ``pattern`` if no step is recorded."""
        return max(self._step_counts(), default=0) or len(re.findall(pattern, self.output()))

    def processes_with_steps(self) -> int:
        """Return the number of processes that have taken a step."""
        return sum(count > 0 for count in self._step_counts())

    def _step_counts(self) -> list[int]:
        return [path.read_bytes().count(b'"event": "step"') for path in self.records_folder.glob("*.jsonl")]

    def wait(self, until: Callable[[], object], limit: float) -> bool:
        """Poll ``until`` for up to ``limit`` seconds. Return True as soon as it returns a true value, else False."""
        end = time.monotonic() + limit
        while not until():
            self.raise_recorded_errors()
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        self.raise_recorded_errors()
        return True

    def raise_recorded_errors(self) -> None:
        """Raise ConfigError if the script has tried to write outside of its folder, or the adapter has failed."""
        for path in self.records_folder.glob("*.jsonl"):
            for line in path.read_text().split("\n"):
                if not line.endswith("}"):  # the process is still writing the line, or was killed before its end
                    continue
                if line.startswith('{"event": "outside"'):
                    name = json.loads(line)["path"]
                    raise ConfigError(f"the script writes to {name}, outside of its folder: add --allow-write {name}")
                if line.startswith('{"event": "adapter"'):
                    error = json.loads(line)["error"]
                    raise ConfigError(f"the adapter raises {error}: correct the file of --adapter")

    def wait_for_end(self, limit: float) -> bool:
        """Wait for the launcher's end, and then up to LEFT_GRACE seconds for the end of the other processes.

        Args:
            limit: longest wait for the launcher's end, in seconds.

        Returns:
            Whether the launcher has ended. If so, `left_behind` is the number of other processes that still run.
        """
        done = self.wait(lambda: self.code is not None, limit)
        self.duration = time.time() - self._begun
        if done:
            self.wait(lambda: not self.pids(), LEFT_GRACE)
            self.left_behind = len(self.pids())
        return done

    def pids(self) -> list[int]:
        """Return the PIDs of running processes in the job's session, or with the job's mark in their environment."""
        return [*cleanup.find(self.mark.encode(), {self.process.pid})]

    def kill(self) -> int:
        """Send SIGKILL to all processes of the job, and return their number."""
        pids = self.pids()
        cleanup.kill(pids)
        return len(pids)

    def stop(self) -> None:
        """Kill all processes of the job, including processes that SIGSTOP has stopped."""
        end = time.monotonic() + KILL_SECONDS
        while self.kill() and time.monotonic() < end:
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the launcher may wait for a hung disk
            self.process.wait(KILL_SECONDS)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    work: Path,
    records: Path,
    config: Mapping[str, Any],
    calls: Calls | None = None,
) -> Iterator[Job]:
    """Start a job, and kill its processes at the end of the ``with`` block.

    Args:
        command: words of the script's command.
        work: the copied folder in which the script runs.
        records: new folder for the records of the script's processes.
        config: settings for the recorder in each process.
        calls: object that pauses the job before its file system calls; None for no pauses.

    Yields:
        The started job.
    """
    try:
        job = Job(command, work, records, config, calls)
        try:
            if calls:
                calls.start()
            yield job
        finally:
            job.stop()
    finally:
        if calls:
            calls.stop()
