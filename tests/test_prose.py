"""Test that tools/prose.py finds the patterns in pages and in code, but not in tables and quotations."""

from __future__ import annotations

import importlib.util
import json
import sys
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


@pytest.mark.parametrize(
    "sentence",
    [
        "What does the exit code mean?",
        "The launch script reports what failed.",
        "There is no longer a limit.",
        "The difference is to the left and the rest is to a file.",
        "Rank 0 reports the loss and resumes.",
        "At 12:30:59 the job ended.",
        "word " * 29 + ".",
    ],
)
def test_plain_english_has_no_fault(sentence: str) -> None:
    assert prose.hits(sentence) == []


def markdown(text: str, name: str = "docs/page.md") -> list[tuple[str, str]]:
    return [(s.place, s.text) for place, block in prose.paragraphs(name, text) for s in prose.sentences(place, block)]


def python(text: str) -> list[tuple[str, str]]:
    return [(s.place, s.text) for place, block in prose.comments("x.py", text) for s in prose.sentences(place, block)]


def test_a_sentence_has_the_line_at_which_it_starts() -> None:
    text = """\
# A heading

One sentence is here. Another starts
there `a
b`. The [third
one](a.md) follows.

- an item of
  two lines
"""
    assert markdown(text) == [
        ("docs/page.md:3", "One sentence is here."),
        ("docs/page.md:3", "Another starts there CODE ."),
        ("docs/page.md:5", "The third one follows."),
        ("docs/page.md:8", "an item of two lines"),
    ]


def test_code_tables_quotations_and_exempted_lines_of_a_page_are_not_counted() -> None:
    text = """\
```bash
echo what stands here
```

| what stands | in a table |

> what stands in a quotation

What stands here remains. <!-- prose: the title of a song -->

The message "what stands anew" and `what stands` are known.
"""
    assert markdown(text) == [("docs/page.md:11", "The message QUOTE and CODE are known.")]


def test_an_exemption_needs_a_reason() -> None:
    assert len(markdown("What stands here remains. <!-- prose: -->\n")) == 1
    assert python("x = 1  # it stands anew  # prose: a reason\n") == []
    assert len(python("x = 1  # it stands anew  # prose:\n")) == 1


def test_older_entries_of_the_changelog_are_not_counted() -> None:
    text = "# Changelog\n\n## 2\n\nThis is counted.\n\n## 1\n\nThis is not counted.\n"
    assert markdown(text, "CHANGELOG.md") == [("CHANGELOG.md:5", "This is counted.")]


def test_comments_and_docstrings_of_python() -> None:
    text = '''\
#!/usr/bin/env python3
"""Do a thing.

    python x.py what stands here

The second paragraph: it is counted.
"""
import os  # noqa: E402
x = 1  # one comment beside code
y = 2  # another comment beside code

# A comment of two
# lines is one.


class C:
    def f(self, a, b):
        """Return the sum.

        A paragraph of a method.
            code what stands

        Args:
            a: the first number
            b: the second
                number
        """
        return "what stands in a string"

    def g(self):
        """It stands exempted here."""  # prose: an example
'''
    assert sorted(python(text)) == [
        ("x.py:10", "another comment beside code"),
        ("x.py:12", "A comment of two lines is one."),
        ("x.py:18", "Return the sum."),
        ("x.py:2", "Do a thing."),
        ("x.py:20", "A paragraph of a method."),
        ("x.py:24", "the first number"),
        ("x.py:25", "the second number"),
        ("x.py:6", "The second paragraph: it is counted."),
        ("x.py:9", "one comment beside code"),
    ]


def test_too_many_are_shown_with_their_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "limits.json").write_text(json.dumps({"markdown": {"go on": 1}}))
    places = [prose.Sentence(f"a.md:{line}", "They go on.") for line in (3, 5)]
    monkeypatch.setattr(prose, "LIMITS", tmp_path / "limits.json")
    monkeypatch.setattr(prose, "faults", lambda: {"markdown": {"go on": places}})
    monkeypatch.setattr(sys, "argv", ["prose.py"])
    assert prose.main() == 1
    assert capsys.readouterr().out.startswith("a.md:3: They go on.\na.md:5: They go on.\nerror: 2 of 'go on' in")
    monkeypatch.setattr(sys, "argv", ["prose.py", "--update"])
    assert prose.main() == 0
    assert json.loads((tmp_path / "limits.json").read_text()) == {"markdown": {"go on": 1}}  # a limit never rises


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    assert prose.sample(5, "a1b2") == prose.sample(5, "a1b2") != prose.sample(5, "c3d4")
    assert {sentence.place.rpartition(".")[2][:2] for sentence in prose.sample(5, "a1b2", "python")} == {"py"}
