"""Latency and bandwidth of this machine's ranks, and what follows for many more.

    bash scripts/run_collectives_lab.sh 2 predict --run-dir=RUN     after primitives with the same --run-dir

Every primitive's times are fitted on every second size and tested on the others. From the fit of isend_irecv (latency
a, seconds a byte b) and of all_reduce (seconds c for a byte that is summed) come predictions by the standard formulas,
and a simulation of stragglers. Past this machine they are what the formulas say, not what a network does: one link of
one speed between any two ranks, no congestion, no topology.
"""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ranks import write_json
from samestep import UserError, log
from show import Picture, Table, duration, new_figure, picture, size

RANKS = [2**k for k in range(1, 17)]  # 2 to 65,536
MODELS = {  # bytes of float32 gradients
    "mnist_ddp's net, 87 KB": 87_360,
    "25 million parameters, 100 MB": 10**8,
    "1 GB": 10**9,
    "10 GB": 10**10,
    "100 GB": 10**11,
}
SIMULATED_STEPS = 96
BACKWARD_SHARE = 2 / 3  # of a step's computing, behind which an overlapping strategy hides communication

# --- formulas ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Seconds: ``latency`` a message, ``byte`` a byte sent, ``reduce`` a byte summed. Hockney's model and a sum."""

    latency: float
    byte: float
    reduce: float


def ring(n: float, p: int, link: Link) -> float:
    """Reduce-scatter and all-gather in a ring: 2(p-1)a + 2n(p-1)/p b + n(p-1)/p c.

    Source of this and the next two: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations
    in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    share = n * (p - 1) / p
    return 2 * (p - 1) * link.latency + 2 * share * link.byte + share * link.reduce


def halving_doubling(n: float, p: int, link: Link) -> float:
    """Recursive halving, then doubling (Rabenseifner): 2 lg p a + 2n(p-1)/p b + n(p-1)/p c; p a power of 2."""
    share = n * (p - 1) / p
    return 2 * math.log2(p) * link.latency + 2 * share * link.byte + share * link.reduce


def tree(n: float, p: int, link: Link) -> float:
    """Binomial tree to the root and back: 2 lg p (a + n b) + lg p n c."""
    return 2 * math.log2(p) * (link.latency + n * link.byte) + math.log2(p) * n * link.reduce


def parameter_server(n: float, p: int, link: Link, shards: int = 1) -> float:
    """All ranks send to s servers, each of which holds n/s bytes, and fetch them back: 2p(a + n b / s) + p n c / s.

    A server's link carries everything that is for it. Li et al., "Scaling distributed machine learning with the
    parameter server", OSDI 2014, describe the scheme; the cost is that of p messages in and p out of a server.
    """
    return 2 * p * (link.latency + n * link.byte / shards) + p * n * link.reduce / shards


ALGORITHMS: dict[str, Callable[[float, int, Link], float]] = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "tree": tree,
    "parameter server": parameter_server,
    "parameter server, 8 shards": lambda n, p, link: parameter_server(n, p, link, min(8, p)),
}


# --- the fit -------------------------------------------------------------------------------------------------------


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(A, B) of t = A + B n with the least squared *relative* errors and A, B >= 0; from (n, t) pairs.

    Relative, because times go over four orders of magnitude: plain least squares would fit the largest alone.
    """
    n, t = (np.array(values, dtype=np.float64) for values in zip(*points))
    design = np.stack([1 / t, n / t], axis=1)
    found, *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
    if found.min() >= 0:
        return float(found[0]), float(found[1])
    alone = [float(column.sum() / (column**2).sum()) for column in design.T]  # one of them at its bound, 0
    wrong = [float(((column * value - 1) ** 2).sum()) for column, value in zip(design.T, alone)]
    return (alone[0], 0.0) if wrong[0] < wrong[1] else (0.0, alone[1])


def errors(points: list[tuple[float, float]], model: Callable[[float], float]) -> list[float]:
    """Relative errors: predicted / measured - 1."""
    return [model(n) / t - 1 for n, t in points]


