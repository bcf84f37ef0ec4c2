"""Keep the ranks of a job at the launcher: their processes, their connections and their states."""

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

WARN_SECONDS = 60.0  # between two warnings of strangers


class RemoteProcess:
    """A process of another machine, which the agent there starts and watches."""

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
        """Return immediately: the agent reports the exit code later."""


@dataclass
class Rank:
    """A rank: its process, its connection and its state.

    Attributes:
        rank: its number, from 1. A process that replaces another has the same number.
        name: its name in the group, which no other process of the job has.
        ready: whether it has loaded the checkpoint.
        waits: whether it asks for a group.
        state: the state that it had when it last asked.
        group: the group that it is in, or was last.
        failures: how often it has ended in a row without an update in between.
        updates: how many updates it has taken part in.
        last_member: when it began or last took part in an update, on the clock `time.monotonic`.
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
        """The agent that has started the process, or None for a process of this machine."""
        if isinstance(self.process, RemoteProcess):
            return self.process.agent
        return None

    def exit_code(self) -> int | None:
        """Return an exit code that is still to be handled; None while the rank runs or has messages left to read."""
        is_known = self.has_left or self.is_done
        if is_known or self.channel:
            return None
        return self.process.poll()

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def begin(self) -> None:
        """Let a rank that is ready take part."""
        self.last_member = time.monotonic()
        if self.channel and self.ready:
            self.channel.send(begin=True)


class Ranks:
    """All ranks of a job.

    Attributes:
        agents: the connections to other machines.
        group: the name of the newest group.
    """

    def __init__(self, starter: Starter, world_size: int) -> None:
        """Take what starts ranks on this machine, and the number of ranks that the job starts with."""
        self.agents: list[Channel] = []
        self.group = ""
        self._starter = starter
        self._world_size = world_size
        self._ranks: dict[int, Rank] = {}
        self._names: set[str] = set()  # of all processes of ranks, also of those that have ended
        self._numbers = itertools.count()
        self._warned_at = -math.inf  # about strangers

    def all(self) -> list[Rank]:
        """Return all ranks, also those that have left."""
        return [*self._ranks.values()]

    def start(self, rank: int, agent: Channel | None = None, failures: int = 0) -> None:
        """Start a process for a rank, in the place of an earlier one.

        Args:
            rank: its number.
            agent: starts it on another machine; None starts it here.
            failures: how often the rank has failed in a row.
        """
        name = f"{next(self._numbers):06d}"  # in the order of their age
        self._names.add(name)
        process: Process
        if agent:
            process = RemoteProcess(agent, rank=rank, name=name, ranks=self._world_size)
        else:
            process = self._starter.start(rank, name, ranks=self._world_size)
        self._ranks[rank] = Rank(rank, process, name=name, failures=failures)

    def free_rank(self) -> int:
        """Return the lowest number that no rank has, or whose rank has left."""
        taken = {each.rank for each in self.present()}
        return next(rank for rank in itertools.count(1) if rank not in taken)

    def of_name(self, rank: int, name: str) -> Rank | None:
        """Return a rank; None for a process that has been replaced."""
        each = self._ranks[rank]
        if each.name != name:
            return None
        return each

    def of_channel(self, channel: Channel) -> Rank | None:
        """Return the rank at the other end of a connection; None for a process that has been replaced."""
        return next((each for each in self._ranks.values() if each.channel is channel), None)

    def present(self) -> list[Rank]:
        """Return the ranks that have not left."""
        return [each for each in self._ranks.values() if not each.has_left]

    def is_member(self, each: Rank) -> bool:
        """Return whether a rank is in the newest group, and does not ask for another."""
        return each.group == self.group and not each.waits

    def members(self) -> list[Rank]:
        """Return the members of the newest group."""
        return [each for each in self._ranks.values() if self.is_member(each)]

    def is_complete(self) -> bool:
        """Return whether all members have offered their last state. A rank that still starts does not count."""
        return all(each.is_done or each.has_left for each in self.members())

    def have_left(self) -> bool:
        """Return whether there were ranks, and all have left."""
        return bool(self._ranks) and not self.present()

    def are_ready(self) -> bool:
        """Return whether the ranks of all machines have loaded the checkpoint."""
        expected = max(len(self._ranks), self._world_size)
        return self.count_ready() == expected

    def count_ready(self) -> int:
        """Return how many ranks have loaded the checkpoint."""
        return sum(each.ready for each in self._ranks.values())

    def send(self, **message: Any) -> None:
        """Send all ranks a message."""
        for each in self._ranks.values():
            if each.channel:
                each.channel.send(**message)

    def ask_to_regroup(self) -> None:
        """Ask the ranks in a group to leave it, because another rank waits for them or is gone."""
        for each in self._ranks.values():
            if each.channel and each.group and not each.waits:
                each.channel.send(regroup=each.group)

    def void(self, each: Rank) -> None:
        """Notify the ranks that a rank's last request for a group is no longer valid."""
        if each.state:
            self.send(void=[each.state["nonce"]])

    def confirmed(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the states of those ranks that ask for a group, of the names that the lighthouse proposes."""
        if not self._names.issuperset(names):
            self._warn_of_stranger()
        return [each.state for each in self._ranks.values() if each.waits and each.name in names]

    def _warn_of_stranger(self) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARN_SECONDS:
            self._warned_at = now
            log.warning("a process that is not part of this job asks the lighthouse for a group: it is ignored")

    def set_exit_code(self, agent: Channel, rank: int, code: int) -> None:
        """Note the exit code of a rank that an agent has started."""
        process = self._ranks[rank].process
        if isinstance(process, RemoteProcess) and process.agent is agent:
            process.code = code

    def remove_agent(self, agent: Channel) -> None:
        """Note that another machine is gone, with all its ranks."""
        self.agents.remove(agent)
        for each in self._ranks.values():
            if each.agent is agent and each.process.poll() is None:
                log.warning(f"the machine of rank {each.rank} is gone: the others continue without it", "failure")
                each.has_left = True

    def end(self) -> None:
        """End all processes, and let the agents end."""
        for each in self._ranks.values():
            seconds = 1.0 if each.is_done else 0.0
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(seconds)
            each.kill()
        for agent in self.agents:
            agent.send(kind="end")
