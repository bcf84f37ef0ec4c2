"""Fit latency and bandwidth between this machine's ranks, and predict times of reductions for up to 65,536 ranks.

    bash scripts/run_collectives_lab.sh 2 predict --run-dir=RUN     after primitives with the same --run-dir

The program fits a line to each primitive's times at every second size, and tests the line at the remaining sizes. The
fit of isend_irecv gives the latency a and the seconds per byte b. The fit of all_reduce gives the seconds per summed
byte c. Standard formulas then predict times, and a simulation shows the effect of stragglers. The formulas assume a
link of equal speed between any two ranks, without congestion or topology.
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

RANKS = [2**k for k in range(1, 17)]  # predicted world sizes, 2 to 65,536
TABLE_RANKS = (2, 16, 256, 4096, 65536)  # world sizes in short tables
MODELS = {  # bytes of float32 gradients, by description
    "mnist_ddp's net, 87 KB": 87_360,
    "25 million parameters, 100 MB": 10**8,
    "1 GB": 10**9,
    "10 GB": 10**10,
    "100 GB": 10**11,
}
SIMULATED_STEPS = 96
SIMULATED_BYTES = 10**8
SIMULATED = ("synchronous", "overlap", "local_4", "local_16")
BACKWARD_SHARE = 2 / 3  # fraction of a step's computation that can overlap with communication

# --- formulas ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Hockney's model of a link, extended by the cost of summing received bytes.

    Attributes:
        latency: seconds per message.
        byte: seconds per byte sent.
        reduce: seconds per byte summed.
    """

    latency: float
    byte: float
    reduce: float


def ring(n: float, p: int, link: Link) -> float:
    """Return the seconds of reduce-scatter and all-gather in a ring: 2(p-1)a + 2n(p-1)/p b + n(p-1)/p c.

    Source, also of `halving_doubling` and `tree`: Thakur, Rabenseifner & Gropp, "Optimization of collective
    communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.

    Args:
        n: bytes of the vector.
        p: number of ranks.
        link: latency and seconds per byte.
    """
    return _reduce_scatter_all_gather(n, p, link, p - 1)


def halving_doubling(n: float, p: int, link: Link) -> float:
    """Return the seconds of recursive halving and doubling (Rabenseifner): 2 lg p a + 2n(p-1)/p b + n(p-1)/p c.

    ``p`` must be a power of 2.
    """
    return _reduce_scatter_all_gather(n, p, link, math.log2(p))


def _reduce_scatter_all_gather(n: float, p: int, link: Link, messages: float) -> float:
    share = n * (p - 1) / p
    latency = 2 * messages * link.latency
    transfer = 2 * share * link.byte
    reduction = share * link.reduce
    return latency + transfer + reduction


def tree(n: float, p: int, link: Link) -> float:
    """Return the seconds of a reduce and a broadcast in a binomial tree: 2 lg p (a + n b) + lg p n c."""
    rounds = math.log2(p)
    transfer = 2 * rounds * (link.latency + n * link.byte)
    reduction = rounds * n * link.reduce
    return transfer + reduction


def parameter_server(n: float, p: int, link: Link, shards: int = 1) -> float:
    """Return the seconds of a sum by s = ``shards`` parameter servers of n/s bytes each: 2p(a + n b / s) + p n c / s.

    All ranks send to each server over the server's single link. The cost therefore counts p messages to a server, and p
    messages from it. Source of the scheme: Li et al., "Scaling distributed machine learning with the parameter server",
    OSDI 2014.
    """
    share = n / shards
    transfer = 2 * p * (link.latency + share * link.byte)
    reduction = p * share * link.reduce
    return transfer + reduction


def eight_parameter_servers(n: float, p: int, link: Link) -> float:
    """Return the seconds of a sum by 8 parameter servers, or by p servers if p < 8."""
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
    """Fit t = A + B n to points (n, t) by least squared relative errors, and return (A, B), both >= 0.

    The times span four orders of magnitude, so absolute errors would fit only the largest times.
    """
    n, t = np.array(points, dtype=np.float64).T
    design = np.stack([1 / t, n / t], axis=1)

    def squared_error(line: NDArray[np.float64]) -> float:
        return float(((design @ line - 1) ** 2).sum())

    line, *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
    if line.min() < 0:  # fit only A and only B, and use the line with the smaller error
        alone = design.sum(axis=0) / (design**2).sum(axis=0)
        line = min(np.diag(alone), key=squared_error)
    return float(line[0]), float(line[1])


