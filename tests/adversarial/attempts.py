"""Describe one attempt to break a launch script and its required result, and check the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scratch_project import ScratchProject

DONE = "note(started=True)"  # a launcher that only writes a note
Prepare = Callable[[ScratchProject], Mapping[str, str]]  # returns environment variables to add


@dataclass(frozen=True)
class Attempt:
    """One attempt to break a launch script.

    Attributes:
        number: number of the former defect.
        what: the attempt in words, as part of the test's ID.
        code: expected exit code of the script.
        error: regular expression for the only line ``error: ...`` on stderr; "" if there must be none.
        warning: regular expression for the only line ``warning: ...`` on stderr; "" if there must be none.
        arguments: words after the script's name.
        environ: variables to add to the script's environment.
        prepare: function that changes the project and returns more environment variables.
        launcher: source of the launcher that the script starts, see `scratch_project.LAUNCHER`.
        starts: expected number of starts of the launcher.
    """

    number: int
    what: str
    code: int
    error: str = ""
    warning: str = ""
    arguments: Sequence[str] = ("2",)
    environ: Mapping[str, str] = field(default_factory=dict)
    prepare: Prepare = lambda project: {}
    launcher: str = DONE
    starts: int = 0

    def __str__(self) -> str:
        return f"{self.number} {self.what}"


def check(project: ScratchProject, attempt: Attempt) -> None:
    """Run an attempt and check its exit code, its output and the number of launcher starts."""
    environ = {**attempt.environ, **attempt.prepare(project)}
    done = project.run(attempt.launcher, *attempt.arguments, environ=environ)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == attempt.code, done.stderr
    for kind, pattern in (("error", attempt.error), ("warning", attempt.warning)):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"{kind}: ")]
        assert len(lines) == bool(pattern), done.stderr
        assert all(re.search(pattern, line) for line in lines), done.stderr
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stderr), "control characters reach the terminal"
    assert sum("started" in note for note in project.notes()) == attempt.starts, done.stderr
