#!/usr/bin/env bash
# Train a CNN on MNIST with PyTorch Lightning on N ranks:  bash scripts/run_mnist_lightning.sh N [options]   (--help explains)
# torchrun's agent forks the ranks once. The launch script restarts them, because torchrun's restarts break under gloo.
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
exec bash "$scripts/launch.sh" mnist_lightning \
  {python} -m torch.distributed.run --nnodes={nnodes} --node-rank={node_rank} --nproc-per-node={nproc} \
  --master-addr={master_addr} --master-port={master_port} --max-restarts=0 {train} {options} -- "$@"