def errors(points: list[tuple[float, float]], model: Callable[[float], float]) -> list[float]:
    """Return the relative error of ``model`` at each point: predicted / measured - 1."""
    return [model(n) / t - 1 for n, t in points]


def fit(measured: dict[str, Any]) -> dict[str, Any]:
    """Fit the link, and a line for each primitive, to the measurements at one world size.

    Returns:
        "world_size", "lines" by primitive, "link", and "ring_errors" of the ring formula on the held-out sizes.
    """
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
    """Fit a line to the times of every second size, and return the line with its errors on the held-out sizes."""
    points = sorted(points)
    fitted = points[::2]
    held_out = points[1::2]
    latency, byte = fit_line(fitted)
    line: dict[str, Any] = {"latency": latency, "byte": byte, "fitted": fitted, "held_out": held_out}
    line["errors"] = errors(held_out, lambda n: latency + byte * n)
    return line


def fit_reduce(points: list[tuple[float, float]], p: int, link: Link) -> float:
    """Return c, the seconds per summed byte of a ring, given the link's latency a and seconds per byte b.

    The fit minimizes the squared relative errors of n(p-1)/p c plus the time that a and b explain.
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
    """Simulate steps in which every rank computes for ``compute`` seconds plus an exponentially distributed delay.

    The expected longest of p exponential delays is mean * (1 + 1/2 + ... + 1/p). Source: Renyi, "On the theory of order
    statistics", Acta Math. Hung. 4, 1953.

    Args:
        compute: seconds of computation per step.
        mean_delay: mean of the delays, in seconds.
        communicate: seconds of communication per step, by world size.
        seed: seed of the random delays.

    Returns:
        A row for each world size, with seconds per step: the time by strategy, the time of communication, and the
        simulated and expected longest delay.
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
            blocks = delays.reshape(-1, every, p).sum(axis=1)  # a rank's delays add up between two averages
            waited = float(blocks.max(axis=1).mean())
            row[f"local_{every}"] = compute + (waited + communicate[p]) / every
        rows.append(row)
    return rows


# --- the command ---------------------------------------------------------------------------------------------------


def predict(options: Options) -> None:
    """Read the results of ``primitives`` in the run dir, and write predict.json.

    Raises:
        ConfigError: the run dir lacks timings that can be fitted.
    """
    measured = results(options.run_dir, "primitives")
    usable = [each for each in measured if each["facts"]["world_size"] > 1 and _can_fit(each["timings"])]
    if not usable:
        raise ConfigError(
            f"{options.run_dir} has no timings of all_reduce and isend_irecv at 4 sizes on 2 ranks or more: "
            "run primitives with N=2 and the same --run-dir first"
        )
    fits = [fit(each) for each in usable]
    link = Link(**fits[0]["link"])  # the link of the fewest ranks, which wait least for a processor
    result = {
        "facts": usable[0]["facts"],
        "fits": fits,
        "link": asdict(link),
        "times": predicted_times(link),
        "simulation": simulate_stragglers(options, link),
    }
    publish(options.run_dir, "predict", result, tables(result), pictures)


def predicted_times(link: Link) -> list[dict[str, Any]]:
    """Return a row for each model of MODELS and each world size of RANKS, with the seconds of each algorithm."""
    times = []
    for model, n in MODELS.items():
        for p in RANKS:
            row: dict[str, Any] = {"model": model, "bytes": n, "ranks": p}
            row.update(costs(n, p, link))
            times.append(row)
    return times


def costs(n: float, p: int, link: Link) -> dict[str, float]:
    """Return the seconds that each algorithm needs to sum n bytes over p ranks."""
    return {name: cost(n, p, link) for name, cost in ALGORITHMS.items()}


def simulate_stragglers(options: Options, link: Link) -> dict[str, Any]:
    """Return the simulation of stragglers and its settings. Communication uses the fastest algorithm."""
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
    """Yield all tables of the command."""
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
    """Yield a picture of the fit and the simulation, and a picture of the predicted times."""
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
    """Draw points (bytes, seconds) on axes of bytes and milliseconds."""
    counts = [count for count, _ in points]
    milliseconds = [seconds * 1e3 for _, seconds in points]
    axes.scatter(counts, milliseconds, s=18, facecolor=fill, edgecolor=color)
