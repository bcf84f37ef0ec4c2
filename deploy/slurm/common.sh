# shellcheck shell=bash
# Sourced by the sbatch scripts beside it. docs/slurm.md of Samestep lists what the cluster must allow.

fail() {
  echo "error: $*" >&2
  exit 2
}

CDPATH='' cd -- "$SLURM_SUBMIT_DIR" || fail "there is no $SLURM_SUBMIT_DIR on this node: call sbatch in a folder that all nodes share"
[ -n "$SLURM_NTASKS_PER_NODE" ] || fail "the job has no --ntasks-per-node, the number of ranks on each node: give it"
export SLURM_EXPORT_ENV=ALL # srun hands on what this script exports, also in a job of sbatch --export=NONE

# The launch script of an app on every node of the job, as one task of a step; its arguments are the user's options.
# set_rendezvous goes before.
on_every_node() {
  local app=$1
  shift
  export NNODES=$SLURM_JOB_NUM_NODES
  # A rank's: the one task of a node shares out all of its processors and GPUs.
  unset SLURM_CPUS_PER_TASK SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK
  # shellcheck disable=SC2016  # the node's bash expands it
  # --wait: a node whose script has ended for good ends the others a minute later, and not at once: they may be saving.
  # With ENDS_AFTER=0 they go on.
  save_and_requeue srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --cpu-bind=none \
    --kill-on-bad-exit=0 --wait="${ENDS_AFTER:-60}" bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$0" "$@"' \
    "scripts/run_$app.sh" "$SLURM_NTASKS_PER_NODE" --run-dir="$(run_dir "$app")" "$@"
}

# MASTER_ADDR and MASTER_PORT: where the ranks meet. A requeued job may have other nodes. SAMESTEP_SECRET, which srun hands
# on in the environment, proves the nodes' scripts to each other.
set_rendezvous() {
  local nodes
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol does not tell the nodes of this job"
  export MASTER_ADDR=${nodes%%$'\n'*}
  export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that systems give out
  export SAMESTEP_SECRET=${SAMESTEP_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
}

# Found again by a requeued job, which keeps its number.
run_dir() { echo "$PWD/runs/$1/slurm-$SLURM_JOB_ID"; }

# One job of an array has the array's own number, which scontrol takes for all of its jobs.
requeue() {
  local job=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  scontrol requeue "$job" || fail "job $job was stopped, but is not queued again: sbatch it again"
}

# Run a command, and end as it does. USR1, which comes before the time is over and at preemption, is passed on to it: the
# ranks save a step. A job that was stopped so, or by the TERM that its steps alone get when they are preempted, is
# queued again: Slurm does that itself only to one that outlives its GraceTime. scancel sends TERM here as well.
save_and_requeue() {
  local step code interrupted cancelled=
  "$@" &
  step=$!
  trap 'interrupted=1; kill -USR1 $step; trap "" USR1' USR1 # once: a second one would end the ranks at once
  trap 'interrupted=1 cancelled=1; [ "$1" = srun ] || kill -TERM $step' TERM # srun's tasks have got it from Slurm
  until # bash runs a trap while it waits, and then returns from it
    interrupted=
    wait $step
    code=$?
    [ -z "$interrupted" ]
  do :; done
  if [ -z "$cancelled" ] && { [ $code = 138 ] || [ $code = 143 ]; }; then
    requeue
  fi
  exit $code
}
