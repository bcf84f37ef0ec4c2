"""One training, its gradients averaged by every strategy, on the same batches from the same weights.

    bash scripts/run_collectives_lab.sh 4 aggregate
    torchrun --standalone --nproc-per-node=2 apps/collectives_lab/aggregate.py

First one large vector is averaged by each scheme, in interleaved rounds, with what crosses loopback read off the
kernel's counter; then mnist_ddp's model is trained on mnist-5k by each strategy.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Split, load
from model import Net, build_model
from options import parse
from ranks import facts, finish, gather_json, rendezvous, slowest_seconds, talk, talking, write_json
from samestep import env, log
from samestep.sharding import GlobalBatches, Rows, shard, step_seed
from show import Picture, Table, duration, new_figure, picture, ranks_of, size
from strategies import SCHEMES, STRATEGIES, Strategy, ring_messages, sent
from torch import Tensor, nn

EVALUATE_EVERY = 16  # steps: after each, every local SGD here has just averaged


# --- one large vector ----------------------------------------------------------------------------------------------


def compare_schemes(options: Namespace, world: env.World, device: torch.device) -> dict[str, Any]:
    """Rounds in which each scheme averages --bytes of float32 once: seconds, bytes on loopback, bytes counted."""
    rounds = options.rounds
    count = options.bytes // 4
    x = torch.empty(count, device=device)
    times = {name: torch.empty(2, rounds, dtype=torch.float64) for name in SCHEMES}
    wire: dict[str, list[int | None]] = {name: [] for name in SCHEMES}
    counted = {}
    bar = log.progress((rounds + 1) * len(SCHEMES), 0)
    for i in range(-1, rounds):  # one round to warm up
        for name, scheme in SCHEMES.items():
            x.fill_(world.rank)
            sent.bytes = sent.messages = 0
            before = loopback_after_barrier()
            begun = time.monotonic()
            scheme.run(x)
            finish()
            ended = time.monotonic()
            crossed = loopback_after_barrier() - before
            assert float(x[0]) == float(x[-1]) == (world.world_size - 1) / 2
            if i >= 0:
                times[name][0, i], times[name][1, i] = begun, ended
                wire[name].append(crossed)
            counted[name] = [sent.bytes, sent.messages]
            bar.update()
    bar.close()
    everyones = gather_json({name: each.tolist() for name, each in times.items()}, device)
    everyones_sent = gather_json(counted, device)
    found = {}
    for name, scheme in SCHEMES.items():
        stacked = torch.tensor([each[name] for each in everyones], dtype=torch.float64)
        found[name] = {
            "seconds": slowest_seconds(stacked[:, 0], stacked[:, 1], world),
            "formula_bytes": scheme.bytes(4 * count, world.world_size),
            "loopback_bytes": wire[name],
        }
    found["ring"]["sent_bytes"] = [each["ring"][0] for each in everyones_sent]
    found["ring"]["sent_messages"] = [each["ring"][1] for each in everyones_sent]
    found["ring"]["formula_messages"] = ring_messages(world.world_size)
    return {"bytes": 4 * count, "alone_on_loopback": alone_on_loopback(), "schemes": found}


def loopback_after_barrier() -> int:
    """Bytes that loopback has carried so far, when all ranks have come here; 0 where the kernel does not say.

    Source: proc(5), /proc/net/dev; the first number is bytes received, headers included.
    """
    with talk("barrier"):
        dist.barrier()
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        lines = []
    with talk("barrier"):  # nobody sends on before all have read
        dist.barrier()
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), 0)


def alone_on_loopback() -> bool:
    """Whether this is a network namespace of the job's own: it has loopback and nothing else."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return False
    return [line.split(":")[0].strip() for line in lines if ":" in line] == ["lo"]


# --- the training --------------------------------------------------------------------------------------------------


def train_step(
    strategy: Strategy, module: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, rows: Rows
) -> Tensor:
    """One update with this rank's part of a global batch; the part's summed loss. Ranks talk inside the strategy."""
    optimizer.zero_grad()
    loss_sum = F.nll_loss(module(images, rows), labels, reduction="sum")
    with talk(strategy.backward):
        (loss_sum * (dist.get_world_size() / rows.global_size)).backward()
    strategy.after_backward()
    optimizer.step()
    return loss_sum.detach()


@torch.inference_mode()
def evaluate(model: Net, test: Split, dtype: torch.dtype) -> dict[str, float]:
    """Loss and accuracy over the whole test set, each example counted once on exactly one rank."""
    model.eval()
    first, last = shard(len(test.labels), dist.get_rank(), dist.get_world_size())
    images, labels = test.batch(np.arange(first, last), dtype)
    scores = model(images, Rows(0, len(images)))
    correct = (scores.argmax(dim=1) == labels).sum()
    sums = torch.stack([F.nll_loss(scores, labels, reduction="sum").double(), correct.double()])
    with talk("all_reduce of the evaluation"):
        dist.all_reduce(sums)
    model.train()
    loss_sum, count = sums.tolist()
    return {"test_loss": loss_sum / len(test.labels), "test_accuracy": count / len(test.labels)}


