"""Test a large token file: a start at a late step needs little memory, because no process stores the sample order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kit_programs import LIMIT, environment

PROGRAM = """
import json
import os
import sys

import numpy as np
import torch
import torch.utils.data
from samestep.torch import DataLoader, GlobalBatchSampler

LENGTH = 1024

def anonymous(pid):
    lines = dict(line.split(":") for line in open(f"/proc/{pid}/status") if line.startswith("RssAnon"))
    return int(lines["RssAnon"].split()[0]) / 1024

class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.data = np.memmap(sys.argv[1], np.uint16, "r")

    def __len__(self):
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, i):
        row = self.data[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int64)
        return torch.from_numpy(row)

class Few(Tokens):
    def __len__(self):
        return 2048

def loaded(loader):
    batches = iter(loader)
    first = next(batches)
    for _ in range(5):
        next(batches)
    pids = [os.getpid(), *map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())]
    return first, sorted(map(anonymous, pids))

_, plain = loaded(torch.utils.data.DataLoader(Few(), 32, num_workers=1))
data = Tokens()
sampler = GlobalBatchSampler(len(data), 256, 1, 8, seed=3)
sampler.seek(10**6)
first, ours = loaded(DataLoader(data, batch_sampler=sampler, num_workers=1))
found = {"shape": list(first.shape), "step": sampler.step, "sequences": len(data)}
print(json.dumps({**found, "plain": plain, "ours": ours}))
"""


def test_ten_gigabytes_of_tokens_cost_no_memory(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    with tokens.open("wb") as file:
        file.truncate(10 * 10**9)  # a sparse file
    command = [sys.executable, "-c", PROGRAM, str(tokens)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["shape"], found["step"]) == ([32, 1025], 10**6 + 6)
    assert found["sequences"] > 4 * 10**6
    more = [ours - plain for plain, ours in zip(found["plain"], found["ours"])]
    assert len(more) == 2
    assert max(more) < 50, found  # MB, in the rank and in its worker
