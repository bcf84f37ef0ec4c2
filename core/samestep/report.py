"""Runs side by side, as one page that needs no network.

    python -m samestep.report RUN_DIR [RUN_DIR ...] -o report.html

reads what runs of any apps left and writes a page: curves of what was measured, how far each run is from the first,
what happened to it and at which step, the options in which the runs differ, results, versions and machines. What a run
dir lacks, or has damaged, the page names. No rank imports this.

What is shown is decided here, as panels and tables; `report_page` makes HTML of them, with plots as SVG written out by
the standard library: that keeps the page light, sharp at any width, light or dark, and core free of a plotting library.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep import UserError, checkpoint, report_page, rundata
from samestep.options import Parser
from samestep.rundata import RunData

MOST = 400  # points of a curve that are drawn
EQUAL = 1e-17  # where a difference of 0 is drawn: below what float64 can tell
LARGEST = 1e300  # where one is drawn that no float64 can hold
KINDS = {  # of events, in words for the legend
    "restart": "started again",
    "signal": "stopped by a signal",
    "hang": "hang",
    "rollback": "rolled back",
    "straggler": "a slow rank named",
    "failure": "failure",
    "damage": "damaged checkpoint",
}
RESULTS = (  # of result.json, in this order; others that are numbers follow
    *("steps", "epochs", "train_loss", "test_loss", "test_accuracy", "bits_per_byte", "test_examples"),
    *("seconds", "samples_per_second", "restarts", "resumed_from_step"),
)
LEFT_OUT = {"app", "run_dir", "weights_sha256", "world_size", "framework", "framework_version", "backend", "device"}
OWN = {"run_dir", "requested_dataset"}  # options that each run has for itself

HELP = """\
The first RUN_DIR is the one that the others are compared with. Runs of different apps, frameworks and numbers of ranks
may stand beside each other, and a run that is not over. --png draws the plots alone, by matplotlib where that is
installed; the page itself needs nothing but this package.

exit codes: 0 written, 2 a mistake in the call
"""


@dataclass(frozen=True)
class Line:
    """A curve of one run. ``told`` counts all its points, ``steps`` and ``values`` are those that are drawn."""

    run: int
    name: str
    steps: list[int]
    values: list[float]
    told: int
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A plot over steps; where ``log``, of values above 0."""

    title: str
    lines: list[Line]
    note: str = ""
    log: bool = False


@dataclass(frozen=True)
class Lane:
    """What happened to one run: events have the step that is told with them."""

    run: int
    last: int
    saved: list[int]
    events: list[rundata.Event]


@dataclass(frozen=True)
class Table:
    """Rows of text; ``marked`` has the (row, column) of cells that are unlike the first run's."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    marked: set[tuple[int, int]] = field(default_factory=set)
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """All that is shown."""

    names: list[str]
    apps: list[str]
    states: list[rundata.State]
    panels: list[Panel]
    lanes: list[Lane]
    tables: list[Table]
    problems: list[list[str]]  # of each run
    notes: list[str]


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 with one line on stderr."""
    parser = Parser(
        prog="python -m samestep.report",
        description="Runs side by side, as one page that needs no network.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path, help="what a run left, or leaves")
    default = "(default: %(default)s)"
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help=default)
    parser.add_argument("--png", type=Path, metavar="FILE", help="also a picture of the plots; needs matplotlib")
    try:
        options = parser.parse(arguments)
        draw = _drawing() if options.png else None
        page = build([rundata.read(run_dir) for run_dir in options.run_dirs])
        _write(options.output, report_page.html_of(page).encode(), "-o")
        if draw:
            _write(options.png, draw(page), "--png")
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(page.names)} run{'s' * (len(page.names) != 1)}")
    return 0


def _write(path: Path, content: bytes, option: str) -> None:
    try:
        checkpoint.write_atomic(path, content)
    except OSError as problem:
        raise UserError(f"cannot write {path}: {problem.strerror}: name another file with {option}") from problem


# --- what is shown ---------------------------------------------------------------------------------------------------


