"""Join a group whose members change during training. Ranks agree on the members, connect, and copy the state.

torchft's lighthouse proposes the members. Ranks request a proposal at the start, and when a rank fails, joins or
leaves. In all other steps, ranks communicate with each other only by collectives.

The lighthouse accepts any process, so its proposals may contain processes of other jobs. The launcher authenticates its
ranks by the job's key. It returns the states of those proposed ranks that request a group.

Two properties make the result exact. First, a step depends only on the state and the step's number, so any rank
repeats a failed step with the same bits. Second, a rank updates its weights only if the reduced sum counts each
sub-shard of this step once. Ranks do not agree on each update. If only some ranks have updated, all ranks regroup, and
copy the state of a rank that has updated.
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
from multiprocessing.connection import Connection
from typing import Any

import safetensors.numpy
import torch
import torch.distributed as dist
from authentication import LauncherStore, StrangerFound, group_name, prove_key
from channel import connect
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
READY_SECONDS = 5.0  # time limit for all members to join a new group
CONNECT_SECONDS = 10.0  # time limit for a rank to connect to the launcher, and for the members to each other
QUORUM_SECONDS = 5.0  # time limit for the lighthouse's answer
MAX_FAILURES = 20  # limit of consecutive failed attempts to regroup or to compute a step
STEPS = 4096  # each sub-shard adds step % STEPS, because float32 represents such small sums exactly
CHECKS = 4  # number of values that each sub-shard adds to the sum: a count, the step, a request to regroup, the loss


def choose_device(options: Options, world: World) -> torch.device:
    """Return the CPU without --share-gpu, otherwise the device that `distributed.choose_device` selects."""
    return distributed.choose_device(options.device if options.share_gpu else "cpu", world)


def run_metadata(device: torch.device, model: nn.Module | None = None) -> dict[str, Any]:
    """Return `distributed.run_metadata` for ranks that communicate by gloo on any device.

    The app uses gloo on GPUs too, because NCCL cannot abort a collective of a dead peer and keep the process alive.
    """
    return {**distributed.run_metadata(device, model), "backend": "gloo"}


class Failed(Exception):
    """A member did not complete a step, an evaluation or a regroup, so the members regroup."""


class MemberWatchdog(Watchdog):
    """End a rank that makes no progress, but do not end the job. The launcher restarts the rank."""

    def rank_is_lost(self) -> bool:
        return False  # the other ranks continue without a lost rank

    def end(self) -> None:
        text = f"rank {self._world.rank} has made no progress for {self._options.timeout:g} s; ending"
        log.call_with_timeout(1.0, log.error, text, "hang")
        os._exit(1)


class Launcher:
    """Exchange messages with this job's launcher, in JSON and safetensors instead of pickle."""

    def __init__(self, rank: int, metadata: dict[str, Any]) -> None:
        """Connect to the launcher.

        Raises:
            ConfigError: the launcher rejects this rank, because its ``metadata`` differ from the other ranks'.
        """
        info = JobInfo.from_environ(os.environ)
        host, port, key = info.members.split()
        self._place = (host, int(port))
        self.key = bytes.fromhex(key)
        self._connection = self._connect()
        self.rank = rank
        self.name = info.name
        self.left_group = ""
        self.stop_signal = 0
        self.void: set[str] = set()  # nonces of withdrawn requests for a group
        self.send(kind="hello", rank=rank, name=self.name, metadata=metadata)
        welcome = self._receive()
        if "refusal" in welcome:
            raise ConfigError(f"rank {rank} cannot take part: {welcome['refusal']}")
        self.lighthouse = welcome["lighthouse"]

    def open_store(self) -> LauncherStore:
        """Open a second connection to the launcher, and return the store by which members connect to each other."""
        with self._connected():
            connection = self._connect()
            connection.send_bytes(json.dumps({"kind": "store"}).encode())
        return LauncherStore(connection, CONNECT_SECONDS)

    def _connect(self) -> Connection:
        return connect(self._place, self.key, CONNECT_SECONDS)

    def broadcast(self, content: bytes) -> bytes:
        """Return the next part of the newest checkpoint. `Run.restore` calls this method. ``content`` has no effect."""
        return self._connection.recv_bytes()

    def all_gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """Return ``row`` [k] as [1, k]. The launcher compares the ranks, so this rank needs no rows of other ranks."""
        return row[None]

    def wait_to_begin(self) -> None:
        """Report that this rank is ready, and wait until the launcher starts training.

        The launcher waits for the job's first ranks. A rank that joins later starts immediately.
        """
        self.send(kind="ready")
        self._answer("begin")

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            ConnectionError: the launcher has ended. The launch script then restarts the job.
        """
        with self._connected():
            self._connection.send_bytes(json.dumps(message).encode())

    def offer(self, groups: Groups, **message: Any) -> None:
        """Send a message with the digest of ``groups``. If the launcher requests the arrays, send them too."""
        self.send(**message, digest=digest(groups))
        is_wanted = self._answer("wanted")
        if not is_wanted:
            return
        with self._connected():
            for arrays in groups.values():
                self._connection.send_bytes(checkpoint.serialize(arrays))

    def request_group(self, failed_step: int | None, state: dict[str, Any]) -> None:
        """Send the launcher this rank's request for a group, and wait until the launcher has recorded the request.

        Args:
            failed_step: number of the step that failed, or None.
            state: progress, digest of the arrays, name, number and nonce of this rank, for the other members.
        """
        self.send(kind="regroup", failed=failed_step, state=state)
        self._answer("noted")

    def confirm(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the states of the ranks of this job that have a name in ``names`` and request a group."""
        self.send(kind="confirm", names=[*names])
        states: list[dict[str, Any]] = self._answer("confirmed")
        self.void.clear()  # earlier withdrawals do not concern the confirmed states
        return states

    def poll(self) -> None:
        """Handle the requests that the launcher has already sent, without waiting for more."""
        with self._connected():
            while self._connection.poll():
                self._take(self._receive())

    def _answer(self, name: str) -> Any:
        """Wait for the launcher's answer ``name``, and return the answer. Handle requests that arrive before it."""
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
    """The progress of a rank. A member that is behind copies weights and progress from a member that is ahead.

    Attributes:
        step: number of completed updates.
        loss: summed loss of the last step.
        running_loss: summed losses of all steps since the last log line.
        evaluation_due: whether an evaluation follows the last update.
    """

    step: int
    loss: float = 0.0
    running_loss: float = 0.0
    evaluation_due: bool = False

    def number(self) -> int:
        """Return a number that grows with each update and each evaluation."""
        return 2 * self.step - self.evaluation_due


