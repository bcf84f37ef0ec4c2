"""Check the files of a run against each other, without running a step again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from samestep import ConfigError, checkpoint, step_losses, trace, untrusted
from samestep.checkpoint import Checkpoint, CorruptCheckpoint
from samestep.untrusted import shown

from samestep_observe import run_reader
from samestep_observe.recorded import RecordedRun, has_same_bits
from samestep_observe.run_reader import count_of, finite_number, get_object, non_negative_int

METRICS = "metrics.jsonl"
RESULT = "result.json"
WEIGHTS = "model.safetensors"
MOST_PROBLEMS = 1000  # maximum number of counted problems of a file
# Fields of a result that repeat an option.
REPEATED = ("dataset", "dtype", "global_batch_size", "seed")


class Finding(NamedTuple):
    """A claim about a file, and the problem that contradicts the claim; "" if the claim holds."""

    file: str
    claim: str
    problem: str = ""


class Line(NamedTuple):
    """A line of metrics.jsonl: its number in the file, from 1, and its object."""

    number: int
    values: Mapping[str, Any]


def check(run: RecordedRun) -> list[Finding]:
    """Return the findings about all files of a run."""
    return [
        *check_metrics(run),
        *check_losses(run),
        *check_trace(run),
        *check_checkpoints(run),
        *check_result(run),
    ]


def _finding(file: str, claim: str, problems: Iterator[str]) -> Finding:
    """Return a finding with the first problem, and the number of the other problems."""
    found = list(islice(problems, MOST_PROBLEMS))
    if not found:
        return Finding(file, claim)
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Finding(file, claim, found[0] + others)


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


def check_metrics(run: RecordedRun) -> Iterator[Finding]:
    """Check that metrics.jsonl has only valid lines, and each expected step once."""
    content = untrusted.read_bytes(run.folder / METRICS)
    lines, problems = read_lines(content)
    steps = [line for line in lines if "step" in line.values]
    claim = count_of(len(steps), "line")
    if problems:
        yield Finding(METRICS, claim, problems[0])
        return
    yield _finding(METRICS, f"{claim}, each step once", order_problems(lines))
    if run.can_be_replayed:  # other runs may log at other steps
        yield _finding(METRICS, "no line is missing", gaps(run, steps))


def read_lines(content: bytes) -> tuple[list[Line], list[str]]:
    """Return the lines of a metrics.jsonl, and the problems of lines that are not JSON objects."""
    lines: list[Line] = []
    problems = []
    texts = content.split(b"\n")
    if texts.pop():
        problems.append("its last line is cut off")
    for number, text in enumerate(texts, start=1):
        values = run_reader.parse(text)
        if values is None:
            problems.append(f"line {number} is no JSON object")
        else:
            lines.append(Line(number, values))
    return lines, problems


def order_problems(lines: list[Line]) -> Iterator[str]:
    """Yield a text for each line at a wrong place, from the first line to the last.

    The first line must be a header, steps must ascend, and a resume must not begin before the previous line's step.
    """
    if not lines or "step" in lines[0].values or "resumed" in lines[0].values:
        yield "its first line is no header"
    last = Line(0, {"step": 0, "epoch": 0, "samples_seen": 0})
    for line in lines[1:]:
        if "resumed" in line.values:
            start = get_object(line.values, "resumed").get("step")
            if non_negative_int(start) is None or start < last.values["step"]:
                yield f"line {line.number} resumes from step {shown(start)}, before the line above it"
            continue
        problem = _step_problem(line.values, last.values)
        if problem:
            yield f"line {line.number}: {problem}"
        else:
            last = line


def _step_problem(values: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return the reason why a line cannot follow the previous line; "" if it can."""
    for name, least in (("step", 1), ("epoch", 0), ("samples_seen", 1)):
        value = non_negative_int(values.get(name))
        if value is None:
            return f"{name} is {shown(values.get(name))}"
        if value < before[name] + least:
            return f"{name} {value} follows {before[name]}"
    if finite_number(values.get("loss")) is None:
        return f"loss is {shown(values.get('loss'))}"
    return ""


