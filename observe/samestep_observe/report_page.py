"""Write the page of `report` as one file of HTML and SVG, which loads no other file and runs only its own script.

All text of run dirs is escaped. A Content-Security-Policy allows only the style and the script of this package, by
their digests, and no network access. Without JavaScript, the page lacks only buttons and the values at the pointer.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from samestep import events
from samestep.untrusted import printable

from samestep_observe.run_reader import RESTART, STRAGGLER, Event, RunData, count_of

FOLDER = Path(__file__).with_name("page")
HEIGHT = 240  # height of a plot in pixels; the width is the window's width
UNITS = 1000  # width and height of a plot in its own coordinates
LANE_HEIGHT = 44  # height in pixels of a run's row in the plot of events
COLORS = 8
MARGIN = 0.04  # share of a plot's height that is empty above and below the curves
NO_LAUNCHER_LOG = "log/launcher.log: missing"  # not listed as a problem, because only launch scripts write the file
EQUAL = 1e-17  # value at which a difference of 0 is drawn, below float64's resolution
KINDS = {  # by kind of event: text of the legend, and an SVG path around (0, 0) whose shape is distinct without color
    RESTART: ("restarted", "M-4 -6 L6 0 L-4 6 Z"),
    events.SIGNAL: ("stopped by a signal", "M-5 -5 H5 V5 H-5 Z"),
    events.HANG: ("hang", "M-5 -6 H-1 V6 H-5 Z M1 -6 H5 V6 H1 Z"),
    events.MEMBERS: ("members changed", "M-7 -2 H7 V2 H-7 Z"),
    events.ROLLBACK: ("rolled back", "M4 -6 L-6 0 L4 6 Z"),
    STRAGGLER: ("straggler", "M0 -7 L6 0 L0 7 L-6 0 Z"),
    events.FAILURE: ("failure", "M-6 -4 L-4 -6 L0 -2 L4 -6 L6 -4 L2 0 L6 4 L4 6 L0 2 L-4 6 L-6 4 L-2 0 Z"),
    events.DAMAGE: ("damaged checkpoint", "M-2 -6 H2 V-2 H6 V2 H2 V6 H-2 V2 H-6 V-2 H-2 Z"),
}


class Line(NamedTuple):
    """The drawn points of one run's curve, which has ``total`` points."""

    run: int
    name: str
    steps: list[int]
    values: list[float]
    total: int
    dashed: bool = False


class Panel(NamedTuple):
    """A plot over steps.

    Attributes:
        title: title of the plot.
        label: label of the vertical axis.
        lines: the curves.
        note: text below the plot.
        log: whether the vertical axis is logarithmic; all values must then be positive.
        mark: the first step that differs between the runs; None for no mark.
    """

    title: str
    label: str
    lines: list[Line]
    note: str = ""
    log: bool = False
    mark: int | None = None

    def limits(self) -> tuple[float, float]:
        """Return the smallest and the largest value of all curves."""
        lowest = min(min(line.values) for line in self.lines)
        highest = max(max(line.values) for line in self.lines)
        return lowest, highest


class Timeline(NamedTuple):
    """The checkpoints' steps and the events of one run, on an axis of steps that ends at ``last``."""

    run: int
    last: int
    saved: list[int]
    events: list[Event]


class Table(NamedTuple):
    """Rows of text. ``marked`` has the (row, column) of each cell that differs from the first run's cell."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    marked: frozenset[tuple[int, int]] = frozenset()
    folded: bool = False


class Verdict(NamedTuple):
    """The verdict on whether a run's losses match the first run's losses, with a text for the page."""

    matches: bool
    text: str


class Page(NamedTuple):
    """The content of a page; ``names`` are the runs' names. The first table has the results."""

    names: list[str]
    runs: Sequence[RunData]
    verdicts: list[Verdict]
    panels: list[Panel]
    timelines: list[Timeline]
    tables: list[Table]
    notes: list[str]


def text(value: object) -> str:
    """Escape text for any place in the page; control characters become replacement characters."""
    return html.escape(re.sub(r"[^\n\t]+", lambda line: printable(line[0]), str(value)), quote=True)


def width(run: int, count: int) -> float:
    """Return the width of a run's curve in pixels. The first run's curve is the widest, so that equal curves show."""
    return 1.4 + 1.6 * (count - 1 - run) / max(count - 1, 1)


