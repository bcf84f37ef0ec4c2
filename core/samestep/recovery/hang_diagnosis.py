"""Diagnose a hang: find the rank that the other ranks wait for, and its line of code.

Each rank writes ``log/hang-<r>.json``: its location in the program, its last collective, and the stacks of all its
threads. If a rank cannot write this file, the others use its last heartbeat, the state of its process, and
``log/stack-<r>.txt``. A C thread of Python's faulthandler writes stacks to ``log/stack-<r>.txt`` if the interpreter is
blocked. Every rank computes a diagnosis from these files, but reports the diagnosis of an earlier rank if that rank has
written one. `samestep_observe.hang_report` prints the files.

A rank waits for the others if its last collective has not completed, or if its code is in a call of a framework's
collectives. The rank itself detects both conditions at run time. A rank imports this module only when it makes no
progress, fails or stops.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.env import detect
from samestep.job_info import JobInfo
from samestep.recovery.rank_files import PROGRAM, CodeLocation, own_location, stacks
from samestep.untrusted import (
    MAX_LINE,
    check,
    integer,
    mapping,
    number,
    optional,
    read_object,
    read_text,
    shown,
    text,
    write_json,
)

HEARTBEAT_TIMEOUT = 3.0  # seconds without a heartbeat after which a rank counts as silent
DIAGNOSIS_BUDGET = 0.7  # seconds reserved for the diagnosis after the other ranks have written their files
MAX_AGE = 15.0  # seconds; an older file of this host belongs to an earlier hang
_COUNT = integer(0, 2**62)
_NAME = text(1000)
_HEARTBEAT = {"step": _COUNT, "time": number(), "rank": _COUNT, "pid": integer(1, 2**31 - 1), "host": _NAME}
_COLLECTIVE = {"name": _NAME, "number": integer(-1, 2**62), "pending": lambda value: isinstance(value, bool)}
_OPTIONAL = {
    "job": optional(_NAME),
    "verdict": optional(text(10_000)),
    "collective": optional(mapping(lambda value: True)),
}
_dump_lock = threading.RLock()  # needed because both threads of a watchdog write their rank's file

State = Mapping[str, Any]  # the values of a rank in a heartbeat or a hang-<r>.json


# --- a rank's own file -----------------------------------------------------------------------------------------------


def dump_state(folder: Path, state: State, **extra: Any) -> None:
    """Write this rank's ``hang-<r>.json``: its ``state``, the stacks of all its threads, and ``extra``.

    Args:
        folder: the run dir's ``log`` folder.
        state: this rank's `samestep.recovery.watchdog.Watchdog.state`.
        **extra: further JSON values, such as the verdict.
    """
    with _dump_lock:
        write_json(folder, f"hang-{state['rank']}.json", {**state, "threads": _threads(), **extra}, state["rank"])


def dump_state_if_others_hang(folder: Path, heartbeat: State, get_state: Callable[[], State]) -> None:
    """Write this rank's ``hang-<r>.json`` once, if another rank has detected a hang.

    Args:
        folder: the run dir's ``log`` folder.
        heartbeat: this rank's newest heartbeat, which contains the job's name.
        get_state: function that returns the state to write.
    """
    if not _is_of_hang(_read_rank(folder / "hanging"), heartbeat):
        return
    with _dump_lock:
        own = _read_rank(folder / f"hang-{heartbeat['rank']}.json")
        is_written = _is_of_hang(own, heartbeat) and own["pid"] == heartbeat["pid"]
        if not is_written:
            dump_state(folder, get_state())


def _threads() -> list[dict[str, Any]]:
    """Return the stacks of all threads except the calling thread, with the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = stacks()
    found.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    threads = []
    for ident in sorted(found, key=lambda ident: ident != main):
        calls = [call.with_code() for call in found[ident]]
        threads.append({"name": names.get(ident, str(ident)), "calls": calls})
    return threads


# --- the state of a rank ---------------------------------------------------------------------------------------------


