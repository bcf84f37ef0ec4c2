"""Start the ranks of a job, start a lost rank again alone, and record the run.

    python launcher.py N WORLD_SIZE NODE_RANK ADDRESS PORT train.py [options]    # by scripts/run_mnist_elastic.sh

N is the number of ranks on this machine. On machine 1 and above, this program is an agent (agent.py): it connects to
the launcher at machine 0's ADDRESS and PORT, and starts ranks for it.

This process runs torchft's lighthouse, which proposes the members of a group, and a store by which they connect. It
confirms which of the proposed names are ranks of this job. It alone writes metrics.jsonl, checkpoints and the result.
Ranks send it the numbers of each log line with the step, and it drops a step that it has. So it does not matter which
rank sends a step, or whether one sends it again. If this process ends, the launch script starts the job again from the
newest checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from agent import serve
from authentication import StoreServer
from data import load
from membership import choose_device, give_up_after, run_metadata
from model import build_model
from numpy.typing import NDArray
from options import parse
from samestep import NonRetryableError, RemoteRankError, RetryableError, checkpoint, log, stop
from samestep.data import datasets
from samestep.env import World
from samestep.options import Options
from samestep.recovery import replica_check
from samestep.recovery.watchdog import Watchdog
from samestep.run import Groups, Parts, Run
from samestep.sharding import GlobalBatches
from samestep.step_sync import Totals
from samestep.torch import distributed, weights
from start import Process, Starter
from torchft.coordination import LighthouseServer
from train import build_optimizer

APP = Path(__file__).resolve().parent.name
MAX_FAILURES = 3  # of one rank in a row, without an update in between
START_SECONDS = 60.0  # in which a rank must at least load the checkpoint
END_SECONDS = 5.0  # from the run's last step until ranks that do not end are killed
JOIN_MS = 4000  # that it waits for ranks that live but do not ask, because they are still in a step
WARN_SECONDS = 60.0  # between two warnings of strangers
SILENT_MS = 700  # without a heartbeat after which the lighthouse counts a rank as gone


class Channel:
    """A connection to a rank. Pickle is never loaded: messages are JSON, and arrays are safetensors."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()

    def send(self, *parts: bytes, **message: Any) -> None:
        """Send a message and parts that follow it; a rank that has ended gets none."""
        with contextlib.suppress(OSError), self._sending:
            for part in (json.dumps(message).encode(), *parts):
                self._connection.send_bytes(part)

    def receive(self, key: bytes, inbox: queue.Queue[Message], store: StoreServer) -> None:
        """Put each message of a rank into the inbox, and {} at its end, or answer its requests for keys of the store.

        The rank must know the job's key.
        """
        try:
            deliver_challenge(self._connection, key)
            answer_challenge(self._connection, key)
            while True:
                message = json.loads(self._connection.recv_bytes())
                if message.get("kind") == "store":
                    store.serve(self._connection)
                if "digest" not in message:
                    inbox.put(Message(self, message))
                    continue
                answer: queue.Queue[bool] = queue.Queue()
                inbox.put(Message(self, message, answer))
                if answer.get():
                    contents = {group: self._connection.recv_bytes() for group in Parts.names}
                    inbox.put(Message(self, message, contents=contents))
        except Exception:  # a stranger, or the rank has ended
            inbox.put(Message(self, {}))


@dataclass
class Message:
    """A message of a rank.

    Attributes:
        channel: where it came from.
        values: the message; {} at the end of the connection.
        answer: of an offer of arrays: whether they are wanted.
        contents: the arrays of an offer that was wanted, as safetensors by group.
    """

    channel: Channel
    values: dict[str, Any]
    answer: queue.Queue[bool] | None = None
    contents: dict[str, bytes] | None = None


class RemoteProcess:
    """A process of another machine, which the agent there starts and watches."""

    def __init__(self, agent: Channel, **message: Any) -> None:
        self.agent, self._rank, self.code = agent, message["rank"], None
        agent.send(kind="start", **message)

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.agent.send(kind="kill", rank=self._rank)

    def wait(self, timeout: float | None = None) -> None:
        """Return at once: the agent tells the exit code later."""


