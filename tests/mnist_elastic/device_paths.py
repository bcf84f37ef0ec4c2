"""List every device path of mnist_elastic and how it is tested; docs/device_paths.py makes docs/devices.md."""

TESTS = "tests/mnist_elastic/test_mnist_elastic.py"
PATHS = [
    # Columns: device, transport, launcher or part, how it is tested, the test.
    (
        *("cpu", "gloo", "the launch script, 4 ranks that are killed and come back", "run"),
        f"{TESTS}::test_four_ranks_of_which_some_are_killed_end_with_the_bits_of_one",
    ),
    (
        *("cpu", "gloo", "join.py, and TERM to a rank", "run"),
        f"{TESTS}::test_ranks_are_added_taken_out_stopped_and_all_killed_and_the_job_too",
    ),
    ("cuda", "gloo", "3 ranks on one GPU, of which one is killed and comes back", "proof", "elastic"),
]
