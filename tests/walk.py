"""Apply the patches of docs/make_it_yours.md, and count them as its table does. No other file has the patches."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from repository import without_git


def table(page: Path) -> list[tuple[int, ...]]:
    """Return (files touched, lines added, lines removed) of each change in the table of ``page``."""
    rows = re.findall(r"^\| \[[a-z ]+\]\(#[a-z-]+\) \| (\d+) \| (\d+) \| (\d+) \|$", page.read_text(), re.MULTILINE)
    return [tuple(map(int, row)) for row in rows]


def apply_patches(root: Path, page: Path) -> list[tuple[int, ...]]:
    """Apply the patches of ``page`` to the repository in ``root``; return git's counts in the form of `table`."""
    counted = []
    for patch in re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        git(root, "add", "--all")
        git(root, "apply", "-", given=patch)
        git(root, "add", "--all", "--intent-to-add")
        files = [line.split() for line in git(root, "diff", "--numstat").splitlines()]
        counted.append((len(files), *(sum(int(file[side]) for file in files) for side in (0, 1))))
    return counted


def git(root: Path, *words: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["git", *words], cwd=root, env=without_git(), input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"a patch of the page does not fit the files that it changes: {done.stderr}\n{given}"
    return done.stdout