def fit(measured: dict[str, Any]) -> dict[str, Any]:
    """Each primitive's line, and the link, from one number of ranks; with the errors on the sizes held out."""
    p = measured["facts"]["world_size"]
    times: dict[str, list[tuple[float, float]]] = {}
    for timing in measured["timings"]:
        if timing["bytes"]:
            times.setdefault(timing["primitive"], []).append((timing["bytes"], statistics.median(timing["seconds"])))
    lines: dict[str, dict[str, Any]] = {}
    for name, points in times.items():
        fitted, held_out = sorted(points)[::2], sorted(points)[1::2]
        latency, byte = fit_line(fitted)
        wrong = errors(held_out, lambda n, a=latency, b=byte: a + b * n)  # type: ignore[misc]
        lines[name] = {"latency": latency, "byte": byte, "fitted": fitted, "held_out": held_out, "errors": wrong}

    messages = lines["isend_irecv"]
    link = Link(messages["latency"], messages["byte"], 0.0)
    # c alone from all_reduce: least squares of relative errors of n(p-1)/p c against what a and b leave.
    rest = [((p - 1) / p * n / t, 1 - ring(n, p, link) / t) for n, t in lines["all_reduce"]["fitted"]]
    reduce = sum(x * y for x, y in rest) / sum(x * x for x, _ in rest)
    link = Link(link.latency, link.byte, max(0.0, reduce))
    wrong = errors(lines["all_reduce"]["held_out"], lambda n: ring(n, p, link))
    return {"world_size": p, "lines": lines, "link": asdict(link), "ring_errors": wrong}


# --- stragglers ----------------------------------------------------------------------------------------------------


def simulate(compute: float, mean_delay: float, communicate: dict[int, float], seed: int) -> list[dict[str, float]]:
    """Seconds a step where every rank's every step takes ``compute`` and an exponential delay.

    Drawn, not derived; beside it the expected longest of p exponential delays, mean * (1 + 1/2 + ... + 1/p) (Renyi,
    "On the theory of order statistics", Acta Math. Hung. 4, 1953), which the synchronous step must show.
    """
    random = np.random.default_rng(seed)
    found = []
    for p in RANKS:
        delays: NDArray[np.float64] = random.exponential(mean_delay, (SIMULATED_STEPS, p))
        speaking = communicate[p]
        longest = float(delays.max(axis=1).mean())
        row = {
            "ranks": p,
            "communicate": speaking,
            "longest_delay": longest,
            "expected_longest_delay": mean_delay * sum(1 / i for i in range(1, p + 1)),
            "synchronous": compute + longest + speaking,
            "overlap": compute + longest + max(0.0, speaking - BACKWARD_SHARE * compute),
        }
        for every in (4, 16):
            blocks = delays.reshape(-1, every, p).sum(axis=1).max(axis=1)  # each rank's delays add up, then they meet
            row[f"local_{every}"] = compute + (float(blocks.mean()) + speaking) / every
        found.append(row)
    return found


# --- the command ---------------------------------------------------------------------------------------------------


