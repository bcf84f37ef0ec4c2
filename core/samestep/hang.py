"""Who holds the others up, and where? What the watchdog of a rank loads when it finds no progress.

Each rank leaves ``log/hang-<r>.json``: where its main thread stands, the collective that it called last, and the stacks
of all its threads, taken from within. A rank that cannot answer is looked at from outside: its last heartbeat, the
state of its process, and the stacks that a C thread of Python's writes to ``log/stack-<r>.txt`` where the interpreter
is held. From these files each rank comes to the same verdict. `autopsy` prints them.

A rank waits for the others where its line of code bears the comment ``# ranks talk``, or calls into a module of a
framework's collectives; in torch's apps also where the flight recorder has a collective that has not ended.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from samestep.env import detect
from samestep.watchdog import is_own

if TYPE_CHECKING:
    from samestep.watchdog import Watchdog

LATE = 3.0  # seconds without a heartbeat after which a rank that does not answer is no longer just slow
JUDGED = 0.7  # seconds that the verdict may take once the other ranks have left their part
RECENT = 15.0  # seconds after which a hang of a job without a name is another one
MARK = "# ranks talk"
COLLECTIVES = re.compile(r"/(horovod|distributed|communication)/")  # folders of frameworks' modules in which ranks wait
_leaving = threading.RLock()  # both of a watchdog's threads write their rank's part of a hang
TOLD = {"step", "time", "rank", "pid", "host"}  # by each heartbeat, and so by each rank's part of a hang
MOST = 2**20  # bytes of any file that is read here
SHOWN = 70  # characters of a line of code in a message


# --- what a rank leaves ----------------------------------------------------------------------------------------------


def leave(watchdog: Watchdog, **more: Any) -> None:
    """Write this rank's ``log/hang-<r>.json``."""
    its = watchdog.values()
    its |= {"world_size": watchdog.world_size, "waited": time.monotonic() - watchdog.last_progress, "collective": None}
    if watchdog.collectives:
        with contextlib.suppress(Exception):  # a framework of another version, say: stacks are there without it
            its["collective"] = watchdog.collectives()
    with _leaving:
        watchdog.write(f"hang-{its['rank']}.json", {**its, "threads": _threads(), **more})


def leave_if_others_hang(watchdog: Watchdog) -> None:
    """The same for a rank that has not found the hang itself, once."""
    values, folder = watchdog.values(), Path(watchdog.folder or "")
    if not _of_now(read_json(folder / "hanging"), values):
        return
    with _leaving:
        own = read_json(folder / f"hang-{values['rank']}.json")
        if not (_of_now(own, values) and own["pid"] == values["pid"]):
            leave(watchdog)


