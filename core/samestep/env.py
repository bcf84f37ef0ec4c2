"""Who am I? Rank, world size and launcher, read from the environment.

Every launcher leaves its own variables behind, and often several families of them are there at once: torchrun under
srun, mpirun in a Slurm job, a Kubernetes pod's around them all. ``detect`` reads one family whole, never mixes two:

1. What started this process: msrun, horovodrun, torchrun, Paddle. Where two of them are present, they must agree.
2. Else what placed it: Open MPI, MPICH, a Slurm step.
3. Else what a person or a platform exported: an Ascend rank table, plain RANK and WORLD_SIZE.
4. Else it is one process, rank 0 of 1. Only a pod of a Kubernetes Indexed Job is refused: it has an index, no size.

An empty variable counts as unset. Standard library only; imports no framework.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from samestep import UserError


class EnvError(UserError, ValueError):
    """The environment is half-set, malformed or contradicts itself. One line: names, values and the remedy."""


@dataclass(frozen=True)
class World:
    """This process's place in the job. What the launcher does not say is None; nothing is guessed.

    ``rank`` and ``world_size`` are always known; 0 <= rank < world_size for every worker. msrun also runs the script
    once as its scheduler (``role``), which is no rank: its ``rank`` is -1, not 0. ``master_addr`` and ``master_port``
    are their rendezvous. ``restart_count`` is how often torchrun or Slurm started this job again.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    node_count: int | None = None
    launcher: str = "none"
    role: Literal["worker", "scheduler"] = "worker"
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int | None = None


def detect(environ: Mapping[str, str]) -> World:
    """The World that ``environ`` describes. Pure: reads nothing else. Raises EnvError, and nothing else."""
    started = [family(environ) for family in (_msrun, _horovodrun, _torchrun, _paddle)]
    worlds = [world for world in started if world is not None]
    if len({(world.rank, world.world_size) for world in worlds}) > 1:
        said = " against ".join(f"{world.launcher} ({_show(environ, _PAIRS[world.launcher])})" for world in worlds)
        _fail(f"launchers disagree: {said}; unset the variables of what did not start this process")
    if worlds:
        return worlds[0]
    for family in (_openmpi, _mpich, _slurm, _rank_table, _plain):
        if (world := family(environ)) is not None:
            return world
    if _set(environ, "JOB_COMPLETION_INDEX"):
        _fail(
            f"{_show(environ, 'JOB_COMPLETION_INDEX')} places a pod but gives no size: set NNODES and run "
            "scripts/run_<app>.sh, or set RANK and WORLD_SIZE for one process a pod, or unset it to train alone"
        )
    return World(0, 1, local_rank=0, local_world_size=1, node_rank=0, node_count=1)


def launch_script(environ: Mapping[str, str]) -> int | None:
    """The process id of the launch script that started this job on this machine; None where there is none."""
    pid, _, host = environ.get("SAMESTEP_LAUNCHER", "").partition("@")
    return int(pid) if pid.isdecimal() and host == socket.gethostname() else None


# What each launcher sets. A string holds one or more names; two are a pair: rank and size, address and port.

_PAIRS = {
    "msrun": "MS_NODE_ID MS_WORKER_NUM",
    "horovodrun": "HOROVOD_RANK HOROVOD_SIZE",
    "torchrun": "RANK WORLD_SIZE",
    "paddle": "PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM",
}
_SLURM_STEP = "SLURM_STEP_ID SLURM_STEPID SLURM_STEP_NUM_TASKS"
_PET = "PET_NODE_RANK PET_NNODES PET_NPROC_PER_NODE PET_MASTER_ADDR PET_MASTER_PORT"


