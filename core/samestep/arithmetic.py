"""Record the versions and settings that affect rounding, and describe their changes since a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samestep.options import json_value
from samestep.sharding import RANDOM_NUMBERS
from samestep.untrusted import shown

MAX_THREADS = 100  # maximum number of characters of OMP_NUM_THREADS to store
UNCOMPARED = ("threads", "gpus", RANDOM_NUMBERS)  # names of metadata that `metadata_change` does not compare


@dataclass(frozen=True)
class Arithmetic:
    """The settings of a process that affect the rounding of its sums. Each checkpoint stores these settings.

    Attributes:
        threads: the value of OMP_NUM_THREADS; None if it is not set.
        metadata: versions and settings, by name, as JSON values.
    """

    threads: str | None
    metadata: dict[str, Any]

    @classmethod
    def of_process(cls, metadata: Mapping[str, Any]) -> Arithmetic:
        """Return the settings of this process: ``metadata``, and OMP_NUM_THREADS of the environment."""
        threads = os.environ.get("OMP_NUM_THREADS", "")[:MAX_THREADS]
        return cls(threads or None, json_value(metadata))

    def state(self) -> dict[str, Any]:
        """Return the settings as JSON values for a checkpoint."""
        return {"threads": self.threads, "metadata": self.metadata}

    def threads_change(self, state: Mapping[str, Any], name: str) -> str | None:
        """Describe how the number of threads has changed since a checkpoint; return None if the number is unchanged.

        Args:
            state: the result of `state` that the checkpoint stores.
            name: the option or variable that sets the number of threads, for the message.
        """
        before = state.get("threads", self.threads)
        if before == self.threads:
            return None
        was = shown(before or "unset")
        now = shown(self.threads or "unset")
        return (
            f"{name} was {was} before this resume and is {now} now: sums may round differently; set it back for the "
            "same bits"
        )

    def metadata_change(self, state: Mapping[str, Any]) -> str | None:
        """Describe how the metadata, except UNCOMPARED, has changed since a checkpoint; return None if it is unchanged.

        Args:
            state: the result of `state` that the checkpoint stores.
        """
        before = state.get("metadata", self.metadata)
        changes = list(self._changes(before))
        if not changes:
            return None
        return f"{'; '.join(changes)}: the bits may differ from here on"

    def _changes(self, before: Mapping[str, Any]) -> Iterator[str]:
        for name, now in self.metadata.items():
            if name not in UNCOMPARED and before.get(name) != now:
                yield f"{name} {shown(before.get(name))} before this resume, {shown(now)} now"

    def random_numbers_change(self, state: Mapping[str, Any]) -> str | None:
        """Return a warning if the random numbers of dropout differ from those before a checkpoint; else None.

        Args:
            state: the result of `state` that the checkpoint stores. Samestep 0.2 stored no RANDOM_NUMBERS.
        """
        if RANDOM_NUMBERS not in self.metadata or RANDOM_NUMBERS in state.get("metadata", {}):
            return None
        return (
            "random numbers of dropout differ from samestep 0.2's from here on: go on, or start a new run with "
            "--no-resume"
        )
