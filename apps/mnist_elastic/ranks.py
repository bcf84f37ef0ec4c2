"""Manage the processes, connections and states of a job's ranks at the launcher."""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from channel import Channel
from samestep import log
from start import Process, Starter

WARN_SECONDS = 60.0  # minimum time between two warnings about unknown processes, in seconds


class RemoteProcess:
    """A process on another machine. The agent on that machine starts and watches the process."""

    def __init__(self, agent: Channel, **message: Any) -> None:
        self.agent = agent
        self.code: int | None = None
        self._rank = message["rank"]
        agent.send(kind="start", **message)

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.agent.send(kind="kill", rank=self._rank)

    def wait(self, timeout: float | None = None) -> None:
        """Return immediately, because the agent reports the exit code later."""


@dataclass
class Rank:
    """A rank of the job, with its process, connection and state.

    Attributes:
        rank: number of the rank, from 1. A restarted rank keeps its number.
        process: the current process of the rank.
        name: name of the process in groups. The name is unique in the job.
        channel: connection to the process, or None.
        ready: whether the process has loaded the checkpoint.
        waits: whether the rank requests a group.
        state: the state that the rank's last request for a group contained.
        group: name of the rank's current or last group.
        failures: number of consecutive ends without an update.
        updates: number of updates in which the process was a member; a repeated step counts again.
        has_left: whether a stop signal ended the rank, or its machine is lost.
        is_done: whether the rank has offered its state after the last step.
        last_member: time of the rank's last start, beginning of training, update or kill, on the clock
            `time.monotonic`. The limit for a hung rank counts from this time.
    """

    rank: int
    process: Process
    name: str
    channel: Channel | None = None
    ready: bool = False
    waits: bool = False
    state: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    failures: int = 0
    updates: int = 0
    has_left: bool = False
    is_done: bool = False
    last_member: float = field(default_factory=time.monotonic)

    @property
    def agent(self) -> Channel | None:
        """The connection to the agent that started the process, or None for a process on this machine."""
        if isinstance(self.process, RemoteProcess):
            return self.process.agent
        return None

    def exit_code(self) -> int | None:
        """Return the exit code if the rank ended unexpectedly and its connection is closed, otherwise None."""
        is_known = self.has_left or self.is_done
        if is_known or self.channel:
            return None
        return self.process.poll()

    def kill(self) -> None:
        """Kill the process. Wait until it ends if it runs on this machine."""
        self.process.kill()
        self.process.wait()

    def begin(self) -> None:
        """Set ``last_member`` to now, and send the rank the message to begin training if it is ready."""
        self.last_member = time.monotonic()
        if self.channel and self.ready:
            self.channel.send(begin=True)


