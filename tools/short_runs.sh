#!/usr/bin/env bash
# Run apps for some steps on two ranks, with this environment's Python:  bash tools/short_runs.sh FOLDER APP...
set -euo pipefail
folder=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for app in "${@:2}"; do
  case $app in
  collectives_lab) options=(primitives --only=all_reduce --ops=SUM --max-bytes=1048576 --repeats=2) ;;
  cifar_ddp) options=(--max-steps=3 --dataset=synthetic-cifar10) ;;
  gpt_fsdp) options=(--max-steps=3 --dataset=jargon-64k --layers=1 --width=32 --context=32) ;;
  llm_finetune) options=(--max-steps=2 --model=tiny --dataset=definitions-240) ;;
  *) options=(--max-steps=3 --dataset=mnist-5k) ;;
  esac
  echo "$app on 2 ranks"
  bash "scripts/run_$app.sh" 2 "${options[@]}" --device=cpu --run-dir="$folder/$app"
done
