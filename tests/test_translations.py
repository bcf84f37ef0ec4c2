"""Test that each Chinese page has the commands, blocks, headings, tables and links of its English page."""

from __future__ import annotations

import re
import runpy

import commands
import pytest

ROOT = commands.ROOT
FOLDER = ROOT / "docs" / "coming_from"
ENGLISH = sorted(path for path in FOLDER.glob("*.md") if not path.name.endswith(".zh.md"))
COMING_FROM = [f"docs/coming_from/{path.name}" for path in ENGLISH]
DOCS = [
    "docs/check_your_own.md",
    "docs/first_run.md",
    "docs/own_loop.md",
    "docs/troubleshooting.md",
]
PAGES = ["README.md", *DOCS, *COMING_FROM]
CODE = re.compile(r"`([^`\n]+)`")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
CELL = re.compile(r"(?<!\\)\|")
TARGET = re.compile(r"\]\(([^)\s]+)[^)]*\)")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ENGLISH_PAGE = re.compile(r"\]\(([^)\s#]+\.md)(?:#[^)\s]*)?(?:\s\"[^\"]*\")?\)(.{0,6})")
IN_ENGLISH = ("（英文）", "（中英对照）")
HAN = "\u4e00-\u9fff，。；：（）、“”"


def chinese_name(page: str) -> str:
    return page.removesuffix(".md") + ".zh.md"


def pair(page: str) -> list[str]:
    """Return the text of the English page and of the Chinese page."""
    return [(ROOT / name).read_text(encoding="utf-8") for name in (page, chinese_name(page))]


def headings(text: str) -> list[str]:
    """Return the marks (# to ######) of each heading, in order."""
    return re.findall(r"^(#+) ", commands.FENCE.sub("", text), re.MULTILINE)


def first_columns(text: str) -> list[list[str]]:
    """Return the first column of each table, without its heading."""
    return [commands.FIRST_CELL.findall(table)[2:] for table in TABLE.findall(text)]


def cells(text: str) -> list[list[list[str]]]:
    """Return the cells of each row of each table, without the line below its heading."""
    tables = TABLE.findall(commands.FENCE.sub("", text))
    rows = [[row for row in table.splitlines() if not re.fullmatch(r"[|\-: ]+", row)] for table in tables]
    return [[CELL.split(row)[1:-1] for row in table] for table in rows]


def in_english(target: str) -> str:
    return target.replace(".zh.", ".")


def facts(cell: str) -> tuple[list[str], list[str], list[str]]:
    """Return the parts of a cell that a translation keeps: code, targets of links, and numbers."""
    prose = TARGET.sub("]", CODE.sub("", cell))
    targets = map(in_english, TARGET.findall(cell))
    return sorted(CODE.findall(cell)), sorted(targets), sorted(NUMBER.findall(prose))


def links(text: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)\s]+)", text))


def prose(text: str) -> str:
    """Return a page without its blocks, comments and links' targets, and with a character for each piece of code."""
    return re.sub(r"``.+?``|`[^`\n]+`|\]\([^)]*\)|<!--.*?-->", "`", commands.FENCE.sub("", text), flags=re.DOTALL)


def test_every_tutorial_has_a_page_in_both_languages() -> None:
    assert len(ENGLISH) == 5
    chinese = [FOLDER / chinese_name(path.name) for path in ENGLISH]
    assert sorted(FOLDER.iterdir()) == sorted([*ENGLISH, *chinese])


def test_every_chinese_page_is_compared() -> None:
    pages = [*ROOT.glob("*.zh.md"), *ROOT.glob("docs/**/*.zh.md"), *ROOT.glob("apps/**/*.zh.md")]
    assert {str(path.relative_to(ROOT)) for path in pages} == {*map(chinese_name, PAGES)}


@pytest.mark.parametrize("page", PAGES)
def test_a_chinese_page_has_the_commands_and_the_headings_of_the_english_one(page: str) -> None:
    english, chinese = pair(page)
    assert commands.FENCE.findall(chinese) == commands.FENCE.findall(english)
    assert commands.NOTE.findall(chinese) == commands.NOTE.findall(english)
    found = [[(each.text, each.started) for each in commands.commands(page, text)] for text in (english, chinese)]
    assert found[1] == found[0]
    assert headings(chinese) == headings(english)


