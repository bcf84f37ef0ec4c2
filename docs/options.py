"""Make docs/options.md, which lists the options of all programs, from the parsers that print --help.

    .tox/core/bin/python docs/options.py            # writes the page
    .tox/core/bin/python docs/options.py --check    # only compares

The page begins with the options of `samestep.options.add_common`, and a table of the defaults and choices that differ
between apps. Then the page lists each app's own options, the commands of `samestep`, and the programs that show runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"
sys.path[:0] = [str(ROOT / folder) for folder in ("core", "launch", "observe", "check")]

from samestep.options import RESUME_MUTABLE, Options, Parser, add_common  # noqa: E402
from samestep_check import command as check_command  # noqa: E402
from samestep_launch import run_command  # noqa: E402

PROGRAMS = {  # module of each program that shows runs, by command
    "report": "report",
    "watch": "watch",
    "track": "track",
    "replay": "replay",
    "verify": "verify",
    "diff": "diff",
    "hang": "hang_report",
}
HEAD = """\
# Options

To change a run, look for its options here. `docs/options.py` makes the tables from the parsers that print `--help`.
An option of an app follows N, as in `bash scripts/run_<app>.sh N --epochs=3`. An asterisk (*) marks the options that
a resume may change. It must repeat all others.
"""
SHARED = """\
## All apps that train

The launch script of each app also has `--dry-run`, which prints the launcher's command and stops.
"""
DIFFERENT = """\
### Values that differ between apps

Each line lists the default of an option, or its possible values with the default first.
"""
TABLE = ["| option | meaning | default |", "|---|---|---|"]


class Captured(Exception):
    """Carry a program's parser out of the program's `main`, which would otherwise parse the command line."""


def main() -> None:
    parser = argparse.ArgumentParser(description="make docs/options.md")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    for name in [name for name in os.environ if name.startswith("SAMESTEP_")]:  # some of these variables set defaults
        del os.environ[name]
    known = PAGE.read_text() if check and PAGE.exists() else ""
    paths = sorted(ROOT.glob("apps/*/options.py"))
    if check:  # ignore apps that new_app.sh created, because new_app.sh does not update the page
        paths = [path for path in paths if f"\n## {path.parent.name}\n" in known]
    made = page({path.parent.name: app_parser(path) for path in paths})
    if not check:
        PAGE.write_text(made)
    elif known != made:
        sys.exit("error: docs/options.md differs from the parsers: run .tox/core/bin/python docs/options.py")


def page(parsers: Mapping[str, Parser]) -> str:
    """Return the text of docs/options.md.

    Args:
        parsers: parser of each app by its name.
    """
    common = Parser()
    add_common(common, epochs=0, global_batch_size=0, lr="", datasets=("",), devices=("",))
    shared = {action.dest for action in common._actions}
    training = {app: each for app, each in parsers.items() if shared <= {action.dest for action in each._actions}}
    lines = [HEAD, SHARED]
    model = next(iter(training.values()))  # the page shows this app's groups and help texts for all apps
    different = [dest for dest in sorted(shared) if len({str(cell(each, dest)) for each in training.values()}) > 1]
    for title, actions in groups(model):
        rows = [
            row(each, each.dest in different, each.dest in RESUME_MUTABLE) for each in actions if each.dest in shared
        ]
        if rows:
            lines += [f"### {title}", "", *TABLE, *rows, ""]
    names = [next(each for each in model._actions if each.dest == dest).option_strings[0] for dest in different]
    lines += [DIFFERENT, f"| app | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {app} | {' | '.join(cell(training[app], dest) for dest in different)} |" for app in training]
    lines += [""]
    for app, parser in parsers.items():
        lines += [f"## {app}", ""]
        if parser.commands():
            lines += [f"- `{name}`: {text(each.description)}" for name, each in parser.commands().items()] + [""]
            lines += list(command_tables(parser))
            continue
        own = [each for _, actions in groups(parser) for each in actions if each.dest not in shared]
        lines += [
            *TABLE,
            *(row(each, star=each.dest in RESUME_MUTABLE.union(parser.resume_mutable)) for each in own),
            "",
        ]
    for name, each in {"run": run_command.build_parser(), "check": check_command.build_parser()}.items():
        lines += [f"## samestep {name}", "", text(each.description), "", *table(each), ""]
    for name, module in PROGRAMS.items():
        parser = captured(module)
        lines += [f"## samestep {name}", "", text(str(parser.description).split("\n\n")[0]), ""]
        lines += [*table(parser), ""]
    return "\n".join(lines)


def app_parser(path: Path) -> Parser:
    parser: Parser = runpy.run_path(str(path))["build_parser"]()
    return parser


def captured(module: str) -> Parser:
    """Return the parser of a program that shows runs."""

    def parse(self: Parser, argv: Sequence[str]) -> Options:
        raise Captured(self)

    before, Parser.parse = Parser.parse, parse  # type: ignore[method-assign]
    try:
        importlib.import_module(f"samestep_observe.{module}").main([])
    except Captured as found:
        parser: Parser = found.args[0]
        return parser
    finally:
        Parser.parse = before  # type: ignore[method-assign]
    raise AssertionError(module)


def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield the title and the options of each group that has options."""
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if each.help != argparse.SUPPRESS and each.dest != "help"]
        title = str(group.title)
        if actions:
            yield title[0].upper() + title[1:], actions


