#!/usr/bin/env bash
# Verify the PyTorch apps on one NVIDIA GPU, in at most 9 minutes:  PYTHON=python3 bash tools/gpu_proof.sh [--help]
root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "${PYTHON:-python3}" "$root/tools/gpu_proof/__main__.py" "$@"
