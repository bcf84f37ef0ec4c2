"""Make the table of apps and the comparison in README.md and in README.zh.md.

    python3 docs/app_tables.py            # writes the tables
    python3 docs/app_tables.py --check    # only compares

The texts of an app come from tests/<app>/about.json, and the version of its framework from its requirements.in.
docs/comparison.py makes the comparison from the results of the scoreboard. The program uses only the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import comparison

ROOT = Path(__file__).resolve().parents[1]
HEADS = {
    "en": "| app | use it if you | framework | command | tested on |",
    "zh": "| app | 适用场景 | 框架 | 命令 | 测试环境 |",
}
PAGES = {"README.md": "en", "README.zh.md": "zh"}
FIRST_CELLS = {"en": "program", "zh": "程序"}  # first cell of the comparison's head, by language


def main() -> None:
    parser = argparse.ArgumentParser(description="make the tables of apps in README.md and README.zh.md")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    for name, language in PAGES.items():
        path = ROOT / name
        before = path.read_text()
        after = with_table(name, before, "app", table(language))
        after = with_table(name, after, FIRST_CELLS[language], comparison.table(language))
        if check and after != before:
            sys.exit(f"error: {name} has other tables than its sources make: run docs/app_tables.py")
        if not check:
            path.write_text(after)


def with_table(name: str, page: str, first_cell: str, made: str) -> str:
    """Return the text of a page in which a new table replaces an old table.

    Args:
        name: file name of the page, for the error message.
        page: Markdown text of the page.
        first_cell: first cell of the old table's head.
        made: the new table, as Markdown.

    Raises:
        SystemExit: the page has no table with this first cell.
    """
    found = re.search(rf"^\| {first_cell} \|.*(?:\n\|.*)*", page, re.MULTILINE)
    if not found:
        sys.exit(f"error: {name} lacks its table, which begins with `| {first_cell} |`: write that line")
    return page[: found.start()] + made + page[found.end() :]


def table(language: str) -> str:
    """Return the table of apps in ``language``, a key of HEADS."""
    apps = {path.parent.name: json.loads(path.read_text()) for path in ROOT.glob("tests/*/about.json")}
    lines = [HEADS[language], "|---|---|---|---|---|"]
    for app in sorted(apps, key=lambda name: (apps[name]["order"], name)):
        lines.append(row(app, apps[app], language))
    return "\n".join(lines)


def row(app: str, about: dict[str, Any], language: str) -> str:
    framework = f"{about['framework']} {pin(app, about['package'])}"
    command = f"`bash scripts/run_{app}.sh {about['command']}`"
    cells = [f"[{app}](apps/{app})", about["use"][language], framework, command, about["tested"][language]]
    return f"| {' | '.join(cells)} |"


def pin(app: str, package: str) -> str:
    """Return the version of a package that an app pins. The pin is a comment if setup.sh builds the package."""
    requirements = (ROOT / "apps" / app / "requirements.in").read_text()
    pins = re.findall(rf"(?m)^(?:# )?{re.escape(package)}==(\S+)", requirements)
    if not pins:
        sys.exit(
            f"error: apps/{app}/requirements.in pins no {package}, which tests/{app}/about.json names: name another"
        )
    return str(pins[0])


if __name__ == "__main__":
    main()
