#!/usr/bin/env bash
# Train LeNet on MNIST with PaddlePaddle on N ranks:  bash scripts/run_lenet_paddle.sh N [options]   (--help explains)
# Either paddle.distributed.launch or train.py, by paddle.distributed.spawn, starts the ranks. Neither restarts ranks.
# paddle.distributed.launch gives each rank one of the visible GPUs.
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
command=(env CUDA_VISIBLE_DEVICES={gpus} {python} -m paddle.distributed.launch --nnodes={nnodes} --rank={node_rank}
  --nproc_per_node={nproc} --master={master_addr}:{master_port} --host={host} --log_dir={log_dir} {train} {options})
launcher='' previous=''
for word in "$@"; do # the last --launcher counts, in both spellings
  case $previous,$word in
  --launcher,*) launcher=$word ;;
  *,--launcher=*) launcher=${word#*=} ;;
  esac
  previous=$word
done
if [ "$launcher" = spawn ]; then command=({python} {train} --nprocs={nproc} {options}); fi
export PYTHONWARNINGS=ignore:"No ccache found":UserWarning  # Paddle's warning does not concern training
exec bash "$scripts/launch.sh" lenet_paddle "${command[@]}" -- "$@"
