"""Measure the time that slow ranks cost with several strategies, from every rank's timestamps.

    bash scripts/run_collectives_lab.sh 2 straggler
    torchrun --standalone --nproc-per-node=4 apps/collectives_lab/straggler.py --delays=0,10

mnist_ddp's model trains in blocks of 16 steps while no rank, one rank or every rank sleeps. A rank sleeps once in the
training, at the start of each block, before each aggregation, or in the middle of each backward pass. The length of a
sleep is constant, or exponentially distributed with the same mean. The conditions alternate, so that other work on the
machine affects all conditions alike.

The results come only from measured times, not from the configured delay. Each rank records the start and the end of
each collective and each sleep, by a clock that all ranks share. A rank waits in a collective until the last rank has
entered it. The remaining time in the collective is communication.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
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

BLOCK = 16  # steps per block; a multiple of each local SGD's averaging interval
DRAWN = 4  # number of steps in a drawn timeline
PARTS = ("computed", "slept", "waited", "communicated")  # parts of a rank's time


@dataclass(frozen=True)
class Condition:
    """A measured condition: a strategy, and the ranks, the place and the length of the sleeps."""

    strategy: str
    where: str = "aggregation"  # or "once" (in the first block), "start" (of each block), "backward"
    kind: str = "constant"  # or "random"
    who: str = "one rank"  # or "every rank"
    milliseconds: int = 0  # length of a sleep, or its mean if ``kind`` is random

    def __str__(self) -> str:
        if not self.milliseconds:
            return f"{self.strategy}, nobody sleeps"
        how_long = f"{self.milliseconds} ms"
        if self.kind != "constant":
            how_long = f"{self.kind} {how_long}"
        where = self.where
        if where != "once":
            where = f"in {where}"
        return f"{self.strategy}, {self.who} sleeps {how_long} {where}"


def conditions(options: Options) -> list[Condition]:
    """Return the conditions to measure.

    The first strategy gets all delays, in aggregation and backward, or in the only place of --where. Each strategy gets
    a condition without sleeps. Each strategy also gets the delay nearest to 10 ms: constant in every place, and random
    in backward. --where and --kind restrict these conditions. If --sleeps is given, each strategy gets a condition
    without sleeps and these sleeps.
    """
    if options.sleeps:
        return _listed(options)
    positive = [delay for delay in options.delays if delay]
    usual = min(positive, key=lambda delay: abs(delay - 10), default=0)
    places = options.where if len(options.where) == 1 else ("aggregation", "backward")
    found: dict[Condition, None] = {}  # an ordered set
    for strategy in options.strategies:
        made = []
        if strategy == options.strategies[0]:
            for where in places:
                made += [Condition(strategy, where, milliseconds=delay) for delay in positive]
        made.append(Condition(strategy))
        if usual:
            made += [Condition(strategy, where, milliseconds=usual) for where in PLACES]
            for who in ("one rank", "every rank"):
                made.append(Condition(strategy, "backward", kind="random", who=who, milliseconds=usual))
        found |= dict.fromkeys(each for each in made if is_chosen(each, options))
    return list(found)


def _listed(options: Options) -> list[Condition]:
    """Return a condition without sleeps, and the conditions of --sleeps, for each strategy."""
    listed = []
    for strategy in options.strategies:
        listed.append(Condition(strategy))
        listed += [Condition(strategy, where, milliseconds=milliseconds) for where, milliseconds in options.sleeps]
    return listed


def is_chosen(condition: Condition, options: Options) -> bool:
    """Return whether --where and --kind select a condition. The condition without sleeps is always selected."""
    if not condition.milliseconds:
        return True
    return condition.where in options.where and condition.kind in options.kind


class Delayed(Strategy):
    """A strategy that wraps the strategy ``inner``, and adds the sleeps of a condition."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.backward = inner.backward
        self.every = inner.every
        self.begin(Condition("none"), sleeps=False, seed=(0,))

    def begin(self, condition: Condition, sleeps: bool, seed: Sequence[int]) -> None:
        """Start a block under a condition.

        Args:
            condition: place, kind and length of the sleeps.
            sleeps: whether this rank sleeps.
            seed: seed of random sleeps.
        """
        self.condition = condition
        self.sleeps = sleeps
        self.random = np.random.default_rng(seed)
        self.slept: list[tuple[float, float]] = []  # (begin, end), by time.monotonic()

    def sleep(self, where: str) -> None:
        """Sleep if the condition has a sleep of this rank at the place ``where``."""
        is_due = self.sleeps and self.condition.where == where
        if not is_due or not self.condition.milliseconds:
            return
        seconds = self.condition.milliseconds / 1000
        if self.condition.kind == "random":
            seconds = float(self.random.exponential(seconds))
        finish()  # otherwise, the GPU would compute while its rank sleeps
        begun = time.monotonic()
        time.sleep(seconds)
        self.slept.append((begun, time.monotonic()))

    def prepare(self, model: nn.Module) -> nn.Module:
        # The sleep is in the middle of the backward pass, after the gradient of fc1 and before the convolutions. Like a
        # slow layer, the sleep delays the strategy's hook, because this hook is registered later.
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
    """Train BLOCK steps, and return this rank's timestamps, in seconds of time.monotonic().

    Args:
        trainer: trainer of a strategy.
        delayed: the trainer's strategy, which sleeps.
        condition: name of the condition in the trace.
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
    """Return three arrays [ranks, collectives] of times in seconds: a rank's entry, the end of its wait, and its exit.

    A rank waits until the last rank has entered the collective.
    """
    events = []
    for block in blocks:
        events.append([(begin, end) for _, begin, end in block["collectives"]])
    times = np.array(events, dtype=np.float64).reshape(len(blocks), -1, 2)
    begin = times[:, :, 0]
    end = times[:, :, 1]
    last_begin = begin.max(axis=0)
    return begin, np.minimum(last_begin, end), end


def analyze(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the PARTS of each rank's time in one block, in seconds, and the rank that entered each collective last."""
    begin, until, end = spans(blocks)
    waits = (until - begin).sum(axis=1).tolist()
    insides = (end - begin).sum(axis=1).tolist()
    ranks = []
    for block, waited, inside in zip(blocks, waits, insides):
        slept = sum(woke - fell_asleep for fell_asleep, woke in block["sleeps"])
        seconds = block["ended"] - block["begun"]
        ranks.append(
            {
                "seconds": seconds,
                "step_seconds": np.diff([*block["steps"], block["ended"]]).tolist(),
                "computed": seconds - inside - slept,
                "slept": slept,
                "waited": waited,
                "communicated": inside - waited,
            }
        )
    return {"ranks": ranks, "waited_for": begin.argmax(axis=0).tolist()}


