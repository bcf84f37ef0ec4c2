"""What distributed-training programs need and frameworks leave out.

Modules: ``env`` (who am I?), ``sharding`` (which samples?), ``datasets`` (where are the bytes?), ``log`` (what
happened?), ``checkpoint`` (what survives?), ``watchdog`` (is everyone alive?), ``options`` (the options every app
shares), and what every launch script shares: ``launch`` (what is decided before the ranks start?), ``venvs`` (which
Python?) and ``supervise`` (how does a job begin and end?). No module imports a training framework.
"""

__version__ = "0.1.0"


class UserError(Exception):
    """The caller's mistake: one line that names the thing and the remedy. Programs exit with 2."""


class FatalError(Exception):
    """A failure that starting the job again cannot mend (a full disk, no good checkpoint). Programs exit with 1."""
