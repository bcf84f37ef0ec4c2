"""Fit latency and bandwidth of this machine's ranks, and predict what follows for many more.

    bash scripts/run_collectives_lab.sh 2 predict --run-dir=RUN     after primitives with the same --run-dir

Every primitive's times are fitted on every second size and tested on the others. The fit of isend_irecv gives latency
a and seconds per byte b; the fit of all_reduce gives seconds per summed byte c. Standard formulas then predict times,
and a simulation shows stragglers. Beyond this machine they follow the formulas, not a network: one link of one speed
between any two ranks, no congestion, no topology.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from samestep import ConfigError
from samestep.options import Options
from show import Picture, Table, duration, new_figure, picture, publish, results, size

RANKS = [2**k for k in range(1, 17)]  # 2 to 65,536
TABLE_RANKS = (2, 16, 256, 4096, 65536)  # of them, those in short tables
MODELS = {  # bytes of float32 gradients
    "mnist_ddp's net, 87 KB": 87_360,
    "25 million parameters, 100 MB": 10**8,
    "1 GB": 10**9,
    "10 GB": 10**10,
    "100 GB": 10**11,
}
SIMULATED_STEPS = 96
SIMULATED_BYTES = 10**8
SIMULATED = ("synchronous", "overlap", "local_4", "local_16")
BACKWARD_SHARE = 2 / 3  # of a step's computation, behind which an overlapping strategy hides communication

# --- formulas ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Hold seconds per message, per ``byte`` sent, and per byte summed (``reduce``). Hockney's model and a sum."""

    latency: float
    byte: float
    reduce: float


def ring(n: float, p: int, link: Link) -> float:
    """Return the seconds of reduce-scatter and all-gather in a ring: 2(p-1)a + 2n(p-1)/p b + n(p-1)/p c.

    Source of this and the next two: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations
    in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    return _reduce_scatter_all_gather(n, p, link, p - 1)


def halving_doubling(n: float, p: int, link: Link) -> float:
    """Return the seconds of recursive halving and doubling (Rabenseifner): 2 lg p a + 2n(p-1)/p b + n(p-1)/p c.

    ``p`` is a power of 2.
    """
    return _reduce_scatter_all_gather(n, p, link, math.log2(p))


def _reduce_scatter_all_gather(n: float, p: int, link: Link, messages: float) -> float:
    share = n * (p - 1) / p
    latency = 2 * messages * link.latency
    transfer = 2 * share * link.byte
    reduction = share * link.reduce
    return latency + transfer + reduction


def tree(n: float, p: int, link: Link) -> float:
    """Return the seconds of a binomial tree to the root and back: 2 lg p (a + n b) + lg p n c."""
    rounds = math.log2(p)
    transfer = 2 * rounds * (link.latency + n * link.byte)
    reduction = rounds * n * link.reduce
    return transfer + reduction


def parameter_server(n: float, p: int, link: Link, shards: int = 1) -> float:
    """Return the seconds with s servers that hold n/s bytes each: 2p(a + n b / s) + p n c / s.

    All ranks send to each server, and a server's link carries all that the server gets. The cost counts p messages
    into a server and p out of it. Source of the scheme: Li et al., "Scaling distributed machine learning with the
    parameter server", OSDI 2014.
    """
    share = n / shards
    transfer = 2 * p * (link.latency + share * link.byte)
    reduction = p * share * link.reduce
    return transfer + reduction


def eight_parameter_servers(n: float, p: int, link: Link) -> float:
    """Return the seconds with 8 servers, or with one on each rank of fewer."""
    return parameter_server(n, p, link, shards=min(8, p))


ALGORITHMS: dict[str, Callable[[float, int, Link], float]] = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "tree": tree,
    "parameter server": parameter_server,
    "parameter server, 8 shards": eight_parameter_servers,
}


# --- the fit -------------------------------------------------------------------------------------------------------


def fit_line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return (A, B) of t = A + B n with the least squared *relative* errors and A, B >= 0; from (n, t) pairs.

    They are relative, because times span four orders of magnitude: plain least squares would fit the largest alone.
    """
    n, t = np.array(points, dtype=np.float64).T
    design = np.stack([1 / t, n / t], axis=1)

    def squared_error(line: NDArray[np.float64]) -> float:
        return float(((design @ line - 1) ** 2).sum())

    line, *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
    if line.min() < 0:  # one of them is at its bound, 0
        alone = design.sum(axis=0) / (design**2).sum(axis=0)
        line = min(np.diag(alone), key=squared_error)
    return float(line[0]), float(line[1])


