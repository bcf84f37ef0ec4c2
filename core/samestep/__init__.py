"""Supply what distributed-training programs need and frameworks leave out.

Every rank uses the modules of this level: ``env`` (rank, world size, launcher), ``options``, ``sharding`` (this rank's
samples), ``schedules`` (learning rates), ``run`` and ``rundir`` (the life of one run and its folder), ``checkpoint``,
``log``, ``metrics``, ``stop`` (stop requests), ``step_timer`` and ``monitor``.

The packages beside them build on it: ``data`` (datasets), ``recovery`` (watchdog, hang diagnosis, stragglers, replica
check), ``sharded`` (checkpoints of models that no rank holds), ``torch`` (what PyTorch apps share), ``observe``
(report, watch, trackers) and ``launch`` (launch scripts and ``samestep run``). This module imports nothing.
"""

__version__ = "0.2.0"


class ConfigError(Exception):
    """Report a mistake of the caller in one line that names the thing and the remedy. Programs exit with 2."""


class NonRetryableError(Exception):
    """Report a failure that a restart cannot fix, such as a full disk. Programs exit with 1."""


class RetryableError(Exception):
    """Report a failure that a restart from the last good checkpoint can fix. Programs exit with 1."""


class RemoteRankError(Exception):
    """End this rank silently because another rank failed and reports the reason itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"another rank failed with exit code {exit_code}")
        self.exit_code = exit_code


# The names of samestep 0.1.
UserError, FatalError, RestartError, RankZeroError = ConfigError, NonRetryableError, RetryableError, RemoteRankError
