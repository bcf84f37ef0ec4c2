"""Each Chinese page has the commands, blocks, headings, tables and links of the English one."""

from __future__ import annotations

import re

import commands
import pytest

ROOT = commands.ROOT
FOLDER = ROOT / "docs" / "coming_from"
ENGLISH = sorted(path for path in FOLDER.glob("*.md") if not path.name.endswith(".zh.md"))
COMING_FROM = [f"docs/coming_from/{path.name}" for path in ENGLISH]
CODE = re.compile(r"`([^`\n]+)`")


def pair(page: str) -> list[str]:
    """Return the text of the English page and of the Chinese page."""
    return [(ROOT / name).read_text(encoding="utf-8") for name in (page, page.replace(".md", ".zh.md"))]


def headings(text: str) -> list[str]:
    """Return the marks of each heading, in order."""
    return re.findall(r"^(#+) ", commands.FENCE.sub("", text), re.MULTILINE)


def first_columns(text: str) -> list[list[str]]:
    """Return the first column of each table, without its heading."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [commands.FIRST_CELL.findall(table)[2:] for table in found]


def links(text: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)\s]+)", text))


def test_there_are_five_pages_and_each_has_a_chinese_one() -> None:
    assert len(ENGLISH) == 5
    assert sorted(FOLDER.iterdir()) == sorted(
        path.with_name(name) for path in ENGLISH for name in (path.name, f"{path.stem}.zh.md")
    )


@pytest.mark.parametrize("page", ["README.md", "docs/check_your_own.md", *COMING_FROM])
def test_a_chinese_page_has_the_commands_and_the_headings_of_the_english_one(page: str) -> None:
    english, chinese = pair(page)
    assert commands.FENCE.findall(chinese) == commands.FENCE.findall(english)
    assert commands.NOTE.findall(chinese) == commands.NOTE.findall(english)
    found = [[(each.text, each.started) for each in commands.commands(page, text)] for text in (english, chinese)]
    assert found[1] == found[0]
    assert headings(chinese) == headings(english)


@pytest.mark.parametrize("page", COMING_FROM)
def test_the_tables_have_the_same_code(page: str) -> None:
    """Cells of words are translated."""
    english, chinese = ([[*map(CODE.findall, column)] for column in first_columns(text)] for text in pair(page))
    assert chinese == english


def test_the_tables_of_the_readme_have_the_same_first_columns() -> None:
    english, chinese = map(first_columns, pair("README.md"))
    assert chinese == english
    assert min(map(len, english)) >= 4
    assert len(commands.FENCE.findall(pair("README.md")[0])) >= 4


@pytest.mark.parametrize("page", ["README.md", "docs/check_your_own.md", *COMING_FROM])
def test_the_pages_link_to_the_same_places_and_to_each_other(page: str) -> None:
    english, chinese = pair(page)
    name = (ROOT / page).name
    assert links(chinese.replace(f"({name})", f"({name.replace('.md', '.zh.md')})")) == links(english)


@pytest.mark.parametrize("page", COMING_FROM)
def test_a_page_has_one_or_two_commands_run_for_real(page: str) -> None:
    assert 1 <= sum(each.started is not None for each in commands.commands(page, pair(page)[0])) <= 2


def test_the_english_readme_is_short_enough_for_the_first_minute() -> None:
    english, _ = pair("README.md")
    assert len(english.splitlines()) <= 120
    assert len(english.split()) <= 1100


@pytest.mark.parametrize("page", ["README.md", "docs/check_your_own.md", *COMING_FROM])
def test_chinese_text_has_chinese_punctuation(page: str) -> None:
    """Next to a Chinese character. Code, the targets of links and their brackets are left out."""
    text = commands.FENCE.sub("", pair(page)[1])
    text = re.sub(r"``.+?``|`[^`\n]+`|\]\([^)]*\)|<!--.*?-->", "`", text, flags=re.DOTALL)
    assert re.findall(r"[\u4e00-\u9fff][,;:()]|[,;:()][\u4e00-\u9fff]", text) == []
