"""Train by every strategy on the same batches from the same weights, and compare time, bytes and results.

    bash scripts/run_collectives_lab.sh 4 aggregate
    torchrun --standalone --nproc-per-node=2 apps/collectives_lab/aggregate.py

First, each scheme averages one large vector in interleaved rounds, while the kernel counts the bytes on loopback. Then
each strategy trains mnist_ddp's model on mnist-5k.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Split, load
from distributed import collective, finish, gather_json, rendezvous, run_metadata, session, slowest_seconds
from options import parse
from samestep import NonRetryableError, env, log
from samestep.options import Options
from samestep.sharding import BatchSlice, shard
from show import Picture, Table, duration, new_figure, picture, publish, ranks_of, size
from strategies import SCHEMES, STRATEGIES, Strategy, ring_messages, sent
from torch import Tensor
from training import Trainer
from waits import publish_waits

EVALUATE_EVERY = 16  # steps between evaluations; a multiple of each local SGD's averaging interval


# --- one large vector ----------------------------------------------------------------------------------------------


def compare_schemes(options: Options, world: env.World, device: torch.device) -> dict[str, Any]:
    """Average a float32 vector by each scheme in each round, and return the measurements.

    Returns:
        A dict. "bytes" is the vector's size: --bytes, rounded down to a multiple of 4. "alone_on_loopback" is true if
        loopback is the only network interface. "schemes" has the seconds and bytes of each scheme, by name.

    Raises:
        NonRetryableError: a scheme computes a wrong mean.
    """
    x = torch.empty(options.bytes // 4, device=device)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in SCHEMES}
    loopback_bytes: dict[str, list[int]] = {name: [] for name in SCHEMES}
    counts: dict[str, list[int]] = {}
    mean = (world.world_size - 1) / 2
    bar = log.progress((options.rounds + 1) * len(SCHEMES), 0)
    for _ in range(options.rounds + 1):  # the first round is a warm-up
        for name, scheme in SCHEMES.items():
            x.fill_(world.rank)
            sent.clear()
            before = loopback_after_barrier()
            begun = time.monotonic()
            scheme.run(x)
            finish()
            spans[name].append((begun, time.monotonic()))
            loopback_bytes[name].append(loopback_after_barrier() - before)
            first = float(x[0])
            last = float(x[-1])
            if first != mean or last != mean:
                raise NonRetryableError(f"{name} computes {first} and {last}, but the mean is {mean}: report this")
            counts[name] = [sent["bytes"], sent["messages"]]
            bar.update()
    bar.close()
    schemes: dict[str, dict[str, Any]] = {}
    for name, scheme in SCHEMES.items():
        schemes[name] = {
            "seconds": slowest_seconds(spans[name][1:]),
            "formula_bytes": scheme.bytes(x.nbytes, world.world_size),
            "loopback_bytes": loopback_bytes[name][1:],
        }
    of_ranks = gather_json(counts["ring"])
    schemes["ring"]["sent_bytes"] = [count for count, _ in of_ranks]
    schemes["ring"]["sent_messages"] = [messages for _, messages in of_ranks]
    schemes["ring"]["formula_messages"] = ring_messages(world.world_size)
    # The job has its own network namespace if loopback is the only interface.
    return {"bytes": x.nbytes, "alone_on_loopback": list(received_bytes()) == ["lo"], "schemes": schemes}


def received_bytes() -> dict[str, int]:
    """Return the bytes that each network interface has received, including headers, or {} if they are unknown.

    Source: proc(5), /proc/net/dev.
    """
    path = Path("/proc/net/dev")
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        found[name.strip()] = int(numbers.split()[0])
    return found


def loopback_after_barrier() -> int:
    """Wait for all ranks, and return the bytes received on loopback so far, or 0 if they are unknown."""
    with collective("barrier"):
        dist.barrier()
        count = received_bytes().get("lo", 0)
        dist.barrier()  # no rank sends before all ranks have read the counter
    return count


# --- the training --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(trainer: Trainer, test: Split) -> dict[str, float]:
    """Return loss and accuracy over the test set. Each example counts once, on one rank."""
    model = trainer.model.eval()
    first, last = shard(len(test.labels), dist.get_rank(), dist.get_world_size())
    images, labels = test.batch(np.arange(first, last), trainer.dtype)
    scores = model(images, BatchSlice(0, len(images)))
    loss_sum = F.nll_loss(scores, labels, reduction="sum")
    correct = (scores.argmax(dim=1) == labels).sum()
    sums = torch.stack([loss_sum.double(), correct.double()])
    with collective("all_reduce of the evaluation"):
        dist.all_reduce(sums)
    model.train()
    loss, accuracy = (sums / len(test.labels)).tolist()
    return {"test_loss": loss, "test_accuracy": accuracy}


def train(name: str, options: Options, world: env.World, training: Split, test: Split) -> tuple[dict[str, Any], Tensor]:
    """Train by one strategy, and return the measurements and the final weights [n]. Times exclude evaluations.

    Args:
        name: name of the strategy.
        options: options of ``aggregate``.
        world: rank and world size.
        training: training set, on the training device.
        test: test set for the evaluations, on the same device.
    """
    strategy = STRATEGIES[name]()
    trainer = Trainer(strategy, options, training, world)
    total = options.epochs * trainer.batches.steps_per_epoch
    if options.max_steps is not None:
        total = min(total, options.max_steps)
    seconds: list[float] = []  # duration of each step on this rank
    in_collectives = 0.0  # seconds in collectives, over all steps
    loopback_bytes = 0  # bytes of all ranks, over all steps
    losses = torch.zeros(total, dtype=torch.float64, device=training.labels.device)  # this rank's loss sum per step
    curve = [{"step": 0, "seconds": 0.0, **evaluate(trainer, test)}]
    sent.clear()
    before = loopback_after_barrier()
    for step in range(total):
        batch = trainer.batch()
        is_last = step == total - 1
        session.events.clear()
        finish()
        begun = time.monotonic()
        losses[step] = trainer.update(batch, is_last)
        finish()
        seconds.append(time.monotonic() - begun)
        in_collectives += seconds_in_collectives(strategy)
        if (step + 1) % EVALUATE_EVERY == 0 or is_last:
            loopback_bytes += loopback_after_barrier() - before
            curve.append({"step": step + 1, "seconds": sum(seconds), **evaluate(trainer, test)})
            before = loopback_after_barrier()
    with collective("all_reduce of losses"):
        dist.all_reduce(losses)
    weights = trainer.weights()
    of_ranks = gather_json(
        {"steps": seconds, "collectives": in_collectives, "bytes": sent["bytes"], "messages": sent["messages"]}
    )
    measured = {
        "strategy": name,
        "synchronous": strategy.synchronous,
        "steps": total,
        "step_seconds": [max(ranks) for ranks in zip(*(each["steps"] for each in of_ranks))],
        "collective_seconds_per_step": [each["collectives"] / total for each in of_ranks],
        "model_bytes": weights.nbytes,
        "formula_bytes_per_step": strategy.bytes(weights.nbytes, world.world_size),
        "loopback_bytes_per_step": loopback_bytes / total,
        "sent_bytes_per_step": sum(each["bytes"] for each in of_ranks) / total,
        "sent_messages_per_step": sum(each["messages"] for each in of_ranks) / total,
        "losses": [loss / trainer.batches.size(step) for step, loss in enumerate(losses.tolist())],
        "curve": curve,
    }
    return measured, weights


def seconds_in_collectives(strategy: Strategy) -> float:
    """Return the seconds that this rank spent in collectives since `session.events` was cleared.

    The result does not include the event of the backward pass.
    """
    return sum(end - begin for event, begin, end in session.events if event != strategy.backward)


def main() -> None:
    """Run the command ``aggregate`` on this rank."""
    options = parse(["aggregate", *sys.argv[1:]])
    world, device = rendezvous(options)
    training, test = load("mnist-5k", Path("data"), device)
    facts = {**run_metadata(world, device), "dtype": options.dtype}
    result: dict[str, Any] = {"facts": facts, "training": []}
    result["large"] = compare_schemes(options, world, device)
    first: Tensor | None = None  # final weights of the first synchronous strategy
    for name in options.strategies:
        log.info(f"{name} on {ranks_of(world.world_size)}")
        measured, weights = train(name, options, world, training, test)
        if measured["synchronous"]:
            if first is None:
                first = weights
            difference = float((weights - first).abs().max())
            measured["weights_difference"] = max(gather_json(difference))
        result["training"].append(measured)
    if world.rank == 0:
        publish(options.run_dir, f"aggregate-{world.world_size}", result, tables(result), pictures)
        publish_waits(options, result["facts"])


# --- as tables and pictures ----------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of one world size."""
    p = result["facts"]["world_size"]
    large = result["large"]
    training = result["training"]
    seconds = {name: scheme["seconds"] for name, scheme in large["schemes"].items()}
    rounds = list(zip(seconds["all_reduce"], seconds["reduce_broadcast"], seconds["gather_scatter"]))
    note = "Ratios are of each round. Bytes are those of all ranks together."
    if p > 1:
        in_order = sum(a < b < c for a, b, c in rounds)
        order = f"all_reduce before reduce_broadcast before gather_scatter in {in_order} of {len(rounds)} rounds."
        note = f"{order} {note}"
    yield Table(
        f"The mean of {size(large['bytes'])} on {ranks_of(p)}, {len(rounds)} interleaved rounds",
        note,
        header="scheme,median,range,/ all_reduce,by formula,on loopback,excess,counted,messages".split(","),
        rows=[_scheme_row(name, scheme, seconds["all_reduce"]) for name, scheme in large["schemes"].items()],
    )
    header = (
        "strategy,seconds,loss,test accuracy,difference,a step,in collectives,by formula,on loopback,counted,messages"
    )
    yield Table(
        f"Training by each strategy on {ranks_of(p)}",
        f"{training[0]['steps']} steps in {result['facts']['dtype']}; bytes per step are those of all ranks; counted: "
        "by hand, at every send; difference: of the final weights from those of the first synchronous strategy.",
        header=header.split(","),
        rows=[_training_row(each) for each in training],
    )


