"""Read run dirs: report pages, a terminal view, trackers, hang reports, and replays of recorded steps.

Ranks do not import this package. The package reads the run dirs of running, finished and failed runs.
"""
