"""Run `samestep check` before and after each change of docs/own_loop.md, and print a table of verdicts.

    python tests/check/own_loop_rows.py

The command needs torch, and runs for about 20 minutes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tutorial
from repository import REPOSITORY
from walk import git

PAGE = REPOSITORY / "docs" / "own_loop.md"
RANKS = 3  # shards of 128 examples have two sizes
CHECK = f"samestep check --faults quick,checkpoint-damaged,other-n -- torchrun --standalone --nproc-per-node={RANKS}"
COMMAND = f"{CHECK} docs/usual_loop.py --epochs 2 --out runs".split()
HEAD = ["| after the section | rows that pass now |", "|---|---|"]
SECTION = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def verdicts(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the section of each change, and the verdict of each row after the change.

    The first item is "" and the verdicts before all changes.
    """
    program = folder / "docs" / "usual_loop.py"
    program.parent.mkdir()
    program.write_bytes((REPOSITORY / "docs" / "usual_loop.py").read_bytes())
    git(folder, "init", "--quiet")
    sections = [("", ""), *SECTION.findall(PAGE.read_text())]
    for section, change in sections:
        if change:
            git(folder, "apply", "-", given=change)
        printed = tutorial.run(folder, COMMAND)
        print(printed, file=sys.stderr, flush=True)
        yield section, {row: verdict for row, (verdict, _) in tutorial.rows(printed).items()}


def table() -> str:
    """Return the table: for each change, the rows that pass after the change, and did not pass before it."""
    lines = [*HEAD]
    before: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for section, after in verdicts(Path(folder)):
            changed = [row for row in after if after[row] == "passed" and before.get(row, "passed") != "passed"]
            if section:
                names = ", ".join(f"`{row}`" for row in changed) or "none"
                lines.append(f"| {section} | {names} |")
            before = after
    failed = [row for row, verdict in before.items() if verdict == "failed"]
    assert not failed, f"rows that fail at the end: {failed}"
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
