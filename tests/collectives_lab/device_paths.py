"""List every device path of collectives_lab and how it is tested; docs/device_paths.py makes docs/devices.md."""

CLOCKS = "tests/collectives_lab/test_collectives_lab.py::test_on_a_gpu_every_timestamp_waits_for_the_device"
PATHS = [
    # Columns: device, transport, launcher or part of the program, how it is tested, its test or source.
    ("cpu", "gloo", "torchrun, by the launch script", "run", "tests/collectives_lab"),
    ("cpu", "gloo", "bare ranks by RANK and WORLD_SIZE", "run", "tests/collectives_lab"),
    (
        "cpu",
        "gloo",
        "torch.distributed.launch, with --local-rank",
        "run",
        "tests/collectives_lab/test_collectives_lab.py::test_every_launcher_does_the_same_job_and_reports_a_death",
    ),
    (
        "cpu",
        "gloo",
        "multiprocessing.spawn and Process",
        "run",
        "tests/collectives_lab/test_collectives_lab.py::test_every_launcher_does_the_same_job_and_reports_a_death",
    ),
    (
        "cpu",
        "none",
        "DataParallel",
        "run",
        "tests/collectives_lab/test_collectives_lab.py::test_every_launcher_does_the_same_job_and_reports_a_death",
    ),
    ("cuda", "NCCL", "--device, GPUs against ranks", "simulated", CLOCKS),
    ("cuda", "NCCL", "timestamps wait for the stream", "simulated", CLOCKS),
    (
        *("cuda", "NCCL", "1 to 3 ranks on one GPU: primitives, every collective and operator", "proof"),
        "collectives",
    ),
    (
        "cuda",
        "NCCL",
        "several GPUs: collectives, operators, strategies",
        "read",
        "torch/distributed/distributed_c10d.py of torch 2.13.0",
    ),
    (
        "cuda",
        "none",
        "DataParallel on several GPUs, and its memory",
        "read",
        "torch/nn/parallel/data_parallel.py of torch 2.13.0",
    ),
]
