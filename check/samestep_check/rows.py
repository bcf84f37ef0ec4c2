"""The rows of a check: each injects a fault or asks a question, and returns in words what it saw.

A row that passes returns; the other verdicts are exceptions. Rows share the runs that `ScriptRunner` keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from samestep_check import rows_processes, rows_resume, rows_same_step, rows_saves
from samestep_check.runner import ScriptRunner

QUICK = 12  # first rows


class Row(NamedTuple):
    """A row: its title, the function that decides it, the usual cause of a failure, and the page that mends it."""

    title: str
    decide: Callable[[ScriptRunner], str]
    cause: str
    page: str


ROWS = {
    "rank-killed": Row(
        "A rank is killed",
        rows_processes.rank_killed,
        "no checkpoint, or a restart that does not find it",
        "docs/recovery.md",
    ),
    "term": Row(
        "TERM to the job",
        rows_processes.term,
        "no handler that saves, or a launcher that does not pass it",
        "docs/signals.md",
    ),
    "resume-position": Row(
        "Samples after a resume",
        rows_resume.resume_position,
        "the position in the epoch is not saved",
        "docs/own_loop.md",
    ),
    "resume-optimizer": Row(
        "Learning rate and optimizer after a resume",
        rows_resume.resume_optimizer,
        "the optimizer's or the scheduler's state_dict is not saved",
        "docs/own_loop.md",
    ),
    "odd-batch": Row(
        "A batch that N does not divide",
        rows_same_step.odd_batch,
        "DistributedSampler pads, or DDP averages over ranks",
        "docs/same_step.md",
    ),
    "epoch-order": Row(
        "Order of two epochs",
        rows_same_step.epoch_order,
        "sampler.set_epoch(epoch) is not called",
        "docs/concepts.md",
    ),
    "evaluation": Row(
        "An evaluation that N does not divide",
        rows_same_step.evaluation,
        "DistributedSampler pads the evaluation set",
        "docs/same_step.md",
    ),
    "one-rank": Row(
        "N = 1 against N",
        rows_same_step.one_rank,
        "random numbers by rank, or means over ranks",
        "docs/same_step.md",
    ),
    "exit-codes": Row(
        "Exit codes",
        rows_processes.exit_codes,
        "an error that is caught, or sys.exit(0)",
        "docs/exit_codes.md",
    ),
    "leftovers": Row(
        "Processes left",
        rows_processes.leftovers,
        "ranks that do not notice the launcher's end",
        "docs/signals.md",
    ),
    "recovery-time": Row(
        "Seconds to recover",
        rows_processes.recovery_time,
        "no restart to the end",
        "docs/recovery.md",
    ),
    "lost-work": Row(
        "Steps lost or repeated",
        rows_processes.lost_work,
        "checkpoints are rare, or not found",
        "docs/recovery.md",
    ),
    "launcher-killed": Row(
        "The launcher is killed",
        rows_processes.launcher_killed,
        "ranks do not notice that their parent died",
        "docs/signals.md",
    ),
    "stalled": Row(
        "A rank is stopped (SIGSTOP)",
        rows_processes.stalled,
        "the timeout of collectives is 30 minutes",
        "docs/hangs.md",
    ),
    "save-killed": Row(
        "Killed while saving",
        rows_saves.save_killed,
        "the checkpoint is written in place, not renamed",
        "docs/recovery.md",
    ),
    "checkpoint-damaged": Row(
        "The newest checkpoint is damaged",
        rows_saves.checkpoint_damaged,
        "no checksum is stored",
        "docs/recovery.md",
    ),
    "other-n": Row(
        "Resume at another N",
        rows_resume.other_n,
        "the state is saved by rank",
        "docs/running.md",
    ),
    "two-jobs": Row(
        "Two jobs at once",
        rows_processes.two_jobs,
        "a fixed port",
        "docs/troubleshooting.md",
    ),
    "all-killed": Row(
        "All processes are killed",
        rows_processes.all_killed,
        "checkpoints are rare, or not found",
        "docs/recovery.md",
    ),
    "replicas": Row(
        "Equal replicas on all ranks",
        rows_same_step.replicas,
        "a rank skips a step, or loads other weights",
        "docs/same_step.md",
    ),
    "workers": Row(
        "TERM to the process group",
        rows_processes.workers,
        "a loader's workers end first, and the rank fails",
        "docs/signals.md",
    ),
    "save-every-write": Row(
        "Killed at each write of a save",
        rows_saves.save_every_write,
        "the checkpoint has several files, and no rename completes them together",
        "docs/recovery.md",
    ),
    "save-power-cut": Row(
        "A power cut while saving",
        rows_saves.save_power_cut,
        "no fsync before the rename, and no older checkpoint is used",
        "docs/recovery.md",
    ),
    "disk-full": Row(
        "The disk is full while saving",
        rows_saves.disk_full,
        "the old checkpoint is overwritten or deleted before the new one is whole",
        "docs/recovery.md",
    ),
}
