"""Measure the cost of one slow rank: every rank's time, the waits between ranks, and the remedies.

    bash scripts/run_collectives_lab.sh 2 straggler
    torchrun --standalone --nproc-per-node=4 apps/collectives_lab/straggler.py --delays=0,10

mnist_ddp's model trains in blocks of 16 steps while one rank sleeps, or every rank. A rank sleeps once in the
training, at the start of each block, before each aggregation, or in the middle of each backward pass. The time is
constant, or random with the same mean (exponential). The conditions take turns, so that other work on the machine
affects all of them.

Nothing is computed from the configured delay. Each rank notes when it entered and left each collective, and each sleep;
all read one clock. In a collective a rank waits until the last rank has entered it; the rest is communication.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from data import load
from distributed import collective, finish, gather_json, rendezvous, run_metadata, session
from model import Net
from numpy.typing import NDArray
from options import PLACES, check_size, parse
from samestep import ConfigError, log
from samestep.options import Options
from show import SHOWN_RANKS, Picture, Table, new_figure, picture, publish, ranks_of
from strategies import STRATEGIES, Strategy
from torch import nn
from training import Trainer
from waits import publish_waits

BLOCK = 16  # steps: a multiple of every local SGD's here
DRAWN = 4  # steps of a timeline in the picture
PARTS = ("computed", "slept", "waited", "communicated")  # of a rank's time


@dataclass(frozen=True)
class Condition:
    """Hold who sleeps where, and how long: milliseconds each time, or on average if ``kind`` is random."""

    strategy: str
    where: str = "aggregation"  # or "once" (in the first block), "start" (once a block), "backward"
    kind: str = "constant"  # or "random"
    who: str = "one rank"  # or "every rank"
    milliseconds: int = 0

    def __str__(self) -> str:
        if not self.milliseconds:
            return f"{self.strategy}, nobody sleeps"
        kind = "" if self.kind == "constant" else f" {self.kind}"
        where = self.where if self.where == "once" else f"in {self.where}"
        return f"{self.strategy}, {self.who} sleeps{kind} {self.milliseconds} ms {where}"


def conditions(options: Options) -> list[Condition]:
    """Return all delays under the first strategy, and under each strategy one delay in every way that was chosen.

    All delays come before each aggregation and in each backward pass, or in the only place that was chosen.
    """
    positive = [delay for delay in options.delays if delay]
    usual = min(positive, key=lambda delay: abs(delay - 10), default=0)
    first, *_ = names = options.strategies
    places = options.where if len(options.where) == 1 else ("aggregation", "backward")
    made = [Condition(first, where, milliseconds=d) for where in places for d in positive]
    for strategy in names:
        made.append(Condition(strategy))
        if usual:
            made += [Condition(strategy, where, milliseconds=usual) for where in PLACES]
            made += [Condition(strategy, "backward", "random", who, usual) for who in ("one rank", "every rank")]
    chosen = {c for c in made if not c.milliseconds or (c.where in options.where and c.kind in options.kind)}
    return sorted(chosen, key=lambda c: (names.index(c.strategy), made.index(c)))


class Delayed(Strategy):
    """Sleep on this rank, as a condition asks, before the strategy ``inner`` averages or during the backward pass."""

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.backward, self.every = inner, inner.backward, inner.every
        self.begin(Condition("none"), sleeps=False, seed=(0,))

    def begin(self, condition: Condition, sleeps: bool, seed: Sequence[int]) -> None:
        """Start a block under a condition. ``sleeps`` is True if this rank sleeps."""
        self.condition, self.sleeps, self.random = condition, sleeps, np.random.default_rng(seed)
        self.slept: list[tuple[float, float]] = []  # (begin, end), by time.monotonic()

    def sleep(self, where: str) -> None:
        """Sleep if the condition holds here."""
        if not self.sleeps or self.condition.where != where or not self.condition.milliseconds:
            return
        seconds = self.condition.milliseconds / 1000
        finish()  # a GPU would otherwise compute while its rank sleeps
        begun = time.monotonic()
        time.sleep(seconds if self.condition.kind == "constant" else float(self.random.exponential(seconds)))
        self.slept.append((begun, time.monotonic()))

    def prepare(self, model: nn.Module) -> nn.Module:
        # The middle of the backward pass: fc1 has its gradient, the convolutions do not yet. The hook comes
        # before the strategy's own, as a slow layer would.
        assert isinstance(model, Net)
        model.fc1.weight.register_post_accumulate_grad_hook(lambda _: self.sleep("backward"))
        return self.inner.prepare(model)

    def after_backward(self) -> None:
        if not self.every:
            self.sleep("aggregation")
        self.inner.after_backward()

    def after_step(self, step: int, is_last: bool) -> None:
        if self.every and (step + 1) % self.every == 0:
            self.sleep("aggregation")
        self.inner.after_step(step, is_last)


def train_block(trainer: Trainer, delayed: Delayed, condition: str) -> dict[str, Any]:
    """Train BLOCK steps; return what this rank noted, in seconds of the machine's clock.

    Args:
        trainer: trains one step of a strategy.
        delayed: its strategy, which sleeps.
        condition: name in the trace.
    """
    with collective("barrier before a block"):
        dist.barrier()
    session.events.clear()
    session.condition = condition
    begun = time.monotonic()
    delayed.sleep("once")
    delayed.sleep("start")
    steps = []
    for _ in range(BLOCK):
        steps.append(time.monotonic())
        trainer.update(trainer.batch())
        finish()
    session.condition = ""
    ended = time.monotonic()
    collectives = [event for event in session.events if event[0] != delayed.backward]
    return {"begun": begun, "ended": ended, "steps": steps, "collectives": collectives, "sleeps": delayed.slept}


def spans(blocks: Sequence[dict[str, Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return when each rank entered each collective, stopped to wait, and left it: three arrays [ranks, collectives].

    A rank waits until the last rank has entered.
    """
    events = [[event[1:] for event in block["collectives"]] for block in blocks]
    begin, end = np.moveaxis(np.array(events, dtype=np.float64).reshape(len(blocks), -1, 2), 2, 0)
    return begin, np.minimum(begin.max(axis=0), end), end


