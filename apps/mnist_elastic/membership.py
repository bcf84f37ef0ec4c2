"""Join a group of ranks that come and go: agree on the members, connect to them, and copy the state.

torchft's lighthouse proposes the members. Ranks ask it only when the group changes, because a rank has failed, has come
or leaves. Between two changes a step costs no more than its collectives.

The lighthouse accepts any process, so a rank takes only names from it. The launcher authenticates its ranks by the
job's key. It returns the states of those names that are ranks and ask for a group.

Two properties make the result exact. First, a step depends on the state and its number alone, so a step that fails is
taken again with the same bits on any rank. Second, a rank updates its weights only if the sum that it has
received counts each sub-shard of this step once. Ranks do not agree on each update: if one rank has updated and another
has not, they regroup, and copy the state of the rank that is ahead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import Any

import safetensors.numpy
import torch
import torch.distributed as dist
from authentication import LauncherStore, StrangerFound, group_name, prove_key
from numpy.typing import NDArray
from samestep import ConfigError, NonRetryableError, checkpoint, log, stop
from samestep.env import World
from samestep.job_info import JobInfo
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Groups, Parts, Run
from samestep.torch import distributed, virtual_ranks
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseClient

HEARTBEAT_SECONDS = 0.1
READY_SECONDS = 5.0  # in which all members must learn of a new group
CONNECT_SECONDS = 10.0  # in which they must connect to each other
QUORUM_SECONDS = 5.0  # in which the lighthouse must answer
MAX_FAILURES = 20  # attempts in a row to regroup or to take a step
STEPS = 4096  # sums hold step numbers modulo this, because float32 represents them exactly
CHECKS = 4  # what each sub-shard adds to the sum: a count, the step, a request to regroup, its loss


def choose_device(options: Options, world: World) -> torch.device:
    """Return the CPU, or with --share-gpu the first GPU. Ranks that come have no GPU of their own."""
    if not options.share_gpu:
        return torch.device("cpu")
    return distributed.choose_device(options.device, world)


def run_metadata(device: torch.device, model: nn.Module | None = None) -> dict[str, Any]:
    """Return `distributed.run_metadata` for ranks that communicate by gloo on any device.

    NCCL cannot end a collective whose peer has died without ending the process, except by torchft's own process group.
    """
    return {**distributed.run_metadata(device, model), "backend": "gloo"}


class Failed(Exception):
    """Report that not all members completed a step or an evaluation."""


class MemberWatchdog(Watchdog):
    """End a rank without progress, but not the job: the launcher starts the rank again."""

    def rank_is_lost(self) -> bool:
        return False  # the others continue without it

    def end(self) -> None:
        text = f"rank {self._world.rank} has made no progress for {self._options.timeout:g} s; ending"
        log.call_with_timeout(1.0, log.error, text, "hang")
        os._exit(1)


class Launcher:
    """Exchange messages with this job's launcher, in JSON and safetensors, so that pickle is never loaded."""

    def __init__(self, rank: int, metadata: dict[str, Any]) -> None:
        """Connect. Raises ConfigError if the launcher refuses this rank, because its ``metadata`` differs."""
        info = JobInfo.from_environ(os.environ)
        host, port, key = info.members.split()
        self._place = (host, int(port))
        self.key = bytes.fromhex(key)
        self._connection = self._connect()
        self.rank = rank
        self.name = info.name
        self.left_group = ""
        self.stop_signal = 0
        self.void: set[str] = set()  # nonces of requests for a group that no longer hold
        self.send(kind="hello", rank=rank, name=self.name, metadata=metadata)
        welcome = self._receive()
        if "refusal" in welcome:
            raise ConfigError(f"rank {rank} cannot take part: {welcome['refusal']}")
        self.lighthouse = welcome["lighthouse"]

    def open_store(self) -> LauncherStore:
        """Return the store by which members find each other, on a connection of its own."""
        with self._connected():
            connection = self._connect()
            connection.send_bytes(json.dumps({"kind": "store"}).encode())
        return LauncherStore(connection, CONNECT_SECONDS)

    def _connect(self) -> Connection:
        """Connect to the launcher. Each side proves by an HMAC that it has the job's key."""
        return Client(self._place, authkey=self.key)

    def broadcast(self, content: bytes) -> bytes:
        """Return the next part of the newest checkpoint; `Run.restore` calls this. ``content`` is not used."""
        return self._connection.recv_bytes()

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Return ``row`` as the only one, because the launcher compares ranks."""
        return row[None]

    def wait_to_begin(self) -> None:
        """Wait until the ranks that the job starts with are ready. A rank that comes later does not wait."""
        self.send(kind="ready")
        self._answer("begin")

    def send(self, **message: Any) -> None:
        """Send a message. Raises ConnectionError if the launcher is gone, which starts the job again."""
        with self._connected():
            self._connection.send_bytes(json.dumps(message).encode())

    def offer(self, groups: Groups, **message: Any) -> None:
        """Send a message and the digest of ``groups``, then the arrays if the launcher lacks them."""
        self.send(**message, digest=digest(groups))
        is_wanted = self._answer("wanted")
        if not is_wanted:
            return
        with self._connected():
            for arrays in groups.values():
                self._connection.send_bytes(checkpoint.serialize(arrays))

    def request_group(self, failed_step: int | None, state: dict[str, Any]) -> None:
        """Record with the launcher that this rank asks for a group, and the state that it has."""
        self.send(kind="regroup", failed=failed_step, state=state)
        self._answer("noted")

    def confirm(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the states of those processes of ``names`` that are ranks of this job and ask for a group."""
        self.send(kind="confirm", names=[*names])
        states: list[dict[str, Any]] = self._answer("confirmed")
        self.void.clear()  # what the launcher reports from now on can concern these states
        return states

    def poll(self) -> None:
        """Take the requests that have arrived."""
        with self._connected():
            while self._connection.poll():
                self._take(self._receive())

    def _answer(self, name: str) -> Any:
        """Return the launcher's answer of this name, and take the requests that arrive before it."""
        while True:
            message = self._receive()
            if name in message:
                return message[name]
            self._take(message)

    def _receive(self) -> dict[str, Any]:
        with self._connected():
            return dict(json.loads(self._connection.recv_bytes()))

    def _take(self, request: dict[str, Any]) -> None:
        self.void |= {*request.get("void", ())}
        self.left_group = request.get("regroup", self.left_group)
        self.stop_signal = request.get("stop", self.stop_signal)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise ConnectionError("the launcher of this rank is gone") from error


