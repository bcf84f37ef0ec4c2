"""One slow rank: what its delay costs every rank, who waits for whom, and what helps.

    bash scripts/run_collectives_lab.sh 2 straggler
    torchrun --standalone --nproc-per-node=4 apps/collectives_lab/straggler.py --delays=0,10

mnist_ddp's model trains on, in blocks of 16 steps, while a rank sleeps: at the start of a block, before each
aggregation, or in the middle of each backward; a constant time, or a random one of the same mean (exponential); one
rank, or every rank. The conditions take turns, so that whatever else the machine does falls on all of them.

Nothing is computed from the configured delay. Each rank notes when it entered and left each collective, and each sleep;
all read one clock. In a collective a rank waits until the last rank has entered it; the rest is communication.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Split, load
from model import build_model
from options import parse
from ranks import facts, finish, gather_json, rendezvous, talk, talking, write_json
from samestep import UserError, env, log
from samestep.sharding import GlobalBatches, step_seed
from show import Picture, Table, new_figure, picture, ranks_of
from strategies import STRATEGIES, Strategy

BLOCK = 16  # steps: a multiple of every local SGD's here
COMPARED = ("all_reduce", "overlap", "local_4", "local_16")
DRAWN = 4  # steps of a timeline in the picture


@dataclass(frozen=True)
class Condition:
    """Who sleeps where, and how long: milliseconds each time, or on average where ``kind`` is random."""

    strategy: str
    where: str = "aggregation"  # or "start", once a block; or "backward"
    kind: str = "constant"  # or "random"
    who: str = "one rank"  # or "every rank"
    milliseconds: int = 0

    def __str__(self) -> str:
        if not self.milliseconds:
            return f"{self.strategy}, nobody sleeps"
        kind = "" if self.kind == "constant" else f" {self.kind}"
        return f"{self.strategy}, {self.who} sleeps{kind} {self.milliseconds} ms in {self.where}"


def conditions(delays: Sequence[int]) -> list[Condition]:
    """All delays under all_reduce; under each strategy the same delay in every way."""
    some = [delay for delay in delays if delay]
    usual = min(some, key=lambda delay: abs(delay - 10), default=0)
    made = [Condition("all_reduce", where, milliseconds=d) for where in ("aggregation", "backward") for d in some]
    for strategy in COMPARED:
        made.append(Condition(strategy))
        made.append(Condition(strategy, "start", milliseconds=usual))
        made += [Condition(strategy, where, milliseconds=usual) for where in ("aggregation", "backward")]
        made += [Condition(strategy, "backward", "random", who, usual) for who in ("one rank", "every rank")]
    return sorted(set(made), key=lambda c: (COMPARED.index(c.strategy), made.index(c)))


class Sleeper:
    """This rank's delays under one condition, and when they really were."""

    def __init__(self, condition: Condition, slow_rank: int, world: env.World, seed: int) -> None:
        self.condition = condition
        self.sleeps = condition.who == "every rank" or world.rank == slow_rank
        self.random = np.random.default_rng([seed, world.rank])
        self.slept: list[tuple[float, float]] = []

    def sleep(self, where: str) -> None:
        if not self.sleeps or self.condition.where != where or not self.condition.milliseconds:
            return
        seconds = self.condition.milliseconds / 1000
        finish()  # a GPU would compute on while its rank sleeps
        begun = time.monotonic()
        time.sleep(seconds if self.condition.kind == "constant" else float(self.random.exponential(seconds)))
        self.slept.append((begun, time.monotonic()))


