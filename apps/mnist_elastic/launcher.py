"""Start the ranks of a job, restart lost ranks, and record the run.

    python launcher.py N WORLD_SIZE NODE_RANK ADDRESS PORT train.py [options]    # by scripts/run_mnist_elastic.sh

N is the number of ranks on this machine. This program is an agent (agent.py) on machine 1 and above. The agent
connects to the launcher at machine 0's ADDRESS and PORT, and starts ranks for the launcher.

The launcher runs a store by which ranks connect to each other, and torchft's lighthouse. The lighthouse proposes
processes as the members of a group, and the launcher selects the ranks of this job among these processes. Only the
launcher writes metrics.jsonl, checkpoints and the result. Every rank sends the values of each log line to the
launcher, so that no line is missing after the loss of a rank. The launcher writes each step's values only once. If the
launcher fails, the launch script restarts the job from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from agent import serve
from authentication import StoreServer
from channel import Channel, Message
from membership import give_up_after, run_metadata
from options import parse
from ranks import Rank, Ranks
from records import History, Offers, Records, RunFiles
from samestep import NonRetryableError, RemoteRankError, log, stop
from samestep.data import datasets
from samestep.env import World
from samestep.job_info import JobInfo
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Run
from start import Starter
from torchft.coordination import LighthouseServer

APP = Path(__file__).resolve().parent.name
MAX_FAILURES = 3  # limit of consecutive failures of one rank without an update
START_SECONDS = 60.0  # minimum time limit for a rank to load the checkpoint
END_SECONDS = 5.0  # time limit for ranks to end after the run's last step
JOIN_MS = 4000  # time for which the lighthouse waits for live ranks that do not request a group, in ms
ACCEPT_SECONDS = 0.1  # time between two attempts to accept a connection, in seconds
MAX_UNPROVEN = 100  # limit of open connections whose process has not proved that it has the job's key
SILENT_MS = 450  # time without a heartbeat after which the lighthouse considers a rank lost, in ms


class Switchboard:
    """Accept connections of ranks, agents and join.py, and put the messages of all connections into one inbox.

    Attributes:
        inbox: queue of the messages.
        address: host, port and key (hex) by which a process connects, separated by spaces.
    """

    def __init__(self, host: str, port: int) -> None:
        self.inbox: queue.Queue[Message] = queue.Queue()
        self._place = (host, port)
        self._key = _key()
        self._store = StoreServer()
        self.address = f"{host} {port} {self._key.hex()}"

    def listen(self, run_dir: Path) -> None:
        """Accept connections in a thread, and write the address to log/members, which join.py reads."""
        listener = Listener(self._place, backlog=64)
        path = run_dir / "log" / "members"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(f"{self.address}\n")
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()

    def _accept(self, listener: Listener) -> None:
        """Accept connections. If too many processes have not proved that they have the key, drop the oldest of them.

        A flood of connections then uses a limited number of file descriptors and threads.
        """
        arguments = (self._key, self.inbox, self._store)
        unproven: list[Channel] = []
        while True:
            try:
                channel = Channel(listener.accept())
                threading.Thread(target=channel.receive, args=arguments, daemon=True).start()
                unproven.append(channel)
            except (OSError, RuntimeError):  # no free file descriptor or thread
                time.sleep(ACCEPT_SECONDS)
            unproven = [each for each in unproven if each.is_unproven]
            if len(unproven) > MAX_UNPROVEN:
                unproven.pop(0).end()


class Job:
    """Start ranks, handle their messages, and record the run."""

    def __init__(
        self, nproc: int, world_size: int, address: str, port: int, program: Sequence[str], options: Options
    ) -> None:
        """Set up the run, without starting ranks.

        Args:
            nproc: number of ranks on this machine.
            world_size: number of ranks on all machines.
            address: host at which the launcher listens.
            port: port at which the launcher listens.
            program: path of train.py and its arguments.
            options: options of the app.
        """
        machines = JobInfo.from_environ(os.environ).machines or 1
        world = World(0, world_size, 0, world_size, 0, machines, launcher="torchft")
        self.run = Run(APP, options, world, Watchdog(), datasets.resolve)
        self._options = options
        self._nproc = nproc
        self._address = address
        self._switchboard = Switchboard(address, port)
        self._ranks = Ranks(Starter(program, self._switchboard.address), world_size)
        self._history = History(self.run)
        self._records = Records(self.run, options, self._history)
        self._offers = Offers(self._records, options)
        self._metadata = run_metadata(self._records.device)
        self._lighthouse = ""  # URL of the lighthouse
        self._has_begun = False

    def train(self) -> None:
        """Run the lighthouse and the ranks until the last step is recorded.

        Raises:
            NonRetryableError: the run dir was removed or replaced, a rank fails repeatedly, or `Run.save` raised.
            RemoteRankError: a rank ended with exit code 2.
            RetryableError: ranks have different bits after the same step, or a loss is NaN or infinite.
            Stopped: all ranks have left.
        """
        self._switchboard.listen(self._options.run_dir)
        lighthouse = LighthouseServer(
            bind=f"{self._address}:0",
            min_replicas=self._options.min_ranks,
            join_timeout_ms=JOIN_MS,
            heartbeat_timeout_ms=SILENT_MS,
            quorum_tick_ms=20,
        )
        port = lighthouse.address().rpartition(":")[2]
        self._lighthouse = f"http://{self._address}:{port}"
        try:
            for rank in range(1, self._nproc + 1):
                self._ranks.start(rank)
            self._serve()
        finally:
            self._ranks.end()
            lighthouse.shutdown()
        self._records.finish()

    def _serve(self) -> None:
        """Handle messages and watch the ranks until the run is over.

        The run is over when the final state has arrived, and all members have offered this state or have left. If a
        member does neither, the run is over END_SECONDS after the arrival.
        """
        files = RunFiles(self._options.run_dir)
        begun_at = time.monotonic()
        while not self._is_over():
            with contextlib.suppress(queue.Empty):
                self._take(self._switchboard.inbox.get(timeout=0.1))
            self._watch_ranks()
            files.check()
            self.run.monitor.beat()  # records the launcher's progress; each rank has its own watchdog
            if not self._has_begun and self._may_begin(begun_at):
                self._has_begun = True
                for each in self._ranks.all():
                    each.begin()

    def _is_over(self) -> bool:
        if not self._records.final:
            return False
        return self._ranks.is_complete() or time.monotonic() - self._records.final_at > END_SECONDS

    def _may_begin(self, begun_at: float) -> bool:
        """Return whether all ranks are ready, or at least --min-ranks are ready after the time limit."""
        if self._ranks.are_ready():
            return True
        is_late = time.monotonic() - begun_at > give_up_after(self._options.timeout)
        return is_late and self._ranks.count_ready() >= self._options.min_ranks

    # --- ranks ---------------------------------------------------------------------------------------------------

    def _watch_ranks(self) -> None:
        """Kill hung ranks, restart ended ranks, answer offers, and send a stop signal of the launcher to the ranks.

        Raises:
            Stopped: all ranks have left.
        """
        for each in self._ranks.all():
            self._kill_if_hung(each)
            code = each.exit_code()
            if code is not None:
                self._replace(each, code)
        self._offers.compare(self._ranks.members())
        if self.run.stop_request.number:
            self._ranks.send(stop=self.run.stop_request.number)
        if self._ranks.have_left():
            self._records.save_and_stop()

    def _kill_if_hung(self, each: Rank) -> None:
        """Kill a rank outside the newest group if its start and its last update are older than its time limit."""
        now = time.monotonic()
        limit = self._options.timeout
        if not each.ready:
            limit = max(limit, START_SECONDS)
        if self._ranks.is_member(each):
            each.last_member = max(each.last_member, self._history.updated_at)
            return
        is_awaited = self._has_begun and not each.has_left
        if is_awaited and now - each.last_member > limit:
            log.warning(f"rank {each.rank} has taken no part for {limit:g} s: it is killed", "rollback")
            each.kill()
            each.last_member = now

    def _replace(self, each: Rank, code: int) -> None:
        """Restart a rank that ended with exit code ``code``, unless a stop signal ended it.

        Raises:
            RemoteRankError: the exit code is 2.
            NonRetryableError: the rank failed more than MAX_FAILURES times in a row without an update.
        """
        if code == 2:
            raise RemoteRankError(code)
        if code - 128 in stop.STOP_SIGNALS:
            each.has_left = True
            return
        failures = 0 if each.updates else each.failures + 1
        if failures > MAX_FAILURES:
            raise NonRetryableError(f"rank {each.rank} has ended {MAX_FAILURES + 1} times in a row before an update")
        reason = signal.Signals(-code).name if code < 0 else f"code {code}"
        step = self._history.step
        log.warning(f"rank {each.rank} has ended with {reason} at step {step}; starting it again", "failure")
        self._history.rejoins += 1
        self._ranks.start(each.rank, each.agent, failures=failures)

    # --- messages ------------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        """Handle a message from any process that has the key."""
        values = message.values
        channel = message.channel
        kind = values.get("kind")
        if kind == "hello":
            self._hello(values, channel)
        elif kind == "join":
            self._join(channel)
        elif kind == "agent":
            self._add_machine(values, channel)
        elif channel in self._ranks.agents:
            self._take_from_agent(values, channel)
        else:
            each = self._ranks.of_channel(channel)
            if each is None:  # another process has replaced the sender
                message.reply(wanted=False)
            else:
                self._take_from_rank(each, message)

    def _take_from_rank(self, each: Rank, message: Message) -> None:
        values = message.values
        if not values:
            self._lost(each, message.channel)
            return
        answers = {
            "ready": self._ready,
            "update": self._updated,
            "regroup": self._requested,
            "confirm": self._confirm,
            "members": self._regrouped,
        }
        kind = values["kind"]
        if kind in answers:
            answers[kind](each, values)
        elif message.answer:
            self._offers.add(each, message)
        elif message.contents is not None:
            self._offers.arrived(message)
        else:
            self._records.add(values)

    def _hello(self, values: dict[str, Any], channel: Channel) -> None:
        """Send the checkpoint to a rank's new process. Without --allow-mixed, reject a process with other metadata."""
        each = self._ranks.of_name(values["rank"], values["name"])
        if each is None:  # another process has replaced the sender
            return
        metadata = values["metadata"]
        differ = [name for name in self._metadata if metadata.get(name) != self._metadata[name]]
        if differ and not self._options.allow_mixed:
            name = differ[0]
            difference = f"{name} {metadata.get(name)} of rank {each.rank} is {self._metadata[name]} elsewhere"
            channel.send(refusal=f"{difference}: the bits would differ; --allow-mixed permits it")
            return
        each.channel = channel
        channel.send(*self._records.checkpoint_messages(), lighthouse=self._lighthouse)

    def _join(self, channel: Channel) -> None:
        """Start one more rank with the lowest free number, unless the job already has --virtual-ranks ranks."""
        alive = len(self._ranks.present())
        most = self._options.virtual_ranks or 0  # never 0, because `parse` rejects 0
        if alive >= most:
            channel.send(refusal=f"{alive} ranks train with --virtual-ranks {most}: no more can join")
            return
        rank = self._ranks.free_rank()
        self._ranks.start(rank)
        channel.send(rank=rank)

    def _add_machine(self, values: dict[str, Any], agent: Channel) -> None:
        """Start ranks on the machine of an agent that has connected."""
        self._ranks.agents.append(agent)
        for _ in range(values["ranks"]):
            self._ranks.start(self._ranks.free_rank(), agent)

    def _take_from_agent(self, values: dict[str, Any], agent: Channel) -> None:
        """Record the exit code of a rank on another machine, or the loss of the machine."""
        if values:
            self._ranks.set_exit_code(agent, values["rank"], code=values["code"])
        else:
            self._ranks.remove_agent(agent)

    def _lost(self, each: Rank, channel: Channel) -> None:
        """Request the other ranks to regroup, because the connection to a rank has ended."""
        each.channel = None
        each.waits = False
        each.group = ""
        self._history.pause()
        self._ranks.void(each)
        self._ranks.ask_to_regroup()
        self._offers.drop(channel)

    def _ready(self, each: Rank, values: dict[str, Any]) -> None:
        each.ready = True
        if self._has_begun:
            each.begin()

    def _updated(self, each: Rank, values: dict[str, Any]) -> None:
        for member in self._ranks.members():  # a repeated step counts again
            member.updates += 1
        self._history.update(values["step"], values["loss"])

    def _requested(self, each: Rank, values: dict[str, Any]) -> None:
        """Record a rank's request for a group and its state, and request the other ranks to regroup."""
        if values["failed"] is not None:
            self._history.repeat(values["failed"])
        self._history.pause()
        self._ranks.void(each)
        each.waits = True
        each.state = values["state"]
        if each.channel:
            each.channel.send(noted=True)
        self._ranks.ask_to_regroup()

    def _confirm(self, each: Rank, values: dict[str, Any]) -> None:
        if each.channel:
            each.channel.send(confirmed=self._ranks.confirmed(values["names"]))

    def _regrouped(self, each: Rank, values: dict[str, Any]) -> None:
        """Record the members of a new group. If a rank outside this group waits for a group, request a regroup."""
        each.group = values["group"]
        each.waits = False
        if any(other.waits and other.rank not in values["ranks"] for other in self._ranks.all()):
            self._ranks.ask_to_regroup()
        self._ranks.group = values["group"]
        self._history.count(values["step"], values["loss"])  # the rank that reports updates may be lost after an update
        self._history.regrouped(values["step"], values["ranks"])


def _key() -> bytes:
    """Return the job's key, as bytes: the number that the launch scripts of all machines share, or 32 random bytes."""
    info = JobInfo.from_environ(os.environ)
    if info.machines is not None:
        return bytes.fromhex(info.job)
    return secrets.token_bytes(32)


def main() -> None:
    nproc, world_size, node_rank, address, port, *program = sys.argv[1:]
    if int(node_rank) > 0:
        serve(int(nproc), address, port=int(port), key=_key(), program=program)
        return
    options = parse(program[1:])
    job = Job(int(nproc), int(world_size), address, port=int(port), program=program, options=options)
    job.train()


if __name__ == "__main__":
    log.run(main)