def html_of(page: Page) -> str:
    """Return the page as HTML."""
    style = (FOLDER / "report.css").read_text()
    script = (FOLDER / "report.js").read_text()
    template = (FOLDER / "report.html").read_text()
    return Template(template).substitute(
        style=style,
        script=script,
        style_digest=_digest(style),
        script_digest=_digest(script),
        title=text(_title(page)),
        verdict="\n".join(_verdicts(page)),
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        legend="\n".join(_legend(page)),
        results="\n".join(_table(page.tables[0])),
        notes="\n".join(f'<p class="note">{text(note)}</p>' for note in page.notes),
        problems="\n".join(_problems(page)),
        panels="\n".join(_panels(page)),
        timelines="\n".join(_timelines(page)),
        tables="\n".join(_tables(page)),
        data=_script_data(page),
    )


def _title(page: Page) -> str:
    others = len(page.names) - 1
    if not others:
        return page.names[0]
    return f"{page.names[0]} and {others} more"


def _script_data(page: Page) -> str:
    """Return the curves as JSON for the script: the run, name, steps and values of each line of each panel."""
    panels = []
    for panel in page.panels:
        lines = []
        for line in panel.lines:
            values = [float(f"{value:.6g}") for value in line.values]
            lines.append([line.run, line.name, line.steps, values])
        panels.append(lines)
    content = json.dumps({"names": page.names, "panels": panels}, separators=(",", ":"))
    return content.replace("<", "\\u003c")  # a text with "</script>" would end the script


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _verdicts(page: Page) -> Iterable[str]:
    """Yield the heading, and a list if there are several verdicts."""
    verdicts = page.verdicts
    first = page.names[0]
    if not verdicts:
        heading = f"{first}: {page.runs[0].state.text}"
        yield f"<h1>{text(heading)}</h1>"
    elif len(verdicts) == 1:
        yield f'<h1 class="{_match(verdicts[0].matches)}">{text(verdicts[0].text)}</h1>'
    else:
        count = sum(verdict.matches for verdict in verdicts)
        heading = f"{count} of {len(verdicts)} runs match {first}"
        yield f'<h1 class="{_match(count == len(verdicts))}">{text(heading)}</h1>'
        items = [f'<li class="{_match(verdict.matches)}">{text(verdict.text)}</li>' for verdict in verdicts]
        yield f"<ul>{''.join(items)}</ul>"


def _match(matches: bool) -> str:
    return "match" if matches else "differs"


def _legend(page: Page) -> Iterable[str]:
    for index, (name, run) in enumerate(zip(page.names, page.runs)):
        app = run.app or "unknown app"
        yield (
            f'<button type="button" class="{_color(index)}" data-run="{index}" aria-pressed="true">'
            '<svg class="key" width="26" height="10" aria-hidden="true">'
            f'<path class="curve{_dash(index)}" d="M2 5 H24"/></svg><b>{text(name)}</b> '
            f'<span>{text(app)}: <span class="state {run.state.name}">{text(run.state.text)}</span>'
            f"<br><code>{text(run.folder)}</code></span></button>"
        )


def _color(run: int) -> str:
    return f"c{run % COLORS}"


def _dash(run: int) -> str:
    """Return the CSS class of a run that shares its color with an earlier run; "" for other runs."""
    if run < COLORS:
        return ""
    return f" d{min(run // COLORS, 3)}"


def _problems(page: Page) -> Iterable[str]:
    items = []
    for name, run in zip(page.names, page.runs):
        problems = [problem for problem in run.problems if problem != NO_LAUNCHER_LOG]
        items += [f"<li><b>{text(name)}</b> {text(problem)}</li>" for problem in problems]
    if items:
        yield '<section class="problems"><h2>Missing or damaged</h2><ul>'
        yield from items
        yield "</ul></section>"


