"""Commands that read run dirs: report, watch, track, hang, replay, diff and verify.

Ranks do not import this package. The package reads the run dirs of running, finished and failed runs.
"""
