"""Provide parts that a distributed-training program needs and that frameworks omit.

Main modules:

* ``run`` manages a run from its restore to its result, and ``rundir`` manages the run's folder.
* ``env`` detects the rank, the world size and the launcher.
* ``options`` parses the command line.
* ``sharding`` computes the sample indices of each rank, and ``schedules`` computes learning-rate factors.
* ``checkpoint``, ``metrics`` and ``log`` write a run's checkpoints, metrics and log files.
* ``stop`` and ``child_signals`` handle stop signals.

Packages that build on these modules:

* ``data``: datasets.
* ``recovery``: watchdog, hang diagnosis, straggler detection, replica check.
* ``sharded``: checkpoints of models that are sharded over the ranks.
* ``torch``: parts for PyTorch training loops, and shared code of PyTorch apps.

Three other packages build on this one: ``samestep_launch`` (launch scripts, ``samestep run``), ``samestep_observe``
(report, watch, trackers) and ``samestep_check`` (``samestep check``).
"""

__version__ = "0.3.0"


class ConfigError(Exception):
    """A mistake of the caller. The message has one line, with the remedy.

    Attributes:
        exit_code: exit code of the program.
    """

    exit_code = 2


class NonRetryableError(Exception):
    """A failure that a restart cannot fix, such as a full disk.

    Attributes:
        exit_code: exit code of the program.
    """

    exit_code = 1


class RetryableError(Exception):
    """A failure that a restart from the last valid checkpoint can fix. The program exits with code 1.

    Attributes:
        repeated: the message to show if the next start fails in the same way.
    """

    def __init__(self, message: str, *, repeated: str = "") -> None:
        super().__init__(message)
        self.repeated = repeated or message


class RemoteRankError(Exception):
    """Another rank has failed, and reports the reason. This rank exits without a message."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"another rank failed with exit code {exit_code}")
        self.exit_code = exit_code
