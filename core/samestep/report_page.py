"""HTML and SVG of what `report` decided to show: one file that loads nothing, and runs one script of its own alone.

Whatever comes from files is escaped; a Content-Security-Policy with the digests of the style and the script of this
package lets a browser run nothing else, and fetch nothing. Without the script all is there but what hovers and folds.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.report import Lane, Line, Page, Panel, Table

FOLDER = Path(__file__).with_name("page")
HEIGHT = 240  # pixels of a plot; its width is the window's
UNITS = 1000  # of a plot's own coordinates, both ways
COLORS = 8
MARGIN = 0.04  # of a plot's height, above and below its curves
GLYPHS = {  # of events: shapes that are told apart without their colour, around 0, 0
    "restart": "M-4 -6 L6 0 L-4 6 Z",
    "signal": "M-5 -5 H5 V5 H-5 Z",
    "hang": "M-5 -6 H-1 V6 H-5 Z M1 -6 H5 V6 H1 Z",
    "rollback": "M4 -6 L-6 0 L4 6 Z",
    "straggler": "M0 -7 L6 0 L0 7 L-6 0 Z",
    "failure": "M-6 -4 L-4 -6 L0 -2 L4 -6 L6 -4 L2 0 L6 4 L4 6 L0 2 L-4 6 L-6 4 L-2 0 Z",
    "damage": "M-2 -6 H2 V-2 H6 V2 H2 V6 H-2 V2 H-6 V-2 H-2 Z",
}


def text(value: object) -> str:
    """Escaped, for any place of the page; what no browser shows (control characters) as a replacement character."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else "�" for each in str(value))
    return html.escape(shown, quote=True)


def width(run: int, count: int) -> float:
    """Of a run's curve, in pixels: the first run's is the widest, and shows on both sides of those that cover it."""
    return 1.6 + min(count - 1 - run, 7) * (1.5 if count <= 4 else 0.9)


