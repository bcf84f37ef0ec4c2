"""Run steps of a recorded run again from a copy of a checkpoint, and read the records of the probes.

This module starts the app's launch script, or ``samestep run``, as a program. The ranks load the probes of the folder
``inside`` before the program. The recorded run dir stays unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from samestep import ConfigError, untrusted
from samestep.untrusted import MAX_LINE, shown

from samestep_observe import run_reader
from samestep_observe.recorded import Command, RecordedRun, differences, settings_of
from samestep_observe.run_reader import MetricsReader, SavedCheckpoint, read_losses

INSIDE = Path(__file__).with_name("inside")
DROPPED = ("--track", "--visualdl")  # options that a replay leaves out together with their values
MOST_SHARDS = 10_000  # maximum number of recorded ranks whose samples are listed
STOP_SECONDS = 20.0  # seconds from the stop of this process until the replay is killed
Record = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The steps to run again.

    Attributes:
        run: the recorded run.
        start: the checkpoint to start from; None starts from the seed.
        first: the first step to record in detail.
        last: the last step.
        ranks: the number of ranks.
        export: whether batches and gradients are written.
    """

    run: RecordedRun
    start: SavedCheckpoint | None
    first: int
    last: int
    ranks: int
    export: bool = False

    @property
    def start_step(self) -> int:
        """The number of recorded updates that the replay skips."""
        return self.start.step if self.start else 0

    def describe(self) -> str:
        """Return the plan as a line."""
        origin = f"checkpoint step {self.start_step}" if self.start else "the seed, as no checkpoint is before it"
        steps = run_reader.count_of(self.last - self.start_step, "step")
        ranks = run_reader.count_of(self.ranks, "rank")
        return f"replaying {steps} of {self.run.folder} at {ranks}, from {origin}"


@dataclass(frozen=True)
class Replayed:
    """The outcome of a replay.

    Attributes:
        plan: the steps that were run.
        folder: the run dir of the replay, which is deleted at the end of `replayed`.
        losses: loss of each step, by step.
        header: header of the replay's metrics.jsonl.
        records: the records of the probes, by step, in the order of ranks.
        files: the folder of exported tensors.
    """

    plan: Plan
    folder: Path
    losses: dict[int, float]
    header: dict[str, Any]
    records: dict[int, list[Record]]
    files: Path


def make_plan(
    run: RecordedRun, first: int, last: int, ranks: int | None = None, start: int | None = None, export: bool = False
) -> Plan:
    """Return the plan of a replay of the steps ``first`` to ``last``.

    Args:
        run: the recorded run.
        first: the first step to record in detail.
        last: the last step.
        ranks: number of ranks; None means 1 if the run had --virtual-ranks, and otherwise the run's number.
        start: step of the checkpoint to start from, or 0 for the seed; None means the newest before ``first``.
        export: whether batches and gradients are written.

    Raises:
        ConfigError: the steps are not in ascending order, the run lacks them, or its starts computed them with other
            settings.
    """
    if not 1 <= first <= last:
        raise ConfigError(f"--step {first} --to {last}: give steps from 1, the first one first")
    if last > run.last_step:
        raise ConfigError(f"{run.folder} has the steps 1 to {run.last_step}, not {last}: choose one of them")
    saved = [each for each in run.checkpoints if each.step < first]
    if start is not None:
        saved = [each for each in saved if each.step == start]
    if ranks is None:
        ranks = 1 if run.virtual_ranks else run.ranks
    newest = saved[-1] if saved else None
    check_starts(run, newest.step if newest else 0, last)
    return Plan(run, newest, first=first, last=last, ranks=ranks, export=export)


def check_starts(run: RecordedRun, begin: int, last: int) -> None:
    """Raise ConfigError if the starts that computed the steps after ``begin`` had different settings.

    A replay is one start, so it would round some of the steps otherwise than the run.

    Args:
        run: the recorded run.
        begin: step of the checkpoint from which the replay begins, or 0.
        last: the last step of the replay.
    """
    starts = run.starts_of(begin, last)
    for before, after in pairwise(starts):
        changed = next(differences(*(settings_of_start(run, each, begin) for each in (before, after))), "")
        if changed:
            raise ConfigError(
                f"{run.folder} was resumed at step {after.step} with other settings ({changed}), and has no checkpoint "
                "from which a replay could begin after it: keep more by --keep-checkpoints"
            )


