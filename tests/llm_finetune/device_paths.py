"""List every device path of llm_finetune and how it is tested; docs/device_paths.py makes docs/devices.md."""

OWN = "tests/llm_finetune/test_llm_finetune.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    ("cpu", "gloo", "the launch script (torchrun), 1 to 4 ranks", "run", "tests/common"),
    (
        *("cpu", "gloo", "losses over target tokens, beside a plain loop", "run"),
        f"{OWN}::test_the_steps_are_those_of_a_plain_loop",
    ),
    (
        *("cuda", "NCCL", "which GPU a rank takes (samestep.torch.distributed)", "simulated"),
        "tests/mnist_ddp/test_device.py::test_a_rank_takes_a_gpu_of_its_own_or_none",
    ),
    (
        *("cuda", "NCCL", "placement of a step and an evaluation, by torch's device meta", "simulated"),
        "tests/llm_finetune/test_device.py::test_a_step_and_an_evaluation_stay_on_the_device",
    ),
    (
        *("cuda", "NCCL", "1 to 4 ranks on one GPU: equal bits by --virtual-ranks, losses and tokens in bfloat16"),
        *("proof", "finetune"),
    ),
    (
        *("cuda", "NCCL", "several GPUs: DistributedDataParallel(device_ids=[...]), all-reduce in backward", "read"),
        "torch/nn/parallel/distributed.py of torch 2.13.0",
    ),
]
