"""Test `samestep.env` with the variables of each launcher, of two launchers, and with malformed values."""

from __future__ import annotations

import ast
import re
from collections.abc import Set
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samestep import ConfigError, env
from samestep.env import EnvError, World, detect

ALONE = World(0, 1, 0, 1, 0, 1)

TORCHRUN = {  # rank 3 of 4, on two nodes with two ranks each
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "532f5674-111a-4a03-867a-7044d76111a7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TORCHRUN_WORLD = World(3, 4, 1, 2, 1, 2, "torchrun", "worker", "node0", 29400, 0)
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",  # Open MPI's node rank is a second local rank; this rank is on node 1
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "2",
}
SLURM_BATCH = {  # the batch script's own environment
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
}
SLURM = {  # the last task of srun in the job of SLURM_BATCH
    **SLURM_BATCH,
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "6",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
SLURM_WORLD = World(6, 7, 0, 1, 3, 4, "slurm")
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_HOSTNAME": "n2",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40101",
}
HOROVOD_WORLD = World(3, 4, 1, 2, 1, 2, "horovodrun", "worker", "10.0.0.1", 40101)
PADDLE = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_GLOBAL_RANK": "1",
    "PADDLE_GLOBAL_SIZE": "2",
    "PADDLE_LOCAL_RANK": "1",
    "PADDLE_RANK_IN_NODE": "1",
    "PADDLE_LOCAL_SIZE": "2",
    "PADDLE_NNODES": "1",
    "PADDLE_MASTER": "10.0.0.1:37777",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.1:37779",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:37778,10.0.0.1:37779",
    "PADDLE_DISTRI_BACKEND": "gloo",
}
PADDLE_WORLD = World(1, 2, 1, 2, 0, 1, "paddle", "worker", "10.0.0.1", 37777)
SPAWN = {
    "PADDLE_TRAINER_ID": "2",
    "PADDLE_TRAINERS_NUM": "3",
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:36003",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:36001,127.0.0.1:36002,127.0.0.1:36003",
    "PADDLE_DISTRI_BACKEND": "gloo",
}
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_NODE_ID": "3",
    "MS_WORKER_NUM": "4",
    "MS_SCHED_HOST": "127.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_TOPO_TIMEOUT": "600",
    "RANK_ID": "3",
    "RANK_SIZE": "4",
    "DEVICE_ID": "1",
}
MSRUN_WORLD = World(3, 4, 1, None, None, None, "msrun", "worker", "127.0.0.1", 8118)
SCHEDULER = {**{name: MSRUN[name] for name in MSRUN if name != "MS_NODE_ID"}, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
JSRUN = {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_LOCAL_RANK": "2", "PMIX_RANK": "5"}
PRUN = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}
ASCEND = {"RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "5", "RANK_TABLE_FILE": "/user/rank_table_8p.json"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "train-3"}
DLC = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "dlc1-master-0", "MASTER_PORT": "23456"}
PYTORCHJOB = {
    **DLC,
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
TRAINER_V2 = {**{name: value for name, value in PYTORCHJOB.items() if name[:4] == "PET_"}, **INDEXED_JOB}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


LAUNCHED = {
    "torchrun": (TORCHRUN, TORCHRUN_WORLD),
    "torchrun, second attempt": (
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"},
        World(3, 4, 1, 2, 1, 2, "torchrun", "worker", "node0", 29400, 2),
    ),
    "mpich": (HYDRA, World(1, 4, 1, 2, launcher="mpich")),
    "mpich, one machine": ({**HYDRA, "MPI_LOCALNRANKS": "4"}, World(1, 4, 1, 4, 0, 1, "mpich")),
    "open mpi": (OPENMPI, World(2, 4, 0, 2, launcher="openmpi")),
    "mvapich2": (MVAPICH2, World(1, 4, 1, 2, launcher="mvapich2")),
    "mvapich2, one machine": ({**MVAPICH2, "MV2_COMM_WORLD_LOCAL_SIZE": "4"}, World(1, 4, 1, 4, 0, 1, "mvapich2")),
    "jsrun": (JSRUN, World(5, 6, 2, launcher="jsrun")),
    "jsrun, a program of Spectrum MPI": (
        {**JSRUN, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"},
        World(5, 6, launcher="openmpi"),
    ),
    "open mpi, address given": (
        {**OPENMPI, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        World(2, 4, 0, 2, None, None, "openmpi", "worker", "n1", 29500),
    ),
    "srun": (SLURM, SLURM_WORLD),
    "srun, job requeued, address given": (
        {**SLURM, "SLURM_RESTART_COUNT": "1", "MASTER_ADDR": "n1"},
        World(6, 7, 0, 1, 3, 4, "slurm", "worker", "n1", None, 1),
    ),
    "srun, fewer tasks than the job": (
        {
            **SLURM_BATCH,
            "SLURM_PROCID": "1",
            "SLURM_NODEID": "1",
            "SLURM_STEP_ID": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        World(1, 2, 0, 1, 1, 2, "slurm"),
    ),
    "srun, only the job's list": (without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), SLURM_WORLD),
    "srun, only the job's list and it is not the step's": (
        {**without(SLURM, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_TASKS_PER_NODE": "4(x4)"},
        World(6, 7, 0, None, 3, 4, "slurm"),
    ),
    "salloc's interactive step": (
        {**SLURM_BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
        | {"SLURM_STEP_TASKS_PER_NODE": "1"},
        World(0, 1, 0, 1, 0, 1, "slurm"),
    ),
    "sbatch's script, no step": (SLURM_BATCH, ALONE),
    "horovodrun": (HOROVOD, HOROVOD_WORLD),
    "horovodrun, elastic": ({**HOROVOD, "HOROVOD_ELASTIC": "1"}, HOROVOD_WORLD),
    "horovodrun, hosts with 1 and 2 slots": (  # only node 1 has a local rank 1, so its cross rank is 0
        {**HOROVOD, "HOROVOD_RANK": "2", "HOROVOD_SIZE": "3", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"},
        World(2, 3, 1, 2, None, None, "horovodrun", "worker", "10.0.0.1", 40101),
    ),
    "paddle launch": (PADDLE, PADDLE_WORLD),
    "paddle launch, two nodes": (
        {**PADDLE, "PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "4", "PADDLE_NNODES": "2"},
        World(3, 4, 1, 2, None, 2, "paddle", "worker", "10.0.0.1", 37777),
    ),
    "paddle launch, etcd": (
        {**PADDLE, "PADDLE_MASTER": "etcd://10.0.0.9:2379"},
        World(1, 2, 1, 2, 0, 1, "paddle"),
    ),
    "paddle spawn": (SPAWN, World(2, 3, 2, 3, 0, 1, "paddle")),
    "paddle spawn, two hosts": (
        {**SPAWN, "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.1:2,10.0.0.2:1"},
        World(2, 3, launcher="paddle"),
    ),
    "msrun worker": (MSRUN, MSRUN_WORLD),
    "msrun scheduler": (
        SCHEDULER,
        World(-1, 4, None, None, None, None, "msrun", "scheduler", "127.0.0.1", 8118),
    ),
    "msrun's variables by hand, card 7": (
        {**MSRUN, "MS_NODE_ID": "0", "MS_WORKER_NUM": "1", "DEVICE_ID": "7"},
        World(0, 1, 0, 1, 0, 1, "msrun", "worker", "127.0.0.1", 8118),
    ),
    "ascend rank table": (ASCEND, World(5, 8, launcher="rank table")),
    "ascend rank table, older name": (
        {**without(ASCEND, "RANK_TABLE_FILE"), "MINDSPORE_HCCL_CONFIG_PATH": "/user/t.json"},
        World(5, 8, launcher="rank table"),
    ),
    "ascend, one card, no table": ({"RANK_ID": "0", "RANK_SIZE": "1"}, World(0, 1, 0, 1, 0, 1, "rank table")),
    "dlc": (DLC, World(1, 2, 0, 1, 1, 2, "env", "worker", "dlc1-master-0", 23456)),
    "dlc, one process a node": (
        {**DLC, "NPROC_PER_NODE": "1"},
        World(1, 2, 0, 1, 1, 2, "env", "worker", "dlc1-master-0", 23456),
    ),
    "plain, on one machine": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        World(1, 2, 1, 2, 0, 1, "env", "worker", "127.0.0.1", 29500),
    ),
    "plain, with local rank": (
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NPROC_PER_NODE": "2"},
        World(1, 4, 1, launcher="env"),
    ),
    "plain, with local rank and size": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        World(1, 2, 1, 2, 0, 1, "env"),
    ),
    "plain, in an indexed job": (
        {"RANK": "3", "WORLD_SIZE": "4", **INDEXED_JOB},
        World(3, 4, 0, 1, 3, 4, "env"),
    ),
    "prun, place given": ({**PRUN, "RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 0, 1, 1, 2, "env")),
    "sizes alone, and words": (
        {"BATCH_SIZE": "128", "X_SIZE": "4", "OMP_PE": "all", "SLURM_ARRAY_TASK_ID": "3"},
        ALONE,
    ),
    "one machine of one": ({"NNODES": "1", "NODE_RANK": "0"}, ALONE),
    "nothing": ({"PATH": "/usr/bin", "HOME": "/root"}, ALONE),
    "only what the launch script reads": ({"NPROC_PER_NODE": "4", "NNODES": "1", "MASTER_PORT": "x"}, ALONE),
    "all empty": (dict.fromkeys([*TORCHRUN, *SLURM, *MSRUN, *PYTORCHJOB, *INDEXED_JOB], ""), ALONE),
    "padded": ({"RANK": " 1", "WORLD_SIZE": "2\n"}, World(1, 2, 0, 1, 1, 2, "env")),
}


@pytest.mark.parametrize(("environ", "world"), LAUNCHED.values(), ids=LAUNCHED)
def test_each_launchers_variables_give_its_ranks_place(environ: dict[str, str], world: World) -> None:
    assert detect(environ) == world


COMBINED = {
    "torchrun under srun": ({**SLURM, **TORCHRUN}, TORCHRUN_WORLD),
    "torchrun under a broken srun": ({**SLURM, "SLURM_NTASKS": "x", **TORCHRUN}, TORCHRUN_WORLD),
    "torchrun under mpirun": ({**OPENMPI, **HYDRA, **TORCHRUN}, TORCHRUN_WORLD),
    "torchrun in a PyTorchJob": ({**PYTORCHJOB, **TORCHRUN}, TORCHRUN_WORLD),
    "torchrun alone in a pod of an indexed job": (
        {**INDEXED_JOB, "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"},
        World(0, 1, 0, 1, 0, 1, "torchrun"),
    ),
    "torchrun in an indexed job": ({**INDEXED_JOB, **TORCHRUN}, TORCHRUN_WORLD),
    "msrun in an Ascend container": ({**ASCEND, **MSRUN}, MSRUN_WORLD),
    "msrun in DLC": ({**DLC, "NPROC_PER_NODE": "8", **MSRUN}, MSRUN_WORLD),
    "horovodrun under Slurm": ({**SLURM, **HOROVOD}, HOROVOD_WORLD),
    "horovodrun in DLC": ({**DLC, "NPROC_PER_NODE": "2", **HOROVOD}, HOROVOD_WORLD),
    "horovodrun --mpi": (
        {**OPENMPI, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "MPI"},
        World(2, 4, 0, 2, launcher="openmpi"),
    ),
    "two launchers that agree": ({**HOROVOD, **TORCHRUN}, HOROVOD_WORLD),
    "mpirun in a batch job": ({**SLURM_BATCH, **OPENMPI}, World(2, 4, 0, 2, launcher="openmpi")),
    "mpirun whose daemons are srun's": ({**SLURM, **OPENMPI}, World(2, 4, 0, 2, launcher="openmpi")),
    "mpiexec whose proxies are srun's": ({**SLURM, **HYDRA}, World(1, 4, 1, 2, launcher="mpich")),
    "srun with pmi2": ({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7"}, SLURM_WORLD),
    "srun with pmix": ({**SLURM, "PMIX_RANK": "6"}, SLURM_WORLD),
    "srun over exported RANK": ({**DLC, **SLURM, "MASTER_ADDR": "", "MASTER_PORT": ""}, SLURM_WORLD),
    "a batch job's exported RANK": (
        {**SLURM_BATCH, "RANK": "1", "WORLD_SIZE": "2"},
        World(1, 2, 0, 1, 1, 2, "env"),
    ),
    "mpirun with what MindSpore makes of it": (
        {**OPENMPI, "RANK_ID": "2", "RANK_SIZE": "4"},
        World(2, 4, 0, 2, launcher="openmpi"),
    ),
    "leftover RANK_ID beside RANK": (
        {"RANK_ID": "5", "RANK_SIZE": "8", "RANK": "1", "WORLD_SIZE": "2"},
        World(1, 2, 0, 1, 1, 2, "env"),
    ),
}


@pytest.mark.parametrize(("environ", "world"), COMBINED.values(), ids=COMBINED)
def test_of_two_launchers_variables_the_inner_ones_give_the_place(environ: dict[str, str], world: World) -> None:
    assert detect(environ) == world


LAUNCH_SCRIPT = "scripts/run_<app>.sh"
NOT_NUMBERS = "1.0 1e3 +-1 +1 -1 0x1 1_0 one \u0661 \uff19 \xb2 2147483648"  # some are digits of other alphabets
REFUSED = {
    # variables that count nodes, not ranks
    "dlc with processes per node": ({**DLC, "NPROC_PER_NODE": "8"}, "RANK='1' NPROC_PER_NODE='8' nodes", LAUNCH_SCRIPT),
    "dlc, word": ({**DLC, "NPROC_PER_NODE": "auto"}, "WORLD_SIZE='2' NPROC_PER_NODE='auto' nodes", LAUNCH_SCRIPT),
    "PyTorchJob": (PYTORCHJOB, "RANK='1' PET_NPROC_PER_NODE='auto' nodes", LAUNCH_SCRIPT),
    "Trainer v2": (TRAINER_V2, "PET_NODE_RANK='1' PET_NNODES='2' nodes", LAUNCH_SCRIPT),
    "indexed job": (INDEXED_JOB, "JOB_COMPLETION_INDEX='3' NNODES RANK WORLD_SIZE unset", LAUNCH_SCRIPT),
    "two machines": ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES='2' counts machines", LAUNCH_SCRIPT),
    "machine 1 of unknown many": ({"NODE_RANK": "1"}, "NODE_RANK='1' places no size", "unset NODE_RANK"),
    # an index without a world size
    "prun": (PRUN, "PMIX_RANK='1' places no size RANK WORLD_SIZE", "unset PMIX_RANK"),
    **{
        f"unknown launcher, {name}": (
            {name: value},
            f"{name}='{value}' places no size RANK WORLD_SIZE",
            f"unset {name}",
        )
        for name, value in [("FLUX_TASK_RANK", "0"), ("PALS_RANKID", "3"), ("ALPS_APP_PE", "2"), ("X_PROCID", "1")]
    },
    "msrun's rank without its role": (without(MSRUN, "MS_ROLE", "RANK_ID", "RANK_SIZE"), "MS_NODE_ID='3'", "unset"),
    "a task of srun without its step": ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID='1'", "unset"),
    # one variable of a pair without the other
    "torchrun, no RANK": (without(TORCHRUN, "RANK"), "WORLD_SIZE='4' RANK unset", "set both"),
    "torchrun, neither": (without(TORCHRUN, "RANK", "WORLD_SIZE"), "TORCHELASTIC_RUN_ID RANK WORLD_SIZE", "set both"),
    "torchrun, no LOCAL_WORLD_SIZE": (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_RANK='1' LOCAL_WORLD_SIZE", "both"),
    "torchrun, no GROUP_RANK": (without(TORCHRUN, "GROUP_RANK"), "GROUP_WORLD_SIZE='2' GROUP_RANK", "both"),
    "only WORLD_SIZE": ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' RANK unset", "set both"),
    "only LOCAL_RANK": ({"LOCAL_RANK": "1"}, "LOCAL_RANK='1' RANK WORLD_SIZE", "unset LOCAL_RANK"),
    "no LOCAL_RANK": ({**DLC, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE='1' LOCAL_RANK unset", "set both"),
    "RANK empty": ({**DLC, "RANK": ""}, "WORLD_SIZE='2' RANK unset", "set both"),
    "horovod": (without(HOROVOD, "HOROVOD_SIZE"), "HOROVOD_RANK='3' HOROVOD_SIZE unset", "set both"),
    "paddle": (without(PADDLE, "PADDLE_TRAINER_ID"), "PADDLE_TRAINERS_NUM='2' PADDLE_TRAINER_ID", "set both"),
    "paddle, local size alone": (
        without(PADDLE, "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE"),
        "PADDLE_LOCAL_SIZE='2' PADDLE_RANK_IN_NODE",
        "set both",
    ),
    "open mpi": (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE='4'", "set both"),
    "mpich": (without(HYDRA, "MPI_LOCALRANKID"), "MPI_LOCALNRANKS='2' MPI_LOCALRANKID", "set both"),
    "slurm, no task number": (without(SLURM, "SLURM_PROCID"), "SLURM_STEP_NUM_TASKS='7' SLURM_PROCID", "set both"),
    "slurm, a step and nothing else": ({"SLURM_STEP_ID": "0"}, "SLURM_STEP_ID='0' SLURM_PROCID", "unset"),
    "msrun, no number of workers": (without(MSRUN, "MS_WORKER_NUM"), "MS_ROLE='MS_WORKER' MS_WORKER_NUM", "msrun"),
    "msrun on several machines, workers beside the scheduler": (
        {**without(MSRUN, "MS_NODE_ID"), "RANK_ID": "0"},
        "MS_ROLE='MS_WORKER' MS_NODE_ID",
        "--node_rank",
    ),
    "msrun on several machines, other workers": (without(MSRUN, "MS_NODE_ID", "RANK_ID"), "MS_NODE_ID", "--node_rank"),
    "ascend": (without(ASCEND, "RANK_SIZE"), "RANK_ID='5' RANK_SIZE unset", "set both"),
    "ascend, no table": (without(ASCEND, "RANK_TABLE_FILE"), "RANK_ID='5' RANK_SIZE='8' RANK_TABLE_FILE", "msrun"),
    # values that are not integers in range
    **{
        f"RANK={value!r}": ({"RANK": value, "WORLD_SIZE": "4"}, f"RANK={value!a} whole number", "correct or unset")
        for value in [*NOT_NUMBERS.split(), "1 2", "9" * 50]
    },
    "size 0": ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' whole number from 1", "correct"),
    "rank is size": ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK='4' not below WORLD_SIZE='4'", "count ranks from 0"),
    "5,000 digits": ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='999 ...", "correct"),
    "two lines": ({"RANK": "1\n2\u2028\x85", "WORLD_SIZE": "4"}, "RANK='1\\n2\\u2028\\x85'", "correct"),
    "not UTF-8": ({"RANK": "\udcff", "WORLD_SIZE": "4"}, "RANK='\\udcff'", "correct"),
    "port 0": ({**DLC, "MASTER_PORT": "0"}, "MASTER_PORT='0' from 1 to 65535", "correct"),
    "port 65536": ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT='65536' from 1 to 65535", "correct"),
    "scheduler's port": ({**SCHEDULER, "MS_SCHED_PORT": "http"}, "MS_SCHED_PORT='http'", "correct"),
    "restarts": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT='-1'", "correct"),
    "paddle, no port": ({**PADDLE, "PADDLE_MASTER": "node0"}, "PADDLE_MASTER='node0' host:port", "correct"),
    "paddle, no host": ({**PADDLE, "PADDLE_MASTER": ":80"}, "PADDLE_MASTER=':80' host:port", "correct"),
    "paddle, elastic range": ({**PADDLE, "PADDLE_NNODES": "1:2"}, "PADDLE_NNODES='1:2'", "correct"),
    "msrun role": ({**MSRUN, "MS_ROLE": "MS_PSERVER"}, "MS_ROLE='MS_PSERVER' MS_WORKER MS_SCHED", "msrun"),
    "msrun name for a rank": ({**MSRUN, "MS_NODE_ID": "a-b"}, "MS_NODE_ID='a-b' whole number", "correct"),
    "msrun rank": ({**MSRUN, "MS_NODE_ID": "4"}, "MS_NODE_ID='4' not below MS_WORKER_NUM='4'", "count ranks from 0"),
    "slurm list": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(3)"}, "SLURM_STEP_TASKS_PER_NODE='2(3)'", "srun"),
    # values that contradict each other
    "local rank": (
        {**TORCHRUN, "LOCAL_RANK": "2"},
        "LOCAL_RANK='2' not below LOCAL_WORLD_SIZE='2'",
        "count ranks from 0",
    ),
    "local rank, size unknown": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"},
        "WORLD_SIZE='2' LOCAL_RANK='2' contradict",
        "correct",
    ),
    "local size": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "WORLD_SIZE='4' LOCAL_WORLD_SIZE='5' contradict", "correct"),
    "more nodes than processes": ({**TORCHRUN, "GROUP_WORLD_SIZE": "5"}, "GROUP_WORLD_SIZE='5' contradict", "correct"),
    "all here, on two nodes": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "GROUP_WORLD_SIZE='2' contradict", "correct"),
    "one node, half of them here": ({**PADDLE, "PADDLE_TRAINERS_NUM": "4"}, "PADDLE_NNODES='1' contradict", "correct"),
    "slurm nodes": ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "7"}, "SLURM_STEP_NUM_NODES='4' contradict", "srun"),
    "slurm local": ({**SLURM, "SLURM_LOCALID": "1"}, "SLURM_LOCALID='1' contradict", "correct"),
    "slurm list without end": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "9999999999(x9999999999)," * 1000 + "1"},
        "SLURM_STEP_TASKS_PER_NODE='9999 ... contradict",
        "srun",
    ),
    "mpirun against mpiexec": (
        {**OPENMPI, **HYDRA},
        "openmpi OMPI_COMM_WORLD_RANK='2' mpich PMI_RANK='1'",
        "unset",
    ),
    "torchrun alone in each task of srun": (
        {**SLURM, "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"},
        "torchrun WORLD_SIZE='1' slurm SLURM_STEP_NUM_TASKS='7'",
        "unset",
    ),
    "mpirun alone in a pod of two": (
        {**DLC, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        "OMPI_COMM_WORLD_SIZE='1' WORLD_SIZE='2'",
        "unset",
    ),
    "msrun against torchrun": (
        {**TORCHRUN, **MSRUN, "MS_NODE_ID": "0"},
        "disagree MS_NODE_ID='0' MS_WORKER_NUM='4' RANK='3' WORLD_SIZE='4'",
        "unset",
    ),
    "scheduler against torchrun": ({**TORCHRUN, **SCHEDULER}, "disagree msrun torchrun", "unset"),
    "horovodrun against paddle": ({**HOROVOD, **PADDLE}, "disagree HOROVOD_SIZE='4' PADDLE_TRAINERS_NUM='2'", "unset"),
    "a broken second launcher": ({**HOROVOD, "PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINERS_NUM unset", "set both"),
}


@pytest.mark.parametrize(("environ", "words", "remedy"), REFUSED.values(), ids=REFUSED)
def test_inconsistent_variables_are_refused_in_one_line_with_the_remedy(
    environ: dict[str, str], words: str, remedy: str
) -> None:
    with pytest.raises(EnvError) as caught:
        detect(environ)
    message = str(caught.value)
    for part in (*words.split(), remedy):
        assert part in message
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    assert message.isascii()


def test_an_env_error_is_the_callers_mistake() -> None:
    assert issubclass(EnvError, ConfigError)
    assert issubclass(EnvError, ValueError)


def test_rank_zero_is_one_process_under_msrun() -> None:
    worlds = [detect(SCHEDULER)] + [detect({**MSRUN, "MS_NODE_ID": str(rank)}) for rank in range(4)]
    assert [world.rank for world in worlds].count(0) == 1


def test_only_the_winning_family_is_read() -> None:
    broken = dict.fromkeys([*SLURM, *HYDRA, *DLC, "LOCAL_RANK", "GROUP_RANK", "RANK_ID", "JOB_COMPLETION_INDEX"], "x")
    assert detect({**broken, **TORCHRUN}) == TORCHRUN_WORLD
    assert detect({**broken, **OPENMPI, "MASTER_ADDR": "", "MASTER_PORT": ""}) == detect(OPENMPI)


VARIABLES = sorted(
    {*TORCHRUN, *HYDRA, *OPENMPI, *SLURM, *HOROVOD, *PADDLE, *SPAWN, *MSRUN, *ASCEND, *INDEXED_JOB, *PYTORCHJOB}
    | {"NPROC_PER_NODE", "SLURM_RESTART_COUNT", "MINDSPORE_HCCL_CONFIG_PATH", ""}
)
PLAUSIBLE = ["", "0", "1", "2", "3", "4", " 2 ", "-1", "65536", "auto", "MS_WORKER", "MS_SCHED", "2(x3),1", "1(x2)"]
PLAUSIBLE += ["node0", "node0:29400", "http://node0:80", "a:1,a:2", "9" * 5000, "2\n"]
FAMILIES = [TORCHRUN, HYDRA, OPENMPI, SLURM, HOROVOD, PADDLE, SPAWN, MSRUN, SCHEDULER, ASCEND, INDEXED_JOB, PYTORCHJOB]


def check_anything(environ: dict[str, str]) -> None:
    try:
        world = detect(environ)
    except EnvError as error:
        message = str(error)
    else:
        check_world(world)
        assert detect(environ) == world
        return
    assert len(message.splitlines()) == 1


def check_world(world: World) -> None:
    if world.role == "scheduler":
        assert world.rank == -1
    else:
        assert 0 <= world.rank < world.world_size
    assert world.local_world_size is None or 1 <= world.local_world_size <= world.world_size
    assert world.local_rank is None or 0 <= world.local_rank < (world.local_world_size or world.world_size)
    assert world.node_count is None or 1 <= world.node_count <= world.world_size
    assert world.node_rank is None or (world.node_count is not None and 0 <= world.node_rank < world.node_count)
    assert (world.node_count == 1) == (world.local_world_size == world.world_size)
    assert world.master_port is None or 1 <= world.master_port <= 65535
    assert world.restart_count is None or world.restart_count >= 0


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=8)))
@settings(max_examples=300, deadline=None)
def test_any_values_give_a_place_or_one_error(environ: dict[str, str]) -> None:
    check_anything(environ)


@given(st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(PLAUSIBLE), max_size=12))
@settings(max_examples=300, deadline=None)
def test_plausible_values_give_a_place_or_one_error(environ: dict[str, str]) -> None:
    check_anything(environ)


@given(
    st.lists(st.sampled_from(FAMILIES), min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(PLAUSIBLE), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_variables_of_real_launchers_with_a_change_give_a_place_or_one_error(
    families: list[dict[str, str]], changes: dict[str, str]
) -> None:
    check_anything({**{name: family[name] for family in families for name in family}, **changes})


# --- variables that another job left ---------------------------------------------------------------------------------

BY_LAUNCHER = {
    "msrun": MSRUN,
    "horovodrun": HOROVOD,
    "torchrun": TORCHRUN,
    "paddle": PADDLE,
    "openmpi": OPENMPI,
    "mvapich2": MVAPICH2,
    "jsrun": JSRUN,
    "mpich": HYDRA,
    "slurm": SLURM,
    "rank table": ASCEND,
    "env": DLC,
    "pmix": PRUN,
    "indexed job": INDEXED_JOB,
}
STALE = ["another rank", "a rank of one", "its index alone", "its first index alone", "its size alone"]


def stale(launcher: str, what: str) -> dict[str, str]:
    """Return variables that an ended job of a launcher may have left in the environment."""
    spec = next(spec for spec in env._LAUNCHERS if spec.name == launcher)
    index, size = (names.split("|")[0] for names in spec.rank.split())
    family = BY_LAUNCHER[launcher]
    marks = {name: family[name] for name in spec.markers.split() if name in family}
    left = {
        "another rank": family,
        "a rank of one": {**marks, index: "0", size: "1"},
        "its index alone": {index: "1"},
        "its first index alone": {index: "0"},
        "its size alone": {size: "2"},
    }[what]
    return {name: value for name, value in left.items() if name != "-"}


def place(environ: dict[str, str]) -> tuple[int, int] | None:
    """Return rank and world size, or None if the environment is refused."""
    try:
        world = detect(environ)
    except EnvError:
        return None
    return world.rank, world.world_size


def test_the_table_of_families_has_every_launcher() -> None:
    assert list(BY_LAUNCHER) == [spec.name for spec in env._LAUNCHERS]


@pytest.mark.parametrize("what", STALE)
def test_no_rank_trains_alone_because_another_job_left_variables(what: str) -> None:
    """Leftover variables are ignored or refused. An inner launcher, such as mpirun in a step of srun, has priority."""
    order = list(BY_LAUNCHER)
    for launcher, environ in BY_LAUNCHER.items():
        if launcher == "indexed job":  # a pod of an indexed job may train alone
            continue
        for other in BY_LAUNCHER:
            left = stale(other, what)
            found = place({**left, **environ})
            case = f"{launcher}, and {other} left {left}"
            if found not in (None, place(environ)):
                assert found == place(left), case
                assert found[1] > 1, case
                assert order.index(other) < order.index(launcher), case


@pytest.mark.parametrize("what", STALE)
def test_a_launch_script_removes_what_another_job_left(what: str) -> None:
    """After the removal, ranks have only the variables of their own launcher."""
    removed = env.launcher_variables()
    settings = {"MASTER_ADDR", "MASTER_PORT", "RANK_TABLE_FILE", "NNODES", "NODE_RANK", "JOB_COMPLETION_INDEX"}
    assert not removed & settings
    for other in BY_LAUNCHER:
        left = {name: value for name, value in stale(other, what).items() if name not in removed}
        assert detect({**left, **TORCHRUN}) == TORCHRUN_WORLD
        if other != "indexed job":  # the index of an indexed job stays
            assert detect(left) == ALONE, left


def test_a_launch_script_leaves_an_allocation_of_slurm() -> None:
    left = set(SLURM) - env.launcher_variables()
    assert left == {
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_NTASKS",
        "SLURM_STEP_NODELIST",
        "SLURM_TASKS_PER_NODE",
    }


# --- one table -----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
# Files outside `samestep.env` that name variables of launchers, and the reason.
ELSEWHERE = {
    "core/samestep/torch/checkpoints.py": {"TORCHELASTIC_RESTART_COUNT"},  # only for a warning about torchrun
    "core/samestep/options.py": {"LOCAL_RANK"},  # torch.distributed.launch also passes the local rank as an option
    "launch/samestep_launch/elastic_agent.py": {"RANK"},  # read in a forked rank, for its process title
    "launch/samestep_launch/job.py": {"RANK"},  # named in a message about machines
    "observe/samestep_observe/watch.py": {"RANK"},  # the metavar of --pid
    # The recorder runs inside other programs, whose Python may lack samestep.
    "check/samestep_check/inside/samestep_record.py": set(
        "RANK HOROVOD_RANK OMPI_COMM_WORLD_RANK PMI_RANK PADDLE_TRAINER_ID RANK_ID SLURM_PROCID".split()
    ),
    # These programs start or join ranks, so they set the variables that a launcher would set.
    "apps/collectives_lab/small_job.py": {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    "apps/lenet_paddle/distributed.py": set(
        "PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM PADDLE_MASTER PADDLE_CURRENT_ENDPOINT".split()
    ),
    "apps/resnet50_mindspore/each_device.py": set(
        "RANK_ID RANK_SIZE MS_ROLE MS_NODE_ID MS_WORKER_NUM MS_SCHED_HOST MS_SCHED_PORT".split()
    ),
}


def names_in(path: Path, names: Set[str]) -> set[str]:
    """Return the ``names`` that a program has as keyword arguments, or in strings that hold only names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch(r"[A-Z0-9_\s|]+", str(node.value)):
            found |= names & set(re.split(r"[\s|]+", str(node.value)))
        elif isinstance(node, ast.keyword) and node.arg:
            found |= names & {node.arg}
    return found


def test_the_variables_of_launchers_stand_in_one_table() -> None:
    names = env.launcher_variables() | {"SLURM_NTASKS", "SLURM_RESTART_COUNT", "JOB_COMPLETION_INDEX"}
    found: dict[str, set[str]] = {}
    for folder in ("core", "launch", "observe", "check", "apps"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            named = names_in(path, names)
            if named and path.name != "env.py":
                found[str(path.relative_to(ROOT))] = named
    assert found == ELSEWHERE


def compressed(counts: list[int]) -> str:
    """Return the tasks per node in Slurm's notation, such as ``2(x3),1``."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in runs)


def launches(counts: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Return the variables that each launcher sets for each rank, if node i has ``counts[i]`` processes."""
    size = sum(counts)
    nodes = len(counts)
    places = [(node, local, count) for node, count in enumerate(counts) for local in range(count)]
    made: dict[str, list[dict[str, Any]]] = {}
    for rank, (node, local, here) in enumerate(places):
        cross = [index for index, count in enumerate(counts) if count > local]
        environs: dict[str, dict[str, Any]] = {
            "torchrun": {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}
            | {"LOCAL_WORLD_SIZE": here, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes},
            "slurm": {"SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": local}
            | {"SLURM_NODEID": node, "SLURM_NNODES": nodes, "SLURM_TASKS_PER_NODE": compressed(counts)},
            "horovodrun": {"HOROVOD_RANK": rank, "HOROVOD_SIZE": size, "HOROVOD_LOCAL_RANK": local}
            | {"HOROVOD_LOCAL_SIZE": here, "HOROVOD_CROSS_RANK": cross.index(node), "HOROVOD_CROSS_SIZE": len(cross)},
            "openmpi": {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": local, "OMPI_COMM_WORLD_LOCAL_SIZE": here}
            | {"OMPI_COMM_WORLD_NODE_RANK": local},
            "mpich": {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": here},
            "paddle": {"PADDLE_TRAINER_ID": rank, "PADDLE_TRAINERS_NUM": size, "PADDLE_RANK_IN_NODE": local}
            | {"PADDLE_LOCAL_SIZE": here, "PADDLE_NNODES": nodes},
            "env": {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here},
        }
        for launcher, environ in environs.items():
            made.setdefault(launcher, []).append(environ)
    return made


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_each_rank_of_a_consistent_launch_finds_its_place(counts: list[int]) -> None:
    truth = [(node, local, count) for node, count in enumerate(counts) for local in range(count)]
    even = len(set(counts)) == 1
    for launcher, environs in launches(counts).items():
        worlds = [detect({name: str(value) for name, value in environ.items()}) for environ in environs]
        assert [world.rank for world in worlds] == list(range(sum(counts)))
        for world, (node, local, here) in zip(worlds, truth):
            assert (world.launcher, world.world_size) == (launcher, sum(counts))
            assert (world.local_rank, world.local_world_size) == (local, here)
            if launcher in ("torchrun", "slurm") or (launcher == "horovodrun" and even) or len(counts) == 1:
                assert (world.node_rank, world.node_count) == (node, len(counts))
            elif launcher != "horovodrun":
                assert world.node_rank is None
        assert len({astuple(world) for world in worlds}) == len(worlds)
