"""Run `samestep check` on popular examples of other projects, and on apps of this project.

    bash scripts/test.sh -e scoreboard -- --only accelerate --row rank-killed     # one cell of docs/scoreboard.md
    bash scripts/test.sh -e scoreboard -- --only torchft,ray --row recovery-time --rounds 5       # two in turns
    bash scripts/test.sh -e scoreboard     # measure all cells, and write cells.json and the page

    bash scripts/test.sh -e scoreboard -- --show accelerate                       # print our changes of an example

Each example is the authors' file, verified by its SHA-256. The file comes from GitHub, at the commit in the example's
origin.json, or from an installed package. The example's samestep.ed has our changes: the source of the data, the length
of the training, and CPU instead of a GPU. If a program's name ends in -kit, its example also has the changes of kit.ed,
which add samestep.torch.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import sources
from samestep import ConfigError
from samestep_check import command as checker
from samestep_check.rows import ROWS
from subjects import SUBJECTS, Subject

MARKS = ("<!-- measured by benchmarks/scoreboard/scoreboard.py -->", "<!-- end of what was measured -->")
SECONDS = re.compile(r"(\d+\.\d) s\b")
Cells = dict[str, dict[str, dict[str, str]]]  # by row and subject: verdict, message, date, versions, machine, load


def measure(
    subject: Subject, rows: Sequence[str], given: Path | None, limits: Sequence[str], keep: Path | None
) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the verdict and the message of each row when the row ends.

    Args:
        subject: the program to check.
        rows: names of the rows to run.
        given: folder of the originals, or None, as in `sources.fetch`.
        limits: options of the check that limit its time.
        keep: folder for the copies of the program and their output, or None.
    """
    environ = dict(os.environ)
    left = list(rows)
    options = checker.build_parser().parse([*limits, *subject.options, *([f"--keep={keep}"] if keep else [])])
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as temporary, contextlib.chdir(temporary):
        Path("home").mkdir()
        subject.put(Path("program"), given)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        os.environ.update({"HOME": f"{temporary}/home", "PATH": path, "OMP_NUM_THREADS": "1", **subject.environ})
        try:
            os.chdir("program")
            for each in checker.check(options, subject.command, rows, progress):
                left.remove(each.row)
                yield each.row, each.verdict, each.message
        except ConfigError as error:
            for row in left:
                yield row, "not run", str(error)
        finally:
            os.environ.clear()
            os.environ.update(environ)


def progress(row: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {row}", file=sys.stderr, flush=True)


def versions(subject: Subject) -> str:
    found = []
    for name in subject.packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def about(subject: Subject) -> dict[str, str]:
    """Return the date, the package versions, the machine, and its load average over 5 minutes."""
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, gloo, Python {platform.python_version()}"
    date = time.strftime("%Y-%m-%d")
    load = f"{os.getloadavg()[1]:.0f}"
    return {"date": date, "versions": versions(subject), "machine": machine, "load": load}


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)


def cell_text(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")


def table(cells: Cells) -> str:
    """Return the tables of all verdicts, of the kit and of each row, and a line with machines, versions and dates."""
    rows = [row for row in ROWS if row in cells]
    names = [name for name in SUBJECTS if any(name in cells[row] for row in rows)]
    lines = [f"| `--row` | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        verdicts = [cells[row].get(name, {"verdict": "not run"})["verdict"] for name in names]
        lines.append(f"| `{row}` | {' | '.join(verdicts)} |")
    lines += kit_table(cells)
    for row in rows:
        lines += ["", f"### {ROWS[row].title}", "", f"| `--row {row}` | verdict | seen |", "|---|---|---|"]
        those = [(name, cells[row][name]) for name in names if name in cells[row]]
        lines += [f"| `--only {name}` | {cell['verdict']} | {cell_text(cell['seen'])} |" for name, cell in those]
    every = [each for found in cells.values() for each in found.values()]
    versions = sorted({each for found in every for each in found["versions"].split(", ")})
    machines = sorted({found["machine"] for found in every})
    dates = sorted({found["date"] for found in every})
    loads = sorted(int(found["load"]) for found in every)
    lines += ["", f"{'; '.join(machines)}; {', '.join(versions)}; {' to '.join(sorted({dates[0], dates[-1]}))}. "]
    busy = f"{loads[0]}" if loads[0] == loads[-1] else f"{loads[0]} to {loads[-1]}"
    lines[-1] += f"The load of the machine was {busy}. A load above its cores makes the seconds longer."
    return "\n".join(lines)


def kit_table(cells: Cells) -> list[str]:
    """Return the lines of a table with the rows that newly pass, no longer pass or still fail with the kit."""
    lines = []
    for name, subject in SUBJECTS.items():
        if not subject.kit or subject.origin is None:
            continue
        before = verdicts_of(cells, name.removesuffix("-kit"))
        after = verdicts_of(cells, name)
        if not after:
            lines.append(f"| `{name}` | {sources.lines_of_kit(subject.origin)} | not run | | |")
            continue
        gained = [f"`{row}`" for row in after if after[row] == "passed" and before.get(row) not in ("passed", None)]
        lost = [f"`{row}`" for row in after if after[row] not in ("passed", "not run") and before.get(row) == "passed"]
        failed = [f"`{row}`" for row in after if after[row] == "failed" and before.get(row) != "passed"]
        cut = [", ".join(each) or "none" for each in (gained, lost, failed)]
        lines.append(f"| `{name}` | {sources.lines_of_kit(subject.origin)} | {' | '.join(cut)} |")
    head = "| program | added lines | pass now | passed before | fail still |"
    return ["", "### Changed by the kit", "", head, "|---|---|---|---|---|", *lines]


def verdicts_of(cells: Cells, name: str) -> dict[str, str]:
    """Return the verdicts of a program by row."""
    return {row: cells[row][name]["verdict"] for row in ROWS if name in cells.get(row, {})}


def write_page(path: Path, measured: str) -> None:
    """Write ``measured`` between the marks of a page, or into a new page."""
    page = path.read_text() if path.exists() else "\n".join(MARKS) + "\n"
    before, found, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (found and end):
        sys.exit(f"error: {path} lacks the lines {MARKS[0]} and {MARKS[1]}: put them back, or name another --output")
    write_whole(path, f"{before}{MARKS[0]}\n{measured}\n{MARKS[1]}{after}")


def show(subject: Subject, given: Path | None) -> None:
    """Print our changes to an example as a diff."""
    for file in sources.origin(subject.origin) if subject.origin else []:
        text = sources.fetch(file, given)
        names = (file.page, f"{file.name}, as it is run")
        changed = sources.as_run(str(subject.origin), file, given=given)
        if subject.kit:
            text = changed
            names = (names[1], f"{file.name}, with the kit")
            changed = sources.as_run(str(subject.origin), file, given=given, kit=True)
        sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), changed.splitlines(True), *names))


