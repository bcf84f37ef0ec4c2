#!/usr/bin/env bash
# Train a CNN on MNIST with Horovod on N ranks:  bash scripts/run_mnist_horovod.sh N [options]   (--help explains)
# Several machines: HOROVOD_HOSTS=server1:4,server2:4 and N=8 start the ranks of all of them from here, by ssh.
# horovodrun's cache is off because it is a pickle; one machine needs no search for interfaces that it would save.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launcher/launch.sh" mnist_horovod \
  {python} -m horovod.runner.launch --{transport} -np {nproc} ${HOROVOD_HOSTS:+-H "$HOROVOD_HOSTS"} --disable-cache \
  {python} {train} {options} -- "$@"
