"""Let an app change what its launch script does. This module uses the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Generic, TypeVar

from samestep.options import Options

Kind = TypeVar("Kind", bound=Options)


def _accept(options: Any, ranks: int) -> None:
    """Accept any options."""


def _no_variables(options: Any) -> dict[str, str]:
    """Return no variables."""
    return {}


def _no_machines(options: Any, ranks: int) -> tuple[int, int] | None:
    """Return that no file lists the machines."""
    return None


def _start(options: Any, dataset: str, step: int) -> None:
    """Accept any dataset and first step."""


@dataclass(frozen=True)
class AppHooks(Generic[Kind]):
    """The properties of an app that its launch script uses. Each has a default.

    An app's options.py ends with ``HOOKS: AppHooks[Options] = AppHooks(...)``. The functions raise ConfigError.

    Attributes:
        commands: descriptions by name, if a call has a command after N.
        line_prefix: a regular expression for the launcher's prefix of each line of a rank's stderr.
        equal_ranks: whether the launcher needs as many ranks on each machine.
        may_differ: names of options that may differ between machines.
        late_machines: whether the launcher continues without a lost machine, which may come back.
        check_ranks: checks the options against N ranks on a machine.
        check_installed: checks the installed packages for N ranks, in the environment of the app.
        setup_environment: returns the variables by which setup.sh builds; other variables make another environment.
        find_machines: returns the number of machines and the number of this one, from 0, if a file of the launcher
            lists them; else None.
        check_start: checks the name of the dataset and the first step, before a start.
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