@dataclass
class RankState:
    """The state of a rank, according to this machine's files and processes."""

    rank: int
    values: State  # content of the rank's hang-<r>.json, or of its heartbeat if not `answered`
    answered: bool  # whether the rank has written its hang-<r>.json
    location: CodeLocation | None = None
    is_current: bool = True  # False if the location is from the last heartbeat
    trouble: str = ""  # the reason why the rank does not answer, or ""

    @property
    def name(self) -> str:
        """Return the rank, its host and its process id, such as "rank 1 (host, pid 7)"."""
        return f"rank {self.rank} ({shown(self.values['host'])}, pid {self.values['pid']})"

    @property
    def step(self) -> int:
        """Return the number of updates done."""
        return int(self.values["step"])

    @property
    def collective(self) -> State:
        """Return the name, number and state (pending or not) of the rank's last collective; {} if none is recorded."""
        return self.values.get("collective") or {}

    @property
    def is_waiting(self) -> bool:
        """Return whether the rank waits for the others in a collective."""
        return bool(self.collective.get("pending") or self.values.get("waiting"))

    @property
    def position(self) -> str:
        """Return the rank's position, such as "waits in all_reduce 115 at train.py:105 in train (...)"."""
        location = self.location or "an unknown location"
        if not self.is_current:
            return f"last seen at {location}"
        verb = "waits" if self.is_waiting else "is"
        if self.collective.get("pending"):
            return f"{verb} in {shown(self.collective['name'])} at {location}"
        return f"{verb} at {location}"


def _read_rank(path: Path) -> dict[str, Any]:
    """Return the values in a rank's file; {} if the file is missing or invalid."""
    values = read_object(path)
    with contextlib.suppress(ValueError):
        check(values, _HEARTBEAT)
        check({**dict.fromkeys(_OPTIONAL), **values}, _OPTIONAL)
        check(values.get("collective") or {"name": "", "number": 0, "pending": False}, _COLLECTIVE)
        return values
    return {}


def read_state(folder: Path, rank: int, now: State) -> RankState | None:
    """Return a rank's state according to the files in ``folder``; None if the rank has no file of this job.

    Args:
        folder: the run dir's ``log`` folder.
        rank: the rank to read.
        now: state of the calling rank.
    """
    values = _read_rank(folder / f"hang-{rank}.json")
    if _is_of_hang(values, now) and "written_by" not in values:
        return RankState(rank, values, answered=True, location=_location(values))
    values = _read_rank(folder / f"alive-{rank}")
    if not values or values.get("job") != now["job"]:
        return None
    state = RankState(rank, values, answered=False, location=_location(values), is_current=False)
    silence = _seconds_since_heartbeat(folder, rank, values=values, now=now)
    is_silent = silence > HEARTBEAT_TIMEOUT
    state.trouble = _process_trouble(values, is_silent)
    stacks = read_stacks(folder / f"stack-{rank}.txt")
    if stacks:
        _take_stacks(state, stacks)
    if state.trouble:
        state.trouble = f"silent for {silence:.0f} s, {state.trouble}"
    elif is_silent:
        state.trouble = f"silent for {silence:.0f} s"
    return state


def _take_stacks(state: RankState, stacks: list[list[CodeLocation]]) -> None:
    """Set a rank's location from its stacks, which a C thread wrote because the interpreter was blocked."""
    if not state.trouble:
        state.trouble = "its interpreter held by C code"
        if any(_is_writing(calls) for calls in stacks[1:]):
            state.trouble = "its run dir's disk hangs"
    if stacks[0]:
        state.location = own_location(stacks[0])
    state.is_current = True


def _is_writing(calls: list[CodeLocation]) -> bool:
    return any(call.function == "write_json" for call in calls)


def _location(values: State) -> CodeLocation | None:
    """Return the location in a heartbeat; None if the heartbeat has no valid location."""
    with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError):
        file, line, function, *code = values["at"]
        return CodeLocation(str(file), int(line), str(function), *map(str, code)).with_code()
    return None


def _seconds_since_heartbeat(folder: Path, rank: int, values: State, now: State) -> float:
    """Return the age of a rank's heartbeat in seconds.

    The clock of another host may differ. So the age of a heartbeat from another host is the difference of two files'
    modification times.
    """
    if values["host"] == now["host"]:
        return max(0.0, time.time() - float(values["time"]))
    with contextlib.suppress(OSError):
        own = Path(folder, f"alive-{now['rank']}").stat().st_mtime
        other = Path(folder, f"alive-{rank}").stat().st_mtime
        return max(0.0, own - other)
    return 0.0


def _process_trouble(values: State, is_silent: bool) -> str:
    """Describe the state of a process that does not answer; return "" if it runs, or is on another machine."""
    if values["host"] != socket.gethostname() or not Path("/proc/self/stat").exists():
        return ""
    pid = int(values["pid"])
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process is gone"
    if state in ("Z", "X"):
        return "its process is dead"
    if state == "T":
        trouble = f"stopped by a signal (kill -CONT {pid} continues it)"
    elif state == "t":
        trouble = "stopped by a debugger"
    elif state == "D" and is_silent:  # a healthy process is in this state for short times
        trouble = "waiting for a disk or a device"
    else:
        return ""
    open_file = _open_checkpoint_file(pid)
    if open_file:
        return f"{trouble} while it has {open_file} open"
    return trouble


