"""Apply the diffs of docs/make_it_survive.md, and run the checks that its tables show. No other file has the diffs.

    python tests/check/tutorial.py

The command writes the tables into the page. It needs torch, and runs for 11 minutes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from repository import REPOSITORY
from walk import git

PAGE = REPOSITORY / "docs" / "make_it_survive.md"
MAIN = "from samestep.__main__ import main; raise SystemExit(main())"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A row of a table: its name, its verdict, its message, and the usual cause if it failed.
ROW = re.compile(r"^([\w-]+) +(passed|failed|cannot tell|not seen) +([^\n]*(?:\n +usual cause[^\n]*)?)", re.MULTILINE)


class Table(NamedTuple):
    """A table of the page: its start and end in characters, its text, and the command that prints it."""

    start: int
    end: int
    text: str
    command: list[str]
    whole: bool  # whether the table has all rows, or only the rows that changed


def tables(folder: Path, page: str) -> Iterator[Table]:
    """Yield each table of the page while ``folder`` has the script that the table is about."""
    command = list[str]()
    whole = True
    for block in BLOCK.finditer(page):
        kind, text = block.groups()
        if kind == "python":
            (folder / "train.py").write_text(text)
        elif kind == "diff":
            git(folder, "apply", "-", given=text)
        elif kind == "bash" and text.startswith("samestep check"):
            command = shlex.split(text)
            whole = True
        elif kind == "text":
            yield Table(*block.span(2), text, command, whole)
            whole = False


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Return the verdict and the message of each row of a table, by the row's name."""
    return {name: (verdict, words) for name, verdict, words in ROW.findall(text)}


def run(folder: Path, command: list[str]) -> str:
    """Return the table that a command of the page prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    words = [part for word in command[1:] for part in (torchrun if word == "torchrun" else [word])]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words], cwd=folder, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def changed(text: str, shown: dict[str, tuple[str, str]]) -> str:
    """Return the rows whose verdict or message differs from ``shown``, apart from numbers."""

    def without_numbers(row: tuple[str, ...] | None) -> object:
        return row and (row[0], re.sub(r"\d+(\.\d+)?(e-\d+)?", "", row[1]))

    matches = ROW.finditer(text)
    return "".join(
        f"{m[0]}\n" for m in matches if without_numbers(rows(m[0])[m[1]]) != without_numbers(shown.get(m[1]))
    )


def write(page: str) -> str:
    """Return the page with the tables that its commands print now. The commands run for minutes."""
    written = ""
    position = 0
    shown = dict[str, tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for table in tables(Path(folder), page):
            printed = run(Path(folder), table.command)
            print(printed, flush=True)
            new = printed if table.whole else changed(printed, shown)
            shown.update(rows(printed))
            written += page[position : table.start] + new
            position = table.end
    return written + page[position:]


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text()))
