"""Compare runs on one page that needs no network.

    samestep report RUN_DIR [RUN_DIR ...] -o report.html

The page begins with a verdict: which runs match the first RUN_DIR, or the first
step at which they differ. Results follow, then curves of all measurements,
differences from the first run, events, and the options, versions and machines
that differ. The page lists missing and damaged files.

Runs may differ in app, framework and world size, and may still be running.
With --png, the command also writes a picture of the plots, by matplotlib.

Exit codes: 0 written, 2 a mistake in the call.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
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
from samestep_observe.run_reader import RunData, count_of, finite_number, world_size_of

# This module selects panels and tables, and `report_page` turns them into HTML and SVG. SVG keeps the page small, and
# sharp at any width.
MAX_POINTS = 400  # maximum number of drawn points of a curve
TOLERANCE = 1e-4  # relative difference of losses up to which runs match
TOLERANCE_FLOAT64 = 1e-9  # tolerance if both runs have --dtype float64
MAX_DIFFERENCE = 1e300  # a larger difference is drawn at this value
LAST_EVALUATION = ("test_loss", "test_accuracy", "bits_per_byte")  # metrics to show for a run without a result
RESULTS = (  # the first columns of the results: fields of result.json
    *("steps", "epochs", "train_loss", *LAST_EVALUATION, "test_examples"),
    *("seconds", "samples_per_second", "restarts", "resumed_from_step"),
)
OTHER_FIELDS = {"world_size", "seed", "global_batch_size", "node_count"}  # numbers that other columns and tables show
RUN_OPTIONS = {"run_dir", "requested_dataset"}  # options that may differ between equal runs


def main(arguments: Sequence[str]) -> int:
    """Run ``samestep report`` and return its exit code."""
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
    write_file(options.output, report_page.html_of(page).encode(), "-o")
    if options.png:
        write_file(options.png, _draw(page), "--png")
    print(f"{shown(options.output, limit=500)}: {count_of(len(page.names), 'run')}")


def write_file(path: Path, content: bytes, option: str) -> None:
    """Write a file atomically.

    Args:
        path: path of the file.
        content: content of the file.
        option: the option that names the file, for the error.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        checkpoint.write_atomic(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}: name another file with {option}") from error


# --- the content -----------------------------------------------------------------------------------------------------


def build(runs: Sequence[RunData]) -> Page:
    """Return the content of a page that compares runs with the first run."""
    names = names_of([run.folder for run in runs])
    timelines = [_timeline(index, run) for index, run in enumerate(runs) if run.trains]
    tables = [table for table in _tables(runs, names) if table.rows]
    return Page(
        names=names,
        runs=runs,
        verdicts=_verdicts(runs, names),
        panels=list(_panels(runs)),
        timelines=timelines,
        tables=tables,
        notes=_notes(runs, names),
    )


def _notes(runs: Sequence[RunData], names: Sequence[str]) -> list[str]:
    notes = []
    trained = [run for run in runs if run.trains]
    if len(trained) < len(runs):
        notes.append("collectives_lab measures and does not train: it has no curves; its measurements are listed below")
    apps = {run.app for run in trained if run.app}
    if len(apps) > 1:
        notes.append("the runs are of several apps: compare losses only if model and data are the same")
    for name, run in zip(names, runs):
        if report_page.NO_LAUNCHER_LOG in run.problems:
            notes.append(f"{name} has no log/launcher.log, which only the launch scripts write")
    return notes


def _verdicts(runs: Sequence[RunData], names: Sequence[str]) -> list[Verdict]:
    """Return a verdict for each later run that trained; [] if the first run did not train."""
    if not runs[0].trains:
        return []
    return [_verdict(runs, names, index) for index in range(1, len(runs)) if runs[index].trains]


