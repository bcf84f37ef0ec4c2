#!/usr/bin/env bash
# Run mypy on all Python files:  bash tools/check_types.sh CACHE_DIR
# An app's folder is on Python's path when the app runs, so all apps have modules of the same names (data, model,
# options). mypy accepts one module of each name, so it runs once for each app, and for each benchmark of an app.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
cache=$1

# check PATH FOLDER FILE...: run mypy in FOLDER, and find modules in the folders of PATH, which are relative to the root.
check() {
  local path="$root/${1//:/:$root/}" folder=$2
  shift 2
  echo "mypy $folder $*"
  (cd "$folder" && MYPYPATH=$path mypy --config-file="$root/mypy.ini" --cache-dir="$cache" "$@")
}

check tools:docs:check/samestep_check/inside:observe/samestep_observe/inside . \
  --exclude '^observe/samestep_observe/inside/sitecustomize' core launch observe check scripts tools docs
check observe/samestep_observe/inside . observe/samestep_observe/inside/sitecustomize.py
check tests:tools:tests/check:tests/check/scripts:tests/common:tests/core:tests/kit:tests/observe:tests/slurm:tests/multihost:tests/trackers . \
  --exclude '^tests/(adversarial/|launch/|llm_finetune/|(core|observe)/conftest)' tests
check tests:tests/launch:tests/adversarial . --exclude adversarial/conftest tests/launch tests/adversarial
check tests:tools:tests/common:tests/llm_finetune . tests/llm_finetune
for app in apps/*/; do
  check . "$app" .
  loop=benchmarks/loops/$(basename "$app").py
  if [ -f "$loop" ]; then
    check "$app" benchmarks/loops "$(basename "$loop")"
  fi
done
check apps/resnet50_mindspore:benchmarks/loops:benchmarks . benchmarks/resnet50_step.py
check apps/mnist_ddp:benchmarks . benchmarks/[!fr]*.py benchmarks/rec*.py
check apps/gpt_fsdp:benchmarks . benchmarks/fsdp_*.py
check benchmarks/loops:benchmarks/elsewhere . benchmarks/elsewhere
check . benchmarks/loops accelerate_loop.py lightning_loop.py textbook_ddp.py
check apps/cifar_ddp benchmarks/loops time_to_accuracy.py
check benchmarks/scoreboard . benchmarks/scoreboard
