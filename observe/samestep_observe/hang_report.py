"""Print where each rank was when a job hung.

    samestep hang RUN_DIR [RUN_DIR ...]

The command prints the diagnosis of the newest hang in a run dir. Then it prints
each rank's host, process, step, collective and stack of the main thread, the
innermost call first. It prints ranks at the same location as one group, and
lists the ranks without a file in the folder.

Ranks write log/hang-<r>.json when a rank has made no progress for --timeout
seconds. The files stay until the next hang. Without a shared disk, each machine
has the files of its own ranks. Run the command on each machine, or copy the
other machines' run dirs to one machine and pass them all. If a rank cannot
write its file (stopped, dead, or its interpreter held by C code), another rank
of its machine writes the file.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep import ConfigError
from samestep.options import Options
from samestep.recovery.hang_diagnosis import format_ranges, read_stacks
from samestep.untrusted import Check, check, integer, printable, text

from samestep_observe import run_reader
from samestep_observe.command import new_parser, run_command

SAME_HANG_SECONDS = 60.0  # maximum difference in time between files of the same hang
MIN_COLUMNS = 60  # minimum width of a printed stack, in characters
MAX_LISTED = 4  # a larger group of ranks at one location gets a single line

RankState = Mapping[str, Any]  # the values of a hang-<r>.json


def _is_time(value: Any) -> bool:
    seconds = run_reader.finite_number(value)
    return seconds is not None and 0 <= seconds < run_reader.MAX_TIME


def _is_call(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(_CALL):
        return False
    return all(kind(each) for kind, each in zip(_CALL, value))


def _is_thread(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return _TEXT(value.get("name")) and _is_list(value.get("calls"), _is_call)


def _is_list(value: Any, of: Check) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _is_collective(value: Any) -> bool:
    if not value:
        return True  # the rank has recorded no collective
    if not isinstance(value, dict):
        return False
    return _TEXT(value.get("name")) and isinstance(value.get("pending"), bool)


_TEXT = text(10_000)
_COUNT = integer(0, 2**62)
_RANKS = integer(0, 2**20)
_CALL = (_TEXT, _COUNT, _TEXT, _TEXT)  # file, line, function, code
_OPTIONAL: dict[str, Check] = {
    "collective": _is_collective,
    "waited": _is_time,
    "trouble": _TEXT,
    "verdict": _TEXT,
}
_HEARTBEAT: dict[str, Check] = {"rank": _RANKS, "pid": _COUNT, "step": _COUNT, "time": _is_time, "host": _TEXT}
_HANG: dict[str, Check] = {
    **_HEARTBEAT,
    "world_size": _RANKS,
    "threads": lambda value: _is_list(value, _is_thread),
}


def _is_state(values: RankState, required: Mapping[str, Check]) -> bool:
    """Return whether the values have the types of a rank's state."""
    kinds = dict(required)
    for name, kind in _OPTIONAL.items():
        if name in values:
            kinds[name] = kind
    try:
        check(values, kinds)
    except ValueError:
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    """Run ``samestep hang`` and return its exit code."""
    parser = new_parser("hang", __doc__)
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path, help="a run dir, or its copy")
    parser.add_argument("--threads", action="store_true", help="print all threads of each rank, not only the main one")
    return run_command(parser, arguments, _run)


def _run(options: Options) -> None:
    states: list[RankState] = []
    for run_dir in options.run_dirs:
        states += newest(run_dir)
    columns = shutil.get_terminal_size((100, 24)).columns
    lines = report(states, bool(options.threads), columns)
    print("\n".join(map(printable, lines)))


