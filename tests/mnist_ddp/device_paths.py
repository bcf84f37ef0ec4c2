"""List every device path of mnist_ddp and how it is tested; docs/device_paths.py makes docs/devices.md."""

TORCHRUN = "tests/common/test_torchrun.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    ("cpu", "gloo", "the launch script (torchrun), 1 to 4 ranks", "run", "tests/common"),
    ("cpu", "gloo", "torchrun alone", "run", f"{TORCHRUN}::test_torchrun_alone_takes_the_same_steps_and_restarts"),
    (
        *("cpu", "gloo", "torch.distributed.launch, --local-rank", "run"),
        f"{TORCHRUN}::test_torch_distributed_launch_alone_takes_the_same_steps",
    ),
    (
        "cpu",
        "gloo",
        "RANK and WORLD_SIZE by hand",
        "run",
        f"{TORCHRUN}::test_two_processes_with_rank_and_world_size_train_together",
    ),
    ("cpu", "gloo", "one process, no launcher", "run", f"{TORCHRUN}::test_plain_python_trains_in_one_process"),
    (
        *("cpu", "gloo", "two launch scripts, as on two machines, on one", "run"),
        f"{TORCHRUN}::test_two_machines_without_a_shared_disk_recover_together",
    ),
    (
        *("cuda", "NCCL", "which GPU a rank takes: 0, 1 and 4 GPUs, 1 to 4 ranks, --device auto and cuda", "simulated"),
        "tests/mnist_ddp/test_device.py::test_a_rank_takes_a_gpu_of_its_own_or_none",
    ),
    (
        *("cuda", "NCCL", "batch, step and evaluation stay on the device", "simulated"),
        "tests/mnist_ddp/test_device.py::test_a_step_and_an_evaluation_stay_on_the_device",
    ),
    ("cuda", "NCCL and gloo", "one rank: first losses as on the CPU", "proof", "losses"),
    ("cuda", "NCCL", "1 to 3 ranks on one GPU: a kill, a restart, a stop, equal bits", "proof", "killed; stopped"),
    ("cuda", "NCCL", "1 to 4 ranks on one GPU: equal bits by --virtual-ranks, also after a kill", "proof", "bits"),
    ("cuda", "NCCL", "1 to 3 ranks on one GPU: equal losses in float64", "proof", "same step"),
    ("cuda", "NCCL", "2 and 3 ranks on one GPU: the report of a hang", "proof", "hang"),
    (
        *("cuda", "NCCL", "--share-gpu: NCCL's variables by its version, and errors", "simulated"),
        "tests/mnist_ddp/test_device.py::test_the_variables_of_ranks_that_share_a_gpu_follow_the_version_of_nccl",
    ),
    ("cuda", "NCCL", "one rank: 99% of MNIST's test set", "proof", "accuracy"),
    (
        "cuda",
        "NCCL",
        "several GPUs: DistributedDataParallel(device_ids=[...])",
        "read",
        "torch/nn/parallel/distributed.py of torch 2.13.0",
    ),
    (
        *("cuda", "NCCL", "several GPUs: rendezvous, all_reduce, broadcast and all_gather of GPU tensors", "read"),
        "torch/distributed/distributed_c10d.py of torch 2.13.0",
    ),
    (
        *("cuda", "NCCL", "--backend, and the names of GPUs and versions on the console", "simulated"),
        "tests/mnist_ddp/test_device.py::test_a_run_names_its_gpus_and_their_libraries",
    ),
    (
        *(
            "cuda",
            "gloo",
            "several ranks, --backend gloo: DistributedDataParallel, gather and broadcast of GPU tensors",
            "read",
        ),
        "AsyncGatherCUDAWork and others in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
    ),
]