def settings_of_start(run: RecordedRun, start: run_reader.Start, begin: int) -> dict[str, Any]:
    """Return the settings of a start that affect the bits of a replay.

    Args:
        run: the recorded run.
        start: a start of the run.
        begin: step of the checkpoint from which the replay begins, or 0.
    """
    options = run_reader.get_object(start.header, "options")
    found = settings_of(start.header)
    found["--threads"] = options.get("threads")
    if begin == 0:
        found["--init-from"] = options.get("init_from")
    if not run.virtual_ranks:
        found["ranks"] = run_reader.world_size_of(start.header, {})
    return found


@contextlib.contextmanager
def replayed(plan: Plan, program: Path | None = None) -> Iterator[Replayed]:
    """Run a replay, yield its outcome, and delete the temporary run dir afterwards.

    Args:
        plan: the steps to run again.
        program: value of --program; None without the option.

    Raises:
        ConfigError: the run cannot be started again, the replay failed, or the dataset has changed.
    """
    command = plan.run.command
    words = start_words(plan, command, program)
    with tempfile.TemporaryDirectory(prefix="samestep-replay-") as temporary:
        folder = Path(os.path.realpath(temporary))
        run_dir = folder / "run"
        records = folder / "records"
        records.mkdir()
        copy_start(plan, run_dir)
        config = {
            "first": plan.first,
            "last": plan.last,
            "ranks": min(plan.run.ranks, MOST_SHARDS),
            "records": str(records),
            "export": plan.export,
        }
        if program is not None:
            words += ["--max-restarts=0", f"--run-dir={run_dir}", str(program.resolve())]
        words += [*kept_arguments(command.arguments), *overrides(plan, run_dir)]
        with (folder / "output").open("w+b") as output:
            code = run_to_end(words, command, config=config, output=output)
            output.seek(0)
            text = output.read().decode(errors="replace")
        if code:
            reason = first_error(text, code).replace(str(run_dir), str(plan.run.folder))
            raise ConfigError(f"the replay failed: {reason}")
        metrics = MetricsReader(run_dir)
        metrics.read()
        check_data(plan.run, metrics.header)
        yield Replayed(
            plan,
            folder=run_dir,
            losses=read_losses(run_dir, metrics),
            header=metrics.header,
            records=read_records(records),
            files=records,
        )


def copy_start(plan: Plan, run_dir: Path) -> None:
    """Create a replay's run dir, with a copy of the checkpoint ``plan.start``, if any.

    Raises:
        ConfigError: the checkpoint cannot be copied.
    """
    (run_dir / "log").mkdir(parents=True)
    if plan.start is None:
        return
    try:
        shutil.copytree(plan.start.folder, run_dir / "checkpoints" / plan.start.folder.name)
    except (OSError, shutil.Error) as error:
        raise ConfigError(f"cannot copy {plan.start.folder}: {shown(error, limit=200)}") from error


# --- the command -----------------------------------------------------------------------------------------------------


def start_words(plan: Plan, command: Command, program: Path | None) -> list[str]:
    """Return the first words of the command that starts the run's program.

    For safety, these words never contain a path from the run dir's files. Without ``program``, the command starts the
    launch script that `find_script` returns for the run's app.

    Args:
        plan: the steps to run again.
        command: the command that the run recorded.
        program: value of --program; None without the option.

    Raises:
        ConfigError: the app's runs cannot be replayed, or the program is unknown.
    """
    app = plan.run.app
    if program is not None:
        return [sys.executable, "-m", "samestep", "run", f"-n{plan.ranks}"]
    if not plan.run.can_be_replayed:
        raise ConfigError(f"{plan.run.folder} is a run of {app}, whose steps samestep replay cannot run again")
    script = find_script(app)
    if script is None:
        name = shown(command.program, limit=200)
        raise ConfigError(
            f"{plan.run.folder} is a run of {name}, not of an app of this project: name it by --program {name}"
        )
    return ["bash", str(script), str(plan.ranks)]


