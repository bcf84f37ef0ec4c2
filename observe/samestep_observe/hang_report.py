"""Print where each rank was when a job hung.

    samestep hang RUN_DIR [RUN_DIR ...]

It prints the diagnosis of the newest hang in a run dir. Then follow each rank's
host, process, step, collective and stack of the main thread, the innermost call
first. Ranks at the same location are printed once. It names ranks without a
file in the folder.

Ranks write log/hang-<r>.json when one of them has made no progress for
--timeout seconds. The files stay until the next hang. If machines share no
disk, each has the files of its own ranks: run this on each, or copy the other
machines' run dirs here and name them all. For a rank that could not answer
(stopped, dead, or its interpreter held by C code), another rank of its machine
writes the file.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep import ConfigError
from samestep.options import Options
from samestep.recovery.hang_diagnosis import format_ranges, read_stacks
from samestep.untrusted import Check, check, integer, printable, text

from samestep_observe import run_reader
from samestep_observe.command import new_parser, run_command

SAME_HANG_SECONDS = 60.0  # within which files are of one hang
MIN_COLUMNS = 60  # that a stack needs
MAX_LISTED = 4  # ranks at the same location that have a line each

RankState = Mapping[str, Any]  # the values of a hang-<r>.json


def _is_time(value: Any) -> bool:
    seconds = run_reader.finite_number(value)
    return seconds is not None and 0 <= seconds < run_reader.MAX_TIME


def _is_call(value: Any) -> bool:
    return isinstance(value, list) and len(value) == len(_CALL) and all(kind(each) for kind, each in zip(_CALL, value))


def _is_thread(value: Any) -> bool:
    return isinstance(value, dict) and _TEXT(value.get("name")) and _is_list(value.get("calls"), _is_call)


def _is_list(value: Any, of: Check) -> bool:
    return isinstance(value, list) and all(map(of, value))


_TEXT, _COUNT, _RANKS = text(10_000), integer(0, 2**62), integer(0, 2**20)
_CALL = (_TEXT, _COUNT, _TEXT, _TEXT)  # file, line, function, code
_COLLECTIVE = {"name": _TEXT, "pending": lambda value: isinstance(value, bool)}
_OPTIONAL: dict[str, Check] = {"collective": lambda value: not value or isinstance(value, dict), "waited": _is_time}
_OPTIONAL |= {"trouble": _TEXT, "verdict": _TEXT}
_HEARTBEAT: dict[str, Check] = {"rank": _RANKS, "pid": _COUNT, "step": _COUNT, "time": _is_time, "host": _TEXT}
_HANG = {**_HEARTBEAT, "world_size": _RANKS, "threads": lambda value: _is_list(value, _is_thread)}


def _is_state(values: RankState, required: Mapping[str, Check]) -> bool:
    """Return whether values are of the kinds that a rank writes."""
    with contextlib.suppress(ValueError):
        check(values, {**required, **{name: kind for name, kind in _OPTIONAL.items() if name in values}})
        check(values.get("collective") or {"name": "", "pending": False}, _COLLECTIVE)
        return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0, or 2 after one line on stderr."""
    parser = new_parser("hang", __doc__)
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path, help="a run dir, or its copy")
    parser.add_argument("--threads", action="store_true", help="print all threads of each rank, not only the main one")
    return run_command(parser, arguments, _run)


def _run(options: Options) -> None:
    states = [state for run_dir in options.run_dirs for state in newest(run_dir)]
    lines = report(states, options.threads, shutil.get_terminal_size((100, 24)).columns)
    print("\n".join(map(printable, lines)))


