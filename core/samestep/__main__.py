"""Run the command ``samestep``, which starts the programs that build on this package.

This module imports the programs' packages by name at run time, so that this package does not depend on them.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Sequence

from samestep import __version__

PROGRAMS = {  # by command: (module, summary)
    "run": ("samestep_launch.run_command", "run a program on N ranks, and restart it after failures"),
    "check": ("samestep_check.command", "test a training script under faults, in copies of its folder"),
    "report": ("samestep_observe.report", "compare runs on one HTML page"),
    "watch": ("samestep_observe.watch", "show a run in the terminal, live"),
    "track": ("samestep_observe.track", "copy a run to TensorBoard, MLflow or W&B"),
    "replay": ("samestep_observe.replay", "run any step of a run again, and print what it computed"),
    "verify": ("samestep_observe.verify", "check a run's files, and run random steps of it again"),
    "diff": ("samestep_observe.diff", "find the first difference between two runs"),
    "hang": ("samestep_observe.hang_report", "print the stacks of all ranks of a hang"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, such as "report", and return its exit code.

    If the command is missing or unknown, or its package is not installed, print one line on stderr and return 2. After
    Ctrl-C, return 130.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if name == "--version":
        print(f"samestep {__version__}")
        return 0
    if name not in PROGRAMS:
        problem = f"there is no command {name!r}" if name else "COMMAND is missing"
        print(f"error: {problem}: choose {', '.join(PROGRAMS)} (see samestep --help)", file=sys.stderr)
        return 2
    module, _ = PROGRAMS[name]
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        print(f"error: samestep {name} needs the package {package}: pip install samestep", file=sys.stderr)
        return 2
    try:
        code: int = importlib.import_module(module).main(rest)
    except KeyboardInterrupt:  # for example during the imports, before the program handles Ctrl-C
        return 128 + signal.SIGINT
    return code


def _help() -> str:
    lines = ["usage: samestep COMMAND [options]", "", "Run, test and observe distributed-training programs.", ""]
    lines += ["commands (each has --help):"]
    lines += [f"  {name:8}{summary}" for name, (_, summary) in PROGRAMS.items()]
    lines += ["", "options:", "  --version  print the version", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
