"""Rows about checkpoints: kills at each write, power cuts, damage and full disks."""

from __future__ import annotations

import re
import resource
import shutil
import zipfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from samestep_check import states
from samestep_check.job import Job
from samestep_check.records import Records, Step
from samestep_check.rows_resume import in_series, possible_steps, restarted, resumed_at
from samestep_check.runner import PATIENCE, Faulted, Recording, Restart, ScriptRunner, relative, warnings_in
from samestep_check.series import Save, may_be_read, moves, series_of, without_digits
from samestep_check.verdicts import CannotTell, Failed, NotSeen, OutOfTime

BESIDE = 5.0  # maximum number of seconds between the writes of one checkpoint's files
FEWEST = 3  # minimum number of tested states for a pass if the row's time runs out
PYTHON_ONLY = "; the kernel refuses a filter, so only Python's opens, renames and deletions are seen"


# --- a kill at an open or a rename, and damage -----------------------------------------------------------------------


def save_killed(runner: ScriptRunner) -> str:
    """Check that a kill in the middle of a save leaves the previous checkpoint usable."""
    writes = runner.reference.records.opens()
    read: set[str] = set()
    if len(in_series(writes)) > 1:
        read = read_by_restart(runner.killed)
    number, planned = second_save(writes, read)
    run = runner.faulted(None, kill_at=planned.kind, kill_save=number)
    fatal = fatal_write(run.records, planned.kind, number)
    if fatal is None:
        raise CannotTell(f"no rank came to {planned.kind} number {number} of a checkpoint, as in the undisturbed run")
    steps: list[int] = []
    saves = run.records.saves()
    for save in reversed(saves):
        is_earlier = save.in_background and save.time < fatal.time  # a thread may save twice after the same step
        if 0 < save.step < fatal.step or is_earlier:
            steps += possible_steps(save, saves)
    words = f"killed at the {fatal.kind} of the checkpoint of step {fatal.step}{at_line(fatal.line)}"
    try:
        at = resumed_at(runner, run, steps)
    except Failed as failed:
        raise Failed(f"{words}: {failed}") from None
    return f"{words}; resumes at step {at}"


def at_line(line: str | None) -> str:
    """Return a line of the script in parentheses, or an empty string if the line is unknown."""
    return f" ({line})" if line else ""


def read_by_restart(run: Faulted) -> set[str]:
    """Return the paths of the checkpoint files that a restart read before its first step; no paths if unknown."""
    if run.restart is None or run.restart.records is None:
        return set()
    found: set[str] = run.restart.records.reads()
    return found


def fatal_write(records: Records, kind: str, number: int) -> Save | None:
    """Return the write number ``number``, from 1, of a kind, at which a rank was killed; None if no rank came to it.

    Checkpoints that are saved by time have other steps in each run.

    Args:
        records: the records of the run with the kill.
        kind: kind of the write: open or rename.
        number: number of the write among the process's writes of this kind.
    """
    for process in records.processes:
        writes = [save for save in process.saves if save.kind == kind]
        if len(writes) >= number:
            return writes[number - 1]
    return None


def second_save(writes: Sequence[Save], read: Iterable[str] = ()) -> tuple[int, Save]:
    """Return the number, from 1, of the first write to a second checkpoint, and this write.

    Checkpoints before the first step do not count, because a restart from them starts over at step 0. If the script
    writes several series of checkpoints, the write belongs to the series that restarts read. Among these, it belongs
    to the series whose second checkpoint is the latest, because all have a first checkpoint then.

    Args:
        writes: all writes of a process to checkpoints, in order. The number counts the writes of the same kind.
        read: paths of the checkpoint files that a restart reads.

    Raises:
        NotSeen: fewer than two checkpoints are written.
    """
    if not writes:
        raise NotSeen("no checkpoint is written where Python sees it")
    known = moves(writes)
    names = {without_digits(path) for path in read}
    later = [save for save in writes if save.step > 0] or writes
    used = [save for save in later if may_be_read(series_of(save, known), names)] or later
    second = [_second(series) for series in in_series(used)]
    found = [save for save in second if save is not None]
    latest = max((save.step for save in found), default=0)
    fatal = next((save for save in found if save.step == latest), None) or _second(used)
    if fatal is None:
        raise NotSeen("one checkpoint only is written where Python sees it")
    same_kind = [save for save in writes if save.kind == fatal.kind]
    return same_kind.index(fatal) + 1, fatal


