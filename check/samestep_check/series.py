"""Group the writes to checkpoints into series, such as ``epoch-1.pt``, ``epoch-2.pt`` and ``epoch-3.pt``.

A script may write several series, for example numbered checkpoints and ``best.pt``. The names in a series differ only
in digits. A temporary file belongs to the series of the file to which the script renames it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

UNSEEN = {".safetensors", ".h5", ".hdf5"}  # suffixes of files that Rust or C code reads
Moves = Mapping[str, str]  # target of each renamed temporary file or folder, both as series


class Save(NamedTuple):
    """A write to a checkpoint."""

    step: int  # steps of the writing process before the write, or of the fastest rank if this process takes no step
    time: float
    kind: str
    path: str
    line: str | None = None
    in_background: bool = False  # whether another thread or process than the training's writes the file
    source: str | None = None  # old path of a renamed file


def without_digits(path: str) -> str:
    """Return a path in which ``#`` replaces each number."""
    return re.sub(r"\d+", "#", path)


def moves(saves: Iterable[Save]) -> dict[str, str]:
    """Return the renames of temporary files and folders.

    A rename long after the file was written, such as the rename of ``last.pt`` to ``previous.pt``, is left out.

    Args:
        saves: the writes of all checkpoints, in order.
    """
    found: dict[str, str] = {}
    opened: dict[str, Save] = {}
    for save in saves:
        if save.kind == "open":
            opened[save.path] = save
        elif save.source:
            inside = [each for path, each in opened.items() if _is_or_below(path, save.source)]
            if any(each.step == save.step or each.in_background for each in inside):
                found[without_digits(save.source)] = without_digits(save.path)
    return found


def series_of(save: Save, known: Moves) -> str:
    """Return the series of a write: the final path of the written file, without digits."""
    name = without_digits(save.path)
    source = _temporary(save, known)
    if source is None:
        return name
    return known[source] + name.removeprefix(source)


def is_temporary(save: Save, known: Moves) -> bool:
    """Return whether a write opens a file that the script renames later, alone or with its folder."""
    return _temporary(save, known) is not None


def _temporary(save: Save, known: Moves) -> str | None:
    if save.kind != "open":
        return None
    name = without_digits(save.path)
    return next((source for source in known if _is_or_below(name, source)), None)


def may_be_read(path: str, read: Collection[str]) -> bool:
    """Return whether a restart may have read a file, or a file of a folder.

    Args:
        path: path of the file or folder, or its series.
        read: paths of the files that the restart read where Python sees it, or their series. Without any, the restart
            may have read each file.
    """
    if not read or any(_is_or_below(each, path) for each in read):
        return True
    suffix = _suffix(path)
    return suffix in UNSEEN and suffix not in {_suffix(each) for each in read}


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1]


def _is_or_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")