def train(
    name: str, options: Namespace, world: env.World, device: torch.device, training: Split, test: Split
) -> tuple[dict[str, Any], Tensor]:
    """Train by one strategy; what was measured, and the final weights as one vector. Evaluations stop the clock."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options.dropout, dtype, options.seed).to(device)
    strategy = STRATEGIES[name]()
    module = strategy.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    batches = GlobalBatches(len(training.labels), options.global_batch_size, options.seed, world.rank, world.world_size)
    total = options.epochs * batches.steps_per_epoch
    if options.max_steps is not None:
        total = min(total, options.max_steps)

    seconds: list[float] = []  # of each step, on this rank
    in_collectives = 0.0  # seconds, of all steps
    losses = torch.zeros(total, dtype=torch.float64, device=device)  # this rank's sums
    curve = [{"step": 0, "seconds": 0.0, **evaluate(model, test, dtype)}]
    crossed = 0
    sent.bytes = sent.messages = 0
    before = loopback_after_barrier()
    for step in range(total):
        torch.manual_seed(step_seed(options.seed, step))
        images, labels = training.batch(batches.indices(step), dtype)
        talking.events.clear()
        rows = batches.rows(step)
        finish()
        begun = time.monotonic()
        losses[step] = train_step(strategy, module, optimizer, images, labels, rows)
        strategy.after_step(step, step == total - 1)
        finish()
        seconds.append(time.monotonic() - begun)
        in_collectives += sum(end - begin for what, begin, end in talking.events if what != strategy.backward)
        if (step + 1) % EVALUATE_EVERY == 0 or step == total - 1:
            crossed += loopback_after_barrier() - before
            curve.append({"step": step + 1, "seconds": sum(seconds), **evaluate(model, test, dtype)})
            before = loopback_after_barrier()
    with talk("all_reduce of losses"):
        dist.all_reduce(losses)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyones = gather_json([seconds, in_collectives, sent.bytes, sent.messages, strategy.synchronous], device)
    count = weights.numel() * weights.element_size()
    return {
        "strategy": name,
        "synchronous": strategy.synchronous,
        "steps": total,
        "step_seconds": [max(each) for each in zip(*(rank[0] for rank in everyones))],
        "collective_seconds_per_step": [rank[1] / total for rank in everyones],
        "model_bytes": count,
        "formula_bytes_per_step": strategy.bytes(count, world.world_size),
        "loopback_bytes_per_step": crossed / total,
        "sent_bytes_per_step": sum(rank[2] for rank in everyones) / total,
        "sent_messages_per_step": sum(rank[3] for rank in everyones) / total,
        "losses": [float(loss) / batches.size(step) for step, loss in enumerate(losses)],
        "curve": curve,
    }, weights


def main() -> None:
    options = parse(["aggregate", *sys.argv[1:]])
    world, device = rendezvous(options)
    training, test = load("mnist-5k", Path("data"), device)
    found: dict[str, Any] = {"facts": {**facts(world, device), "dtype": options.dtype}, "training": []}
    found["large"] = compare_schemes(options, world, device)
    first: Tensor | None = None  # the weights that the first synchronous strategy ends with
    for name in options.strategies:
        log.info(f"{name} on {ranks_of(world.world_size)}")
        measured, weights = train(name, options, world, device, training, test)
        if measured["synchronous"]:
            first = weights if first is None else first
            difference = float((weights - first).abs().max())
            measured["weights_difference"] = max(gather_json(difference, device))
        found["training"].append(measured)
    if world.rank == 0:
        write_json(options.run_dir, f"aggregate-{world.world_size}", found)
        for table in tables([found]):
            if not table.long:
                log.info(table.text())


# --- as tables and pictures ----------------------------------------------------------------------------------------


def tables(results: list[dict[str, Any]]) -> list[Table]:
    made = []
    for found in results:
        p, large = found["facts"]["world_size"], found["large"]
        rows = []
        for name, scheme in large["schemes"].items():
            wire, formula = statistics.median(scheme["loopback_bytes"]), scheme["formula_bytes"]
            ratios = [a / b for a, b in zip(scheme["seconds"], large["schemes"]["all_reduce"]["seconds"])]
            rows.append(
                [
                    name,
                    duration(statistics.median(scheme["seconds"])),
                    f"{duration(min(scheme['seconds']))} to {duration(max(scheme['seconds']))}",
                    f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})",
                    size(formula),
                    size(wire),
                    f"{wire / formula - 1:+.2%}" if formula else "",
                    size(sum(scheme["sent_bytes"])) if "sent_bytes" in scheme else "",
                    f"{sum(scheme['sent_messages'])} of {scheme['formula_messages']}" if "sent_bytes" in scheme else "",
                ]
            )
        names = ("all_reduce", "reduce_broadcast", "gather_scatter")
        rounds = list(zip(*(large["schemes"][name]["seconds"] for name in names)))
        in_order = sum(a < b < c for a, b, c in rounds)
        note = f"all_reduce before reduce_broadcast before gather_scatter in {in_order} of {len(rounds)} rounds. "
        note = (note if p > 1 else "") + "Ratios are of each round. Bytes are those of all ranks together."
        header = ["scheme", "median", "range", "/ all_reduce", "by formula", "on loopback", "excess", "counted",
                  "messages"]  # fmt: skip
        made.append(Table(f"The mean of {size(large['bytes'])} on {ranks_of(p)}, {len(rounds)} interleaved rounds",
                          note, header, rows))  # fmt: skip
        made.append(
            Table(
                f"Training by each strategy on {ranks_of(p)}",
                f"{found['training'][0]['steps']} steps in {found['facts']['dtype']}; bytes a step are those of all "
                "ranks; counted: by hand, at every send; difference: of the final weights from those of the first "
                "synchronous strategy.",
                ["strategy", "a step", "in collectives", "by formula", "on loopback", "counted", "messages", "loss",
                 "test accuracy", "seconds", "difference"],
                [_training_row(each) for each in found["training"]],
            )
        )  # fmt: skip
    return made


def _training_row(each: dict[str, Any]) -> list[str]:
    counted = each["sent_messages_per_step"] > 0
    last = each["curve"][-1]
    return [
        each["strategy"],
        duration(statistics.median(each["step_seconds"])),
        "" if each["strategy"] == "ddp" else duration(statistics.mean(each["collective_seconds_per_step"])),
        size(each["formula_bytes_per_step"]),
        size(each["loopback_bytes_per_step"]),
        size(each["sent_bytes_per_step"]) if counted else "",
        f"{each['sent_messages_per_step']:g}" if counted else "",
        f"{statistics.mean(each['losses'][-16:]):.4f}",
        f"{last['test_accuracy']:.4f}",
        f"{last['seconds']:.2f}",
        f"{each['weights_difference']:.1e}" if "weights_difference" in each else "",
    ]


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    made = []
    for found in results:
        p = found["facts"]["world_size"]
        if not found["training"]:
            continue
        figure = new_figure(11, 4.2)
        left, right = figure.subplots(1, 2)
        for index, each in enumerate(found["training"]):
            seconds = [point["seconds"] for point in each["curve"]]
            style: dict[str, Any] = {"label": each["strategy"], "color": f"C{index % 10}", "linewidth": 1.2,
                                     "linestyle": "-" if each["synchronous"] else "--"}  # fmt: skip
            left.plot(seconds, [point["test_loss"] for point in each["curve"]], **style)
            right.plot(seconds, [point["test_accuracy"] for point in each["curve"]], **style)
        left.set(xlabel="seconds of training", ylabel="test loss", yscale="log")
        right.set(xlabel="seconds of training", ylabel="test accuracy")
        right.legend(fontsize=7, ncols=2)
        for axes in (left, right):
            axes.grid(alpha=0.3)
        made.append(picture(f"aggregate-{p}", f"Test loss and accuracy against wall time, {ranks_of(p)}.", figure))

    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(results)
    several = [found for found in results if found["facts"]["world_size"] > 1]
    for index, found in enumerate(results):
        p = found["facts"]["world_size"]
        names = [each["strategy"] for each in found["training"]]
        heights = [statistics.median(each["step_seconds"]) * 1e3 for each in found["training"]]
        left.bar([i + index * width for i in range(len(names))], heights, width, label=f"{ranks_of(p)}")
        left.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    for index, found in enumerate(several):
        for i, scheme in enumerate(found["large"]["schemes"].values()):
            seconds, shift = scheme["seconds"], 0.25 * (index - (len(several) - 1) / 2)
            xs = [i + shift + 0.15 * (k / len(seconds) - 0.5) for k in range(len(seconds))]
            label = f"{ranks_of(found['facts']['world_size'])}" if i == 0 else None
            right.scatter(xs, [s * 1e3 for s in seconds], s=9, color=f"C{results.index(found)}", label=label)
    if several:
        right.legend(fontsize=8)
    left.set(ylabel="median step, ms")
    left.legend(fontsize=8)
    right.set_xticks(range(len(SCHEMES)), list(SCHEMES), rotation=30, ha="right", fontsize=8)
    right.set(ylabel="ms", title="one large mean, every round", yscale="log")
    right.grid(alpha=0.3)
    made.append(
        picture("aggregate", "A step by each strategy, and the mean of one large vector by each scheme.", figure)
    )
    return made


if __name__ == "__main__":
    log.run(main)