def command_tables(parser: Parser) -> Iterator[str]:
    """Yield the lines of the tables of an app with commands: first shared options, then each command's own options."""
    commands = parser.commands()
    every = [{str(each.dest) for _, actions in groups(command) for each in actions} for command in commands.values()]
    alike = set.intersection(*every)
    first = next(iter(commands.values()))
    yield from ["### All commands", "", *TABLE]
    yield from (row(each) for _, actions in groups(first) for each in actions if each.dest in alike)
    yield ""
    for name, command in commands.items():
        own = [each for _, actions in groups(command) for each in actions if each.dest not in alike]
        if own:
            yield from [f"### {name}", "", *TABLE, *map(row, own), ""]


def table(parser: argparse.ArgumentParser) -> list[str]:
    return [*TABLE, *(row(each) for _, actions in groups(parser) for each in actions)]


def row(action: argparse.Action, differs: bool = False, star: bool = False) -> str:
    """Return a row of the table, with an option's names, its help without the default, and its default.

    Args:
        action: the option, as argparse stores it.
        differs: whether to show "see below" as the default, and to omit the choices.
        star: whether to mark the option as changeable at a resume.
    """
    value = "" if action.nargs == 0 else action.metavar or action.dest.upper()
    if action.nargs == "?":
        value = f"[{value}]"
    if action.choices and not differs and not action.metavar:
        value = f"{{{','.join(map(str, action.choices))}}}"
    names = ", ".join(f"`{name} {value}`".replace(" `", "`") for name in action.option_strings) or f"`{value}`"
    words = help_text(action)
    match = re.search(r" ?\(default: ((?:[^()]|\([^()]*\))*)\)| ?\((?:the )?default\)", words)
    default = match[1] if match else None
    if match and (default or action.default is not None):  # the last column shows the default
        words = words.replace(match[0], "")
    if default is None and action.default not in (None, argparse.SUPPRESS):
        default = {True: "yes", False: "no"}.get(action.default, str(action.default))
    return f"| {names}{' *' if star else ''} | {text(words)} | {'see below' if differs else text(default)} |"


def cell(parser: Parser, dest: str) -> str:
    """Return an option's default in an app, or its choices with the default first."""
    action = next(each for each in parser._actions if each.dest == dest)
    if action.choices:
        first = parser.default_dataset if dest == "dataset" else action.default
        return ", ".join(dict.fromkeys([str(first), *map(str, action.choices)]))
    match = re.search(r"\(default: (.*)\)$", help_text(action))
    return text(match[1]) if match else ""


def help_text(action: argparse.Action) -> str:
    """Return an option's help text, in which its values replace the placeholders, as --help prints the text."""
    values = {**vars(action), "prog": "", "type": ""}
    return str(action.help or "") % values


def text(words: str | None) -> str:
    """Return ``words`` as one line of Markdown for a cell of a table."""
    return re.sub(r"(?<!`)<([\w ]+)>", r"&lt;\1&gt;", " ".join(str(words or "").split())).replace("|", "\\|")


if __name__ == "__main__":
    main()
