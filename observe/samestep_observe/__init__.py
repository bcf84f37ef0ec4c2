"""Show a run's files: a report page, a terminal view, trackers, and a report of a hang.

No rank imports this package: it reads run dirs, whatever the state of the run.
"""
