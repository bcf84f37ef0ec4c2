"""Train on Fashion-MNIST with DDP until a target accuracy, in a baseline loop or with variants of the app's step.

torchrun starts this program for time_to_accuracy.py. The baseline loop has the parts that tutorials use: torchvision's
dataset with per-sample transforms, a DataLoader with workers, DistributedSampler, BatchNorm2d, and Adam at 1e-3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from textbook_net import TextbookVGG
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

AT_ONCE = 5  # steps of a variant that are timed together


def arguments() -> argparse.Namespace:
    """Parse the options that time_to_accuracy.py passes to each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("textbook", "app", "steps"))
    parser.add_argument("--data", type=Path, required=True, help="holds FashionMNIST/raw")
    parser.add_argument("--batch", type=int, required=True, help="samples a step, over all ranks")
    parser.add_argument("--evaluate-every", type=int, required=True, help="steps; and at each epoch's end")
    parser.add_argument("--target", type=float, required=True, help="test accuracy at which to stop")
    parser.add_argument("--max-steps", type=int, required=True, help="where to stop without it")
    parser.add_argument("--max-seconds", type=float, required=True, help="where to stop without it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--augment", action="store_true", help="crop and flip")
    parser.add_argument("--workers", type=int, default=2, help="of each DataLoader")
    parser.add_argument("--rounds", type=int, default=10, help=f"of {AT_ONCE} steps of each variant that is timed")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes what it found, as JSON")
    parser.add_argument("--variants", default="{}", help="JSON: of each variant its name and the app's options")
    return parser.parse_args()


def until_accurate(
    options: argparse.Namespace, steps_per_epoch: int, step: Callable[[int], object], accuracy: Callable[[], float]
) -> list[dict[str, float]]:
    """Train until the target accuracy, and return the step, accuracy and seconds of each evaluation.

    The seconds count from the start of the first step, and include evaluations and the start of a loader's workers.

    Args:
        options: options of this program, such as the target.
        steps_per_epoch: number of steps of an epoch. The model is also evaluated at the end of each epoch.
        step: function that runs the step with the given number, from 0.
        accuracy: function that evaluates the model, and returns the test accuracy from 0 to 1.
    """
    found: list[dict[str, float]] = []
    begun = time.perf_counter()
    for done in range(1, options.max_steps + 1):
        step(done - 1)
        if done % options.evaluate_every and done % steps_per_epoch and done != options.max_steps:
            continue
        # Ranks have the same accuracy, but different clocks, so the largest elapsed time decides when all ranks stop.
        seconds = torch.tensor([0.0, time.perf_counter() - begun])
        seconds[0] = accuracy()
        seconds[1] = time.perf_counter() - begun
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append({"step": done, "accuracy": seconds[0].item(), "seconds": seconds[1].item()})
        if seconds[0] >= options.target - 1e-9 or seconds[1] > options.max_seconds:
            break
    return found


# --- the textbook loop -----------------------------------------------------------------------------------------------


def textbook_sets(options: argparse.Namespace) -> list[Any]:
    """Return torchvision's training and test sets. Images [3, 32, 32] come from gray 28 x 28 images, as in the app."""
    common.torchvision_that_imports()
    from torchvision import datasets, transforms

    chosen = [transforms.Pad(2)]
    if options.augment:
        chosen = [transforms.RandomCrop(32, padding=6), transforms.RandomHorizontalFlip()]
    sets = []
    for train, first in ((True, chosen), (False, [transforms.Pad(2)])):
        last = [transforms.Grayscale(3), transforms.ToTensor(), transforms.Normalize((0.286,) * 3, (0.353,) * 3)]
        sets.append(datasets.FashionMNIST(str(options.data), train, transforms.Compose([*first, *last])))
    return sets


def textbook(options: argparse.Namespace) -> list[dict[str, float]]:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    torch.manual_seed(options.seed)
    training, test = textbook_sets(options)
    sampler: DistributedSampler[object] = DistributedSampler(training, seed=options.seed)
    size = options.batch // dist.get_world_size()
    loader = DataLoader(training, size, sampler=sampler, num_workers=options.workers)
    test_sampler: DistributedSampler[object] = DistributedSampler(
        test, shuffle=False
    )  # the sampler repeats samples if the number of ranks does not divide 10,000
    test_loader = DataLoader(test, 1000, sampler=test_sampler, num_workers=options.workers)
    model = DistributedDataParallel(TextbookVGG())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def batches() -> Generator[tuple[Tensor, Tensor]]:
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader

    def step(index: int) -> None:
        images, labels = next(shards)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    def accuracy() -> float:
        model.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for images, labels in test_loader:
                counts += torch.tensor([(model.module(images).argmax(1) == labels).sum(), len(labels)])
        model.train()
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    shards = batches()
    found = until_accurate(options, len(loader), step, accuracy)
    shards.close()  # ends the workers
    return found


