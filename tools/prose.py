"""Count patterns of unclear English in the pages and in the docstrings and comments of the code.

    python tools/prose.py                       compare the counts with tools/prose_limits.json, as lint does
    python tools/prose.py --update              lower the limits to the present counts
    python tools/prose.py --list stands docs    show each match of one pattern, in all files or below a path
    python tools/prose.py --longest             show the 20 longest sentences
    python tools/prose.py --sample 60           draw sentences of the pages, with the commit's hash as the seed
    python tools/prose.py --sample 60 --kind python     draw sentences of docstrings and comments

A limit is a total over all Markdown or all Python, and may only fall. The counts exclude code, tables, quotations,
headings, Chinese pages, generated pages, older entries of the changelog, and lines with `prose:` and a reason.
In Python, `# prose: reason` exempts its comment, or the docstring that ends on its line.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tools" / "prose_limits.json"
GENERATED = ("docs/messages.md", "docs/devices.md", "docs/options.md", "docs/scoreboard.md")
LONG = 30  # maximum number of words in a sentence
PATTERNS = {
    "what": r"^(?:What|Who)\b(?!.*\?)|\b(?:of|from|by|with|for|and|or|but|than|if) what\b|\bof whom\b"
    r"|\bof which\b|\b(?:W|w)hoever\b",
    "stands": r"\b(?:stands|anew|but for|is no(?! longer| more))\b|\bno number\b(?! of)",
    "go on": r"\b(?:go|goes|going|gone|went) on\b",
    "ranks talk": r"\b(?:ranks?|machines?|jobs?|scripts?) (?:\d+ |[A-Z] )?(?:that )?"
    r"(?:talks?|says?|tells?|hears?|knows?|judges?)\b",
    "that of": r"\b(?:that|those) of\b",
    "is to": r"\b(?:is|are) to (?!the\b|a\b|an\b|its\b|their\b)[a-z]+\b",
}
EXTRA = ("long", "colons")
EXEMPT = re.compile(r"(<!--|#) prose: \w")
NO_PROSE = re.compile(r"#!|# *(noqa|type:|mypy:|fmt:|ruff:)")
END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<! al\.)(?<! vs\.)[)*]*\s+(?=[A-Za-z*(])")
NO_TEXT = re.compile(r"\s*(\||#|<|>|!\[|\[\^|---)")  # tables, headings, HTML, quotations, pictures, footnotes
ITEM = re.compile(r"\s*([-*]|\d+\.) ")


class Sentence(NamedTuple):
    """A sentence, and the file and line at which it starts."""

    place: str
    text: str


Faults = dict[str, dict[str, list[Sentence]]]  # by kind and pattern
Limits = dict[str, dict[str, int]]


def tracked(*patterns: str) -> list[str]:
    """Return the paths of the tracked files whose sentences are counted."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    return [name for name in names if name not in GENERATED and not name.endswith(".zh.md")]