def errors(points: list[tuple[float, float]], model: Callable[[float], float]) -> list[float]:
    """Return the relative errors: predicted / measured - 1."""
    return [model(n) / t - 1 for n, t in points]


def fit(measured: dict[str, Any]) -> dict[str, Any]:
    """Fit each primitive's line, and the link, to one number of ranks; add the errors on the sizes held out."""
    p = measured["facts"]["world_size"]
    times: dict[str, list[tuple[float, float]]] = {}
    for timing in measured["timings"]:
        if timing["bytes"]:
            point = (timing["bytes"], statistics.median(timing["seconds"]))
            times.setdefault(timing["primitive"], []).append(point)
    lines = {name: fit_held_out(points) for name, points in times.items()}
    link = Link(lines["isend_irecv"]["latency"], lines["isend_irecv"]["byte"], reduce=0.0)
    link = replace(link, reduce=fit_reduce(lines["all_reduce"]["fitted"], p, link))
    ring_errors = errors(lines["all_reduce"]["held_out"], lambda n: ring(n, p, link))
    return {"world_size": p, "lines": lines, "link": asdict(link), "ring_errors": ring_errors}


def fit_held_out(points: list[tuple[float, float]]) -> dict[str, Any]:
    """Fit a line to every second size, and return it with its errors on the others."""
    points = sorted(points)
    fitted = points[::2]
    held_out = points[1::2]
    latency, byte = fit_line(fitted)
    line: dict[str, Any] = {"latency": latency, "byte": byte, "fitted": fitted, "held_out": held_out}
    line["errors"] = errors(held_out, lambda n: latency + byte * n)
    return line


def fit_reduce(points: list[tuple[float, float]], p: int, link: Link) -> float:
    """Return the seconds per summed byte, c, of a ring whose a and b are known.

    Least squares of the relative errors of n(p-1)/p c against what a and b leave.
    """
    parts = []
    for n, t in points:
        x = (p - 1) / p * n / t
        rest = 1 - ring(n, p, link) / t
        parts.append((x, rest))
    products = sum(x * rest for x, rest in parts)
    squares = sum(x * x for x, _ in parts)
    return max(0.0, products / squares)


# --- stragglers ----------------------------------------------------------------------------------------------------


def simulate(compute: float, mean_delay: float, communicate: dict[int, float], seed: int) -> list[dict[str, float]]:
    """Simulate steps in which every rank needs ``compute`` seconds and an exponential delay.

    Args:
        compute: seconds of computation per step.
        mean_delay: seconds.
        communicate: seconds of communication per step, by number of ranks.
        seed: of the random delays.

    Returns:
        Seconds per step by strategy, for each number of ranks; also the longest delay per step, and the expected
        longest of p exponential delays, mean * (1 + 1/2 + ... + 1/p) (Renyi, "On the theory of order statistics", Acta
        Math. Hung. 4, 1953), which the synchronous step must show.
    """
    random = np.random.default_rng(seed)
    rows = []
    for p in RANKS:
        delays: NDArray[np.float64] = random.exponential(mean_delay, (SIMULATED_STEPS, p))
        longest = float(delays.max(axis=1).mean())
        harmonic = sum(1 / i for i in range(1, p + 1))
        not_hidden = max(0.0, communicate[p] - BACKWARD_SHARE * compute)
        row = {
            "ranks": p,
            "communicate": communicate[p],
            "longest_delay": longest,
            "expected_longest_delay": mean_delay * harmonic,
            "synchronous": compute + longest + communicate[p],
            "overlap": compute + longest + not_hidden,
        }
        for every in (4, 16):
            blocks = delays.reshape(-1, every, p).sum(axis=1)  # each rank's delays add up before all wait
            waited = float(blocks.max(axis=1).mean())
            row[f"local_{every}"] = compute + (waited + communicate[p]) / every
        rows.append(row)
    return rows


# --- the command ---------------------------------------------------------------------------------------------------


