"""Write all tables and pictures of a run dir to one HTML file without scripts.

bash scripts/run_collectives_lab.sh 2 report --run-dir=RUN [--markdown]
"""

from __future__ import annotations

import html
import importlib
from pathlib import Path
from typing import Any

from samestep import ConfigError, log
from samestep.checkpoint import write_atomic
from show import Picture, results

SECTIONS = {  # first paragraph of each command's section
    "primitives": (
        "What each collective does, checked on every rank against its definition, and how long it takes: from the last "
        "rank's entry to the last rank's exit, medians."
    ),
    "aggregate": (
        "The same training with every way to average gradients. Bytes sent by hand are counted at every send; the "
        "library's are read off the loopback interface."
    ),
    "straggler": (
        "What one slow rank costs all. Everything is measured: each rank notes when it enters and leaves each "
        "collective; inside, it waits until the last rank has entered."
    ),
    "launchers": "One small job, started in every way that PyTorch offers on one machine.",
    "predict": "Predictions by formulas from the latency and bandwidth fitted here; nothing is measured.",
    "trace": "The times before and after each collective, which each rank wrote.",
}
MODULES = {"trace": "waits"}  # every other module has the name of its command
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid #ccc; padding-bottom: .3rem; }
h3 { margin: 1.6rem 0 .3rem; font-size: 1rem; } p { margin: .3rem 0; color: #444; max-width: 62rem; }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0; display: block; overflow-x: auto; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; white-space: nowrap; } td { font-variant-numeric: tabular-nums; }
td:first-child { white-space: nowrap; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { color: #444; font-size: 13px; }
summary { cursor: pointer; color: #06c; } nav a { margin-right: 1rem; }
"""


def write(run_dir: Path, markdown: bool) -> None:
    """Write ``report.html`` to the run dir.

    If ``markdown`` is true, also write all tables except long ones to ``report.md`` and the console.

    Raises:
        ConfigError: the run dir has no results.
    """
    sections = {command: results(run_dir, command) for command in SECTIONS}
    sections = {command: found for command, found in sections.items() if found}
    if not sections:
        raise ConfigError(f"{run_dir} has no results: run another command with the same --run-dir first")
    links = []
    parts = []
    texts = []
    for command, found in sections.items():
        module = importlib.import_module(MODULES.get(command, command))  # not at the top, because torch loads slowly
        links.append(f'<a href="#{command}">{command}</a>')
        parts.append(f'<h2 id="{command}">{command}</h2><p>{html.escape(SECTIONS[command])}</p>')
        parts += [figure(picture) for picture in module.pictures(found)]
        texts.append(f"### {command}\n")
        for result in found:
            for table in module.tables(result):
                parts.append(table.html())
                if not table.long:
                    texts.append(table.markdown())
    first, *_ = sections.values()
    where = describe_machine(first[0]["facts"])
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>collectives_lab</title>'
        f"<style>{STYLE}</style></head><body><h1>collectives_lab</h1><p>{html.escape(where)}</p>"
        f"<nav>{''.join(links)}</nav>{''.join(parts)}</body></html>\n"
    )
    write_atomic(run_dir / "report.html", page.encode())
    if markdown:
        text = "\n".join([f"{where}.\n", *texts])
        write_atomic(run_dir / "report.md", text.encode())
        log.info(text)
    log.info(f"wrote {run_dir / 'report.html'}")


def figure(picture: Picture) -> str:
    """Return a picture and its caption as HTML."""
    return f"<figure>{picture.svg}<figcaption>{html.escape(picture.caption)}</figcaption></figure>"


def describe_machine(facts: dict[str, Any]) -> str:
    """Return the machine, the time and the software of the first results, as text."""
    names = ("time", "machine", "processors", "python", "torch", "backend", "threads")
    return ", ".join(f"{name} {facts[name]}" for name in names if name in facts)
