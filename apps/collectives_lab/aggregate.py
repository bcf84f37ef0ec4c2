"""Train once by every strategy, on the same batches from the same weights, and compare time, bytes and results.

    bash scripts/run_collectives_lab.sh 4 aggregate
    torchrun --standalone --nproc-per-node=2 apps/collectives_lab/aggregate.py

First each scheme averages one large vector, in interleaved rounds; the kernel's counter shows what crosses loopback.
Then mnist_ddp's model is trained on mnist-5k by each strategy.
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
from strategies import SCHEMES, STRATEGIES, ring_messages, sent
from torch import Tensor
from training import Trainer
from waits import publish_waits

EVALUATE_EVERY = 16  # steps: every local SGD here has averaged just before


# --- one large vector ----------------------------------------------------------------------------------------------


def compare_schemes(options: Options, world: env.World, device: torch.device) -> dict[str, Any]:
    """Average --bytes of float32 once by each scheme in each round; return seconds and bytes."""
    x = torch.empty(options.bytes // 4, device=device)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in SCHEMES}
    loopback_bytes: dict[str, list[int]] = {name: [] for name in SCHEMES}
    counts: dict[str, list[int]] = {}
    bar = log.progress((options.rounds + 1) * len(SCHEMES), 0)
    for _ in range(options.rounds + 1):  # the first round warms up
        for name, scheme in SCHEMES.items():
            x.fill_(world.rank)
            sent.clear()
            before = loopback_after_barrier()
            begun = time.monotonic()
            scheme.run(x)
            finish()
            spans[name].append((begun, time.monotonic()))
            loopback_bytes[name].append(loopback_after_barrier() - before)
            mean, ends = (world.world_size - 1) / 2, [float(x[0]), float(x[-1])]
            if ends != [mean, mean]:
                raise NonRetryableError(f"{name} computes {ends[0]} and {ends[1]}, but the mean is {mean}: report this")
            counts[name] = [sent["bytes"], sent["messages"]]
            bar.update()
    bar.close()
    schemes: dict[str, dict[str, Any]] = {
        name: {
            "seconds": slowest_seconds(spans[name][1:]),
            "formula_bytes": scheme.bytes(x.nbytes, world.world_size),
            "loopback_bytes": loopback_bytes[name][1:],
        }
        for name, scheme in SCHEMES.items()
    }
    sent_bytes, sent_messages = zip(*gather_json(counts["ring"]))
    schemes["ring"].update(sent_bytes=sent_bytes, sent_messages=sent_messages)
    schemes["ring"]["formula_messages"] = ring_messages(world.world_size)
    # A network namespace of the job's own has loopback and nothing else.
    return {"bytes": x.nbytes, "alone_on_loopback": list(received_bytes()) == ["lo"], "schemes": schemes}


def received_bytes() -> dict[str, int]:
    """Return the bytes that each network interface has received, with headers; {} if the kernel does not report them.

    Source: proc(5), /proc/net/dev.
    """
    path = Path("/proc/net/dev")
    lines = path.read_text().splitlines()[2:] if path.exists() else []
    return {name.strip(): int(numbers.split()[0]) for name, _, numbers in (line.partition(":") for line in lines)}


def loopback_after_barrier() -> int:
    """Return the bytes on loopback when all ranks have arrived here; 0 if the kernel does not report them."""
    with collective("barrier"):
        dist.barrier()
        count = received_bytes().get("lo", 0)
        dist.barrier()  # no rank sends again before all have read
    return count


# --- the training --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(trainer: Trainer, test: Split) -> dict[str, float]:
    """Return loss and accuracy over the whole test set; each example is counted on exactly one rank."""
    model = trainer.model.eval()
    first, last = shard(len(test.labels), dist.get_rank(), dist.get_world_size())
    images, labels = test.batch(np.arange(first, last), trainer.dtype)
    scores = model(images, BatchSlice(0, len(images)))
    correct = (scores.argmax(dim=1) == labels).sum()
    sums = torch.stack([F.nll_loss(scores, labels, reduction="sum").double(), correct.double()])
    with collective("all_reduce of the evaluation"):
        dist.all_reduce(sums)
    model.train()
    loss, accuracy = (sums / len(test.labels)).tolist()
    return {"test_loss": loss, "test_accuracy": accuracy}


def train(name: str, options: Options, world: env.World, training: Split, test: Split) -> tuple[dict[str, Any], Tensor]:
    """Train by one strategy, without the evaluations' time; return what was measured, and the final weights [n]."""
    strategy = STRATEGIES[name]()
    trainer = Trainer(strategy, options, training, world)
    total = options.epochs * trainer.batches.steps_per_epoch
    total = total if options.max_steps is None else min(total, options.max_steps)
    seconds: list[float] = []  # of each step, on this rank
    in_collectives, loopback_bytes = 0.0, 0  # seconds, and bytes of all ranks, in all steps
    losses = torch.zeros(total, dtype=torch.float64, device=training.labels.device)  # this rank's sums
    curve = [{"step": 0, "seconds": 0.0, **evaluate(trainer, test)}]
    sent.clear()
    before = loopback_after_barrier()
    for step in range(total):
        batch, is_last = trainer.batch(), step == total - 1
        session.events.clear()
        finish()
        begun = time.monotonic()
        losses[step] = trainer.update(batch, is_last)
        finish()
        seconds.append(time.monotonic() - begun)
        in_collectives += sum(end - begin for event, begin, end in session.events if event != strategy.backward)
        if (step + 1) % EVALUATE_EVERY == 0 or is_last:
            loopback_bytes += loopback_after_barrier() - before
            curve.append({"step": step + 1, "seconds": sum(seconds), **evaluate(trainer, test)})
            before = loopback_after_barrier()
    with collective("all_reduce of losses"):
        dist.all_reduce(losses)
    weights = trainer.weights()
    step_seconds, collective_seconds, sent_bytes, sent_messages = zip(
        *gather_json([seconds, in_collectives, sent["bytes"], sent["messages"]])
    )
    return {
        "strategy": name,
        "synchronous": strategy.synchronous,
        "steps": total,
        "step_seconds": [max(ranks) for ranks in zip(*step_seconds)],
        "collective_seconds_per_step": [each / total for each in collective_seconds],
        "model_bytes": weights.nbytes,
        "formula_bytes_per_step": strategy.bytes(weights.nbytes, world.world_size),
        "loopback_bytes_per_step": loopback_bytes / total,
        "sent_bytes_per_step": sum(sent_bytes) / total,
        "sent_messages_per_step": sum(sent_messages) / total,
        "losses": [loss / trainer.batches.size(step) for step, loss in enumerate(losses.tolist())],
        "curve": curve,
    }, weights