def _open_checkpoint_file(pid: int) -> str:
    """Return the path of a checkpoint's file that a process has open, or ""."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            path = os.readlink(link)
            if "/checkpoints/" in path or path.endswith(".tmp"):
                return "/".join(Path(path).parts[-2:])
    return ""


def read_stacks(path: Path) -> list[list[CodeLocation]]:
    """Return the stacks that `faulthandler` wrote, the main thread's first. A stack begins with the innermost call."""
    stacks: list[list[CodeLocation]] = []
    with contextlib.suppress(OSError):
        for line in read_text(path).splitlines():
            call = re.fullmatch(r'  File "(.+)", line ([0-9]{1,9}) in (.+)', line)
            if line.startswith(("Thread ", "Current thread ")):
                stacks.append([])
            elif stacks and call:
                location = CodeLocation(file=call[1], line=int(call[2]), function=call[3])
                stacks[-1].append(location.with_code())
    return stacks[::-1]  # `faulthandler` writes the stack of the main thread last


def _is_of_hang(values: State, now: State) -> bool:
    """Return whether a file's values belong to the current hang, and not to an earlier start of the job."""
    if not values or values.get("job") != now["job"]:
        return False
    if values["host"] != now["host"]:  # the clock of another host may differ
        return True
    return bool(now["time"] - values["time"] < MAX_AGE)


# --- the state of a job ----------------------------------------------------------------------------------------------


def crashes(folder: Path, job: str, program: Path = PROGRAM) -> str:
    """Describe the ranks of this job that a signal such as SIGABRT ended. Other ranks report a lost connection.

    Args:
        folder: the run dir's ``log`` folder.
        job: the job's name.
        program: the folder of the app; required if the caller is not a rank.

    Returns:
        "; rank 0 (host, pid 7) died (Aborted) at train.py:105 in train (dist.all_reduce(sums))", or "".
    """
    texts = []
    for path in sorted(folder.glob("stack-*.txt")):
        rank = path.stem.removeprefix("stack-")
        values = _read_rank(path.with_name(f"alive-{rank}"))
        with contextlib.suppress(OSError, IndexError):
            error = re.match(r"Fatal Python error: (.{1,200})", read_text(path))
            if error and values.get("job") == job:
                name = RankState(values["rank"], values, answered=False).name
                location = own_location(read_stacks(path)[0], program)
                texts.append(f"; {name} died ({error[1]}) at {location}")
    return "".join(texts)


def all_ranks_alive(folder: Path, job: str, count: int) -> bool:
    """Return whether at least ``count`` ranks of this job are alive on this machine, and none has ended.

    Args:
        folder: the run dir's ``log`` folder.
        job: the job's name in heartbeats.
        count: number of ranks on this machine.
    """
    alive = 0
    for path in folder.glob("alive-*"):
        values = _read_rank(path)
        if _is_here(values, job):
            if _is_ended(values):
                return False
            alive += 1
    return alive >= count


def rank_is_lost(folder: Path, job: str, world_size: int) -> bool:
    """Return whether a rank of this job on this machine has ended, according to the heartbeats' process ids.

    Args:
        folder: the run dir's ``log`` folder.
        job: the job's name in heartbeats.
        world_size: number of ranks of the job.
    """
    for rank in range(world_size):
        values = _read_rank(folder / f"alive-{rank}")
        if _is_here(values, job) and _is_ended(values):
            return True
    return False


def _is_here(values: State, job: str) -> bool:
    """Return whether a heartbeat belongs to this job and this machine."""
    return bool(values) and values.get("job") == job and values["host"] == socket.gethostname()


def _is_ended(values: State) -> bool:
    """Return whether the process that wrote a heartbeat on this machine is gone or dead."""
    return "its process" in _process_trouble(values, is_silent=False)


def _silent_processes(job: str) -> dict[int, int]:
    """Return the process ids of a job's ranks on this machine by rank, including ranks without a heartbeat.

    This function finds the ranks by the environment variables of all processes.
    """
    pids: dict[int, int] = {}
    if not job:
        return pids
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(Exception):  # a process may end at any time, and its variables may have any value
            environ = _environ(path)
            if JobInfo.from_environ(environ).job != job:
                continue
            world = detect(environ)
            if world.launcher != "none":
                pids.setdefault(world.rank, int(path.parent.name))
    return pids


