"""The launchers of ``samestep run``, with their commands as templates for `samestep_launch.job.Job.command`.

A module of None means that the first word is a program on PATH. ``settings`` is an app's LAUNCHER table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Launcher(NamedTuple):
    """A launcher: the Python module that it needs, and its command up to the program."""

    module: str | None
    command: str
    settings: Mapping[str, Any] = {}


DIRECT = Launcher(None, "{python}")  # one process
LAUNCHERS = {
    # `samestep run` restarts the job, because torchrun's own restarts fail under gloo.
    "torchrun": Launcher(
        "torch",
        "{python} -m torch.distributed.run --nnodes={nnodes} --node-rank={node_rank} --nproc-per-node={nproc} "
        "--master-addr={master_addr} --master-port={master_port} --max-restarts=0",
    ),
    "horovodrun": Launcher(
        "horovod",
        "{python} -m horovod.runner.launch --gloo -np {nproc} --disable-cache {python}",
        {"line_prefix": r"\[(?:[\w.@-]*,)?\d+\](?:<stderr>:| )\s*"},
    ),
    "mpirun": Launcher(None, "mpirun -np {nproc} {python}"),
    "msrun": Launcher(
        "mindspore",
        "{python} -m mindspore.parallel.cluster.run --join=True --tail_worker_log={nproc} --worker_num={world_size} "
        "--local_worker_num={nproc} --node_rank={node_rank} --master_addr={master_addr} --master_port={master_port} "
        "--log_dir={log_dir}",
        {"equal_ranks": True},
    ),
    "paddle": Launcher(
        "paddle",
        "{python} -m paddle.distributed.launch --nnodes={nnodes} --rank={node_rank} --nproc_per_node={nproc} "
        "--master={master_addr}:{master_port} --host={host} --log_dir={log_dir}",
    ),
}
