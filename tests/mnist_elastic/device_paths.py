"""Every device path of mnist_elastic, and how it is shown; docs/device_paths.py makes docs/devices.md."""

TESTS = "tests/mnist_elastic/test_mnist_elastic.py"
PATHS = [
    # device, transport, launcher or part, how it is tested, the test
    (
        *("cpu", "gloo", "the launch script, 4 ranks that are killed and come back", "run"),
        f"{TESTS}::test_four_ranks_of_which_some_are_killed_end_with_the_bits_of_one",
    ),
    (
        *("cpu", "gloo", "join.py, and TERM to a rank", "run"),
        f"{TESTS}::test_a_job_that_grows_and_shrinks_by_hand_ends_with_the_same_bits",
    ),
]
