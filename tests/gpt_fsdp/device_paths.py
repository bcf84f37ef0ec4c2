"""List every device path of gpt_fsdp and how it is tested; docs/device_paths.py makes docs/devices.md."""

OWN = "tests/gpt_fsdp/test_gpt_fsdp.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    ("cpu", "gloo", "the launch script (torchrun), 1 to 4 ranks", "run", "tests/common"),
    (
        *("cpu", "gloo", "meshes of FSDP2 and tensor parallelism, beside a plain loop", "run"),
        f"{OWN}::test_the_steps_are_those_of_a_plain_loop_at_any_mesh",
    ),
    (
        "cpu",
        "gloo",
        "sharded checkpoints, read at another mesh",
        "run",
        f"{OWN}::test_the_steps_are_those_of_a_plain_loop_at_any_mesh",
    ),
    (
        *("cuda", "NCCL", "which GPU a rank takes (samestep.torch.distributed)", "simulated"),
        "tests/mnist_ddp/test_device.py::test_a_rank_takes_a_gpu_of_its_own_or_none",
    ),
    (
        *(
            "cuda",
            "NCCL",
            "placement of a step, an evaluation and a restored state, by torch's device meta",
            "simulated",
        ),
        "tests/gpt_fsdp/test_device.py::test_a_step_an_evaluation_and_a_restored_state_stay_on_the_device",
    ),
    ("cuda", "NCCL", "one rank: first losses as on the CPU, in float32 and bfloat16", "proof", "losses"),
    ("cuda", "NCCL", "one rank: a kill, a restart, a stop, a resume, equal bits", "proof", "recovery"),
    ("cuda", "NCCL", "four meshes on one GPU, and a checkpoint that another mesh resumes", "proof", "sharded"),
    (
        *("cuda", "NCCL", "fully_shard and DTensor on several GPUs; checkpoints of what is copied from a GPU", "read"),
        "torch/distributed/fsdp/_fully_shard of torch 2.13.0",
    ),
]
