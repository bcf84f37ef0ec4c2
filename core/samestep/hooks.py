"""Define the hooks by which an app changes its launch script. This module uses the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Generic, TypeVar

from samestep.options import Options

Kind = TypeVar("Kind", bound=Options)


def _accept(options: Any, ranks: int) -> None:
    """Accept all options."""


def _no_variables(options: Any) -> dict[str, str]:
    """Return an empty dictionary."""
    return {}


def _no_machines(options: Any, ranks: int) -> tuple[int, int] | None:
    """Return None, because no file lists the machines."""
    return None


def _start(options: Any, dataset: str, step: int) -> None:
    """Accept all datasets and first steps."""


@dataclass(frozen=True)
class AppHooks(Generic[Kind]):
    """The properties and functions that an app's launch script uses. All of them have defaults.

    End an app's options.py with ``HOOKS: AppHooks[Options] = AppHooks(...)``. To prevent a start, raise ConfigError in
    one of the functions.

    Attributes:
        commands: description of each of the app's commands, by name. A command follows the number of ranks on the
            command line.
        line_prefix: a regular expression for the launcher's prefix of each line of a rank's stderr.
        equal_ranks: whether the launcher requires the same number of ranks on each machine.
        may_differ: names of options that may differ between machines.
        late_machines: whether the launcher continues without a lost machine, which may rejoin later.
        check_ranks: function that checks the options for N ranks on a machine.
        check_installed: function that prepares N ranks in the app's environment, such as by a check of the installed
            packages or by a download.
        setup_environment: function that returns the variables for setup.sh, which builds an environment for each
            combination of values.
        find_machines: function that returns (number of machines, index of this machine from 0) if a file of the
            launcher lists the machines; else None.
        check_start: function that checks the name of the dataset and the first step before a start.
    """

    commands: Mapping[str, str] = field(default_factory=dict)
    line_prefix: str = ""
    equal_ranks: bool = False
    may_differ: tuple[str, ...] = ()
    late_machines: bool = False
    check_ranks: Callable[[Kind, int], None] = _accept
    check_installed: Callable[[Kind, int], None] = _accept
    setup_environment: Callable[[Kind], dict[str, str]] = _no_variables
    find_machines: Callable[[Kind, int], tuple[int, int] | None] = _no_machines
    check_start: Callable[[Kind, str, int], None] = _start