@dataclass
class Rank:
    """A rank: its process, its connection and its state.

    Attributes:
        name: its name in the group, which no other process of the job has.
        ready: whether it has loaded the checkpoint.
        waits: whether it asks for a group.
        state: the state that it had when it last asked.
        group: the group that it is in, or was last.
        failures: how often it has ended in a row without an update in between.
        updates: how many updates it has taken part in.
        last_member: when it began or last took part in an update, on the clock `time.monotonic`.
    """

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


class Alone:
    """Be the collectives of the launcher, which records alone; keep what `Run.restore` broadcasts, for the ranks."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def broadcast(self, content: bytes) -> bytes:
        self.parts.append(content)
        return content

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        return row[None]


class Job:
    """Start ranks, take their messages, and record the run."""

    def __init__(
        self, nproc: int, world_size: int, address: str, port: int, program: Sequence[str], options: Options
    ) -> None:
        """Take the ranks on this machine and in all, where to listen, and the program of ranks with its arguments."""
        machines = int(os.environ.get("SAMESTEP_MACHINES", "1"))
        world = World(0, world_size, 0, world_size, 0, machines, launcher="torchft")
        self.run = Run(APP, options, world, Watchdog(), datasets.resolve)
        self._options, self._nproc, self._world_size = options, nproc, world_size
        self._place, self._key = (address, port), _key()
        self._address = f"{address} {port} {self._key.hex()}"
        self._starter = Starter(program, self._address)
        self._agents: list[Channel] = []
        self._ranks: dict[int, Rank] = {}
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._store = StoreServer()
        self._numbers, self._collectives = itertools.count(), Alone()
        self._names: set[str] = set()  # of all processes of ranks
        self._warned_at = -math.inf  # about strangers
        self._has_begun, self._group = False, ""
        self._offers: list[Message] = []  # of one state; the first may be asked for its arrays
        self._offered_at, self._asked = 0.0, math.inf  # when
        self._left: tuple[dict[str, Any], Groups] | None = None  # the newest state that a rank has left with
        self._final: tuple[dict[str, Any], Groups] | None = None
        self._groups: Groups = {}  # of the state that is saved next
        self._digests: dict[int, tuple[str, int]] = {}  # by step, and which rank had it
        self._members: list[dict[str, Any]] = []
        self._pauses: list[float] = []
        self._repeated: set[int] = set()
        self._rejoins, self._updated_at = 0, time.monotonic()
        self._paused_at: float | None = None

    def prepare(self) -> None:
        """Resolve the run dir, the dataset and the checkpoint, and open metrics.jsonl."""
        run, options = self.run, self._options
        self._device = choose_device(options, run.world)  # of the ranks: this process computes nothing
        distributed.set_threads(options.threads)
        model = build_model(options.model, options.dropout, getattr(torch, options.dtype), options.seed)
        optimizer = build_optimizer(options, model)
        run.restore(self._collectives, Parts(partial(weights.load, model, optimizer), lambda: self._groups))
        train_set, test_set = load(options.dataset, options.data_dir, torch.device("cpu"))
        cut = 0, 1, options.virtual_ranks
        batches = GlobalBatches(len(train_set.labels), options.global_batch_size, options.seed, *cut)
        self._metadata = run_metadata(self._device)
        metadata = run_metadata(self._device, model)
        run.start(batches, len(test_set.labels), options.model, self._device.type, metadata)
        paths = options.run_dir, options.run_dir / "metrics.jsonl"  # --evaluate-only writes no log of steps
        self._at_start = {path: path.stat() for path in paths if path.exists()}
        self._step = self._update = self._saved = run.first_step  # of records, ranks and checkpoints

    def train(self) -> None:
        """Run the lighthouse and the ranks until the last step is recorded.

        Raises NonRetryableError if the run dir is removed or replaced, and as `Run.save`.
        """
        self._listen()
        address = self._place[0]
        times = {"join_timeout_ms": JOIN_MS, "heartbeat_timeout_ms": SILENT_MS, "quorum_tick_ms": 20}
        lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=self._options.min_ranks, **times)
        self._lighthouse = f"http://{address}:{lighthouse.address().rpartition(':')[2]}"
        try:
            for rank in range(1, self._nproc + 1):
                self._start(rank)
            begun = time.monotonic()
            while not self._final or not self._is_complete():
                with contextlib.suppress(queue.Empty):
                    self._take(self._inbox.get(timeout=0.1))
                self._check_ranks()
                self._check_run_dir()
                self.run.monitor.beat()  # ranks have watchdogs of their own
                if not self._has_begun and self._may_begin(begun):
                    self._has_begun = True
                    for each in self._ranks.values():
                        self._begin(each)
                if self._final and time.monotonic() - self._updated_at > END_SECONDS:
                    break
        finally:
            for each in self._ranks.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(1.0 if each.is_done else 0.0)
                each.process.kill()
                each.process.wait()
            for agent in self._agents:
                agent.send(kind="end")
            lighthouse.shutdown()
        message, groups = self._final
        self._groups = groups
        self.run.finish(message["evaluation"])

    def report(self) -> None:
        """Write and print the result."""
        counts = {"members": self._members, "rejoins": self._rejoins, "steps_repeated": len(self._repeated)}
        pauses = [round(each, 3) for each in self._pauses]
        self.run.report("torch", torch.__version__, "gloo", self._device.type, **counts, pauses=pauses)

    # --- ranks ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Accept connections of ranks, and of join.py; both must know the key."""
        listener = Listener(self._place, backlog=64)
        path = self._options.run_dir / "log" / "members"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{self._address}\n")

        def accept() -> None:
            while True:
                channel = Channel(listener.accept())
                arguments = self._key, self._inbox, self._store
                threading.Thread(target=channel.receive, args=arguments, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _start(self, rank: int, agent: Channel | None = None, failures: int = 0) -> None:
        name = f"{next(self._numbers):06d}"  # in the order of their age
        self._names.add(name)
        values = {"rank": rank, "name": name, "ranks": self._world_size}
        process = RemoteProcess(agent, **values) if agent else self._starter.start(**values)
        self._ranks[rank] = Rank(process, name, failures=failures)

    def _check_ranks(self) -> None:  # noqa: C901
        """Start ranks again that have ended or do not answer. Raises if that cannot help, or if all have left."""
        now, timeout = time.monotonic(), self._options.timeout
        for rank, each in [*self._ranks.items()]:
            limit = timeout if each.ready else max(timeout, START_SECONDS)
            if self._is_member(each):
                each.last_member = max(each.last_member, self._updated_at)
            elif self._has_begun and now - each.last_member > limit and not each.has_left:
                log.warning(f"rank {rank} has taken no part for {limit:g} s: it is killed", "rollback")
                each.process.kill()
                each.process.wait()
                each.last_member = now
            code = each.process.poll()
            if code is None or each.channel or each.has_left or each.is_done:  # its last messages come first
                continue
            if code == 2:
                raise RemoteRankError(code)
            if code - 128 in stop.STOP_SIGNALS:
                each.has_left = True
                continue
            failures = 0 if each.updates else each.failures + 1
            if failures > MAX_FAILURES:
                raise NonRetryableError(f"rank {rank} has ended {MAX_FAILURES + 1} times in a row before an update")
            name = signal.Signals(-code).name if code < 0 else f"code {code}"
            log.warning(f"rank {rank} has ended with {name} at step {self._update}; starting it again", "failure")
            self._rejoins += 1
            self._start(rank, getattr(each.process, "agent", None), failures)
        self._compare_offers()
        if now - self._asked > END_SECONDS:  # the rank was stopped
            self._ask_next()
        if self.run.stop_request.number:
            self._tell(stop=self.run.stop_request.number)
        if self._ranks and all(each.has_left for each in self._ranks.values()):
            self._stop()

    def _check_run_dir(self) -> None:
        """Raise NonRetryableError if the run dir or its log of steps is another than at the start.

        A removal of the whole run dir can leave the folder itself, because the ranks write new files into it.
        """
        for path, status in self._at_start.items():
            try:
                is_same = os.path.samestat(os.stat(path), status)
            except FileNotFoundError:
                is_same = False
            except OSError:  # a disk that fails for a while
                return
            if not is_same:
                what = f"the run dir {self._options.run_dir} was removed or replaced"
                if path != self._options.run_dir:
                    what = f"{path} was removed or replaced"
                raise NonRetryableError(f"{what}: leave the run dir in place while the job runs")

    def _may_begin(self, begun: float) -> bool:
        """Return whether all ranks are ready, or enough are and the others are late."""
        ready = sum(each.ready for each in self._ranks.values())
        late = time.monotonic() - begun > give_up_after(self._options.timeout)
        return ready == max(len(self._ranks), self._world_size) or (late and ready >= self._options.min_ranks)

    def _is_complete(self) -> bool:
        """Return whether all members have offered their last state. Nobody waits for a rank that only starts."""
        return all(each.is_done or each.has_left for each in self._group_members())

    def _is_member(self, each: Rank) -> bool:
        return each.group == self._group and not each.waits

    def _group_members(self) -> list[Rank]:
        return [each for each in self._ranks.values() if self._is_member(each)]

    def _begin(self, each: Rank) -> None:
        each.last_member = time.monotonic()
        if each.channel and each.ready:
            each.channel.send(begin=True)

    def _tell(self, **message: Any) -> None:
        for each in self._ranks.values():
            if each.channel:
                each.channel.send(**message)

    def _ask_to_regroup(self) -> None:
        """Ask the ranks in a group to leave it, because another rank waits for them or is gone."""
        for each in self._ranks.values():
            if each.channel and each.group and not each.waits:
                each.channel.send(regroup=each.group)

    # --- messages ------------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:  # noqa: C901
        values, channel = message.values, message.channel
        rank = next((rank for rank, each in self._ranks.items() if each.channel is channel), None)
        kind = values.get("kind")
        if kind == "hello":
            self._hello(values, channel)
        elif kind == "join":
            self._join(channel)
        elif kind == "agent":
            self._agents.append(channel)
            for _ in range(values["ranks"]):
                self._start(self._free_rank(), channel)
        elif channel in self._agents:
            self._ended(channel, values)
        elif rank is None:  # of a process that has been replaced
            if message.answer:
                message.answer.put(False)
        elif not values:
            self._lost(rank, channel)
        elif kind == "ready":
            self._ranks[rank].ready = True
            if self._has_begun:
                self._begin(self._ranks[rank])
        elif kind == "update":
            for each in self._group_members():  # also for a step that is taken again
                each.updates += 1
            self._count(values["step"])
        elif kind == "regroup":
            self._requested(self._ranks[rank], values)
        elif kind == "confirm":
            channel.send(confirmed=self._confirmed(values["names"]))
        elif kind == "members":
            self._regrouped(rank, values)
        elif message.answer:
            self._offer(rank, message)
        elif message.contents is not None:
            self._arrived(message)
        else:
            self._record(values, None)

    def _hello(self, values: dict[str, Any], channel: Channel) -> None:
        each = self._ranks[values["rank"]]
        if each.name != values["name"]:  # of a process that has been replaced
            return
        differ = [name for name in self._metadata if values["metadata"].get(name) != self._metadata[name]]
        if differ and not self._options.allow_mixed:
            name = differ[0]
            text = f"{name} {values['metadata'].get(name)} of rank {values['rank']} is {self._metadata[name]} elsewhere"
            channel.send(refusal=f"{text}: the bits would differ; --allow-mixed permits it")
            return
        each.channel = channel
        channel.send(*self._collectives.parts, lighthouse=self._lighthouse)

    def _join(self, channel: Channel) -> None:
        """Start one more rank, in the place of one that has left if there is one."""
        alive = sum(not each.has_left for each in self._ranks.values())
        most = self._options.virtual_ranks or 0  # the parser refuses 0
        if alive >= most:
            channel.send(refusal=f"{alive} ranks train with --virtual-ranks {most}: no more can join")
            return
        rank = self._free_rank()
        self._start(rank)
        channel.send(rank=rank)

    def _free_rank(self) -> int:
        taken = {rank for rank, each in self._ranks.items() if not each.has_left}
        return next(rank for rank in itertools.count(1) if rank not in taken)

    def _ended(self, agent: Channel, values: dict[str, Any]) -> None:
        """Note the exit code of a rank on another machine; without values, the machine with all its ranks is gone."""
        if not values:
            self._agents.remove(agent)
        for rank, each in self._ranks.items():
            if isinstance(each.process, RemoteProcess) and each.process.agent is agent:
                if values.get("rank") == rank:
                    each.process.code = values["code"]
                elif not values and each.process.code is None:
                    log.warning(f"the machine of rank {rank} is gone: the others continue without it", "failure")
                    each.has_left = True

    def _lost(self, rank: int, channel: Channel) -> None:
        each = self._ranks[rank]
        each.channel, each.waits, each.group = None, False, ""
        self._pause()
        self._void(each)
        self._ask_to_regroup()
        if self._offers and self._offers[0].channel is channel:
            self._asked = math.inf
        self._offers = [offer for offer in self._offers if offer.channel is not channel]

    def _requested(self, each: Rank, values: dict[str, Any]) -> None:
        """Record that a rank asks for a group, and the state that it has."""
        self._repeated |= {values["failed"]} - {None}
        self._pause()
        self._void(each)
        each.waits, each.state = True, values["state"]
        if each.channel:
            each.channel.send(noted=True)
        self._ask_to_regroup()

    def _void(self, each: Rank) -> None:
        """Tell the ranks that a rank's last request for a group no longer holds."""
        if each.state:
            self._tell(void=[each.state["nonce"]])

    def _confirmed(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the states of those ranks that ask for a group, of the names that the lighthouse proposes."""
        now = time.monotonic()
        if not self._names.issuperset(names) and now - self._warned_at > WARN_SECONDS:
            self._warned_at = now
            log.warning("a process that is not part of this job asks the lighthouse for a group: it is ignored")
        return [each.state for each in self._ranks.values() if each.waits and each.name in names]

    def _pause(self) -> None:
        """Note that the group changes: a pause lasts from its last update to the next."""
        if self._members and not self._paused_at:
            self._paused_at = self._updated_at

    def _count(self, step: int) -> None:
        """Count an update that a rank has done, for the progress bar and the watchdog."""
        if step <= self._update:
            return
        self._update, self._updated_at = step, time.monotonic()
        self.run.count_step(step - 1)
        if self._paused_at:
            self._pauses.append(self._updated_at - self._paused_at)
            self._paused_at = None

    def _regrouped(self, rank: int, values: dict[str, Any]) -> None:
        self._ranks[rank].group, self._ranks[rank].waits = values["group"], False
        if any(each.waits and other not in values["ranks"] for other, each in self._ranks.items()):
            self._ask_to_regroup()
        self._group = values["group"]
        entry = {"step": values["step"], "ranks": values["ranks"]}
        if self._members[-1:] != [entry]:
            self._members.append(entry)
            ranks = sorted(values["ranks"])
            self.run.monitor.record_event("members", text=f"ranks {ranks} train", ranks=ranks)

    # --- records -------------------------------------------------------------------------------------------------

    def _offer(self, rank: int, message: Message) -> None:
        """Ask for the arrays of a state that is not yet recorded, from one rank at a time."""
        step, digest = message.values["step"], message.values["digest"]
        first, owner = self._digests.setdefault(step, (digest, rank))
        if digest != first and not self._options.allow_mixed:
            checkpoint.finish()
            if step == self._saved:
                replica_check.quarantine_newest(self._options.run_dir)
            raise RetryableError(f"rank {owner} and rank {rank} hold different bits after {step} updates")
        if message.values["final"]:
            self._ranks[rank].is_done = True
        self._offers.append(message)
        self._offered_at = time.monotonic()

    def _compare_offers(self) -> None:
        """Answer the offers of a state once all members have made theirs, so that nothing is saved if they differ."""
        if not self._offers or self._asked < math.inf:
            return
        members = {each.channel for each in self._group_members()}
        complete = members <= {None, *(offer.channel for offer in self._offers)}
        single = any(offer.values["stop"] or not self._wants(offer.values) for offer in self._offers)
        if complete or single or time.monotonic() - self._offered_at > END_SECONDS:
            self._ask()

    def _ask(self) -> None:
        """Answer offers, and stop at the first whose arrays are wanted."""
        self._asked = math.inf
        while self._offers:
            values = self._offers[0].values
            wanted = self._wants(values)
            self._offers[0].channel.send(wanted=wanted)
            self._offers[0].answer.put(wanted)  # type: ignore[union-attr]
            if wanted:
                self._asked = time.monotonic()
                return
            self._offers.pop(0)

    def _wants(self, values: dict[str, Any]) -> bool:
        if values["stop"]:
            return self._left is None or values["step"] > self._left[0]["step"]
        return not self._final if values["final"] else values["step"] > self._saved

    def _ask_next(self) -> None:
        self._offers.pop(0)
        self._ask()

    def _arrived(self, message: Message) -> None:
        groups = {group: safetensors.numpy.load(content) for group, content in (message.contents or {}).items()}
        values = message.values
        if values["stop"]:
            self._left = values, groups
        else:
            self._record(values, groups)
        if self._offers and self._offers[0].values is values:
            self._ask_next()

    def _record(self, values: dict[str, Any], groups: Groups | None) -> None:
        """Write the log line, the checkpoint and the result of a step, unless they are written."""
        step, run = values["step"], self.run
        self._count(step)
        if step > self._step:
            self._step = step
            self._take_totals(values)
            run.log_metrics(values["evaluation"] if values["evaluates"] else {})
        if groups and values["save"] and step > self._saved:
            self._groups = groups
            run.save()
            self._saved = step
            self._keep(step, groups)
        if groups and values["final"]:
            self._final = values, groups
            self._updated_at = time.monotonic()

    def _keep(self, step: int, groups: Groups) -> None:
        """Let ranks that come later begin with this checkpoint."""
        message = {**json.loads(self._collectives.parts[0]), "step": step, "groups": [*groups]}
        contents = [checkpoint.serialize(arrays) for arrays in groups.values()]
        self._collectives.parts[:] = [json.dumps(message).encode(), *contents]

    def _take_totals(self, values: dict[str, Any]) -> None:
        """Take the losses and the stop request of a record, for the next log line and checkpoint."""
        totals = Totals(loss=values["loss"], running_loss=values["running_loss"], stop_signal=values["stop"])
        self.run.step_sync.apply(self.run.step, totals)

    def _stop(self) -> None:
        """Save the newest state that a rank has left with, and end. Raises Stopped."""
        number = self.run.stop_request.number or signal.SIGTERM
        if self._left is None:
            raise stop.Stopped(number, "stopped before the first step", is_final=False)
        values, groups = self._left
        if values["step"] == self._saved:
            text = f"stopped by {signal.Signals(number).name} at step {self._saved}, which is saved"
            raise stop.Stopped(number, text)
        self._count(values["step"])
        self._take_totals(values)
        if values["step"] > self._step:
            self.run.log_metrics({})
        self._groups = groups
        self.run.save()


def _key() -> bytes:
    """Return the key by which this job's processes know each other: on several machines, the launch scripts' number."""
    return bytes.fromhex(os.environ["SAMESTEP_JOB"]) if "SAMESTEP_MACHINES" in os.environ else secrets.token_bytes(32)


def main() -> None:
    nproc, world_size, node_rank, address, port, *program = sys.argv[1:]
    if int(node_rank) > 0:
        return serve(int(nproc), address, int(port), _key(), program)
    job = Job(int(nproc), int(world_size), address, int(port), program, parse(program[1:]))
    job.prepare()
    job.train()
    job.report()


if __name__ == "__main__":
    log.run(main)
