"""The folder of a checked script, and its copies."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from samestep import ConfigError

SKIPPED = ".tox", ".venv", ".venvs", "__pycache__", "node_modules"
LINKED = (".git",)  # a script may read its commit
# Suffixes of files that are not checkpoints.
TEXTS = {".py", ".sh", ".md", ".rst", ".txt", ".toml", ".yaml", ".yml", ".json", ".ipynb"}


_MOUNT = Path(__file__).with_name("mount_copy.py")
_PROBE_LIMIT = 20.0  # time limit of `can_mount`, in seconds


def can_mount(parent: Path | None = None) -> bool:
    """Return whether the kernel allows this user to mount a copy over a folder in a mount namespace.

    Args:
        parent: folder in which this function creates and deletes a folder; by default the system's temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-check-", dir=parent) as temporary:
        copy = os.path.join(temporary, "copy")
        folder = os.path.join(temporary, "folder")
        os.mkdir(copy)
        os.mkdir(folder)
        program = f"import os; os.mkdir({os.path.join(folder, 'probe')!r})"
        command = [*_mounted(copy, folder, []), sys.executable, "-I", "-S", "-c", program]
        subprocess.run(command, capture_output=True, timeout=_PROBE_LIMIT, check=False)
        return os.listdir(copy) == ["probe"] and not os.listdir(folder)


def _mounted(copy: str, folder: str, kept: Sequence[str]) -> list[str]:
    # The options -I and -S prevent a second run of the job's sitecustomize.
    return [sys.executable, "-I", "-S", str(_MOUNT), copy, folder, json.dumps(kept)]


