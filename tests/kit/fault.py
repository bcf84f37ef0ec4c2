"""Run a script, and send its process a signal at an exact step: fault.py RANK STEP SIGNAL SCRIPT [ARGUMENTS].

The signal arrives between the optimizer's step and `Checkpoints.step`, which then exchanges the stop requests at once.
If RANK is negative, rank 0 sends the signal to its process group.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time

import torch.distributed as dist
from samestep.torch import stops
from samestep.torch.checkpoints import Checkpoints

rank = int(sys.argv[1])
step = int(sys.argv[2])
name = sys.argv[3]
original = Checkpoints.step


def step_with_fault(checkpoints: Checkpoints) -> None:
    if checkpoints.steps == step - 1 and dist.get_rank() == max(0, rank):
        number = getattr(signal, name)
        if rank < 0:
            os.killpg(0, number)
        else:
            os.kill(os.getpid(), number)
        time.sleep(0.2)  # the signal thread needs time
    original(checkpoints)


Checkpoints.step = step_with_fault  # type: ignore[assignment,method-assign]
stops.MAX_STEPS = 1
sys.argv[:] = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
