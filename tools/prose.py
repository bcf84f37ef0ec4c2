"""Count patterns of unclear English in the pages and in the docstrings and comments of the code.

    python tools/prose.py                       compare with tools/prose_limits.json, as lint does
    python tools/prose.py --update              lower the limits to today's counts
    python tools/prose.py --list stands docs    show each place of one pattern, in all files or in those below a path
    python tools/prose.py --sample 60           draw sentences of the pages, with the commit's hash as the seed

A limit is a total over all Markdown or all Python, and may only fall. Not counted: a line that holds `prose:` and a
reason, code, tables, quotations, headings, Chinese pages, generated pages, and older entries of the changelog.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tools" / "prose_limits.json"
GENERATED = ("docs/messages.md", "docs/devices.md", "docs/options.md", "docs/scoreboard.md")
LONG = 30  # words
PATTERNS = {
    "what": r"^(?:What|Who)\b(?!.*\?)|\b(?:of|from|by|with|for|and|or|but|than|if) what\b|\bof whom\b"
    r"|\bof which\b|\b(?:W|w)hoever\b",
    "stands": r"\b(?:stands|anew|but for|is no(?! longer| more))\b|\bno number\b(?! of)",
    "go on": r"\b(?:go|goes|going|gone|went) on\b",
    "ranks talk": r"\b(?:ranks?|machines?|jobs?|scripts?) (?:that )?(?:talks?|says?|tells?|hears?|knows?|judges?)\b",
    "that of": r"\b(?:that|those) of\b",
    "is to": r"\b(?:is|are) to (?!the\b|a\b|an\b|its\b|their\b)[a-z]+\b",
}
EXTRA = ("long", "colons")


class Sentence(NamedTuple):
    """A sentence, and the file and line at which its paragraph starts."""

    place: str
    text: str


def tracked(*patterns: str) -> list[str]:
    """Return the paths of tracked files, without those that are not counted."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    return [name for name in names if name not in GENERATED and not name.endswith(".zh.md")]


def sentences(place: str, paragraph: str) -> Iterator[Sentence]:
    """Split a paragraph. Code becomes the word CODE, and a quotation the word QUOTE."""
    text = re.sub(r"``.+?``|`[^`]+`", "CODE", re.sub(r"\s+", " ", paragraph.strip()))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r'"[^"]*"|“[^”]*”', "QUOTE", text)
    for sentence in re.split(r"(?<=[.!?])[)*]* (?=[A-Z*(])", text):
        if len(sentence.split()) > 2:
            yield Sentence(place, sentence)


def paragraphs(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each paragraph and list item of a Markdown page."""
    if name == "core/CHANGELOG.md":
        text = "\n## ".join(text.split("\n## ")[:2])
    block: list[str] = []
    start, fenced = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        skipped = fenced or fence or not line.strip() or re.match(r"\s*(\||#|<|>|!\[|---)", line) or "prose:" in line
        item = re.match(r"\s*([-*]|\d+\.) ", line)
        if (skipped or item) and block:
            yield f"{name}:{start}", " ".join(block)
            block = []
        if not skipped:
            start = start if block else number
            block.append(line.strip()[len(item[0].strip()) :] if item else line)
        fenced ^= fence


def comments(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each comment and docstring of a Python file."""
    last, start = 0, 0
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        number = token.start[0]
        if token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""')) and "prose:" not in token.line:
            if not token.line[: token.start[1]].strip():  # a docstring begins its line
                for part in re.split(r"\n\s*\n", token.string.strip('r"')):
                    if "::" not in part and not re.search(r"^    {4,}\S", part, re.MULTILINE):
                        yield f"{name}:{number}", part
        elif token.type == tokenize.COMMENT and "prose:" not in token.string:
            if block and number != last + 1:
                yield f"{name}:{start}", " ".join(block)
                block = []
            start, last = (start if block else number), number
            block.append(token.string.lstrip("# "))
    if block:
        yield f"{name}:{start}", " ".join(block)


def read(kind: str, below: str = "") -> Iterator[Sentence]:
    """Yield all sentences of the kind "markdown" or "python", of files whose path begins with ``below``."""
    split = paragraphs if kind == "markdown" else comments
    for name in tracked("*.md" if kind == "markdown" else "*.py"):
        if name.startswith(below):
            for place, paragraph in split(name, (ROOT / name).read_text()):
                yield from sentences(place, paragraph)


def hits(sentence: str) -> Iterator[str]:
    """Yield the pattern of each fault in a sentence."""
    for name, pattern in PATTERNS.items():
        for _ in re.finditer(pattern, sentence):
            yield name
    if len(sentence.split()) > LONG:
        yield "long"
    if len(re.findall(r"[;:](?= )", sentence)) > 1:
        yield "colons"


def counts() -> dict[str, dict[str, int]]:
    """Return the number of faults by kind and pattern."""
    found = {kind: dict.fromkeys((*PATTERNS, *EXTRA), 0) for kind in ("markdown", "python")}
    for kind, totals in found.items():
        for sentence in read(kind):
            for name in hits(sentence.text):
                totals[name] += 1
    return found


def check(found: dict[str, dict[str, int]], limits: dict[str, dict[str, int]]) -> list[str]:
    """Return an error for each total that differs from its limit."""
    errors = []
    for kind, totals in found.items():
        for name, total in totals.items():
            limit = limits[kind][name]
            if total > limit:
                errors.append(f"{total} of {name!r} in {kind}, at most {limit}: python tools/prose.py --list {name!r}")
            elif total < limit:
                errors.append(f"{total} of {name!r} in {kind}, the limit is {limit}: python tools/prose.py --update")
    return errors


def sample(count: int, seed: str) -> list[Sentence]:
    """Draw ``count`` sentences of the README, docs/ and the READMEs of apps."""
    pages = [s for s in read("markdown") if re.match(r"README|docs/|apps/|deploy/|CONTRIBUTING", s.place)]
    return random.Random(seed).sample(pages, count)  # noqa: S311  # a sample that anyone can draw again


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--update", action="store_true", help="write today's counts as the limits, where they are lower"
    )
    parser.add_argument("--list", choices=[*PATTERNS, *EXTRA], help="show each place of this pattern")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N sentences of the pages")
    parser.add_argument("--seed", help="the sample's seed; default: the commit's hash")
    parser.add_argument("below", nargs="?", default="", help="for --list: the beginning of a path")
    options = parser.parse_args()
    if options.sample:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        for sentence in sample(options.sample, options.seed or head.stdout.strip()):
            print(f"{sentence.place}: {sentence.text}")
        return 0
    if options.list:
        for kind in ("markdown", "python"):
            for sentence in read(kind, options.below):
                if options.list in hits(sentence.text):
                    print(f"{sentence.place}: {sentence.text}")
        return 0
    found = counts()
    limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else found
    if options.update:
        lower = {
            kind: {name: min(total, limits[kind][name]) for name, total in each.items()} for kind, each in found.items()
        }
        LIMITS.write_text(json.dumps(lower, indent=2) + "\n")
        return 0
    errors = check(found, limits)
    print("\n".join(f"error: {error}" for error in errors) or f"prose: {json.dumps(found)}")
    return len(errors) > 0


if __name__ == "__main__":
    sys.exit(main())