@dataclass
class Progress:
    """The progress of a rank. A member that is behind copies it with the weights.

    Attributes:
        step: number of updates done.
        loss: summed loss of the last step.
        running_loss: summed losses of all steps since the last log line.
        evaluation_due: an evaluation follows the last update.
    """

    step: int
    loss: float = 0.0
    running_loss: float = 0.0
    evaluation_due: bool = False

    def number(self) -> int:
        """Return a number that counts updates and their evaluations."""
        return 2 * self.step - self.evaluation_due


class Lighthouse:
    """Announce this rank to torchft's lighthouse, and ask which names it proposes as members."""

    def __init__(self, launcher: Launcher, run: Run) -> None:
        """Take the connection to the launcher, which knows the lighthouse, and the run, whose watchdog is asked."""
        self._name = launcher.name
        self._run = run
        connect_time = timedelta(seconds=10)
        self._client = LighthouseClient(launcher.lighthouse, connect_time)
        heartbeats = LighthouseClient(launcher.lighthouse, connect_time)
        heartbeats.heartbeat(self._name)  # a first group waits for the ranks that have sent one
        threading.Thread(target=self._send_heartbeats, args=[heartbeats], daemon=True).start()

    def _send_heartbeats(self, client: LighthouseClient) -> None:
        """Send heartbeats to the lighthouse, unless this rank hangs, so that the others do not wait for it."""
        limit = give_up_after(self._run.options.timeout)
        while True:
            if time.monotonic() - self._run.monitor.last_progress < limit:  # type: ignore[attr-defined]
                with contextlib.suppress(Exception):  # the launcher is gone, and the lighthouse with it
                    client.heartbeat(self._name)
            time.sleep(HEARTBEAT_SECONDS)

    def proposed_names(self) -> list[str]:
        """Return the names that the lighthouse proposes; [] if it does not answer in time."""
        try:
            quorum = self._client.quorum(replica_id=self._name, timeout=timedelta(seconds=QUORUM_SECONDS))
        except Exception:  # besides a timeout, a stranger's message that torchft cannot read
            time.sleep(HEARTBEAT_SECONDS)
            return []
        return [each.replica_id for each in quorum.participants]


