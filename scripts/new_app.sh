#!/usr/bin/env bash
# Copy an app under a new name:  bash scripts/new_app.sh NAME --from APP [--out DIR]   (--help explains)
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
for python in python3.11 python3.12 python3.13 python3.14 python3.10 python3 python3.9; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
    exec "$python" "$scripts/../tools/new_app.py" "$@"
  fi
done
echo "error: no Python 3.9 or newer was found: install python3" >&2
exit 2
