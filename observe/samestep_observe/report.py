"""Compare runs on one page that needs no network.

    samestep report RUN_DIR [RUN_DIR ...] -o report.html

The page begins with a verdict: which runs match the first RUN_DIR, or the first
step at which they differ. Results follow, then curves of all measurements,
differences from the first run, events, different options, versions and
machines. It names missing and damaged files.

Runs may differ in app, framework and world size, and may still be running.
--png draws only the plots, and needs matplotlib.

Exit codes: 0 written, 2 a mistake in the call.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samestep import ConfigError, checkpoint
from samestep.options import Options
from samestep.untrusted import shown

from samestep_observe import report_page, run_reader
from samestep_observe.command import new_parser, run_command
from samestep_observe.report_page import EQUAL, KINDS, Line, Page, Panel, Table, Timeline, Verdict
from samestep_observe.run_reader import Curve, RunData, finite_number, world_size_of

# This module selects panels and tables. `report_page` turns them into HTML, with plots as SVG, without a plotting
# library, so that the page is light, and sharp at any width.
MAX_POINTS = 400  # of a curve that are drawn
TOLERANCE, TOLERANCE_FLOAT64 = 1e-4, 1e-9  # relative differences of losses up to which runs match
MAX_DIFFERENCE = 1e300  # a larger one is drawn there
LAST_EVALUATION = ("test_loss", "test_accuracy", "bits_per_byte")  # shown for a run without a result
RESULTS = (  # fields of result.json, in this order; other numbers follow
    *("steps", "epochs", "train_loss", *LAST_EVALUATION, "test_examples"),
    *("seconds", "samples_per_second", "restarts", "resumed_from_step"),
)
OTHER_FIELDS = {"world_size", "seed", "global_batch_size", "node_count"}  # numbers that other columns and tables show
RUN_OPTIONS = {"run_dir", "requested_dataset"}  # options that differ between any two runs


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0, or 2 after one line on stderr."""
    parser = new_parser("report", __doc__)
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path, help="the folder of a run")
    default = "(default: %(default)s)"
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help=default)
    parser.add_argument("--png", type=Path, metavar="FILE", help="also write a picture of the plots; needs matplotlib")
    return run_command(parser, arguments, _run)


def _run(options: Options) -> None:
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib, which is not installed here: python -m pip install matplotlib")
    page = build([run_reader.read(run_dir) for run_dir in options.run_dirs])
    _write(options.output, report_page.html_of(page).encode(), "-o")
    if options.png:
        _write(options.png, _draw(page), "--png")
    print(f"{shown(options.output, limit=500)}: {len(page.names)} run{'s' * (len(page.names) != 1)}")


def _write(path: Path, content: bytes, option: str) -> None:
    try:
        checkpoint.write_atomic(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}: name another file with {option}") from error


# --- the content -----------------------------------------------------------------------------------------------------


def build(runs: Sequence[RunData]) -> Page:
    """Return the content of a page; runs are compared with the first."""
    names = names_of([run.folder for run in runs])
    notes = []
    if any(not run.trains for run in runs):
        notes.append("collectives_lab measures and does not train: it has no curves; its measurements are listed below")
    if len({run.app for run in runs if run.trains and run.app}) > 1:
        notes.append("the runs are of several apps: compare losses only if model and data are the same")
    notes += [
        f"{name} has no log/launcher.log, which only the launch scripts write"
        for name, run in zip(names, runs)
        if report_page.NO_LAUNCHER_LOG in run.problems
    ]
    timelines = [_timeline(index, run) for index, run in enumerate(runs) if run.trains]
    tables = [table for table in _tables(runs, names) if table.rows]
    verdicts = [_verdict(runs, names, i) for i in range(1, len(runs)) if runs[i].trains and runs[0].trains]
    return Page(names, runs, verdicts, list(_panels(runs)), timelines, tables, notes)


