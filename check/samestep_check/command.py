"""Run a script of yours in copies of its folder, under faults, and report what it survives.

examples:
  samestep check -- torchrun --nproc-per-node=2 train.py
  samestep check --faults quick --html check.html -- torchrun --nproc-per-node=2 train.py
  samestep check --resume-command "torchrun --nproc-per-node=2 train.py --resume" \\
      -- torchrun --nproc-per-node=2 train.py

Each run starts in a fresh copy of the current folder. The command must train
at least two short epochs and save checkpoints. If its batch size is a rank's,
write the global batch of 64 samples as {64/n}. Rows (quick: the first 12):
"""

from __future__ import annotations

import html
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from samestep import ConfigError, NonRetryableError
from samestep.env import JOB_VARIABLES
from samestep.options import Options, Parser, bounded_float, bounded_int, seconds
from samestep.stop import STOP_SIGNALS, Stopped
from samestep.untrusted import MAX_LINE, open_closed_streams, printable, shown

from samestep_check.lab import CHECKPOINT, LOSS, CannotTell, Failed, Lab, NotSeen, Verdict
from samestep_check.rows import QUICK, ROWS

VERDICTS = {Failed: "failed", CannotTell: "cannot tell", NotSeen: "not seen"}


class Result(NamedTuple):
    """Hold the verdict of a row, and its line."""

    row: str
    verdict: str
    seen: str
    took: float  # seconds


def main(arguments: Sequence[str]) -> int:
    """Run the command ``samestep check`` and return the exit code; words after -- are the checked command."""
    open_closed_streams()
    for name in JOB_VARIABLES:
        os.environ.pop(name, None)
    _stop_on_signals()
    split = [*arguments, "--"].index("--")
    try:
        return run(build_parser().parse(arguments[:split]), arguments[split + 1 :])
    except (ConfigError, NonRetryableError) as error:
        print(shown(f"error: {error}", limit=MAX_LINE), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Stopped as stopped:
        return stopped.exit_code


def _stop_on_signals() -> None:
    """Raise Stopped at a stop signal, so that every context of a check ends: it leaves no process and no copy."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped(number, f"stopped by {signal.Signals(number).name}")

    for number in (*STOP_SIGNALS, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores HUP
            signal.signal(number, stop)


def build_parser() -> Parser:
    """Return the parser of ``samestep check``."""
    summary, _, details = str(__doc__).partition("\n\n")
    rows = "".join(f"  {name:19}{row.title}\n" for name, row in ROWS.items())
    usage = "samestep check [options] -- COMMAND [ARGS...]"
    parser = Parser(prog="samestep check", usage=usage, description=summary, epilog=details + rows)
    add = parser.add_argument
    add("--faults", default="all", metavar="ROWS", help="rows separated by commas, also quick and all (default: all)")
    add("--resume-command", metavar="CMD", help="command that resumes the script (default: COMMAND again)")
    add("--require", metavar="ROWS", help="rows that must pass for exit code 0 (default: no row may fail)")
    add("--html", type=Path, metavar="FILE", help="write the table as a page")
    add("--junit", type=Path, metavar="FILE", help="write the table as JUnit XML")
    add("--json", type=Path, metavar="FILE", help="write the table as JSON")
    add("--list", action="store_true", help="print the rows, and run nothing")
    add("--keep", type=Path, metavar="DIR", help="new folder for the copies and their output (default: keep none)")
    add("--adapter", type=Path, metavar="FILE", help="Python file that records steps without a DataLoader")
    add("--loss-pattern", default=LOSS, metavar="RE", help="regular expression of a loss (default: loss and a number)")
    add("--checkpoint", default=CHECKPOINT, metavar="RE", help="regular expression of checkpoints (default: .pt etc.)")
    add("--other-n", type=bounded_int(1), metavar="N", help="other number of ranks (default: one more)")
    add("--link", type=Path, action="append", metavar="DIR", help="subfolder to link, not to copy")
    add("--allow-write", type=Path, action="append", metavar="DIR", help="folder to write to, such as a cache")
    add("--copy-limit", type=bounded_float(0), default=200.0, metavar="MB", help="size limit of copies (default: 200)")
    add("--row-limit", type=seconds, default=120.0, metavar="T", help="seconds per row (default: 120)")
    add("--stall-limit", type=seconds, default=600.0, metavar="T", help="longest sound timeout (default: 600)")
    add("--total-limit", type=seconds, default=900.0, metavar="T", help="seconds for all rows (default: 900)")
    return parser


def run(options: Options, command: Sequence[str]) -> int:
    """Run the command ``samestep check`` and return the exit code."""
    if options.list:
        print("\n".join(f"{name:19}{row.title}" for name, row in ROWS.items()))
        return 0
    if not command:
        raise ConfigError("COMMAND is missing: write it after --")
    required = parse_rows("--require", options.require) if options.require else None
    names = list(dict.fromkeys([*parse_rows("--faults", options.faults), *(required or [])]))
    outputs = ("--html", options.html), ("--junit", options.junit), ("--json", options.json)
    for option, path in outputs:
        if path:
            check_writable(option, path)
    notes: list[str] = []
    results = check(options, command, names, _progress, notes)
    for note in notes:
        print(f"note: {printable(note)}")
    print(table(results))
    if options.html:
        options.html.write_text(page(results, command))
    if options.junit:
        options.junit.write_text(junit(results))
    if options.json:
        options.json.write_text(as_json(results, command, notes))
    if required is None:
        return int(any(each.verdict == "failed" for each in results))
    return int(any(each.verdict != "passed" for each in results if each.row in required))


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError if an output cannot be written after the check."""
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}: name a file in a folder that exists") from None