def main() -> None:
    """Run the command ``straggler`` on this rank.

    Raises:
        ConfigError: an option is invalid, or the job runs on several machines.
    """
    options = parse(["straggler", *sys.argv[1:]])
    world, device = rendezvous(options)
    if world.node_count != 1:
        raise ConfigError("straggler compares clocks: run it on one machine")
    check_size(options, world.world_size)
    slow_rank = options.slow_rank
    if slow_rank is None:
        slow_rank = world.world_size - 1
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
    for i in range(-1, rounds):  # round -1 is the warm-up
        for index, condition in enumerate(tried):
            name = condition.strategy
            is_slow = condition.who == "every rank" or world.rank == slow_rank
            sleeps = is_slow and sleeps_in_round(condition, i)
            delayed[name].begin(condition, sleeps, seed=[1000 * i + index + 2000, world.rank])
            label = str(condition) if i >= 0 else "warm-up"
            block = train_block(trainers[name], delayed[name], label)
            gathered = gather_json(block)
            if i >= 0:
                measured[index].append(analyze(gathered))
                timelines.setdefault(str(condition), gathered)  # stores only the first round
            bar.update()
    bar.close()
    found = []
    for condition, blocks in zip(tried, measured):
        found.append({**asdict(condition), "name": str(condition), "blocks": blocks})
    result: dict[str, Any] = {
        "facts": run_metadata(world, device),
        "slow_rank": slow_rank,
        "block": BLOCK,
        "conditions": found,
        "timelines": timelines,
    }
    if world.rank == 0:
        publish(options.run_dir, f"straggler-{world.world_size}", result, tables(result), pictures)
        publish_waits(options, result["facts"])


def sleeps_in_round(condition: Condition, i: int) -> bool:
    """Return whether a condition's ranks sleep in round ``i``. Round -1 is the warm-up."""
    if condition.where == "once":
        return i == 0
    return i >= 0