class Members:
    """Count this rank's steps among the members of its group.

    Attributes:
        rank, world_size: this rank's index in the group, and the number of members.
        regroup_due: the group changes before the next step.
        checks: [CHECKS], of the last sub-shard, and after the reduction the sums over all sub-shards.
    """

    def __init__(self, launcher: Launcher, run: Run, parts: Parts, device: torch.device) -> None:
        """Announce this rank to the lighthouse.

        Args:
            launcher: the connection to the launcher.
            run: counts the updates of this process, and has the options.
            parts: returns and loads the arrays of model and optimizer.
            device: has the model.
        """
        self.launcher = launcher
        self.rank = 0
        self.world_size = 1
        self.regroup_due = True
        self.checks = torch.zeros(CHECKS, dtype=getattr(torch, run.options.dtype), device=device)
        self._run = run
        self._parts = parts
        self._progress = Progress(run.first_step, evaluation_due=run.first_step == run.last_step)
        self._group = ""
        self._failures = 0
        self._failed_step: int | None = None
        self._store = launcher.open_store()
        gc.collect()
        gc.freeze()  # nothing that lives by now is searched again when garbage is collected
        self._lighthouse = Lighthouse(launcher, run)
        launcher.wait_to_begin()

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows the last update."""
        return self._progress.evaluation_due

    # --- steps ---------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield the number of the next step, the same again if it fails, until the run is complete.

        A rank that is asked to stop completes an evaluation that is due, offers the launcher its state, and leaves.
        Raises Stopped.
        """
        while self._progress.step < self._run.last_step or self.evaluation_due:
            number = self._stop_signal()
            if number:
                self._send_record({}, save=True, signal_number=number)
                raise stop.Stopped(number, f"left after {self._progress.step} updates", is_final=False)
            yield self._progress.step
        if dist.is_initialized():
            dist.destroy_process_group()

    def _stop_signal(self) -> int:
        """Return the signal that asks this rank to leave, or 0, also while an evaluation is due."""
        if self.evaluation_due:
            return 0
        return self._run.stop_request.number or self.launcher.stop_signal

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Catch Failed: the members regroup, and take the step again. Raises NonRetryableError after many failures."""
        try:
            yield
        except Failed as failure:
            log.info(f"step {self._progress.step} is taken again: {failure}")
            self.regroup_due = True
            self._failed_step = self._progress.step
            self._failures += 1
            if self._failures > MAX_FAILURES:
                raise NonRetryableError(
                    f"rank {self.launcher.rank} has failed {self._failures} times in a row: {failure}"
                ) from failure

    def note(self, step: int, loss: Tensor) -> None:
        """Set what the next sub-shard adds to the sum; ``loss`` is its summed loss."""
        asks = self.launcher.left_group == self._group  # a rank has left this group, or waits to join it
        self.checks[:3] = torch.tensor((1, step % STEPS, asks))
        self.checks[3] = loss.detach()

    def check(self, step: int, sub_shards: int) -> None:
        """Raise Failed unless the sum counts each sub-shard of this step once."""
        count, steps, asks, loss = self.checks.tolist()
        if count != sub_shards or steps != sub_shards * (step % STEPS):
            raise Failed(f"the sum does not count each of {sub_shards} sub-shards once")
        self.regroup_due = asks > 0
        self._progress.loss = loss

    def after_step(self, step: int) -> None:
        """Record that update ``step`` is done, and send its number to the launcher."""
        progress = self._progress
        progress.step = step + 1
        progress.running_loss += progress.loss
        self._failures = 0
        self._run.count_step(step)
        if self.rank == 0:
            self.launcher.send(kind="update", step=progress.step)
        self.launcher.poll()
        actions = self._run.actions(step)
        progress.evaluation_due = actions.evaluate or progress.step == self._run.last_step
        if actions.log and not self.evaluation_due:
            self.record({})

    def record(self, evaluation: dict[str, float]) -> None:
        """Send the launcher the numbers of a log line, and offer it a checkpoint. Each member does, so none is lost."""
        self._progress.evaluation_due = False
        actions = self._run.actions(self._progress.step - 1)
        self._send_record(evaluation, evaluates=actions.evaluate, save=actions.save)
        self._progress.running_loss = 0.0

    def _send_record(
        self, evaluation: dict[str, float], evaluates: bool = False, save: bool = False, signal_number: int = 0
    ) -> None:
        is_last_step = self._progress.step == self._run.last_step
        is_final = is_last_step and not signal_number
        message = {
            "step": self._progress.step,
            "loss": self._progress.loss,
            "running_loss": self._progress.running_loss,
            "save": save,
            "evaluation": evaluation,
            "evaluates": evaluates,
            "stop": signal_number,
            "final": is_final,
        }
        if save or is_final:
            self.launcher.offer(self._parts.groups(), kind="record", **message)
        else:
            self.launcher.send(kind="record", **message)

    # --- collectives, which raise Failed if a member is lost -------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the members."""
        with _collective():
            dist.all_reduce(tensor)  # collective

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Do `virtual_ranks.all_gather`."""
        with _collective():
            return virtual_ranks.all_gather(tensor)  # collective

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Do `virtual_ranks.all_to_all`."""
        with _collective():
            return virtual_ranks.all_to_all(tensor, send, receive)  # collective

    # --- the group -----------------------------------------------------------------------------------------------

    def regroup(self) -> None:
        """Agree on the members, connect to them, and copy the state of the member that is ahead.

        Raises Failed if a member is lost meanwhile.
        """
        _leave_group()
        self.regroup_due = True
        groups = self._parts.groups()
        mine = {
            "progress": self._progress.number(),
            "digest": digest(groups),
            "name": self.launcher.name,
            "rank": self.launcher.rank,
            "nonce": secrets.token_hex(16),
        }
        self.launcher.request_group(self._failed_step, mine)
        self._failed_step = None
        members = _in_order(self._quorum())
        self.world_size = len(members)
        self.rank = members.index(mine)
        self._group = group_name(self.launcher.key, [each["nonce"] for each in members])
        with _collective():
            self._connect(members)
            prove_key(self.launcher.key, self._group)  # collective
            if len({_state(each) for each in members}) > 1:
                self._copy_state(groups, mine, members[0])
            limit = timedelta(seconds=give_up_after(self._run.options.timeout))
            dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
        self.regroup_due = False
        ranks = [each["rank"] for each in members]
        self.launcher.send(kind="members", group=self._group, ranks=ranks, step=self._progress.step)

    def _quorum(self) -> list[dict[str, Any]]:
        """Return the state of each member of the new group, this rank included."""
        while True:
            self._run.monitor.beat()
            self.launcher.poll()
            if self._stop_signal():
                raise Failed("this rank leaves")
            names = self._lighthouse.proposed_names()
            members = self.launcher.confirm(names)
            if len(members) >= self._run.options.min_ranks:
                return members

    def _connect(self, members: list[dict[str, Any]]) -> None:
        """Connect to the other members by gloo."""
        store = PrefixStore(self._group, self._store)
        store.set(f"ready/{self.rank}", "")
        self._wait_for(members, store)
        # torch counts groups, also failed ones, and its keys in the store have the count: members must agree on it.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(  # collective
            "gloo",
            timeout=timedelta(seconds=CONNECT_SECONDS),
            world_size=self.world_size,
            rank=self.rank,
            store=store,
        )

    def _wait_for(self, members: list[dict[str, Any]], store: PrefixStore) -> None:
        """Wait until all members have joined the new group. Raises Failed as soon as one of them no longer can."""
        keys = [f"ready/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + READY_SECONDS
        while not store.check(keys):
            self.launcher.poll()
            lost = [each["rank"] for each in members if each["nonce"] in self.launcher.void]
            if lost:
                raise Failed(f"ranks {lost} have left the new group")
            if time.monotonic() > deadline:
                raise Failed("not all members came")
            time.sleep(0.01)

    def _copy_state(self, groups: Groups, mine: dict[str, Any], ahead: dict[str, Any]) -> None:
        """Copy the state of rank 0 to the members that differ."""
        header = {**asdict(self._progress), "groups": [*groups]}
        values = json.loads(distributed.broadcast(json.dumps(header).encode()))  # collective
        names = values.pop("groups")
        progress = Progress(**values)
        if progress.number() != ahead["progress"]:
            raise Failed("the state that arrives is not the one that the launcher has recorded")
        contents = {}
        for group in names:
            content = b""
            if self.rank == 0:
                content = checkpoint.serialize(groups[group])
            contents[group] = distributed.broadcast(content)  # collective
        if _state(mine) == _state(ahead):
            return
        if mine["progress"] == ahead["progress"]:
            log.warning(f"rank {mine['rank']} has other bits than rank {ahead['rank']} and copies them", "rollback")
        arrays = {group: safetensors.numpy.load(content) for group, content in contents.items()}
        if digest(arrays) != ahead["digest"]:
            raise Failed("the state that arrived is not the one that the launcher has recorded")
        self._parts.load(arrays)
        self._progress = progress


def _leave_group() -> None:
    """Close the connections of torch's default group, if there is one."""
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    # The group closes its connections once nothing refers to it, so that other members notice. The traceback of a
    # failed collective does, in a cycle.
    gc.collect()  # without what `Members` has frozen, in milliseconds: heartbeats must not wait for it


def _in_order(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the members by rank. Rank 0 is the oldest member ahead with the most frequent state."""
    held = Counter(map(_state, members))

    def place(member: dict[str, Any]) -> tuple[int, int, str]:
        return -member["progress"], -held[_state(member)], member["name"]

    return sorted(members, key=place)


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    """Raise Failed for an error of gloo or of the store: a member is lost, a stranger, or does not answer in time."""
    try:
        yield
    except (RuntimeError, StrangerFound) as error:
        raise Failed(log.first_line(str(error))) from error


def _state(member: dict[str, Any]) -> tuple[int, str]:
    """Return what members compare: their progress, and the digest of their arrays."""
    return (member["progress"], member["digest"])


def give_up_after(timeout: float) -> float:
    """Return for how many seconds a rank waits for others, so that it continues before its watchdog ends it."""
    return 0.8 * timeout


def digest(groups: Groups) -> str:
    """Return a SHA-256 of all arrays of ``groups``."""
    arrays = {}
    for group, values in groups.items():
        for name, array in values.items():
            arrays[f"{group} {name}"] = array
    return checkpoint.weights_sha256(arrays)
