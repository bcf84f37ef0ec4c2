#!/usr/bin/env bash
# Train ResNet on CIFAR-10 with MindSpore on N ranks:  bash scripts/run_resnet50_mindspore.sh N [options]   (--help explains)
# msrun starts the ranks, and train.py once more as their scheduler; no worker has the number of which it would show the
# log. With a rank table, Ascend's ranks are started without it: one for each device that it lists for this machine.
scripts=$(dirname "${BASH_SOURCE[0]}")
export GLOG_v=${GLOG_v:-3} # errors; below that MindSpore logs every connection
if [ -n "${RANK_TABLE_FILE:-}${MINDSPORE_HCCL_CONFIG_PATH:-}" ]; then
  launcher=({python} {app}/each_device.py {nproc} {train} {options})
else
  launcher=({python} -m mindspore.parallel.cluster.run --join=True --tail_worker_log={nproc}
    --worker_num={world_size} --local_worker_num={nproc} --node_rank={node_rank} --master_addr={master_addr}
    --master_port={master_port} --log_dir={log_dir} {train} {options})
fi
exec bash "$scripts/launch.sh" resnet50_mindspore "${launcher[@]}" -- "$@"
