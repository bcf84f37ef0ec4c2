"""Write the page of `samestep diff`, which shows the losses of both runs and the first step that differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep_observe import report, report_page, run_reader
from samestep_observe.recorded import RecordedRun
from samestep_observe.report_page import EQUAL, Line, Panel, Verdict


def write(path: Path, runs: Sequence[RecordedRun], lines: Sequence[str], first: int | None) -> None:
    """Write the page to a file.

    Args:
        path: path of the page.
        runs: run A and run B.
        lines: the lines that the command has printed.
        first: the first step that differs; None if the runs are equal.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = report.build([run_reader.read(run.folder) for run in runs])
    verdict = Verdict(first is None, f"{' and '.join(page.names)} {_part(first)}")
    page = page._replace(
        verdicts=[verdict],
        panels=[*_panels(runs, first), *page.panels],
        notes=[*lines, *page.notes],
    )
    report.write_file(path, report_page.html_of(page).encode(), "--html")


def _part(first: int | None) -> str:
    if first is None:
        return "have equal losses"
    return f"part at step {first:,}"


def _panels(runs: Sequence[RecordedRun], first: int | None) -> list[Panel]:
    """Return a plot of both runs' losses, and a plot of the losses' differences if the runs have common steps."""
    losses = [{step: loss for step, loss in run.losses.items() if math.isfinite(loss)} for run in runs]
    curves = [_line(index, "loss", values) for index, values in enumerate(losses) if values]
    panels = [Panel("Loss of each step", "loss", curves, mark=first)]
    mine, theirs = losses
    apart = {step: max(abs(loss - theirs[step]), EQUAL) for step, loss in mine.items() if step in theirs}
    if apart:
        lines = [_line(1, "difference", apart)]
        note = "|B - A| of each step; the lowest line is 0: equal bits"
        panels.append(Panel("Difference of the losses", "difference", lines, note=note, log=True, mark=first))
    return panels


def _line(run: int, name: str, values: Mapping[int, float]) -> Line:
    return report.thin(run, name, steps=list(values), values=list(values.values()))