def _second(writes: Sequence[Save]) -> Save | None:
    """Return the first write to the second checkpoint of a series. If any writes are opens, only the opens count."""
    opens = [save for save in writes if save.kind == "open"]
    saves = opens or writes
    paths = {saves[0].path}
    for before, save in pairwise(saves):
        # A thread may write a checkpoint during two steps, or two checkpoints after the same step.
        is_later = save.step > before.step + save.in_background
        is_again = save.in_background and save.path in paths
        if is_later or is_again:
            return save
        paths.add(save.path)
    return None


def checkpoint_damaged(runner: ScriptRunner) -> str:
    """Check that the restarted script refuses or skips the newest checkpoint after a bit of it is flipped."""
    first: Faulted = runner.stopped
    restarted(runner, first)  # the restart must work without damage
    damaged: list[Path] = []

    def harm(_: Path) -> None:
        saves = first.records.saves()
        pattern = runner.options.checkpoint
        files = newest_files(saves, pattern, read_by_restart(first)) or newest_files(saves, pattern)
        if not files:
            raise NotSeen("no checkpoint is written where Python sees it")
        damaged.append(max(files, key=lambda path: path.stat().st_size))
        damage(damaged[0])

    run = runner.again(first, runner.ranks, harm)
    name = damaged[0].name
    if run.restart and run.restart.code:
        return f"a byte of {name}: refused, exit {run.restart.code}: {run.restart.error}"
    restarted(runner, run)
    total = len(runner.steps)
    at = total - len(run.again)
    if at <= 0 and is_first(damaged[0], first.records.saves()):
        raise CannotTell(f"a byte of {name}: starts over at step 0, as no older checkpoint was saved: save more often")
    if at <= 0:
        raise Failed(f"a byte of {name}: starts over at step 0")
    if at >= total - len(first.again):
        raise Failed(f"a byte of {name}: loaded without a word, as if it were whole")
    return f"a byte of {name}: resumes an older one, at step {at}"


def is_first(path: Path, saves: Sequence[Save]) -> bool:
    """Return whether a file belongs to the only checkpoint of its series so far, except those before the first step."""
    steps: set[int] = set()
    for series in in_series(saves):
        if any(path.is_relative_to(save.path) for save in series):
            steps.update(save.step for save in series if save.step > 0)
    return len(steps) == 1


def newest_files(saves: Iterable[Save], pattern: str, read: Collection[str] = ()) -> list[Path]:
    """Return the files of the newest checkpoint that still exists and that a restart may have read.

    Args:
        saves: the writes of all checkpoints, in order.
        pattern: regular expression of checkpoints' names.
        read: paths of the checkpoint files that the restart has read.
    """
    saves = [*saves]
    steps = {save.path: save.step for save in saves}  # step of the newest write of each file
    files: list[Path] = []
    newest = -1
    for save in saves:
        found = _files_of(Path(save.path), pattern)
        found = [each for each in found if steps.get(str(each), save.step) == save.step]
        found = [each for each in found if may_be_read(str(each), read)]
        if found and save.step != newest:
            files.clear()
            newest = save.step
        files += found
    return files


def _files_of(path: Path, pattern: str) -> list[Path]:
    """Return the files of a checkpoint. Links are left out, because each write to a linked file is recorded itself."""
    if path.is_symlink():
        return []
    if path.is_dir():
        return [each for each in path.rglob("*") if each.is_file() and not each.is_symlink()]
    if path.is_file():
        return _beside(path, pattern)
    return []