def _msrun(env: Mapping[str, str]) -> World | None:
    """Set by msrun's process manager (MindSpore 2.10). DEVICE_ID is the worker's index on its machine.

    RANK_ID is not read: msrun exports RANK_ID=0 for its scheduler before it starts workers, and on several machines
    without ``--node_rank`` they inherit that 0. MS_NODE_ID is there only where the rank is known before ``init()``.
    """
    role, master = _text(env, "MS_ROLE"), "MS_SCHED_HOST MS_SCHED_PORT"
    if role is None:
        return None
    size = _number(env, "MS_WORKER_NUM", low=1)
    if role not in ("MS_WORKER", "MS_SCHED") or size is None:
        shown = _show(env, "MS_ROLE MS_WORKER_NUM")
        _fail(f"{shown}: MS_ROLE is to be MS_WORKER or MS_SCHED, and MS_WORKER_NUM set; start the program with msrun")
    if role == "MS_SCHED":
        return World(-1, size, None, None, None, None, "msrun", "scheduler", *_address(env, master))
    if not _set(env, "MS_NODE_ID"):
        _fail(f"{_show(env, 'MS_ROLE')} but MS_NODE_ID is unset, so the rank is unknown: give msrun --node_rank")
    device = _number(env, "DEVICE_ID")
    # Workers started by hand have the number of a card in DEVICE_ID, and that may be any.
    local = "DEVICE_ID" if device is not None and device < size else ""
    return _read(env, "msrun", _PAIRS["msrun"], local, master=master)


def _horovodrun(env: Mapping[str, str]) -> World | None:
    """Set by horovodrun with gloo (Horovod 0.28). With MPI it sets no ranks, and the MPI's variables are read."""
    local, master = "HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT"
    world = _read(env, "horovodrun", _PAIRS["horovodrun"], local, master=master)
    if world is None:
        return None
    # "Cross" counts the hosts that have this local rank. It is the node's index where all hosts have as many processes,
    # which no variable says outright; the product fails to tell only for hosts as odd as 1, 3 and 4 slots.
    cross = _pair(env, "HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE")
    if cross is None or (world.local_world_size or 0) * cross[1] != world.world_size:
        return world
    return replace(world, node_rank=cross[0], node_count=cross[1])


def _torchrun(env: Mapping[str, str]) -> World | None:
    """Set by torchrun's agent (torch 2.13)."""
    local, node, again = "LOCAL_RANK LOCAL_WORLD_SIZE", "GROUP_RANK GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"
    return _read(env, "torchrun", _PAIRS["torchrun"], local, node, restarts=again, seen="TORCHELASTIC_RUN_ID")


def _paddle(env: Mapping[str, str]) -> World | None:
    """Set by paddle.distributed.launch and paddle.distributed.spawn (Paddle 3.3). Neither gives the node's index."""
    local = _set(env, "PADDLE_RANK_IN_NODE PADDLE_LOCAL_RANK") or "PADDLE_RANK_IN_NODE"
    local += " PADDLE_LOCAL_SIZE" if _set(env, "PADDLE_LOCAL_SIZE") else ""
    world = _read(env, "paddle", _PAIRS["paddle"], local, master="")
    if world is None:
        return None
    nodes = _number(env, "PADDLE_NNODES", low=1)
    if nodes is None and world.local_rank is None:
        # spawn sets neither, but lists where each rank listens: one host is one node.
        hosts = [each.rpartition(":")[0] for each in (_text(env, "PADDLE_TRAINER_ENDPOINTS") or "").split(",")]
        if hosts == [hosts[0]] * world.world_size:
            world, nodes = replace(world, local_rank=world.rank), 1
    if nodes is not None:
        world = replace(world, node_rank=0 if nodes == 1 else None, node_count=nodes)
        world = _complete(env, world, f"PADDLE_TRAINERS_NUM {local} PADDLE_NNODES")
    master = _text(env, "PADDLE_MASTER")
    if master is None or "://" in master:  # http:// and etcd:// are of launchers, not of ranks
        return world
    host, _, port = master.rpartition(":")
    if not host or _whole(port, 1, 65535) is None:
        _fail(f"{_show(env, 'PADDLE_MASTER')} is not host:port with a port from 1 to 65535: correct or unset it")
    return replace(world, master_addr=host, master_port=int(port))


