#!/usr/bin/env bash
# Train a CNN on MNIST with Horovod on N ranks:  bash scripts/run_mnist_horovod.sh N [options]   (--help explains)
# On several machines, HOROVOD_HOSTS=server1:4,server2:4 and N=8 start all ranks from here by ssh. In a Slurm job,
# HOROVOD_HOSTS=slurm and --transport mpi start the ranks by mpirun, which uses Slurm. horovodrun would use ssh.
# horovodrun's cache is off, because it is a pickle file. It would only save a search for network interfaces.
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
if [ "${HOROVOD_HOSTS:-}" = slurm ]; then # do not bind ranks to cores; Open MPI 4 and 5 use different names
  launcher=(env OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none mpirun -np {nproc})
else
  launcher=({python} -m horovod.runner.launch --{transport} -np {nproc} ${HOROVOD_HOSTS:+-H "$HOROVOD_HOSTS"}
    --disable-cache)
fi
exec bash "$scripts/launch.sh" mnist_horovod "${launcher[@]}" \
  {python} {train} {options} -- "$@"
