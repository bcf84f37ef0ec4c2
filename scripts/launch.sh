#!/usr/bin/env bash
# Called by scripts/run_<app>.sh: finds a Python to start with, and runs launch.py by it.
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for python in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python3.10 python3.9; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
    exec "$python" "$scripts/launch.py" "$@"
  fi
done
echo "error: no Python 3.9 or newer was found: install python3, or name one by PYTHON=/path/to/python" >&2
exit 2
