"""Read the data that a replay needs from a run dir: the run's command, settings, losses and checkpoints."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep import ConfigError, trace, untrusted
from samestep.untrusted import shown

from samestep_observe import run_reader
from samestep_observe.run_reader import MetricsReader, SavedCheckpoint, get_object, read_losses

MAX_WORDS = 1000  # maximum number of words of a command
MAX_WORD = 4096  # maximum number of characters of a word
# Keys of a header that `RecordedRun.settings` leaves out. `samestep diff` compares some of them separately.
NOT_COMPARED = {"app", "time", "host", "world", "options", "command", "dataset_fingerprint", "step"}
_COMMAND: Mapping[str, untrusted.Check] = {
    "program": untrusted.text(MAX_WORD),
    "arguments": lambda value: _is_words(value),
    "folder": untrusted.optional(untrusted.text(MAX_WORD)),
    "omp_num_threads": untrusted.optional(untrusted.text(100)),
}


def _is_words(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > MAX_WORDS:
        return False
    return all(isinstance(word, str) and len(word) <= MAX_WORD and "\0" not in word for word in value)


@dataclass(frozen=True)
class Command:
    """The command that started a rank of a run.

    Attributes:
        program: path of the program.
        arguments: arguments of the program.
        folder: working directory; None if the directory was missing.
        threads: value of OMP_NUM_THREADS; None if the variable was not set.
    """

    program: Path
    arguments: list[str]
    folder: Path | None
    threads: str | None


class RecordedRun:
    """The records of a run dir. This class never writes into the run dir."""

    def __init__(self, run_dir: Path, step: int | None = None) -> None:
        """Read the records.

        Args:
            run_dir: the run's folder.
            step: selects the header of the last start that began before this step; None selects the last header.

        Raises:
            ConfigError: the folder is not a run dir, or has no header or no recorded step.
        """
        run_reader.check(run_dir)
        self.folder = run_dir
        self.metrics = MetricsReader(run_dir)
        self.metrics.read()
        self.header = self._header(step)
        self.result, _ = run_reader.read_object(run_dir / "result.json")
        if not self.header:
            raise ConfigError(f"{run_dir}: metrics.jsonl has no header: its options are unknown")
        self.losses = read_losses(run_dir, self.metrics)
        if not self.losses:
            raise ConfigError(f"{run_dir} has no step: wait for the first line of metrics.jsonl")

    def _header(self, step: int | None) -> dict[str, Any]:
        headers = [start.header for start in self.metrics.starts if step is None or start.step < step]
        return headers[-1] if headers else {}

    @property
    def app(self) -> str:
        """The app's name; "" if it is unknown."""
        return run_reader.app_of(self.header, self.result)

    @property
    def can_be_replayed(self) -> bool:
        """Whether `samestep replay` can run a step again: not with MindSpore, nor if ranks come and go (torchft).

        Their steps depend on more than seed, step and weights.
        """
        return "mindspore" not in self.header and get_object(self.header, "world").get("launcher") != "torchft"

    @property
    def ranks(self) -> int:
        """The number of ranks; 1 if it is unknown."""
        return run_reader.world_size_of(self.header, self.result) or 1

    @property
    def options(self) -> dict[str, Any]:
        """The options, as JSON values."""
        return get_object(self.header, "options")

    @property
    def virtual_ranks(self) -> int | None:
        """The value of --virtual-ranks; None without the option."""
        return run_reader.non_negative_int(self.options.get("virtual_ranks")) or None

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return max(self.losses)

    @cached_property
    def is_finished(self) -> bool:
        """Whether the result describes the run's end. A run that is extended keeps its earlier result until its end."""
        if not self.result or not run_reader.is_behind(self.result, self.last_step):
            return bool(self.result)
        event_log = run_reader.EventLog(self.folder)
        event_log.read()
        return event_log.last_step is None or event_log.last_step <= self.last_step

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the dataset; None if it is not recorded."""
        value = self.header.get("dataset_fingerprint")
        return value if isinstance(value, str) else None

    @cached_property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints with a valid manifest and valid sizes, oldest first."""
        return [each for each in run_reader.checkpoints(self.folder) if each.is_good]

    @cached_property
    def trace(self) -> Mapping[int, Mapping[str, Mapping[str, str]]]:
        """The digests of --trace-every by step, as `samestep.trace.read` returns them."""
        return trace.read(self.folder)

    @property
    def command(self) -> Command:
        """The command that started the run.

        Raises:
            ConfigError: the header has no valid command.
        """
        values = get_object(self.header, "command")
        try:
            untrusted.check(values, _COMMAND)
        except ValueError as error:
            reason = "an earlier version of samestep wrote it" if not values else f"in its header, {error}"
            raise ConfigError(f"{self.folder} does not say how it was started: {reason}: replay a newer run") from None
        folder = values["folder"]
        return Command(
            program=Path(values["program"]),
            arguments=values["arguments"],
            folder=Path(folder) if folder else None,
            threads=values["omp_num_threads"],
        )

    def settings(self) -> dict[str, Any]:
        """Return the versions and settings that may affect the rounding of sums, by name."""
        return settings_of(self.header)

    def starts_of(self, begin: int, last: int) -> list[run_reader.Start]:
        """Return the starts that computed the steps after ``begin``, up to the step ``last``."""
        starts = self.metrics.starts
        ends = [*(each.step for each in starts[1:]), self.last_step]
        return [start for start, end in zip(starts, ends) if start.step < last and end > begin]


def settings_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions and settings in a header that may affect the rounding of sums, by name."""
    found = {name: value for name, value in header.items() if name not in NOT_COMPARED}
    found["OMP_NUM_THREADS"] = get_object(header, "command").get("omp_num_threads")
    return found


# --- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs' losses.

    Attributes:
        count: number of steps that both runs have.
        equal: number of common steps whose losses have equal bits.
        first: the first common step whose losses differ; None if all losses are equal.
    """

    count: int
    equal: int
    first: int | None

    @property
    def is_equal(self) -> bool:
        """Whether all losses of common steps have equal bits, and there is a common step."""
        return self.count > 0 and self.first is None


def compare(one: Mapping[int, float], other: Mapping[int, float]) -> Comparison:
    """Compare the losses of the steps that two runs have in common."""
    common = [step for step in one if step in other]
    different = [step for step in common if not has_same_bits(one[step], other[step])]
    return Comparison(count=len(common), equal=len(common) - len(different), first=min(different, default=None))


def has_same_bits(one: float, other: float) -> bool:
    """Return whether two floats have the same bits, also if they are NaN."""
    return struct.pack("<d", one) == struct.pack("<d", other)


def distance(one: float, other: float) -> str:
    """Return the relative distance of two numbers, such as "3e-08", or "not finite"."""
    size = max(abs(one), abs(other))
    if not math.isfinite(one - other):
        return "not finite"
    if not size:  # 0.0 and -0.0
        return "0e+00"
    return f"{abs(one - other) / size:.0e}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each setting that differs, with the name and both values."""
    for name in sorted({*one, *other}):
        before = one.get(name)
        after = other.get(name)
        if before != after:
            yield f"{shown(name)}: {shown(before)}, {shown(after)}"
