"""Detect this process's place in the job (rank, world size, launcher) from environment variables.

Several launchers may have left variables at the same time: torchrun under srun, mpirun in a Slurm job, a Kubernetes pod
around them. `detect` reads all variables of one launcher and never mixes two. `_LAUNCHERS` is the only table of these
variables, in order of precedence:

1. Launchers that started this process: msrun, horovodrun, torchrun, Paddle. If several are present, they must agree.
2. Launchers that placed it on a node: Open MPI, MVAPICH2, jsrun and MPICH, which must agree too, and a Slurm step.
3. Variables that a person or a platform exported: an Ascend rank table, RANK and WORLD_SIZE.
4. Launchers that give an index but no size: PMIx, a Kubernetes Indexed Job. The process is refused.

Without any of these, the process trains alone, as rank 0 of 1. It never does so in silence beside other ranks:

- One launcher gives the size 1 and another one a larger size: refused.
- A variable without a launcher of the table gives a place, such as FLUX_TASK_RANK=3: refused.

An empty variable counts as unset. This module uses the standard library only.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from samestep import ConfigError


class EnvError(ConfigError, ValueError):
    """Report incomplete, malformed or contradictory variables in one line, with names, values and the remedy."""


@dataclass(frozen=True)
class World:
    """Hold this process's place in the job. A field that the launcher does not set is None.

    Attributes:
        rank: index of this process in [0, world_size). It is -1 for msrun's scheduler, which does not train.
        world_size: number of ranks.
        local_rank, local_world_size: index of this rank among the ranks of its node, and their number.
        node_rank, node_count: index of this node, and the number of nodes.
        launcher: name of the launcher: "none" for a process that trains alone, "env" for plain RANK and WORLD_SIZE.
        role: "scheduler" for the process that msrun starts beside its workers, else "worker".
        master_addr, master_port: address of the launcher's rendezvous.
        restart_count: how many times torchrun or Slurm has restarted the job.
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


@dataclass(frozen=True)
class Launcher:
    """A launcher: the variables by which its ranks recognize it, and how to start it.

    A string of variables holds names, separated by spaces. `A|B` means the first of them that is set, and `-` for
    no variable. The launcher is present if any of ``markers`` (default: ``rank``) is set. If any of ``unless`` is set
    too, the launcher is present only if any of ``proof`` (default: ``local``) is.

    Attributes:
        name: the value of `World.launcher`.
        kind: all present launchers of a kind of `_PEERS` must agree; an "index" comes without a size.
        rank: rank and world size in the job.
        local: the same on the node.
        node: the node's rank, and the number of nodes.
        tasks: Slurm's compressed list of tasks per node.
        address: host and port of the rendezvous.
        restarts: number of restarts.
        others: variables that `detect` does not read. A launch script removes them from its ranks' environment.
        allocation: variables that describe an allocation of machines. A launch script leaves them to its ranks.
        batch: variables that are 0 in a batch script, which no launcher placed.
        command: its command up to the program, a template for `samestep_launch.job.Job.command`; "" if `samestep run`
            cannot start it.
        module: the Python module that the command needs; "" if it starts with ``program``.
        program: the program on PATH that the command starts with.
        line_prefix: a regular expression for its prefix of each line of a rank's stderr.
        equal_ranks: whether it needs as many ranks on each machine.
    """

    name: str
    kind: Literal["starter", "mpi", "slurm", "exported", "index"]
    rank: str
    local: str = "- -"
    node: str = "- -"
    tasks: str = "-"
    address: str = "MASTER_ADDR MASTER_PORT"
    restarts: str = "-"
    markers: str = ""
    unless: str = ""
    proof: str = ""
    others: str = ""
    allocation: str = ""
    batch: str = ""
    command: str = ""
    module: str = ""
    program: str = ""
    line_prefix: str = ""
    equal_ranks: bool = False