def _openmpi(env: Mapping[str, str]) -> World | None:
    """Set by Open MPI's mpirun (seen with 5). OMPI_COMM_WORLD_NODE_RANK is no node's index but another local rank."""
    local = "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"
    return _read(env, "openmpi", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE", local)


def _mpich(env: Mapping[str, str]) -> World | None:
    """Set by Hydra, the mpiexec of MPICH. srun --mpi=pmi2 sets PMI_* too, but Slurm's own variables say more."""
    local = "MPI_LOCALRANKID MPI_LOCALNRANKS"
    return _read(env, "mpich", "PMI_RANK PMI_SIZE", local) if _set(env, local) or not _set(env, _SLURM_STEP) else None


def _slurm(env: Mapping[str, str]) -> World | None:
    """Set by srun for a task. A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but no step: it is one process.

    SLURM_NTASKS, SLURM_NNODES and SLURM_TASKS_PER_NODE may be the job's, and larger than this step's.
    """
    size = _set(env, "SLURM_STEP_NUM_TASKS SLURM_NTASKS") or "SLURM_STEP_NUM_TASKS"
    node = f"SLURM_NODEID {_set(env, 'SLURM_STEP_NUM_NODES SLURM_NNODES') or 'SLURM_STEP_NUM_NODES'}"
    tasks = _set(env, "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE")
    place, again = f"SLURM_PROCID {size}", "SLURM_RESTART_COUNT"
    world = _read(env, "slurm", place, "SLURM_LOCALID", node, restarts=again, seen=_SLURM_STEP)
    if world is None or tasks is None or world.node_rank is None:
        return world
    here, node_count, world_size = _tasks_per_node(env, tasks, world.node_rank)
    if (node_count, world_size) == (world.node_count, world.world_size):
        return _complete(env, replace(world, local_world_size=here), f"{place} SLURM_LOCALID {node} {tasks}")
    if tasks == "SLURM_TASKS_PER_NODE":
        return world
    _fail(f"slurm's variables contradict each other: {_show(env, f'{size} {node} {tasks}')}; leave them to srun")


def _tasks_per_node(env: Mapping[str, str], name: str, node: int) -> tuple[int, int, int]:
    """Slurm's compressed list, ``2(x3),1`` for 2, 2, 2, 1: (tasks on this node, nodes, tasks). Never expanded."""
    here = nodes = tasks = 0
    for item in (_text(env, name) or "").split(","):
        match = re.fullmatch(r"([0-9]{1,10})(?:\(x([0-9]{1,10})\))?", item)
        if match is None:
            _fail(f"{_show(env, name)} is not a list of tasks per node such as '2(x3),1': leave it to srun")
        count, repeat = int(match[1]), int(match[2] or 1)
        if nodes <= node < nodes + repeat:
            here = count
        nodes, tasks = nodes + repeat, tasks + repeat * count
    return here, nodes, tasks


def _rank_table(env: Mapping[str, str]) -> World | None:
    """Exported on Ascend without a launcher, beside a rank table. DEVICE_ID is a card there, not a local rank."""
    table = _set(env, "RANK_TABLE_FILE MINDSPORE_HCCL_CONFIG_PATH")
    if table is None and _set(env, f"RANK WORLD_SIZE {_PET}"):
        return None
    world = _read(env, "rank table", "RANK_ID RANK_SIZE", master="")
    if world and world.world_size > 1 and table is None:
        shown = _show(env, "RANK_ID RANK_SIZE")
        _fail(f"{shown} but RANK_TABLE_FILE is unset: set it, or start the program with msrun, or unset both")
    return world


def _plain(env: Mapping[str, str]) -> World | None:
    """Exported by hand, by Alibaba DLC, by Kubeflow's PyTorchJob; what torch's env:// reads.

    Without LOCAL_RANK they are processes, one to a node; beside processes per node they count nodes. The PET_* of
    Kubeflow are defaults for torchrun's command line and start nothing themselves.
    """
    local = "LOCAL_RANK LOCAL_WORLD_SIZE" if _set(env, "LOCAL_WORLD_SIZE") else "LOCAL_RANK"
    if not _set(env, "LOCAL_RANK"):
        per_node = _text(env, "NPROC_PER_NODE") or "1"  # may be a word such as "auto"
        if _set(env, _PET) or (per_node != "1" and _set(env, "RANK WORLD_SIZE")):
            shown = _show(env, f"RANK WORLD_SIZE NPROC_PER_NODE {_PET}")
            _fail(f"{shown} count nodes, not processes: run scripts/run_<app>.sh on each node, which reads them")
    world = _read(env, "env", "RANK WORLD_SIZE", local, seen=f"RANK WORLD_SIZE {local}")
    if world is None or _set(env, "LOCAL_RANK"):
        return world
    return replace(world, local_rank=0, local_world_size=1, node_rank=world.rank, node_count=world.world_size)


# How they are read


def _read(
    env: Mapping[str, str],
    launcher: str,
    place: str,
    local: str = "",
    node: str = "",
    master: str = "MASTER_ADDR MASTER_PORT",
    restarts: str = "",
    seen: str = "",
) -> World | None:
    """One family read whole, or None where nothing in ``seen`` (else ``place``) is set. Raises EnvError.

    A single name in ``local`` is a local rank whose size is not given there.
    """
    mark = _set(env, seen or place)
    if mark is None:
        return None
    pair = _pair(env, place)
    if pair is None:
        _fail(f"{_show(env, mark)} but {place.replace(' ', ' and ')} are unset: set both, or unset {mark}")
    (rank, size), (node_rank, node_count) = pair, _pair(env, node) or (None, None)
    local_rank, local_size = (_pair(env, local) or (None, None)) if " " in local else (_number(env, local), None)
    address, port = _address(env, master)
    again = _number(env, restarts)
    world = World(rank, size, local_rank, local_size, node_rank, node_count, launcher, "worker", address, port, again)
    return _complete(env, world, f"{place} {local} {node}")


def _complete(env: Mapping[str, str], world: World, names: str) -> World:
    """``world`` with what follows for certain filled in. Raises EnvError where its numbers cannot all be true."""
    size, here, nodes = world.world_size, world.local_world_size, world.node_count
    if size == 1 or here == size or nodes == 1:  # all of them are on this node
        here, nodes = here or size, nodes or 1
        local_rank = 0 if size == 1 and world.local_rank is None else world.local_rank
        world = replace(
            world, local_rank=local_rank, local_world_size=here, node_rank=world.node_rank or 0, node_count=nodes
        )
    # Every other node has one process or more.
    fits = (here or 1) + (nodes or 1) - 1 <= size and (nodes != 1 or here == size)
    if not fits or (world.local_rank or 0) >= (here or size):
        _fail(f"{world.launcher}'s variables contradict each other: {_show(env, names)}; correct or unset them")
    return world


def _pair(env: Mapping[str, str], names: str) -> tuple[int, int] | None:
    """(rank, size) with 0 <= rank < size, or None where neither is set. Raises EnvError for half a pair."""
    rank_name, _, size_name = names.partition(" ")
    rank, size = _number(env, rank_name), _number(env, size_name, low=1)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        _fail(f"{_show(env, names)} but {rank_name if rank is None else size_name} is unset: set both, or neither")
    if rank >= size:
        _fail(f"{_show(env, rank_name)} is not below {_show(env, size_name)}: ranks count from 0; correct one of them")
    return rank, size


def _address(env: Mapping[str, str], names: str) -> tuple[str | None, int | None]:
    """(address, port); either may be given alone."""
    address, _, port = names.partition(" ")
    return _text(env, address), _number(env, port, low=1, high=65535)


def _number(env: Mapping[str, str], name: str, low: int = 0, high: int = 2**31 - 1) -> int | None:
    """The variable as an int in low..high (by default a C int, as in MPI), None where unset. Raises EnvError."""
    text = _text(env, name)
    number = None if text is None else _whole(text, low, high)
    if text is not None and number is None:
        _fail(f"{_show(env, name)} is not a whole number from {low} to {high}: correct or unset it")
    return number


def _whole(text: str, low: int, high: int) -> int | None:
    # int() alone takes "1_0", "+1" and other scripts' digits, and refuses 5,000 digits with an error of its own.
    number = int(text) if re.fullmatch("[0-9]{1,10}", text) else -1
    return number if low <= number <= high else None


def _text(env: Mapping[str, str], name: str) -> str | None:
    """The variable without surrounding blanks, None where it is unset or empty."""
    return (env.get(name, "").strip() or None) if name else None


def _set(env: Mapping[str, str], names: str) -> str | None:
    """The first of these names that is set."""
    return next((name for name in names.split() if _text(env, name) is not None), None)


def _show(env: Mapping[str, str], names: str) -> str:
    """``A='1', B='2'`` of those that are set: on one line, and short, whatever they hold."""
    values = [(name, env[name]) for name in names.split() if _text(env, name) is not None]
    return ", ".join(f"{name}={value[:60]!a}{'...' if len(value) > 60 else ''}" for name, value in values)


def _fail(message: str) -> NoReturn:
    raise EnvError(message)
