"""Make docs/devices.md: every device path of every app, and how it is shown.

    python docs/device_paths.py            # writes it
    python docs/device_paths.py --check    # says where it differs from what it should be

Each app lists its own in tests/<app>/device_paths.py. What is checked of a list: its devices are those that the app's
--device takes, but for auto; what shows a path that was run or simulated is there. With the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "devices.md"
HOW = ("run", "simulated", "read")
HEAD = """\
# Devices

Every device path of every app, and how it is shown. Made by `docs/device_paths.py` of `tests/<app>/device_paths.py`.

- **run**: on this device, with this transport, by the test that is named. All of it on Linux, x86-64, CPU.
- **simulated**: the test runs the app's own code, and replaces hardware or a framework's function that is not there.
- **read**: nothing has run. The app's code was compared with the framework's source that is named. Expect to find
  something when you are the first to run it.
"""


class DevicePath(NamedTuple):
    """A way by which an app's numbers can come about."""

    device: str  # as --device has it
    transport: str
    part: str  # by what the ranks are started, or which part of the program it is
    how: str  # one of HOW
    by: str  # a folder of tests or file::function; for "read" a source


def main() -> None:
    parser = argparse.ArgumentParser(description="make docs/devices.md")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    lists = {path.parent.name: listed(path) for path in sorted(ROOT.glob("tests/*/device_paths.py"))}
    problems = [f"tests/{app}/device_paths.py: {each}" for app in lists for each in mistakes(app, lists[app])]
    made = page(lists)
    if check and not problems and (not PAGE.exists() or PAGE.read_text() != made):
        problems = ["docs/devices.md is not what tests/<app>/device_paths.py say: run docs/device_paths.py"]
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))
    if not check:
        PAGE.write_text(made)


def listed(path: Path) -> list[DevicePath]:
    return [DevicePath(*row) for row in runpy.run_path(str(path))["PATHS"]]


def mistakes(app: str, paths: list[DevicePath]) -> Iterator[str]:
    """Yield what is wrong with an app's list."""
    wanted, found = devices(app), {path.device for path in paths}
    if found != wanted:
        yield f"it has the devices {sorted(found)}, but --device takes {sorted(wanted)} beside auto"
    for path in paths:
        if path.how not in HOW:
            yield f"{path.how!r} is not one of {', '.join(HOW)}"
        elif path.how != "read" and not exists(path.by):
            yield f"there is no test {path.by}: name a folder of tests, or file.py::test_function"


def devices(app: str) -> set[str]:
    """Return the values of the app's --device except auto; if the app has commands, those of all of them."""
    sys.path.insert(0, str(ROOT / "core"))  # an app's options.py needs nothing else
    parser = runpy.run_path(str(ROOT / "apps" / app / "options.py"))["build_parser"]()
    actions = [action for each in [parser, *parser.commands().values()] for action in each._actions]
    return {str(name) for action in actions if action.dest == "device" for name in action.choices} - {"auto"}


def exists(by: str) -> bool:
    """Return whether this folder of tests, or this function in a file of tests, exists."""
    file, _, function = by.partition("::")
    return (ROOT / file).is_dir() if not function else function in tests(ROOT / file)


def tests(file: Path) -> dict[str, bool]:
    """Return the functions of a file of tests, and whether each is a soak test."""
    tree = ast.parse(file.read_text() if file.is_file() else "")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    soak = "pytest.mark.soak"
    return {each.name: soak in map(ast.unparse, each.decorator_list) for each in functions}


def page(lists: dict[str, list[DevicePath]]) -> str:
    """Return the text of docs/devices.md."""
    lines = [HEAD]
    for app, paths in lists.items():
        lines += [f"## {app}", "", "| device | transport | | how | by |", "|---|---|---|---|---|"]
        for path in paths:
            file, _, function = path.by.partition("::")
            by = path.by if path.how == "read" else f"[{function or file}](../{file})"
            by += " (in the soak)" if function and tests(ROOT / file).get(function) else ""
            lines.append(f"| {path.device} | {path.transport} | {path.part} | {path.how} | {by} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
