"""Record the states of a job's folder, find the calls that save checkpoints, and choose states to restart from.

A state is the folder's content before a file system call. A kill at this call leaves exactly this state. Snapshots
share the copies of files that did not change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep_check.calls import Call
from samestep_check.series import without_digits

RENAMES = {"rename", "link", "symlink", "unlink"}  # calls that change names
CHANGES = {"write", "truncate", "open"}  # calls that change content
MOST_STEPS_OF_SAVE = 3  # steps in which a thread may write a checkpoint; a file that is open for longer may be a log
RECORD_LIMIT = 2e9  # maximum number of bytes of copied files; no state is recorded after it is exceeded
ENTRY_LIMIT = 1_000_000  # maximum number of files, folders and links in all states together


class Entry(NamedTuple):
    """A file, a folder or a link of a snapshot.

    Attributes:
        kind: ``file``, ``folder`` or ``link``.
        source: path of a file's copy, or target of a link; empty for a folder.
        mode: permission bits.
        time: last modification, in nanoseconds since 1970 (UTC).
    """

    kind: str
    source: str
    mode: int
    time: int


Snapshot = dict[str, Entry]  # by relative path, each folder before its content


class Recorded(NamedTuple):
    """A call on a path of the folder. ``path`` and ``target`` are relative to the folder."""

    kind: str
    path: str
    target: str | None
    time: float
    size: int  # size of the file before the call, in bytes; 0 if the file is missing


class State(NamedTuple):
    """The folder's content before call ``call``, from 0. After the last call, ``call`` is the number of calls."""

    call: int
    entries: Snapshot


