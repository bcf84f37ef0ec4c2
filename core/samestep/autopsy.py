"""Where did each rank stand when the job hung?

    python -m samestep.autopsy RUN_DIR [RUN_DIR ...]

prints the verdict of the newest hang in a run dir, then of each rank its host, process, step and collective and its
main thread's stack, the innermost call first: side by side where the terminal is wide enough, and once for ranks that
stand alike. Ranks of which the folder knows nothing are named. No rank imports this.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from samestep import UserError, hang

WITHIN = 60.0  # seconds within which files are of one hang
NARROW = 60  # columns that a stack needs
TOLD_ONE_BY_ONE = 4  # ranks that stand alike

HELP = """\
The files are log/hang-<r>.json, which ranks leave when one of them has made no progress for --timeout seconds. They
stay when the job is started again, until it hangs once more. Where machines share no disk, each has the files of its
own ranks: run this on each, or copy the other machines' run dirs here and give them all; of each the newest hang is
taken. A rank that could not answer (stopped, dead, its interpreter held by C code) is described by another rank of its
machine.
"""


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 with one line on stderr where there is nothing to tell."""
    parser = argparse.ArgumentParser(
        prog="python -m samestep.autopsy",
        description="Where did each rank stand when the job hung?",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path, help="a run dir, or its copy")
    parser.add_argument("--threads", action="store_true", help="all threads of each rank, not the main one alone")
    options = parser.parse_args(arguments)
    try:
        files = [its for run_dir in options.run_dirs for its in newest(run_dir)]
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print("\n".join(report(files, options.threads, shutil.get_terminal_size((100, 24)).columns)))
    return 0


def newest(run_dir: Path) -> list[dict[str, Any]]:
    """What ranks left of the newest hang in a run dir. Raises UserError where there is no such folder, or no hang."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give a run dir, the folder that holds log/")
    logs = run_dir / "log"
    needed = {*hang.TOLD, "threads", "world_size"}
    found = [its for path in logs.glob("hang-*.json") if needed <= (its := hang.read_json(path)).keys()]
    found = found or list(_held(logs))
    if not found:
        raise UserError(
            f"{logs} holds no hang: ranks leave hang-<r>.json there when one made no progress for --timeout seconds; "
            "if they ran on another machine, look there"
        )
    last = max(its["time"] for its in found)
    return [its for its in found if last - its["time"] < WITHIN]


def _held(logs: Path) -> Iterator[dict[str, Any]]:
    """Of ranks whose interpreter is held while no other rank could tell of it: their last heartbeats and stacks."""
    for path in logs.glob("stack-*.txt"):
        rank = re.sub(r"\D", "", path.name)
        its, stacks = hang.read_json(logs / f"alive-{rank}"), hang.read_stacks(path)
        if stacks and its.keys() >= hang.TOLD:
            threads = [{"name": str(i or "MainThread"), "calls": hang.as_json(calls)} for i, calls in enumerate(stacks)]
            yield {**its, "world_size": 0, "trouble": "its interpreter is held by C code", "threads": threads}


def report(files: Sequence[dict[str, Any]], threads: bool, columns: int) -> list[str]:
    """The lines to print."""
    own = {its["rank"]: its for its in files if "written_by" in its}
    own |= {its["rank"]: its for its in files if "written_by" not in its}
    ranks = [own[rank] for rank in sorted(own)]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(its["time"] for its in ranks)))
    waited = max(its.get("waited", 0.0) for its in ranks)
    lines = [f"{when}: no progress for {waited:.0f} s" if waited else f"{when}: the last heartbeat"]
    verdicts = {its["verdict"]: its["host"] for its in ranks if "verdict" in its}
    several = len(verdicts) > 1
    lines += [f"as seen from {host}: {verdict}" if several else verdict for verdict, host in verdicts.items()]
    groups: dict[str, list[dict[str, Any]]] = {}
    for its in ranks:  # a collective's name has its number and shape: ranks that stand alike have the same
        shown = its["threads"] if threads else its["threads"][:1]
        groups.setdefault(repr((_collective(its), its.get("trouble"), shown)), []).append(its)
    shown_ones = sorted(groups.values(), key=lambda group: (len(group), group[0]["rank"]))  # the odd one first
    blocks = [_block(group, threads) for group in shown_ones]
    lines += _side_by_side(blocks, columns)
    if missing := set(range(max(its["world_size"] for its in ranks))) - own.keys():
        name = f"rank{'s' * (len(missing) > 1)} {hang.spans(missing)}"
        lines += [
            "",
            f"{name}: nothing here; if they ran on another machine, run this there, or give that machine's copy",
        ]
        lines[-1] += " of the run dir as a further RUN_DIR"
    return lines


def _collective(its: dict[str, Any]) -> str:
    found = its.get("collective") or {}
    return f"{'in' if found['pending'] else 'last collective:'} {found['name']}" if found else ""


def _block(group: list[dict[str, Any]], threads: bool) -> list[str]:
    """The lines of ranks that stand alike."""
    first = group[0]
    if len(group) > TOLD_ONE_BY_ONE:
        hosts, steps = sorted({its["host"] for its in group}), sorted({its["step"] for its in group})
        lines = [f"ranks {hang.spans(its['rank'] for its in group)}  {', '.join(hosts)}"]
        lines[0] += f"  step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
    else:
        lines = [f"rank {its['rank']}  {its['host']}  pid {its['pid']}  step {its['step']}" for its in group]
    lines += [text for text in (_collective(first), first.get("trouble", "")) if text]
    for thread in first["threads"] if threads else first["threads"][:1]:
        lines += [f"thread {thread['name']}"] if threads else []
        for file, line, function, code in thread["calls"]:
            lines.append(f"  {'/'.join(Path(file).parts[-2:])}:{line} {function}")
            lines += [f"      {code}"] if code else []
    return lines


def _side_by_side(blocks: list[list[str]], columns: int) -> list[str]:
    lines: list[str] = []
    beside = 2 if columns >= 2 * NARROW + 2 else 1
    width = (columns - 2 * (beside - 1)) // beside
    for i in range(0, len(blocks), beside):
        lines.append("")
        for row in itertools.zip_longest(*blocks[i : i + beside], fillvalue=""):
            cut = [text if len(text) <= width else f"{text[: width - 3]}..." for text in row]
            lines.append("  ".join(text.ljust(width) for text in cut).rstrip())
    return lines


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