def newest(run_dir: Path) -> list[RankState]:
    """Return the ranks' states at the newest hang in a run dir. Raises ConfigError without a folder or a hang."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder: give a run dir, the folder that holds log/")
    states: list[RankState] = [state for state in run_reader.hangs(run_dir)[0] if _is_state(state, _HANG)]
    states = states or list(_blocked_ranks(run_dir / "log"))
    if not states:
        raise ConfigError(
            f"{run_dir / 'log'} holds no hang: ranks write hang-<r>.json there when one made no progress for --timeout "
            "seconds; if they ran on another machine, look there"
        )
    last = max(state["time"] for state in states)
    return [state for state in states if last - state["time"] < SAME_HANG_SECONDS]


def _blocked_ranks(log: Path) -> Iterator[RankState]:
    """Yield ranks whose interpreter is blocked, if no other rank could describe them: last heartbeat and stacks."""
    for path in log.glob("stack-*.txt"):
        heartbeat, _ = run_reader.read_object(log / f"alive-{re.sub(r'[^0-9]', '', path.name)}")
        stacks = read_stacks(path)
        if stacks and _is_state(heartbeat, _HEARTBEAT):
            threads = [{"name": str(i or "MainThread"), "calls": calls} for i, calls in enumerate(stacks)]
            yield {**heartbeat, "world_size": 0, "trouble": "its interpreter is held by C code", "threads": threads}


def report(states: Sequence[RankState], all_threads: bool, columns: int) -> list[str]:
    """Return the lines to print. A rank's own file is preferred to another rank's file about it."""
    by_rank = {state["rank"]: state for state in sorted(states, key=lambda state: "written_by" not in state)}
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(state["time"] for state in ranks)))
    waited = max(state.get("waited", 0.0) for state in ranks)
    lines = [f"{when}: no progress for {waited:.0f} s" if waited else f"{when}: the last heartbeat"]
    diagnoses = {state["verdict"]: state["host"] for state in ranks if "verdict" in state}
    lines += [f"as seen from {host}: {text}" if len(diagnoses) > 1 else text for text, host in diagnoses.items()]
    groups: dict[tuple[str, ...], list[RankState]] = {}
    for state in ranks:
        groups.setdefault(tuple(_description(state, all_threads)), []).append(state)
    smallest_first = sorted(groups.items(), key=lambda item: (len(item[1]), item[1][0]["rank"]))
    lines += _side_by_side([[*_names(group), *description] for description, group in smallest_first], columns)
    if missing := set(range(max(state["world_size"] for state in ranks))) - by_rank.keys():
        lines += ["", f"rank{'s' * (len(missing) > 1)} {format_ranges(missing)}: nothing here; if they ran on another "]
        lines[-1] += "machine, run this there, or give that machine's copy of the run dir as a further RUN_DIR"
    return lines


def _names(group: Sequence[RankState]) -> list[str]:
    if len(group) <= MAX_LISTED:
        return [f"rank {state['rank']}  {state['host']}  pid {state['pid']}  step {state['step']}" for state in group]
    hosts, steps = sorted({state["host"] for state in group}), sorted({state["step"] for state in group})
    line = f"ranks {format_ranges(state['rank'] for state in group)}  {', '.join(hosts)}  step {steps[0]}"
    return [line + (f" to {steps[-1]}" if len(steps) > 1 else "")]


def _description(state: RankState, all_threads: bool) -> Iterator[str]:
    """Yield a rank's lines, which are equal for ranks at one location: a collective has its number and shape."""
    if collective := state.get("collective"):
        yield f"{'in' if collective['pending'] else 'last collective:'} {collective['name']}"
    if trouble := state.get("trouble"):
        yield trouble
    for thread in state["threads"] if all_threads else state["threads"][:1]:
        if all_threads:
            yield f"thread {thread['name']}"
        for file, line, function, code in thread["calls"]:
            yield f"  {'/'.join(Path(file).parts[-2:])}:{line} {function}"
            if code:
                yield f"      {code}"


def _side_by_side(blocks: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    count = 2 if columns >= 2 * MIN_COLUMNS + 2 else 1
    width = (columns - 2 * (count - 1)) // count
    for i in range(0, len(blocks), count):
        yield ""
        for row in itertools.zip_longest(*blocks[i : i + count], fillvalue=""):
            cells = [text if len(text) <= width else f"{text[: width - 3]}..." for text in row]
            yield "  ".join(text.ljust(width) for text in cells).rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