def html_of(page: Page) -> str:
    """The whole page."""
    style, script = ((FOLDER / name).read_text() for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    title = f"{page.names[0]}" + (f" and {len(page.names) - 1} more" if len(page.names) > 1 else "")
    data = [
        [[line.run, line.name, line.steps, [float(f"{value:.6g}") for value in line.values]] for line in panel.lines]
        for panel in page.panels
    ]
    shown = json.dumps({"names": page.names, "panels": data}, separators=(",", ":")).replace("<", "\\u003c")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{text(title)} - runs side by side</title>",
        f"<style>{style}</style></head><body>",
        "<header><h1>Runs side by side</h1>",
        *_legend(page),
        "</header><main>",
        *(f'<p class="note">{text(note)}</p>' for note in page.notes),
        *_problems(page),
        '<div class="panels">',
        *(part for index, panel in enumerate(page.panels) for part in _panel(page, panel, index)),
        "</div>",
        *_lanes(page),
        *(part for table in page.tables for part in _table(table)),
        "</main><footer><p>Made by <code>python -m samestep.report</code>, of what the runs left. This file loads "
        "nothing.</p></footer>",
        f'<script type="application/json" id="data">{shown}</script>',
        f"<script>{script}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _legend(page: Page) -> Iterable[str]:
    yield '<div class="legend" role="group" aria-label="runs: press one to hide or show its curves">'
    for i, (name, app, state) in enumerate(zip(page.names, page.apps, page.states)):
        yield (
            f'<button type="button" class="c{i % COLORS}" data-run="{i}" aria-pressed="true">'
            f'<svg class="key" width="26" height="10" aria-hidden="true"><path class="curve{_dash(i)}" d="M2 5 H24"/>'
            f'</svg><b>{text(name)}</b> <span>{text(app)}: <span class="state {state.name}">{text(state.text)}</span>'
            "</span></button>"
        )
    yield "</div>"


def _dash(run: int) -> str:
    """A class for runs that share a colour with an earlier one."""
    return f" d{min(run // COLORS, 3)}" if run >= COLORS else ""


def _problems(page: Page) -> Iterable[str]:
    if any(page.problems):
        yield '<section class="problems"><h2>Missing or damaged</h2><ul>'
        for name, problems in zip(page.names, page.problems):
            yield from (f"<li><b>{text(name)}</b> {text(problem)}</li>" for problem in problems)
        yield "</ul></section>"


# --- plots -----------------------------------------------------------------------------------------------------------


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, ``most`` of them or fewer."""
    raw = high / most - low / most  # which is finite
    if raw < 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw)
    first = math.ceil(low / unit)
    return [i * unit for i in range(first, first + 3 * most) if i * unit <= high]


class _Scale:
    """From values to a plot's coordinates."""

    def __init__(self, panel: Panel, last: int) -> None:
        values = [value for line in panel.lines for value in line.values]
        self.log = panel.log
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if self.log:
            low = math.floor(math.log10(low))
            high = max(math.ceil(math.log10(high)), low + 4)
        if not high > low:
            low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
        self.low, self.high = float(low), float(high)
        self.last = last

    def x(self, step: int) -> float:
        return step / self.last

    def y(self, value: float) -> float:
        """From the top, 0, to 1."""
        value = math.log10(value) if self.log else value
        share = (self.high / 2 - value / 2) / (self.high / 2 - self.low / 2)  # halves: their difference is finite
        return MARGIN + (1 - 2 * MARGIN) * share

    def marks(self) -> list[tuple[float, str]]:
        """Heights of grid lines, and what they say."""
        if not self.log:
            return [(self.y(value), f"{value:.6g}") for value in _ticks(self.low, self.high, 5)]
        powers = sorted({round(value) for value in _ticks(self.low, self.high, 6)})
        return [(self.y(10.0**power), "0" if power <= -17 else f"1e{power}") for power in powers]


def _panel(page: Page, panel: Panel, index: int) -> Iterable[str]:
    ends = [line.steps[-1] for each in page.panels for line in each.lines]
    scale = _Scale(panel, max(ends, default=0) or 1)  # one axis of steps for all
    values = [value for line in panel.lines for value in line.values]
    lowest, highest = (f"{value:.4g}" for value in (min(values), max(values)))
    lowest, highest = (each.replace("1e-17", "0") for each in (lowest, highest))
    runs = len({line.run for line in panel.lines})
    told = f"{runs} run{'s' * (runs != 1)}, to step {scale.last}, values from {lowest} to {highest}"
    yield f'<figure data-panel="{index}"><figcaption id="t{index}"><h2>{text(panel.title)}</h2></figcaption>'
    yield (
        f'<svg class="plot" width="100%" height="{HEIGHT + 22}" role="img" tabindex="0" data-last="{scale.last}" '
        f'aria-labelledby="t{index}" aria-describedby="n{index} o{index}">'
    )
    for height, said in scale.marks():
        y = height * HEIGHT
        yield f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="0" y="{y - 3:.1f}">{text(said)}</text>'
    yield from _steps(scale.last, HEIGHT)
    yield f'<svg width="100%" height="{HEIGHT}" viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none">'
    for line in panel.lines:
        yield _curve(line, scale, width(line.run, len(page.names)))
    yield "</svg>"
    yield f'<line class="cursor" x1="0" x2="0" y1="0" y2="{HEIGHT}" hidden/></svg>'
    yield f'<output id="o{index}" aria-live="polite"></output>'
    note = f"{told}. {panel.note[0].upper()}{panel.note[1:]}." if panel.note else f"{told}."
    yield f'<p class="note" id="n{index}">{text(note)}</p></figure>'


def _steps(last: int, top: int) -> Iterable[str]:
    """The labels of the axis of steps, and what it is."""
    for value in _ticks(0, last, 5):
        if value == int(value):
            at = 100 * value / last
            anchor = "start" if at < 3 else "end" if at > 97 else "middle"
            yield f'<text class="tick" x="{at:.2f}%" y="{top + 16}" text-anchor="{anchor}">'
            yield f"{'step ' * (value == 0)}{int(value):,}</text>"


def _curve(line: Line, scale: _Scale, stroke: float) -> str:
    points = [(scale.x(s) * UNITS, scale.y(v) * UNITS) for s, v in zip(line.steps, line.values)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    group = f'<g class="c{line.run % COLORS}" data-run="{line.run}">'
    dashed = " test" if line.dashed else ""
    drawn = f'<path class="curve{dashed}{_dash(line.run)}" stroke-width="{stroke:.2f}" d="M{path}"/>'
    if line.dashed or len(points) == 1:  # a line of no length with round ends is a point, at any stretch
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
        drawn += f'<path class="dots" stroke-width="{stroke + 3.5:.2f}" d="{dots}"/>'
    return f"{group}{drawn}</g>"


def _lanes(page: Page) -> Iterable[str]:
    if not page.lanes:
        return
    from samestep.report import KINDS

    last, height = max(lane.last for lane in page.lanes) or 1, 44
    total = height * len(page.lanes)
    yield '<figure class="lanes"><figcaption id="tl"><h2>What happened, by step</h2></figcaption>'
    yield f'<svg class="plot" width="100%" height="{total + 22}" role="img" aria-labelledby="tl" aria-describedby="nl">'
    for row, lane in enumerate(page.lanes):
        yield f'<g class="c{lane.run % COLORS}" data-run="{lane.run}">'
        yield from _lane(page, lane, row * height + 28, last)
        yield "</g>"
    yield from _steps(last, total)
    yield "</svg>"
    seen = {event.kind for lane in page.lanes for event in lane.events}
    keys = [
        f'<span><svg width="14" height="14" aria-hidden="true"><svg x="7" y="7" overflow="visible"><path class="event '
        f'{kind}" d="{GLYPHS[kind]}"/></svg></svg> {text(words)}</span>'
        for kind, words in KINDS.items()
        if kind in seen
    ]
    tick = '<svg width="14" height="14" aria-hidden="true"><path class="saved" d="M7 1 V13"/></svg>'
    keys = [f"<span>{tick} checkpoint</span>", *keys, "<span>the line ends where the run did.</span>"]
    yield f'<p class="note keys" id="nl">{" ".join(keys)}</p></figure>'


def _lane(page: Page, lane: Lane, y: int, last: int) -> Iterable[str]:
    end = 100 * lane.last / last
    yield f'<text class="lane" x="0" y="{y - 12}">{text(page.names[lane.run])}</text>'
    yield f'<line class="curve{_dash(lane.run)}" stroke-width="3" x1="0" x2="{end:.2f}%" y1="{y}" y2="{y}"/>'
    for step in lane.saved:
        at = 100 * step / last
        yield f'<line class="saved" x1="{at:.2f}%" x2="{at:.2f}%" y1="{y - 8}" y2="{y + 8}"><title>'
        yield f"checkpoint at step {step}</title></line>"
    for event in lane.events:
        at = 100 * (event.step or 0) / last
        yield f'<svg x="{at:.2f}%" y="{y}" overflow="visible">'
        yield f'<path class="event {event.kind}" d="{GLYPHS[event.kind]}">'
        yield f"<title>step {event.step}: {text(event.text)}</title></path></svg>"


def _table(table: Table) -> Iterable[str]:
    tag = "details" if table.folded else "section"
    title = f"<h2>{text(table.title)}</h2>"
    yield f"<{tag}>{f'<summary>{title}</summary>' if table.folded else title}"
    yield '<div class="wide" tabindex="0" role="region" aria-label="' + text(table.title) + '"><table><thead><tr>'
    yield "".join(f'<th scope="col">{text(each)}</th>' for each in table.head) + "</tr></thead><tbody>"
    for r, row in enumerate(table.rows):
        yield "<tr>" + "".join(_cell(value, c, (r, c) in table.marked) for c, value in enumerate(row)) + "</tr>"
    yield "</tbody></table></div>"
    yield (f'<p class="note">{text(table.note[0].upper() + table.note[1:])}.</p>' if table.note else "") + f"</{tag}>"


def _cell(value: str, column: int, marked: bool) -> str:
    if column == 0:
        return f'<th scope="row">{text(value)}</th>'
    return f"<td><mark>{text(value)}</mark></td>" if marked else f"<td>{text(value)}</td>"