def predict(options: Options) -> None:
    """Read what primitives left in the run dir, and write predict.json. Raises ConfigError if there is nothing."""
    measured = results(options.run_dir, "primitives")
    usable = [each for each in measured if each["facts"]["world_size"] > 1 and _can_fit(each["timings"])]
    if not usable:
        raise ConfigError(
            f"{options.run_dir} has no timings of all_reduce and isend_irecv at 4 sizes on 2 ranks or more: "
            "run primitives with N=2 and the same --run-dir first"
        )
    fits = [fit(each) for each in usable]
    link = Link(**fits[0]["link"])  # of the fewest ranks, which wait least for a processor
    result = {
        "facts": usable[0]["facts"],
        "fits": fits,
        "link": asdict(link),
        "times": predicted_times(link),
        "simulation": simulate_stragglers(options, link),
    }
    publish(options.run_dir, "predict", result, tables(result), pictures)


def predicted_times(link: Link) -> list[dict[str, Any]]:
    """Return the seconds of each algorithm, for each model and number of ranks."""
    times = []
    for model, n in MODELS.items():
        for p in RANKS:
            row: dict[str, Any] = {"model": model, "bytes": n, "ranks": p}
            row.update(costs(n, p, link))
            times.append(row)
    return times


def costs(n: float, p: int, link: Link) -> dict[str, float]:
    """Return the seconds in which each algorithm sums n bytes over p ranks."""
    return {name: cost(n, p, link) for name, cost in ALGORITHMS.items()}


def simulate_stragglers(options: Options, link: Link) -> dict[str, Any]:
    """Return the simulation of stragglers, and its settings. Communication takes the fastest algorithm's time."""
    mean_delay = options.compute / 20
    communicate = {p: min(costs(SIMULATED_BYTES, p, link).values()) for p in RANKS}
    return {
        "compute": options.compute,
        "mean_delay": mean_delay,
        "bytes": SIMULATED_BYTES,
        "steps": SIMULATED_STEPS,
        "rows": simulate(options.compute, mean_delay, communicate, options.seed),
    }


def _can_fit(timings: list[dict[str, Any]]) -> bool:
    sizes: dict[str, set[int]] = {}
    for timing in timings:
        sizes.setdefault(timing["primitive"], set()).add(timing["bytes"])
    return "isend_irecv" in sizes and len(sizes.get("all_reduce", ())) >= 4


# --- as tables and pictures ----------------------------------------------------------------------------------------


def _rate(seconds_per_byte: float) -> str:
    if not seconds_per_byte:
        return "no cost seen"
    return f"{1e-9 / seconds_per_byte:.3g} GB/s"