def parse_rows(option: str, text: str) -> list[str]:
    """Return the rows that an option names."""
    groups = {"all": [*ROWS], "quick": [*ROWS][:QUICK]}
    names = [name for word in text.split(",") for name in groups.get(word, [word])]
    if unknown := [name for name in names if name not in ROWS]:
        raise ConfigError(f"{option}: there is no row {unknown[0]!r}: choose quick, all, or of {', '.join(ROWS)}")
    return [*dict.fromkeys(names)]


def check(
    options: Options,
    command: Sequence[str],
    rows: Iterable[str],
    progress: Callable[[str], None] = lambda name: None,
    notes: list[str] | None = None,
) -> list[Result]:
    """Run the script of the current folder undisturbed, then decide the rows.

    Args:
        options: the parsed options.
        command: the checked command.
        rows: the names of the rows.
        progress: called with the name of each row before it runs.
        notes: gets lines on what the check cannot see.

    Raises:
        ConfigError: the undisturbed script fails, or writes outside of its folder.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-check-") as temporary:
        folder = Path(options.keep or temporary).resolve()
        lab = Lab(options, command, folder)
        if options.keep:
            make_kept(options.keep)
        results: list[Result] = []
        progress("undisturbed")
        try:
            lab.run_reference()
        except Verdict as problem:
            raise ConfigError(f"the undisturbed script: {problem}: give a short command that works") from None
        if notes is not None:
            notes += lab.notes()
        for name in rows:
            progress(name)
            begun = time.monotonic()
            lab.row_end = begun + options.row_limit
            try:
                if begun > lab.begun + options.total_limit:
                    raise CannotTell("the time is over: raise --total-limit")
                verdict, seen = "passed", ROWS[name].decide(lab)
            except Verdict as raised:
                verdict, seen = VERDICTS[type(raised)], str(raised)
            results.append(Result(name, verdict, printable(seen), time.monotonic() - begun))
    progress("")
    return results


def make_kept(folder: Path) -> None:
    """Create the folder of --keep."""
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"--keep {folder}: {error.strerror}: name a new folder") from None


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name and f'checking: {name}'}", end="", file=sys.stderr, flush=True)


def table(results: Iterable[Result]) -> str:
    """Return the results as lines; a failed row also has its usual cause and the page that mends it."""
    lines = []
    for each in results:
        lines.append(f"{each.row:19} {each.verdict:12} {each.seen}")
        if each.verdict == "failed":
            row = ROWS[each.row]
            lines.append(f"{'':32} usual cause: {row.cause}; see {row.page}")
    return "\n".join(lines)


def _escape(text: str) -> str:
    return html.escape(printable(text))


def page(results: Sequence[Result], command: Sequence[str]) -> str:
    """Return the results as HTML; the page loads nothing."""
    style = Path(__file__).with_name("page.css").read_text()
    counts = ", ".join(f"{sum(each.verdict == v for each in results)} {v}" for v in ("passed", *VERDICTS.values()))
    rows = ""
    for each in results:
        row, failed = ROWS[each.row], each.verdict == "failed"
        kind = {"passed": ' class="match"', "failed": ' class="differs"'}.get(each.verdict, "")
        mend = f"{row.cause}; see {row.page}" if failed else ""
        cells = f"<td{kind}>{each.verdict}</td><td>{_escape(each.seen)}</td><td>{_escape(mend)}</td>"
        rows += f'<tr><th scope="row">{_escape(row.title)}</th>{cells}<td>{each.took:.0f} s</td></tr>\n'
    failures = any(each.verdict == "failed" for each in results)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("row", "verdict", "seen", "usual cause", "took"))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>samestep check</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>
<header><h1 class="{"differs" if failures else "match"}">{counts}</h1>
<p class="note"><code>{_escape(shlex.join(command))}</code></p></header>
<main><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table></div></main></body></html>
"""


def as_json(results: Sequence[Result], command: Sequence[str], notes: Sequence[str]) -> str:
    """Return the results as JSON."""
    rows = []
    for each in results:
        row = ROWS[each.row]
        entry: dict[str, object] = {"row": each.row, "verdict": each.verdict, "message": each.seen}
        entry["seconds"] = round(each.took, 1)
        if each.verdict == "failed":
            entry["cause"] = row.cause
            entry["page"] = row.page
        rows.append(entry)
    return json.dumps({"command": [*command], "notes": [*notes], "rows": rows}, indent=2) + "\n"


def junit(results: Sequence[Result]) -> str:
    """Return the results as JUnit XML: a row that cannot tell or was not seen is skipped."""
    lines = []
    for each in results:
        tag = {"passed": "system-out", "failed": "failure"}.get(each.verdict, "skipped")
        text = _escape(f"{each.verdict}: {each.seen}")
        inner = f"<{tag}>{text}</{tag}>" if tag == "system-out" else f'<{tag} message="{text}"/>'
        lines.append(
            f'<testcase classname="samestep_check" name="{each.row}" time="{each.took:.1f}">{inner}</testcase>'
        )
    failed = sum(each.verdict == "failed" for each in results)
    skipped = sum(each.verdict in ("cannot tell", "not seen") for each in results)
    head = f'<testsuite name="samestep check" tests="{len(results)}" failures="{failed}" skipped="{skipped}">'
    return "\n".join(['<?xml version="1.0" encoding="utf-8"?>', head, *lines, "</testsuite>", ""])
