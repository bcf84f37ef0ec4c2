"""What distributed-training programs need and frameworks leave out.

Modules: ``env`` (who am I?), ``sharding`` (which samples?), ``datasets`` (where are the bytes?), ``run`` (what is due,
and what came of it?), ``rundir`` (whose folder is it?), ``checkpoint`` (what survives?), ``log`` (what happened?),
``watchdog`` (is everyone alive?) and ``options`` (the options every app shares); ``sharded`` is for models that no rank
holds. ``download`` and ``safetensors_writer`` serve ``datasets`` and ``checkpoint``, ``hang`` serves the watchdog;
``autopsy`` and ``track`` are programs: where ranks stood; metrics for trackers. None imports a training framework.
"""

__version__ = "0.1.0"


class UserError(Exception):
    """The caller's mistake: one line that names the thing and the remedy. Programs exit with 2."""


class FatalError(Exception):
    """A failure that starting the job again cannot mend (a full disk, no good checkpoint). Programs exit with 1."""


class RestartError(Exception):
    """A failure that starting the job again, from its last good checkpoint, can mend. Programs exit with 1."""


class RankZeroError(Exception):
    """Rank 0 has failed, or another, for a reason that it tells itself: this rank ends too, silently, with its code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"rank 0 ends with code {exit_code}")
        self.exit_code = exit_code
