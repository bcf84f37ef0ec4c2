"""README.zh.md has the commands, the code, the output, the links and the table rows of README.md."""

from __future__ import annotations

import re
from pathlib import Path

import commands

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = "README.md", "README.zh.md"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def headings(text: str) -> list[int]:
    """Return the level of each heading, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", commands.FENCE.sub("", text), re.MULTILINE)]


def tables(text: str) -> list[list[str]]:
    """Return the first column of each table, without its heading."""
    rows = [
        re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]
    return [column[1:] for column in rows]


def links(text: str) -> list[str]:
    return sorted(set(re.findall(r"\]\(([^)]+)\)", text)))


def started(page: str) -> list[tuple[str, str | None]]:
    """Return the commands of a page, and the start that its comment makes of each."""
    return sorted((each.text, each.started) for each in commands.commands(page, read(page)))


def test_the_commands_and_the_blocks_are_the_same() -> None:
    assert started(CHINESE) == started(ENGLISH)
    blocks = [commands.FENCE.findall(read(page)) for page in (ENGLISH, CHINESE)]
    assert blocks[0] == blocks[1]
    assert len(blocks[0]) >= 5


def test_the_first_columns_of_the_tables_are_the_same() -> None:
    found = [tables(read(page)) for page in (ENGLISH, CHINESE)]
    assert found[0] == found[1]
    assert min(map(len, found[0])) >= 4


def test_the_sections_and_the_links_are_the_same() -> None:
    english, chinese = read(ENGLISH), read(CHINESE).replace(f"({ENGLISH})", f"({CHINESE})")
    assert headings(chinese) == headings(english)
    assert links(chinese) == links(english)


def test_the_english_page_is_short_enough_for_the_first_minute() -> None:
    assert len(read(ENGLISH).splitlines()) <= 120
    assert len(read(ENGLISH).split()) <= 1100