def _scheme_row(name: str, scheme: dict[str, Any], all_reduce: list[float]) -> list[str]:
    seconds = scheme["seconds"]
    formula = scheme["formula_bytes"]
    loopback = statistics.median(scheme["loopback_bytes"])
    excess = ""
    if formula:
        excess = f"{loopback / formula - 1:+.2%}"
    ratios = [a / b for a, b in zip(seconds, all_reduce)]
    counts = ["", ""]
    if "sent_bytes" in scheme:
        sent_bytes = sum(scheme["sent_bytes"])
        messages = sum(scheme["sent_messages"])
        counts = [size(sent_bytes), f"{messages} of {scheme['formula_messages']}"]
    return [
        name,
        duration(statistics.median(seconds)),
        f"{duration(min(seconds))} to {duration(max(seconds))}",
        f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})",
        size(formula),
        size(loopback),
        excess,
        *counts,
    ]


def _training_row(each: dict[str, Any]) -> list[str]:
    last = each["curve"][-1]
    last_losses = each["losses"][-16:]
    difference = ""
    if "weights_difference" in each:
        difference = f"{each['weights_difference']:.1e}"
    in_collectives = ""
    if each["strategy"] not in ("ddp", "module"):  # these strategies communicate in backward
        in_collectives = duration(statistics.mean(each["collective_seconds_per_step"]))
    counts = ["", ""]
    if each["sent_messages_per_step"] > 0:
        counts = [size(each["sent_bytes_per_step"]), f"{each['sent_messages_per_step']:g}"]
    return [
        each["strategy"],
        f"{last['seconds']:.2f}",
        f"{statistics.mean(last_losses):.4f}",
        f"{last['test_accuracy']:.4f}",
        difference,
        duration(statistics.median(each["step_seconds"])),
        in_collectives,
        size(each["formula_bytes_per_step"]),
        size(each["loopback_bytes_per_step"]),
        *counts,
    ]