class Lighthouse:
    """Send heartbeats to torchft's lighthouse, and request the names of the members that the lighthouse proposes."""

    def __init__(self, launcher: Launcher, run: Run) -> None:
        """Connect to the lighthouse, and start the thread of heartbeats.

        Args:
            launcher: connection to the launcher, which has the lighthouse's address.
            run: the run whose monitor measures this rank's progress.
        """
        self._name = launcher.name
        self._run = run
        connect_time = timedelta(seconds=10)
        self._client = LighthouseClient(launcher.lighthouse, connect_time)
        heartbeats = LighthouseClient(launcher.lighthouse, connect_time)
        heartbeats.heartbeat(self._name)  # the lighthouse waits for ranks with a heartbeat before it proposes a group
        threading.Thread(target=self._send_heartbeats, args=[heartbeats], daemon=True).start()

    def _send_heartbeats(self, client: LighthouseClient) -> None:
        """Send heartbeats while this rank makes progress, so that the lighthouse does not wait for a hung rank."""
        limit = give_up_after(self._run.options.timeout)
        while True:
            if time.monotonic() - self._run.monitor.last_progress < limit:  # type: ignore[attr-defined]
                with contextlib.suppress(Exception):  # the launcher and its lighthouse may have ended
                    client.heartbeat(self._name)
            time.sleep(HEARTBEAT_SECONDS)

    def proposed_names(self) -> list[str]:
        """Return the names that the lighthouse proposes; [] if it gives no valid answer within QUORUM_SECONDS."""
        try:
            quorum = self._client.quorum(replica_id=self._name, timeout=timedelta(seconds=QUORUM_SECONDS))
        except Exception:  # a timeout, or torchft cannot parse another process's message
            time.sleep(HEARTBEAT_SECONDS)
            return []
        return [each.replica_id for each in quorum.participants]