def analyze(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return where each rank's time in one block went, and which rank entered each collective last."""
    begin, until, end = spans(blocks)
    ranks = []
    for block, waited, inside in zip(blocks, (until - begin).sum(axis=1).tolist(), (end - begin).sum(axis=1).tolist()):
        slept = sum(woke - fell_asleep for fell_asleep, woke in block["sleeps"])
        seconds = block["ended"] - block["begun"]
        parts = (seconds - inside - slept, slept, waited, inside - waited)
        step_seconds = np.diff([*block["steps"], block["ended"]]).tolist()
        ranks.append({"seconds": seconds, "step_seconds": step_seconds, **dict(zip(PARTS, parts))})
    return {"ranks": ranks, "waited_for": begin.argmax(axis=0).tolist()}


def main() -> None:
    """Run the command ``straggler`` on this rank."""
    options = parse(["straggler", *sys.argv[1:]])
    world, device = rendezvous(options)
    if world.node_count != 1:
        raise ConfigError("straggler compares clocks: run it on one machine")
    check_size(options, world.world_size)
    slow_rank = world.world_size - 1 if options.slow_rank is None else options.slow_rank
    training, _ = load("mnist-5k", Path("data"), device)
    delayed = {name: Delayed(STRATEGIES[name]()) for name in options.strategies}
    trainers = {name: Trainer(strategy, options, training, world) for name, strategy in delayed.items()}
    tried = conditions(options)
    for condition in tried:
        log.info(f"planned: {condition}")
    measured: list[list[dict[str, Any]]] = [[] for _ in tried]
    timelines: dict[str, Any] = {}
    rounds = max(1, options.steps // BLOCK)
    bar = log.progress((rounds + 1) * len(tried), 0)
    for i in range(-1, rounds):  # one round to warm up
        for index, condition in enumerate(tried):
            name, slow = condition.strategy, condition.who == "every rank" or world.rank == slow_rank
            sleeps = slow and (i == 0 if condition.where == "once" else i >= 0)
            delayed[name].begin(condition, sleeps, [1000 * i + index + 2000, world.rank])
            label = str(condition) if i >= 0 else "warm-up"
            gathered = gather_json(train_block(trainers[name], delayed[name], label))
            if i >= 0:
                measured[index].append(analyze(gathered))
                timelines.setdefault(str(condition), gathered)  # of the first round
            bar.update()
    bar.close()
    result: dict[str, Any] = {
        "facts": run_metadata(world, device),
        "slow_rank": slow_rank,
        "block": BLOCK,
        "conditions": [{**asdict(c), "name": str(c), "blocks": blocks} for c, blocks in zip(tried, measured)],
        "timelines": timelines,
    }
    if world.rank == 0:
        publish(options.run_dir, f"straggler-{world.world_size}", result, tables(result), pictures)
        publish_waits(options, result["facts"])


# --- as tables and pictures ----------------------------------------------------------------------------------------


def costs(result: dict[str, Any], condition: dict[str, Any], rank: int) -> tuple[float, float]:
    """Return (slept, cost) in milliseconds per step: one rank's sleep, and its cost to ``rank``."""
    base = next(c for c in result["conditions"] if c["strategy"] == condition["strategy"] and c["milliseconds"] == 0)
    average = statistics.mean if condition["where"] == "once" else statistics.median
    slept = average([max(each["slept"] for each in block["ranks"]) for block in condition["blocks"]])
    cost = step_seconds(condition, condition, rank) - step_seconds(base, condition, rank)
    return slept * 1000 / result["block"], cost * 1000


def step_seconds(measured: dict[str, Any], like: dict[str, Any], rank: int) -> float:
    """Return the seconds of a step of the condition ``measured``, computed as suits the condition ``like``.

    By default, this is the median over the strategy's cycles (one step each, or several for local SGD). If delays are
    random, it is the mean, because their median means little. If the sleep comes once a block, it is the median over
    blocks; if it comes once in the training, the mean.
    """
    blocks = [block["ranks"][rank] for block in measured["blocks"]]
    if like["where"] in ("once", "start"):
        average = statistics.mean if like["where"] == "once" else statistics.median
        return average([float(block["seconds"]) / len(block["step_seconds"]) for block in blocks])
    every = int(like["strategy"].partition("local_")[2] or 1)
    steps = [float(seconds) for block in blocks for seconds in block["step_seconds"]]
    cycles = [statistics.mean(steps[i : i + every]) for i in range(0, len(steps), every)]
    return statistics.median(cycles) if like["kind"] == "constant" else statistics.mean(cycles)


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of one number of ranks."""
    p, per_step = result["facts"]["world_size"], 1000 / result["block"]
    shown = range(min(p, SHOWN_RANKS))
    rows, shares = [], []
    for condition in result["conditions"]:
        blocks = condition["blocks"]
        if condition["milliseconds"]:
            cost = [costs(result, condition, rank) for rank in shown]
            rows.append([condition["name"], f"{cost[0][0]:.2f}", *(f"{c:+.2f}" for _, c in cost)])
        last = [rank for block in blocks for rank in block["waited_for"]]
        slowest = max(range(p), key=lambda rank: (last.count(rank), rank))
        for rank in shown:
            parts = [statistics.median(block["ranks"][rank][part] for block in blocks) * per_step for part in PARTS]
            whom = f"rank {slowest}: {last.count(slowest)} of {len(last)}" if rank == 0 and last else ""
            name = condition["name"] if rank == 0 else ""
            shares.append([name, str(rank), *(f"{part:.2f}" for part in parts), whom])
    if rows:
        yield Table(
            f"What a delay costs, {ranks_of(p)}; rank {result['slow_rank']} is the slow one",
            "Milliseconds per step, measured, more than when nobody slept; medians, means if delays are random.",
            ["condition", "slept", *(f"cost on rank {rank}" for rank in shown)],
            rows,
        )
    times = []
    for condition in result["conditions"]:
        who, where, sleep = condition["who"], condition["where"], f"{condition['kind']} {condition['milliseconds']} ms"
        seconds = sum(max(rank["seconds"] for rank in block["ranks"]) for block in condition["blocks"])
        slept = [who, where, sleep] if condition["milliseconds"] else ["nobody", "", ""]
        times.append([condition["strategy"], *slept, f"{seconds:.2f} s"])
    steps = result["block"] * len(result["conditions"][0]["blocks"])
    yield Table(
        f"Train time of {steps} steps, {ranks_of(p)}",
        f"Of the slowest rank. A sleep in start comes once in {result['block']} steps, a sleep once in all steps.",
        ["strategy", "who sleeps", "where", "sleep", "train time"],
        times,
    )
    yield Table(
        f"Where the time went, {ranks_of(p)}",
        "Milliseconds per step. Last: the rank that entered most collectives last, so that the others waited for it.",
        ["condition", "rank", *PARTS, "last"],
        shares,
        long=True,
    )


COLORS = {"compute": "#9ecae1", "sleep": "#31a354", "wait": "#fdae6b", "communicate": "#de2d26"}


def pictures(results: list[dict[str, Any]]) -> Iterator[Picture]:
    """Yield the timelines and the costs of each number of ranks."""
    for result in results:
        yield _timelines(result)
        yield _costs(result)


def _timelines(result: dict[str, Any]) -> Picture:
    from matplotlib.patches import Patch

    p, names = result["facts"]["world_size"], _drawn(list(result["timelines"]))
    figure, panels = new_figure(11, (0.32 * p + 0.75) * len(names), rows=len(names))
    for axes, name in zip(panels, names):
        _draw_timeline(axes, result["timelines"][name])
        axes.set_title(name, fontsize=9, loc="left")
    panels[-1].set_xlabel("ms")
    figure.legend(handles=[Patch(color=c, label=k) for k, c in COLORS.items()], ncols=4, loc="outside upper right")
    caption = f"Who waits for whom: the first {DRAWN} steps of a block on {ranks_of(p)}, as every rank noted them."
    return picture(f"straggler-{p}", caption, figure)


def _costs(result: dict[str, Any]) -> Picture:
    p = result["facts"]["world_size"]
    figure, (axes,) = new_figure(6, 3.6)
    for where, marker in (("aggregation", "o"), ("backward", "s")):
        like = {"strategy": result["conditions"][0]["strategy"], "where": where, "kind": "constant"}
        chosen = [c for c in result["conditions"] if c["milliseconds"] and like.items() <= c.items()]
        for rank in range(min(p, SHOWN_RANKS)):
            points = sorted(costs(result, condition, rank) for condition in chosen)
            label = f"in {where}, on rank {rank}"
            axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=4, label=label)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="slept per step by one rank, ms", ylabel="cost per step, ms")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    caption = "Cost per step against one rank's delay, on every rank; the dotted line is cost = delay."
    return picture(f"straggler-cost-{p}", caption, figure)


def _drawn(names: list[str]) -> list[str]:
    """Return a few timelines that show the most; the numbers of the others are in the tables."""
    wanted = (
        ("all_reduce", "nobody"),
        ("all_reduce", "one rank sleeps 10 ms in aggregation"),
        ("all_reduce", "one rank sleeps 10 ms in backward"),
        ("overlap", "one rank sleeps 10 ms in backward"),
        ("all_reduce", "every rank sleeps random"),
        ("local_4", "every rank sleeps random"),
    )
    found = [name for each in wanted for name in names if name.startswith(f"{each[0]}, {each[1]}")]
    return found or names[: len(wanted)]


def _draw_timeline(axes: Any, blocks: list[dict[str, Any]]) -> None:
    origin = min(block["begun"] for block in blocks)
    until = min(block["steps"][DRAWN] for block in blocks)
    for rank, (block, collectives) in enumerate(zip(blocks, np.stack(spans(blocks), axis=2))):
        drawn = [("compute", block["begun"], until), *(("sleep", *sleep) for sleep in block["sleeps"])]
        for begin, waited_until, end in collectives:
            drawn += [("wait", begin, waited_until), ("communicate", waited_until, end)]
        for kind, begin, end in drawn:
            if begin < until:
                width = (min(end, until) - begin) * 1000
                axes.broken_barh([((begin - origin) * 1000, width)], (rank - 0.4, 0.8), color=COLORS[kind])
    axes.set_yticks(range(len(blocks)), [f"rank {r}" for r in range(len(blocks))], fontsize=8)
    axes.invert_yaxis()


if __name__ == "__main__":
    log.run(main)
