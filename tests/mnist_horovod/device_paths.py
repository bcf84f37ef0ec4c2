"""List every device path of mnist_horovod and how it is tested; docs/device_paths.py makes docs/devices.md."""

APP = "tests/mnist_horovod/test_mnist_horovod.py"
MPI = "tests/mnist_horovod_mpi/test_mpi.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    ("cpu", "gloo", "horovodrun --gloo", "run", "tests/common"),
    ("cpu", "gloo", "one process, no launcher", "run", f"{APP}::test_plain_python_trains_in_one_process"),
    (
        "cpu",
        "MPI (Open MPI 5)",
        "horovodrun --mpi, bare mpirun",
        "run",
        f"{MPI}::test_a_killed_rank_ends_mpirun_and_the_next_start_resumes",
    ),
    (
        "cpu",
        "MPI (MPICH 5)",
        "horovodrun --mpi, bare mpirun; opt-in",
        "run",
        f"{MPI}::test_a_killed_rank_ends_mpirun_and_the_next_start_resumes",
    ),
    ("cpu", "gloo", "HOROVOD_HOSTS on one machine", "run", f"{APP}::test_gradients_may_be_sent_in_half_precision"),
    (
        "cpu",
        "gloo",
        "two machines (network namespaces) by ssh",
        "run",
        "tests/multihost/test_multihost.py::test_horovod_starts_both_hosts_from_one_by_ssh",
    ),
    ("cpu", "MPI", "several machines by ssh", "read", "horovod/runner/mpi_run.py of Horovod 0.28.1"),
    (
        "cuda",
        "-",
        "--device auto with GPUs and a Horovod without CUDA",
        "simulated",
        f"{APP}::test_gpus_that_this_horovod_cannot_use_are_left_alone",
    ),
    (
        "cuda",
        "-",
        "--device cuda with GPUs and a Horovod without CUDA",
        "simulated",
        f"{APP}::test_cuda_without_a_horovod_that_has_it_is_one_line",
    ),
    (
        "cuda",
        "NCCL",
        "which GPU a rank takes: 0, 1 and 4 GPUs, 1 to 4 ranks, a Horovod with and without CUDA",
        "simulated",
        "tests/mnist_horovod/test_device.py::test_a_rank_takes_a_gpu_that_horovod_can_use_or_none",
    ),
    ("cuda", "NCCL", "building it: done by hand, see the app's README", "read", "CMakeLists.txt of Horovod 0.28.1"),
    (
        "cuda",
        "NCCL",
        "a training step",
        "read",
        "horovod/torch/mpi_ops.py, ops/nccl_operations.cc of Horovod 0.28.1",
    ),
]