_SLURM_STEP = "SLURM_STEP_ID SLURM_STEPID SLURM_STEP_NUM_TASKS"
# Kubeflow's defaults for torchrun's command line. They start no process themselves.
_PET = "PET_NODE_RANK PET_NNODES PET_NPROC_PER_NODE PET_MASTER_ADDR PET_MASTER_PORT"
# fmt: off
_LAUNCHERS = (
    # MindSpore 2.10. RANK_ID is not read: msrun exports RANK_ID=0 for its scheduler before it starts workers, and on
    # several machines without --node_rank they inherit that 0. MS_NODE_ID is set only if msrun knows the rank.
    Launcher("msrun", "starter", "MS_NODE_ID MS_WORKER_NUM", address="MS_SCHED_HOST MS_SCHED_PORT",
             markers="MS_ROLE",
             command="{python} -m mindspore.parallel.cluster.run --join=True --tail_worker_log={nproc} "
                     "--worker_num={world_size} --local_worker_num={nproc} --node_rank={node_rank} "
                     "--master_addr={master_addr} --master_port={master_port} --log_dir={log_dir}",
             module="mindspore", equal_ranks=True),
    # Horovod 0.28 with gloo. With MPI, horovodrun sets no ranks, and `detect` reads the variables of the MPI.
    # "Cross" counts the hosts that have this local rank.
    Launcher("horovodrun", "starter", "HOROVOD_RANK HOROVOD_SIZE", "HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE",
             "HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE",
             address="HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT",
             others="HOROVOD_HOSTNAME HOROVOD_ELASTIC",
             command="{python} -m horovod.runner.launch --gloo -np {nproc} --disable-cache {python}",
             module="horovod", line_prefix=r"\[(?:[\w.@-]*,)?\d+\](?:<stderr>:| )\s*"),
    # torch 2.13. With a leftover TORCHELASTIC_USE_AGENT_STORE, rank 0 would wait for a store that nobody serves.
    Launcher("torchrun", "starter", "RANK WORLD_SIZE", "LOCAL_RANK LOCAL_WORLD_SIZE",
             "GROUP_RANK GROUP_WORLD_SIZE", restarts="TORCHELASTIC_RESTART_COUNT", markers="TORCHELASTIC_RUN_ID",
             others="ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_ERROR_FILE "
                    "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE",
             # `samestep run` restarts the job, because torchrun's own restarts fail under gloo.
             command="{python} -m torch.distributed.run --nnodes={nnodes} --node-rank={node_rank} "
                     "--nproc-per-node={nproc} --master-addr={master_addr} --master-port={master_port} "
                     "--max-restarts=0",
             module="torch"),
    # paddle.distributed.launch and paddle.distributed.spawn of Paddle 3.3. Neither sets the index of the node.
    # In Paddle's launcher, PADDLE_NNODES and other variables have priority over its command line.
    Launcher("paddle", "starter", "PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM",
             "PADDLE_RANK_IN_NODE|PADDLE_LOCAL_RANK PADDLE_LOCAL_SIZE|-", "- PADDLE_NNODES", address="- -",
             others="PADDLE_CURRENT_ENDPOINT PADDLE_GLOBAL_RANK PADDLE_GLOBAL_SIZE PADDLE_IPS PADDLE_JOB_ID "
                    "PADDLE_LOCAL_DEVICE_IDS PADDLE_LOG_DIR PADDLE_MASTER PADDLE_NPROC_PER_NODE PADDLE_RANK "
                    "PADDLE_TRAINERS_ENDPOINTS PADDLE_TRAINER_ENDPOINTS PADDLE_TRAINER_NUM "
                    "PADDLE_WORLD_DEVICE_IDS",
             command="{python} -m paddle.distributed.launch --nnodes={nnodes} --rank={node_rank} "
                     "--nproc_per_node={nproc} --master={master_addr}:{master_port} --host={host} "
                     "--log_dir={log_dir}",
             module="paddle"),
    # Open MPI 5. OMPI_COMM_WORLD_NODE_RANK is a second local rank, not the index of the node.
    Launcher("openmpi", "mpi", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
             others="OMPI_COMM_WORLD_NODE_RANK OMPI_UNIVERSE_SIZE",
             command="mpirun -np {nproc} {python}", program="mpirun"),
    # mpirun_rsh of MVAPICH2 2.3
    Launcher("mvapich2", "mpi", "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE",
             "MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
    # IBM's jsrun, which sets Open MPI's variables too if the program is one of Spectrum MPI
    Launcher("jsrun", "mpi", "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE",
             "JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE|-"),
    # Hydra, the mpiexec of MPICH. `srun --mpi=pmi2` sets PMI_* too, but Slurm's own variables hold more.
    Launcher("mpich", "mpi", "PMI_RANK PMI_SIZE", "MPI_LOCALRANKID MPI_LOCALNRANKS", unless=_SLURM_STEP,
             others="PMI_FD"),
    # srun. A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but no step: it is one process.
    Launcher("slurm", "slurm", "SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS", "SLURM_LOCALID -",
             "SLURM_NODEID SLURM_STEP_NUM_NODES|SLURM_NNODES", "SLURM_STEP_TASKS_PER_NODE|SLURM_TASKS_PER_NODE",
             restarts="SLURM_RESTART_COUNT", markers=_SLURM_STEP,
             allocation="SLURM_NTASKS SLURM_NNODES SLURM_TASKS_PER_NODE SLURM_RESTART_COUNT",
             batch="SLURM_PROCID SLURM_LOCALID SLURM_NODEID"),
    # Exported on Ascend without a launcher. DEVICE_ID is the number of a card there, not a local rank.
    Launcher("rank table", "exported", "RANK_ID RANK_SIZE", address="- -", unless=f"RANK WORLD_SIZE {_PET}",
             proof="RANK_TABLE_FILE MINDSPORE_HCCL_CONFIG_PATH"),
    # Exported by hand, by Alibaba DLC, by Kubeflow's PyTorchJob. torch's env:// reads the same variables.
    Launcher("env", "exported", "RANK WORLD_SIZE", "LOCAL_RANK LOCAL_WORLD_SIZE|-",
             markers=f"RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE {_PET}"),
    # prun of PRRTE. Open MPI's mpirun sets PMIX_RANK too.
    Launcher("pmix", "index", "PMIX_RANK -", others="PMIX_NAMESPACE"),
    Launcher("indexed job", "index", "JOB_COMPLETION_INDEX -", allocation="JOB_COMPLETION_INDEX"),
)
# fmt: on
_PEERS = ("starter", "mpi")  # all present launchers of such a kind must agree

# The machines of a job: what a launch script reads. Variables that count processes elsewhere count machines here.
MACHINE_COUNT = "NNODES|PET_NNODES|WORLD_SIZE"
MACHINE_INDEX = "NODE_RANK|PET_NODE_RANK|RANK|JOB_COMPLETION_INDEX"
MACHINE_ADDRESS = "MASTER_ADDR|PET_MASTER_ADDR"
MACHINE_PORT = "MASTER_PORT|PET_MASTER_PORT"
RANKS_PER_MACHINE = "NPROC_PER_NODE|PET_NPROC_PER_NODE"

# An unknown launcher's index of a process. A size alone, such as BATCH_SIZE, is none.
_INDEX_NAME = re.compile("[A-Z][A-Z0-9_]*_(RANK|RANKID|PROCID|TASKID|PE)")


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """Return the World that ``environ`` describes, by default the environment of this process. Read nothing else.

    Raises:
        EnvError: variables are incomplete, malformed or contradictory, or an unknown launcher started this process.
    """
    stripped = {name: value.strip(" \t\r\n") for name, value in environ.items()}
    env = {name: value for name, value in stripped.items() if value}
    present = [spec for spec in _LAUNCHERS if _is_present(env, spec)]
    if not present or present[0].kind == "index":
        _check_alone(env)
        return World(0, 1, local_rank=0, local_world_size=1, node_rank=0, node_count=1)
    chosen, *others = present
    world = _world(env, chosen)
    for other in others:
        _check_agreement(env, chosen, world, other)
    return world


def startable_launchers() -> dict[str, Launcher]:
    """Return the launchers that `samestep run` can start, by program; torchrun, its default, is the first."""
    startable = [launcher for launcher in _LAUNCHERS if launcher.command]
    startable.sort(key=lambda launcher: launcher.name != "torchrun")
    return {launcher.program or launcher.name: launcher for launcher in startable}


def launcher_variables() -> frozenset[str]:
    """Return the names of the variables by which any launcher gives a process its place.

    A launch script removes them from the environment of the launcher that it starts. MASTER_ADDR and MASTER_PORT,
    a rank table and the variables of an allocation stay.
    """
    names: set[str] = set()
    kept: set[str] = set()
    for spec in _LAUNCHERS:
        texts = [spec.rank, spec.local, spec.node, spec.tasks, spec.restarts, spec.markers, spec.others]
        if spec.address != Launcher.address:
            texts.append(spec.address)
        names |= _all_names(*texts)
        kept |= _all_names(spec.allocation)
    return frozenset(names - kept)


def first_set(environ: Mapping[str, str], names: str) -> tuple[str, str]:
    """Return name and value of the first variable of `A|B` that is set, else the first name and an empty value."""
    choices = names.split("|")
    for name in choices:
        if environ.get(name):
            return name, environ[name]
    return choices[0], ""


def without_other_ranks(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without RANK and WORLD_SIZE if they count another job's processes, not machines.

    torchrun sets its store's MASTER_PORT too, which is in use as long as the other job runs.
    """
    if not environ.get("LOCAL_RANK"):
        return environ
    stale = {"RANK", "WORLD_SIZE"}
    if not environ.get("NNODES"):
        stale |= {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in environ.items() if name not in stale}


def machine_count(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that counts a job's machines, and its value; the value is empty if none is set."""
    return first_set(without_other_ranks(environ), MACHINE_COUNT)


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher whose variables `detect` reads, without a check of their values; None without any."""
    env = {name: value for name, value in environ.items() if value}
    for spec in _LAUNCHERS:
        if _is_present(env, spec):
            return spec
    return None


def job_key(environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return what a launcher calls this job, or "" if it has no name; and whether the launcher has restarted it."""
    name = environ.get("TORCHELASTIC_RUN_ID", "none")
    if name == "none":
        slurm = environ.get("SLURM_JOB_ID")
        name = f"slurm-{slurm}" if slurm else ""
    _, restarts = first_set(environ, "TORCHELASTIC_RESTART_COUNT|SLURM_RESTART_COUNT")
    return name, restarts not in ("", "0")


def processor() -> str:
    """Return the CPU's name, or "cpu" if the system does not give one."""
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    if match:
        return match[1]
    return platform.processor() or "cpu"


# Checks across launchers. ``env`` holds the variables that are set, without surrounding blanks.


def _check_agreement(env: dict[str, str], chosen: Launcher, world: World, other: Launcher) -> None:
    """Raise EnvError if another launcher's variables show that ``world`` is wrong."""
    if other.proof and not _set(env, other.proof):  # without a rank table, RANK_ID and RANK_SIZE may be msrun's own
        return
    are_peers = chosen.kind == other.kind and chosen.kind in _PEERS
    if are_peers and other.kind == "starter":
        claim = _world(env, other)
        rank = claim.rank
        world_size = claim.world_size
    else:
        rank, world_size = _place(env, other)
    if (rank, world_size) == (0, 0):
        return
    differs = are_peers and (rank, world_size) != (world.rank, world.world_size)
    leaves_others = world.world_size == 1 and world_size > 1
    if differs or leaves_others:
        shown = f"{chosen.name} ({_show(env, chosen.rank)}) against {other.name} ({_show(env, other.rank)})"
        raise EnvError(f"launchers disagree: {shown}: unset the variables of the one that did not start this process")


def _place(env: dict[str, str], spec: Launcher) -> tuple[int, int]:
    """Return rank and world size of a launcher, and (0, 0) if they are incomplete or malformed.

    A process that has an index but no size is one of at least index + 1. In an Indexed Job, pods may train alone.
    """
    try:
        rank, size = _pair(env, spec.rank)
    except EnvError:
        return 0, 0
    if rank is None or spec.name == "indexed job":
        return 0, 0
    return rank, size or rank + 1


def _check_alone(env: dict[str, str]) -> None:
    """Raise EnvError if a process without a launcher has a variable that some launcher gives to its processes.

    The process would train alone, and so would each of its other ranks.
    """
    if env.get("NNODES", "1") != "1":
        remedy = "run scripts/run_<app>.sh on each machine, which reads it, or unset NNODES to train alone"
        raise EnvError(f"{_show(env, 'NNODES')} counts machines, and nothing gives a rank: {remedy}")
    known = _index_names()
    batch = _all_names("NODE_RANK", *(spec.batch for spec in _LAUNCHERS))
    for name in sorted(env):
        if not _is_index(env, name, known):
            continue
        if name in batch and int(env[name]) == 0:
            continue
        remedy = "set RANK and WORLD_SIZE, or NNODES for scripts/run_<app>.sh"
        raise EnvError(
            f"{_show(env, name)} places this process among others but gives no size: {remedy}, or unset {name} to "
            "train alone"
        )


def _is_index(env: dict[str, str], name: str, known: set[str]) -> bool:
    """Return whether a variable numbers a process or a node: a known one, or one with such a name."""
    if not re.fullmatch("[0-9]{1,10}", env[name]):
        return False
    return name in known or _INDEX_NAME.fullmatch(name) is not None


def _index_names() -> set[str]:
    """Return the variables of the table that number a process or a node."""
    indexes: set[str] = set()
    for spec in _LAUNCHERS:
        for pair in (spec.rank, spec.local, spec.node):
            index, _ = pair.split()
            indexes |= _all_names(index)
    return indexes


# The special cases of single launchers


def _world(env: dict[str, str], spec: Launcher) -> World:
    read = _READERS.get(spec.name, _read)
    return _complete(env, spec, read(env, spec))


def _msrun(env: dict[str, str], spec: Launcher) -> World:
    role = env["MS_ROLE"]
    size = _number(env, "MS_WORKER_NUM", low=1)
    shown = _show(env, "MS_ROLE MS_WORKER_NUM")
    if role not in ("MS_WORKER", "MS_SCHED") or size is None:
        raise EnvError(f"{shown}: start the program with msrun, which sets MS_WORKER_NUM, and MS_WORKER or MS_SCHED")
    if role == "MS_SCHED":
        return replace(_read({**env, "MS_NODE_ID": "0"}, spec), rank=-1, role="scheduler")
    if "MS_NODE_ID" not in env:
        raise EnvError(f"{shown} but MS_NODE_ID is unset, so the rank is unknown: give msrun --node_rank")
    # msrun sets DEVICE_ID to the local rank. For workers that were started by hand it is the number of any card.
    world = _read(env, spec)
    device = _number(env, "DEVICE_ID")
    if device is None or device >= size:
        return world
    return replace(world, local_rank=device)


def _horovodrun(env: dict[str, str], spec: Launcher) -> World:
    world = _read(env, spec)
    # The cross size is the number of nodes if all hosts run equally many processes, which no variable states. The
    # product misleads only for hosts as uneven as 1, 3 and 4 slots.
    is_even = (world.local_world_size or 0) * (world.node_count or 0) == world.world_size
    if is_even:
        return world
    return replace(world, node_rank=None, node_count=None)


def _paddle(env: dict[str, str], spec: Launcher) -> World:
    world = _read(env, spec)
    # spawn sets neither a local rank nor a number of nodes, but lists the endpoints of all ranks.
    hosts = [each.rpartition(":")[0] for each in env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")]
    lists_one_host = len(hosts) == world.world_size and len(set(hosts)) == 1
    if lists_one_host and world.node_count is None and world.local_rank is None:
        world = replace(world, local_rank=world.rank, node_count=1)
    master = env.get("PADDLE_MASTER", "://")
    if "://" in master:  # http:// and etcd:// are addresses of launchers, not of ranks
        return world
    match = re.fullmatch(r"(?s)(.+):([0-9]{1,10})", master)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise EnvError(f"{_show(env, 'PADDLE_MASTER')} is not host:port (port 1 to 65535): correct or unset it")
    return replace(world, master_addr=match[1], master_port=int(match[2]))


def _slurm(env: dict[str, str], spec: Launcher) -> World:
    world = _read(env, spec)
    lists = _set(env, spec.tasks)
    if not lists or world.node_rank is None:
        return world
    here = 0  # tasks on this node
    node_count = 0
    world_size = 0
    for item in env[lists[0]].split(","):  # 2(x3) means three nodes with two tasks each
        match = re.fullmatch(r"([0-9]{1,10})(?:\(x([0-9]{1,10})\))?", item)
        if match is None:
            raise EnvError(f"{_show(env, lists[0])} is not a list of tasks per node (2(x3),1): leave it to srun")
        tasks = int(match[1])
        repeat = int(match[2] or 1)
        if node_count <= world.node_rank < node_count + repeat:
            here = tasks
        node_count += repeat
        world_size += repeat * tasks
    if (node_count, world_size) == (world.node_count, world.world_size):
        return replace(world, local_world_size=here)
    if lists == ["SLURM_TASKS_PER_NODE"]:  # may be the job's list, and longer than this step's
        return world
    shown = _show(env, f"{spec.rank} {spec.node} {spec.tasks}")
    raise EnvError(f"slurm's variables contradict each other: {shown}: leave them to srun")


def _rank_table(env: dict[str, str], spec: Launcher) -> World:
    world = _read(env, spec)
    if world.world_size > 1 and not _set(env, spec.proof):
        raise EnvError(f"{_show(env, spec.rank)} but RANK_TABLE_FILE is unset: set it, start with msrun, or unset both")
    return world


def _plain(env: dict[str, str], spec: Launcher) -> World:
    if "LOCAL_RANK" in env:
        return _read(env, spec)
    # Without LOCAL_RANK they count processes, one on each node. With a number of processes per node they count nodes.
    per_node = env.get("NPROC_PER_NODE", "1")  # may be a word such as "auto"
    if _set(env, _PET) or (per_node != "1" and _set(env, spec.rank)):
        shown = _show(env, f"{spec.rank} NPROC_PER_NODE {_PET}")
        raise EnvError(f"{shown} count nodes, not processes: run scripts/run_<app>.sh on each node, which reads them")
    world = _read(env, spec)
    if re.fullmatch(r"localhost|127\.[\d.]+|::1", world.master_addr or ""):  # no other machine reaches it
        return replace(world, local_rank=world.rank, local_world_size=world.world_size, node_rank=0, node_count=1)
    return replace(world, local_rank=0, local_world_size=1, node_rank=world.rank, node_count=world.world_size)


_READERS = {
    "msrun": _msrun,
    "horovodrun": _horovodrun,
    "paddle": _paddle,
    "slurm": _slurm,
    "rank table": _rank_table,
    "env": _plain,
}


# Variables that all launchers share


def _is_present(env: dict[str, str], spec: Launcher) -> bool:
    if not _set(env, spec.markers or spec.rank):
        return False
    if _set(env, spec.unless):
        return bool(_set(env, spec.proof or spec.local))
    return True


def _read(env: dict[str, str], spec: Launcher) -> World:
    """Return the World by the variables of ``spec``, as far as they are set."""
    rank, world_size = cast("tuple[int, int]", _pair(env, spec.rank, spec.markers))
    local_rank, local_world_size = _pair(env, spec.local)
    node_rank, node_count = _pair(env, spec.node)
    host, port = spec.address.split()
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        node_count=node_count,
        launcher=spec.name,
        master_addr=env.get(host),
        master_port=_number(env, port, low=1, high=65535),
        restart_count=_number(env, spec.restarts),
    )


def _complete(env: dict[str, str], spec: Launcher, world: World) -> World:
    """Return ``world`` with the fields that follow from the others. Raise EnvError if they contradict each other."""
    if world.role == "worker" and _is_on_one_node(world):
        world = _fill_single_node(world)
    if not _is_consistent(world):
        shown = _show(env, f"{spec.rank} {spec.local} {spec.node} {spec.tasks}")
        raise EnvError(f"{spec.name}'s variables contradict each other: {shown}: correct or unset them")
    return world


def _is_on_one_node(world: World) -> bool:
    """Return whether all ranks are known to be on this node."""
    return world.world_size == 1 or world.local_world_size == world.world_size or world.node_count == 1


def _fill_single_node(world: World) -> World:
    """Return the world with all that is known of ranks on one node, as far as the launcher does not set it."""
    local_rank = world.local_rank
    if local_rank is None and world.world_size == 1:
        local_rank = 0
    return replace(
        world,
        local_rank=local_rank,
        local_world_size=world.local_world_size or world.world_size,
        node_rank=world.node_rank or 0,
        node_count=world.node_count or 1,
    )


def _is_consistent(world: World) -> bool:
    here = world.local_world_size or 1
    other_nodes = (world.node_count or 1) - 1
    if here + other_nodes > world.world_size:  # each other node has at least one rank
        return False
    if world.node_count == 1 and world.local_world_size != world.world_size:
        return False
    return (world.local_rank or 0) < (world.local_world_size or world.world_size)


def _pair(env: dict[str, str], names: str, markers: str = "") -> tuple[int | None, int | None]:
    """Return (rank, size), with rank < size. Raise EnvError if one is unset although the other or a marker is set."""
    rank_name, size_name = _names(env, names)
    unset = [name for name in (rank_name, size_name) if name not in env and name != "-"]
    causes = _set(env, f"{names} {markers}")
    if unset and causes:
        raise EnvError(f"{_show(env, causes[0])} needs {' and '.join(unset)}: set both, or unset {causes[0]}")
    rank = _number(env, rank_name)
    size = _number(env, size_name, low=1)
    if rank is not None and size is not None and rank >= size:
        raise EnvError(f"{_show(env, rank_name)} is not below {_show(env, size_name)}: count ranks from 0")
    return rank, size


def _number(env: dict[str, str], name: str, low: int = 0, high: int = 2**31 - 1) -> int | None:
    """Return the variable as an int in [low, high], or None if it is unset. The default limit is a C int, as in MPI."""
    if name not in env:
        return None
    # int() alone accepts "1_0", "+1" and digits of other scripts, and raises an error of its own for 5,000 digits.
    if not re.fullmatch("[0-9]{1,10}", env[name]) or not low <= int(env[name]) <= high:
        raise EnvError(f"{_show(env, name)} is not a whole number from {low} to {high}: correct or unset it")
    return int(env[name])


def _all_names(*texts: str) -> set[str]:
    """Return every name in texts of a Launcher."""
    return set(re.findall("[A-Z0-9_]+", " ".join(texts)))


def _names(env: dict[str, str], names: str) -> list[str]:
    """Return one name for each `A|B` in ``names``: the first that is set or `-`, or else the first."""
    chosen = []
    for text in names.split():
        choices = text.split("|")
        possible = [name for name in choices if name in env or name == "-"]
        chosen.append(possible[0] if possible else choices[0])
    return chosen


def _set(env: dict[str, str], names: str) -> list[str]:
    return [name for name in _names(env, names) if name in env]


def _show(env: dict[str, str], names: str) -> str:
    """Return ``A='1', B='2'`` for the variables that are set, on one line, with long values cut."""
    shown = []
    for name in _set(env, names):
        rest = "..." if len(env[name]) > 60 else ""
        shown.append(f"{name}={env[name][:60]!a}{rest}")
    return ", ".join(shown)
