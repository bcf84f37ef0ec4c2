"""The launchers of ``samestep run``: their commands, as templates that `samestep.launch.job.Job.command` fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Launcher(NamedTuple):
    """One launcher: ``module`` must be importable (or, without one, the first word a program on PATH)."""

    module: str
    template: str
    settings: Mapping[str, Any] = {}  # as an app's LAUNCHER, see `samestep.launch.app`


LAUNCHERS = {
    # Restarts are those of `samestep run`, because torchrun's own fail under gloo.
    "torchrun": Launcher(
        "torch",
        "{python} -m torch.distributed.run --nnodes={nnodes} --node-rank={node_rank} --nproc-per-node={nproc} "
        "--master-addr={master_addr} --master-port={master_port} --max-restarts=0 {train} {arguments}",
    ),
    "horovodrun": Launcher(
        "horovod",
        "{python} -m horovod.runner.launch --gloo -np {nproc} --disable-cache {python} {train} {arguments}",
        {"line_prefix": r"\[(?:[\w.@-]*,)?\d+\](?:<stderr>:| )\s*"},
    ),
    "mpirun": Launcher("", "mpirun -np {nproc} {python} {train} {arguments}"),
    "msrun": Launcher(
        "mindspore",
        "{python} -m mindspore.parallel.cluster.run --join=True --tail_worker_log={nproc} --worker_num={world_size} "
        "--local_worker_num={nproc} --node_rank={node_rank} --master_addr={master_addr} --master_port={master_port} "
        "--log_dir={log_dir} {train} {arguments}",
        {"equal_ranks": True},
    ),
    "paddle": Launcher(
        "paddle",
        "{python} -m paddle.distributed.launch --nnodes={nnodes} --rank={node_rank} --nproc_per_node={nproc} "
        "--master={master_addr}:{master_port} --host={host} --log_dir={log_dir} {train} {arguments}",
    ),
}
DIRECT = "{python} {train} {arguments}"  # one process without a launcher
