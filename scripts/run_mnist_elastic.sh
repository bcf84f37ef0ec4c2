#!/usr/bin/env bash
# Train a CNN on MNIST with N ranks that may leave and rejoin:  bash scripts/run_mnist_elastic.sh N [options]   (--help explains)
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" mnist_elastic \
  {python} {forker} {app}/launcher.py {nproc} {world_size} {node_rank} {master_addr} {master_port} {train} {options} -- "$@"
