"""Write the initial weights of the loops in this folder to a file for cifar_ddp's --init-from.

The command is ``python benchmarks/elsewhere/initial_weights.py SEED DTYPE FILE.safetensors``.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from setting import Net

seed, dtype, path = sys.argv[1:]
torch.manual_seed(int(seed))  # Accelerate's set_seed and Lightning's seed_everything make the same call
save_file(Net(plain=False).to(getattr(torch, dtype)).state_dict(), path)
