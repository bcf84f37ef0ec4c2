"""Run tox with the arguments of scripts/test.sh, in the environment in which tox is installed.

* Without `-e`, all environments run, two at a time. `-p N` runs N environments at a time.
* pytest gets the words after `--`. If several environments run, at least one of them must have a test that the words
  select.
* After Ctrl-C or TERM, the program ends all processes of the tests. tests/interrupts.py does the same if tox was
  killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

AT_A_TIME = "2"
# Environment variable: path of a folder, in which tests/conftest.py creates a file if pytest selects a test.
MATCHED = "MATRIX_MATCHED"
LEFT_LIMIT = 15.0  # time for pytest to end its own processes, in seconds
NO_TESTS = 5  # pytest's exit code
DRIVERS = {  # files that a device's driver creates, by the suffix of an environment's name
    "gpu": ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg"),
    "ascend": ("/dev/davinci_manager",),
}


class Words:
    """The arguments of scripts/test.sh.

    Attributes:
        own: arguments of tox, before `--`.
        selected: arguments of pytest, after `--`.
        names: environments in the arguments `-e`.
        whole: whether all environments run.
        parallel: whether tox's arguments include `-p`.
        installs_only: whether tox only installs environments, and runs no test.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        end = [*arguments, "--"].index("--")
        self.own = list(arguments[:end])
        self.selected = list(arguments[end + 1 :])
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("-e", action="append", default=[])
        parser.add_argument("-f", "-m", dest="factors", nargs="+")
        parser.add_argument("-p", "--parallel")
        parser.add_argument("-n", "--notest", action="store_true")
        found, _ = parser.parse_known_args(self.own)
        self.names = [name for names in found.e for name in names.split(",") if name]
        self.whole = not self.names and not found.factors
        self.parallel = found.parallel is not None
        self.installs_only = found.notest

    def for_tox(self) -> list[str]:
        """Return the arguments of tox."""
        parallel = [] if self.parallel else ["--parallel", AT_A_TIME]
        command = ["run-parallel", *parallel] if self.whole else ["run"]
        if self.parallel:
            command = ["run-parallel"]
        if self.whole and self.selected:
            command += ["--skip-env", "^lint$"]  # lint has no tests
        return [*command, *self.own, *(["--", *self.selected] if self.selected else [])]

    def without_device(self) -> str:
        """Return an error message if this machine lacks the device of an environment, otherwise an empty string."""
        if self.installs_only:
            return ""
        for name in self.names:
            _, _, device = name.rpartition("-")
            if device in DRIVERS and not any(map(os.path.exists, DRIVERS[device])):
                return f"error: {name}: this machine has no driver of such a device: name a -cpu environment"
        return ""


def parents() -> dict[int, tuple[int, str]]:
    """Return the parent and the start time (in clock ticks since boot) of each process, by PID."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if fields[0] not in "ZX":
            found[int(path.parent.name)] = (int(fields[1]), fields[19])
    return found


def descendants(ancestor: int) -> dict[int, str]:
    """Return the start time of each descendant of a process, by PID."""
    known = parents()
    found = dict[int, str]()
    waiting = [ancestor]
    while waiting:
        parent = waiting.pop()
        children = {pid: start for pid, (its_parent, start) in known.items() if its_parent == parent}
        found.update(children)
        waiting += children
    return found


class Interrupt:
    """Handle INT and TERM. tox then interrupts its environments, and `finish` kills the remaining processes."""

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        for each in (signal.SIGINT, signal.SIGTERM):  # a shell makes background processes ignore INT
            signal.signal(each, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.processes |= descendants(os.getpid())
        if number == signal.SIGTERM:  # unlike TERM, Ctrl-C already reaches the process group
            self._send(signal.SIGINT, os.getpgrp())
        raise KeyboardInterrupt

    def _send(self, number: int, group: int | None) -> None:
        known = parents()
        for pid, start in self.processes.items():
            try:
                if known.get(pid, (0, ""))[1] == start and group in (None, os.getpgid(pid)):
                    os.kill(pid, number)
            except ProcessLookupError:
                pass

    def finish(self) -> None:
        """Wait for the processes that remain after an interrupted tox, and kill them after LEFT_LIMIT seconds."""
        deadline = time.monotonic() + LEFT_LIMIT
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._send(signal.SIGKILL, None)

    def _left(self) -> bool:
        """Return whether a process remains, and store the descendants of the remaining processes."""
        known = parents()
        alive = [pid for pid, start in self.processes.items() if known.get(pid, (0, ""))[1] == start]
        for pid in alive:
            self.processes |= descendants(pid)
        return bool(alive)


def run_tox(arguments: Sequence[str]) -> int:
    """Run tox, and return its exit code."""
    from tox.run import run  # scripts/test.sh installs tox

    interrupt = Interrupt()
    try:
        run(arguments)
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        return int(end.code is not None)
    finally:
        interrupt.finish()
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run tox, and return the exit code of scripts/test.sh."""
    words = Words(arguments)
    error = words.without_device()
    if error:
        print(error, file=sys.stderr)
        return 2
    if not words.selected or len(words.names) == 1:
        return run_tox(words.for_tox())
    with tempfile.TemporaryDirectory(prefix="samestep-matched-") as folder:
        os.environ[MATCHED] = folder
        code = run_tox(words.for_tox())
        if code == 0 and not os.listdir(folder) and not words.installs_only:
            selected = " ".join(words.selected)
            print(f"error: {selected!r} selects no test: change the words after --", file=sys.stderr)
            return NO_TESTS
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