def _environ(path: Path) -> dict[str, str]:
    """Return the environment variables in a process's file /proc/<pid>/environ."""
    environ = {}
    for item in path.read_bytes().decode(errors="replace").split("\0"):
        if item:
            name, _, value = item.partition("=")
            environ[name] = value
    return environ


# --- diagnosis -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. The suspects caused the hang; if no rank is a suspect, the missing ranks caused it."""

    suspects: list[RankState]
    others: list[RankState]
    missing: list[int]  # ranks without a heartbeat
    world_size: int


def diagnose(states: Sequence[RankState], world_size: int) -> Diagnosis:
    """Find the ranks that cause a hang.

    Args:
        states: the states of all ranks that have a file.
        world_size: number of ranks of the job.
    """
    missing = sorted(set(range(world_size)) - {state.rank for state in states})
    all_wait = all(state.is_waiting and not state.trouble for state in states)
    suspects = [] if missing and all_wait else _suspects(states)
    return Diagnosis(suspects, [state for state in states if state not in suspects], missing, world_size)


def _suspects(states: Sequence[RankState]) -> list[RankState]:
    """Return the silent ranks, or else the slowest ranks that do not wait, or else waiting ranks that differ.

    Waiting ranks differ if they have called fewer collectives, or are at another location than most ranks. Except for
    silent ranks and counts of collectives, `_smallest_group` chooses the result.
    """
    silent = [state for state in states if state.trouble]
    if silent:
        return sorted(silent, key=lambda state: state.values["time"])
    busy = [state for state in states if not state.is_waiting]
    if busy:
        return _smallest_group(_slowest(busy))
    numbers = [state.collective.get("number", -1) for state in states]
    first = min(numbers)
    if 0 <= first < max(numbers):
        return [state for state, number in zip(states, numbers) if number == first]
    return _smallest_group(states)


