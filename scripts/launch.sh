#!/usr/bin/env bash
# Run launch.py with the first Python that works. scripts/run_<app>.sh calls this script.
for python in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python3.10 python3.9; do
  # This test compares the output, because any program may exit with 0.
  if [ "$("$python" -c 'import sys; print(sys.version_info >= (3, 9))' 2>/dev/null)" = True ]; then
    exec "$python" "$(dirname "${BASH_SOURCE[0]}")/launch.py" "$@"
  fi
done
if [ -n "${PYTHONHOME:-}" ]; then
  echo "error: no Python 3.9 or newer starts while PYTHONHOME is set: unset PYTHONHOME" >&2
else
  echo "error: no Python 3.9 or newer was found: install python3, or name one by PYTHON=/path/to/python" >&2
fi
exit 2
