"""Train a linear classifier of digits with a `Run`: samestep run -n 2 own_loop_run.py --max-steps 200."""

import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from samestep import env, log
from samestep.data import datasets
from samestep.options import Parser, add_common
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharding import GlobalBatches
from samestep.torch import distributed, weights


def main() -> None:
    parser = Parser(description="Train a linear classifier of digits.")
    add_common(parser, epochs=10, global_batch_size=100, lr="0.1", datasets=["mnist-5k"], devices=["cpu"])
    parser.set_defaults(lr=0.1, dtype="float32")
    options = parser.parse(sys.argv[1:])
    run = Run("own_loop_run", options, env.detect(), Watchdog(), datasets.resolve)
    distributed.rendezvous(run.world, torch.device("cpu"), options.timeout)  # collective
    model = torch.nn.Linear(784, 10)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    parts = Parts(load=partial(weights.load, model, optimizer), groups=partial(weights.groups, model, optimizer))
    run.restore(distributed, parts)  # collective: rank 0 reads

    digits = datasets.load(options.dataset, options.data_dir)
    images, labels = torch.tensor(digits.train_images).flatten(1) / 255, torch.tensor(digits.train_labels).long()
    rank, world_size = run.world.rank, run.world.world_size
    batches = GlobalBatches(len(labels), options.global_batch_size, options.seed, rank, world_size)
    run.start(batches, len(digits.test_labels), "a linear model", "cpu", {"torch": torch.__version__})
    for step in range(run.first_step, run.last_step):
        local = torch.from_numpy(batches.indices(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[local]), labels[local], reduction="sum")
        (loss / batches.size(step)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # collective: sum the shards' parts of the mean
        optimizer.step()
        actions = run.after_step(loss.item())
        if actions.sync:
            actions = run.sync()  # collective: losses, stop requests, phase times
        if actions.log:
            run.log_metrics({})
        if actions.save:  # also after a stop request; save() then raises Stopped
            run.save()  # collective: compare replicas; rank 0 writes
    with torch.inference_mode():
        scores = model(torch.tensor(digits.test_images).flatten(1) / 255)
    correct = (scores.argmax(dim=1) == torch.tensor(digits.test_labels)).sum().item()
    result = {"test_accuracy": correct / len(scores), "test_examples": len(scores)}
    run.finish(result)  # collective: compare replicas; rank 0 writes
    run.report("torch", torch.__version__, "gloo", "cpu")


log.run(main)
