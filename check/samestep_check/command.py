"""Run a script of yours in copies of its folder, under faults, and report what it survives.

examples:
  samestep check -- torchrun --nproc-per-node=2 train.py
  samestep check --faults quick --html check.html -- torchrun --nproc-per-node=2 train.py
  samestep check --resume-command "torchrun --nproc-per-node=2 train.py --resume" \\
      -- torchrun --nproc-per-node=2 train.py

Each run starts in a fresh copy of the current folder. The command must train
at least two short epochs and save checkpoints. If it sets a batch size per
rank, write {64/n} for a global batch of 64 samples. Rows (quick: the first 12):
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from samestep import ConfigError, NonRetryableError
from samestep.job_info import leave_job
from samestep.options import Options, Parser, bounded_float, bounded_int, seconds
from samestep.stop import STOP_SIGNALS, Stopped
from samestep.untrusted import MAX_LINE, open_closed_streams, printable, shown

from samestep_check import cleanup
from samestep_check.results import VERDICTS, Result, as_json, failed_rows, junit, page, table
from samestep_check.rows import QUICK, ROWS
from samestep_check.runner import CHECKPOINT, LOSS, ScriptRunner
from samestep_check.verdicts import Verdict

OUTPUTS = "html", "junit", "json"  # options that name an output file
ROWS_HELP = "rows separated by commas, also quick, all, and failed: those that failed in --json FILE (default: all)"


def main(arguments: Sequence[str]) -> int:
    """Run the command ``samestep check``, and return the exit code. The words after ``--`` are the checked command."""
    open_closed_streams()
    leave_job(os.environ)
    _stop_on_signals()
    split = [*arguments, "--"].index("--")
    try:
        return run(build_parser().parse(arguments[:split]), arguments[split + 1 :])
    except (ConfigError, NonRetryableError) as error:
        print(shown(f"error: {error}", limit=MAX_LINE), file=sys.stderr)
        return error.exit_code
    except Stopped as stopped:
        return stopped.exit_code


def _stop_on_signals() -> None:
    """Install signal handlers that raise Stopped, so that context managers end the job and delete temporary folders."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Stopped(number, f"stopped by {signal.Signals(number).name}")

    for number in (*STOP_SIGNALS, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # under nohup, HUP must remain ignored
            signal.signal(number, stop)


def build_parser() -> Parser:
    """Return the parser of ``samestep check``."""
    summary, _, details = str(__doc__).partition("\n\n")
    rows = "".join(f"  {name:19}{row.title}\n" for name, row in ROWS.items())
    usage = "samestep check [options] -- COMMAND [ARGS...]"
    parser = Parser(prog="samestep check", usage=usage, description=summary, epilog=details + rows)
    add = parser.add_argument
    add("--faults", default="all", metavar="ROWS", help=ROWS_HELP)
    add("--resume-command", metavar="CMD", help="command that resumes the script (default: COMMAND again)")
    add("--require", metavar="ROWS", help="rows that must pass for exit code 0 (default: no row may fail)")
    add("--html", type=Path, metavar="FILE", help="write the table as a page")
    add("--junit", type=Path, metavar="FILE", help="write the table as JUnit XML")
    add("--json", type=Path, metavar="FILE", help="write the table as JSON")
    add("--list", action="store_true", help="print the rows and how often each starts the script, and run nothing")
    add("--keep", type=Path, metavar="DIR", help="new folder for the copies and their output (default: keep none)")
    add("--adapter", type=Path, metavar="FILE", help="Python file that records steps without a DataLoader")
    add("--loss-pattern", default=LOSS, metavar="RE", help="regular expression of a loss (default: loss and a number)")
    add("--checkpoint", default=CHECKPOINT, metavar="RE", help="regular expression of checkpoints (default: .pt etc.)")
    add("--other-n", type=bounded_int(1), metavar="N", help="other number of ranks (default: one more)")
    add("--link", type=Path, action="append", metavar="DIR", help="subfolder to link, not to copy")
    add("--fresh", action="append", metavar="GLOB", help="files or folders to leave out, such as old checkpoints")
    add("--allow-write", type=Path, action="append", metavar="DIR", help="folder to write to, such as a cache")
    add("--copy-limit", type=bounded_float(0), default=200.0, metavar="MB", help="size limit of copies (default: 200)")
    add("--row-limit", type=seconds, default=120.0, metavar="T", help="seconds per row (default: 120)")
    add("--stall-limit", type=seconds, default=600.0, metavar="T", help="longest sound timeout (default: 600)")
    add("--points", type=bounded_int(2), default=25, metavar="K", help="most states of a save to restart (default: 25)")
    add("--total-limit", type=seconds, default=900.0, metavar="T", help="seconds for all rows (default: 900)")
    return parser


def run(options: Options, command: Sequence[str]) -> int:
    """Check the command, print and write the results, and return the exit code.

    Raises:
        ConfigError: COMMAND is missing, an option is invalid, or the undisturbed script fails.
    """
    if options.list:
        print(row_list())
        return 0
    if not command:
        raise ConfigError("COMMAND is missing: write it after --")
    required: list[str] = []
    if options.require:
        required = parse_rows("--require", options.require)
    names = [*dict.fromkeys([*wanted_rows(options), *required])]
    check_writable(options)
    notes: list[str] = []
    results = list(check(options, command, names, progress=Progress(len(names)), notes=notes))
    for note in notes:
        print(f"note: {printable(note)}")
    print(table(results))
    write_outputs(options, results, command, notes=notes)
    return exit_code(results, required)


def row_list() -> str:
    """Return a line for each row, with the row's name, its number of starts of the script, and its title."""
    return "\n".join(f"{name:19}{row.starts:2} starts  {row.title}" for name, row in ROWS.items())


def write_outputs(options: Options, results: Sequence[Result], command: Sequence[str], notes: Sequence[str]) -> None:
    """Write the files of --html, --junit and --json.

    Args:
        options: options of the command, with the paths of the files.
        results: results of the rows, in order.
        command: words of the checked command.
        notes: lines about limits of the check, and about parts of samestep.torch that the script uses.
    """
    if options.html:
        options.html.write_text(page(results, command))
    if options.junit:
        options.junit.write_text(junit(results))
    if options.json:
        options.json.write_text(as_json(results, command, notes))


def exit_code(results: Iterable[Result], required: Sequence[str]) -> int:
    """Return the exit code.

    Args:
        results: results of the rows that ran.
        required: names of the rows that must pass.

    Returns:
        With required rows, 1 if one of them did not pass. Without required rows, 1 if a row failed. Otherwise 0.
    """
    if not required:
        return int(any(each.has_failed for each in results))
    return int(any(each.verdict != "passed" for each in results if each.row in required))


def wanted_rows(options: Options) -> list[str]:
    """Return the names of the rows in --faults. The word ``failed`` selects the rows that failed in the file of --json.

    Raises:
        ConfigError: a row is unknown. For ``failed``: the file of --json is missing or invalid, or has no failed row.
    """
    words = options.faults.split(",")
    if "failed" not in words:
        return parse_rows("--faults", options.faults)
    failed = failed_rows(options.json)
    if not failed:
        raise ConfigError(f"--faults failed: no row failed in {options.json}: name rows")
    others = [word for word in words if word != "failed"]
    return parse_rows("--faults", ",".join([*failed, *others]))


def check_writable(options: Options) -> None:
    """Raise ConfigError if the file of --html, --junit or --json is not writable."""
    for name in OUTPUTS:
        path = vars(options)[name]
        if path:
            _try_to_write(f"--{name}", path)


def _try_to_write(option: str, path: Path) -> None:
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}: name a file in a folder that exists") from None


