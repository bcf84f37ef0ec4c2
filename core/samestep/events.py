"""Record the events of a run in ``<run-dir>/log/events.jsonl``: one JSON object per line, with a kind.

Readers such as `samestep_observe` rely on these kinds and fields, never on the wording of a message. This module uses
the standard library only, because a launch script writes events before a framework is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from samestep.root import Root

FILE_NAME = "events.jsonl"
START = "start"  # the first step begins; the event has the fields step, last_step and ranks
SIGNAL = "signal"  # a stop signal ended the run
HANG = "hang"
MEMBERS = "members"  # ranks joined or left during training
ROLLBACK = "rollback"  # a failure that a restart from an earlier checkpoint can fix
DAMAGE = "damage"  # a corrupt checkpoint was skipped
FAILURE = "failure"  # any other error
KINDS = (START, SIGNAL, HANG, MEMBERS, ROLLBACK, DAMAGE, FAILURE)


def append_event(folder: Path, kind: str, **fields: Any) -> None:
    """Append one event to the file. Ignore an OSError, because a lost event must not end a run.

    Args:
        folder: the run dir's ``log`` folder.
        kind: kind of the event, one of KINDS.
        **fields: JSON values. An event of any kind may have ``rank``, ``step`` (updates done) and ``text`` (one line
            for readers).
    """
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields})
    with contextlib.suppress(OSError):
        descriptor = Root(folder.parent).open(f"{folder.name}/{FILE_NAME}", os.O_WRONLY | os.O_APPEND)
        with os.fdopen(descriptor, "a") as file:
            file.write(f"{line}\n")  # one call, so that the lines of several ranks do not mix