def find_script(app: str) -> Path | None:
    """Return the launch script of an app; None if it is not found.

    The function searches the project of this file, the folders that hold this Python's environment, and the working
    directory with its parents.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]{1,100}", app):
        return None
    here = Path.cwd()
    for root in (Path(__file__).resolve().parents[2], *Path(sys.prefix).parents, here, *here.parents):
        script = root / "scripts" / f"run_{app}.sh"
        if script.is_file() and (root / "apps" / app / "train.py").is_file():
            return script
    return None


def kept_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a run's arguments without the options DROPPED, which would write to trackers."""
    kept: list[str] = []
    drops_value = False
    for word in arguments:
        is_dropped = drops_value or word.partition("=")[0] in DROPPED
        drops_value = word in DROPPED
        if not is_dropped:
            kept.append(word)
    return kept


def overrides(plan: Plan, run_dir: Path) -> list[str]:
    """Return the options that a replay changes. These options do not change the arithmetic of a step."""
    options = [f"--run-dir={run_dir}", "--resume", f"--max-steps={plan.last}", "--keep-checkpoints=2", "--quiet"]
    known = plan.run.options
    if "evaluate_every" in known:
        options.append("--evaluate-every=0")
    if "checkpoint_every" in known:
        options.append("--checkpoint-every=0")
    if "max_restarts" in known:
        options.append("--max-restarts=0")
    return options


def run_to_end(words: Sequence[str], command: Command, config: Mapping[str, Any], output: IO[bytes]) -> int:
    """Run the command of a replay, and return its exit code. A signal that stops this process also stops the replay.

    Args:
        words: the command to run.
        command: the recorded command, for its folder and OMP_NUM_THREADS.
        config: settings of the probes.
        output: file that receives standard output and standard error.
    """
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = [str(INSIDE), *map(os.path.abspath, given)]  # absolute, because the job has another working directory
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "SAMESTEP_INSIDE": json.dumps(config)}
    environ.pop("OMP_NUM_THREADS", None)
    if command.threads:
        environ["OMP_NUM_THREADS"] = command.threads
    folder = command.folder
    if folder is not None and not folder.is_dir():
        folder = None  # the folder was removed after the run
    before = {number: signal.signal(number, _exit_at_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(
            words, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            return process.wait()
        finally:
            _stop(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_at_signal(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the launch script, which then stops the ranks, if the script still runs."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def first_error(output: str, code: int) -> str:
    """Return the first error line of a failed replay's output, or the exit code and the output's last line."""
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    if lines:
        return shown(lines[0].removeprefix("error: "), limit=MAX_LINE)
    last = shown(output.strip().rpartition("\n")[2], limit=200)
    return f"exit code {code}: {last}"


def check_data(run: RecordedRun, header: Mapping[str, Any]) -> None:
    """Raise ConfigError if the dataset of a replay differs from the dataset of the recorded run."""
    now = header.get("dataset_fingerprint")
    if run.fingerprint is not None and now != run.fingerprint:
        before = shown(run.fingerprint[:12])
        raise ConfigError(
            f"{run.folder} was trained on other data: the files have changed since "
            f"(SHA-256 {before} in metrics.jsonl, {shown(str(now)[:12])} now): put the former files back"
        )


# --- records of the ranks --------------------------------------------------------------------------------------------


def read_records(folder: Path) -> dict[int, list[Record]]:
    """Return the records of all ranks, by step and in the order of ranks."""
    found: dict[int, list[Record]] = {}
    for path in sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem[5:])):
        for line in untrusted.read_bytes(path).splitlines():
            record = untrusted.parse_object(line)
            found.setdefault(int(record["step"]), []).append(record)
    return found
