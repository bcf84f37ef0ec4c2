"""Format tables for the console and the HTML page, draw figures as SVG, and write results."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep import log
from samestep.checkpoint import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_RANKS = 4  # maximum number of ranks with a column in a table


@dataclass(frozen=True)
class Table:
    """A table with a title and a note on how to read it. Only the HTML page shows tables that are ``long``."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    long: bool = False

    def text(self) -> str:
        """Return the table as plain text for the console."""
        rows = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = []
        for row in rows:
            cells = map(str.ljust, row, widths)
            lines.append("  ".join(cells).rstrip())
        rule = "-" * max(map(len, lines))
        lines = [self.title, lines[0], rule, *lines[1:]]
        if self.note:
            lines.append(self.note)
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [f"**{self.title}**", ""]
        for row in [self.header, ["---"] * len(self.header), *self.rows]:
            cells = [cell.replace("|", "\\|") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        if self.note:
            lines += [self.note, ""]
        return "\n".join(lines)

    def html(self) -> str:
        """Return the table as HTML. A long table is collapsed."""

        def line(row: Sequence[str], tag: str) -> str:
            cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            return f"<tr>{cells}</tr>"

        head = line(self.header, "th")
        body = "".join(line(row, "td") for row in self.rows)
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
        if self.long:
            table = f"<details><summary>{len(self.rows)} rows</summary>{table}</details>"
        if self.note:
            table = f"<p>{html.escape(self.note)}</p>{table}"
        return f"<h3>{html.escape(self.title)}</h3>{table}"


@dataclass(frozen=True)
class Picture:
    """A figure as SVG, with its file name and caption."""

    name: str
    caption: str
    svg: str = field(repr=False)


def picture(name: str, caption: str, figure: Figure) -> Picture:
    """Return the `Picture` of a matplotlib figure. The SVG's ids begin with ``name``, so they are unique on a page."""
    import matplotlib

    # matplotlib derives ids from this salt instead of a random one, so that equal data give equal bytes.
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        file = io.StringIO()
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", svg)
    return Picture(name, caption, svg)


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of ``width`` x ``height`` inches, and its axes row by row. No window opens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def write_json(run_dir: Path, name: str, value: Any) -> None:
    """Write ``value`` to ``<run-dir>/<name>.json`` atomically."""
    write_atomic(run_dir / f"{name}.json", (json.dumps(value, indent=1) + "\n").encode())


def results(run_dir: Path, command: str) -> list[dict[str, Any]]:
    """Return a command's results in the run dir, in ascending order of their world sizes."""

    def ranks(path: Path) -> int:
        _, _, number = path.stem.rpartition("-")
        return int(number)

    files = sorted(run_dir.glob(f"{command}-*.json"), key=ranks)
    files += run_dir.glob(f"{command}.json")
    return [json.loads(path.read_text()) for path in files]


def publish(
    run_dir: Path,
    name: str,
    result: Any,
    tables: Iterable[Table],
    pictures: Callable[[list[dict[str, Any]]], Iterable[Picture]],
) -> None:
    """Write ``<run-dir>/<name>.json``, print its tables except long ones, and write the command's pictures.

    In a job of several ranks, only rank 0 calls this function.

    Args:
        run_dir: run dir of the job.
        name: name of the command, with the world size if the command has several results.
        result: result of the command, which can be encoded as JSON.
        tables: tables of the result.
        pictures: function that returns the pictures. Its argument is a list of the command's results in the run dir.
    """
    write_json(run_dir, name, result)
    for table in tables:
        if not table.long:
            log.info(table.text())
    command, _, _ = name.partition("-")
    for each in pictures(results(run_dir, command)):
        write_atomic(run_dir / f"{each.name}.svg", each.svg.encode())


def size(count: float) -> str:
    """Return a number of bytes as text in binary units, such as ``1.5 KiB`` for 1,536."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def ranks_of(count: int) -> str:
    """Return a number of ranks as text, such as ``1 rank`` or ``2 ranks``."""
    if count == 1:
        return "1 rank"
    return f"{count:,} ranks"


def duration(seconds: float) -> str:
    """Return a time as text with three significant digits, in s, ms or µs."""
    value = seconds
    unit = "s"
    if abs(value) < 1:
        value = seconds * 1e3
        unit = "ms"
    if abs(value) < 1:
        value = seconds * 1e6
        unit = "µs"
    if abs(value) < 1000:
        return f"{value:,.3g} {unit}"
    return f"{value:,.0f} {unit}"
