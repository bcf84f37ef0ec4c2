"""The command of a checked script, for any number of ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from samestep import ConfigError

from samestep_check.verdicts import NotSeen

RANKS = re.compile(r"^(--?nproc[-_]per[-_]node|--num[-_]processes|--nproc|-np|-n)(=(\d+))?$")
DEFAULT_RANKS = 2  # number of ranks if the command has no option of RANKS with a number


class Script:
    """The command of a script and the command that resumes it.

    Args:
        command: words of the command that starts the script.
        resume_command: shell line of the command that resumes the script; None means the same command.

    Attributes:
        ranks: the number of ranks in the command; `DEFAULT_RANKS` if the command has none.

    Raises:
        ConfigError: the resume command cannot be split into words.
    """

    def __init__(self, command: Sequence[str], resume_command: str | None) -> None:
        try:
            again = shlex.split(resume_command or "")
        except ValueError as error:
            raise ConfigError(f"--resume-command: {error}: quote it as for a shell") from None
        self._command = [*command]
        self._again = again or [*command]
        place = _place_of_ranks(command)
        self.ranks = DEFAULT_RANKS
        if place is not None:
            self.ranks = int(_number_in(command[place]))

    def words(self, ranks: int, is_restart: bool = False) -> list[str]:
        """Return the words of the command for a number of ranks.

        ``ranks`` replaces the value of the launcher's option and ``{n}``. ``64 // ranks`` replaces ``{64/n}``.

        Raises:
            NotSeen: ``ranks`` differs from the command's number, and the command has no option or ``{n}`` to change.
        """
        command = [*(self._again if is_restart else self._command)]
        place = _place_of_ranks(command)
        has_number = place is not None or any("{n}" in word for word in command)
        if ranks != self.ranks and not has_number:
            raise NotSeen("the command has no --nproc-per-node, --num-processes, -np, -n or {n} to change")
        if place is not None:
            word = command[place]
            command[place] = word.removesuffix(_number_in(word)) + str(ranks)
        shares = [re.sub(r"\{(\d+)/n\}", lambda match: str(int(match[1]) // ranks), word) for word in command]
        return [word.replace("{n}", str(ranks)) for word in shares]


def _number_in(word: str) -> str:
    return word.rpartition("=")[2]


def _place_of_ranks(command: Sequence[str]) -> int | None:
    """Return the index of the word that ends with the number of ranks, or None."""
    for place, word in enumerate(command):
        match = RANKS.match(word)
        if match is None:
            continue
        if match[3]:
            return place
        following = command[place + 1 : place + 2]
        if following and following[0].isdigit():
            return place + 1
    return None
