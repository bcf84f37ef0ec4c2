"""List every device path of resnet50_mindspore and how it is tested; docs/device_paths.py makes docs/devices.md."""

OWN = "tests/resnet50_mindspore/test_resnet50_mindspore.py"
EACH = "tests/resnet50_mindspore/test_each_device.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    ("cpu", "mccl", "the launch script (msrun), 1 to 4 ranks", "run", "tests/common"),
    ("cpu", "mccl", "msrun alone", "run", f"{OWN}::test_msrun_alone_takes_the_same_steps"),
    (
        *("cpu", "mccl", "ResNet-50's losses and weights beside cifar_ddp's", "run"),
        "tests/conformance/test_mindspore_and_torch.py::test_mindspore_and_torch_have_the_same_losses_and_evaluate_each_others_weights",
    ),
    (
        *("cpu", "mccl", "ResNet-50 at 32 and 224 pixels: torchvision's logits, and its step (soak)", "run"),
        "tests/resnet50_mindspore/test_depth_50.py::test_it_is_torchvisions_resnet50",
    ),
    (
        *("cpu", "mccl", "one process, no launcher", "run"),
        f"{EACH}::test_a_rehearsal_on_cpu_takes_the_steps_of_one_process",
    ),
    ("ascend", "HCCL", "which device: the driver's file decides", "simulated", f"{OWN}::test_ascends_driver_decides"),
    (
        *("ascend", "HCCL", "each rank its card, rendezvous by msrun and by rank table", "simulated"),
        f"{OWN}::test_on_ascend_a_rank_takes_its_card",
    ),
    (
        *("ascend", "HCCL", "one process a device with a rank table: what each finds in its environment", "simulated"),
        f"{EACH}::test_each_rank_gets_what_the_table_lists",
    ),
    (
        *("ascend", "HCCL", "the launch script with a rank table, on one server or several", "simulated"),
        f"{EACH}::test_the_launch_script_needs_the_table_alone",
    ),
    (
        *("ascend", "HCCL", "rank tables are as Ascend's documents have them", "simulated"),
        "tests/resnet50_mindspore/test_rank_table.py::test_what_make_writes_check_accepts",
    ),
    (
        *("cpu", "mccl", "a rehearsal: one process a device with a rank table, and a restart", "run"),
        f"{EACH}::test_a_rehearsal_on_cpu_takes_the_steps_of_one_process",
    ),
    (
        *("ascend", "HCCL", "--parallel semi-auto and auto: how AutoParallel is called", "simulated"),
        f"{OWN}::test_the_parallel_modes_are_mindspores_own",
    ),
    (
        *("ascend", "HCCL", "--parallel semi-auto and auto: cut weights are gathered", "simulated"),
        f"{OWN}::test_weights_that_mindspore_has_cut_are_gathered",
    ),
    (
        *("ascend", "HCCL", "time limits of MindSpore and HCCL behind --first-step-timeout", "simulated"),
        f"{OWN}::test_neither_mindspore_nor_hccl_ends_a_rank_that_compiles",
    ),
    ("cpu", "mccl", "loops of --sink-size, --api highlevel", "run", f"{OWN}::test_both_apis_take_the_same_steps"),
    ("ascend", "HCCL", "--api highlevel: how Model sinks", "simulated", f"{OWN}::test_model_sinks_loops_of_updates"),
    (
        "ascend",
        "HCCL",
        "data_sink, except the device's queue",
        "simulated",
        f"{OWN}::test_an_images_crop_and_flip_depend_on_seed_epoch_and_sample_alone",
    ),
    ("ascend", "HCCL", "--api highlevel with sinking", "read", "mindspore/train/model.py of MindSpore 2.10.0"),
    ("ascend", "HCCL", "a training step, data sinking", "read", "mindspore/train/data_sink.py of MindSpore 2.10.0"),
    (
        *("ascend", "HCCL", "--parallel semi-auto and auto: a training step", "read"),
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
