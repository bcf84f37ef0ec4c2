#!/usr/bin/env bash
# Run after pip has installed requirements.txt, with the environment's Python: what pip alone cannot install.
# builds from: build_horovod.py
exec "$1" "$(dirname "${BASH_SOURCE[0]}")/build_horovod.py"
