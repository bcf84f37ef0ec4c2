#!/usr/bin/env bash
# Train each PyTorch app for some steps on two ranks, with this environment's Python:  bash tools/short_runs.sh FOLDER
set -euo pipefail
folder=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# train APP OPTION...
train() {
  local app=$1
  shift
  echo "$app: 3 steps on 2 ranks"
  bash "scripts/run_$app.sh" 2 --device=cpu --max-steps=3 --run-dir="$folder/$app" "$@" | tail -n 1
}

train mnist_ddp --dataset=mnist-5k
train cifar_ddp --dataset=synthetic-cifar10
train gpt_fsdp --dataset=jargon-64k --layers=1 --width=32 --context=32
train mnist_lightning --dataset=mnist-5k
train mnist_elastic --dataset=mnist-5k
echo "collectives_lab: all-reduce on 2 ranks"
bash scripts/run_collectives_lab.sh 2 primitives --device=cpu --only=all_reduce --ops=SUM --max-bytes=1048576 --repeats=2 --run-dir="$folder/collectives_lab" | tail -n 1