def _verdict(runs: Sequence[RunData], names: Sequence[str], index: int) -> Verdict:
    """Return the verdict on whether a run's losses match the first run's losses."""
    first = names[0]
    name = names[index]
    differences = loss_divergence(runs[0], runs[index])
    if not differences:
        return Verdict(False, f"{name} and {first} have no step in common")
    tolerance = _tolerance(runs[0], runs[index])
    largest = max(differences.values())
    steps = count_of(len(differences), "step")
    if largest == 0:
        return Verdict(True, f"{name} matches {first} in all bits of the loss at {steps}")
    if largest <= tolerance:
        return Verdict(True, f"{name} matches {first} to {largest:.0e} in the loss at {steps}")
    step = next(step for step, difference in differences.items() if difference > tolerance)
    return Verdict(
        False,
        f"{name} differs from {first} from step {step:,} on, by {differences[step]:.2g}; "
        f"{largest:.2g} at most (tolerance {tolerance:.0e})",
    )


def _tolerance(first: RunData, run: RunData) -> float:
    dtypes = {_options_of(each).get("dtype") for each in (first, run)}
    if dtypes == {"float64"}:
        return TOLERANCE_FLOAT64
    return TOLERANCE


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the last components of each path, as many as distinguish all paths; equal paths get a number."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(set(parts)):
            break
    names = []
    for number, end in enumerate(ends, 1):
        is_unique = ends.count(end) == 1
        names.append(end if is_unique else f"{end} ({number})")
    return names


def thin(run: int, name: str, steps: Sequence[int], values: Sequence[float], dashed: bool = False) -> Line:
    """Return a curve of at most MAX_POINTS points.

    A longer curve is divided into sections. The result has the first and the last point of the curve, and the
    minimum and the maximum of each section.

    Args:
        run: index of the run.
        name: name of the metric.
        steps: steps in ascending order.
        values: value of the metric at each step.
        dashed: whether to draw points on a dashed line.
    """
    points = _points_to_draw(values)
    return Line(
        run,
        name,
        steps=[steps[point] for point in points],
        values=[values[point] for point in points],
        total=len(steps),
        dashed=dashed,
    )


def _points_to_draw(values: Sequence[float]) -> Sequence[int]:
    """Return the indices of the points to draw, in ascending order."""
    count = len(values)
    if count <= MAX_POINTS:
        return range(count)
    points = {0, count - 1}
    sections = MAX_POINTS // 2 - 1
    for index in range(sections):
        first = index * count // sections
        end = (index + 1) * count // sections
        section = range(first, end)
        points.add(min(section, key=values.__getitem__))
        points.add(max(section, key=values.__getitem__))
    return sorted(points)


def _panel_order(name: str) -> tuple[bool, bool, str]:
    is_speed = name == "samples_per_second"
    is_loss = name.removeprefix("test_") == "loss"
    return is_speed, not is_loss, name


def _panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    measured: set[str] = set()
    for run in runs:
        measured.update(run.metrics.curves)
    for name in sorted(measured, key=_panel_order):
        has_own_panel = not name.startswith("test_") or name.removeprefix("test_") not in measured
        if has_own_panel:
            yield _panel(runs, name)
        if name == "loss":
            yield from _differences(runs)


def _panel(runs: Sequence[RunData], name: str) -> Panel:
    """Return the plot of a measurement and of the same measurement on test data."""
    lines = list(_lines(runs, name))
    notes = []
    if any(line.name == f"test_{name}" for line in lines):
        notes.append("dashed, with points: test")
    if name == "loss" and len(runs) > 1:
        notes.append("earlier runs are drawn wider, so that equal curves show as bands")
    title = name.replace("_", " ")
    label = title
    if name == "samples_per_second":
        label = "samples/s"
        notes.append("between two lines of metrics.jsonl, including evaluations and checkpoints")
    return Panel(title.capitalize(), label, lines=lines, note=_note(notes, lines))


def _lines(runs: Sequence[RunData], name: str) -> Iterator[Line]:
    for index, run in enumerate(runs):
        for each in (name, f"test_{name}"):
            curve = run.metrics.curves.get(each)
            is_test = each.startswith("test_") or each == "bits_per_byte"
            if curve:
                yield thin(index, each, steps=curve.steps, values=curve.values, dashed=is_test)