def _summary(errors: list[float]) -> list[str]:
    median = statistics.median(abs(each) for each in errors)
    worst = max(errors, key=abs)
    return [f"{median:.0%}", f"{worst:+.0%}"]


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables of the command."""
    link = Link(**result["link"])
    yield _fit_table(result["fits"], link)
    yield _best_table(result["times"], link)
    rows = []
    for row in result["times"]:
        cells = [duration(row[name]) for name in ALGORITHMS]
        rows.append([row["model"], f"{row['ranks']:,}", *cells])
    yield Table("All predictions", "", header=["model", "ranks", *ALGORITHMS], rows=rows, long=True)
    yield _straggler_table(result["simulation"])


def _fit_table(fits: list[dict[str, Any]], link: Link) -> Table:
    rows = []
    ring_errors = []
    for each in fits:
        for name, line in each["lines"].items():
            cells = [str(each["world_size"]), duration(line["latency"]), _rate(line["byte"])]
            rows.append([name, *cells, *_summary(line["errors"])])
        median, worst = _summary(each["ring_errors"])
        ring_errors.append(f"{median} (median), {worst} (worst) on {each['world_size']} ranks")
    return Table(
        "Fitted: time = latency + size / bandwidth",
        "On every second size; errors are relative, on the sizes held out. The standard formula for a ring, with "
        f"latency and bandwidth of isend_irecv and {_rate(link.reduce)} of summing from all_reduce, is off by "
        f"{'; '.join(ring_errors)}.",
        header=["primitive", "ranks", "latency", "bandwidth", "error", "worst"],
        rows=rows,
    )


def _best_table(times: list[dict[str, Any]], link: Link) -> Table:
    best: dict[str, list[str]] = {model: [] for model in MODELS}
    for row in times:
        if row["ranks"] in TABLE_RANKS:
            name = min(ALGORITHMS, key=row.__getitem__)
            best[row["model"]].append(f"{duration(row[name])} {name}")
    return Table(
        "Predicted: the fastest way to sum a model's gradients",
        f"By the formulas (Thakur, Rabenseifner & Gropp 2005), with this machine's latency ({duration(link.latency)}) "
        f"and bandwidth ({_rate(link.byte)}) between any two ranks.",
        header=["model", *(f"{p:,} ranks" for p in TABLE_RANKS)],
        rows=[[model, *cells] for model, cells in best.items()],
    )


def _straggler_table(simulation: dict[str, Any]) -> Table:
    rows = []
    for row in simulation["rows"]:
        if row["ranks"] in TABLE_RANKS:
            delays = [duration(row["longest_delay"]), duration(row["expected_longest_delay"])]
            seconds = [f"{row[name]:.3f}" for name in SIMULATED]
            rows.append([f"{row['ranks']:,}", *delays, *seconds])
    return Table(
        "Simulated: stragglers",
        f"Seconds per step: {simulation['compute']:g} s of computation, an exponential delay of mean "
        f"{duration(simulation['mean_delay'])} on every rank in every step, {size(simulation['bytes'])} summed "
        f"by the fastest algorithm; {simulation['steps']} steps drawn. Expected: mean (1 + 1/2 + ... + 1/p).",
        header=["ranks", "longest delay", "expected", *SIMULATED],
        rows=rows,
    )


def pictures(results: list[dict[str, Any]]) -> Iterator[Picture]:
    """Yield the fit with the simulation, and the predicted times."""
    for result in results:
        yield _fit_picture(result["fits"][0], result["simulation"])
        yield _times_picture(result["times"])


def _times_picture(times: list[dict[str, Any]]) -> Picture:
    figure, panels = new_figure(11, 3.6, columns=3)
    models = list(MODELS)[::2]
    for axes, model in zip(panels, models):
        rows = [row for row in times if row["model"] == model]
        ranks = [row["ranks"] for row in rows]
        for name in ALGORITHMS:
            seconds = [row[name] for row in rows]
            axes.plot(ranks, seconds, label=name)
        axes.set(xscale="log", yscale="log", xlabel="ranks")
        axes.set_title(model, fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("predicted seconds")
    panels[0].legend(fontsize=7)
    return picture("predict-times", "Predicted time of one sum over all ranks, by algorithm.", figure)


def _fit_picture(fitted: dict[str, Any], simulation: dict[str, Any]) -> Picture:
    figure, (left, right) = new_figure(11, 3.6, columns=2)
    names = [name for name in ("all_reduce", "broadcast", "all_gather", "isend_irecv") if name in fitted["lines"]]
    for index, name in enumerate(names):
        line = fitted["lines"][name]
        color = f"C{index}"
        least = line["fitted"][0][0]
        most = line["fitted"][-1][0]
        xs = np.geomspace(least, most, 100)
        seconds = line["latency"] + line["byte"] * xs
        left.plot(xs, seconds * 1e3, color=color, linewidth=1, label=name)
        _scatter(left, line["fitted"], color=color, fill=color)
        _scatter(left, line["held_out"], color=color, fill="white")
    title = f"{fitted['world_size']} ranks; hollow: held out"
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms", title=title)
    rows = simulation["rows"]
    ranks = [row["ranks"] for row in rows]
    for name in SIMULATED:
        shares = [simulation["compute"] / row[name] for row in rows]
        right.plot(ranks, shares, marker=".", label=name)
    right.set(xscale="log", xlabel="ranks", ylabel="computation / step", ylim=(0, 1), title="simulated stragglers")
    for axes in (left, right):
        axes.legend(fontsize=7)
    caption = "The fit, and how much of a step is computation when ranks straggle."
    return picture("predict-fit", caption, figure)


def _scatter(axes: Any, points: list[tuple[float, float]], color: str, fill: str) -> None:
    """Draw points of bytes and seconds."""
    counts = [count for count, _ in points]
    milliseconds = [seconds * 1e3 for _, seconds in points]
    axes.scatter(counts, milliseconds, s=18, facecolor=fill, edgecolor=color)