def gaps(run: RecordedRun, steps: list[Line]) -> Iterator[str]:
    """Yield a text for each multiple of --log-every, and each step of a checkpoint, that has no line."""
    present = {line.values["step"] for line in steps if non_negative_int(line.values.get("step"))}
    last = run.last_step if run.is_finished else run.metrics.step or 0
    bounds = [*run.metrics.starts, run_reader.Start(last, {})]
    for start, end in pairwise(bounds):
        every = non_negative_int(get_object(start.header, "options").get("log_every"))
        if every:
            first = start.step // every * every + every
            yield from _without_line(range(first, end.step + 1, every), present)
    yield from _without_line([each.step for each in run.checkpoints if each.step <= last], present)


def _without_line(steps: Iterable[int], present: Set[int]) -> Iterator[str]:
    for step in steps:
        if step not in present:
            yield f"step {step} has no line"


# --- log/losses.bin --------------------------------------------------------------------------------------------------


def check_losses(run: RecordedRun) -> Iterator[Finding]:
    """Check that log/losses.bin has each step once, and the same losses as metrics.jsonl."""
    if not run.can_be_replayed or "command" not in run.header:
        return  # the run records no losses of single steps, or an earlier version wrote the run
    records = step_losses.read(run.folder)
    yield _finding(step_losses.NAME, f"{count_of(len(records), 'step')}, each once", _loss_problems(run, records))
    yield _finding(step_losses.NAME, f"the losses of {METRICS}", _unlike_losses(run, records))


def _loss_problems(run: RecordedRun, records: Any) -> Iterator[str]:
    path = run.folder / step_losses.NAME
    size = path.stat().st_size if path.is_file() else 0
    if size % step_losses.RECORD.itemsize:
        yield "its last record is cut off"
    steps = records["step"]
    wrong = np.flatnonzero(steps != np.arange(1, len(steps) + 1))
    if wrong.size:
        place = int(wrong[0])
        yield f"record {place + 1} is of step {int(steps[place])}"
    last = run.metrics.step or 0
    if len(steps) < last:
        yield f"it ends at step {len(steps)}, and {METRICS} at {last}"
    if run.is_finished and len(steps) > last:
        yield f"it ends at step {len(steps)}, and the finished run at {last}"


def _unlike_losses(run: RecordedRun, records: Any) -> Iterator[str]:
    losses = dict(zip(records["step"].tolist(), records["loss"].tolist()))
    curve = run.metrics.curves.get("loss")
    if curve is None:
        return
    for step, loss in zip(curve.steps, curve.values):
        if step in losses and not has_same_bits(loss, losses[step]):
            yield f"step {step} has {losses[step]!r}, and {loss!r} in {METRICS}"


# --- log/trace.jsonl -------------------------------------------------------------------------------------------------


def check_trace(run: RecordedRun) -> Iterator[Finding]:
    """Check that log/trace.jsonl, if it exists, has steps of the run in ascending order."""
    path = run.folder / trace.NAME
    if not path.exists():
        return
    content = untrusted.read_bytes(path)
    length = trace.length_until(content, run.last_step)
    lines = content[:length].count(b"\n")
    problem = "" if length == len(content) else f"line {lines + 1} is damaged, or of a step that does not follow"
    yield Finding(trace.NAME, f"{count_of(lines, 'step')}, each once", problem)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def check_checkpoints(run: RecordedRun) -> Iterator[Finding]:
    """Check each checkpoint's checksums, and that the checkpoint belongs to this run."""
    for folder in reversed(checkpoint.folders(run.folder)):
        name = f"checkpoints/{folder.name}"
        try:
            saved = checkpoint.read(folder)
        except CorruptCheckpoint as error:
            yield Finding(name, "its checksums", f"{shown(error, limit=200)}{damaged_tensor(folder)}")
            continue
        yield _finding(name, "its checksums, and that it is of this run", foreign(run, saved))


def damaged_tensor(folder: Path) -> str:
    """Return the end of a message, with up to 3 tensors of a corrupt checkpoint that do not match their digests."""
    try:
        saved = checkpoint.read(folder, verify=False)
    except CorruptCheckpoint:
        return ""
    names = []
    for file, entry in saved.files.items():
        recorded = get_object(entry, "tensors")
        try:
            now = checkpoint.tensor_digests(untrusted.read_bytes(folder / file))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the file is damaged
            continue
        names += [name for name in recorded if recorded[name] != now.get(name)]
    if not names:
        return ""
    return f": tensor {', '.join(shown(name) for name in names[:3])}"


