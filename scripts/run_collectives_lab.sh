#!/usr/bin/env bash
# Measure the collectives of N ranks:  bash scripts/run_collectives_lab.sh N COMMAND [options]   (--help explains)
# lab.py runs the torchrun command below once for each job that COMMAND needs.
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
exec bash "$scripts/launch.sh" collectives_lab {python} {app}/lab.py {options} --by \
  {python} -m torch.distributed.run --nnodes={nnodes} --node-rank={node_rank} --nproc-per-node={nproc} \
  --master-addr={master_addr} --master-port={master_port} --max-restarts=0 -- "$@"
