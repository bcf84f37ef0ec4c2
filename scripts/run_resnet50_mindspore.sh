#!/usr/bin/env bash
# Train ResNet on CIFAR-10 with MindSpore on N ranks:  bash scripts/run_resnet50_mindspore.sh N [options]   (--help explains)
# msrun starts the ranks, and train.py once more as their scheduler. It shows no worker's log, because no worker has the
# number {nproc}. With a rank table, each_device.py starts one rank for each device of this machine in the table.
scripts=$(dirname "$(readlink -f "${BASH_SOURCE[0]}" 2>/dev/null || echo "${BASH_SOURCE[0]}")") # also by a link
export GLOG_v=${GLOG_v:-3} # 3: log errors only, because at lower levels MindSpore logs every connection
if [ -n "${RANK_TABLE_FILE:-}${MINDSPORE_HCCL_CONFIG_PATH:-}" ]; then
  launcher=({python} {app}/each_device.py {nproc} {train} {options})
else
  launcher=({python} -m mindspore.parallel.cluster.run --join=True --tail_worker_log={nproc}
    --worker_num={world_size} --local_worker_num={nproc} --node_rank={node_rank} --master_addr={master_addr}
    --master_port={master_port} --log_dir={log_dir} {train} {options})
fi
exec bash "$scripts/launch.sh" resnet50_mindspore "${launcher[@]}" -- "$@"