def pictures(results: list[dict[str, Any]]) -> Iterator[Picture]:
    """Yield one picture for each world size, and one picture that compares the world sizes."""
    for result in results:
        if result["training"]:
            yield _curves(result)
    figure, (left, right) = new_figure(11, 4, columns=2)
    _draw_steps(left, results)
    _draw_large(right, results)
    yield picture("aggregate", "A step by each strategy, and the mean of one large vector by each scheme.", figure)


def _draw_steps(axes: Any, results: list[dict[str, Any]]) -> None:
    """Draw a bar for the median step time of each strategy at each world size."""
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        names = [each["strategy"] for each in result["training"]]
        heights = [statistics.median(each["step_seconds"]) * 1e3 for each in result["training"]]
        xs = [i + index * width for i in range(len(names))]
        axes.bar(xs, heights, width, label=ranks_of(result["facts"]["world_size"]))
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set(ylabel="median step, ms")
    axes.legend(fontsize=8)


def _draw_large(axes: Any, results: list[dict[str, Any]]) -> None:
    """Draw a dot for each round of each scheme, with world sizes side by side."""
    several = [result for result in results if result["facts"]["world_size"] > 1]
    for place, result in enumerate(several):
        color = f"C{results.index(result)}"
        shift = 0.25 * (place - (len(several) - 1) / 2)
        for i, scheme in enumerate(result["large"]["schemes"].values()):
            milliseconds = [seconds * 1e3 for seconds in scheme["seconds"]]
            count = len(milliseconds)
            xs = [i + shift + 0.15 * (k / count - 0.5) for k in range(count)]
            axes.scatter(xs, milliseconds, s=9, color=color)
        axes.scatter([], [], s=9, color=color, label=ranks_of(result["facts"]["world_size"]))  # entry of the legend
    if several:
        axes.legend(fontsize=8)
    axes.set_xticks(range(len(SCHEMES)), list(SCHEMES), rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="ms", title="one large mean, every round", yscale="log")
    axes.grid(alpha=0.3)


def _curves(result: dict[str, Any]) -> Picture:
    p = result["facts"]["world_size"]
    figure, (left, right) = new_figure(11, 4.2, columns=2)
    for index, each in enumerate(result["training"]):
        style: dict[str, Any] = {"label": each["strategy"], "color": f"C{index % 10}", "linewidth": 1.2}
        style["linestyle"] = "-" if each["synchronous"] else "--"
        seconds = [point["seconds"] for point in each["curve"]]
        left.plot(seconds, [point["test_loss"] for point in each["curve"]], **style)
        right.plot(seconds, [point["test_accuracy"] for point in each["curve"]], **style)
    left.set(yscale="log", ylabel="test loss")
    right.set(ylabel="test accuracy")
    right.legend(fontsize=7, ncols=2)
    for axes in (left, right):
        axes.set(xlabel="seconds of training")
        axes.grid(alpha=0.3)
    return picture(f"aggregate-{p}", f"Test loss and accuracy against wall time, {ranks_of(p)}.", figure)


if __name__ == "__main__":
    log.run(main)