# --- the app's step --------------------------------------------------------------------------------------------------

OTHERS = "contiguous", "torch's norm", "pool last"  # changes for which the app has no option


class AppLoop:
    """The training of cifar_ddp with the options ``words``, and with the change ``name`` if OTHERS contains it."""

    def __init__(self, options: argparse.Namespace, name: str, words: list[str]) -> None:
        app = Path(__file__).resolve().parents[2] / "apps" / "cifar_ddp"
        sys.path[:0] = [str(app), str(app.parents[1] / "core")]
        import data
        import ema
        import train
        from model import build_model
        from options import parse
        from samestep.monitor import Monitor
        from samestep.options import Options
        from samestep.torch import DataLoader, EvalSampler, GlobalBatchSampler, exact

        its: Options = parse(
            [f"--seed={options.seed}", "--dataset=fashion-mnist", f"--data-dir={options.data}", *words]
        )
        training, test = data.load(its, torch.device("cpu"))
        sampler = GlobalBatchSampler(len(training), its.global_batch_size, seed=its.seed, accumulate=its.accumulate)
        self.steps_per_epoch = len(sampler)
        self.steps = its.epochs * len(sampler)
        model = changed(build_model(its, torch.float32), name)
        average = ema.Average(model, its.ema) if its.ema else None
        self._evaluated = average.model if average else model
        optimizer = train.build_optimizer(its, model)
        ddp = DistributedDataParallel(model)
        exact(ddp, sampler)
        if name == "torch's norm":
            use_own_statistics(model)
        loader = data.make_loader(its, training, sampler)
        shards = (batch for _ in itertools.count() for batch in loader)

        def step(index: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = train.learning_rate(its, index, self.steps)
            images, labels = next(shards)
            if name == "contiguous":
                images = images.contiguous()
            train.train_step(its, ddp, optimizer, sampler, images, labels)
            if average:
                average.update(model, index)

        self._run: Any = SimpleNamespace(monitor=Monitor())  # `evaluate` needs only this part of a Run
        self._eval_sampler = EvalSampler(len(test), train.EVAL_BATCH_SIZE, blocks=dist.get_world_size())
        self._eval_loader = DataLoader(test, batch_sampler=self._eval_sampler)
        self.step = step
        self._evaluate = train.evaluate

    def accuracy(self) -> float:
        metrics = self._evaluate(self._run, self._evaluated, self._eval_loader, self._eval_sampler)
        return float(metrics["test_accuracy"])


def changed(model: Any, name: str) -> nn.Module:
    """Return the app's model `small`, changed if ``name`` is "contiguous" or "pool last"."""
    if name == "contiguous":
        nn.utils.convert_conv2d_weight_memory_format(model, torch.contiguous_format)
    if name == "pool last":
        layers = list(model.features)
        blocks = [layers[i : i + 4] for i in range(0, len(layers), 4)]
        model.features = nn.Sequential(*(block[i] for block in blocks for i in (0, 2, 3, 1)))
    return model  # type: ignore[no-any-return]


class OwnStatistics(nn.BatchNorm2d):
    """torch's batch norm, under another type, because `exact` rejects a BatchNorm2d that it has not replaced."""


def use_own_statistics(model: nn.Module) -> None:
    """Replace the batch norms of `exact` by torch's batch norms, which use the statistics of a rank's own samples."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = OwnStatistics


def app(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Train each variant until the target accuracy, and return the evaluations of the variants by name."""
    found = {}
    for name, words in json.loads(options.variants).items():
        loop = AppLoop(options, name, words)
        options.max_steps = loop.steps
        found[name] = until_accurate(options, loop.steps_per_epoch, loop.step, loop.accuracy)
    return found


def steps(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return each variant's milliseconds per step in each round. The variants take turns on the same batches."""
    loops = {name: AppLoop(options, name, words) for name, words in json.loads(options.variants).items()}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for i in range(options.rounds + 1):
        for name, loop in loops.items():
            begun = time.perf_counter()
            for k in range(AT_ONCE):
                loop.step(i * AT_ONCE + k)
            if i:  # the first round is a warm-up
                found[name].append((time.perf_counter() - begun) / AT_ONCE * 1e3)
    print({name: statistics.median(times) for name, times in found.items()})
    return found


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    kinds: dict[str, Callable[[argparse.Namespace], object]] = {"textbook": textbook, "app": app, "steps": steps}
    found = kinds[options.kind](options)
    if dist.get_rank() == 0:
        partial = options.out.with_suffix(".part")
        partial.write_text(json.dumps(found))
        os.replace(partial, options.out)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a normal exit, and a loader's workers may still run


if __name__ == "__main__":
    main()
