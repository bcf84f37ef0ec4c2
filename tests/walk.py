"""The walk of docs/make_it_yours.md, which is its only source: the page's patches, and the table that counts them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from repository import without_git


def table(page: Path) -> list[tuple[int, ...]]:
    """Of each change, as ``page`` has it: files touched, lines added, lines removed."""
    rows = re.findall(r"^\| \[[a-z ]+\]\(#[a-z-]+\) \| (\d+) \| (\d+) \| (\d+) \|$", page.read_text(), re.MULTILINE)
    return [tuple(map(int, row)) for row in rows]


def take(root: Path, page: Path) -> list[tuple[int, ...]]:
    """Apply the patches of ``page`` to the repository in ``root``, in turn; what git counts of each, as in `table`."""
    counted = []
    for patch in re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        _git(root, "add", "--all")
        _git(root, "apply", "-", given=patch)
        _git(root, "add", "--all", "--intent-to-add")
        files = [line.split() for line in _git(root, "diff", "--numstat").splitlines()]
        counted.append((len(files), *(sum(int(file[side]) for file in files) for side in (0, 1))))
    return counted


def _git(root: Path, *words: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["git", *words], cwd=root, env=without_git(), input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"the page and the files that it changes have come apart: {done.stderr}\n{given}"
    return done.stdout
