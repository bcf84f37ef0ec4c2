"""Check how a training script that this project did not write survives faults: the command ``samestep check``."""
