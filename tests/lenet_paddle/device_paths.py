"""Every device path of lenet_paddle, and how it is shown; docs/device_paths.py makes docs/devices.md of it."""

TESTS = "tests/lenet_paddle/test_lenet_paddle.py"
PATHS = [
    # device, transport, by what it is started or which part, how it is shown, by what
    ("cpu", "gloo", "the launch script: paddle.distributed.launch", "run", "tests/common"),
    ("cpu", "gloo", "the launch script: --launcher spawn", "run", f"{TESTS}::test_a_killed_rank_changes_nothing"),
    (
        "cpu",
        "gloo",
        "--api basic, fleet and highlevel, at 1 to 3 ranks",
        "run",
        f"{TESTS}::test_all_apis_and_launchers_take_the_same_steps",
    ),
    (
        "cpu",
        "gloo",
        "paddle.distributed.launch and fleetrun alone",
        "run",
        f"{TESTS}::test_paddles_launchers_alone_take_the_same_steps",
    ),
    (
        "cpu",
        "gloo",
        "paddle.distributed.launch --ips, two addresses",
        "run",
        f"{TESTS}::test_two_addresses_take_the_same_steps",
    ),
    (
        "cpu",
        "gloo",
        "paddle.distributed.spawn alone, on all processors",
        "run",
        f"{TESTS}::test_spawn_alone_takes_the_processors_that_it_may_use",
    ),
    ("cpu", "gloo", "RANK and WORLD_SIZE, with --api fleet", "run", f"{TESTS}::test_plain_rank_and_world_size"),
    (
        "gpu",
        "NCCL",
        "the package paddlepaddle-gpu, without the CPU one",
        "simulated",
        f"{TESTS}::test_the_gpu_wheel_needs_no_cpu_wheel_beside_it",
    ),
    (
        "gpu",
        "NCCL",
        "--gpus and CUDA_VISIBLE_DEVICES, N against them",
        "simulated",
        f"{TESTS}::test_gpus_that_do_not_suit_n_are_one_line_before_anything_starts",
    ),
    (
        "gpu",
        "NCCL",
        "each rank's GPU, by paddle.distributed.launch and by torchrun's variables",
        "simulated",
        f"{TESTS}::test_each_rank_gets_its_own_gpu_from_any_launcher",
    ),
    (
        "gpu",
        "NCCL",
        "paddle.distributed.spawn: ranks, backend and GPUs",
        "simulated",
        f"{TESTS}::test_spawn_takes_each_visible_gpu",
    ),
    (
        "gpu",
        "NCCL",
        "rendezvous (init_parallel_env, fleet.init)",
        "read",
        "paddle/distributed/parallel.py of Paddle 3.3.1",
    ),
    ("gpu", "NCCL", "paddle.Model's fit and evaluate", "read", "paddle/hapi/model.py of Paddle 3.3.1"),
    (
        "gpu",
        "NCCL",
        "a batch from uint8 images",
        "read",
        "paddle/phi/kernels/gpu/gather_kernel.cu of Paddle's repository",
    ),
    (
        "gpu",
        "NCCL",
        "optimizer state between device and host",
        "read",
        "paddle/optimizer/optimizer.py and adam.py of Paddle 3.3.1",
    ),
    (
        "gpu",
        "NCCL",
        "broadcast, all_gather, all_reduce",
        "read",
        "paddle/distributed/communication/stream of Paddle 3.3.1",
    ),
]