def _threads() -> list[dict[str, Any]]:
    """The stacks of all threads but this one, the main thread first; of each the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, this = threading.main_thread().ident, threading.get_ident()
    stacks: list[dict[str, Any]] = []
    for ident, innermost in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        calls = []
        frame: FrameType | None = innermost
        while frame:
            file, line = frame.f_code.co_filename, frame.f_lineno
            calls.append((file, line, frame.f_code.co_name, source(file, line)))
            frame = frame.f_back
        if ident != this:
            stacks.append({"name": names.get(ident, str(ident)), "calls": calls})
    return stacks


# --- lines of code ---------------------------------------------------------------------------------------------------


@cache
def _lines(file: str) -> list[str]:
    with contextlib.suppress(OSError):
        return _text(Path(file)).splitlines()
    return []


@cache
def _statements(file: str) -> list[tuple[int, int]]:
    """First and last line of each statement of a file; of a compound one, of its head."""
    found = []
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse("\n".join(_lines(file)))):
            if isinstance(node, (ast.stmt, ast.excepthandler)):
                body = getattr(node, "body", None)
                last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
                found.append((node.lineno, last))
    return found


def source(file: str, line: int) -> str:
    """The statement that a line belongs to, in one line, with its comments; "" where it cannot be read.

    Of what is not the program's own, the line alone: parsing a framework's files would take too long.
    """
    around = [each for each in _statements(file) if each[0] <= line <= each[1]] if is_own(file) else []
    first, last = min(around, key=lambda each: each[1] - each[0]) if around else (line, line)
    return " ".join(text.strip() for text in _lines(file)[first - 1 : last])


@dataclass(frozen=True)
class Place:
    """Where a thread stands."""

    file: str
    line: int
    function: str
    code: str  # with its comments

    @property
    def talks(self) -> bool:
        """Whether a rank that stands here waits for the others."""
        return MARK in self.code

    def __str__(self) -> str:
        code = re.sub(r"\s*#.*", "", self.code)
        code = code if len(code) <= SHOWN else f"{code[: SHOWN - 3]}..."
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}" + (f" ({code})" if code else "")


def _place(at: Any) -> Place | None:
    """Of what a heartbeat says, or one call of a stack; None where it says nothing."""
    try:
        file, line, function, *code = at
        return Place(str(file), int(line), str(function), str(code[0]) if code else source(str(file), int(line)))
    except (TypeError, ValueError):
        return None


# --- what is known of a rank -----------------------------------------------------------------------------------------


@dataclass
class View:
    """A rank, as this machine's files and processes tell."""

    rank: int
    its: dict[str, Any]  # its part of the hang; its heartbeat, where it left none
    answered: bool  # it left its part
    trouble: str = ""  # why it does not answer
    place: Place | None = None
    fresh: bool = True  # the place is of now, not of its last heartbeat

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.its['host']}, pid {self.its['pid']})"

    @property
    def step(self) -> int:
        return int(self.its["step"])

    @property
    def collective(self) -> dict[str, Any]:
        """Of torch's flight recorder: name, number, pending; {} where there is none."""
        found = self.its.get("collective")
        return found if isinstance(found, dict) else {}

    @property
    def waits(self) -> bool:
        """Whether it stands in a collective."""
        return bool(self.collective.get("pending") or (self.place and self.place.talks) or self._below())

    def _below(self) -> bool:
        """Whether its own innermost call has led into a module of collectives."""
        with contextlib.suppress(LookupError, TypeError):
            files = [str(call[0]) for call in self.its["threads"][0]["calls"]]
            own = next((i for i, file in enumerate(files) if self.place and file == self.place.file), 0)
            return any(COLLECTIVES.search(file) for file in files[:own])
        return False

    @property
    def stands(self) -> str:
        """Where: "waits in all_reduce 115 [7] double at train.py:105 in train (dist.all_reduce(sums))"."""
        if not self.place:
            return "stands where nobody knows: it has not said so"
        at = f"at {self.place}"
        if not self.fresh:
            return f"last seen {at}"
        if not self.waits:
            return f"stands {at}"
        return f"waits in {self.collective['name']} {at}" if self.collective.get("pending") else f"waits {at}"

    @property
    def apart(self) -> tuple[Any, ...]:
        """In what ranks that wait for each other must be alike."""
        return self.collective.get("name"), self.place and (self.place.file, self.place.line)


def look(folder: Path, rank: int, now: Mapping[str, Any]) -> View | None:
    """What is known of a rank in the hang that ``now``, a rank's values, is of; None where nothing is."""
    its = read_json(folder / f"hang-{rank}.json")
    if its.keys() >= TOLD and _of_now(its, now) and "written_by" not in its:
        return View(rank, its, True, place=_place(its.get("at")))
    its = read_json(folder / f"alive-{rank}")
    if not its.keys() >= TOLD or its.get("job") != now["job"]:
        return None
    view = View(rank, its, False, place=_place(its.get("at")), fresh=False)
    silent, stacks = _silent(folder, rank, its, now), read_stacks(folder / f"stack-{rank}.txt")
    view.trouble = _trouble(its, silent > LATE)
    if stacks:
        disk = any((place := _innermost(calls)) and place.function == "write" for calls in stacks[1:])
        view.trouble = view.trouble or ("its run dir's disk hangs" if disk else "its interpreter held by C code")
        view.place, view.fresh = _innermost(stacks[0]) or view.place, True
    if view.trouble or silent > LATE:
        view.trouble = f"silent for {silent:.0f} s" + (f", {view.trouble}" if view.trouble else "")
    return view


