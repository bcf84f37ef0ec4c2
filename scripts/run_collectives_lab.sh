#!/usr/bin/env bash
# Measure what N ranks say to each other:  bash scripts/run_collectives_lab.sh N COMMAND [options]   (--help explains)
# lab.py starts torchrun, as it stands here, once for each job of ranks that the command needs.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" collectives_lab {python} {app}/lab.py {options} --by \
  {python} -m torch.distributed.run --nnodes={nnodes} --node-rank={node_rank} --nproc-per-node={nproc} \
  --master-addr={master_addr} --master-port={master_port} --max-restarts=0 -- "$@"
