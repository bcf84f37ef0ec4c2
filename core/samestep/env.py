"""Detect this process's place in the job (rank, world size, launcher) from environment variables.

The variables of several launchers may be set at the same time, such as with torchrun under srun, or mpirun in a Slurm
job. `detect` reads all values from the variables of one launcher. The table `_LAUNCHERS` lists the variables of all
launchers, in order of precedence:

1. Launchers that started this process: msrun, horovodrun, torchrun, Paddle. If several are present, they must agree.
2. Launchers that placed this process on a node: Open MPI, MVAPICH2, jsrun and MPICH (which must agree), and Slurm.
3. Variables that a person or a platform exported: an Ascend rank table, RANK and WORLD_SIZE.
4. Launchers that give an index but no size: PMIx, a Kubernetes Indexed Job. With these, `detect` raises EnvError.

Without any of these, the process trains alone, as rank 0 of 1. To prevent several processes from training alone,
`detect` also raises EnvError in three cases:

- One launcher gives the size 1 and another launcher gives a larger size.
- A variable of an unknown launcher gives a rank, such as FLUX_TASK_RANK=3.
- NNODES gives a number of machines other than 1, and no variable gives a rank.

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
    """Environment variables are incomplete, malformed or contradictory. The message has their values and the remedy."""


@dataclass(frozen=True)
class World:
    """This process's place in the job. A field is None if the launcher does not set it.

    Attributes:
        rank: index of this process in [0, world_size); -1 for msrun's scheduler, which does not train.
        world_size: number of ranks.
        local_rank: index of this rank among the ranks on its node.
        local_world_size: number of ranks on this node.
        node_rank: index of this node.
        node_count: number of nodes.
        launcher: name of the launcher; "none" for a process that trains alone, "env" for plain RANK and WORLD_SIZE.
        role: "scheduler" for the process that msrun starts beside its workers, else "worker".
        master_addr: host of the launcher's rendezvous.
        master_port: port of the launcher's rendezvous.
        restart_count: number of times that torchrun or Slurm has restarted the job.
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
    """The environment variables of a launcher, and the command that starts it.

    A string of variables contains names, separated by spaces. `A|B` means the first of these variables that is set, and
    `-` means no variable. The launcher is present if any of ``markers`` (default: ``rank``) is set. If any of
    ``unless`` is also set, the launcher is present only if any of ``proof`` (default: ``local``) is set.

    Attributes:
        name: the value of `World.launcher`.
        kind: kind of launcher. If several launchers of one kind in `_PEERS` are present, they must agree. An "index"
            launcher sets no world size.
        rank: variables of the rank and the world size.
        local: variables of the local rank and the local world size.
        node: variables of the node's rank and the number of nodes.
        tasks: variable of Slurm's compressed list of tasks per node.
        address: variables of the rendezvous's host and port.
        restarts: variable of the number of restarts.
        markers: variables that show that the launcher is present.
        unless: variables of another launcher, which may also have set ``markers``.
        proof: variables that show that the launcher is present although ``unless`` is set.
        others: variables that `detect` does not read. A launch script removes them from its ranks' environment.
        allocation: variables of an allocation of machines. A launch script keeps them in its ranks' environment.
        batch: variables that are 0 in a Slurm batch script, although no launcher has placed the script.
        command: command line before the program, a template for `samestep_launch.job.Job.command`; "" if `samestep run`
            cannot start the launcher.
        module: Python module that the command needs; "" if the command starts with ``program``.
        program: executable on PATH with which the command starts.
        line_prefix: regular expression for the launcher's prefix of each line of a rank's stderr.
        equal_ranks: whether the launcher requires the same number of ranks on each machine.
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
# Kubeflow sets these variables as defaults for torchrun's command line. The variables give this process no rank.
_PET = "PET_NODE_RANK PET_NNODES PET_NPROC_PER_NODE PET_MASTER_ADDR PET_MASTER_PORT"
# fmt: off
_LAUNCHERS = (
    # MindSpore 2.10. RANK_ID is not read, because msrun exports RANK_ID=0 for its scheduler before it starts workers.
    # Without --node_rank, workers on several machines inherit RANK_ID=0. msrun sets MS_NODE_ID only if the rank is
    # known.
    Launcher("msrun", "starter", "MS_NODE_ID MS_WORKER_NUM", address="MS_SCHED_HOST MS_SCHED_PORT",
             markers="MS_ROLE",
             command="{python} -m mindspore.parallel.cluster.run --join=True --tail_worker_log={nproc} "
                     "--worker_num={world_size} --local_worker_num={nproc} --node_rank={node_rank} "
                     "--master_addr={master_addr} --master_port={master_port} --log_dir={log_dir}",
             module="mindspore", equal_ranks=True),
    # Horovod 0.28 with gloo. With MPI, horovodrun sets no ranks, so `detect` reads the MPI launcher's variables.
    # HOROVOD_CROSS_SIZE is the number of hosts that have this local rank.
    Launcher("horovodrun", "starter", "HOROVOD_RANK HOROVOD_SIZE", "HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE",
             "HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE",
             address="HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT",
             others="HOROVOD_HOSTNAME HOROVOD_ELASTIC",
             command="{python} -m horovod.runner.launch --gloo -np {nproc} --disable-cache {python}",
             module="horovod", line_prefix=r"\[(?:[\w.@-]*,)?\d+\](?:<stderr>:| )\s*"),
    # torch 2.13. If TORCHELASTIC_USE_AGENT_STORE of another job is still set, rank 0 waits for a store that no process
    # serves.
    Launcher("torchrun", "starter", "RANK WORLD_SIZE", "LOCAL_RANK LOCAL_WORLD_SIZE",
             "GROUP_RANK GROUP_WORLD_SIZE", restarts="TORCHELASTIC_RESTART_COUNT", markers="TORCHELASTIC_RUN_ID",
             others="ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_ERROR_FILE "
                    "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE",
             # `samestep run` restarts the job, because torchrun's own restarts fail under gloo.
             command="{python} -m torch.distributed.run --nnodes={nnodes} --node-rank={node_rank} "
                     "--nproc-per-node={nproc} --master-addr={master_addr} --master-port={master_port} "
                     "--max-restarts=0",
             module="torch"),
    # paddle.distributed.launch and paddle.distributed.spawn of Paddle 3.3 do not set the index of the node.
    # In Paddle's launcher, PADDLE_NNODES and other variables override the command line.
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
    # Open MPI 5. OMPI_COMM_WORLD_NODE_RANK is another local rank, not the index of the node.
    Launcher("openmpi", "mpi", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
             others="OMPI_COMM_WORLD_NODE_RANK OMPI_UNIVERSE_SIZE",
             command="mpirun -np {nproc} {python}", program="mpirun"),
    # MVAPICH2 2.3, started by mpirun_rsh.
    Launcher("mvapich2", "mpi", "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE",
             "MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE"),
    # IBM's jsrun also sets Open MPI's variables if the program uses Spectrum MPI.
    Launcher("jsrun", "mpi", "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE",
             "JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE|-"),
    # Hydra, the mpiexec of MPICH. `srun --mpi=pmi2` also sets PMI_*, but Slurm's own variables give more values.
    Launcher("mpich", "mpi", "PMI_RANK PMI_SIZE", "MPI_LOCALRANKID MPI_LOCALNRANKS", unless=_SLURM_STEP,
             others="PMI_FD"),
    # srun sets these variables. A batch script also has SLURM_PROCID=0 and SLURM_NTASKS, but it is one process without
    # a step.
    Launcher("slurm", "slurm", "SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS", "SLURM_LOCALID -",
             "SLURM_NODEID SLURM_STEP_NUM_NODES|SLURM_NNODES", "SLURM_STEP_TASKS_PER_NODE|SLURM_TASKS_PER_NODE",
             restarts="SLURM_RESTART_COUNT", markers=_SLURM_STEP,
             allocation="SLURM_NTASKS SLURM_NNODES SLURM_TASKS_PER_NODE SLURM_RESTART_COUNT",
             batch="SLURM_PROCID SLURM_LOCALID SLURM_NODEID"),
    # Users of Ascend export these variables if they use no launcher. DEVICE_ID is then the index of a card, not a local
    # rank.
    Launcher("rank table", "exported", "RANK_ID RANK_SIZE", address="- -", unless=f"RANK WORLD_SIZE {_PET}",
             proof="RANK_TABLE_FILE MINDSPORE_HCCL_CONFIG_PATH"),
    # A user, Alibaba DLC or Kubeflow's PyTorchJob exports these variables. torch's env:// reads the same variables.
    Launcher("env", "exported", "RANK WORLD_SIZE", "LOCAL_RANK LOCAL_WORLD_SIZE|-",
             markers=f"RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE {_PET}"),
    # The launcher prun of PRRTE. Open MPI's mpirun also sets PMIX_RANK.
    Launcher("pmix", "index", "PMIX_RANK -", others="PMIX_NAMESPACE"),
    Launcher("indexed job", "index", "JOB_COMPLETION_INDEX -", allocation="JOB_COMPLETION_INDEX"),
)
# fmt: on
_PEERS = ("starter", "mpi")  # kinds of launchers; if several launchers of one kind are present, they must agree

# A launch script reads the machines of a job from these variables. Here WORLD_SIZE is the number of machines, and RANK
# is the index of a machine.
MACHINE_COUNT = "NNODES|PET_NNODES|WORLD_SIZE"
MACHINE_INDEX = "NODE_RANK|PET_NODE_RANK|RANK|JOB_COMPLETION_INDEX"
MACHINE_ADDRESS = "MASTER_ADDR|PET_MASTER_ADDR"
MACHINE_PORT = "MASTER_PORT|PET_MASTER_PORT"
RANKS_PER_MACHINE = "NPROC_PER_NODE|PET_NPROC_PER_NODE"

# Regular expression for names of variables by which an unknown launcher may give a process its index.
_INDEX_NAME = re.compile("[A-Z][A-Z0-9_]*_(RANK|RANKID|PROCID|TASKID|PE)")


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """Return this process's place in the job from environment variables alone.

    Args:
        environ: the variables; by default the environment of this process.

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
    """Return the launchers that `samestep run` can start, by program or name. The first is torchrun, the default."""
    startable = [launcher for launcher in _LAUNCHERS if launcher.command]
    startable.sort(key=lambda launcher: launcher.name != "torchrun")
    return {launcher.program or launcher.name: launcher for launcher in startable}