@pytest.mark.parametrize("page", PAGES)
def test_every_cell_has_the_code_the_links_and_the_numbers_of_the_english_one(page: str) -> None:
    english, chinese = map(cells, pair(page))
    assert [[*map(len, rows)] for rows in chinese] == [[*map(len, rows)] for rows in english]
    for rows in zip(english, chinese, strict=True):
        for row in zip(*rows, strict=True):
            for cell in zip(*row, strict=True):
                assert facts(cell[1]) == facts(cell[0]), cell


def test_the_tables_of_the_readme_have_the_same_first_columns() -> None:
    english, chinese = map(first_columns, pair("README.md"))
    assert chinese == english
    assert min(map(len, english)) >= 4
    assert len(commands.FENCE.findall(pair("README.md")[0])) >= 4


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_link_to_the_same_places_and_to_each_other(page: str) -> None:
    english, chinese = pair(page)
    name = (ROOT / page).name
    tutorials = [chinese_name(each) for each in COMING_FROM] if page == "README.md" else []
    shown = [target for target in links(chinese) if target not in tutorials]
    assert chinese_name(name) in links(english)
    assert name in shown
    assert sorted(map(in_english, shown)) == sorted(map(in_english, links(english)))


@pytest.mark.parametrize("page", PAGES)
def test_a_link_leads_to_the_chinese_page_or_says_that_its_page_is_english(page: str) -> None:
    folder = (ROOT / page).parent
    for target, follows in ENGLISH_PAGE.findall(commands.FENCE.sub("", pair(page)[1])):
        if target == (ROOT / page).name or target.endswith(".zh.md"):
            continue
        assert not (folder / chinese_name(target)).exists(), target
        assert follows.startswith(IN_ENGLISH), target


def test_the_readme_names_the_tutorials_directly_below_the_first_command() -> None:
    below = pair("README.md")[1].split("```\n")[1]
    assert all(chinese_name(page) in below.partition("\n\n")[0] for page in COMING_FROM)


def test_the_chinese_picture_is_the_english_one_with_chinese_words() -> None:
    program = runpy.run_path(str(ROOT / "docs" / "first_picture.py"))
    chinese = (ROOT / "docs" / "first_picture.zh.svg").read_text(encoding="utf-8")
    assert chinese == program["in_chinese"]((ROOT / "docs" / "first_picture.svg").read_text(encoding="utf-8"))
    words = " ".join(re.findall(r"<(?:text|title)[^>]*>([^<]*)<", chinese))
    assert {*re.findall("[A-Za-z]{2,}", words)} == {"DDP", "Samestep", "epoch", "loss", "rank"}


@pytest.mark.parametrize("page", COMING_FROM)
def test_a_page_has_one_or_two_commands_run_for_real(page: str) -> None:
    assert 1 <= sum(each.started is not None for each in commands.commands(page, pair(page)[0])) <= 2


def test_the_english_readme_is_short_enough_for_the_first_minute() -> None:
    english, _ = pair("README.md")
    assert len(english.splitlines()) <= 120
    assert len(english.split()) <= 1100


@pytest.mark.parametrize("page", PAGES)
def test_chinese_text_has_chinese_punctuation(page: str) -> None:
    """Check punctuation beside Chinese characters. Code, the targets of links and their brackets do not count."""
    text = prose(pair(page)[1])
    assert re.findall(rf"[{HAN}][,;:()!?]|[,;:()!?][{HAN}]|`[;:]`", text) == []
    assert re.findall(r"[，。；：、（] +\S", text) == []
    assert re.findall("[\u4e00-\u9fff]\n[\u4e00-\u9fff]", text) == []  # a browser shows a space between the lines


@pytest.mark.parametrize("page", PAGES)
def test_no_chinese_character_was_damaged(page: str) -> None:
    """A character of UTF-8 that was read as Latin-1 leaves letters such as ï."""
    assert re.findall("[\x80-\xb6\xb8-\xd6\xd8-\xff\ufffd]", pair(page)[1]) == []
