"""Rows about the processes of a job: kills, stop signals, hangs, exit codes, recovery times and lost steps."""

from __future__ import annotations

import os
import signal
import time

from samestep_check.job import LEFT_GRACE, Job
from samestep_check.records import Records
from samestep_check.rows_resume import restarted, resumed_at, saved_at
from samestep_check.runner import PATIENCE, Faulted, ScriptRunner
from samestep_check.verdicts import ADAPTER, CannotTell, Failed, NotSeen, Verdict

NOTICE = 4.0  # time limit in seconds for ranks to notice that their launcher was killed


def rank_killed(runner: ScriptRunner) -> str:
    """Check that the job ends or recovers after SIGKILL to a rank, and that a restart trains to the end."""
    run: Faulted = runner.killed
    if run.code is None:
        raise Failed(f"the job has not ended {run.duration:.0f} s after")
    if run.in_place:
        return "the other ranks continue"
    if run.code == 0 and len(run.attempts) < 2:
        raise Failed(f"exit 0 after {run.done} of {len(runner.steps)} steps")
    restarted(runner, run)
    if run.code == 0:
        return "resumes by itself"
    return f"the job ends after {run.duration:.1f} s, exit {run.code}; the restart trains to the end"


def all_killed(runner: ScriptRunner) -> str:
    """Check that a restart after SIGKILL to all processes resumes."""
    run = runner.faulted(Job.kill)
    at = resumed_at(runner, run, saved_at(run))
    return f"killed after step {run.done}; resumes at step {at}"


def term(runner: ScriptRunner) -> str:
    """Check that the job saves and ends after SIGTERM to its launcher."""
    return stopped_well(runner, runner.terminated)


def workers(runner: ScriptRunner) -> str:
    """Check that a job with loader workers saves and ends after SIGTERM to its process group."""
    if not any(notes.workers for notes in runner.reference.records.notes()):
        raise NotSeen("no DataLoader with workers")
    return stopped_well(runner, runner.stopped_by(lambda job: os.killpg(job.process.pid, signal.SIGTERM)))


def stopped_well(runner: ScriptRunner, run: Faulted) -> str:
    """Return a message on how a run ended after SIGTERM.

    Raises:
        Failed: the run lost a step, ignored SIGTERM, hung or exited with 0, or its restart failed.
    """
    total = len(runner.steps)
    if run.code is None:
        raise Failed(f"does not end in {run.duration:.0f} s")
    if total and run.done >= total:
        raise Failed(f"ignores TERM and trains to the end; exit {run.code}")
    if run.code == 0:
        raise Failed(f"exit 0 after {run.done} of {total} steps: a scheduler takes it as done")
    words = f"ends after {run.duration:.1f} s, exit {run.code}"
    at = resumed_at(runner, run, saved_at(run))
    if at < run.done:
        raise Failed(f"{words}; {run.done - at} of {run.done} steps lost")
    return f"{words}; no step lost"


def exit_codes(runner: ScriptRunner) -> str:
    """Check that an unfinished job does not exit with 0."""
    killed: Faulted = runner.killed
    stopped: Faulted = runner.terminated
    codes = ["no end" if run.code is None else str(run.code) for run in (killed, stopped)]
    words = f"undisturbed 0, a killed rank {codes[0]}, TERM {codes[1]}"
    recovers = len(killed.attempts) > 1 or killed.in_place
    is_done = stopped.done >= len(runner.steps)
    if killed.code == 0 and not recovers:
        raise Failed(f"{words}: 0 although it is not done")
    if stopped.code == 0 and not is_done:
        raise Failed(f"{words}: 0 although it is not done")
    return words


def leftovers(runner: ScriptRunner) -> str:
    """Check that no process outlives its launcher by `LEFT_GRACE` seconds."""
    for run in (runner.killed, runner.terminated):
        if run.code is None:
            raise Failed(f"the job has not ended {run.duration:.0f} s after a fault")
    if runner.left_behind:
        raise Failed(f"{runner.left_behind} processes outlive their launcher by {LEFT_GRACE:g} s")
    return f"no process outlives its launcher by {LEFT_GRACE:g} s"