def parse_rows(option: str, text: str) -> list[str]:
    """Return the row names in an option's value, with ``quick`` and ``all`` expanded.

    Raises:
        ConfigError: a row is unknown.
    """
    groups = {"all": [*ROWS], "quick": [*ROWS][:QUICK]}
    names: list[str] = []
    for word in text.split(","):
        names += groups.get(word, [word])
    for name in names:
        if name not in ROWS:
            raise ConfigError(f"{option}: there is no row {name!r}: choose quick, all, or of {', '.join(ROWS)}")
    return [*dict.fromkeys(names)]


def check(
    options: Options,
    command: Sequence[str],
    rows: Iterable[str],
    progress: Callable[[str], None] = lambda name: None,
    notes: list[str] | None = None,
) -> Iterator[Result]:
    """Run the command without faults in a copy of the current folder, then run the rows, and yield their results.

    Args:
        options: options of the command ``samestep check``.
        command: words of the checked command.
        rows: names of the rows to run.
        progress: function that the check calls with each row's name before the row runs; first called with
            ``undisturbed``, and last with an empty string.
        notes: list to which the check appends lines about its limits, and about parts of samestep.torch in use.

    Raises:
        ConfigError: an option is invalid, the folder cannot be copied, the undisturbed script fails, or the script
            writes outside of its folder.
    """
    with cleanup.guarded_folder() as temporary:
        runner = ScriptRunner(options, command, temporary)
        if options.keep:
            make_kept(options.keep)
        progress("undisturbed")
        try:
            runner.run_reference()
        except Verdict as problem:
            raise ConfigError(f"the undisturbed script: {problem}: give a short command that works") from None
        if notes is not None:
            notes += runner.notes()
        for name in rows:
            progress(name)
            yield decide(name, runner)
    progress("")


def decide(name: str, runner: ScriptRunner) -> Result:
    """Run a row, and return its result."""
    begun = time.monotonic()
    verdict = "passed"
    try:
        runner.clock.begin_row()
        message = ROWS[name].decide(runner)
    except Verdict as raised:
        verdict = next(words for kind, words in VERDICTS.items() if isinstance(raised, kind))
        message = str(raised)
    return Result(name, verdict, printable(message), time.monotonic() - begun)


def make_kept(folder: Path) -> None:
    """Create the folder of --keep; raise ConfigError if the folder exists or cannot be created."""
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"--keep {folder}: {error.strerror}: name a new folder") from None


class Progress:
    """Show the current row, the elapsed seconds, and the number of rows left, if stderr is a terminal."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._begun = time.monotonic()

    def __call__(self, name: str) -> None:
        """Show that a row begins; an empty name clears the line."""
        words = ""
        if name:
            words = f"checking: {name} ({time.monotonic() - self._begun:.0f} s, {self._left} rows left)"
        if name in ROWS:
            self._left -= 1
        if sys.stderr.isatty():
            print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