class Members:
    """Train this rank's steps as a member of a group, and regroup after failures.

    Attributes:
        rank, world_size: this rank's index in the group, and the number of members.
        regroup_due: whether the group must change before the next step.
        checks: tensor [CHECKS] of the last sub-shard; after the reduction, the sums over all sub-shards.
    """

    def __init__(self, launcher: Launcher, run: Run, parts: Parts, device: torch.device) -> None:
        """Connect to the lighthouse, and wait until training begins.

        Args:
            launcher: connection to the launcher.
            run: the run, with its options.
            parts: functions that return and load the arrays of model and optimizer.
            device: device of the model.
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
        gc.freeze()  # later collections skip the objects that exist now
        self._lighthouse = Lighthouse(launcher, run)
        launcher.wait_to_begin()

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows the last update."""
        return self._progress.evaluation_due

    # --- steps ---------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield the number of updates done, which is the number of the next step, until the run is complete.

        The number repeats after a failed step, after a regroup, and if an evaluation is due.

        If a stop request arrives, this rank completes an evaluation that is due, and sends its state to the launcher.

        Raises:
            Stopped: this rank received a stop request.
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
        """Return the number of the stop signal for this rank, or 0 without a signal or while an evaluation is due."""
        if self.evaluation_due:
            return 0
        return self._run.stop_request.number or self.launcher.stop_signal

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Catch `Failed` in the block, and set ``regroup_due``, so that the members regroup and repeat the step.

        Raises:
            NonRetryableError: more than MAX_FAILURES attempts failed in a row.
        """
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
        """Set the checks that the tree adds for a sub-shard of ``step`` with the summed loss ``loss``."""
        asks = self.launcher.left_group == self._group  # whether a rank has left this group, or waits to join
        self.checks[:3] = torch.tensor((1, step % STEPS, asks))
        self.checks[3] = loss.detach()

    def check(self, step: int, sub_shards: int) -> None:
        """Read the reduced checks: record the step's loss, and whether a member requests a regroup.

        Args:
            step: number of the step.
            sub_shards: number of sub-shards of the global batch.

        Raises:
            Failed: the checks do not count each sub-shard of this step once.
        """
        count, steps, asks, loss = self.checks.tolist()
        if count != sub_shards or steps != sub_shards * (step % STEPS):
            raise Failed(f"the sum does not count each of {sub_shards} sub-shards once")
        self.regroup_due = asks > 0
        self._progress.loss = loss

    def after_step(self, step: int) -> None:
        """Record that update ``step`` is done, handle the launcher's requests, and send a log line if one is due.

        Rank 0 also sends the number of completed updates and the loss to the launcher. `record` sends a log line with
        an evaluation.
        """
        progress = self._progress
        progress.step = step + 1
        progress.running_loss += progress.loss
        self._failures = 0
        self._run.count_step(progress.step)
        if self.rank == 0:
            self.launcher.send(kind="update", step=progress.step, loss=progress.loss)
        self.launcher.poll()
        actions = self._run.actions(progress.step)
        progress.evaluation_due = actions.evaluate or progress.step == self._run.last_step
        if actions.log and not self.evaluation_due:
            self.record({})

    def record(self, evaluation: dict[str, float]) -> None:
        """Send the launcher the numbers of a log line, and offer a checkpoint if one is due.

        Every member sends these numbers, so that no log line is missing if a member is lost.
        """
        self._progress.evaluation_due = False
        actions = self._run.actions(self._progress.step)
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
        """Return `virtual_ranks.all_gather` of ``tensor`` over the members."""
        with _collective():
            return virtual_ranks.all_gather(tensor)  # collective

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Return `virtual_ranks.all_to_all` over the members."""
        with _collective():
            return virtual_ranks.all_to_all(tensor, send, receive)  # collective

    # --- the group -----------------------------------------------------------------------------------------------

    def regroup(self) -> None:
        """Agree on the members, connect to them, and copy the state of the member that is ahead.

        Raises:
            Failed: a member was lost meanwhile, or this rank must leave.
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
        progress = self._progress
        self.launcher.send(kind="members", group=self._group, ranks=ranks, step=progress.step, loss=progress.loss)

    def _quorum(self) -> list[dict[str, Any]]:
        """Wait until at least --min-ranks proposed ranks request a group, and return the states of these ranks.

        Raises:
            Failed: this rank received a stop request.
        """
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
        """Connect to the other members by gloo. ``members`` are the states of all members."""
        store = PrefixStore(self._group, self._store)
        store.set(f"ready/{self.rank}", "")
        self._wait_for(members, store)
        # torch uses its count of groups in keys of the store, so members must have the same count.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(  # collective
            "gloo",
            timeout=timedelta(seconds=CONNECT_SECONDS),
            world_size=self.world_size,
            rank=self.rank,
            store=store,
        )

    def _wait_for(self, members: list[dict[str, Any]], store: PrefixStore) -> None:
        """Wait until all members have joined the new group.

        Raises:
            Failed: a member has withdrawn or is late.
        """
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
        """Broadcast rank 0's progress and arrays, and load them if this rank's differ.

        Args:
            groups: this rank's arrays.
            mine: this rank's state, as sent to the launcher.
            ahead: rank 0's state, as sent to the launcher.

        Raises:
            Failed: the progress or the arrays that arrive differ from ``ahead``.
        """
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
    """Close the connections of torch's default group if the group exists."""
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    # Other members detect the end of a group by its closed connections. Python must free the group to close them, but
    # a reference cycle through the traceback keeps the group alive after a failed collective.
    gc.collect()  # needs only milliseconds, because `Members` has frozen older objects


def _in_order(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states of the members in the order of their ranks in the new group.

    The order is by progress (most first), then by how many members have the same state, then by the age of the process.
    """
    held = Counter(map(_state, members))

    def place(member: dict[str, Any]) -> tuple[int, int, str]:
        return -member["progress"], -held[_state(member)], member["name"]

    return sorted(members, key=place)


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    """Convert a RuntimeError of gloo or of the store, or a StrangerFound, to `Failed`."""
    try:
        yield
    except (RuntimeError, StrangerFound) as error:
        raise Failed(log.first_line(str(error))) from error


def _state(member: dict[str, Any]) -> tuple[int, str]:
    """Return the values that members compare: the progress of ``member``, and the digest of its arrays."""
    return (member["progress"], member["digest"])


def give_up_after(timeout: float) -> float:
    """Return the seconds that a rank waits for other ranks: 80% of its watchdog's ``timeout``."""
    return 0.8 * timeout


def digest(groups: Groups) -> str:
    """Return the SHA-256 of all arrays of ``groups``, in hex."""
    arrays = {}
    for group, values in groups.items():
        for name, array in values.items():
            arrays[f"{group} {name}"] = array
    return checkpoint.weights_sha256(arrays)
