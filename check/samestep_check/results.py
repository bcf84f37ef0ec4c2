"""Format the results of a check as a table, an HTML page, JSON or JUnit XML."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep import ConfigError
from samestep.untrusted import printable, read_text

from samestep_check.mending import MENDING
from samestep_check.rows import ROWS
from samestep_check.verdicts import CannotTell, Failed, NotSeen, Verdict

VERDICTS: dict[type[Verdict], str] = {Failed: "failed", CannotTell: "cannot tell", NotSeen: "not seen"}
MARGIN = " " * 33
SKIPPED = "cannot tell", "not seen"
_COLORS = {"passed": ' class="match"', "failed": ' class="differs"'}
_TAGS = {"passed": "system-out", "failed": "failure"}  # JUnit elements by verdict


class Result(NamedTuple):
    """The result of a row.

    Attributes:
        row: name of the row.
        verdict: ``passed`` or a value of VERDICTS.
        message: one line that reports the observation.
        duration: duration of the row, in seconds.
    """

    row: str
    verdict: str
    message: str
    duration: float

    @property
    def has_failed(self) -> bool:
        """Return whether the verdict is ``failed``."""
        return self.verdict == "failed"


def table(results: Iterable[Result]) -> str:
    """Return a line of text for each result. After a failed row, more lines have the usual cause and a change."""
    lines = []
    shown: dict[str, str] = {}  # by piece of code: the row that shows the code
    for each in results:
        lines.append(f"{each.row:19} {each.verdict:12} {each.message}")
        if each.has_failed:
            row = ROWS[each.row]
            mending = MENDING[each.row]
            lines.append(f"{MARGIN}usual cause: {row.cause}; see {row.page}")
            lines += _code("change:", mending.plain, each.row, shown)
            lines += _code("or with samestep.torch:", mending.kit, each.row, shown)
    return "\n".join(lines)


def _code(head: str, code: str, row: str, shown: dict[str, str]) -> list[str]:
    """Return the table's lines for a piece of code, or a reference to the row that already shows it."""
    if not code:
        return []
    if code in shown:
        return [f"{MARGIN}{head} as for {shown[code]}"]
    shown[code] = row
    return [f"{MARGIN}{head}", *(f"{MARGIN}    {line}" for line in code.splitlines())]


def _escape(text: str) -> str:
    return html.escape(printable(text))


def page(results: Sequence[Result], command: Sequence[str]) -> str:
    """Return the results as an HTML page that loads no other file."""
    style = Path(__file__).with_name("page.css").read_text()
    counts = []
    for verdict in ("passed", *VERDICTS.values()):
        count = sum(each.verdict == verdict for each in results)
        counts.append(f"{count} {verdict}")
    color = _COLORS["passed"]
    if any(each.has_failed for each in results):
        color = _COLORS["failed"]
    columns = ("row", "verdict", "seen", "usual cause", "took")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    rows = "\n".join(map(_page_row, results))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>samestep check</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>
<header><h1{color}>{", ".join(counts)}</h1>
<p class="note"><code>{_escape(shlex.join(command))}</code></p></header>
<main><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table></div></main></body></html>
"""


def _page_row(each: Result) -> str:
    row = ROWS[each.row]
    mend = ""
    if each.has_failed:
        mending = MENDING[each.row]
        mend = f"{_escape(row.cause)}; see {row.page}<pre>{html.escape(mending.plain)}</pre>"
        if mending.kit:
            mend += f"or with samestep.torch:<pre>{html.escape(mending.kit)}</pre>"
    color = _COLORS.get(each.verdict, "")
    cells = f"<td{color}>{each.verdict}</td><td>{_escape(each.message)}</td><td>{mend}</td>"
    return f'<tr><th scope="row">{_escape(row.title)}</th>{cells}<td>{each.duration:.0f} s</td></tr>'


def as_json(results: Sequence[Result], command: Sequence[str], notes: Sequence[str]) -> str:
    """Return the results as JSON.

    Args:
        results: results of the rows, in order.
        command: words of the checked command.
        notes: lines about limits of the check, and about parts of samestep.torch that the script uses.
    """
    rows = []
    for each in results:
        entry: dict[str, object] = {"row": each.row, "verdict": each.verdict, "message": each.message}
        entry["seconds"] = round(each.duration, 1)
        if each.has_failed:
            entry["cause"] = ROWS[each.row].cause
            entry["page"] = ROWS[each.row].page
            entry["change"] = MENDING[each.row].plain
            entry["change_with_kit"] = MENDING[each.row].kit
        rows.append(entry)
    return json.dumps({"command": [*command], "notes": [*notes], "rows": rows}, indent=2) + "\n"


def failed_rows(path: Path | None) -> list[str]:
    """Return the names of the rows that failed in the last check, from the file of --json.

    Raises:
        ConfigError: ``path`` is None, or the file is missing or not a result of a check.
    """
    if path is None:
        raise ConfigError("--faults failed needs the file of the last check: give --json FILE")
    try:
        rows = json.loads(read_text(path))["rows"]
        return [row["row"] for row in rows if row["verdict"] == "failed" and row["row"] in ROWS]
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}: name the file of the last check") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"--json {path}: not a file of samestep check: name the file of the last check") from None


def junit(results: Sequence[Result]) -> str:
    """Return the results as JUnit XML, in which the verdicts of `SKIPPED` count as skipped."""
    lines = []
    for each in results:
        tag = _TAGS.get(each.verdict, "skipped")
        text = _escape(f"{each.verdict}: {each.message}")
        inner = f'<{tag} message="{text}"/>'
        if tag == "system-out":
            inner = f"<{tag}>{text}</{tag}>"
        head = f'<testcase classname="samestep_check" name="{each.row}" time="{each.duration:.1f}">'
        lines.append(f"{head}{inner}</testcase>")
    failed = sum(each.has_failed for each in results)
    skipped = sum(each.verdict in SKIPPED for each in results)
    head = f'<testsuite name="samestep check" tests="{len(results)}" failures="{failed}" skipped="{skipped}">'
    return "\n".join(['<?xml version="1.0" encoding="utf-8"?>', head, *lines, "</testsuite>", ""])
