#!/usr/bin/env bash
# Train a CNN on MNIST with N ranks that may leave and rejoin:  bash scripts/run_mnist_elastic.sh N [options]   (--help explains)
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
exec bash "$scripts/launch.sh" mnist_elastic \
  {python} {forker} {app}/launcher.py {nproc} {world_size} {node_rank} {master_addr} {master_port} {train} {options} -- "$@"
