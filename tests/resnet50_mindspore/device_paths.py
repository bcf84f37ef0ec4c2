"""Every device path of resnet50_mindspore, and how it is shown; docs/device_paths.py makes docs/devices.md of it."""

OWN = "tests/resnet50_mindspore/test_resnet50_mindspore.py"
PATHS = [
    # device, transport, by what it is started or which part, how it is shown, by what
    ("cpu", "mccl", "the launch script (msrun), 1 to 4 ranks", "run", "tests/common"),
    ("cpu", "mccl", "msrun alone", "run", f"{OWN}::test_msrun_alone_takes_the_same_steps"),
    (
        *("cpu", "mccl", "ResNet-50 at 32 and 224 pixels: torchvision's logits, and its step", "run"),
        "tests/resnet50_mindspore/test_depth_50.py::test_it_is_torchvisions_resnet50",
    ),
    ("cpu", "mccl", "one process, no launcher", "run", f"{OWN}::test_one_process_by_plain_python"),
    ("ascend", "HCCL", "which device: the driver's file decides", "simulated", f"{OWN}::test_ascends_driver_decides"),
    (
        *("ascend", "HCCL", "each rank its card, sinking, rendezvous by msrun and by rank table", "simulated"),
        f"{OWN}::test_on_ascend_a_rank_takes_its_card_and_sinks",
    ),
    (
        "ascend",
        "HCCL",
        "one process a device with a rank table",
        "simulated",
        f"{OWN}::test_each_device_has_its_folder",
    ),
    (
        *("ascend", "HCCL", "rank tables are as Ascend's documents have them", "simulated"),
        "tests/resnet50_mindspore/test_rank_table.py::test_what_make_writes_check_accepts",
    ),
    (
        "ascend",
        "HCCL",
        "--parallel auto, semi-auto: the mode that is set",
        "simulated",
        f"{OWN}::test_parallel_is_what_mindspore_calls_it",
    ),
    ("ascend", "HCCL", "a training step, data sinking", "read", "mindspore/train/data_sink.py of MindSpore 2.10.0"),
    (
        *("ascend", "HCCL", "--parallel auto, semi-auto: a training step", "read"),
        "mindspore/parallel/auto_parallel.py of MindSpore 2.10.0",
    ),
    (
        "ascend",
        "HCCL",
        "Broadcast and AllGather of int32",
        "read",
        "mindspore/ops/operations/comm_ops.py of MindSpore 2.10.0",
    ),
]