# --- plots -----------------------------------------------------------------------------------------------------------


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` + 1 round numbers from ``low`` to ``high``."""
    raw = high / most - low / most  # high - low could overflow
    if raw < 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw)
    first = math.ceil(low / unit)
    candidates = [count * unit for count in range(first, first + 3 * most)]
    return [value for value in candidates if value <= high]


class _Scale:
    """The mapping of steps and values to a plot's coordinates, from 0 to 1."""

    def __init__(self, low: float, high: float, log: bool, last: int) -> None:
        self.log = log
        self.last = last
        if log:
            low = math.floor(math.log10(low))
            high = max(math.ceil(math.log10(high)), low + 4)
        if high - low < sys.float_info.min:  # half of this difference could be zero
            margin = (abs(low) or 1) / 2
            low = max(low - margin, -sys.float_info.max)
            high = min(high + margin, sys.float_info.max)
        self.low = float(low)
        self.high = float(high)

    def x(self, step: int) -> float:
        """Return the distance from the left, as a share of the width."""
        return step / self.last

    def y(self, value: float) -> float:
        """Return the distance from the top, as a share of the height."""
        if self.log:
            value = math.log10(value)
        below_top = self.high / 2 - value / 2  # the difference of halves cannot overflow
        height = self.high / 2 - self.low / 2
        return MARGIN + (1 - 2 * MARGIN) * (below_top / height)

    def marks(self) -> list[tuple[float, str]]:
        """Return the `y` of each grid line, and the line's label."""
        if not self.log:
            return [(self.y(value), f"{value:.6g}") for value in _ticks(self.low, self.high, 5)]
        powers = sorted({round(value) for value in _ticks(self.low, self.high, 6)})
        return [(self.y(10.0**power), _power_label(power)) for power in powers]


def _power_label(power: int) -> str:
    if power <= -17:  # EQUAL, the value for 0, is drawn there
        return "0"
    return f"1e{power}"


def _panels(page: Page) -> Iterable[str]:
    last = 1  # last step of the axis that all plots share
    for panel in page.panels:
        last = max(last, *(line.steps[-1] for line in panel.lines))
    for index, panel in enumerate(page.panels):
        yield from _panel(page, panel, index, last)


def _summary(panel: Panel, last: int) -> str:
    """Return a text description of a plot, for screen readers."""
    low, high = panel.limits()
    lowest = "0" if low == EQUAL else f"{low:.4g}"
    highest = "0" if high == EQUAL else f"{high:.4g}"
    runs = {line.run for line in panel.lines}
    return f"{count_of(len(runs), 'run')}, to step {last}, values from {lowest} to {highest}"


def _panel(page: Page, panel: Panel, index: int, last: int) -> Iterable[str]:
    low, high = panel.limits()
    scale = _Scale(low, high, log=panel.log, last=last)
    yield f'<figure data-panel="{index}"><figcaption id="t{index}"><h2>{text(panel.title)}</h2></figcaption>'
    yield (
        f'<svg class="plot" width="100%" height="{HEIGHT + 40}" role="img" tabindex="0" data-last="{scale.last}" '
        f'aria-labelledby="t{index}" aria-describedby="n{index} o{index}">'
    )
    yield f'<text class="axis" transform="translate(-12 {HEIGHT // 2}) rotate(-90)">{text(panel.label)}</text>'
    for height, label in scale.marks():
        y = height * HEIGHT
        yield f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="0" y="{y - 3:.1f}">{text(label)}</text>'
    yield from _steps(scale.last, HEIGHT)
    yield f'<svg width="100%" height="{HEIGHT}" viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none">'
    for line in panel.lines:
        yield _curve(line, scale, width(line.run, len(page.names)))
    yield "</svg>"
    if panel.mark is not None:
        yield from _mark(panel.mark, scale.x(panel.mark))
    yield f'<line class="cursor" x1="0" x2="0" y1="0" y2="{HEIGHT}" hidden/></svg>'
    yield f'<output id="o{index}" aria-live="polite"></output>'
    note = _sentences(_summary(panel, last), panel.note)
    yield f'<p class="note" id="n{index}">{text(note)}</p></figure>'


def _mark(step: int, share: float) -> Iterable[str]:
    """Yield a vertical line and its label for the first step that differs, at ``share`` of the plot's width."""
    at = 100 * share
    yield f'<line class="parting" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{HEIGHT}"/>'
    yield f'<text class="parting" x="{at:.2f}%" y="10" text-anchor="{_anchor(at)}">part at step {step:,}</text>'


def _sentences(*texts: str) -> str:
    return " ".join(f"{each[0].upper()}{each[1:]}." for each in texts if each)


def _steps(last: int, top: int) -> Iterable[str]:
    """Yield the name and the labels of the horizontal axis."""
    yield f'<text class="axis" x="50%" y="{top + 34}">step</text>'
    for value in _ticks(0, last, 5):
        if value != int(value):
            continue
        at = 100 * value / last
        yield f'<text class="tick" x="{at:.2f}%" y="{top + 16}" text-anchor="{_anchor(at)}">'
        yield f"{int(value):,}</text>"


def _anchor(percent: float) -> str:
    """Return the text-anchor that keeps a label at ``percent`` of the width inside the plot."""
    if percent < 3:
        return "start"
    if percent > 97:
        return "end"
    return "middle"


def _curve(line: Line, scale: _Scale, stroke: float) -> str:
    points = []
    for step, value in zip(line.steps, line.values):
        x = scale.x(step) * UNITS
        y = scale.y(value) * UNITS
        points.append(f"{x:.1f} {y:.1f}")
    classes = "curve test" if line.dashed else "curve"
    path = "L".join(points)
    drawn = f'<path class="{classes}{_dash(line.run)}" stroke-width="{stroke:.2f}" d="M{path}"/>'
    if line.dashed or len(points) == 1:  # a zero-length line with round ends is a point at any scale
        dots = "".join(f"M{point}h0" for point in points)
        drawn += f'<path class="dots" stroke-width="{stroke + 3.5:.2f}" d="{dots}"/>'
    return f'<g class="{_color(line.run)}" data-run="{line.run}">{drawn}</g>'


def _timelines(page: Page) -> Iterable[str]:
    if not page.timelines:
        return
    last = max(timeline.last for timeline in page.timelines) or 1
    height = LANE_HEIGHT * len(page.timelines)
    yield '<figure class="lanes"><figcaption id="tl"><h2>What happened, by step</h2></figcaption>'
    yield f'<svg class="plot" width="100%" height="{height + 40}" role="img" aria-labelledby="tl"'
    yield ' aria-describedby="nl">'
    for row, timeline in enumerate(page.timelines):
        yield f'<g class="{_color(timeline.run)}" data-run="{timeline.run}">'
        yield from _timeline(page, timeline, row * LANE_HEIGHT + 28, last)
        yield "</g>"
    yield from _steps(last, height)
    yield "</svg>"
    yield f'<p class="note keys" id="nl">{" ".join(_timeline_keys(page))}</p></figure>'


def _timeline_keys(page: Page) -> Iterable[str]:
    tick = '<svg width="14" height="14" aria-hidden="true"><path class="saved" d="M7 1 V13"/></svg>'
    yield f"<span>{tick} checkpoint</span>"
    present: set[str] = set()
    for timeline in page.timelines:
        present.update(event.kind for event in timeline.events)
    for kind, (words, shape) in KINDS.items():
        if kind in present:
            path = f'<svg x="7" y="7" overflow="visible"><path class="event {kind}" d="{shape}"/></svg>'
            yield f'<span><svg width="14" height="14" aria-hidden="true">{path}</svg> {text(words)}</span>'
    yield "<span>the line ends where the run did.</span>"


def _timeline(page: Page, timeline: Timeline, y: int, last: int) -> Iterable[str]:
    end = 100 * timeline.last / last
    yield f'<text class="lane" x="0" y="{y - 12}">{text(page.names[timeline.run])}</text>'
    yield f'<line class="curve{_dash(timeline.run)}" stroke-width="3" x1="0" x2="{end:.2f}%" y1="{y}" y2="{y}"/>'
    for step in timeline.saved:
        at = 100 * step / last
        yield f'<line class="saved" x1="{at:.2f}%" x2="{at:.2f}%" y1="{y - 8}" y2="{y + 8}"><title>'
        yield f"checkpoint at step {step}</title></line>"
    for event in timeline.events:
        at = 100 * (event.step or 0) / last
        _, shape = KINDS[event.kind]
        yield f'<svg x="{at:.2f}%" y="{y}" overflow="visible">'
        yield f'<path class="event {event.kind}" d="{shape}">'
        yield f"<title>step {event.step}: {text(event.text)}</title></path></svg>"


def _tables(page: Page) -> Iterable[str]:
    for table in page.tables[1:]:
        yield from _table(table)


def _table(table: Table) -> Iterable[str]:
    title = text(table.title)
    if table.folded:
        yield f"<details><summary><h2>{title}</h2></summary>"
    else:
        yield f"<section><h2>{title}</h2>"
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{title}"><table><thead><tr>'
    for name in table.head:
        yield f'<th scope="col">{text(name)}</th>'
    yield "</tr></thead><tbody>"
    for row, values in enumerate(table.rows):
        cells = [_cell(value, column, (row, column) in table.marked) for column, value in enumerate(values)]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note">{text(_sentences(table.note))}</p>'
    yield "</details>" if table.folded else "</section>"


def _cell(value: str, column: int, marked: bool) -> str:
    if column == 0:
        return f'<th scope="row">{text(value)}</th>'
    return f"<td><mark>{text(value)}</mark></td>" if marked else f"<td>{text(value)}</td>"
