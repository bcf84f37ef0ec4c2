"""Tables for the console and the page, and figures as SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """A title, a line that says how to read it, and rows of cells; ``long`` ones are for the page alone."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    long: bool = False

    def text(self) -> str:
        widths = [max(len(row[i]) for row in [self.header, *self.rows]) for i in range(len(self.header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
                 for row in [self.header, *self.rows]]  # fmt: skip
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([self.title, *lines, *([self.note] if self.note else [])]) + "\n"

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        lines = [line(self.header), line(["---"] * len(self.header)), *(line(row) for row in self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, "", *([self.note, ""] if self.note else [])])

    def html(self) -> str:
        def cells(row: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

        body = "".join(cells(row, "td") for row in self.rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        table = f"<table><thead>{cells(self.header, 'th')}</thead><tbody>{body}</tbody></table>"
        if self.long:
            table = f"<details><summary>{len(self.rows)} rows</summary>{table}</details>"
        return f"<h3>{html.escape(self.title)}</h3>{note}{table}"


@dataclass(frozen=True)
class Picture:
    """A figure by matplotlib, as SVG, and the sentence under it."""

    name: str
    caption: str
    svg: str = field(repr=False)


def picture(name: str, caption: str, figure: Figure) -> Picture:
    """The figure as an SVG element that can stand in a page beside others."""
    import matplotlib

    # Ids made from a fixed salt and the name: the same bytes for the same data, and none twice on a page.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        file = io.StringIO()
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", svg)
    return Picture(name, caption, svg)


def new_figure(width: float, height: float) -> Figure:
    """A figure without a window, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def size(count: float) -> str:
    """Bytes in binary units: 1,536 is ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def ranks_of(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def duration(seconds: float) -> str:
    """Three digits and the unit that fits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 1 or unit == "µs":
            return (
                f"{seconds * factor:,.3g} {unit}" if abs(seconds) * factor < 1000 else f"{seconds * factor:,.0f} {unit}"
            )
    raise AssertionError
