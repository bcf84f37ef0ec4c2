"""Train with Hugging Face Accelerate, as its guides recommend. torchrun starts this program.

The loop comes from Accelerate's guide "Performing gradient accumulation". The length of the schedule comes from
Accelerate's examples/by_feature/gradient_accumulation.py, and the evaluation comes from examples/cv_example.py. The
batch size of a rank follows the guide "Comparing performance between different device setups".
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from setting import Cifar, Net, Record, arguments
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader


def main() -> None:
    options = arguments()
    loading = DataLoaderConfiguration(split_batches=options.switches, use_seedable_sampler=options.switches)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate, dataloader_config=loading)
    set_seed(options.seed)
    # If split_batches is set, Accelerate splits a loader's batch over the ranks. Otherwise, each rank gets a batch of
    # this size.
    batch_size = options.batch // options.accumulate // (1 if options.switches else accelerator.num_processes)
    train_dataloader = DataLoader(Cifar(True, not options.plain), batch_size, shuffle=True)
    eval_dataloader = DataLoader(Cifar(False, False), batch_size)
    set_seed(options.seed)
    model = Net(options.plain).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = CosineAnnealingLR(optimizer, len(train_dataloader) * options.epochs // options.accumulate)
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )

    record = Record()
    update = 0
    for _ in range(options.epochs):
        model.train()
        for images, labels, indices in train_dataloader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
                record.add(update, indices, loss, scheduler.get_last_lr()[0])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    update += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    correct = examples = 0
    for images, labels, _ in eval_dataloader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, labels))
        correct += int((predictions == references).sum())
        examples += len(references)
    record.write(options.out, accelerator.process_index, correct / examples, examples)
    accelerator.wait_for_everyone()  # an early exit of one rank would cause errors on the ranks that still communicate


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may abort a normal exit
