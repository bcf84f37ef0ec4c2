#!/usr/bin/env bash
# Train LeNet on MNIST with PaddlePaddle on N ranks:  bash scripts/run_lenet_paddle.sh N [options]   (--help explains)
# paddle.distributed.launch starts the ranks, or train.py itself by paddle.distributed.spawn. Neither ever restarts them.
# It deals out the GPUs that it sees, one a rank.
command=(env CUDA_VISIBLE_DEVICES={gpus} {python} -m paddle.distributed.launch --nnodes={nnodes} --rank={node_rank}
  --nproc_per_node={nproc} --master={master_addr}:{master_port} --host={host} --log_dir={log_dir} {train} {options})
launcher='' previous=''
for word in "$@"; do # of several --launcher the last counts, in either spelling
  case $previous,$word in
  --launcher,*) launcher=$word ;;
  *,--launcher=*) launcher=${word#*=} ;;
  esac
  previous=$word
done
if [ "$launcher" = spawn ]; then command=({python} {train} --nprocs={nproc} {options}); fi
export PYTHONWARNINGS=ignore:"No ccache found":UserWarning  # Paddle's, of no use to who only trains
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" lenet_paddle "${command[@]}" -- "$@"