def main() -> None:
    """Run the command ``aggregate`` on this rank."""
    options = parse(["aggregate", *sys.argv[1:]])
    world, device = rendezvous(options)
    training, test = load("mnist-5k", Path("data"), device)
    result: dict[str, Any] = {"facts": {**run_metadata(world, device), "dtype": options.dtype}, "training": []}
    result["large"] = compare_schemes(options, world, device)
    first: Tensor | None = None  # the weights that the first synchronous strategy ends with
    for name in options.strategies:
        log.info(f"{name} on {ranks_of(world.world_size)}")
        measured, weights = train(name, options, world, training, test)
        if measured["synchronous"]:
            first = weights if first is None else first
            measured["weights_difference"] = max(gather_json(float((weights - first).abs().max())))
        result["training"].append(measured)
    if world.rank == 0:
        publish(options.run_dir, f"aggregate-{world.world_size}", result, tables(result), pictures)
        publish_waits(options, result["facts"])


# --- as tables and pictures ----------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of one number of ranks."""
    p, large, training = result["facts"]["world_size"], result["large"], result["training"]
    seconds = {name: scheme["seconds"] for name, scheme in large["schemes"].items()}
    rounds = list(zip(*(seconds[name] for name in ("all_reduce", "reduce_broadcast", "gather_scatter"))))
    in_order = sum(a < b < c for a, b, c in rounds)
    note = f"all_reduce before reduce_broadcast before gather_scatter in {in_order} of {len(rounds)} rounds. "
    yield Table(
        f"The mean of {size(large['bytes'])} on {ranks_of(p)}, {len(rounds)} interleaved rounds",
        (note if p > 1 else "") + "Ratios are of each round. Bytes are those of all ranks together.",
        "scheme,median,range,/ all_reduce,by formula,on loopback,excess,counted,messages".split(","),
        [_scheme_row(name, scheme, seconds["all_reduce"]) for name, scheme in large["schemes"].items()],
    )
    header = (
        "strategy,seconds,loss,test accuracy,difference,a step,in collectives,by formula,on loopback,counted,messages"
    )
    yield Table(
        f"Training by each strategy on {ranks_of(p)}",
        f"{training[0]['steps']} steps in {result['facts']['dtype']}; bytes per step are those of all ranks; counted: "
        "by hand, at every send; difference: of the final weights from those of the first synchronous strategy.",
        header.split(","),
        [_training_row(each) for each in training],
    )


