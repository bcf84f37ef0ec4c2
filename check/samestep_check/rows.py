"""The rows of a check. Each row injects a fault or compares runs.

A row's function returns a message if the row passes, and raises a `Verdict` otherwise. `ScriptRunner` caches the runs
that several rows use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from samestep_check import rows_processes, rows_resume, rows_same_step, rows_saves
from samestep_check.runner import ScriptRunner

QUICK = 12  # number of rows that --faults quick runs, from the first


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        title: the row's subject in a few words.
        decide: function that returns the message of a row that passes, and raises a Verdict otherwise.
        starts: usual number of starts of the script, if the rows before this row also run.
        cause: the usual cause of a failure.
        page: path of the documentation page on this fault.
    """

    title: str
    decide: Callable[[ScriptRunner], str]
    starts: int
    cause: str
    page: str


ROWS = {
    "rank-killed": Row(
        "A rank is killed",
        rows_processes.rank_killed,
        2,
        "no checkpoint, or a restart that does not find it",
        "docs/recovery.md",
    ),
    "term": Row(
        "TERM to the job",
        rows_processes.term,
        2,
        "no handler that saves, or a launcher that does not pass it",
        "docs/signals.md",
    ),
    "resume-position": Row(
        "Samples after a resume",
        rows_resume.resume_position,
        1,
        "the position in the epoch is not saved",
        "docs/own_loop.md",
    ),
    "resume-optimizer": Row(
        "Learning rate and optimizer after a resume",
        rows_resume.resume_optimizer,
        0,
        "the optimizer's or the scheduler's state_dict is not saved",
        "docs/own_loop.md",
    ),
    "odd-batch": Row(
        "A batch that N does not divide",
        rows_same_step.odd_batch,
        1,
        "DistributedSampler pads, or DDP averages over ranks",
        "docs/same_step.md",
    ),
    "epoch-order": Row(
        "Order of two epochs",
        rows_same_step.epoch_order,
        0,
        "sampler.set_epoch(epoch) is not called",
        "docs/concepts.md",
    ),
    "evaluation": Row(
        "An evaluation that N does not divide",
        rows_same_step.evaluation,
        1,
        "DistributedSampler pads the evaluation set",
        "docs/same_step.md",
    ),
    "one-rank": Row(
        "N = 1 against N",
        rows_same_step.one_rank,
        0,
        "random numbers by rank, or means over ranks",
        "docs/same_step.md",
    ),
    "exit-codes": Row(
        "Exit codes",
        rows_processes.exit_codes,
        0,
        "an error that is caught, or sys.exit(0)",
        "docs/exit_codes.md",
    ),
    "leftovers": Row(
        "Processes left",
        rows_processes.leftovers,
        0,
        "ranks that do not notice the launcher's end",
        "docs/signals.md",
    ),
    "recovery-time": Row(
        "Seconds to recover",
        rows_processes.recovery_time,
        0,
        "no restart to the end",
        "docs/recovery.md",
    ),
    "lost-work": Row(
        "Steps lost or repeated",
        rows_processes.lost_work,
        0,
        "checkpoints are rare, or not found",
        "docs/recovery.md",
    ),
    "launcher-killed": Row(
        "The launcher is killed",
        rows_processes.launcher_killed,
        1,
        "ranks do not notice that their parent died",
        "docs/signals.md",
    ),
    "stalled": Row(
        "A rank is stopped (SIGSTOP)",
        rows_processes.stalled,
        1,
        "the timeout of collectives is 30 minutes",
        "docs/hangs.md",
    ),
    "save-killed": Row(
        "Killed while saving",
        rows_saves.save_killed,
        2,
        "the checkpoint is written in place, not renamed",
        "docs/recovery.md",
    ),
    "checkpoint-damaged": Row(
        "The newest checkpoint is damaged",
        rows_saves.checkpoint_damaged,
        1,
        "no checksum is stored",
        "docs/recovery.md",
    ),
    "other-n": Row(
        "Resume at another N",
        rows_resume.other_n,
        1,
        "the state is saved by rank",
        "docs/running.md",
    ),
    "two-jobs": Row(
        "Two jobs at once",
        rows_processes.two_jobs,
        2,
        "a fixed port",
        "docs/troubleshooting.md",
    ),
    "all-killed": Row(
        "All processes are killed",
        rows_processes.all_killed,
        2,
        "checkpoints are rare, or not found",
        "docs/recovery.md",
    ),
    "replicas": Row(
        "Equal replicas on all ranks",
        rows_same_step.replicas,
        0,
        "a rank skips a step, or loads other weights",
        "docs/same_step.md",
    ),
    "workers": Row(
        "TERM to the process group",
        rows_processes.workers,
        2,
        "a loader's workers end first, and the rank fails",
        "docs/signals.md",
    ),
    "save-every-write": Row(
        "Killed at each write of a save",
        rows_saves.save_every_write,
        26,
        "the checkpoint has several files, and no rename completes them together",
        "docs/recovery.md",
    ),
    "save-power-cut": Row(
        "A power cut while saving",
        rows_saves.save_power_cut,
        4,
        "no fsync before the rename, and no older checkpoint is used",
        "docs/recovery.md",
    ),
    "disk-full": Row(
        "The disk is full while saving",
        rows_saves.disk_full,
        2,
        "the old checkpoint is overwritten or deleted before the new one is whole",
        "docs/recovery.md",
    ),
}