class Store:
    """Take snapshots of a folder, and copy only its changed files.

    Args:
        folder: the folder to record.
        copies: a new folder for the copies of files.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder = folder
        self._copies = copies
        self._known: dict[int, tuple[int, int, str]] = {}  # size, time and copy, by inode
        self._changed: set[int] = set()  # inodes of files that are about to change
        self._count = 0
        self.copied = 0  # bytes copied so far
        copies.mkdir()

    def change(self, path: Path) -> None:
        """Mark a file that is about to change, because its modification time may stay the same."""
        try:
            self._changed.add(path.stat().st_ino)
        except OSError:
            return

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the folder's current content."""
        found: Snapshot = {}
        self._walk(str(self._folder), found)
        self._changed.clear()
        return found

    def _walk(self, folder: str, found: Snapshot) -> None:
        try:
            entries = sorted(os.scandir(folder), key=lambda each: each.name)
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            with contextlib.suppress(FileNotFoundError):  # another rank may have removed or renamed the file
                self._add(entry, found)

    def _add(self, entry: os.DirEntry[str], found: Snapshot) -> None:
        status = entry.stat(follow_symlinks=False)
        kind, source = self._described(entry.path, status)
        if kind:
            name = os.path.relpath(entry.path, self._folder)
            found[name] = Entry(kind, source, stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        if kind == "folder":
            self._walk(entry.path, found)

    def _described(self, path: str, status: os.stat_result) -> tuple[str, str]:
        if stat.S_ISLNK(status.st_mode):
            return "link", os.readlink(path)
        if stat.S_ISDIR(status.st_mode):
            return "folder", ""
        if stat.S_ISREG(status.st_mode):
            return "file", self._copy(path, status)
        return "", ""

    def _copy(self, path: str, status: os.stat_result) -> str:
        size, moment, copy = self._known.get(status.st_ino, (-1, -1, ""))
        is_same = (size, moment) == (status.st_size, status.st_mtime_ns)
        if is_same and status.st_ino not in self._changed:
            return copy
        self._count += 1
        copy = str(self._copies / str(self._count))
        shutil.copyfile(path, copy)
        self.copied += status.st_size
        self._known[status.st_ino] = (status.st_size, status.st_mtime_ns, copy)
        return copy


class StateRecorder:
    """Record the calls of a job below its folder, and the folder's state before them.

    The recorder skips most states between consecutive writes to one file. It records the states before write number 1,
    2, 4, 8 and so on.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        self.calls: list[Recorded] = []
        self.states: list[State] = []
        self._folder = folder
        self._store = Store(folder, copies)
        self._entries = 0  # number of entries in all states
        self._written = ""  # the path of the newest write
        self._writes = 0  # number of consecutive writes to this path
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> int:
        """Record a call, and return 0, so that the call continues."""
        with self._lock:
            recorded = self._relative(call)
            if self._is_wanted(recorded):
                self._take_state()
            self.calls.append(recorded)
            self._store.change(Path(call.path))
        return 0

    def finish(self) -> None:
        """Record the state after the last call."""
        self._take_state()

    def _take_state(self) -> None:
        if self._store.copied > RECORD_LIMIT or self._entries > ENTRY_LIMIT:
            return
        entries = self._store.snapshot()
        self._entries += len(entries)
        self.states.append(State(len(self.calls), entries))

    def _relative(self, call: Call) -> Recorded:
        path = os.path.relpath(call.path, self._folder)
        target = None if call.target is None else os.path.relpath(call.target, self._folder)
        size = 0
        if os.path.isfile(call.path):
            size = os.path.getsize(call.path)
        return Recorded(call.kind, path, target, time.time(), size)

    def _is_wanted(self, call: Recorded) -> bool:
        if call.kind in ("fsync", "sync"):
            return False  # a sync does not change the files that a killed process leaves
        if call.kind != "write" or call.path != self._written:
            self._writes = 0
        self._written = call.path
        self._writes += 1
        return self._writes & (self._writes - 1) == 0  # a power of two


def restore(entries: Snapshot, folder: Path, emptied: Iterable[str] = ()) -> None:
    """Create a folder with the content of a snapshot.

    Args:
        entries: snapshot to restore, by relative path.
        folder: path of the new folder.
        emptied: relative paths of files that are created empty, as after a power cut.
    """
    folder.mkdir()
    lost = set(emptied)
    for name, entry in entries.items():
        path = folder / name
        if entry.kind == "folder":
            path.mkdir()
        elif entry.kind == "link":
            path.symlink_to(entry.source)
        elif name in lost:
            path.touch()
        else:
            shutil.copyfile(entry.source, path)
    for name, entry in reversed(entries.items()):
        if entry.kind != "link":
            (folder / name).chmod(entry.mode)
            os.utime(folder / name, ns=(entry.time, entry.time))


# --- which calls save a checkpoint -----------------------------------------------------------------------------------


class Save(NamedTuple):
    """The calls between two steps that save a checkpoint.

    Attributes:
        done: number of steps before the save.
        calls: indices of the calls in the recorded calls, in order.
        weight: number of files written plus number of names changed.
    """

    done: int
    calls: list[int]
    weight: int


def saves(calls: Sequence[Recorded], times: Sequence[float]) -> list[Save]:
    """Return the saves of checkpoints among a run's calls.

    The calls between two steps are a save if they write a large file: one of at least half the largest file's size. A
    script may write several large files at different steps, such as numbered checkpoints and ``best.pt``. A save
    excludes calls on logs, and on files that the job also writes between two steps without writing a large file. File
    names are compared without digits.

    Args:
        calls: recorded calls of a run, in order.
        times: for each step, the time at which the fastest rank finished it, in seconds since 1970 as in
            `Recorded.time`.
    """
    groups = _groups(calls, times)
    middle = [group for group in groups if group.done < len(times)] or groups
    large = _large(calls, middle)
    between: set[str] = set()
    for group in middle:
        names = _names_in(calls, group)
        if large.isdisjoint(names):
            between |= names
    with_large = [group for group in groups if not large.isdisjoint(_names_in(calls, group))]
    return [_without(between, group, calls) for group in with_large]


def _without(names: set[str], group: Save, calls: Sequence[Recorded]) -> Save:
    """Return a group without its calls on files that ``names`` contains."""
    own = [number for number in group.calls if not names.issuperset(_names_of(calls[number]))]
    return Save(group.done, own, _weight([calls[number] for number in own]))


def _large(calls: Sequence[Recorded], groups: Sequence[Save]) -> set[str]:
    """Return the names of the files at least half as large as the largest file.

    If several groups write any of the files, only these files count. A large file that is written once may be a cache.
    """
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for group in groups:
        for name in _names_in(calls, group):
            counts[name] = counts.get(name, 0) + 1
        for number in group.calls:
            for name in _names_of(calls[number]):
                sizes[name] = max(sizes.get(name, 0), calls[number].size)
    repeated = [name for name in sizes if counts[name] > 1] or [*sizes]
    most = max((sizes[name] for name in repeated), default=0)
    return {name for name in repeated if 2 * sizes[name] >= most}


def _names_in(calls: Sequence[Recorded], group: Save) -> set[str]:
    found: set[str] = set()
    for number in group.calls:
        found |= _names_of(calls[number])
    return found


def _names_of(call: Recorded) -> set[str]:
    """Return a call's path and target, in which ``#`` replaces digits."""
    return {without_digits(path) for path in (call.path, call.target) if path}


def _groups(calls: Sequence[Recorded], times: Sequence[float]) -> list[Save]:
    """Return one group for the calls after each step, without ``sync`` and without calls on logs."""
    logs = _logs(calls, times)
    groups: dict[int, list[int]] = {}
    for number, (call, done) in enumerate(zip(calls, _steps_before(calls, times))):
        if done > 0 and call.kind != "sync" and call.path not in logs:
            groups.setdefault(done, []).append(number)
    found = []
    for done, numbers in sorted(groups.items()):
        found.append(Save(done, numbers, _weight([calls[number] for number in numbers])))
    return found


def _steps_before(calls: Sequence[Recorded], times: Sequence[float]) -> list[int]:
    """Return the number of steps before each call.

    A thread may write a file during several steps, and then rename it. All calls in this time count as calls after the
    first of these steps.
    """
    found = [bisect_right(times, call.time) for call in calls]
    begun: dict[str, int] = {}  # by path: number of the first call on the file since it was renamed or deleted
    for number, call in enumerate(calls):
        if call.kind in CHANGES:
            begun.setdefault(call.path, number)
        elif call.kind in RENAMES:
            inside = [path for path in begun if f"{path}/".startswith(f"{call.path}/")]
            first = min((begun.pop(path) for path in inside), default=number)
            if call.kind == "rename" and found[number] - found[first] <= MOST_STEPS_OF_SAVE:
                for each in range(first, number + 1):
                    found[each] = found[first]
    return found


def _logs(calls: Sequence[Recorded], times: Sequence[float]) -> set[str]:
    """Return the paths of files that only grow over several steps, and that no call renames, links or deletes."""
    sizes: dict[str, list[int]] = {}
    groups: dict[str, set[int]] = {}
    moved: set[str] = set()
    for call in calls:
        if call.kind == "write":
            sizes.setdefault(call.path, []).append(call.size)
            groups.setdefault(call.path, set()).add(bisect_right(times, call.time))
        elif call.kind in RENAMES:
            moved.add(call.path)
            moved.add(call.target or call.path)
    found = set()
    for path, of_path in sizes.items():
        grows = all(before < after for before, after in zip(of_path, of_path[1:]))
        if grows and len(groups[path]) > 1 and path not in moved:
            found.add(path)
    return found


def _weight(calls: Sequence[Recorded]) -> int:
    """Return the number of files that calls write plus the number of names that they change."""
    written = {call.path for call in calls if call.kind in CHANGES}
    renamed = [call for call in calls if call.kind in RENAMES]
    return len(written) + len(renamed)


def chosen(found: Sequence[Save], total: int) -> Save | None:
    """Return the save to test, or None if a run has fewer than two saves.

    The save comes after the first save and before the run's end, and has the largest weight. If several saves have this
    weight, the function returns the last of them.

    Args:
        found: the saves of a run, in order.
        total: the run's number of steps.
    """
    later = [save for save in found[1:] if save.done < total] or found[1:]
    return max(reversed(later), key=lambda save: save.weight, default=None)


def states_of(save: Save, calls: Sequence[Recorded], states: Sequence[State], most: int) -> list[State]:
    """Return states of a save in this order: the first, the last, states around renames, the rest spread evenly.

    Args:
        save: the save to test.
        calls: recorded calls of the run, in order.
        states: recorded states of the run, in order.
        most: largest number of returned states.
    """
    numbers = set(save.calls)
    own = [state for state in states if state.call in numbers]
    after = [state for state in states if state.call > save.calls[-1]]
    own += after[:1]
    first = [*own[:1], *own[-1:]]
    for before, state in zip(own, own[1:]):
        if calls[before.call].kind in RENAMES:
            first += [before, state]
    found = {state.call: state for state in [*first, *_spread(own)]}
    return [*found.values()][:most]


def _spread(states: Sequence[State]) -> list[State]:
    """Return the states in an order in which each prefix is spread evenly over all states."""
    count = len(states)
    found: dict[int, State] = {}
    parts = 1
    while len(found) < count:
        parts *= 2
        for part in range(1, parts, 2):
            place = count * part // parts
            found[place] = states[place]
        if parts > count:
            found.update(enumerate(states))
    return [*found.values()]


def words_of(state: State, save: Save, calls: Sequence[Recorded]) -> str:
    """Return the moment of a state within a save, as text.

    Args:
        state: a recorded state of the save.
        save: the save to which the state belongs.
        calls: recorded calls of the run, in order.
    """
    if state.call > save.calls[-1] or state.call >= len(calls):
        return "after the save"
    call = calls[state.call]
    target = f" to {call.target}" if call.target else ""
    size = f" at byte {call.size}" if call.kind == "write" else ""
    return f"before the {call.kind} of {call.path}{target}{size}"


# --- a power cut -----------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """The folder after a power cut.

    Attributes:
        state: the folder as recorded, without the power cut.
        lost: files that are empty after the cut, because they were renamed without an fsync.
    """

    state: State
    lost: frozenset[str]


class _Unsynced:
    """Track the files that a power cut empties: files that were renamed or linked without an fsync."""

    def __init__(self) -> None:
        self._written: set[str] = set()  # files that have no fsync after their last write
        self.lost: set[str] = set()

    def follow(self, call: Recorded) -> None:
        """Update the tracked files after one call."""
        if call.kind in CHANGES:
            self._written.add(call.path)
        elif call.kind == "sync":
            self._written.clear()
            self.lost.clear()
        elif call.kind in ("fsync", "unlink"):
            self._written.discard(call.path)
            self.lost.discard(call.path)
        elif call.target:
            self._move(call.path, call.target, is_link=call.kind == "link")

    def _move(self, path: str, target: str, is_link: bool) -> None:
        self.lost.discard(target)
        self._written.discard(target)
        moved = {name for name in self._written if _is_or_below(name, path)}
        renamed = {target + name.removeprefix(path) for name in moved}
        if not is_link:
            kept = {name for name in self.lost if not _is_or_below(name, path)}
            renamed |= {target + name.removeprefix(path) for name in self.lost - kept}
            self._written -= moved
            self.lost = kept
        self._written |= renamed
        self.lost |= renamed


def _is_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def cuts(save: Save, calls: Sequence[Recorded], states: Sequence[State]) -> list[Cut]:
    """Return the folder after a power cut at each rename, link or deletion and at the save's end, if files are lost.

    The files that were written before the save count as complete.

    Args:
        save: the save that the power cut interrupts.
        calls: recorded calls of the run, in order.
        states: recorded states of the run, in order.
    """
    unsynced = _Unsynced()
    found: dict[tuple[int, frozenset[str]], Cut] = {}
    own = set(save.calls)
    for number in range(save.calls[0], save.calls[-1] + 1):
        call = calls[number]
        if number in own or call.kind == "sync":
            unsynced.follow(call)
        is_moment = call.kind in RENAMES or number == save.calls[-1]
        state = next((state for state in states if state.call > number), None)
        if is_moment and unsynced.lost and state is not None:
            lost = frozenset(unsynced.lost)
            found[state.call, lost] = Cut(state, lost)
    return [*found.values()]


def renames(save: Save, calls: Sequence[Recorded]) -> int:
    """Return the number of renames and hard links in a save."""
    return sum(calls[number].target is not None for number in save.calls)


# --- a full disk -----------------------------------------------------------------------------------------------------


class FullDisk:
    """Fail a job's writes with ENOSPC after the middle of a save.

    Args:
        folder: the job's folder.
        save: a save of an earlier run of the job.
        calls: recorded calls of that run, in order.
        done: function that returns the number of steps so far.

    Attributes:
        path: the file whose write failed first, relative to the folder; empty until then.
    """

    def __init__(self, folder: Path, save: Save, calls: Sequence[Recorded], done: Callable[[], int]) -> None:
        own = set(save.calls)
        writes = [(number in own, call.path) for number, call in enumerate(calls) if call.kind == "write"]
        self.path = ""
        self._folder = folder
        self._done = done
        self._first_step = save.done
        self._left = sum(calls[number].kind == "write" for number in save.calls) // 2  # writes that succeed
        # The names of temporary files may be random, so a file with an unknown name belongs to the save.
        self._others = {without_digits(path) for is_own, path in writes if not is_own}
        self._others -= {without_digits(path) for is_own, path in writes if is_own}

    def __call__(self, call: Call) -> int:
        """Return ENOSPC for a write after the middle of the save, and 0 for any other call."""
        if call.kind != "write":
            return 0
        path = os.path.relpath(call.path, self._folder)
        if self.path:
            return errno.ENOSPC
        if without_digits(path) in self._others or self._done() < self._first_step:
            return 0
        self._left -= 1
        if self._left >= 0:
            return 0
        self.path = path
        return errno.ENOSPC
