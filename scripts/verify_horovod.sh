#!/usr/bin/env bash
# Check the Horovod installation over N ranks, 2 by default:  bash scripts/verify_horovod.sh [N] [--transport mpi]
# Uses .venvs/mnist_horovod, or the interpreter that PYTHON names. Several machines: HOROVOD_HOSTS=server1:1,server2:1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venvs/mnist_horovod/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "error: there is no $python: run scripts/run_mnist_horovod.sh first, or name an interpreter by PYTHON" >&2
  exit 2
fi
PYTHONPATH=$root/core${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$root/apps/mnist_horovod/verify.py" "$@"
