"""List every device path of mnist_lightning and how it is tested; docs/device_paths.py makes docs/devices.md."""

TORCHRUN = "tests/common/test_torchrun.py"
OWN = "tests/mnist_lightning/test_mnist_lightning.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    ("cpu", "gloo", "the launch script (torchrun), 1 to 4 ranks", "run", "tests/common"),
    ("cpu", "gloo", "torchrun alone", "run", f"{TORCHRUN}::test_torchrun_alone_takes_the_same_steps_and_restarts"),
    (
        "cpu",
        "gloo",
        "RANK and WORLD_SIZE by hand",
        "run",
        f"{TORCHRUN}::test_two_processes_with_rank_and_world_size_train_together",
    ),
    ("cpu", "gloo", "one process, no launcher", "run", f"{OWN}::test_plain_python_trains_in_one_process"),
    (
        *("cuda", "NCCL", "which GPU a rank takes (samestep.torch.distributed)", "simulated"),
        "tests/mnist_ddp/test_device.py::test_a_rank_takes_a_gpu_of_its_own_or_none",
    ),
    (
        *("cuda", "NCCL", "the Trainer takes the same GPU, on one machine and on two", "simulated"),
        f"{OWN}::test_lightning_takes_the_gpu_that_the_rank_chose",
    ),
    ("cuda", "NCCL", "one rank: first losses as on the CPU", "proof", "losses"),
    ("cuda", "NCCL", "2 ranks on one GPU: a kill, a restart, a stop, a resume, equal bits", "proof", "recovery"),
    (
        *("cuda", "NCCL", "several GPUs: fit and validate with CUDAAccelerator and DDPStrategy", "read"),
        "pytorch_lightning/strategies/ddp.py of pytorch-lightning 2.6.6",
    ),
]
