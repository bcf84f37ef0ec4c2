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
from collections.abc import Callable, Iterator, Sequence
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
from samestep.options import Options
from samestep.recovery.watchdog import Watchdog
from samestep.run import Groups, Run
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
    """Talk to this job's launcher, which records the run, in JSON and safetensors: pickle is never loaded."""

    def __init__(self, rank: int, metadata: dict[str, Any]) -> None:
        """Connect. Raises ConfigError if the launcher refuses this rank, because its ``metadata`` differs."""
        host, port, key = os.environ["SAMESTEP_MEMBERS"].split()
        self._place, self.key = (host, int(port)), bytes.fromhex(key)
        self._connection = self._connect()
        self.rank, self.left_group, self.stop_signal = rank, "", 0
        self.void: set[str] = set()  # nonces of requests for a group that no longer hold
        self.name = os.environ["SAMESTEP_NAME"]
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
        with self._connected():
            for group in groups if is_wanted else ():
                self._connection.send_bytes(checkpoint.serialize(groups[group]))

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
        while name not in (message := self._receive()):
            self._take(message)
        return message[name]

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


class Members:
    """Count this rank's steps among the members of its group.

    Attributes:
        rank, world_size: this rank's index in the group, and the number of members.
        regroup_due: the group changes before the next step.
        evaluation_due: an evaluation follows the last update.
        checks: [CHECKS], of the last sub-shard, and after the reduction the sums over all sub-shards.
    """

    def __init__(
        self,
        launcher: Launcher,
        run: Run,
        arrays: Callable[[], Groups],
        load: Callable[[Groups], None],
        device: torch.device,
    ) -> None:
        """Announce this rank to the lighthouse.

        Args:
            launcher: the connection to the launcher.
            run: counts the updates of this process, and has the options.
            arrays: returns the arrays of model and optimizer.
            load: loads such arrays.
            device: has the model.
        """
        self.launcher, self.rank, self.world_size, self.regroup_due = launcher, 0, 1, True
        self._run, self._arrays, self._load = run, arrays, load
        self._step, self.evaluation_due = run.first_step, run.first_step == run.last_step
        self._loss = self._running_loss = 0.0  # of the last step, and of all steps since the last log line
        self.checks = torch.zeros(CHECKS, dtype=getattr(torch, run.options.dtype), device=device)
        self._group, self._failures = "", 0
        self._failed_step: int | None = None
        self._store = launcher.open_store()
        gc.collect()
        gc.freeze()  # nothing that lives by now is searched again when garbage is collected
        self._client, heartbeats = (LighthouseClient(launcher.lighthouse, timedelta(seconds=10)) for _ in range(2))
        heartbeats.heartbeat(launcher.name)  # a first group waits for the ranks that have sent one
        threading.Thread(target=self._send_heartbeats, args=(heartbeats,), daemon=True).start()
        launcher.wait_to_begin()

    # --- steps ---------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield the number of the next step, the same again if it fails, until the run is complete.

        A rank that is asked to stop completes an evaluation that is due, offers the launcher its state, and leaves.
        Raises Stopped.
        """
        while self._step < self._run.last_step or self.evaluation_due:
            if number := self._stop_signal():
                self._send_record({}, save=True, signal_number=number)
                raise stop.Stopped(number, f"left after {self._step} updates", is_final=False)
            yield self._step
        if dist.is_initialized():
            dist.destroy_process_group()

    def _stop_signal(self) -> int:
        """Return the signal that asks this rank to leave, or 0, also while an evaluation is due."""
        return 0 if self.evaluation_due else self._run.stop_request.number or self.launcher.stop_signal

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Catch Failed: the members regroup, and take the step again. Raises NonRetryableError after many failures."""
        try:
            yield
        except Failed as failure:
            log.info(f"step {self._step} is taken again: {failure}")
            self.regroup_due, self._failed_step, self._failures = True, self._step, self._failures + 1
            if self._failures > MAX_FAILURES:
                text = f"rank {self.launcher.rank} has failed {self._failures} times in a row: {failure}"
                raise NonRetryableError(text) from failure

    def note(self, step: int, loss: Tensor) -> None:
        """Set what the next sub-shard adds to the sum; ``loss`` is its summed loss."""
        asks = self.launcher.left_group == self._group  # a rank has left this group, or waits to join it
        self.checks[:3] = torch.tensor((1, step % STEPS, asks))
        self.checks[3] = loss.detach()

    def check(self, step: int, sub_shards: int) -> None:
        """Raise Failed unless the sum counts each sub-shard of this step once."""
        count, steps, asks, loss = self.checks.tolist()
        if (count, steps) != (sub_shards, sub_shards * (step % STEPS)):
            raise Failed(f"the sum does not count each of {sub_shards} sub-shards once")
        self.regroup_due, self._loss = asks > 0, loss

    def after_step(self, step: int) -> None:
        """Count the update ``step``, and tell the launcher."""
        self._step, self._running_loss, self._failures = step + 1, self._running_loss + self._loss, 0
        self._run.count_step(step)
        if self.rank == 0:
            self.launcher.send(kind="update", step=self._step)
        self.launcher.poll()
        actions = self._run.actions(step)
        self.evaluation_due = actions.evaluate or self._step == self._run.last_step
        if actions.log and not self.evaluation_due:
            self.record({})

    def record(self, evaluation: dict[str, float]) -> None:
        """Send the launcher the numbers of a log line, and offer it a checkpoint. Each member does, so none is lost."""
        self.evaluation_due = False
        actions = self._run.actions(self._step - 1)
        self._send_record(evaluation, evaluates=actions.evaluate, save=actions.save)
        self._running_loss = 0.0

    def _send_record(
        self, evaluation: dict[str, float], evaluates: bool = False, save: bool = False, signal_number: int = 0
    ) -> None:
        message: dict[str, Any] = {
            "step": self._step,
            "loss": self._loss,
            "running_loss": self._running_loss,
            "save": save,
        }
        message |= {"evaluation": evaluation, "evaluates": evaluates, "stop": signal_number}
        message["final"] = self._step == self._run.last_step and not signal_number
        if save or message["final"]:
            self.launcher.offer(self._arrays(), kind="record", **message)
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

    def _send_heartbeats(self, client: LighthouseClient) -> None:
        """Tell the lighthouse that this rank lives, unless it hangs: the others must not wait for it then."""
        limit = give_up_after(self._run.options.timeout)
        while True:
            if time.monotonic() - self._run.monitor.last_progress < limit:  # type: ignore[attr-defined]
                with contextlib.suppress(Exception):  # the launcher is gone, and the lighthouse with it
                    client.heartbeat(self.launcher.name)
            time.sleep(HEARTBEAT_SECONDS)

    def regroup(self) -> None:
        """Agree on the members, connect to them, and copy the state of the member that is ahead.

        Raises Failed if a member is lost meanwhile.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
            # The group closes its connections once nothing refers to it, so that other members notice. The traceback of
            # a failed collective does, in a cycle.
            gc.collect()  # without what __init__ has frozen, in milliseconds: heartbeats must not wait for it
        self.regroup_due = True
        groups = self._arrays()
        mine = {"progress": _progress(self._step, self.evaluation_due), "digest": digest(groups)}
        mine |= {"name": self.launcher.name, "rank": self.launcher.rank, "nonce": secrets.token_hex(16)}
        self.launcher.request_group(self._failed_step, mine)
        self._failed_step = None
        members = self._quorum()
        held = Counter(map(_state, members))
        # Among the members that are ahead, rank 0 is the oldest of those with the most frequent state.
        members.sort(key=lambda each: (-each["progress"], -held[_state(each)], each["name"]))
        self.world_size, self.rank = len(members), members.index(mine)
        self._group = group_name(self.launcher.key, [each["nonce"] for each in members])
        store = PrefixStore(self._group, self._store)
        with _collective():
            store.set(f"ready/{self.rank}", "")
            self._wait_for(members, store)
            connect = timedelta(seconds=CONNECT_SECONDS)
            # torch counts groups, also failed ones, and its keys in the store have the count: members must agree on it.
            dist.distributed_c10d._world.group_count = 0
            place = self.world_size, self.rank, store
            dist.init_process_group("gloo", None, connect, *place)  # collective
            prove_key(self.launcher.key, self._group)  # collective
            if len(held) > 1:
                self._copy_state(groups, mine, members[0])
            limit = timedelta(seconds=give_up_after(self._run.options.timeout))
            dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
        self.regroup_due = False
        ranks = [each["rank"] for each in members]
        self.launcher.send(kind="members", group=self._group, ranks=ranks, step=self._step)

    def _quorum(self) -> list[dict[str, Any]]:
        """Return the state of each member of the new group, this rank included."""
        while True:
            self._run.monitor.beat()
            self.launcher.poll()
            if self._stop_signal():
                raise Failed("this rank leaves")
            members = self.launcher.confirm(self._proposed_names())
            if len(members) >= self._run.options.min_ranks:
                return members

    def _proposed_names(self) -> list[str]:
        """Return the names that the lighthouse proposes; [] if it does not answer in time."""
        try:
            quorum = self._client.quorum(replica_id=self.launcher.name, timeout=timedelta(seconds=QUORUM_SECONDS))
        except Exception:  # besides a timeout, a stranger's message that torchft cannot read
            time.sleep(HEARTBEAT_SECONDS)
            return []
        return [each.replica_id for each in quorum.participants]

    def _wait_for(self, members: list[dict[str, Any]], store: PrefixStore) -> None:
        """Wait until all members have joined the new group. Raises Failed as soon as one of them no longer can."""
        keys, deadline = [f"ready/{rank}" for rank in range(self.world_size)], time.monotonic() + READY_SECONDS
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
        numbers = {"step": self._step, "loss": self._loss, "running_loss": self._running_loss}
        header = json.dumps({**numbers, "evaluation_due": self.evaluation_due, "groups": [*groups]}).encode()
        values = json.loads(distributed.broadcast(header))  # collective
        if _progress(values["step"], values["evaluation_due"]) != ahead["progress"]:
            raise Failed("the state that arrives is not the one that the launcher has recorded")
        contents = {}
        for group in values["groups"]:
            content = checkpoint.serialize(groups[group]) if self.rank == 0 else b""
            contents[group] = distributed.broadcast(content)  # collective
        if _state(mine) == _state(ahead):
            return
        if mine["progress"] == ahead["progress"]:
            log.warning(f"rank {mine['rank']} has other bits than rank {ahead['rank']} and copies them", "rollback")
        arrays = {group: safetensors.numpy.load(content) for group, content in contents.items()}
        if digest(arrays) != ahead["digest"]:
            raise Failed("the state that arrived is not the one that the launcher has recorded")
        self._load(arrays)
        self._step, self._loss, self._running_loss = (values[name] for name in numbers)
        self.evaluation_due = values["evaluation_due"]


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    """Raise Failed for an error of gloo or of the store: a member is lost, a stranger, or does not answer in time."""
    try:
        yield
    except (RuntimeError, StrangerFound) as error:
        raise Failed(log.first_line(str(error))) from error


def _progress(step: int, evaluation_due: bool) -> int:
    """Return a number that counts updates and their evaluations."""
    return 2 * step - evaluation_due


def _state(member: dict[str, Any]) -> tuple[int, str]:
    """Return what members compare: their progress, and the digest of their arrays."""
    return member["progress"], member["digest"]


def give_up_after(timeout: float) -> float:
    """Return for how many seconds a rank waits for others, so that it continues before its watchdog ends it."""
    return 0.8 * timeout


def digest(groups: Groups) -> str:
    """Return a SHA-256 of all arrays of ``groups``."""
    arrays = {f"{group} {name}": array for group, values in groups.items() for name, array in values.items()}
    return checkpoint.weights_sha256(arrays)