def _note(notes: Sequence[str], lines: Sequence[Line]) -> str:
    longest = max(lines, key=lambda line: line.total)
    drawn = len(longest.steps)
    if longest.total == drawn:
        return "; ".join(notes)
    thinned = (
        f"thinned out, from {longest.total:,} points to {drawn} in the longest: "
        "each section keeps its least and its greatest value"
    )
    return "; ".join([*notes, thinned])


def loss_divergence(first: RunData, run: RunData) -> dict[int, float]:
    """Return the relative difference of two runs' losses by common step; absolute if the first run's loss is 0."""
    expected = first.losses
    losses = run.losses
    divergence = {}
    for step in sorted(expected.keys() & losses.keys()):
        difference = abs(expected[step] - losses[step])
        divergence[step] = difference / (abs(expected[step]) or 1.0)
    return divergence


def _differences(runs: Sequence[RunData]) -> Iterator[Panel]:
    lines = []
    for index in range(1, len(runs)):
        differences = loss_divergence(runs[0], runs[index])
        if differences:
            values = [min(max(each, EQUAL), MAX_DIFFERENCE) for each in differences.values()]
            lines.append(thin(index, "difference", steps=list(differences), values=values))
    if lines:
        note = "|loss - first's| / |first's| at the steps that both recorded; the lowest line is 0: equal bits"
        yield Panel(
            "Difference from the first run", "relative difference", lines=lines, note=_note([note], lines), log=True
        )


def _timeline(index: int, run: RunData) -> Timeline:
    shown = [event for event in run.events if event.step is not None]
    good = [each.step for each in run.checkpoints if each.is_good]
    steps = [run.metrics.step or 0]
    steps += [event.step or 0 for event in shown]
    steps += [each.step for each in run.checkpoints]
    return Timeline(index, last=max(steps), saved=good, events=shown)


# --- tables ----------------------------------------------------------------------------------------------------------


def _tables(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Table]:
    def rows(rows_of: Callable[[RunData], Iterable[Sequence[str]]]) -> list[list[str]]:
        """Return the rows of all runs, with the run's name as the first cell."""
        named = []
        for name, run in zip(names, runs):
            named += [[name, *row] for row in rows_of(run)]
        return named

    yield _results(runs, names)
    yield Table(
        "Losses against the first run",
        ["run", "steps in common", "largest relative difference", "at step", "losses"],
        rows(partial(_comparison_rows, runs[0])),
    )
    yield from _header_tables(runs, names, title="Options", values_of=_options_of)
    yield from _header_tables(runs, names, title="Versions and machines", values_of=_machine_of)
    yield Table(
        "What happened",
        ["run", "", "step", "time", "what", "file"],
        rows(_event_rows),
        note=_launches_note(runs, names),
    )
    stragglers = rows(_straggler_rows)
    if not stragglers and any(run.trains for run in runs):
        stragglers = [["no straggler was reported", "", "", "", "", ""]]
    yield Table(
        "Time by phase and rank",
        ["run", "step", "rank", "phase", "seconds per step", "others"],
        stragglers,
        note="seconds per step in the phase in which a straggler lost the most, and the median of the others; a run "
        "records no phases of other ranks",
    )
    yield Table(
        "Checkpoints",
        ["run", "step", "bytes", ""],
        rows(_checkpoint_rows),
        note="a run keeps only the newest checkpoints (--keep-checkpoints)",
        folded=True,
    )
    yield Table("Evaluations by --evaluate-only", ["run", "", "value"], rows(_evaluation_rows))
    yield Table(
        "Measurements of collectives_lab", ["run", "command", "ranks", "measured", "its own page"], rows(_lab_rows)
    )


def _launches_note(runs: Sequence[RunData], names: Sequence[str]) -> str:
    note = "times are by the clock of each line's own machine"
    launches = []
    for name, run in zip(names, runs):
        count = len(run.log.launches)
        if count > 1:
            launches.append(f"{name} {count}")
    if not launches:
        return note
    return f"{note}; number of launches: {', '.join(launches)}"


