"""Download the authors' examples once, verify their SHA-256, and apply our changes.

The examples' code is not in this repository. ``<name>/origin.json`` has each file's address and SHA-256.
``<name>/samestep.ed`` has our changes as an ed script of ``diff -e``: line numbers of the original, and replacements of
these lines. The line numbers always fit, because the SHA-256 identifies every byte of the original. ``<name>/kit.ed``
adds `samestep.torch` to the result of samestep.ed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMAND = re.compile(r"(\d+)(?:,(\d+))?([acd])")  # command of an ed script
TIMEOUT = 10.0  # timeout of the connection and of each read, in seconds


class SourceError(Exception):
    """An example's file is unavailable, or its SHA-256 differs. The message is one line that includes the remedy."""


@dataclass(frozen=True)
class File:
    """One file of an example, and the file's name in the folder of the run."""

    repository: str  # owner/name, on GitHub
    commit: str
    path: str
    sha256: str
    name: str
    edits: str = ""  # the ed script's file name; empty for an unchanged file
    kit: str = ""  # file name of the ed script that adds the kit after ``edits``; empty for no kit
    package: str = ""  # the installed package that contains the file, if the file does not come from GitHub

    @property
    def url(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"

    @property
    def page(self) -> str:
        return f"https://github.com/{self.repository}/blob/{self.commit}/{self.path}"


def origin(name: str) -> list[File]:
    """Return the files of an example. The first file is the program."""
    stored = json.loads((HERE / name / "origin.json").read_text())
    shared = {key: stored[key] for key in ("repository", "commit", "package") if key in stored}
    return [File(**shared, **each) for each in stored["files"]]


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep" / "scoreboard"


def _of_package(file: File) -> Path:
    found = importlib.util.find_spec(file.package)
    return Path(found.origin if found and found.origin else os.devnull).parents[1] / file.path


def fetch(file: File, given: Path | None = None) -> str:
    """Return the text of a file from its package, or from ``given``/<owner>/<name>/<path>, the cache or GitHub.

    The function stores a downloaded file in the cache.

    Raises:
        SourceError: the file cannot be found, or its SHA-256 differs.
    """
    kept = _of_package(file) if file.package else cache() / file.sha256
    where = given / file.repository / file.path if given and not file.package else kept
    if file.package and not where.is_file():
        raise SourceError(f"{file.path} is a file of the package {file.package}: install benchmarks/scoreboard's pins")
    if where.is_file():
        content = where.read_bytes()
        said = str(where)
    elif given:
        raise SourceError(f"{where}: no such file; put {file.url} there, or leave out --sources")
    else:
        said = file.url
        try:
            with urllib.request.urlopen(file.url, timeout=TIMEOUT) as response:
                content = response.read()
        except OSError as error:  # URLError, HTTPError and timeouts are OSErrors
            reason = getattr(error, "reason", None) or error
            raise SourceError(
                f"cannot download {file.url} ({reason}); try again with a network, or name with --sources a folder "
                f"that has {file.repository}/{file.path} of commit {file.commit[:12]}"
            ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise SourceError(f"{said} has the SHA-256 {found}, expected {file.sha256}; take it from {file.url}")
    if said == file.url:
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
        part.write_bytes(content)
        part.replace(kept)
    return content.decode()


def apply(text: str, script: str) -> str:
    """Apply an ed script to a text, and return the result. The script may append (a), change (c) and delete (d) lines.

    Raises:
        ValueError: the script has another command, refers to a line outside the text, or does not proceed from the last
            line to the first.
    """
    lines = text.splitlines()
    commands = script.splitlines()
    before = len(lines) + 1
    k = 0
    while k < len(commands):
        found = COMMAND.fullmatch(commands[k])
        if not found:
            raise ValueError(f"line {k + 1} of the edits is no a, c or d with line numbers: {commands[k]!r}")
        first = int(found[1])
        last = int(found[2] or found[1])
        kind = found[3]
        if not (kind == "a" or first >= 1) or not first <= last < before + (kind == "a"):
            raise ValueError(f"line {k + 1} of the edits is out of order or of the text: {commands[k]!r}")
        new: list[str] = []
        k += 1
        if kind != "d":
            end = commands.index(".", k)
            new = commands[k:end]
            k = end + 1
        lines[first if kind == "a" else first - 1 : last] = new
        before = first
    return "\n".join(lines) + "\n"


def lines_of_kit(name: str) -> int:
    """Return the number of lines that an example's kit.ed inserts."""
    added = 0
    for file in origin(name):
        lines = (HERE / name / file.kit).read_text().splitlines() if file.kit else []
        added += sum(not COMMAND.fullmatch(line) and line != "." for line in lines)
    return added


def as_run(name: str, file: File, given: Path | None = None, kit: bool = False) -> str:
    """Return the text of an example's file with our edits.

    Args:
        name: name of the example's folder.
        file: the file to fetch and edit.
        given: folder of the originals, or None, as in `fetch`.
        kit: whether to apply the edits that add the kit, too.
    """
    text = fetch(file, given)
    for script in (file.edits, file.kit if kit else ""):
        if script:
            text = apply(text, (HERE / name / script).read_text())
    return text


def put(name: str, folder: Path, given: Path | None = None, kit: bool = False) -> Path:
    """Write an example, with our edits, into a folder, and return the path of the program.

    Args:
        name: name of the example's folder.
        folder: existing folder for the files.
        given: folder of the originals, or None, as in `fetch`.
        kit: whether to apply the edits that add the kit, too.
    """
    files = origin(name)
    for file in files:
        (folder / file.name).write_text(as_run(name, file, given=given, kit=kit))
    return folder / files[0].name
