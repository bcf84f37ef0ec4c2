#!/usr/bin/env bash
# Run after pip has installed the lock, with the environment's Python: what pip alone cannot install.
# builds from: build_horovod.py build.in build.txt mpi.txt
exec "$1" "$(dirname "${BASH_SOURCE[0]}")/build_horovod.py"
