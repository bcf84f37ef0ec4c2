"""Run six jobs at once, while signals kill and stop random ranks, launchers and launch scripts for 5 minutes.

LOAD_SECONDS, LOAD_JOBS and LOAD_SEED set the duration, the number of jobs and the seed. A failure prints the seed and
all signals.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, metrics
from processes import environments

SECONDS = int(os.environ.get("LOAD_SECONDS", "300"))  # duration of the disturbance
JOBS = int(os.environ.get("LOAD_JOBS", "6"))
AFTERWARDS = 240.0  # Seconds for the jobs to end. The test, with its undisturbed runs, ends within 15 minutes.
INTERVAL = 15.0 / JOBS  # Seconds between two signals, so that a job gets one every 15 s on average.
STOPPED = 20.0  # Seconds at most until a stopped launcher or script continues.
STEPS = {1: 240 * SECONDS // JOBS, 2: 120 * SECONDS // JOBS}  # By world size: about as many as 2 cores complete.
OPTIONS = ["--dataset=mnist-5k", "--global-batch-size=20", "--epochs=1000", "--checkpoint-every=100", "--quiet"]


@dataclass
class Load:
    """A job whose launch script is restarted until the job succeeds, as a scheduler does."""

    harness: Harness
    name: str
    ranks: int
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)  # exit codes of the launch scripts that ended

    @property
    def run_dir(self) -> Path:
        return self.harness.folder / self.name

    @property
    def output(self) -> Path:
        return self.harness.folder / f"{self.name}.txt"

    def start(self) -> None:
        script = str(ROOT / "scripts" / f"run_{self.harness.app.name}.sh")
        command = ["bash", script, str(self.ranks), f"--run-dir={self.run_dir}"]
        command += [*OPTIONS, f"--max-steps={STEPS[self.ranks]}", "--timeout=10", "--max-restarts=1000"]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, f"--device={self.harness.device}"],
                cwd=self.harness.folder,
                env=self.harness.environ(LOAD_JOB=self.name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def is_done(self) -> bool:
        """Return whether the job succeeded. Restart it if its launch script failed."""
        code = self.process.poll() if self.process else None
        if code is None or (self.codes and self.codes[-1] == 0):
            return code is not None
        self.codes.append(code)
        if code != 0:
            self.start()
        return code == 0

    def victims(self) -> dict[str, list[int]]:
        """Return the process ids of the job by kind, including ranks and launchers of an earlier script."""
        found: dict[str, list[int]] = {}
        for pid, environ in environments().items():
            if environ.get("SAMESTEP_TEST") == self.harness.mark and environ.get("LOAD_JOB") == self.name:
                kind = "rank" if "LOCAL_RANK" in environ else "launcher" if "SAMESTEP_JOB_INFO" in environ else "script"
                if kind != "script" or (self.process and pid == self.process.pid):  # omit a script's helpers
                    found.setdefault(kind, []).append(pid)
        return found


@dataclass
class Disturbance:
    """Kill and stop random processes of the jobs, and log each signal."""

    harness: Harness
    chance: random.Random
    begun: float = field(default_factory=time.monotonic)
    actions: list[str] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)  # when each stopped process continues, by process id

    def note(self, text: str) -> None:
        self.actions.append(f"{time.monotonic() - self.begun:7.2f} {text}")
        with (self.harness.folder / "actions.txt").open("a") as file:
            file.write(f"{self.actions[-1]}\n")

    def send(self, number: signal.Signals, pid: int, what: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.note(f"{number.name} to {what} (pid {pid})")

    def disturb(self, load: Load) -> None:
        victims = load.victims()
        kinds = [kind for kind in ("rank", "rank", "launcher", "script") if kind in victims]
        if not kinds:
            return
        kind = self.chance.choice(kinds)
        pid = self.chance.choice(sorted(victims[kind]))
        number = self.chance.choice([signal.SIGKILL, signal.SIGSTOP])
        if number == signal.SIGSTOP and kind != "rank":  # the launch script ends a stopped rank
            self.stopped.setdefault(pid, time.monotonic() + self.chance.uniform(0.5, STOPPED))
        self.send(number, pid, f"{kind} of {load.name}")

    def release(self, now: float) -> None:
        for pid in [pid for pid, end in self.stopped.items() if end <= now]:
            del self.stopped[pid]
            if pid in self.harness.left_running():  # another process may have this id now
                self.send(signal.SIGCONT, pid, "what was stopped")


@contextlib.contextmanager
def nothing_left(harness: Harness) -> Iterator[None]:
    """Kill all started processes after a failure."""
    try:
        yield
    except BaseException:
        for _ in range(3):  # a launcher may start a process meanwhile
            harness.kill_all()
        raise


@pytest.mark.soak  # the quick tests run test_one_run_survives_every_fault
def test_jobs_that_are_killed_and_stopped_at_random_end_with_the_weights_of_undisturbed_runs(
    harness: Harness, table: list[str]
) -> None:
    references: dict[int, dict[str, Any]] = {
        n: harness.train(n, *OPTIONS, f"--max-steps={STEPS[n]}", run_dir=harness.folder / f"undisturbed-{n}")
        for n in STEPS
    }
    seed = int(os.environ.get("LOAD_SEED") or random.SystemRandom().randrange(2**32))
    disturbance = Disturbance(harness, random.Random(seed))
    loads = [Load(harness, f"job-{i}", 1 + i % 2) for i in range(JOBS)]
    with nothing_left(harness):
        disturbance.note(f"LOAD_SEED={seed} LOAD_SECONDS={SECONDS} LOAD_JOBS={JOBS}")
        for load in loads:
            load.start()
        now = disturbance.begun
        following = disturbance.begun
        while running := [load for load in loads if not load.is_done()]:
            now = time.monotonic()
            reported = "\n".join([*disturbance.actions, *(f"{load.name}: codes {load.codes}" for load in loads)])
            assert now < disturbance.begun + SECONDS + AFTERWARDS, f"{running} do not end:\n{reported}"
            assert not any(2 in load.codes for load in loads), f"no mistake of the caller's:\n{reported}"
            if following <= now < disturbance.begun + SECONDS:
                disturbance.disturb(disturbance.chance.choice(running))
                following = now + disturbance.chance.uniform(0.5, 1.5) * INTERVAL
            disturbance.release(now)
            time.sleep(0.1)
    good = sum(is_the_same(load, references[load.ranks]) for load in loads)
    reported = "\n".join([*disturbance.actions, *(f"{load.name}: codes {load.codes}" for load in loads)])
    assert good == JOBS, reported
    counts = (
        f"{len(disturbance.actions) - 1} actions in {SECONDS} s, seed {seed}, {now - disturbance.begun:.0f} s in all"
    )
    table.append(
        f"| {harness.app.name} | 1, 2 | {JOBS} jobs at once, SIGKILL and SIGSTOP: {counts} | {JOBS} | {good} |"
    )


def is_the_same(load: Load, reference: dict[str, Any]) -> bool:
    """Return whether a job ended with the weights of the undisturbed run and has each step once in metrics.jsonl."""
    last = load.output.read_text().rstrip("\n").rpartition("\n")[2]
    steps, expected = ([line["step"] for line in metrics(path)] for path in (load.run_dir, Path(reference["run_dir"])))
    return f'"weights_sha256": "{reference["weights_sha256"]}"' in last and steps == expected