def summary(results: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the verdict over several rounds, and the last round's message with the median and range of seconds."""
    verdict, seen = results[-1]
    passed = sum(each == "passed" for each, _ in results)
    if 0 < passed < len(results):
        verdict = f"{passed} of {len(results)}"
    seconds = sorted(float(match[1]) for _, line in results if (match := SECONDS.match(line)))
    if len(seconds) < 2:
        return verdict, seen
    spread = f"{seconds[0]:.1f} to {seconds[-1]:.1f} in {len(seconds)} rounds"
    return verdict, SECONDS.sub(f"{statistics.median(seconds):.1f} s ({spread})", seen, count=1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"of {', '.join(SUBJECTS)}; several with commas (default: all)")
    parser.add_argument("--row", help=f"of {', '.join(ROWS)}; several with commas (default: all)")
    parser.add_argument("--show", metavar="NAME", help="print what is changed in an example, as a diff, and end")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="take originals from DIR/<owner>/<name>/<path>")
    parser.add_argument("--json", type=Path, help="add what is measured to this file, after each row")
    parser.add_argument("--from-json", type=Path, metavar="JSON", help="measure nothing, take an earlier run's --json")
    parser.add_argument("--output", type=Path, metavar="PAGE", help="write the tables into PAGE, between its two marks")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the copies and output of one program")
    parser.add_argument("--row-limit", type=int, default=300, metavar="T", help="seconds of a row (default: 300)")
    words = "measure the programs in turns, N times, and show the median of the seconds and their range"
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help=words)
    return parser.parse_args()


def chosen(asked: str | None, known: dict[str, object], option: str) -> list[str]:
    names = asked.split(",") if asked else list(known)
    for name in names:
        if name not in known:
            sys.exit(f"error: {option} {name}: there is none; choose of {', '.join(known)}")
    return names


def terminated(*_: object) -> None:
    """Raise SystemExit, so that the check stops its job. Ignore later TERM signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def check_files(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Exit with an error if --keep or --from-json cannot be used."""
    if options.keep and len(names) * options.rounds > 1:
        sys.exit("error: --keep is for one program, once: name it with --only, and leave out --rounds")
    if options.keep and options.keep.exists():
        sys.exit(f"error: --keep {options.keep}: it is there already; name another folder")
    if options.from_json and not options.from_json.is_file():
        sys.exit(f"error: --from-json {options.from_json}: no such file; leave it out to measure")


def measure_all(options: argparse.Namespace, names: Sequence[str], wanted: Sequence[str]) -> Cells:
    """Check each program ``options.rounds`` times, and return all cells, including the other cells of --json's file."""
    cells: Cells = {}
    stored = options.json and options.json.resolve()  # the check changes the working directory
    if stored and stored.exists():
        cells = json.loads(stored.read_text())
    of_rounds: dict[tuple[str, str], list[tuple[str, str]]] = {}
    limits = [f"--row-limit={options.row_limit}", f"--total-limit={12 * options.row_limit}"]
    given = options.sources and options.sources.resolve()
    for name in list(names) * options.rounds:
        print(f"$ bash scripts/test.sh -e scoreboard -- --only {name}", file=sys.stderr, flush=True)
        keep = options.keep and options.keep.resolve()
        for row, verdict, seen in measure(SUBJECTS[name], wanted, given=given, limits=limits, keep=keep):
            of_rounds.setdefault((row, name), []).append((verdict, seen))
            verdict, seen = summary(of_rounds[row, name])
            print(f"{row:19} {verdict:12} {seen}", file=sys.stderr, flush=True)
            cells.setdefault(row, {})[name] = {"verdict": verdict, "seen": seen, **about(SUBJECTS[name])}
            if stored:
                write_whole(stored, json.dumps(cells, indent=1) + "\n")
    return cells


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, terminated)
    names = chosen(options.show or options.only, dict(SUBJECTS), "--show" if options.show else "--only")
    wanted = chosen(options.row, dict(ROWS), "--row")
    check_files(options, names)
    try:
        if options.show:
            show(SUBJECTS[options.show], options.sources)
            return
        if options.from_json:
            cells: Cells = json.loads(options.from_json.read_text())
        else:
            cells = measure_all(options, names, wanted)
    except sources.SourceError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    print(table(cells))
    if options.output:
        write_page(options.output, table(cells))


if __name__ == "__main__":
    main()