def newest(run_dir: Path) -> list[RankState]:
    """Return the ranks' states at the newest hang in a run dir.

    Raises:
        ConfigError: the folder is missing, or contains no valid file of a hang.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder: give a run dir, the folder that holds log/")
    hangs, _ = run_reader.hangs(run_dir)
    states: list[RankState] = [state for state in hangs if _is_state(state, _HANG)]
    if not states:
        states = list(_blocked_ranks(run_dir / "log"))
    if not states:
        raise ConfigError(
            f"{run_dir / 'log'} holds no hang: ranks write hang-<r>.json there when one made no progress for --timeout "
            "seconds; if they ran on another machine, look there"
        )
    last = max(state["time"] for state in states)
    return [state for state in states if last - state["time"] < SAME_HANG_SECONDS]


def _blocked_ranks(log: Path) -> Iterator[RankState]:
    """Yield the states of ranks with a blocked interpreter, from their last heartbeats and stack files."""
    for path in log.glob("stack-*.txt"):
        rank = re.sub(r"[^0-9]", "", path.name)
        heartbeat, _ = run_reader.read_object(log / f"alive-{rank}")
        stacks = read_stacks(path)
        if stacks and _is_state(heartbeat, _HEARTBEAT):
            threads = [{"name": str(i or "MainThread"), "calls": calls} for i, calls in enumerate(stacks)]
            yield {**heartbeat, "world_size": 0, "trouble": "its interpreter is held by C code", "threads": threads}


def report(states: Sequence[RankState], all_threads: bool, columns: int) -> list[str]:
    """Return the lines of the report. A rank's own file takes precedence over another rank's file about the rank.

    Args:
        states: the ranks' states at one hang.
        all_threads: whether to print all threads of each rank.
        columns: width of the terminal, in characters.
    """
    others_first = sorted(states, key=lambda state: "written_by" not in state)
    by_rank = {state["rank"]: state for state in others_first}
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    lines = [_heading(ranks), *_diagnoses(ranks)]
    lines += _side_by_side(_blocks(ranks, all_threads), columns)
    world_size = max(state["world_size"] for state in ranks)
    missing = set(range(world_size)) - by_rank.keys()
    if missing:
        noun = "ranks" if len(missing) > 1 else "rank"
        lines.append("")
        lines.append(
            f"{noun} {format_ranges(missing)}: nothing here; if they ran on another machine, "
            "run this there, or give that machine's copy of the run dir as a further RUN_DIR"
        )
    return lines


def _heading(ranks: Sequence[RankState]) -> str:
    last = max(state["time"] for state in ranks)
    when = run_reader.local_time(last)
    waited = max(state.get("waited", 0.0) for state in ranks)
    if waited:
        return f"{when}: no progress for {waited:.0f} s"
    return f"{when}: the last heartbeat"


def _diagnoses(ranks: Sequence[RankState]) -> list[str]:
    """Return the diagnosis, or the diagnosis of each host if several hosts have different diagnoses."""
    host_of = {state["verdict"]: state["host"] for state in ranks if "verdict" in state}
    if len(host_of) <= 1:
        return list(host_of)
    return [f"as seen from {host}: {verdict}" for verdict, host in host_of.items()]


def _blocks(ranks: Sequence[RankState], all_threads: bool) -> list[list[str]]:
    """Return the lines of each group of ranks at the same location, smallest groups first."""
    groups: dict[tuple[str, ...], list[RankState]] = {}
    for state in ranks:
        description = tuple(_description(state, all_threads))
        groups.setdefault(description, []).append(state)
    blocks = []
    for description, group in sorted(groups.items(), key=lambda item: (len(item[1]), item[1][0]["rank"])):
        blocks.append([*_names(group), *description])
    return blocks


def _names(group: Sequence[RankState]) -> list[str]:
    if len(group) <= MAX_LISTED:
        return [f"rank {state['rank']}  {state['host']}  pid {state['pid']}  step {state['step']}" for state in group]
    ranks = format_ranges(state["rank"] for state in group)
    hosts = sorted({state["host"] for state in group})
    first = min(state["step"] for state in group)
    last = max(state["step"] for state in group)
    steps = f"step {first}"
    if last > first:
        steps = f"step {first} to {last}"
    return [f"ranks {ranks}  {', '.join(hosts)}  {steps}"]


def _description(state: RankState, all_threads: bool) -> Iterator[str]:
    """Yield lines about a rank's collective, trouble and calls, which are equal for ranks at the same location."""
    collective = state.get("collective")
    if collective:
        yield f"{'in' if collective['pending'] else 'last collective:'} {collective['name']}"
    trouble = state.get("trouble")
    if trouble:
        yield trouble
    if all_threads:
        for thread in state["threads"]:
            yield f"thread {thread['name']}"
            yield from _calls(thread)
    else:
        for thread in state["threads"][:1]:
            yield from _calls(thread)


def _calls(thread: Mapping[str, Any]) -> Iterator[str]:
    for file, line, function, code in thread["calls"]:
        short_path = "/".join(Path(file).parts[-2:])
        yield f"  {short_path}:{line} {function}"
        if code:
            yield f"      {code}"


def _side_by_side(blocks: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    count = 2 if columns >= 2 * MIN_COLUMNS + 2 else 1
    width = (columns - 2 * (count - 1)) // count
    for first in range(0, len(blocks), count):
        yield ""
        for row in itertools.zip_longest(*blocks[first : first + count], fillvalue=""):
            cells = [_cut(text, width).ljust(width) for text in row]
            yield "  ".join(cells).rstrip()


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return f"{text[: width - 3]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