def _verdict(runs: Sequence[RunData], names: Sequence[str], index: int) -> Verdict:
    """Return whether a run's losses match the first run's, in words."""
    first, name, differences = names[0], names[index], loss_divergence(runs[0], runs[index])
    if not differences:
        return Verdict(False, f"{name} and {first} have no step in common")
    is_float64 = all(_options_of(run).get("dtype") == "float64" for run in (runs[0], runs[index]))
    tolerance = TOLERANCE_FLOAT64 if is_float64 else TOLERANCE
    largest, count = max(differences.values()), f"{len(differences):,} step{'s' * (len(differences) != 1)}"
    if largest == 0:
        return Verdict(True, f"{name} matches {first} in all bits of the loss at {count}")
    if largest <= tolerance:
        return Verdict(True, f"{name} matches {first} to {largest:.0e} in the loss at {count}")
    step = next(step for step, difference in differences.items() if difference > tolerance)
    start = f"{name} differs from {first} from step {step:,} on, by {differences[step]:.2g}"
    return Verdict(False, f"{start}; {largest:.2g} at most (tolerance {tolerance:.0e})")


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that are unique; equal paths get a number."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def thin(run: int, name: str, steps: Sequence[int], values: Sequence[float], dashed: bool = False) -> Line:
    """Return a curve of at most MAX_POINTS points: the least and the greatest of each section, so no peak is lost."""
    count, sections = len(steps), MAX_POINTS // 2 - 1
    kept = set(range(count)) if count <= MAX_POINTS else {0, count - 1}
    for i in range(sections if count > MAX_POINTS else 0):
        section = range(i * count // sections, (i + 1) * count // sections)
        kept |= {min(section, key=values.__getitem__), max(section, key=values.__getitem__)}
    order = sorted(kept)
    return Line(run, name, [steps[i] for i in order], [values[i] for i in order], count, dashed)


def _panel_order(name: str) -> tuple[bool, bool, str]:
    return name == "samples_per_second", name.removeprefix("test_") != "loss", name


def _panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    measured = {name for run in runs for name in run.metrics.curves}
    for name in sorted(measured, key=_panel_order):
        if name.startswith("test_") and name.removeprefix("test_") in measured:
            continue
        notes = ["dashed, with points: test"] if f"test_{name}" in measured else []
        if name == "loss" and len(runs) > 1:
            notes.append("earlier runs are drawn wider, so that equal curves show as bands")
        if name == "samples_per_second":
            notes.append("between two lines of metrics.jsonl, including evaluations and checkpoints")
        lines = [
            thin(i, each, curve.steps, curve.values, dashed=each.startswith("test_") or each == "bits_per_byte")
            for i, run in enumerate(runs)
            for each in (name, f"test_{name}")
            if (curve := run.metrics.curves.get(each))
        ]
        label = "samples/s" if name == "samples_per_second" else name.replace("_", " ")
        yield Panel(name.replace("_", " ").capitalize(), label, lines, _note(notes, lines))
        if name == "loss":
            yield from _differences(runs)


def _note(notes: Sequence[str], lines: Sequence[Line]) -> str:
    longest = max(lines, key=lambda line: line.total)
    thinned = f"thinned out, from {longest.total:,} points to {len(longest.steps)} in the longest: each section keeps "
    thinned += "its least and its greatest value"
    return "; ".join([*notes, thinned] if longest.total > len(longest.steps) else notes)


def loss_divergence(first: RunData, run: RunData) -> dict[int, float]:
    """Return by step |loss - first's| / |first's|, without the division if the first's is 0, for common steps."""
    curves = [each.metrics.curves.get("loss", Curve()) for each in (first, run)]
    a, b = (dict(zip(curve.steps, curve.values)) for curve in curves)
    return {step: abs(a[step] - b[step]) / (abs(a[step]) or 1.0) for step in sorted(a.keys() & b.keys())}


def _differences(runs: Sequence[RunData]) -> Iterator[Panel]:
    lines = []
    for i, run in enumerate(runs[1:], 1):
        if differences := loss_divergence(runs[0], run):
            values = [min(max(each, EQUAL), MAX_DIFFERENCE) for each in differences.values()]
            lines.append(thin(i, "difference", list(differences), values))
    if lines:
        note = "|loss - first's| / |first's| at the steps that both logged; the lowest line is 0: equal bits"
        yield Panel("Difference from the first run", "relative difference", lines, _note([note], lines), log=True)


def _timeline(index: int, run: RunData) -> Timeline:
    shown = [event for event in run.events if event.step is not None]
    saved = [each.step for each in run.checkpoints if not each.quarantined and not each.problem]
    steps = [run.metrics.step or 0, *(event.step or 0 for event in shown), *(each.step for each in run.checkpoints)]
    return Timeline(index, max(steps), saved, shown)


# --- tables ----------------------------------------------------------------------------------------------------------


def _tables(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Table]:
    def rows(of: Callable[[RunData], Iterable[Sequence[str]]]) -> list[list[str]]:
        return [[name, *row] for name, run in zip(names, runs) for row in of(run)]

    yield _results(runs, names)
    head = ["run", "steps in common", "largest relative difference", "at step", "losses"]
    yield Table("Losses against the first run", head, rows(partial(_compare, runs[0])))
    yield from _header_tables(runs, names, "Options", _options_of)
    yield from _header_tables(runs, names, "Versions and machines", _machine_of)
    launches = [f"{name} {len(run.log.launches)}" for name, run in zip(names, runs) if len(run.log.launches) > 1]
    note = "times are by the clock of each line's own machine"
    note += f"; number of launches: {', '.join(launches)}" if launches else ""
    yield Table("What happened", ["run", "", "step", "time", "what", "file"], rows(_event_rows), note)
    stragglers = rows(_straggler_rows)
    if not stragglers and any(run.trains for run in runs):
        stragglers = [["no straggler was reported", "", "", "", "", ""]]
    note = "seconds per step in the phase in which a straggler lost the most, and the median of the others; a run "
    note += "records no phases of other ranks"
    head = ["run", "step", "rank", "phase", "seconds per step", "others"]
    yield Table("Time by phase and rank", head, stragglers, note)
    note = "a run keeps only the newest checkpoints (--keep-checkpoints)"
    yield Table("Checkpoints", ["run", "step", "bytes", ""], rows(_checkpoint_rows), note, folded=True)
    yield Table("Evaluations by --evaluate-only", ["run", "", "value"], rows(_evaluation_rows))
    head = ["run", "command", "ranks", "measured", "its own page"]
    yield Table("Measurements of collectives_lab", head, rows(_lab_rows))


def _results(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    results = [run.result or _so_far(run) for run in runs]
    numbers = {name for result in results for name, value in result.items() if finite_number(value) is not None}
    columns = [*(name for name in RESULTS if name in numbers), *sorted(numbers - {*RESULTS} - OTHER_FIELDS)]
    head = ["run", "app", "state", "framework", "ranks", *(name.replace("_", " ") for name in columns), "weights"]
    first, rows = results[0].get("weights_sha256"), []
    for name, run, result in zip(names, runs, results):
        fields = ("framework", "framework_version", "backend")
        framework = " ".join(str(result[field]) for field in fields if result.get(field))
        digest = str(result.get("weights_sha256") or "")
        weights = digest[:12] + (" = first" if digest and digest == first and run is not runs[0] else "")
        values = [show(result.get(column)) for column in columns]
        rows.append(
            [
                name,
                run.app or "?",
                run.state.name,
                framework,
                show(world_size_of(run.metrics.header, run.result)),
                *values,
                weights,
            ]
        )
    note = "weights: the first digits of the SHA-256 of all weights; = first: the same bits as the first run's; a run "
    note += "without a result shows its last step and its last evaluation"
    return Table("Results", head, rows, note)


def _so_far(run: RunData) -> dict[str, Any]:
    """Return the last step and the last evaluation of a run without a result."""
    last = {name: curve.values[-1] for name, curve in run.metrics.curves.items() if name in LAST_EVALUATION}
    return last if run.metrics.step is None else {"steps": run.metrics.step, **last}


def _compare(first: RunData, run: RunData) -> Iterator[Sequence[str]]:
    if run is first or not run.trains:
        return
    differences = loss_divergence(first, run)
    if not differences:
        yield "0", "", "", "no step that both logged: give both the same --log-every"
        return
    worst, count = max(differences, key=differences.__getitem__), len(differences)
    equal = sum(each == 0 for each in differences.values())
    bits = "equal in all bits" if equal == count else f"equal in {equal} of {count}"
    yield str(count), f"{differences[worst]:.2g}", str(worst), bits


def _options_of(run: RunData) -> Mapping[str, Any]:
    options = run_reader.get_object(run.metrics.header, "options")
    return {name: value for name, value in options.items() if name not in RUN_OPTIONS}


def _machine_of(run: RunData) -> Mapping[str, Any]:
    world = run_reader.get_object(run.metrics.header, "world")
    other = ("app", "time", "world", "options", "step")
    machine = {name: value for name, value in run.metrics.header.items() if name not in other}
    return {**machine, **{name: world[name] for name in ("world_size", "node_count", "launcher") if name in world}}


def _header_tables(
    runs: Sequence[RunData], names: Sequence[str], title: str, values_of: Callable[[RunData], Mapping[str, Any]]
) -> Iterator[Table]:
    """Yield two tables: values that differ between runs, and, folded, equal values."""
    known = {name: values for name, run in zip(names, runs) if (values := values_of(run))}
    keys = sorted({key for values in known.values() for key in values})
    exact = [{key: json.dumps(value, sort_keys=True) for key, value in values.items()} for values in known.values()]
    unequal = [key for key in keys if len({values.get(key) for values in exact}) > 1]
    equal = [[key, show(next(iter(known.values()))[key])] for key in keys if key not in unequal]
    if len(known) <= 1:
        yield Table(title, ["", "value"], equal, folded=True)
        return
    rows = [[key, *(show(values[key]) if key in values else "-" for values in known.values())] for key in unequal]
    cells = [(row, column) for row in range(len(rows)) for column in range(len(known))]
    marked = frozenset((r, c + 1) for r, c in cells if exact[c].get(unequal[r]) != exact[0].get(unequal[r]))
    head = [title.lower().split()[0].rstrip("s"), *known]
    yield Table(f"{title} that differ", head, rows, "marked: different from the first run's", marked)
    yield Table(f"{title} that are equal", ["", "in all runs"], equal, folded=True)


def _event_rows(run: RunData) -> Iterator[Sequence[str]]:
    for event in run.events:
        yield KINDS[event.kind][0], show(event.step), event.when, event.text, event.file


def _straggler_rows(run: RunData) -> Iterator[Sequence[str]]:
    for step, straggler in run.metrics.stragglers:
        yield str(step), *(show(straggler.get(name)) for name in ("rank", "phase", "seconds", "others"))


def _checkpoint_rows(run: RunData) -> Iterator[Sequence[str]]:
    for each in run.checkpoints:
        quarantined = f"quarantined: {each.quarantined}" if each.quarantined else ""
        yield str(each.step), f"{each.size:,}", quarantined or each.problem or "its manifest and sizes are good"


def _evaluation_rows(run: RunData) -> Iterator[Sequence[str]]:
    for key, value in run.evaluation.items():
        if key.startswith("test_") or key in ("steps", "resumed_from_step", "bits_per_byte"):
            yield key, show(value)


def _lab_rows(run: RunData) -> Iterator[Sequence[str]]:
    if not run.trains:
        files = [str(each) for each in run.result["files"]] if isinstance(run.result["files"], list) else []
        measured = {file.partition("-")[0].removesuffix(".json") for file in files if file.endswith(".json")}
        page = str(run.folder / "report.html") if "report.html" in files else "none yet: its command report makes it"
        commands = ", ".join(sorted(measured - {"result"}))
        yield show(run.result.get("command")), show(world_size_of(run.metrics.header, run.result)), commands, page


def show(value: Any) -> str:
    """Return a value of JSON as a short text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


# --- the picture -----------------------------------------------------------------------------------------------------


def _draw(page: Page) -> bytes:
    """Return the panels as a PNG."""
    from matplotlib.figure import Figure  # an optional dependency

    rows = max(1, -(-len(page.panels) // 2))
    figure = Figure(figsize=(12, 3.6 * rows), layout="constrained")
    cells = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axis, panel in zip(cells, page.panels):
        for line in panel.lines:
            label = None if line.dashed else page.names[line.run].replace("$", r"\$").lstrip("_")
            style: dict[str, Any] = {"linestyle": "--", "marker": "."} if line.dashed else {}
            width = report_page.width(line.run, len(page.names))
            axis.plot(line.steps, line.values, color=f"C{line.run % 10}", label=label, linewidth=width, **style)
        axis.set(title=panel.title, xlabel="step", ylabel=panel.label, yscale="log" if panel.log else "linear")
    for axis in cells[len(page.panels) :]:
        axis.set_axis_off()
    if page.panels and cells[0].get_legend_handles_labels()[1]:
        cells[0].legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
