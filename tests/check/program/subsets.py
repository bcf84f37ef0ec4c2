"""Read one batch from the same Subset by torch's DataLoader, and by the kit's DataLoader, which wraps the Subset."""

import torch
from samestep.torch import DataLoader, EvalSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset, TensorDataset

dataset = TensorDataset(torch.arange(20))
subset = Subset(Subset(dataset, range(10, 20)), [1, 3, 5, 7])
(values,) = next(iter(TorchDataLoader(subset, batch_size=4)))
(same_values,) = next(iter(DataLoader(subset, batch_sampler=EvalSampler(4, 4, rank=0, world_size=1))))
assert values.tolist() == same_values.tolist() == [11, 13, 15, 17]
