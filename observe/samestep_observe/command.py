"""Parse and run the commands of this package."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from samestep import ConfigError
from samestep.options import Options, Parser
from samestep.untrusted import MAX_LINE, shown


def new_parser(name: str, manual: str | None) -> Parser:
    """Return the parser of ``samestep <name>``.

    Args:
        name: name of the command.
        manual: docstring of the command's module, which --help prints.
    """
    return Parser(prog=f"samestep {name}", description=manual)


def run_command(parser: Parser, arguments: Sequence[str], command: Callable[[Options], int | None]) -> int:
    """Run a command, print an expected error to stderr, and return the exit code.

    Args:
        parser: the command's parser.
        arguments: the words after the command's name.
        command: function that is called with the parsed options, and returns an exit code, or None for 0.

    Returns:
        The command's exit code, or 2 after an expected error, or 141 if the reader of a pipe ended before the command.
    """
    code = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack characters of the output
    try:
        code = command(parser.parse(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE if code is None else code  # 0 would mean that runs are equal
    except (ConfigError, OSError) as problem:  # the system raises OSError if RUN_DIR cannot be read
        print(shown(f"error: {problem}", limit=MAX_LINE), file=sys.stderr)
        return 2
    return code or 0