def foreign(run: RecordedRun, saved: Checkpoint) -> Iterator[str]:
    """Yield the reasons why a checkpoint belongs to another run."""
    if saved.app != run.app:
        yield f"it is of {shown(saved.app)}, not of {run.app}"
    for name, value in saved.resume_invariants.items():
        if name in run.options and run.options[name] != value:
            option = f"--{shown(name).replace('_', '-')}"
            yield f"its {option} is {shown(value)}, and {shown(run.options[name])} in {METRICS}"
    fingerprint = saved.state.get("dataset_fingerprint")
    if run.fingerprint is not None and fingerprint != run.fingerprint:
        yield f"it was trained on other data than {METRICS} names"
    if saved.step > run.last_step:
        yield f"the run has the steps 1 to {run.last_step}"
    train_loss = saved.state.get("train_loss")
    if train_loss is not None and not _is_between_losses(run, saved.step, train_loss):
        yield f"its mean loss of the epoch is {train_loss!r}, outside of the losses of the steps before it"


def _is_between_losses(run: RecordedRun, step: int, mean: float) -> bool:
    """Return whether a mean lies between the smallest and the largest loss of the steps up to ``step``."""
    losses = [loss for each, loss in run.losses.items() if each <= step]
    if not losses:
        return True
    slack = 1e-6 * max(map(abs, losses))
    return min(losses) - slack <= mean <= max(losses) + slack


# --- the result ------------------------------------------------------------------------------------------------------


def check_result(run: RecordedRun) -> Iterator[Finding]:
    """Check the result and the final weights.

    The result must match the options, the last step and the last evaluation. The weights must match the result and the
    last checkpoint.
    """
    if not run.result:
        if (run.folder / RESULT).exists():
            yield Finding(RESULT, "a result", "it is damaged")
        return
    if not run.is_finished:
        yield Finding(RESULT, f"of an earlier end, at step {shown(run.result.get('steps'))}")
        return
    yield _finding(RESULT, "the run's options and its last evaluation", _unlike_result(run))
    yield _finding(WEIGHTS, "the weights of the result", _unlike_weights(run))


def _unlike_result(run: RecordedRun) -> Iterator[str]:
    result = run.result
    if run_reader.app_of({}, result) != run.app:
        yield f"it is of {shown(result.get('app'))}, not of {run.app}"
    if result.get("steps") != run.last_step:
        yield f"it has {shown(result.get('steps'))} steps, and the run {run.last_step}"
    for name in REPEATED:
        if name in result and name in run.options and result[name] != run.options[name]:
            yield f"{name} is {shown(result[name])}, and {shown(run.options[name])} in {METRICS}"
    for name, curve in run.metrics.curves.items():
        is_final = name.startswith("test_") and curve.steps[-1] == run.last_step
        if is_final and name in result and not _is_close(result[name], curve.values[-1]):
            yield f"{name} is {shown(result[name])}, and {curve.values[-1]!r} in {METRICS}"


def _is_close(value: Any, expected: float) -> bool:
    """Return whether a value equals an evaluation, up to the rounding at another world size."""
    number = finite_number(value)
    return number is not None and math.isclose(number, expected, rel_tol=1e-5)


def _unlike_weights(run: RecordedRun) -> Iterator[str]:
    try:
        weights = checkpoint.load_weights(run.folder / WEIGHTS)
    except ConfigError as error:
        yield str(error).removeprefix("--init-from ")
        return
    digest = checkpoint.weights_sha256(weights)
    if digest != run.result.get("weights_sha256"):
        yield f"their SHA-256 is {digest[:12]}, and {shown(str(run.result.get('weights_sha256'))[:12])} in {RESULT}"
    folder = checkpoint.folder_of(run.folder, run.last_step)
    try:
        saved = checkpoint.read(folder)
    except CorruptCheckpoint:
        return  # the checkpoint is missing, or `check_checkpoints` reports it
    if saved.pieces or "model" not in saved.contents or not run.can_be_replayed:
        return  # the checkpoint has shards, or its weights have other names
    arrays = safetensors.numpy.load(saved.contents["model"])
    if checkpoint.weights_sha256(arrays) != digest:
        yield f"they are not those of checkpoints/{folder.name}"