def build(runs: Sequence[RunData]) -> Page:
    """What to show of runs, the first being the one that others are compared with."""
    names = names_of([run.folder for run in runs])
    notes = []
    if any(not run.trains for run in runs):
        notes.append("collectives_lab measures and trains nothing: it has no curves; what it left is listed below")
    if len({run.app for run in runs if run.trains and run.app}) > 1:
        notes.append("the runs are of several apps: a loss is comparable only where model and data are the same")
    return Page(
        names=names,
        apps=[run.app or "app not known" for run in runs],
        states=[run.state for run in runs],
        panels=list(_panels(runs)),
        lanes=[_lane(i, run) for i, run in enumerate(runs) if run.trains],
        tables=[table for table in _tables(runs, names) if table.rows],
        problems=[run.problems for run in runs],
        notes=notes,
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def thin(run: int, name: str, steps: Sequence[int], values: Sequence[float], dashed: bool = False) -> Line:
    """A curve with MOST points at most: of each stretch the least and the greatest are kept, so no peak is lost."""
    count = len(steps)
    if count <= MOST:
        return Line(run, name, list(steps), list(values), count, dashed)
    stretches = MOST // 2 - 1
    kept = {0, count - 1}
    for i in range(stretches):
        stretch = range(i * count // stretches, (i + 1) * count // stretches)
        kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    order = sorted(kept)
    return Line(run, name, [steps[i] for i in order], [values[i] for i in order], count, dashed)


def _panels(runs: Sequence[RunData]) -> Iterable[Panel]:
    found = {name for run in runs for name in run.measured.curves}
    rest = sorted(found - {"loss", "test_loss", "samples_per_second"})
    if found & {"loss", "test_loss"}:
        wide = "; earlier runs are drawn wider, so that curves that are equal show as bands" if len(runs) > 1 else ""
        both = "dashed, with points: test loss" if "test_loss" in found else ""
        yield _panel(runs, "Loss", ["loss", "test_loss"], (both + wide).removeprefix("; "))
    if (panel := _differences(runs)) and panel.lines:
        yield panel
    for name in rest:
        if name.startswith("test_") and name.removeprefix("test_") in rest:
            continue
        tested = f"test_{name}" in rest
        title = name.replace("_", " ").capitalize()
        yield _panel(runs, title, [name, f"test_{name}"], "dashed, with points: test" if tested else "")
    if "samples_per_second" in found:
        note = "between two lines of metrics.jsonl: evaluations and checkpoints are in it"
        yield _panel(runs, "Samples a second", ["samples_per_second"], note)


def _panel(runs: Sequence[RunData], title: str, names: Sequence[str], note: str) -> Panel:
    lines = [
        thin(i, name, curve.steps, curve.values, dashed=name.startswith("test_") or name == "bits_per_byte")
        for i, run in enumerate(runs)
        for name in names
        if (curve := run.measured.curves.get(name))
    ]
    return Panel(title, lines, _with_thinning(note, lines))


def _with_thinning(note: str, lines: Sequence[Line]) -> str:
    most = max(lines, key=lambda line: line.told, default=None)
    if most is None or most.told == len(most.steps):
        return note
    said = f"thinned out, from {most.told:,} points to {len(most.steps)} in the longest: each stretch keeps its least "
    return "; ".join(filter(None, [note, said + "and its greatest value"]))


@dataclass(frozen=True)
class Apart:
    """How far a run's losses are from the first run's, at the steps that both have; relative to the first's."""

    steps: list[int]
    differences: list[float]


def apart(first: RunData, run: RunData) -> Apart:
    """|loss - first's| / |first's|, in float64; where the first's is 0, without dividing."""
    curves = [each.measured.curves.get("loss", rundata.Curve()).points() for each in (first, run)]
    steps = sorted(curves[0].keys() & curves[1].keys())
    pairs = [(curves[0][step], curves[1][step]) for step in steps]
    return Apart(steps, [abs(a - b) / (abs(a) or 1.0) for a, b in pairs])


def _differences(runs: Sequence[RunData]) -> Panel | None:
    lines = []
    for i, run in enumerate(runs[1:], 1):
        if (found := apart(runs[0], run)).steps:
            values = [min(max(each, EQUAL), LARGEST) for each in found.differences]
            lines.append(thin(i, "difference", found.steps, values))
    if not lines:
        return None
    note = "of the losses, |loss - first's| / |first's| at the steps that both logged; the lowest line is 0: equal bits"
    return Panel("Difference from the first run", lines, _with_thinning(note, lines), log=True)


def _lane(index: int, run: RunData) -> Lane:
    steps = [run.measured.step or 0, *(event.step or 0 for event in run.events), *(each.step for each in run.saved)]
    saved = [each.step for each in run.saved if not each.kept and not each.problem]
    return Lane(index, max(steps), saved, [event for event in run.events if event.step is not None])


def _tables(runs: Sequence[RunData], names: Sequence[str]) -> Iterable[Table]:
    yield _results(runs, names)
    yield _compared(runs, names)
    yield from _facts(runs, names, "Options", _options_of)
    yield from _facts(runs, names, "Versions and machines", _machine_of)
    yield _happened(runs, names)
    yield _phases(runs, names)
    yield _checkpoints(runs, names)
    yield _evaluations(runs, names)
    yield _lab(runs, names)


def _results(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    numbers = {name for run in runs for name, value in run.result.items() if rundata.number(value) is not None}
    numbers |= {name for run in runs for name in _so_far(run)}
    known = [name for name in RESULTS if name in numbers]
    columns = [*known, *sorted(numbers - {*RESULTS, *LEFT_OUT, "seed", "global_batch_size", "node_count"})]
    head = ["run", "app", "state", "framework", "ranks", *(name.replace("_", " ") for name in columns), "weights"]
    rows = []
    digests = [str(run.result.get("weights_sha256") or "") for run in runs]
    for name, run, digest in zip(names, runs, digests):
        its = run.result or _so_far(run)
        framework = " ".join(str(its[each]) for each in ("framework", "framework_version", "backend") if its.get(each))
        values = [show(its.get(column)) for column in columns]
        same = " = first" if digest and digest == digests[0] and run is not runs[0] else ""
        ranks = show(run.world_size)
        rows.append([name, run.app or "?", run.state.name, framework, ranks, *values, digest[:12] + same])
    note = "weights: the first digits of the SHA-256 of all weights; = first: bit for bit those of the first run; of a "
    note += "run that has not finished: its last step, and its last evaluation"
    return Table("Results", head, rows, note)


def _so_far(run: RunData) -> dict[str, Any]:
    """Of a run without a result: its last step, and its last evaluation."""
    found: dict[str, Any] = {} if run.measured.step is None else {"steps": run.measured.step}
    return {**found, **{name: curve.values[-1] for name, curve in run.measured.curves.items() if name in RESULTS[3:6]}}


def _compared(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    rows = []
    for name, run in zip(names[1:], runs[1:]):
        found = apart(runs[0], run)
        if not run.trains:
            continue
        if not found.steps:
            rows.append([name, "0", "", "", "no step that both logged: give both the same --log-every"])
            continue
        worst = max(range(len(found.steps)), key=found.differences.__getitem__)
        equal = sum(each == 0 for each in found.differences)
        count = len(found.steps)
        said = "equal in all bits" if equal == count else f"equal in {equal} of {count}"
        rows.append([name, str(count), f"{found.differences[worst]:.2g}", str(found.steps[worst]), said])
    head = ["run", "steps in common", "largest relative difference", "at step", "losses"]
    return Table("Losses against the first run", head, rows)


def _options_of(run: RunData) -> Mapping[str, Any]:
    return {name: value for name, value in rundata.part(run.facts, "options").items() if name not in OWN}


def _machine_of(run: RunData) -> Mapping[str, Any]:
    world = rundata.part(run.facts, "world")
    its = {name: value for name, value in run.facts.items() if name not in ("app", "time", "world", "options", "step")}
    return {**its, **{name: world.get(name) for name in ("world_size", "node_count", "launcher") if name in world}}


def _facts(
    runs: Sequence[RunData], names: Sequence[str], title: str, of: Callable[[RunData], Mapping[str, Any]]
) -> Iterable[Table]:
    """Two tables: what differs between runs, and, folded, what does not; without runs of which nothing is known."""
    known = [(name, found) for name, run in zip(names, runs) if (found := of(run))]
    every = sorted({each for _, found in known for each in found})
    unlike = [each for each in every if len({_canonical(found, each) for _, found in known}) > 1]
    if len(known) > 1:
        head = [title.lower().split()[0].rstrip("s"), *(name for name, _ in known)]
        marked = {
            (row, column + 1)
            for row, each in enumerate(unlike)
            for column, (_, found) in enumerate(known)
            if _canonical(found, each) != _canonical(known[0][1], each)
        }
        rows = [[each, *(show(found[each]) if each in found else "-" for _, found in known)] for each in unlike]
        yield Table(f"{title} that differ", head, rows, "marked: unlike the first run's", marked)
    same = [[each, show(known[0][1].get(each))] for each in every if each not in unlike]
    alike = f"{title} that are equal" if len(known) > 1 else title
    yield Table(alike, ["", "in all runs" if len(known) > 1 else "value"], same, folded=True)


def _canonical(found: Mapping[str, Any], name: str) -> str:
    return json.dumps(found[name], sort_keys=True) if name in found else ""


def _happened(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    rows = []
    for name, run in zip(names, runs):
        for event in run.events:
            where = "" if event.step is None else str(event.step)
            rows.append([name, KINDS.get(event.kind, event.kind), where, event.when, event.text, event.file])
    starts = [f"{name} {len(run.launches)}" for name, run in zip(names, runs) if len(run.launches) > 1]
    note = "times are by the clock of each line's own machine" + (
        f"; times that the launcher was started: {', '.join(starts)}" if starts else ""
    )
    return Table("What happened", ["run", "", "step", "time", "what", "file"], rows, note)


def _phases(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    rows = []
    for name, run in zip(names, runs):
        for step, its in run.measured.stragglers:
            values = [show(its.get(each)) for each in ("rank", "phase", "seconds", "others")]
            rows.append([name, str(step), *values])
    if not rows and any(run.trains for run in runs):
        rows = [["no slow rank was named", "", "", "", "", ""]]
    note = (
        "seconds a step in the phase in which a slow rank lost the most, and the median of the others'. Of ranks that "
        "were not named a run records no phases: they are summed at each log line, judged, and forgotten"
    )
    return Table("Time by phase and rank", ["run", "step", "rank", "phase", "its s/step", "others' s/step"], rows, note)


def _checkpoints(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    rows = []
    for name, run in zip(names, runs):
        for each in run.saved:
            said = f"set aside: {each.kept}" if each.kept else each.problem or "its manifest and sizes are good"
            rows.append([name, str(each.step), f"{each.size:,}", said])
    note = "those that are still there: a run keeps the newest ones (--keep-checkpoints)"
    return Table("Checkpoints", ["run", "step", "bytes", ""], rows, note, folded=True)


def _evaluations(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    rows = [
        [name, key, show(value)]
        for name, run in zip(names, runs)
        for key, value in run.evaluation.items()
        if key.startswith("test_") or key in ("steps", "resumed_from_step", "bits_per_byte")
    ]
    return Table("Evaluations by --evaluate-only", ["run", "", "value"], rows)


def _lab(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    rows = []
    for name, run in zip(names, runs):
        if run.trains:
            continue
        files = [str(each) for each in run.result["files"]] if isinstance(run.result["files"], list) else []
        measured = sorted({file.partition("-")[0].removesuffix(".json") for file in files if file.endswith(".json")})
        page = str(run.folder / "report.html") if "report.html" in files else "none yet: its command report makes it"
        told = ", ".join(each for each in measured if each != "result")
        rows.append([name, show(run.result.get("command")), show(run.world_size), told, page])
    return Table("Measurements of collectives_lab", ["run", "command", "ranks", "measured", "its own page"], rows)


def show(value: Any) -> str:
    """A value of JSON, short."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)


# --- the picture -----------------------------------------------------------------------------------------------------


def _drawing() -> Callable[[Page], bytes]:
    """What draws a page's panels as a PNG. Raises UserError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "--png needs matplotlib, which is not installed here: python -m pip install matplotlib; the page itself "
            "needs nothing"
        ) from None
    matplotlib.use("agg")
    return _draw


def _draw(page: Page) -> bytes:
    import matplotlib.pyplot as plt

    rows = -(-len(page.panels) // 2)
    figure, axes = plt.subplots(max(1, rows), 2, figsize=(12, 3.6 * max(1, rows)), squeeze=False, layout="constrained")
    cells = list(axes.flat)
    for axis, panel in zip(cells, page.panels):
        for line in panel.lines:
            label = None if line.dashed else page.names[line.run].replace("$", r"\$").lstrip("_")
            style: dict[str, Any] = {"linestyle": "--", "marker": "."} if line.dashed else {}
            width = report_page.width(line.run, len(page.names))
            axis.plot(line.steps, line.values, color=f"C{line.run % 10}", label=label, linewidth=width, **style)
        axis.set(title=panel.title, xlabel="step", yscale="log" if panel.log else "linear")
    for axis in cells[len(page.panels) :]:
        axis.set_axis_off()
    if page.panels and cells[0].get_legend_handles_labels()[1]:
        cells[0].legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    plt.close(figure)
    return content.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
