"""tools/prose.py finds the patterns in pages and in code, and leaves out code, tables and quotations."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "tools" / "prose.py"
SPEC = importlib.util.spec_from_file_location("prose", FILE)
assert SPEC
assert SPEC.loader
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)


def found(pairs: object) -> list[str]:
    texts = [sentence for place, text in pairs for sentence in prose.sentences(place, text)]  # type: ignore[attr-defined]
    return [name for sentence in texts for name in prose.hits(sentence.text)]


@pytest.mark.parametrize(
    ("sentence", "names"),
    [
        ("What fails twice is not tried again.", ["what"]),
        ("It ends with the weights of the run, of which two are left.", ["what"]),
        ("The rule stands in one place.", ["stands"]),
        ("The job goes on after that.", ["go on"]),
        ("Each rank says its step.", ["ranks talk"]),
        ("Its time is that of the slowest.", ["that of"]),
        ("The file is to be read.", ["is to"]),
        ("One: two: three are the numbers.", ["colons"]),
        (" ".join(["word"] * 31) + ".", ["long"]),
        ("The script restarts the job. A rank reports its step.", []),
        ('The message is "What stands here goes on" in this case.', []),
        ("The name `that of stands` is code here.", []),
    ],
)
def test_each_pattern_is_found_and_nothing_else(sentence: str, names: list[str]) -> None:
    assert found(prose.paragraphs("page.md", sentence)) == names
    assert found(prose.comments("code.py", f"# {sentence}\n")) == names


def test_code_tables_and_exempted_lines_are_left_out() -> None:
    fence = "```\nWhat stands here.\n```"
    page = f"# What stands\n\n| What stands | goes on |\n\n{fence}\n\nThat of them <!-- prose: a name -->\n"
    assert found(prose.paragraphs("page.md", page)) == []


def test_a_total_may_only_fall() -> None:
    limits = {"markdown": {"what": 2}, "python": {"what": 0}}
    assert prose.check(limits, limits) == []
    (more,) = prose.check({"markdown": {"what": 3}, "python": {"what": 0}}, limits)
    assert more == "3 of 'what' in markdown, at most 2: python tools/prose.py --list 'what'"
    (fewer,) = prose.check({"markdown": {"what": 1}, "python": {"what": 0}}, limits)
    assert fewer.endswith("python tools/prose.py --update")