# --- as tables and pictures ----------------------------------------------------------------------------------------


def costs(result: dict[str, Any], condition: dict[str, Any], rank: int) -> tuple[float, float]:
    """Return the longest sleep of any rank and the extra time of ``rank``, both in milliseconds per step.

    Args:
        result: result of ``straggler`` at one world size.
        condition: a measured condition of the result.
        rank: rank whose extra time is returned.
    """
    alike = [each for each in result["conditions"] if each["strategy"] == condition["strategy"]]
    base = next(each for each in alike if each["milliseconds"] == 0)
    sleeps = [max(rank["slept"] for rank in block["ranks"]) for block in condition["blocks"]]
    slept = statistics.median(sleeps)
    if condition["where"] == "once":
        slept = statistics.mean(sleeps)
    cost = step_seconds(condition, condition, rank) - step_seconds(base, condition, rank)
    return slept * 1000 / result["block"], cost * 1000


def step_seconds(measured: dict[str, Any], like: dict[str, Any], rank: int) -> float:
    """Return the seconds per step under the condition ``measured``, by the statistic for the condition ``like``.

    The default is the median over the strategy's cycles (one step, or several steps for local SGD). Random delays need
    the mean over cycles, because a median would ignore the longest delays. Conditions with a sleep per block use the
    median over blocks. Conditions with a single sleep in the training use the mean over blocks.
    """
    blocks = [block["ranks"][rank] for block in measured["blocks"]]
    if like["where"] in ("once", "start"):
        times = [float(block["seconds"]) / len(block["step_seconds"]) for block in blocks]
    else:
        every = int(like["strategy"].partition("local_")[2] or 1)
        steps: list[float] = []
        for block in blocks:
            steps += block["step_seconds"]
        times = [statistics.mean(steps[i : i + every]) for i in range(0, len(steps), every)]
    if like["where"] == "once" or like["kind"] == "random":
        return statistics.mean(times)
    return statistics.median(times)


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of one world size."""
    p = result["facts"]["world_size"]
    shown = range(min(p, SHOWN_RANKS))
    rows = []
    times = []
    shares = []
    for condition in result["conditions"]:
        if condition["milliseconds"]:
            rows.append(_cost_row(result, condition, shown))
        times.append(_time_row(condition))
        shares += _share_rows(condition, shown, block_steps=result["block"])
    if rows:
        yield Table(
            f"What a delay costs, {ranks_of(p)}; rank {result['slow_rank']} is the slow one",
            "Milliseconds per step, measured, more than when nobody slept; medians, means if delays are random.",
            header=["condition", "slept", *(f"cost on rank {rank}" for rank in shown)],
            rows=rows,
        )
    steps = result["block"] * len(result["conditions"][0]["blocks"])
    yield Table(
        f"Train time of {steps} steps, {ranks_of(p)}",
        f"Of the slowest rank. A sleep in start comes once in {result['block']} steps, a sleep once in all steps.",
        header=["strategy", "who sleeps", "where", "sleep", "train time"],
        rows=times,
    )
    yield Table(
        f"Where the time went, {ranks_of(p)}",
        "Milliseconds per step. Last: the rank that entered most collectives last, so that the others waited for it.",
        header=["condition", "rank", *PARTS, "last"],
        rows=shares,
        long=True,
    )


def _cost_row(result: dict[str, Any], condition: dict[str, Any], shown: Sequence[int]) -> list[str]:
    found = [costs(result, condition, rank) for rank in shown]
    slept, _ = found[0]
    cells = [f"{cost:+.2f}" for _, cost in found]
    return [condition["name"], f"{slept:.2f}", *cells]


def _time_row(condition: dict[str, Any]) -> list[str]:
    seconds = 0.0
    for block in condition["blocks"]:
        seconds += max(rank["seconds"] for rank in block["ranks"])
    slept = ["nobody", "", ""]
    if condition["milliseconds"]:
        slept = [condition["who"], condition["where"], f"{condition['kind']} {condition['milliseconds']} ms"]
    return [condition["strategy"], *slept, f"{seconds:.2f} s"]


def _share_rows(condition: dict[str, Any], shown: Sequence[int], block_steps: int) -> list[list[str]]:
    """Return a row of PARTS for each shown rank. The first row also has the rank that most often entered last."""
    blocks = condition["blocks"]
    last = Counter[int]()
    for block in blocks:
        last.update(block["waited_for"])
    rows = []
    for rank in shown:
        cells = []
        for part in PARTS:
            seconds = statistics.median(block["ranks"][rank][part] for block in blocks)
            cells.append(f"{seconds * 1000 / block_steps:.2f}")
        rows.append(["", str(rank), *cells, ""])
    rows[0][0] = condition["name"]
    if last:
        slowest = max(last, key=lambda rank: (last[rank], rank))
        rows[0][-1] = f"rank {slowest}: {last[slowest]} of {sum(last.values())}"
    return rows


COLORS = {"compute": "#9ecae1", "sleep": "#31a354", "wait": "#fdae6b", "communicate": "#de2d26"}


def pictures(results: list[dict[str, Any]]) -> Iterator[Picture]:
    """Yield a picture of the timelines and a picture of the costs for each world size."""
    for result in results:
        yield _timelines(result)
        yield _costs(result)


def _timelines(result: dict[str, Any]) -> Picture:
    from matplotlib.patches import Patch

    p = result["facts"]["world_size"]
    names = _drawn(list(result["timelines"]))
    height = 0.32 * p + 0.75  # height of a panel, in inches
    figure, panels = new_figure(11, height * len(names), rows=len(names))
    for axes, name in zip(panels, names):
        _draw_timeline(axes, result["timelines"][name])
        axes.set_title(name, fontsize=9, loc="left")
    panels[-1].set_xlabel("ms")
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, ncols=4, loc="outside upper right")
    caption = f"Who waits for whom: the first {DRAWN} steps of a block on {ranks_of(p)}, as every rank noted them."
    return picture(f"straggler-{p}", caption, figure)


def _costs(result: dict[str, Any]) -> Picture:
    p = result["facts"]["world_size"]
    figure, (axes,) = new_figure(6, 3.6)
    first = result["conditions"][0]["strategy"]
    for where, marker in (("aggregation", "o"), ("backward", "s")):
        like = {"strategy": first, "where": where, "kind": "constant"}
        chosen = [each for each in result["conditions"] if each["milliseconds"] and like.items() <= each.items()]
        for rank in range(min(p, SHOWN_RANKS)):
            points = sorted(costs(result, condition, rank) for condition in chosen)
            sleeps = [slept for slept, _ in points]
            prices = [cost for _, cost in points]
            label = f"in {where}, on rank {rank}"
            axes.plot(sleeps, prices, marker=marker, markersize=4, label=label)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="slept per step by one rank, ms", ylabel="cost per step, ms")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    caption = "Cost per step against one rank's delay, on every rank; the dotted line is cost = delay."
    return picture(f"straggler-cost-{p}", caption, figure)


def _drawn(names: list[str]) -> list[str]:
    """Return the names of the timelines to draw. The tables contain all conditions."""
    wanted = (
        "all_reduce, nobody",
        "all_reduce, one rank sleeps 10 ms in aggregation",
        "all_reduce, one rank sleeps 10 ms in backward",
        "overlap, one rank sleeps 10 ms in backward",
        "all_reduce, every rank sleeps random",
        "local_4, every rank sleeps random",
    )
    found = []
    for begin in wanted:
        found += [name for name in names if name.startswith(begin)]
    return found or names[: len(wanted)]


def _draw_timeline(axes: Any, blocks: list[dict[str, Any]]) -> None:
    origin = min(block["begun"] for block in blocks)
    until = min(block["steps"][DRAWN] for block in blocks)
    collectives = np.stack(spans(blocks), axis=2)  # [ranks, collectives, 3]
    for rank, block in enumerate(blocks):
        drawn = [("compute", block["begun"], until)]
        for begin, end in block["sleeps"]:
            drawn.append(("sleep", begin, end))
        for begin, waited_until, end in collectives[rank]:
            drawn.append(("wait", begin, waited_until))
            drawn.append(("communicate", waited_until, end))
        for kind, begin, end in drawn:
            if begin < until:
                left = (begin - origin) * 1000
                width = (min(end, until) - begin) * 1000
                axes.broken_barh([(left, width)], (rank - 0.4, 0.8), color=COLORS[kind])
    axes.set_yticks(range(len(blocks)), [f"rank {r}" for r in range(len(blocks))], fontsize=8)
    axes.invert_yaxis()


if __name__ == "__main__":
    log.run(main)
