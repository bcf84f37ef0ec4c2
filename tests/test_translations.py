"""A Chinese page of docs/coming_from has the commands, blocks, headings, tables and links of the English one."""

from __future__ import annotations

import re

import commands
import pytest

ROOT = commands.ROOT
ENGLISH = sorted(path for path in ROOT.glob("docs/coming_from/*.md") if not path.name.endswith(".zh.md"))
NAMES = [path.stem for path in ENGLISH]
CODE = re.compile(r"`([^`\n]+)`")


def pair(name: str) -> list[str]:
    """Return the text of the English page and of the Chinese page."""
    folder = ROOT / "docs" / "coming_from"
    return [(folder / f"{name}{language}.md").read_text(encoding="utf-8") for language in ("", ".zh")]


def tables(text: str) -> list[list[list[str]]]:
    """Return the code in the first cell of each row, or an empty list for a cell of words, for each table."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[CODE.findall(cell) for cell in commands.FIRST_CELL.findall(table)[2:]] for table in found]


def links(text: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)\s]+)", text))


def test_there_are_five_pages_and_each_has_a_chinese_one() -> None:
    assert len(NAMES) == 5
    assert sorted(ROOT.glob("docs/coming_from/*")) == sorted(
        path.with_name(name) for path in ENGLISH for name in (path.name, f"{path.stem}.zh.md")
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_chinese_page_has_the_commands_and_the_tables_of_the_english_one(name: str) -> None:
    english, chinese = pair(name)
    assert commands.FENCE.findall(chinese) == commands.FENCE.findall(english)
    assert commands.NOTE.findall(chinese) == commands.NOTE.findall(english)
    page = f"docs/coming_from/{name}.md"
    found = [[(each.text, each.started) for each in commands.commands(page, text)] for text in (english, chinese)]
    assert found[1] == found[0]
    assert tables(chinese) == tables(english)
    marks = [re.findall(r"^(#+) ", commands.FENCE.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert marks[1] == marks[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_link_to_the_same_places_and_to_each_other(name: str) -> None:
    english, chinese = pair(name)
    assert links(chinese.replace(f"({name}.md)", f"({name}.zh.md)")) == links(english)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_one_or_two_commands_run_for_real(name: str) -> None:
    page = f"docs/coming_from/{name}.md"
    assert 1 <= sum(each.started is not None for each in commands.commands(page, pair(name)[0])) <= 2