def _scheme_row(name: str, scheme: dict[str, Any], all_reduce: list[float]) -> list[str]:
    seconds, formula = scheme["seconds"], scheme["formula_bytes"]
    loopback = statistics.median(scheme["loopback_bytes"])
    ratios = [a / b for a, b in zip(seconds, all_reduce)]
    counts = ["", ""]
    if "sent_bytes" in scheme:
        counts = [size(sum(scheme["sent_bytes"])), f"{sum(scheme['sent_messages'])} of {scheme['formula_messages']}"]
    return [
        name,
        duration(statistics.median(seconds)),
        f"{duration(min(seconds))} to {duration(max(seconds))}",
        f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})",
        size(formula),
        size(loopback),
        f"{loopback / formula - 1:+.2%}" if formula else "",
        *counts,
    ]


def _training_row(each: dict[str, Any]) -> list[str]:
    counted, last = each["sent_messages_per_step"] > 0, each["curve"][-1]
    return [
        each["strategy"],
        f"{last['seconds']:.2f}",
        f"{statistics.mean(each['losses'][-16:]):.4f}",
        f"{last['test_accuracy']:.4f}",
        f"{each['weights_difference']:.1e}" if "weights_difference" in each else "",
        duration(statistics.median(each["step_seconds"])),
        "" if each["strategy"] in ("ddp", "module") else duration(statistics.mean(each["collective_seconds_per_step"])),
        size(each["formula_bytes_per_step"]),
        size(each["loopback_bytes_per_step"]),
        size(each["sent_bytes_per_step"]) if counted else "",
        f"{each['sent_messages_per_step']:g}" if counted else "",
    ]


def pictures(results: list[dict[str, Any]]) -> Iterator[Picture]:
    """Yield one picture for each number of ranks, and one that compares them."""
    for result in results:
        if result["training"]:
            yield _curves(result)
    figure, (left, right) = new_figure(11, 4, columns=2)
    width = 0.8 / len(results)
    several = [result for result in results if result["facts"]["world_size"] > 1]
    for index, result in enumerate(results):
        label = ranks_of(result["facts"]["world_size"])
        names = [each["strategy"] for each in result["training"]]
        heights = [statistics.median(each["step_seconds"]) * 1e3 for each in result["training"]]
        left.bar([i + index * width for i in range(len(names))], heights, width, label=label)
        left.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
        if result not in several:
            continue
        shift = 0.25 * (several.index(result) - (len(several) - 1) / 2)
        for i, scheme in enumerate(result["large"]["schemes"].values()):
            seconds = [s * 1e3 for s in scheme["seconds"]]
            xs = [i + shift + 0.15 * (k / len(seconds) - 0.5) for k in range(len(seconds))]
            right.scatter(xs, seconds, s=9, color=f"C{index}", label=label if i == 0 else None)
    if several:
        right.legend(fontsize=8)
    left.set(ylabel="median step, ms")
    left.legend(fontsize=8)
    right.set_xticks(range(len(SCHEMES)), list(SCHEMES), rotation=30, ha="right", fontsize=8)
    right.set(ylabel="ms", title="one large mean, every round", yscale="log")
    right.grid(alpha=0.3)
    yield picture("aggregate", "A step by each strategy, and the mean of one large vector by each scheme.", figure)


def _curves(result: dict[str, Any]) -> Picture:
    p = result["facts"]["world_size"]
    figure, (left, right) = new_figure(11, 4.2, columns=2)
    for index, each in enumerate(result["training"]):
        style: dict[str, Any] = {"label": each["strategy"], "color": f"C{index % 10}", "linewidth": 1.2}
        style["linestyle"] = "-" if each["synchronous"] else "--"
        for axes, value in ((left, "test_loss"), (right, "test_accuracy")):
            axes.plot([point["seconds"] for point in each["curve"]], [point[value] for point in each["curve"]], **style)
            axes.set(xlabel="seconds of training", ylabel=value.replace("_", " "))
    left.set(yscale="log")
    right.legend(fontsize=7, ncols=2)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return picture(f"aggregate-{p}", f"Test loss and accuracy against wall time, {ranks_of(p)}.", figure)


if __name__ == "__main__":
    log.run(main)
