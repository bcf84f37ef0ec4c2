# Sourced by the sbatch scripts beside it. docs/slurm.md says what the cluster must grant.

fail() {
  echo "error: $*" >&2
  exit 2
}

# The launch script of an app on every node of the job, as one task of a step; its arguments are the user's options.
on_every_node() {
  local app=$1 ranks=$SLURM_NTASKS_PER_NODE
  shift
  [ -n "$ranks" ] || fail "no --ntasks-per-node: give it to sbatch, the number of ranks on each node"
  set_rendezvous
  export NNODES=$SLURM_JOB_NUM_NODES
  # A node whose script has ended for good, one way or the other, ends the others a minute later; not at once, as they
  # may be saving. The task of a node has all of its processors, to share out among the ranks.
  unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
  save_and_requeue srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --cpu-bind=none \
    --kill-on-bad-exit=0 --wait=60 bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' "$app" \
    "scripts/run_$app.sh" "$ranks" --run-dir="$(run_dir "$app")" "$@"
}

# MASTER_ADDR and MASTER_PORT: where the ranks meet. A requeued job may have other nodes.
set_rendezvous() {
  local nodes
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol does not tell the nodes of this job"
  export MASTER_ADDR=${nodes%%$'\n'*}
  export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that systems give out
}

# Found again by a requeued job, which keeps its number.
run_dir() { echo "$PWD/runs/$1/slurm-$SLURM_JOB_ID"; }

# Run a command, and end as it does. USR1, which comes before the time is over and at preemption, is passed on to it: the
# ranks save a step. A job that was stopped so, or by the TERM that its steps alone get when they are preempted, is
# queued again: Slurm itself does that only to one which outlives its GraceTime. scancel sends TERM here as well.
save_and_requeue() {
  local step code interrupted cancelled=
  "$@" &
  step=$!
  trap 'interrupted=1; kill -USR1 $step' USR1
  trap 'interrupted=1 cancelled=1; [ "$1" = srun ] || kill -TERM $step' TERM # steps get it from Slurm
  until # bash runs a trap while it waits, and then returns from it
    interrupted=
    wait $step
    code=$?
    [ -z "$interrupted" ]
  do :; done
  if [ -z "$cancelled" ] && { [ $code = 138 ] || [ $code = 143 ]; }; then
    scontrol requeue "$SLURM_JOB_ID" || fail "job $SLURM_JOB_ID was stopped, but is not queued again: sbatch it again"
  fi
  exit $code
}
