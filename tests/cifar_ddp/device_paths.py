"""List every device path of cifar_ddp and how it is tested; docs/device_paths.py makes docs/devices.md."""

OWN = "tests/cifar_ddp/test_cifar_ddp.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    ("cpu", "gloo", "the launch script (torchrun), 1 to 4 ranks", "run", "tests/common"),
    (
        *("cpu", "gloo", "batch normalisation over the global batch", "run"),
        f"{OWN}::test_everything_on_is_the_same_step_at_any_number_of_ranks",
    ),
    (
        *("cuda", "NCCL", "which GPU a rank takes (samestep.torch.distributed)", "simulated"),
        "tests/mnist_ddp/test_device.py::test_a_rank_takes_a_gpu_of_its_own_or_none",
    ),
    (
        *("cuda", "NCCL", "placement of a step, an evaluation and the average, by torch's device meta", "simulated"),
        "tests/cifar_ddp/test_device.py::test_a_step_an_evaluation_and_the_average_stay_on_the_device",
    ),
    (
        *("cuda", "NCCL", "one rank: first losses as on the CPU, in float32, bfloat16 and with --compile", "proof"),
        "losses",
    ),
    ("cuda", "NCCL", "one rank: a kill, a restart, a stop, a resume, equal bits", "proof", "recovery"),
    ("cuda", "NCCL", "1 to 4 ranks on one GPU: equal bits by --virtual-ranks, also after a kill", "proof", "bits"),
    ("cuda", "NCCL", "1 to 3 ranks on one GPU: equal losses in float64", "proof", "same step"),
    ("cuda", "NCCL", "one rank, eager, --compile, CUDA graphs: equal bits after a kill", "proof", "speed"),
    (
        *("cuda", "NCCL", "several GPUs: DistributedDataParallel(device_ids=[...]), all-reduce in backward", "read"),
        "torch/nn/parallel/distributed.py of torch 2.13.0",
    ),
]
