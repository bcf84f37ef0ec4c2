"""The pytest fixture ``samestep_check``, which runs ``samestep check`` on a script of the tested repository."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from samestep import ConfigError


@pytest.fixture
def samestep_check(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that fails the test if a row of a check fails.

    Call it as ``samestep_check("torchrun --nproc-per-node=2 train.py", "--faults=quick")``, with a command and options
    of ``samestep check``. The keyword argument ``folder`` is the script's folder, by default pytest's root folder.
    """

    def run(command: str | Sequence[str], *arguments: str, folder: str | Path | None = None) -> None:
        from samestep_check import command as program
        from samestep_check.results import table

        monkeypatch.chdir(folder or pytestconfig.rootpath)
        words = [*command]
        if isinstance(command, str):
            words = shlex.split(command)
        try:
            options = program.build_parser().parse(arguments)
            results = list(program.check(options, words, program.wanted_rows(options)))
        except ConfigError as error:
            pytest.fail(f"samestep check: {error}", pytrace=False)
        if any(each.has_failed for each in results):
            pytest.fail(f"samestep check:\n{table(results)}", pytrace=False)
        print(table(results))

    return run
