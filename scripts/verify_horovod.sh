#!/usr/bin/env bash
# Check the Horovod installation over N ranks, 2 by default:  bash scripts/verify_horovod.sh [N] [--transport mpi]
# The script uses .venvs/mnist_horovod or PYTHON=/path/to/python. On several machines, set HOROVOD_HOSTS=server1:1,server2:1.
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
root=$(CDPATH='' cd -- "$scripts/.." && pwd)
python=${PYTHON:-$root/.venvs/mnist_horovod/bin/python}
if [ "$("$python" -c 'import sys; print(sys.version_info >= (3, 9))' 2>/dev/null)" != True ]; then
  echo "error: $python is not a Python 3.9 or newer: run scripts/run_mnist_horovod.sh first, or name an interpreter by PYTHON" >&2
  exit 2
fi
PYTHONPATH=$root/core${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$root/apps/mnist_horovod/verify.py" "$@"
