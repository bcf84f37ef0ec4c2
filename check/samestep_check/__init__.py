"""Implement the command ``samestep check``, which tests how a training script of any project survives faults."""