class Ranks:
    """All ranks of a job.

    Attributes:
        agents: connections to the agents of other machines.
        group: name of the newest group.
    """

    def __init__(self, starter: Starter, world_size: int) -> None:
        """Create an empty collection.

        Args:
            starter: starter of ranks on this machine.
            world_size: number of ranks that the job starts with.
        """
        self.agents: list[Channel] = []
        self.group = ""
        self._starter = starter
        self._world_size = world_size
        self._ranks: dict[int, Rank] = {}
        self._names: set[str] = set()  # names of all processes, including ended processes
        self._numbers = itertools.count()
        self._warned_at = -math.inf  # time of the last warning about an unknown process

    def all(self) -> list[Rank]:
        """Return all ranks, including ranks that have left."""
        return [*self._ranks.values()]

    def start(self, rank: int, agent: Channel | None = None, failures: int = 0) -> None:
        """Start a process for a rank, in place of the rank's earlier process if there was one.

        Args:
            rank: number of the rank.
            agent: agent that starts the process on another machine; None for this machine.
            failures: number of consecutive failures of the rank.
        """
        name = f"{next(self._numbers):06d}"  # the names sort in the order of the starts
        self._names.add(name)
        process: Process
        if agent:
            process = RemoteProcess(agent, rank=rank, name=name, ranks=self._world_size)
        else:
            process = self._starter.start(rank, name, ranks=self._world_size)
        self._ranks[rank] = Rank(rank, process, name=name, failures=failures)

    def free_rank(self) -> int:
        """Return the lowest number from 1 that no present rank has."""
        taken = {each.rank for each in self.present()}
        return next(rank for rank in itertools.count(1) if rank not in taken)

    def of_name(self, rank: int, name: str) -> Rank | None:
        """Return the rank with the number ``rank``, or None if there is none or its current process is not ``name``."""
        each = self._ranks.get(rank)
        if each is None or each.name != name:
            return None
        return each

    def of_channel(self, channel: Channel) -> Rank | None:
        """Return the rank at the other end of a connection, or None if the rank has a newer process."""
        return next((each for each in self._ranks.values() if each.channel is channel), None)

    def present(self) -> list[Rank]:
        """Return the ranks that have not left."""
        return [each for each in self._ranks.values() if not each.has_left]

    def is_member(self, each: Rank) -> bool:
        """Return whether a rank is in the newest group and does not request another group."""
        return each.group == self.group and not each.waits

    def members(self) -> list[Rank]:
        """Return the members of the newest group."""
        return [each for each in self._ranks.values() if self.is_member(each)]

    def is_complete(self) -> bool:
        """Return whether each member of the newest group has offered its last state or has left."""
        return all(each.is_done or each.has_left for each in self.members())

    def have_left(self) -> bool:
        """Return whether the job has ranks, and all of them have left."""
        return bool(self._ranks) and not self.present()

    def are_ready(self) -> bool:
        """Return whether all ranks of all machines have loaded the checkpoint."""
        expected = max(len(self._ranks), self._world_size)
        return self.count_ready() == expected

    def count_ready(self) -> int:
        """Return the number of ranks that have loaded the checkpoint."""
        return sum(each.ready for each in self._ranks.values())

    def send(self, **message: Any) -> None:
        """Send a message to all connected ranks."""
        for each in self._ranks.values():
            if each.channel:
                each.channel.send(**message)

    def ask_to_regroup(self) -> None:
        """Request all ranks in a group to regroup, because another rank waits for a group or is lost."""
        for each in self._ranks.values():
            if each.channel and each.group and not each.waits:
                each.channel.send(regroup=each.group)

    def void(self, each: Rank) -> None:
        """Notify all ranks that the last request of ``each`` for a group is no longer valid."""
        if each.state:
            self.send(void=[each.state["nonce"]])

    def confirmed(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the states of ranks that have a name in ``names`` and request a group. Warn if a name is unknown."""
        if not self._names.issuperset(names):
            self._warn_of_stranger()
        return [each.state for each in self._ranks.values() if each.waits and each.name in names]

    def _warn_of_stranger(self) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARN_SECONDS:
            self._warned_at = now
            log.warning("a process that is not part of this job asks the lighthouse for a group: it is ignored")

    def set_exit_code(self, agent: Channel, rank: int, code: int) -> None:
        """Record the exit code of a rank that ``agent`` started."""
        process = self._ranks[rank].process
        if isinstance(process, RemoteProcess) and process.agent is agent:
            process.code = code

    def remove_agent(self, agent: Channel) -> None:
        """Remove the agent of a lost machine, and mark the machine's running ranks as left."""
        self.agents.remove(agent)
        for each in self._ranks.values():
            if each.agent is agent and each.process.poll() is None:
                log.warning(f"the machine of rank {each.rank} is gone: the others continue without it", "failure")
                each.has_left = True

    def end(self) -> None:
        """Kill all processes, and send the agents the message to end. Ranks that are done get 1 s to exit."""
        for each in self._ranks.values():
            seconds = 1.0 if each.is_done else 0.0
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(seconds)
            each.kill()
        for agent in self.agents:
            agent.send(kind="end")