def sentences(place: str, paragraph: str) -> Iterator[Sentence]:
    """Yield the sentences of the paragraph at a place (FILE:LINE), with CODE for code and QUOTE for quotations."""

    def word(text: str, match: re.Match[str]) -> str:
        return text + "\n" * (match[0].count("\n") - text.count("\n"))  # the result keeps the number of lines

    text = re.sub(r"``.+?``|`[^`]+`", lambda match: word("CODE", match), paragraph, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", lambda match: word(match[1], match), text)
    text = re.sub(r"\[\^\d+\]", "", text)  # remove the numbers of footnotes
    text = re.sub(r'"[^"]*"|“[^”]*”', lambda match: word("QUOTE", match), text)
    name, _, start = place.rpartition(":")
    begin = 0
    for end in [*END.finditer(text), None]:
        sentence = text[begin : end.start() if end else None]
        if len(sentence.split()) > 2:
            indent = len(sentence) - len(sentence.lstrip())
            line = int(start or 1) + text[: begin + indent].count("\n")
            yield Sentence(f"{name}:{line}", " ".join(sentence.split()))
        begin = end.end() if end else 0


def paragraphs(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each paragraph and list item of a Markdown page."""
    if name == "CHANGELOG.md":
        text = "\n## ".join(text.split("\n## ")[:2])
    block: list[str] = []
    start = 1
    fenced = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        skipped = fenced or fence or not line.strip() or NO_TEXT.match(line) or EXEMPT.search(line)
        item = ITEM.match(line)
        if (skipped or item) and block:
            yield f"{name}:{start}", "\n".join(block)
            block = []
        if not skipped:
            start = start if block else number
            block.append(line[item.end() :] if item else line)
        fenced ^= fence


def docstring(name: str, start: int, text: str) -> Iterator[tuple[str, str]]:
    """Yield a docstring's paragraphs, list items and entries of Google sections. Other indented lines count as code."""
    block: list[str] = []
    first = start
    section = False
    for number, line in enumerate([*inspect.cleandoc(text).splitlines(), ""], start):
        head = re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line)
        section = bool(head) or (section and line[:1] in ("", " "))
        entry = ITEM.match(line) or (re.match(r" {4}[*\w, ]+(\([^)]*\))?: ", line) if section else None)
        code = not section and line.startswith("    " if block else "  ")
        if (not line or entry or head or code) and block:
            yield f"{name}:{first}", "\n".join(block)
            block = []
        if line and not head and not code:
            first = first if block else number
            block.append(line[entry.end() :] if entry else line)


def comments(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each comment and docstring of a Python file."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        value = node.value.value
        if isinstance(value, str) and not EXEMPT.search(lines[(node.end_lineno or node.lineno) - 1]):
            yield from docstring(name, node.lineno, value)
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or EXEMPT.search(token.string) or NO_PROSE.match(token.string):
            continue
        number, column = token.start
        own_line = not token.line[:column].strip()
        if block and not (own_line and number == last + 1):
            yield f"{name}:{last - len(block) + 1}", "\n".join(block)
            block = []
        if own_line:
            block.append(token.string.lstrip("# "))
            last = number
        else:
            yield f"{name}:{number}", token.string.lstrip("# ")
    if block:
        yield f"{name}:{last - len(block) + 1}", "\n".join(block)


def read(kind: str, below: Sequence[str] = ("",)) -> Iterator[Sentence]:
    """Yield all sentences of the kind "markdown" or "python", of files whose path begins with one of ``below``."""
    split = paragraphs if kind == "markdown" else comments
    for name in tracked("*.md" if kind == "markdown" else "*.py"):
        if name.startswith(tuple(below)):
            for place, paragraph in split(name, (ROOT / name).read_text()):
                yield from sentences(place, paragraph)


def hits(sentence: str) -> list[str]:
    """Return the names of the faults in a sentence. A pattern that matches twice occurs twice."""
    faults = [name for name, pattern in PATTERNS.items() for _ in re.finditer(pattern, sentence)]
    faults += ["long"] if len(sentence.split()) > LONG else []
    return faults + (["colons"] if len(re.findall(r"[;:](?= )", sentence)) > 1 else [])


def faults(below: Sequence[str] = ("",)) -> Faults:
    """Return the sentences of each kind and pattern. A sentence with two equal faults occurs twice."""
    found: Faults = {kind: {name: [] for name in (*PATTERNS, *EXTRA)} for kind in ("markdown", "python")}
    for kind, each in found.items():
        for sentence in read(kind, below):
            for name in hits(sentence.text):
                each[name].append(sentence)
    return found


def check(found: Limits, limits: Limits) -> list[str]:
    """Return an error message for each total that is above or below its limit."""
    errors = []
    for kind, totals in found.items():
        for name, total in totals.items():
            limit = limits[kind][name]
            if total > limit:
                errors.append(f"{total} of {name!r} in {kind}, at most {limit}: python tools/prose.py --list {name!r}")
            elif total < limit:
                errors.append(f"{total} of {name!r} in {kind}, the limit is {limit}: python tools/prose.py --update")
    return errors


def sample(count: int, seed: str, kind: str = "markdown") -> list[Sentence]:
    """Return random sentences of the pages for readers, or of the docstrings and comments of all code.

    Args:
        count: maximum number of sentences.
        seed: seed of the random generator; equal seeds draw equal sentences.
        kind: "markdown" for pages, "python" for docstrings and comments.
    """
    below = r"README|docs/|apps/|deploy/|CONTRIBUTING" if kind == "markdown" else ""
    found = [sentence for sentence in read(kind) if re.match(below, sentence.place)]
    return random.Random(seed).sample(found, min(count, len(found)))  # noqa: S311  # a sample that anyone can draw again


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="lower the limits to today's counts")
    parser.add_argument("--list", choices=[*PATTERNS, *EXTRA], help="show each place of this pattern")
    parser.add_argument("--longest", action="store_true", help="show the 20 longest sentences")
    parser.add_argument("--sample", type=int, nargs="?", const=60, metavar="N", help="draw N sentences; default: 60")
    parser.add_argument("--seed", help="the sample's seed; default: the commit's hash")
    kinds = ["markdown", "python"]
    parser.add_argument("--kind", choices=kinds, default="markdown", help="for --sample: pages, or comments of code")
    parser.add_argument("below", nargs="*", default=[""], help="for --list and --longest: beginnings of paths")
    return parser.parse_args()


def asked_for(options: argparse.Namespace) -> list[Sentence] | None:
    """Return the sentences of --sample, --list or --longest, or None if none of these options is given."""
    if options.sample:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        return sample(options.sample, options.seed or head.stdout.strip(), options.kind)
    if options.list:
        found = faults(options.below)
        return [*found["markdown"][options.list], *found["python"][options.list]]
    if options.longest:
        both = [*read("markdown", options.below), *read("python", options.below)]
        return sorted(both, key=lambda sentence: -len(sentence.text.split()))[:20]
    return None


def lower_limits(totals: Mapping[str, Mapping[str, int]], limits: Mapping[str, Mapping[str, int]]) -> None:
    """Lower each limit that is above the present count, and write the limits."""
    lower: dict[str, dict[str, int]] = {}
    for kind, counts in totals.items():
        lower[kind] = {name: min(count, limits[kind][name]) for name, count in counts.items()}
    LIMITS.write_text(json.dumps(lower, indent=2) + "\n")


def above_limits(
    found: Mapping[str, Mapping[str, list[Sentence]]], limits: Mapping[str, Mapping[str, int]]
) -> list[Sentence]:
    """Return the sentences of each pattern whose count is above its limit."""
    above: list[Sentence] = []
    for kind, by_name in found.items():
        for name, places in by_name.items():
            if len(places) > limits[kind][name]:
                above += places
    return above


def show(sentences: Iterable[Sentence]) -> None:
    for sentence in sentences:
        print(f"{sentence.place}: {sentence.text}")


def main() -> int:
    """Run the command and return its exit code."""
    options = parse()
    asked = asked_for(options)
    if asked is not None:
        show(asked)
        return 0
    found = faults()
    limits = json.loads(LIMITS.read_text())
    totals: dict[str, dict[str, int]] = {}
    for kind, by_name in found.items():
        totals[kind] = {name: len(places) for name, places in by_name.items()}
    if options.update:
        lower_limits(totals, limits)
        return 0
    show(above_limits(found, limits))
    errors = check(totals, limits)
    for error in errors:
        print(f"error: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
