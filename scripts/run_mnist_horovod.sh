#!/usr/bin/env bash
# Train a CNN on MNIST with Horovod on N ranks:  bash scripts/run_mnist_horovod.sh N [options]   (--help explains)
# Several machines: HOROVOD_HOSTS=server1:4,server2:4 and N=8 start the ranks of all of them from here, by ssh;
# HOROVOD_HOSTS=slurm and --transport mpi those on the nodes of a Slurm job: mpirun asks Slurm, horovodrun would ssh.
# horovodrun's cache is off because it is a pickle; one machine needs no search for interfaces that it would save.
if [ "${HOROVOD_HOSTS:-}" = slurm ]; then # no rank bound to a core, for which Open MPI 4 and 5 have a name each
  launcher=(env OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none mpirun -np {nproc})
else
  launcher=({python} -m horovod.runner.launch --{transport} -np {nproc} ${HOROVOD_HOSTS:+-H "$HOROVOD_HOSTS"}
    --disable-cache)
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" mnist_horovod "${launcher[@]}" \
  {python} {train} {options} -- "$@"