def _beside(path: Path, pattern: str) -> list[Path]:
    """Return the checkpoint files in a file's folder that were written within `BESIDE` seconds of this file.

    Python's audit hook does not report some of these files, such as safetensors.
    """
    moment = path.stat().st_mtime
    named = [each for each in path.parent.iterdir() if re.search(pattern, each.name)]
    files = [each for each in named if each.is_file() and not each.is_symlink()]
    return [each for each in files if abs(each.stat().st_mtime - moment) < BESIDE]


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file, or of the largest member of a zip file."""
    content = bytearray(path.read_bytes())
    place = len(content) // 2
    if zipfile.is_zipfile(path):
        place = _middle_of_member(path, content)
    content[place] ^= 0x40
    path.write_bytes(content)


def _middle_of_member(path: Path, content: bytes | bytearray) -> int:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    data = [each for each in entries if "/data/" in each.filename] or entries
    entry = max(data, key=lambda each: each.compress_size)
    name_size = entry.header_offset + 26  # offset of the field that contains the name's length
    extra_size = name_size + 2
    lengths = [int.from_bytes(content[place : place + 2], "little") for place in (name_size, extra_size)]
    return entry.header_offset + 30 + sum(lengths) + entry.compress_size // 2


# --- the states of a save --------------------------------------------------------------------------------------------


class Resumed(NamedTuple):
    """The steps at which a restart may have resumed."""

    steps: list[int]
    problem: str  # empty if the restart works


def resumed(runner: ScriptRunner, restart: Restart) -> Resumed:
    """Return the steps of the undisturbed run that equal the first step of a restart."""
    if not restart.steps:
        if restart.code is None:
            return Resumed([], "the restart takes no step")
        if restart.code:
            return Resumed([], f"the restart fails: exit {restart.code}: {restart.error}")
        return Resumed([len(runner.steps)], "")  # the run was already complete
    found = restart.steps[0]
    bound = runner.bound()
    steps = [k for k, step in enumerate(runner.steps) if is_same(step, found, bound)]
    return Resumed(steps, "")


def is_same(one: Step, other: Step, bound: float) -> bool:
    """Return whether two steps agree in samples, learning rates, optimizer class, and recorded losses and weights.

    The optimizers may have other numbers: a restart in a later phase of the training may create fewer optimizers.

    Args:
        one: a step of the undisturbed run.
        other: the first step of a restart.
        bound: largest relative difference of losses, and of norms of weights.
    """
    if one.indices != other.indices or one.lr != other.lr or one.kind != other.kind:
        return False
    for a, b in ((one.loss, other.loss), (one.weights_before, other.weights_before)):
        if a is not None and b is not None and relative(a, b) > bound:
            return False
    return True


def restart_from(runner: ScriptRunner, state: states.State, lost: Iterable[str] = ()) -> Resumed:
    """Restart the script from a recorded state until the first step. Return the undisturbed steps that equal this step.

    Args:
        runner: runner that restarts the script.
        state: recorded state of the folder to restore.
        lost: files of the state that are restored empty.
    """
    work = runner.recording.work  # restart in the recorded run's folder, because files may contain the folder's path
    shutil.rmtree(work)
    states.restore(state.entries, work, lost)
    return resumed(runner, runner.first_step(work))


def baseline(runner: ScriptRunner, recording: Recording) -> int:
    """Return the step at which a restart from the state before the recorded save resumes.

    Raises:
        Failed: the restart fails.
        CannotTell: the restart begins at step 0, or its first step equals no step of the undisturbed run.
    """
    results = runner.results
    if "baseline" not in results:
        results["baseline"] = _baseline(runner, recording)
    return int(results["baseline"])


def _baseline(runner: ScriptRunner, recording: Recording) -> int:
    first = next(state for state in recording.states if state.call >= recording.save.calls[0])
    found = restart_from(runner, first)
    if found.problem:
        raise Failed(f"before the save of step {recording.save.done}{at_line(recording.line)}: {found.problem}")
    if not found.steps:
        raise CannotTell("the first step after a resume has other samples or weights than undisturbed")
    at = max(found.steps)
    if at == 0:
        raise CannotTell(f"before the save of step {recording.save.done}, a restart starts over at step 0")
    return at


def save_every_write(runner: ScriptRunner) -> str:
    """Check that a kill at any of up to --points file system calls of a save leaves a usable checkpoint."""
    recording: Recording = runner.recording
    save = recording.save
    wanted = states.states_of(save, recording.calls, recording.states, runner.options.points)
    before = baseline(runner, recording)
    found = {before}
    tried = 1
    for state in wanted[1:]:
        try:
            at = restart_from(runner, state)
        except OutOfTime:
            if tried < FEWEST:
                raise
            break
        problem = problem_of(at, before)
        if problem:
            moment = states.words_of(state, save, recording.calls)
            raise Failed(f"killed {moment}{at_line(recording.line)}: {problem}")
        found.update(at.steps[-1:])
        tried += 1
    steps = " or ".join(map(str, sorted(found)))
    count = f"{tried} of {len(wanted)}" if tried < len(wanted) else f"{tried}"
    words = f"{count} states of the save of step {save.done}: each resumes, at step {steps}"
    return words if recording.is_complete else words + PYTHON_ONLY


def problem_of(found: Resumed, least: int) -> str:
    """Return the fault of a restart that must resume at step ``least`` or later, as text; empty if it works."""
    if found.problem:
        return found.problem
    if not found.steps:
        return "resumes with other samples or weights than undisturbed"
    if max(found.steps) == 0:
        return "starts over at step 0"
    if max(found.steps) < least:
        return f"resumes at step {max(found.steps)}, although step {least} was saved"
    return ""


def save_power_cut(runner: ScriptRunner) -> str:
    """Check that a power cut during a save leaves a usable checkpoint."""
    recording: Recording = runner.recording
    save = recording.save
    if not recording.is_complete:
        raise NotSeen("the kernel refuses a filter, and Python's audit hook does not see fsync")
    moved = states.renames(save, recording.calls)
    if not moved:
        raise NotSeen("the save renames no file")
    cuts = states.cuts(save, recording.calls, recording.states)
    if not cuts:
        return f"each file of the save of step {save.done} is fsynced before its rename"
    baseline(runner, recording)
    words = f"{', '.join(sorted(cuts[-1].lost))} without an fsync before the rename"
    for cut in reversed(cuts[-runner.options.points :]):
        problem = problem_of(restart_from(runner, cut.state, cut.lost), least=1)
        if problem:
            names = ", ".join(sorted(cut.lost))
            raise Failed(f"{names} is empty, as no fsync precedes its rename{at_line(recording.line)}: {problem}")
    return f"{words}; if it is empty, an earlier checkpoint is used"


# --- a full disk -----------------------------------------------------------------------------------------------------


class FullRun(NamedTuple):
    """A run whose disk was full after the middle of a save."""

    problem: str  # what the job could not write, for the message
    code: int | None  # exit code; None if the job hangs
    error: str
    is_silent: bool  # the output has no more warnings than the output of an undisturbed run


def disk_full(runner: ScriptRunner) -> str:
    """Check that a job whose disk is full fails or warns, and that the previous checkpoint loads."""
    recording: Recording = runner.recording
    before = baseline(runner, recording)
    work = runner.copy()
    if recording.is_complete:
        run = run_on_full_disk(runner, recording, work)
    else:
        run = run_with_short_files(runner, recording, work)
    where = f"{run.problem}{at_line(recording.line)}"
    if run.code is None:
        raise Failed(f"{where}: the job hangs")
    if run.code == 0 and run.is_silent:
        raise Failed(f"{where}: exit 0 without an error or a warning")
    problem = problem_of(resumed(runner, runner.first_step(work)), before)
    if problem:
        raise Failed(f"{where}: exit {run.code}; then {problem}")
    if run.code == 0:
        return f"{where}: trains on with a warning; a restart resumes"
    return f"{where}: exit {run.code}: {run.error}; a restart resumes"


def run_on_full_disk(runner: ScriptRunner, recording: Recording, work: Path) -> FullRun:
    """Run the script, fail its writes with ENOSPC after the middle of a save, and return the run.

    Args:
        runner: runner that starts the script.
        recording: the calls of an earlier run, and the save.
        work: copied folder in which the script runs.

    Raises:
        CannotTell: no write of the job has failed, or the row has no time to wait for the job's end.
    """
    running: list[Job] = []
    pattern = runner.options.loss_pattern

    def done() -> int:
        return max((job.progress(pattern) for job in running), default=0)

    disk = states.FullDisk(work, recording.save, recording.calls, done)
    with runner.job(work, pause=runner.pause(), calls=runner.calls(work, disk)) as job:
        running.append(job)
        job.wait(lambda: disk.path or job.code is not None, runner.patience())
        run = _ended(runner, job)
        if not disk.path:
            raise CannotTell(f"no write after step {recording.save.done}")
        return run._replace(problem=f"no space for {disk.path}")


def run_with_short_files(runner: ScriptRunner, recording: Recording, work: Path) -> FullRun:
    """Run the script, limit the size of its files before a save, and return the run.

    The limit is half of the size of the largest checkpoint file. This limit needs no seccomp filter.

    Args:
        runner: runner that starts the script.
        recording: the calls of an earlier run, and the save.
        work: copied folder in which the script runs.

    Raises:
        OutOfTime: the row has no time to wait for the job's end.
    """
    save = recording.save
    own = [recording.calls[number] for number in save.calls]
    sizes = {call.size: call.path for call in own if call.kind != "unlink"}  # a deleted file is an older checkpoint
    largest = max(sizes)
    pattern = runner.options.loss_pattern
    with runner.job(work, pause=runner.pause()) as job:
        job.wait(lambda: job.code is not None or job.progress(pattern) >= save.done - 1, runner.patience())
        for pid in job.pids():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest // 2, largest // 2))
        problem = f"{sizes[largest]} cannot grow beyond {largest // 2} bytes (the kernel refuses a filter)"
        return _ended(runner, job)._replace(problem=problem)


def _ended(runner: ScriptRunner, job: Job) -> FullRun:
    """Wait for the end of a job whose disk is full, and return the run with an empty ``problem``."""
    patience = runner.patience()
    has_ended = job.wait_for_end(min(PATIENCE, patience))
    if not has_ended and patience < PATIENCE:
        raise OutOfTime
    is_silent = warnings_in(job.output()) <= runner.reference.warnings
    return FullRun("", job.code if has_ended else None, job.error_line(), is_silent)