def _slowest(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks with the fewest steps."""
    fewest = min(state.step for state in states)
    return [state for state in states if state.step == fewest]


def _smallest_group(states: Sequence[RankState]) -> list[RankState]:
    """Return one rank from each of the smallest groups. A group's ranks have the same location and collective."""
    groups = _group(states, _place)
    fewest = min(len(group) for group in groups)
    return [group[0] for group in groups if len(group) == fewest]


def _place(state: RankState) -> tuple[Any, ...]:
    """Return the collective, the file and the line of a rank."""
    line = state.location[:2] if state.location else None
    return state.collective.get("name"), line


def _group(states: Iterable[RankState], key: Callable[[RankState], Any]) -> list[list[RankState]]:
    groups: dict[Any, list[RankState]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return list(groups.values())


def explain(folder: Path, now: State, deadline: float) -> str:
    """Diagnose a hang that this rank has detected, by the files that this machine can read.

    Args:
        folder: the run dir's ``log`` folder.
        now: state of the calling rank.
        deadline: time limit of the diagnosis, on the clock `time.monotonic`. The wait for the files of the other ranks
            ends DIAGNOSIS_BUDGET seconds earlier.

    Returns:
        One line: the diagnosis of the first rank that reported this hang, which may be this rank.
    """
    write_json(folder, "hanging", dict(now), now["rank"])
    dump_state(folder, now)
    states = {now["rank"]: RankState(now["rank"], now, True, _location(now))}
    while True:
        _update_states(states, folder, now=now)
        is_complete = all(state.answered or state.trouble for state in states.values())
        if is_complete or time.monotonic() > deadline - DIAGNOSIS_BUDGET:
            break
        time.sleep(0.05)
    diagnosis = diagnose([states[rank] for rank in sorted(states)], now["world_size"])
    processes = _silent_processes(now["job"]) if diagnosis.missing else {}
    diagnosed = format_diagnosis(diagnosis, processes)
    first_rank = read_object(folder / "stalled").get("rank")
    first = _read_rank(folder / f"hang-{first_rank}.json")
    if _is_of_hang(first, now) and first.get("verdict"):  # all ranks print the same line
        return shown(first["verdict"], limit=MAX_LINE)
    return diagnosed


def _update_states(states: dict[int, RankState], folder: Path, now: State) -> None:
    """Read the files of the ranks that had not written their ``hang-<r>.json`` at the last call."""
    for rank in range(now["world_size"]):
        if rank in states and states[rank].answered:
            continue
        state = read_state(folder, rank, now)
        if state:
            states[rank] = state


def save_diagnosis(folder: Path, now: State, text: str) -> None:
    """Write the diagnosis and the states of all ranks that do not answer, because a restart replaces heartbeats.

    Args:
        folder: the run dir's ``log`` folder.
        now: state of the calling rank.
        text: the diagnosis, in one line.
    """
    dump_state(folder, now, verdict=text)
    for rank in range(now["world_size"]):
        state = read_state(folder, rank, now)
        if state is None or state.answered:
            continue
        stacks = read_stacks(folder / f"stack-{rank}.txt")
        calls = [state.location] if state.location else []
        if stacks:
            calls = stacks[0]
        values = {
            **state.values,
            "world_size": now["world_size"],
            "trouble": state.trouble,
            "written_by": now["rank"],
            "threads": [{"name": "MainThread", "calls": calls}],
        }
        write_json(folder, f"hang-{rank}.json", values, writer=now["rank"])


# --- its text --------------------------------------------------------------------------------------------------------


def format_diagnosis(diagnosis: Diagnosis, processes: Mapping[int, int] | None = None) -> str:
    """Return a diagnosis as one line.

    Args:
        diagnosis: the result of `diagnose`.
        processes: the process ids of missing ranks on this machine, by rank.
    """
    suspects = diagnosis.suspects
    others = diagnosis.others
    parts = [_describe_suspect(suspect, others) for suspect in suspects[:2]]
    if len(suspects) > 2:
        parts.append(f"so do {len(suspects) - 2} more")
    if _are_at_unlike_collectives(suspects):
        parts.append("these do not match")
    if others:
        parts.append(_group_by_location(others, are_others=bool(suspects)))
    if diagnosis.missing:
        missing = _missing_ranks(diagnosis, processes or {})
        parts.insert(len(parts) if suspects else 0, missing)  # without suspects, missing ranks are the cause
    return "; ".join(parts)


def _are_at_unlike_collectives(suspects: Sequence[RankState]) -> bool:
    """Return whether there are two or more suspects, and all of them wait for other ranks."""
    return len(suspects) > 1 and all(suspect.is_waiting and not suspect.trouble for suspect in suspects)


def _describe_suspect(suspect: RankState, others: Sequence[RankState]) -> str:
    seen = f"{suspect.name} last alive at step {suspect.step}"
    if suspect.trouble:
        return f"{seen}, {suspect.trouble}, {suspect.position}"
    separator = "" if suspect.is_current else ","
    text = f"{seen}{separator} {suspect.position}"
    if not suspect.is_waiting and any(other.is_waiting for other in others):
        return f"{text}, not in a collective"
    return text


def _group_by_location(states: Sequence[RankState], are_others: bool = False) -> str:
    """Describe each group of ranks at one location, as in "ranks 0, 2-7 wait in all_reduce 115 at train.py:105"."""
    groups = sorted(_group(states, lambda state: state.position), key=lambda group: -len(group))
    parts = []
    for group in groups[:2]:
        ranks = group[0].name
        position = group[0].position
        if len(group) > 1:
            ranks = f"ranks {format_ranges(state.rank for state in group)}"
            position = re.sub("^is", "are", position)
            position = re.sub("^waits", "wait", position)
            if are_others and len(groups) == 1:
                ranks = "the others"
        parts.append(f"{ranks} {position}")
    if len(groups) > 2:
        parts.append(f"{len(groups) - 2} more are elsewhere")
    return "; ".join(parts)


def _missing_ranks(diagnosis: Diagnosis, processes: Mapping[int, int]) -> str:
    missing = diagnosis.missing
    text = f"{len(missing)} of {diagnosis.world_size} ranks never seen from here: {format_ranges(missing)}"
    known = [rank for rank in missing if rank in processes]
    if not known:
        return text
    named = [f"rank {rank} is pid {processes[rank]}, which has not reached its Run" for rank in known[:2]]
    return f"{text} ({'; '.join(named)})"


def format_ranges(ranks: Iterable[int]) -> str:
    """Return "0, 2-7" for 0, 2, 3, 4, 5, 6, 7."""
    every = set(ranks)
    firsts = sorted(rank for rank in every if rank - 1 not in every)
    lasts = sorted(rank for rank in every if rank + 1 not in every)
    ranges = []
    for first, last in zip(firsts, lasts):
        ranges.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(ranges)