def recovery_time(runner: ScriptRunner) -> str:
    """Check that the job resumes after SIGKILL to a rank. The message has the seconds until the next step."""
    run: Faulted = runner.killed
    restarted(runner, run)
    if not run.again:
        raise NotSeen(f"no optimizer step: {ADAPTER}")
    first = run.again[0]
    if run.in_place and len(run.again) > 1:  # surviving ranks may complete the step that the kill interrupted
        first = run.again[1]
    words = "without a new start of the job"
    if run.code != 0:
        words = f"{run.duration:.1f} s of them until the job ended"
    return f"{first.time - run.fault_time:.1f} s from the kill to the next step, {words}"


def lost_work(runner: ScriptRunner) -> str:
    """Check that a resume does not start at step 0. The message contains the number of repeated steps."""
    words = []
    for name, run in (("killed rank", runner.killed), ("TERM", runner.terminated)):
        restarted(runner, run)
        total = len(runner.steps)
        if not total:
            raise NotSeen(f"no optimizer step: {ADAPTER}")
        at = run.done
        if run.again and not run.in_place:
            at = total - len(run.again)
        words.append(f"{name}: {max(0, run.done - at)} of {run.done} steps repeated")
        if at <= 0:
            raise Failed(f"{name}: all {run.done} steps lost")
    return "; ".join(words)


def launcher_killed(runner: ScriptRunner) -> str:
    """Check that the ranks end when their launcher is killed."""
    with runner.job(runner.copy(), pause=runner.pause(3 * NOTICE)) as job:
        runner.middle(job)
        fault_time = time.time()
        job.process.kill()
        is_gone = job.wait(lambda: not job.pids(), min(PATIENCE, runner.patience()))
        duration = time.time() - fault_time
        after = [step for step in job.read().steps() if step.time > fault_time + NOTICE]
        if not is_gone:
            raise Failed(f"{len(job.pids())} processes left {duration:.0f} s after")
        if after:
            raise Failed(f"the ranks train for {after[-1].time - fault_time:.1f} s without their launcher")
        return f"all ranks end within {duration:.1f} s"


def stalled(runner: ScriptRunner) -> str:
    """Check that the job ends after SIGSTOP to a rank."""
    with runner.job(runner.copy(), pause=runner.pause()) as job:
        runner.middle(job)
        fault_time = time.time()
        os.kill(runner.victim(job), signal.SIGSTOP)
        has_ended = job.wait_for_end(min(PATIENCE, runner.patience()))
        duration = time.time() - fault_time
        if not has_ended:
            raise hangs(job.read(), duration, runner.options.stall_limit)
        return f"the job ends after {duration:.0f} s, exit {job.code}"


def hangs(records: Records, seconds: float, limit: float) -> Verdict:
    """Return the verdict on a job that still runs after a rank was stopped.

    The verdict is CannotTell if the timeout of the job's collectives is unknown, or at least ``seconds`` but not above
    ``limit``.

    Args:
        records: records of the job's processes.
        seconds: duration of the wait after the fault, in seconds.
        limit: longest acceptable timeout of collectives, in seconds.
    """
    timeouts = [notes.timeout for notes in records.notes() if notes.timeout is not None]
    if not timeouts:
        return CannotTell(f"no end in {seconds:.0f} s, and its timeout is not known: end it within {PATIENCE:g} s")
    longest = max(timeouts)
    if longest > limit:
        return Failed(f"no end in {seconds:.0f} s; its collectives wait {longest:g} s, more than {limit:g} s")
    if longest >= seconds:
        return CannotTell(f"no end in {seconds:.0f} s, as its collectives wait {longest:g} s: shorten the timeout")
    return Failed(f"hangs: no end in {seconds:.0f} s, although its collectives wait {longest:g} s only")


def two_jobs(runner: ScriptRunner) -> str:
    """Check that two jobs at the same time on one machine both train to their ends."""
    pause = runner.pause(2 * runner.reference.duration)  # the first job trains while the second job starts
    pattern = runner.options.loss_pattern
    with runner.job(runner.copy(), pause=pause) as first:
        first.wait(lambda: first.code is not None or first.progress(pattern), runner.patience())
        with runner.job(runner.copy()) as second:
            for name, job in (("second", second), ("first", first)):
                if not job.wait_for_end(runner.patience()):
                    raise Failed(f"the {name} job hangs: {job.error_line()}")
                if job.code:
                    raise Failed(f"the {name} job exit {job.code}: {job.error_line()}")
    return "both end with exit 0"