def predict(options: Namespace) -> None:
    """Read what primitives left in the run dir, and write predict.json. Raises UserError where there is nothing."""
    files = sorted(options.run_dir.glob("primitives-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    measured = [json.loads(path.read_text()) for path in files]
    usable = [each for each in measured if each["facts"]["world_size"] > 1
              and len({t["bytes"] for t in each["timings"] if t["primitive"] == "all_reduce"}) >= 4
              and any(t["primitive"] == "isend_irecv" for t in each["timings"])]  # fmt: skip
    if not usable:
        raise UserError(
            f"{options.run_dir} has no timings of all_reduce and isend_irecv at 4 sizes on 2 ranks or more: "
            "run primitives with N=2 and the same --run-dir first"
        )
    fits = [fit(each) for each in usable]
    link = Link(**fits[0]["link"])  # of the fewest ranks: the least of it is waiting for a processor
    times = [
        {"model": model, "bytes": n, "ranks": p, **{name: cost(n, p, link) for name, cost in ALGORITHMS.items()}}
        for model, n in MODELS.items()
        for p in RANKS
    ]
    simulated_bytes = 10**8
    communicate = {p: min(cost(simulated_bytes, p, link) for cost in ALGORITHMS.values()) for p in RANKS}
    found = {
        "facts": usable[0]["facts"],
        "fits": fits,
        "link": asdict(link),
        "times": times,
        "simulation": {
            "compute": options.compute,
            "mean_delay": options.compute / 20,
            "bytes": simulated_bytes,
            "steps": SIMULATED_STEPS,
            "rows": simulate(options.compute, options.compute / 20, communicate, options.seed),
        },
    }
    write_json(options.run_dir, "predict", found)
    for table in tables([found]):
        if not table.long:
            log.info(table.text())


# --- as tables and pictures ----------------------------------------------------------------------------------------


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "no cost seen"


def _wrong(errors: list[float]) -> list[str]:
    return [f"{statistics.median(abs(e) for e in errors):.0%}", f"{max(errors, key=abs):+.0%}"]


def tables(results: list[dict[str, Any]]) -> list[Table]:
    made = []
    for found in results:
        link, simulation = Link(**found["link"]), found["simulation"]
        rows = []
        for each in found["fits"]:
            for name, line in each["lines"].items():
                rate, wrong = _rate(line["byte"]), _wrong(line["errors"])
                rows.append([name, str(each["world_size"]), duration(line["latency"]), rate, *wrong])
        made.append(
            Table(
                "Fitted: time = latency + size / bandwidth",
                "On every second size; errors are relative, on the sizes held out. The standard formula for a ring, "
                f"with latency and bandwidth of isend_irecv and {_rate(link.reduce)} of summing from all_reduce, is "
                "off by "
                + "; ".join(
                    "{} (median), {} (worst) on {} ranks".format(*_wrong(each["ring_errors"]), each["world_size"])
                    for each in found["fits"]
                )
                + ".",
                ["primitive", "ranks", "latency", "bandwidth", "error", "worst"],
                rows,
            )
        )
        names = list(ALGORITHMS)
        shown = [p for p in RANKS if p in (2, 16, 256, 4096, 65536)]
        best = []
        for model in MODELS:
            of = {row["ranks"]: row for row in found["times"] if row["model"] == model}
            best.append([model, *(_best(of[p], names) for p in shown)])
        made.append(
            Table(
                "Predicted: the fastest way to sum a model's gradients",
                "By the formulas (Thakur, Rabenseifner & Gropp 2005), with this machine's latency "
                f"({duration(link.latency)}) and bandwidth ({_rate(link.byte)}) "
                "between any two ranks.",
                ["model", *(f"{p:,} ranks" for p in shown)],
                best,
            )
        )
        made.append(
            Table(
                "All predictions",
                "",
                ["model", "ranks", *names],
                [
                    [row["model"], f"{row['ranks']:,}", *(duration(row[name]) for name in names)]
                    for row in found["times"]
                ],
                long=True,
            )
        )
        made.append(
            Table(
                "Simulated: stragglers",
                f"Seconds a step: {simulation['compute']:g} s of computing, an exponential delay of mean "
                f"{duration(simulation['mean_delay'])} on every rank in every step, {size(simulation['bytes'])} summed "
                f"by the fastest algorithm; {simulation['steps']} steps drawn. Expected: mean (1 + 1/2 + ... + 1/p).",
                ["ranks", "longest delay", "expected", "synchronous", "overlap", "local_4", "local_16"],
                [
                    [
                        f"{row['ranks']:,}",
                        duration(row["longest_delay"]),
                        duration(row["expected_longest_delay"]),
                        *(f"{row[name]:.3f}" for name in ("synchronous", "overlap", "local_4", "local_16")),
                    ]
                    for row in simulation["rows"]
                    if row["ranks"] in shown
                ],
            )
        )
    return made


def _best(row: dict[str, Any], names: list[str]) -> str:
    name = min(names, key=lambda each: row[each])
    return f"{duration(row[name])} {name}"


def pictures(results: list[dict[str, Any]]) -> list[Picture]:
    made = []
    for found in results:
        chosen = ("all_reduce", "broadcast", "all_gather", "isend_irecv")
        figure = new_figure(11, 3.6)
        left, right = figure.subplots(1, 2)
        lines = found["fits"][0]["lines"]
        for index, name in enumerate(each for each in chosen if each in lines):
            line, colour = lines[name], f"C{index}"
            xs = np.geomspace(line["fitted"][0][0], line["fitted"][-1][0], 100)
            left.plot(xs, (line["latency"] + line["byte"] * xs) * 1e3, color=colour, linewidth=1, label=name)
            for which, fill in (("fitted", colour), ("held_out", "white")):
                points = [(n, t * 1e3) for n, t in line[which]]
                left.scatter(*zip(*points), s=18, facecolor=fill, edgecolor=colour)
        left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms",
                 title=f"{found['fits'][0]['world_size']} ranks; hollow: held out")  # fmt: skip
        left.legend(fontsize=7)
        rows = found["simulation"]["rows"]
        for name in ("synchronous", "overlap", "local_4", "local_16"):
            ideal = found["simulation"]["compute"]
            right.plot([r["ranks"] for r in rows], [ideal / r[name] for r in rows], marker=".", label=name)
        right.set(xscale="log", xlabel="ranks", ylabel="computing / step", ylim=(0, 1), title="simulated stragglers")
        right.legend(fontsize=7)
        made.append(picture("predict-fit", "The fit, and how much of a step is computing when ranks straggle.", figure))

        figure = new_figure(11, 3.6)
        for axes, (model, _) in zip(figure.subplots(1, 3), list(MODELS.items())[::2]):
            of = [row for row in found["times"] if row["model"] == model]
            for name in ALGORITHMS:
                axes.plot([row["ranks"] for row in of], [row[name] for row in of], label=name)
            axes.set(xscale="log", yscale="log", xlabel="ranks", title=model)
            axes.title.set_fontsize(9)
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("predicted seconds")
        figure.axes[0].legend(fontsize=7)
        made.append(picture("predict-times", "Predicted time of one sum over all ranks, by algorithm.", figure))
    return made
