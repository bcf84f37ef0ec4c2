"""Watch a rank with two threads: write heartbeats, and end the rank if it hangs or its launcher has ended.

One thread writes ``<run-dir>/log/alive-<r>`` each second: step, time, pid, host, and the main thread's location. After
the rank ends, the file shows its last location. The other thread ends the rank if its launcher has ended, so that no
rank outlives a killed launcher. This thread also ends the rank after --timeout seconds without progress
(--first-step-timeout while the rank compiles).

A framework's own timeout is often several minutes, and its error describes the rank that detected the hang. The
watchdog's error describes the rank that the other ranks wait for, and its line of code. `hang_diagnosis` finds this
rank and writes ``log/hang-<r>.json``. The launch script ends the rest of the job when ``log/stalled`` appears.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from samestep import NonRetryableError, log
from samestep.checksums import Checksums
from samestep.env import World
from samestep.events import HANG, append_event
from samestep.job_info import JobInfo
from samestep.monitor import AllGather, Monitor
from samestep.options import Options
from samestep.recovery import replica_check
from samestep.recovery.launcher_process import LauncherProcess
from samestep.recovery.progress_clock import ProgressClock
from samestep.recovery.rank_files import CodeLocation, is_in_collective, own_location, stacks
from samestep.recovery.straggler import StragglerDetector
from samestep.root import Root
from samestep.untrusted import write_json

_TICK = 1.0  # seconds between two checks
_MIN_TICK = 0.05  # seconds between two checks shortly before the limit
_SILENT = 5.0  # seconds without a check after which this process counts as stopped and continued
# Seconds without a heartbeat after which stacks are written; see `_seconds_to_stacks`.
STALL_DUMP_AFTER = 2.5
STALL_DUMP_LATEST = 150.0
ORPHAN_GRACE = 3.0  # seconds in which a rank may save a step after its launcher has ended
_DIAGNOSIS_TIMEOUT = 1.7  # seconds
_NO_FOLDER = Path(os.devnull)  # the folder until the run dir is known; writes below it fail silently


class Watchdog(Monitor):
    """End this process if it makes no progress, even while it waits in a framework's C++ code."""

    def __init__(self) -> None:
        self.folder = _NO_FOLDER
        self.job = JobInfo.from_environ(os.environ).job
        self._clock = ProgressClock()
        self._stacks: IO[str] | None = None
        self._collectives = 0
        self._collective: dict[str, Any] | None = None
        self._stragglers: StragglerDetector | None = None
        self._writing = threading.Lock()
        self._stopped = threading.Event()

    def start(self, world: World, options: Options) -> None:
        """Start both threads. The wait for ranks that never join counts as time without progress."""
        self._world = world
        self._options = options
        self._launcher = LauncherProcess(world)
        self._clock.start(options.timeout, options.first_step_timeout)
        for target in (self._watch, self._write_heartbeats):
            threading.Thread(target=target, name="watchdog", daemon=True).start()

    def write_to(self, folder: Path) -> None:
        if self.folder == _NO_FOLDER:
            self.folder = folder
        with contextlib.suppress(OSError):
            self._stacks = self._stacks or self._open_stacks()
            self._stacks.truncate(0)  # deletes an earlier start's stacks; writes append, so the next write begins at 0
            if not faulthandler.is_enabled():  # writes the stacks if a framework's C++ code aborts the process
                faulthandler.enable(self._stacks)
        heartbeat = self.folder / f"alive-{self._world.rank}"
        if heartbeat.is_dir():  # the launch script must be able to read heartbeats
            raise NonRetryableError(f"{heartbeat} is a directory: remove it")
        self._write_heartbeat()

    def _open_stacks(self) -> IO[str]:
        name = f"{self.folder.name}/stack-{self._world.rank}.txt"
        return os.fdopen(Root(self.folder.parent).open(name, os.O_WRONLY | os.O_APPEND), "a")

    def resume_at(self, step: int) -> None:
        self._clock.resume_at(step)
        self._last_collective()  # if the framework's record cannot be read, log this now instead of during a hang
        self._write_heartbeat()

    def expect_compilation(self) -> None:
        self._clock.expect_compilation()

    @property
    def step(self) -> int:
        """Number of updates done."""
        return self._clock.step

    @property
    def last_progress(self) -> float:
        """The time of this rank's last progress, on the clock `time.monotonic`."""
        return self._clock.last_progress

    def beat(self, step: int | None = None) -> None:
        self._clock.beat(step)
        is_first_update = step is not None and self._clock.updates == 1
        if is_first_update:  # the launch script checks whether a failed start completed an update
            self._write_heartbeat()

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        self._collectives += 1
        outer = self._collective
        self._collective = {"name": name, "number": self._collectives, "pending": True}
        try:
            yield
        finally:
            self._collective = outer

    def update(self, step: int, phase_seconds: Sequence[float]) -> list[dict[str, Any]]:
        ranks = self._world.world_size
        samples = self._options.global_batch_size
        factor = self._options.straggler
        is_on = factor > 0 and 1 < ranks <= samples
        if self._world.rank != 0 or not is_on:
            return []
        if self._stragglers is None:
            self._stragglers = StragglerDetector(
                factor,
                ranks,
                global_batch_size=samples,
                step=self._clock.first_step,
                condition=self._shared_processors(),
            )
        return self._stragglers.update(step, phase_seconds)

    def _shared_processors(self) -> str:
        """Return "3 ranks share 2 processors" if this machine has fewer processors than ranks, else ""."""
        ranks = self._world.local_world_size or 0
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or ranks
        return f"{ranks} ranks share {count} processors" if ranks > count else ""

    def check_losses(self, losses: Mapping[str, float], step: int) -> None:
        for name, value in losses.items():
            if not math.isfinite(value):
                raise replica_check.not_finite(name, value, step, self._options, self._world)

    def check_replicas(self, all_gather: AllGather, checksums: Checksums, step: int) -> None:
        """Compare the checksums of all ranks' arrays.

        Args:
            all_gather: collective that gathers an array from each rank. The method calls this function once, with one
                checksum per tensor, int64 [tensors]. The result is int64 [world_size, tensors].
            checksums: checksums of this rank's arrays by group and name, with the same names on all ranks.
            step: number of updates done, for the error.

        Raises:
            RetryableError: an array differs between ranks.
        """
        names = []
        own = []
        for group in sorted(checksums):
            for name in sorted(checksums[group]):
                names.append(f"{group} {name}")
                own.append(checksums[group][name])
        of_ranks = all_gather(np.array(own, np.uint64).view(np.int64))
        if (of_ranks != of_ranks[0]).any():
            raise replica_check.unequal(of_ranks, step, names)

    def check_final_weights(self, collectives: Any, digest: str, run_dir: Path | None) -> None:
        """Compare the digests of all ranks' final weights.

        Args:
            collectives: the app's `samestep.parts.Collectives`.
            digest: SHA-256 of this rank's weights, in hexadecimal.
            run_dir: folder of the run on rank 0, which renames the newest checkpoint if ranks differ; None on all
                other ranks.

        Raises:
            RetryableError: the digests differ.
        """
        digests = collectives.all_gather(np.frombuffer(bytes.fromhex(digest), np.int32))
        if (digests != digests[0]).any():
            if run_dir:
                replica_check.quarantine_newest(run_dir)
            collectives.broadcast(b"")  # waits for rank 0's rename, because a launcher ends all ranks if one exits
            raise replica_check.unequal(digests, self._clock.step)

    def record_event(self, kind: str, **fields: Any) -> None:
        if self.folder != Path(os.devnull):
            append_event(self.folder, kind, **{"rank": self._world.rank, "step": self._clock.step, **fields})

    def launcher_died(self) -> bool:
        return self._launcher.has_orphaned()

    def all_ranks_alive(self, count: int) -> bool:
        from samestep.recovery import hang_diagnosis

        return hang_diagnosis.all_ranks_alive(self.folder, self.job, count)

    def rank_is_lost(self) -> bool:
        from samestep.recovery import hang_diagnosis

        return hang_diagnosis.rank_is_lost(self.folder, self.job, self._world.world_size)

    def describe_crashes(self) -> str:
        from samestep.recovery import hang_diagnosis

        return hang_diagnosis.crashes(self.folder, self.job)

    def stop(self) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        if self._stacks:
            with contextlib.suppress(OSError):
                Root(self.folder.parent).unlink(f"{self.folder.name}/stack-{self._world.rank}.txt")

    # --- progress ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        ticked = time.monotonic()
        while not self._stopped.wait(self._seconds_to_next_look(ticked)):
            now = time.monotonic()
            if now - ticked > _SILENT:  # this process was stopped and continued, so its timeout restarts
                self._clock.restart()
            ticked = now
            if self._launcher.is_gone():
                log.error(f"rank {self._world.rank}: its launcher (pid {self._launcher.pid}) is gone; ending")
                if callable(signal.getsignal(signal.SIGTERM)):  # a Run handles the signal, and may save a step
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(ORPHAN_GRACE)
                self._exit()
            if self._clock.waited() > self._clock.limit():
                self.end()

    def _seconds_to_next_look(self, now: float) -> float:
        left = self._clock.last_progress + self._clock.limit() - now
        return min(_TICK, max(_MIN_TICK, left))

    def end(self) -> None:
        """Report the rank that causes the hang, and exit. Each action has a timeout, because the disk may hang too."""
        deadline = time.monotonic() + _DIAGNOSIS_TIMEOUT
        place = f"{socket.gethostname()}, pid {os.getpid()}"
        this = f"rank {self._world.rank} ({place}) last alive at step {self._clock.step}"
        suspect = log.call_with_timeout(_DIAGNOSIS_TIMEOUT, self._diagnose, deadline) or this
        text = f"no progress for {self._clock.limit():g} s: {suspect}"
        if self._clock.is_compiling:
            text += "; if it was still compiling, give it a longer --first-step-timeout"
        if self.folder != _NO_FOLDER:
            text += f"; samestep hang {self.folder.parent} shows all stacks"
        log.call_with_timeout(_TICK, log.error, text, HANG)
        log.call_with_timeout(_TICK, self._save_diagnosis, suspect)
        # The launch script ends the job when it finds this file. So this method prints the error before it writes the
        # file. A write to a busy disk may take a second.
        stalled = {"job": self.job, "rank": self._world.rank, "host": socket.gethostname(), "culprit": suspect}
        log.call_with_timeout(3 * _TICK, write_json, self.folder, "stalled", stalled, self._world.rank)
        self._exit()

    def _exit(self) -> NoReturn:
        self._writing.acquire(timeout=_TICK)  # an exit during a write leaves a temporary file; a busy disk may hang
        os._exit(1)

    def _diagnose(self, deadline: float) -> str:
        from samestep.recovery import hang_diagnosis  # a rank that makes progress does not need this module

        return hang_diagnosis.explain(self.folder, self.state(), deadline)

    def _save_diagnosis(self, text: str) -> None:
        from samestep.recovery import hang_diagnosis

        hang_diagnosis.save_diagnosis(self.folder, self.state(), text)

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def _write_heartbeats(self) -> None:
        """Write heartbeats until the rank is done. A disk that hangs blocks this thread, but not `_watch`."""
        while not self._stopped.wait(_TICK):
            with contextlib.suppress(Exception):  # without heartbeats, the launch script would end the job
                self._write_heartbeat()
            if self._clock.waited() > self._clock.limit() / 2:
                with contextlib.suppress(Exception):
                    from samestep.recovery import hang_diagnosis  # import it now, because `end` has a deadline

                    hang_diagnosis.dump_state_if_others_hang(self.folder, self.values(), self.state)

    def _write_heartbeat(self) -> None:
        with self._writing:
            write_json(self.folder, f"alive-{self._world.rank}", self.values(), self._world.rank)
            with contextlib.suppress(OSError):
                if self._stacks and not self._stopped.is_set():
                    self._stacks.truncate(0)
                    # The next heartbeat replaces this timer.
                    faulthandler.dump_traceback_later(self._seconds_to_stacks(), file=self._stacks)
                    if self._stopped.is_set():  # the main thread called `stop` in the meantime
                        faulthandler.cancel_dump_traceback_later()

    def _seconds_to_stacks(self) -> float:
        """Return the seconds without a heartbeat after which a C thread of faulthandler writes the stacks.

        The C thread does not need the interpreter. But in Python 3.11, the thread may read frames that the program has
        freed, and then SIGSEGV ends a rank that still trains. A busy machine delays heartbeats by seconds. So the C
        thread waits for half the time limit, but at least STALL_DUMP_AFTER and at most STALL_DUMP_LATEST seconds.
        """
        return max(STALL_DUMP_AFTER, min(STALL_DUMP_LATEST, self._clock.limit() / 2))

    def values(self) -> dict[str, Any]:
        """Return the values of a heartbeat. ``at`` is the main thread's file, line and function in the program."""
        main = threading.main_thread().ident or 0
        calls = stacks(main).get(main) or [CodeLocation("", 0, "")]  # at Python's end, no code runs
        waiting = self._collective is not None or is_in_collective(calls)
        return {
            "rank": self._world.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "job": self.job,
            "step": self._clock.step,
            "updates": self._clock.updates,
            "time": time.time(),
            "at": own_location(calls)[:3],
            "waiting": waiting,
            "collective": self._collective,
        }

    def state(self) -> dict[str, Any]:
        """Return the values of ``hang-<r>.json``: a heartbeat's values, and further values for the diagnosis."""
        collective = self._last_collective()
        return {
            **self.values(),
            "world_size": self._world.world_size,
            "waited": self._clock.waited(),
            "collective": collective,
        }

    def _last_collective(self) -> dict[str, Any] | None:
        try:
            recorded = self.last_collective() if self.last_collective else None
        except Exception as problem:  # the function may use private functions of the framework, which may change
            self.last_collective = None
            recorded = None
            text = f"the framework's record of collectives cannot be read ({problem}): hangs are diagnosed without it"
            log.call_with_timeout(_TICK / 2, log.info, text)
        return recorded or self._collective
