#!/usr/bin/env bash
# Start one rank for each Ascend device of this machine where a rank table, not msrun, says who they are:
#   each_device.sh RUN_DIR N NODE_RANK NODES PYTHON TRAIN.PY [options]      (RANK_TABLE_FILE in the environment)
# Each has a folder <run-dir>/device<i> with its env.log, its train.log, and what Ascend's compiler leaves. The first
# failure ends the others, and its exit code is this script's.
run_dir=$1 count=$2 node=$3 nodes=$4
shift 4
umask 077 # an environment may hold secrets
export RANK_SIZE=$((count * nodes))
trap 'kill $(jobs -p) 2>/dev/null; exit 143' INT TERM

for ((device = 0; device < count; device++)); do
  folder=$run_dir/device$device
  mkdir -p "$folder" || exit 1
  export DEVICE_ID=$device RANK_ID=$((node * count + device)) ASCEND_WORK_PATH=$folder
  env >"$folder/env.log"
  "$@" >"$folder/train.log" 2>&1 &
done
for ((left = count; left > 0; left--)); do
  wait -n
  code=$?
  if [ $code -ne 0 ]; then
    kill $(jobs -p) 2>/dev/null
    exit $code
  fi
done