class Bench:
    """A model in training by one strategy, to run blocks of steps on."""

    def __init__(self, name: str, options: Namespace, world: env.World, device: torch.device, training: Split) -> None:
        self.options, self.training = options, training
        self.dtype = getattr(torch, options.dtype)
        self.model = build_model(options.dropout, self.dtype, options.seed).to(device)
        # In the middle of backward: fc1's gradient is there, those of the convolutions are not. Before the strategy's
        # own hooks, as a slow layer would be.
        self.model.fc1.weight.register_post_accumulate_grad_hook(lambda _: self.sleeper.sleep("backward"))
        self.strategy: Strategy = STRATEGIES[name]()
        self.module = self.strategy.prepare(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=options.momentum)
        self.batches = GlobalBatches(
            len(training.labels), options.global_batch_size, options.seed, world.rank, world.world_size
        )
        self.step = 0

    def train_step(self) -> None:
        """One update, as in aggregate.py, with the sleeper before the strategy averages: between backward and the
        step, or after it, and not every time, in local SGD. In backward it sleeps in the hook above."""
        strategy, options, every = self.strategy, self.options, getattr(self.strategy, "every", 0)
        torch.manual_seed(step_seed(options.seed, self.step))
        images, labels = self.training.batch(self.batches.indices(self.step), self.dtype)
        rows = self.batches.rows(self.step)
        self.optimizer.zero_grad()
        loss_sum = F.nll_loss(self.module(images, rows), labels, reduction="sum")
        with talk(strategy.backward):
            (loss_sum * (dist.get_world_size() / rows.global_size)).backward()
        if not every:
            self.sleeper.sleep("aggregation")
        strategy.after_backward()
        self.optimizer.step()
        if every and (self.step + 1) % every == 0:
            self.sleeper.sleep("aggregation")
        strategy.after_step(self.step, last=False)
        finish()
        self.step += 1

    def block(self, sleeper: Sleeper) -> dict[str, Any]:
        """Train BLOCK steps; what this rank noted, in seconds of the machine's clock."""
        self.sleeper = sleeper
        with talk("barrier before a block"):
            dist.barrier()
        talking.events.clear()
        begun = time.monotonic()
        sleeper.sleep("start")
        steps = []
        for _ in range(BLOCK):
            steps.append(time.monotonic())
            self.train_step()
        ended = time.monotonic()
        collectives = [event for event in talking.events if event[0] != self.strategy.backward]
        return {"begun": begun, "ended": ended, "steps": steps, "collectives": collectives, "sleeps": sleeper.slept}