def _silent(folder: Path, rank: int, its: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Seconds since a rank's last heartbeat. Another host's clock may differ: there the disk tells, which has one."""
    if its["host"] == now["host"]:
        return max(0.0, time.time() - float(its["time"]))
    with contextlib.suppress(OSError):
        own, other = (Path(folder, f"alive-{each}").stat().st_mtime for each in (now["rank"], rank))
        return max(0.0, own - other)
    return 0.0


def crashes(folder: Path | None, job: str, program: Path | None = None) -> str:
    """Of ranks of this job that a signal such as ABRT has ended where they stood: others see a lost connection alone.

    ``program``, a folder, holds the app where the caller is not one of its ranks. Gives
    "; rank 0 (host, pid 7) died (Aborted) at train.py:105 in train (dist.all_reduce(sums))"; "" where there are none.
    """
    words = []
    for path in sorted(folder.glob("stack-*.txt")) if folder else ():
        its = read_json(path.with_name(f"alive-{path.stem.partition('-')[2]}"))
        with contextlib.suppress(OSError, IndexError, KeyError):
            found = re.match(r"Fatal Python error: (.+)", _text(path))
            if found and its["job"] == job:
                place = _innermost(read_stacks(path)[0], str(program or os.devnull))
                words.append(f"; rank {its['rank']} ({its['host']}, pid {its['pid']}) died ({found[1]}) at {place}")
    return "".join(words)


def all_are_here(watchdog: Watchdog, ranks: int) -> bool:
    """Whether so many ranks of this job live on this machine, by their heartbeats and processes."""
    values = [read_json(path) for path in (watchdog.folder or Path(os.devnull)).glob("alive-*")]
    mine = [its for its in values if its.keys() >= TOLD and its.get("job") == watchdog.job]
    here = [its for its in mine if its["host"] == socket.gethostname()]
    return len(here) >= ranks and not any("process" in _trouble(its, False) for its in here)


def _trouble(its: Mapping[str, Any], silent: bool) -> str:
    """What this machine knows of a process that says nothing; "" where it runs, or is another machine's."""
    if its["host"] != socket.gethostname() or not Path("/proc/self/stat").exists():
        return ""
    try:
        state = Path(f"/proc/{its['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process is gone"
    words = {"T": f"stopped by a signal (kill -CONT {its['pid']} continues it)", "t": "stopped by a debugger"}
    words |= {"Z": "its process is dead", "X": "its process is dead"}
    words |= {"D": "waiting for a disk or a device"} if silent else {}  # as any process does now and then
    opened = _open_files(int(its["pid"])) if state in "TtD" else ""
    return words.get(state, "") + (f" while it has {opened} open" if opened and state in words else "")


def _open_files(pid: int) -> str:
    """The file that a process has open for a checkpoint: what it was writing when it was stopped."""
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            path = os.readlink(link)
            if "/checkpoints/" in path or path.endswith(".tmp"):
                return "/".join(Path(path).parts[-2:])
    return ""


def read_stacks(path: Path) -> list[list[Place]]:
    """The stacks that `faulthandler` wrote, the main thread's first: the thread that began first comes last."""
    stacks: list[list[Place]] = []
    with contextlib.suppress(OSError):
        for line in _text(path).splitlines():
            if line.startswith(("Thread ", "Current thread ")):
                stacks.append([])
            elif stacks and (found := re.fullmatch(r'  File "(.+)", line (\d+) in (.+)', line)):
                file, number, function = found.groups()
                stacks[-1].append(Place(file, int(number), function, source(file, int(number))))
    return stacks[::-1]


def _innermost(calls: Iterable[Place], program: str = os.devnull) -> Place | None:
    every = list(calls)
    own = (place for place in every if is_own(place.file) or place.file.startswith(program))
    return next(own, every[0] if every else None)


def _of_now(its: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a file is of the hang that a rank has found now: a restarted job finds those of the one before."""
    if not {"job", "rank", "time", "pid"} <= its.keys():
        return False
    recent = now["time"] - its["time"] < RECENT or its.get("host") != now["host"]  # which has a clock of its own
    return bool(its["job"] == now["job"] and recent)


def read_json(path: Path) -> dict[str, Any]:
    """A file of JSON; {} where there is none, or a crash left it damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_text(path))
        return found if isinstance(found, dict) else {}
    return {}


def _text(path: Path) -> str:
    """A regular file's text: a pipe in its place would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MOST).decode(errors="replace") if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""


# --- who is to blame -------------------------------------------------------------------------------------------------


def explain(watchdog: Watchdog, until: float) -> str:
    """This rank has found no progress: who holds the others up, and where, as far as this machine's files tell.

    The others have until then, on the clock `time.monotonic`, to leave their part; they look each second.
    """
    now, folder = watchdog.values(), watchdog.folder
    if folder is None:
        return verdict([View(now["rank"], now, True, place=_place(now["at"]))], watchdog.world_size, {})
    watchdog.write("hanging", now)
    leave(watchdog)
    views: dict[int, View] = {}
    while True:
        for rank in range(watchdog.world_size):
            if not (rank in views and views[rank].answered) and (view := look(folder, rank, now)):
                views[rank] = view
        if all(view.answered or view.trouble for view in views.values()) or time.monotonic() > until - JUDGED:
            break
        time.sleep(0.05)
    silent = {} if len(views) == watchdog.world_size else _processes(now["job"])
    text = verdict([views[rank] for rank in sorted(views)], watchdog.world_size, silent)
    said = read_json(folder / f"hang-{read_json(folder / 'stalled').get('rank')}.json")
    return str(said["verdict"]) if "verdict" in said and _of_now(said, now) else text  # the console is to show one line


def keep(watchdog: Watchdog, told: str) -> str:
    """Leave the verdict for `autopsy`, and what is known of ranks that cannot do so: a restart loses heartbeats."""
    leave(watchdog, verdict=told)
    now, folder = watchdog.values(), watchdog.folder
    for rank in range(watchdog.world_size) if folder else ():
        if folder and (view := look(folder, rank, now)) and not view.answered:
            calls = as_json(_stack_of(folder, view))
            known = {**view.its, "world_size": watchdog.world_size, "trouble": view.trouble, "written_by": now["rank"]}
            watchdog.write(f"hang-{rank}.json", {**known, "threads": [{"name": "MainThread", "calls": calls}]})
    return told


def as_json(calls: Iterable[Place]) -> list[tuple[str, int, str, str]]:
    """As in ``log/hang-<r>.json``."""
    return [(place.file, place.line, place.function, place.code) for place in calls]


def _stack_of(folder: Path, view: View) -> list[Place]:
    stacks = read_stacks(folder / f"stack-{view.rank}.txt")
    return stacks[0] if stacks else [view.place] if view.place else []


def verdict(views: list[View], world_size: int, processes: Mapping[int, int]) -> str:
    """Who is to blame, in words. ``processes``: ids by rank of those on this machine that have not said anything."""
    missing = sorted(set(range(world_size)) - {view.rank for view in views})
    if not views:
        return "no heartbeat can be read"
    blamed = _blamed(views)
    others = [view for view in views if view not in blamed]
    if missing and all(view.waits and not view.trouble for view in views):  # all that are seen wait for those
        return f"{_absent(missing, world_size, processes)}; {_together(views)}"
    words = [_accused(view, others) for view in blamed[:2]]
    words += [f"so do {len(blamed) - 2} more"] if len(blamed) > 2 else []
    words += (
        ["these do not match"] if len(blamed) > 1 and all(view.waits and not view.trouble for view in blamed) else []
    )
    words += [_together(others, the_others=True)] if others else []
    words += [_absent(missing, world_size, processes)] if missing else []
    return "; ".join(words)


def _blamed(views: list[View]) -> list[View]:
    """A rank that does not answer; else one that does not wait; else, of those that wait, what differs."""
    if silent := [view for view in views if view.trouble]:
        return sorted(silent, key=lambda view: view.its["time"])
    if busy := [view for view in views if not view.waits]:  # of these the one with the fewest steps is stuck
        fewest = min(view.step for view in busy)
        return _odd([view for view in busy if view.step == fewest])
    numbers = [view.collective.get("number") for view in views]
    if None not in numbers and len(set(numbers)) > 1:
        return [view for view in views if view.collective["number"] == min(n for n in numbers if n is not None)]
    return _odd(views)


def _odd(views: list[View]) -> list[View]:
    """Of ranks that do not stand alike, one of those that stand where fewest do; where several do, one of each."""
    kinds: dict[tuple[Any, ...], list[View]] = {}
    for view in views:
        kinds.setdefault(view.apart, []).append(view)
    fewest = min(len(each) for each in kinds.values())
    return [each[0] for each in kinds.values() if len(each) == fewest]


def _accused(view: View, others: list[View]) -> str:
    alone = not view.trouble and not view.waits and any(other.waits for other in others)
    words = [f"{view.name} last alive at step {view.step}", *filter(None, [view.trouble])]
    words[-1] += f"{',' * (bool(view.trouble) or not view.fresh)} {view.stands}"
    return ", ".join(words + ["not in a collective"] * alone)


def _together(views: list[View], the_others: bool = False) -> str:
    """Those that stand alike in one breath: "ranks 0, 2-7 wait in all_reduce 115 [7] double at train.py:105"."""
    groups: dict[str, list[View]] = {}
    for view in views:
        groups.setdefault(view.stands, []).append(view)
    words = []
    for stands, group in sorted(groups.items(), key=lambda item: -len(item[1]))[:2]:
        if len(group) == 1:
            words.append(f"{group[0].name} {stands}")
            continue
        who = "the others" if the_others and len(groups) == 1 else f"ranks {spans(view.rank for view in group)}"
        words.append(f"{who} {re.sub('^(stand|wait)s', lambda found: found[1], stands)}")
    return "; ".join([*words, f"{len(groups) - 2} more stand elsewhere"][: 3 if len(groups) > 2 else len(words)])


def _absent(missing: list[int], world_size: int, processes: Mapping[int, int]) -> str:
    here = [
        f"rank {rank} is pid {processes[rank]}, which has not come to its Run" for rank in missing if rank in processes
    ]
    ranks = f"{len(missing)} of {world_size} ranks never seen from here: {spans(missing)}"
    return f"{ranks} ({'; '.join(here[:2])})" if here else ranks


def spans(ranks: Iterable[int]) -> str:
    """ "0, 2-7" for 0, 2, 3, 4, 5, 6, 7."""
    every = sorted(ranks)
    begins = [rank for rank in every if rank - 1 not in every]
    ends = [rank for rank in every if rank + 1 not in every]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends))


def _processes(job: str) -> dict[int, int]:
    """This machine's ranks of a job, by its environment: also those that have not said anything yet."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/environ") if job else ():
        with contextlib.suppress(Exception):  # processes come and go, and an environment may be of anything
            pairs = [item.partition("=") for item in path.read_bytes().decode(errors="replace").split("\0") if item]
            environ = {name: value for name, _, value in pairs}
            if environ.get("SAMESTEP_JOB") == job and (world := detect(environ)).launcher != "none":
                found.setdefault(world.rank, int(path.parent.name))
    return found