def launcher_variables() -> frozenset[str]:
    """Return the names of the variables by which launchers give a process its place.

    A launch script removes these variables from the environment of the launcher that it starts. The script keeps
    MASTER_ADDR, MASTER_PORT, a rank table and the variables of an allocation.
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
    """Return (name, value) of the first variable in ``names``, such as "A|B", that is set; else ("A", "")."""
    choices = names.split("|")
    for name in choices:
        if environ.get(name):
            return name, environ[name]
    return choices[0], ""


def without_other_ranks(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment; if LOCAL_RANK shows that a launcher has set RANK and WORLD_SIZE, remove these variables.

    If LOCAL_RANK is set and NNODES is not, this function also removes MASTER_ADDR and MASTER_PORT. The job that set
    them is still running, and its port is in use.
    """
    if not environ.get("LOCAL_RANK"):
        return environ
    stale = {"RANK", "WORLD_SIZE"}
    if not environ.get("NNODES"):
        stale |= {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in environ.items() if name not in stale}


def machine_count(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (name, value) of the variable that counts a job's machines; the value is "" if no variable is set."""
    return first_set(without_other_ranks(environ), MACHINE_COUNT)


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher whose variables `detect` reads, without checking their values; None without a launcher."""
    env = {name: value for name, value in environ.items() if value}
    for spec in _LAUNCHERS:
        if _is_present(env, spec):
            return spec
    return None


def job_key(environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return (the launcher's name for this job or "", whether the launcher has restarted the job)."""
    name = environ.get("TORCHELASTIC_RUN_ID", "none")
    if name == "none":
        slurm = environ.get("SLURM_JOB_ID")
        name = f"slurm-{slurm}" if slurm else ""
    _, restarts = first_set(environ, "TORCHELASTIC_RESTART_COUNT|SLURM_RESTART_COUNT")
    return name, restarts not in ("", "0")


def processor() -> str:
    """Return the name of the CPU, or "cpu" if the name is unknown."""
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    if match:
        return match[1]
    return platform.processor() or "cpu"


# Checks across launchers. ``env`` contains the variables that are set, without surrounding blanks.


def _check_agreement(env: dict[str, str], chosen: Launcher, world: World, other: Launcher) -> None:
    """Raise EnvError if another launcher's variables show that ``world`` is wrong."""
    if other.proof and not _set(env, other.proof):  # without a rank table, msrun may have set RANK_ID and RANK_SIZE
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
    """Return (rank, world size) of a launcher; (0, 0) if they are incomplete or malformed.

    If the launcher sets an index but no size, the size is at least index + 1. This function ignores the index of an
    Indexed Job, because each pod can be a separate job with world size 1.
    """
    try:
        rank, size = _pair(env, spec.rank)
    except EnvError:
        return 0, 0
    if rank is None or spec.name == "indexed job":
        return 0, 0
    return rank, size or rank + 1


def _check_alone(env: dict[str, str]) -> None:
    """Raise EnvError if NNODES gives a number of machines other than 1, or a variable gives a process an index.

    `detect` calls this function if no launcher gives a rank and a size. Without the error, each rank of the job would
    train alone.
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
    """Return whether a variable's value is an integer, and its name is in ``known`` or matches _INDEX_NAME."""
    if not re.fullmatch("[0-9]{1,10}", env[name]):
        return False
    return name in known or _INDEX_NAME.fullmatch(name) is not None


def _index_names() -> set[str]:
    """Return the variables in `_LAUNCHERS` that have the index of a process or node."""
    indexes: set[str] = set()
    for spec in _LAUNCHERS:
        for pair in (spec.rank, spec.local, spec.node):
            index, _ = pair.split()
            indexes |= _all_names(index)
    return indexes


# Special cases of launchers


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
    # msrun sets DEVICE_ID to the local rank. If a user starts workers by hand, DEVICE_ID may be the index of any card.
    world = _read(env, spec)
    device = _number(env, "DEVICE_ID")
    if device is None or device >= size:
        return world
    return replace(world, local_rank=device)


def _horovodrun(env: dict[str, str], spec: Launcher) -> World:
    world = _read(env, spec)
    # The cross size is the number of nodes if all hosts run the same number of processes. No variable states whether
    # they do. The test below is wrong only for rare combinations of hosts, such as 1, 3 and 4 slots.
    is_even = (world.local_world_size or 0) * (world.node_count or 0) == world.world_size
    if is_even:
        return world
    return replace(world, node_rank=None, node_count=None)


def _paddle(env: dict[str, str], spec: Launcher) -> World:
    world = _read(env, spec)
    # paddle.distributed.spawn lists the endpoints of all ranks, and sets neither a local rank nor a number of nodes.
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
    if lists == ["SLURM_TASKS_PER_NODE"]:  # the list may describe the job instead of this step
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
    # Without LOCAL_RANK, RANK and WORLD_SIZE count processes, one per node. If a number of processes per node is set,
    # they count nodes.
    per_node = env.get("NPROC_PER_NODE", "1")  # the value may be a word such as "auto"
    if _set(env, _PET) or (per_node != "1" and _set(env, spec.rank)):
        shown = _show(env, f"{spec.rank} NPROC_PER_NODE {_PET}")
        raise EnvError(f"{shown} count nodes, not processes: run scripts/run_<app>.sh on each node, which reads them")
    world = _read(env, spec)
    if re.fullmatch(r"localhost|127\.[\d.]+|::1", world.master_addr or ""):  # all ranks are on this machine
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
    """Return the World that the variables of ``spec`` describe. A field is None if its variable is not set."""
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
    """Return ``world`` with all fields that follow from other fields.

    Raises:
        EnvError: the fields contradict each other.
    """
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
    """Return ``world``, whose ranks are all on one node, with its unset fields filled."""
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
    """Return (rank, size), with rank < size; (None, None) if neither variable is set.

    Raises:
        EnvError: only one of the variables is set, a marker is set without both, or a value is out of range.
    """
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
    """Return a variable as an int in [low, high]; None if it is unset. By default, ``high`` is the largest C int."""
    if name not in env:
        return None
    # int() alone accepts "1_0", "+1" and digits of other scripts, and raises no EnvError for 5,000 digits.
    if not re.fullmatch("[0-9]{1,10}", env[name]) or not low <= int(env[name]) <= high:
        raise EnvError(f"{_show(env, name)} is not a whole number from {low} to {high}: correct or unset it")
    return int(env[name])


def _all_names(*texts: str) -> set[str]:
    """Return all variable names in ``texts``, which are fields of a Launcher."""
    return set(re.findall("[A-Z0-9_]+", " ".join(texts)))


def _names(env: dict[str, str], names: str) -> list[str]:
    """Return one name for each `A|B` in ``names``: the first name that is set or is `-`, else the first name."""
    chosen = []
    for text in names.split():
        choices = text.split("|")
        possible = [name for name in choices if name in env or name == "-"]
        chosen.append(possible[0] if possible else choices[0])
    return chosen


def _set(env: dict[str, str], names: str) -> list[str]:
    return [name for name in _names(env, names) if name in env]


def _show(env: dict[str, str], names: str) -> str:
    """Return ``A='1', B='2'`` for the variables that are set, on one line. Truncate long values."""
    shown = []
    for name in _set(env, names):
        rest = "..." if len(env[name]) > 60 else ""
        shown.append(f"{name}={env[name][:60]!a}{rest}")
    return ", ".join(shown)