def _results(runs: Sequence[RunData], names: Sequence[str]) -> Table:
    results = [run.result or _so_far(run) for run in runs]
    columns = _result_columns(results)
    titles = [column.replace("_", " ") for column in columns]
    rows = []
    for name, run, result in zip(names, runs, results):
        world_size = world_size_of(run.metrics.header, run.result)
        cells = [name, run.app or "?", run.state.name, _framework(result), show(world_size)]
        cells += [show(result.get(column)) for column in columns]
        cells.append(_weights(result, results[0]))
        rows.append(cells)
    return Table(
        "Results",
        ["run", "app", "state", "framework", "ranks", *titles, "weights"],
        rows,
        note="weights: the first digits of the SHA-256 of all weights; = first: the same bits as the first run's; a "
        "run without a result shows its last step and its last evaluation",
    )


def _result_columns(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all numbers in results, without OTHER_FIELDS.

    Names of RESULTS come first, in the order of RESULTS. The other names follow in alphabetical order.
    """
    numbers: set[str] = set()
    for result in results:
        numbers.update(name for name, value in result.items() if finite_number(value) is not None)
    known = [name for name in RESULTS if name in numbers]
    others = numbers - set(RESULTS) - OTHER_FIELDS
    return [*known, *sorted(others)]


def _framework(result: Mapping[str, Any]) -> str:
    values = [result.get(name) for name in ("framework", "framework_version", "backend")]
    return " ".join(str(value) for value in values if value)


def _weights(result: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    digest = str(result.get("weights_sha256") or "")
    if not digest or result is first:
        return digest[:12]
    is_equal = digest == first.get("weights_sha256")
    return f"{digest[:12]} = first" if is_equal else digest[:12]


def _so_far(run: RunData) -> dict[str, Any]:
    """Return the last step and the last evaluation of a run without a result."""
    values: dict[str, Any] = {}
    if run.metrics.step is not None:
        values["steps"] = run.metrics.step
    for name, curve in run.metrics.curves.items():
        if name in LAST_EVALUATION:
            values[name] = curve.values[-1]
    return values


def _comparison_rows(first: RunData, run: RunData) -> Iterator[Sequence[str]]:
    if run is first or not run.trains:
        return
    differences = loss_divergence(first, run)
    if not differences:
        yield "0", "", "", "no step that both logged: give both the same --log-every"
        return
    count = len(differences)
    worst = max(differences, key=differences.__getitem__)
    equal_count = sum(difference == 0 for difference in differences.values())
    bits = "equal in all bits"
    if equal_count < count:
        bits = f"equal in {equal_count} of {count}"
    yield str(count), f"{differences[worst]:.2g}", str(worst), bits


def _options_of(run: RunData) -> Mapping[str, Any]:
    options = run_reader.get_object(run.metrics.header, "options")
    return {name: value for name, value in options.items() if name not in RUN_OPTIONS}


def _machine_of(run: RunData) -> Mapping[str, Any]:
    other = ("app", "time", "world", "options", "step")
    machine = {name: value for name, value in run.metrics.header.items() if name not in other}
    world = run_reader.get_object(run.metrics.header, "world")
    for name in ("world_size", "node_count", "launcher"):
        if name in world:
            machine[name] = world[name]
    return machine


def _header_tables(
    runs: Sequence[RunData], names: Sequence[str], title: str, values_of: Callable[[RunData], Mapping[str, Any]]
) -> Iterator[Table]:
    """Yield a table of the values that differ between runs, and a folded table of equal values.

    If at most one run has values, the folded table is the only table.
    """
    by_run = {name: values_of(run) for name, run in zip(names, runs)}
    known = {name: values for name, values in by_run.items() if values}  # a run without a header has no values
    columns = list(known.values())
    equal, different = _split_by_equality(columns)
    equal_rows = [[key, show(columns[0][key])] for key in equal]
    if len(known) <= 1:
        yield Table(title, ["", "value"], equal_rows, folded=True)
        return
    rows = []
    marked: set[tuple[int, int]] = set()
    for row, key in enumerate(different):
        texts = [_exact(values, key) for values in columns]
        marked.update((row, column) for column, text in enumerate(texts, 1) if text != texts[0])
        rows.append([key, *(show(values[key]) if key in values else "-" for values in columns)])
    kind = title.lower().split()[0].rstrip("s")
    yield Table(
        f"{title} that differ",
        [kind, *known],
        rows,
        note="marked: different from the first run's",
        marked=frozenset(marked),
    )
    yield Table(f"{title} that are equal", ["", "in all runs"], equal_rows, folded=True)


def _split_by_equality(columns: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the sorted keys whose values are equal in all columns, and the sorted keys whose values differ."""
    keys: set[str] = set()
    for values in columns:
        keys.update(values)
    equal = []
    different = []
    for key in sorted(keys):
        texts = {_exact(values, key) for values in columns}
        if len(texts) == 1:
            equal.append(key)
        else:
            different.append(key)
    return equal, different


def _exact(values: Mapping[str, Any], key: str) -> str | None:
    """Return a value as JSON, in which 1, 1.0 and true differ; None if the key is missing."""
    if key not in values:
        return None
    return json.dumps(values[key], sort_keys=True)


def _event_rows(run: RunData) -> Iterator[Sequence[str]]:
    for event in run.events:
        words, _ = KINDS[event.kind]
        yield words, show(event.step), event.when, event.text, event.file


def _straggler_rows(run: RunData) -> Iterator[Sequence[str]]:
    for step, straggler in run.metrics.stragglers:
        values = [show(straggler.get(name)) for name in ("rank", "phase", "seconds", "others")]
        yield [str(step), *values]


def _checkpoint_rows(run: RunData) -> Iterator[Sequence[str]]:
    for each in run.checkpoints:
        state = each.problem or "its manifest and sizes are good"
        if each.quarantined:
            state = f"quarantined: {each.quarantined}"
        yield str(each.step), f"{each.size:,}", state


def _evaluation_rows(run: RunData) -> Iterator[Sequence[str]]:
    for key, value in run.evaluation.items():
        if key.startswith("test_") or key in ("steps", "resumed_from_step", "bits_per_byte"):
            yield key, show(value)


def _lab_rows(run: RunData) -> Iterator[Sequence[str]]:
    if run.trains:
        return
    files = run.result["files"]
    if not isinstance(files, list):
        files = []
    names = [str(each) for each in files]
    measured = {name.partition("-")[0].removesuffix(".json") for name in names if name.endswith(".json")}
    measured.discard("result")
    page = "none yet: its command report makes it"
    if "report.html" in names:
        page = str(run.folder / "report.html")
    world_size = world_size_of(run.metrics.header, run.result)
    yield show(run.result.get("command")), show(world_size), ", ".join(sorted(measured)), page


def show(value: Any) -> str:
    """Return a JSON value as a short text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value)


# --- the picture -----------------------------------------------------------------------------------------------------


def _draw(page: Page) -> bytes:
    """Return the panels as a PNG."""
    from matplotlib.figure import Figure  # matplotlib is an optional dependency

    rows = max(1, math.ceil(len(page.panels) / 2))
    figure = Figure(figsize=(12, 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axis, panel in zip(axes, page.panels):
        for line in panel.lines:
            _draw_line(axis, line, page.names)
        scale = "log" if panel.log else "linear"
        axis.set(title=panel.title, xlabel="step", ylabel=panel.label, yscale=scale)
    for axis in axes[len(page.panels) :]:
        axis.set_axis_off()
    _, labels = axes[0].get_legend_handles_labels()
    if labels:
        axes[0].legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _draw_line(axis: Any, line: Line, names: Sequence[str]) -> None:
    style: dict[str, Any] = {"color": f"C{line.run % 10}", "linewidth": report_page.width(line.run, len(names))}
    if line.dashed:
        style.update(linestyle="--", marker=".")
    else:
        style["label"] = names[line.run].replace("$", r"\$").lstrip("_")
    axis.plot(line.steps, line.values, **style)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