class Source:
    """The folder of a script. Copies keep times, modes and links.

    Args:
        folder: resolved path of the folder.
        links: paths in the folder to which copies link.
        fresh: patterns of files that copies leave out, and of folders that are empty in copies.
        is_covered: whether a copy is mounted over the folder while a command runs.

    Attributes:
        special: paths of FIFOs, sockets and devices, which copies leave out.
        kept: relative paths whose content comes from the folder itself if a copy is mounted over it.
    """

    def __init__(
        self,
        folder: Path,
        links: Sequence[Path],
        fresh: Sequence[str] = (),
        is_covered: bool = False,
    ) -> None:
        self.folder = folder
        self.is_covered = is_covered
        self.special: list[str] = []
        self.kept: list[str] = []
        self._symlinks: list[str] = []  # omitted paths that are symbolic links; only mounted copies need them
        self._fresh = fresh
        self._links = {str(folder / link) for link in links}

    def check(self, limit: float, temporary: Path) -> None:
        """Raise ConfigError if the folder cannot be copied for each run.

        Args:
            limit: largest size of all files together, in MB.
            temporary: folder in which the check creates the copies.
        """
        if temporary.is_relative_to(self.folder):
            raise ConfigError(f"copies in {temporary} would contain themselves: choose TMPDIR and --keep elsewhere")
        for link in self._links:
            if not os.path.lexists(link):
                raise ConfigError(f"--link {link}: it is missing: name a file or folder of the script's folder")
        size = 0
        for entry in self._entries(str(self.folder)):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                size += status.st_size
            elif not stat.S_ISLNK(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                self.special.append(os.path.relpath(entry.path, self.folder))
            if size > 1e6 * limit:
                raise ConfigError(f"the folder is larger than {limit:g} MB: link data by --link, or raise --copy-limit")
        if self.is_covered:
            omitted = [os.path.relpath(path, self.folder) for path in self._omitted(str(self.folder))]
            self.kept = [name for name in omitted if not (self.folder / name).is_symlink()]
            self._symlinks = [name for name in omitted if (self.folder / name).is_symlink()]

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Yield the entries that a copy contains, each folder before its content, without paths of --link."""
        try:
            found = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise ConfigError(f"cannot read {folder}: {error.strerror}: leave it out by --link") from None
        for entry in found:
            if entry.name in (*SKIPPED, *LINKED) or entry.path in self._links:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            is_fresh = self._is_fresh(entry.path)
            if is_folder or not is_fresh:
                yield entry
            if is_folder and not is_fresh:
                yield from self._entries(entry.path)

    def _omitted(self, folder: str) -> Iterator[str]:
        """Yield the paths that copies leave out or link, such as virtual environments."""
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            is_omitted = entry.name in (*SKIPPED, *LINKED) or entry.path in self._links
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_omitted and entry.name != "__pycache__":
                yield entry.path
            elif is_folder and not is_omitted and not self._is_fresh(entry.path):
                yield from self._omitted(entry.path)

    def uncover(self) -> None:
        """Run later commands in copies that are not mounted over the folder."""
        self.is_covered = False
        self.kept.clear()
        self._symlinks.clear()

    def _is_fresh(self, path: str) -> bool:
        name = PurePath(os.path.relpath(path, self.folder))
        return any(name.match(pattern) for pattern in self._fresh)

    def checkpoints(self, pattern: str) -> list[str]:
        """Return the relative paths of copied files whose names match the pattern of checkpoints.

        Args:
            pattern: regular expression of checkpoints' names.
        """
        found = []
        for entry in self._entries(str(self.folder)):
            is_text = os.path.splitext(entry.name)[1] in TEXTS
            if re.search(pattern, entry.name) and not is_text and entry.is_file(follow_symlinks=False):
                found.append(os.path.relpath(entry.path, self.folder))
        return found

    def copy(self, target: Path) -> None:
        """Copy the folder to a new folder."""
        target.mkdir()
        folders = [(str(self.folder), str(target))]
        first_names: dict[tuple[int, int], str] = {}  # first copied path of each inode
        for entry in self._entries(str(self.folder)):
            path = os.path.join(target, os.path.relpath(entry.path, self.folder))
            status = entry.stat(follow_symlinks=False)
            inode = status.st_dev, status.st_ino
            if stat.S_ISLNK(status.st_mode):
                self._copy_link(entry.path, path)
            elif stat.S_ISDIR(status.st_mode):
                os.mkdir(path)
                folders.append((entry.path, path))
            elif stat.S_ISREG(status.st_mode) and inode in first_names:
                os.link(first_names[inode], path)
            elif stat.S_ISREG(status.st_mode):
                self._copy_file(entry.path, path)
                first_names[inode] = path
        for name in self.kept:
            self._make_place(name, target)
        for name in self._symlinks:
            self._copy_link(str(self.folder / name), str(target / name))
        for name in () if self.is_covered else (*LINKED, *self._links):
            self._link(name, target)
        for source, copied in reversed(folders):
            shutil.copystat(source, copied)

    def _copy_file(self, source: str, path: str) -> None:
        try:
            shutil.copy2(source, path)
        except OSError as error:
            raise ConfigError(f"cannot copy {source}: {error.strerror}: leave it out by --link") from None

    def _copy_link(self, source: str, path: str) -> None:
        """Copy a symbolic link. A relative link that leads out of the folder becomes absolute."""
        to = os.readlink(source)
        full = os.path.normpath(os.path.join(os.path.dirname(source), to))
        if not os.path.isabs(to) and not Path(full).is_relative_to(self.folder):
            to = full
        os.symlink(to, path)

    def _link(self, name: str, target: Path) -> None:
        source = self.folder / name
        if os.path.lexists(source):
            (target / source.relative_to(self.folder)).symlink_to(source)

    def _make_place(self, name: str, target: Path) -> None:
        """Create the mount point of a kept path in a copy: an empty folder or file."""
        if (self.folder / name).is_dir():
            (target / name).mkdir()
        else:
            (target / name).touch()

    def command(self, words: Sequence[str], work: Path) -> list[str]:
        """Return the words that run a command in a copy, which is mounted over the folder if `is_covered`."""
        if self.is_covered:
            return [*_mounted(str(work), str(self.folder), self.kept), *words]
        return self.in_copy(words, work)

    def in_copy(self, words: Sequence[str], work: Path) -> list[str]:
        """Return a command's words, in which the copy's path replaces the folder's path."""
        own = str(self.folder)
        found = []
        for word in words:
            option, equals, value = word.rpartition("=")
            if value == own or value.startswith(own + os.sep):
                copied = str(work) + value.removeprefix(own)
                # A program in a virtual environment keeps its path, because copies leave out virtual environments.
                if os.path.isdir(os.path.dirname(copied)):
                    value = copied
            found.append(option + equals + value)
        return found