def analyse(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One block as all ranks noted it: for each rank the seconds it computed, slept, waited and communicated, and for
    each collective who came last."""
    last_entries, waited_for = [], []
    for each in zip(*(block["collectives"] for block in blocks)):
        entries = [begin for _, begin, _ in each]
        last_entries.append(max(entries))
        waited_for.append(entries.index(max(entries)))
    ranks = []
    for block in blocks:
        asleep = sum(end - begin for begin, end in block["sleeps"])
        waits = [max(0.0, min(last, end) - begin) for last, (_, begin, end) in zip(last_entries, block["collectives"])]
        inside = sum(end - begin for _, begin, end in block["collectives"])
        total = block["ended"] - block["begun"]
        ranks.append(
            {
                "seconds": total,
                "step_seconds": [b - a for a, b in zip(block["steps"], [*block["steps"][1:], block["ended"]])],
                "computed": total - inside - asleep,
                "slept": asleep,
                "waited": sum(waits),
                "communicated": inside - sum(waits),
            }
        )
    return {"ranks": ranks, "waited_for": waited_for}


def main() -> None:
    options = parse(["straggler", *sys.argv[1:]])
    world, device = rendezvous(options)
    if world.node_count != 1:
        raise UserError("straggler compares clocks: run it on one machine")
    slow_rank = world.world_size - 1 if options.slow_rank is None else options.slow_rank
    if slow_rank >= world.world_size:
        raise UserError(f"--slow-rank {slow_rank} is not below N={world.world_size}")
    rounds = max(1, options.steps // BLOCK)
    training, _ = load("mnist-5k", Path("data"), device)
    benches = {name: Bench(name, options, world, device, training) for name in COMPARED}
    tried = conditions(options.delays)
    measured: list[list[dict[str, Any]]] = [[] for _ in tried]
    timelines: dict[str, Any] = {}
    bar = log.progress((rounds + 1) * len(tried), 0)
    for i in range(-1, rounds):  # one round to warm up
        for index, condition in enumerate(tried):
            mine = benches[condition.strategy].block(Sleeper(condition, slow_rank, world, 1000 * i + index + 2000))
            everyones = gather_json(mine, device)
            if i >= 0:
                measured[index].append(analyse(everyones))
            if i == 0:
                timelines[str(condition)] = everyones
            bar.update()
    bar.close()
    found = {
        "facts": facts(world, device),
        "slow_rank": slow_rank,
        "block": BLOCK,
        "conditions": [{**asdict(c), "name": str(c), "blocks": blocks} for c, blocks in zip(tried, measured)],
        "timelines": timelines,
    }
    if world.rank == 0:
        write_json(options.run_dir, f"straggler-{world.world_size}", found)
        for table in tables([found]):
            if not table.long:
                log.info(table.text())


# --- as tables and pictures ----------------------------------------------------------------------------------------


def costs(found: dict[str, Any], condition: dict[str, Any], rank: int) -> tuple[float, float]:
    """Milliseconds a step that this condition costs ``rank``, against nobody sleeping, and that one rank slept."""
    base = next(c for c in found["conditions"] if c["strategy"] == condition["strategy"] and c["milliseconds"] == 0)
    slept = statistics.median(max(each["slept"] for each in block["ranks"]) for block in condition["blocks"])
    cost = step_seconds(condition, condition, rank) - step_seconds(base, condition, rank)
    return cost * 1000, slept * 1000 / found["block"]


def step_seconds(measured: dict[str, Any], like: dict[str, Any], rank: int) -> float:
    """Seconds of a step: the median over the strategy's cycles, which are steps or, for local SGD, several; the mean
    where delays are random, whose median says little; the median over blocks where the sleep is once a block."""
    blocks = [block["ranks"][rank] for block in measured["blocks"]]
    if like["where"] == "start":
        return statistics.median(float(block["seconds"]) / len(block["step_seconds"]) for block in blocks)
    every = int(like["strategy"].partition("local_")[2] or 1)
    steps = [float(seconds) for block in blocks for seconds in block["step_seconds"]]
    cycles = [statistics.mean(steps[i : i + every]) for i in range(0, len(steps), every)]
    return statistics.median(cycles) if like["kind"] == "constant" else statistics.mean(cycles)


def tables(results: list[dict[str, Any]]) -> list[Table]:
    made = []
    for found in results:
        p, scale = found["facts"]["world_size"], 1000 / found["block"]
        shown = range(min(p, 4))
        rows, shares = [], []
        for condition in found["conditions"]:
            name = condition["name"]
            if condition["milliseconds"]:
                cost = [costs(found, condition, rank) for rank in shown]
                rows.append([name, f"{cost[0][1]:.2f}", *(f"{c:+.2f}" for c, _ in cost)])
            last = [r for block in condition["blocks"] for r in block["waited_for"]]
            for rank in shown:
                parts = [
                    statistics.median(block["ranks"][rank][part] for block in condition["blocks"]) * scale
                    for part in ("computed", "slept", "waited", "communicated")
                ]
                others = [sum(r == other for r in last) for other in range(p)]
                worst = max((n, other) for other, n in enumerate(others))
                whom = f"rank {worst[1]}: {worst[0]} of {len(last)}" if rank == 0 and last else ""
                shares.append([name if rank == 0 else "", str(rank), *(f"{each:.2f}" for each in parts), whom])
        note = "Milliseconds a step, measured, more than when nobody slept; medians, means where delays are random."
        header = ["condition", "slept", *(f"cost on rank {r}" for r in shown)]
        made.append(
            Table(f"What a delay costs, {ranks_of(p)}; rank {found['slow_rank']} is the slow one", note, header, rows)
        )
        note = "Milliseconds a step. Last: who entered most collectives last, so that the others waited for it."
        header = ["condition", "rank", "computed", "slept", "waited", "communicated", "last"]
        made.append(Table(f"Where the time went, {ranks_of(p)}", note, header, shares, long=True))
    return made


COLOURS = {"compute": "#9ecae1", "sleep": "#31a354", "wait": "#fdae6b", "communicate": "#de2d26"}


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    made = []
    for found in results:
        p = found["facts"]["world_size"]
        chosen = _drawn(list(found["timelines"]))
        figure = new_figure(11, (0.32 * p + 0.75) * len(chosen))
        for axes, name in zip(figure.subplots(len(chosen), 1, squeeze=False)[:, 0], chosen):
            _draw_timeline(axes, found["timelines"][name])
            axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("ms")
        from matplotlib.patches import Patch

        figure.legend(handles=[Patch(color=c, label=k) for k, c in COLOURS.items()], ncols=4, loc="outside upper right")
        caption = f"Who waits for whom: the first {DRAWN} steps of a block on {ranks_of(p)}, as every rank noted them."
        made.append(picture(f"straggler-{p}", caption, figure))

        figure = new_figure(6, 3.6)
        axes = figure.subplots()
        for where, marker in (("aggregation", "o"), ("backward", "s")):
            some = [c for c in found["conditions"] if c["where"] == where and c["milliseconds"]
                    and c["strategy"] == "all_reduce" and c["kind"] == "constant"]  # fmt: skip
            for rank in range(min(p, 4)):
                points = sorted((costs(found, c, rank)[1], costs(found, c, rank)[0]) for c in some)
                label = f"in {where}, on rank {rank}"
                axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, markersize=4, label=label)
        axes.axline((0, 0), slope=1, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel="slept a step by one rank, ms", ylabel="cost a step, ms")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
        caption = "Cost per step against one rank's delay, on every rank; the dotted line is cost = delay."
        made.append(picture(f"straggler-cost-{p}", caption, figure))
    return made


def _drawn(names: list[str]) -> list[str]:
    """A few timelines that tell the story; the numbers of the others are in the tables."""
    wanted = []
    for strategy, what in (
        ("all_reduce", "nobody"),
        ("all_reduce", "one rank sleeps 10 ms in aggregation"),
        ("all_reduce", "one rank sleeps 10 ms in backward"),
        ("overlap", "one rank sleeps 10 ms in backward"),
        ("all_reduce", "every rank sleeps random"),
        ("local_4", "every rank sleeps random"),
    ):
        wanted += [name for name in names if name.startswith(f"{strategy},") and what in name][:1]
    return wanted or names[:6]


def _draw_timeline(axes: Any, blocks: list[dict[str, Any]]) -> None:
    origin = min(block["begun"] for block in blocks)
    until = min(block["steps"][DRAWN] for block in blocks)
    last_entries = [max(begin for _, begin, _ in each) for each in zip(*(block["collectives"] for block in blocks))]
    for rank, block in enumerate(blocks):
        spans = [("compute", block["begun"], until)]
        spans += [("sleep", begin, end) for begin, end in block["sleeps"]]
        for last, (_, begin, end) in zip(last_entries, block["collectives"]):
            entered = min(max(last, begin), end)
            spans += [("wait", begin, entered), ("communicate", entered, end)]
        for kind, begin, end in spans:
            if begin < until:
                width = (min(end, until) - begin) * 1000
                axes.broken_barh([((begin - origin) * 1000, width)], (rank - 0.4, 0.8), color=COLOURS[kind])
    axes.set_yticks(range(len(blocks)), [f"rank {r}" for r in range(len(blocks))], fontsize=8)
    axes.invert_yaxis()


if __name__ == "__main__":
    log.run(main)
