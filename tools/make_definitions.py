"""Make apps/llm_finetune/text/definitions.jsonl: 1,000 nouns and their definitions, from WordNet 3.0.

    python tools/make_definitions.py [--deb wordnet-base_3.0-37_all.deb] [--out FILE]

The script downloads Debian's package wordnet-base 1:3.0-37 with apt-get (unless --deb is given), checks its
SHA-256, and writes the file. A second run writes the same bytes. The script needs Debian's dpkg-deb. WordNet's
license allows copies and changes with its notice, which is in LICENSE.txt beside the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "wordnet-base=1:3.0-37"
SHA256 = "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752"  # of the package
# The lexicographer files of animals, artifacts, food, natural objects, phenomena, plants and substances.
KINDS = {"05", "06", "13", "17", "19", "20", "27"}
ROWS = 1_000
# The pattern excludes words and definitions that concern weapons or drugs, and offensive words.
SKIPPED = re.compile(
    r"\b(arms?|ass|asses|bitch|cock|corpse|dyke|execut\w+|faggot|feces|gun\w*|kill\w*|sex\w*|tits?|whip|whips|pussy)\b|"
    r"weapon|bomb|missile|ammunition|artillery|armament|explosive|rifle|pistol|cannon|bullet|shotgun|sword|dagger|"
    r"narcotic|cocaine|opium|opiate|heroin|morphine|marijuana|cannabis|intoxica|drug|tobacco|cigar|steroid|"
    r"prison|brothel|gallows|guillotine|torture|slave|breast|penis|vagina|testis|coffin|excrement|urin[ea]|semen|"
    r"contracepti|condom|swastika|nude|strychnine|shrapnel|scimitar|holster|jail|Negro|Gypsy|savage|poison|lethal|warfare|combat|military",
    re.IGNORECASE,
)
OUT = Path(__file__).resolve().parent.parent / "apps" / "llm_finetune" / "text" / "definitions.jsonl"


def counts_of(text: str) -> dict[str, tuple[int, int]]:
    """Return (sense number, number of uses) of each sense in cntlist.rev, by key (``word%1:kind:id`` for a noun)."""
    counts = {}
    for line in text.splitlines():
        key, sense, uses = line.split()
        counts[key.removesuffix("::")] = int(sense), int(uses)
    return counts


def definitions(nouns: str, counts: dict[str, tuple[int, int]]) -> list[tuple[str, str]]:
    """Return the most used words of ``KINDS`` in data.noun and the definitions of their first senses, in hash order."""
    found = []
    for line in nouns.splitlines():
        if line.startswith(" "):  # a line of the license
            continue
        fields, _, gloss = line.partition(" | ")
        _, kind, _, _, word, lex_id = fields.split()[:6]
        sense, uses = counts.get(f"{word}%1:{kind}:{int(lex_id, 16):02}", (0, 0))
        definition = gloss.partition(";")[0].strip()
        is_wanted = kind in KINDS and sense == 1 and uses >= 2 and re.fullmatch("[a-z]{3,}", word)
        if is_wanted and not SKIPPED.search(f"{word} {definition}") and '"' not in definition:
            found.append((uses, word, definition))
    most_used = sorted(found, key=lambda row: (-row[0], row[1]))[:ROWS]
    pairs = [(word, definition) for _, word, definition in most_used]
    return sorted(pairs, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())


def rows_of(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Return a prompt and a completion for each word. Every second completion is the word, so that lengths vary."""
    rows = []
    for i, (word, definition) in enumerate(pairs):
        if i % 2:
            rows.append({"prompt": f"Which word means this? {definition}", "completion": word})
        else:
            rows.append({"prompt": f"Define {word}.", "completion": definition})
    return rows


def read(deb: Path, folder: Path) -> tuple[str, str]:
    """Return the texts of data.noun and cntlist.rev in the package. Exit with an error if the SHA-256 differs."""
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(f"error: {deb} has SHA-256 {digest}, expected {SHA256}")
    subprocess.run(["dpkg-deb", "-x", str(deb), str(folder)], check=True)
    words = folder / "usr" / "share" / "wordnet"
    return (words / "data.noun").read_text(), (words / "cntlist.rev").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description="make the embedded definitions of llm_finetune")
    parser.add_argument("--deb", type=Path, help=f"Debian's {PACKAGE} (default: download it with apt-get)")
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        deb = options.deb
        if deb is None:
            subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
            deb = next(Path(folder).glob("*.deb"))
        nouns, counts = read(deb, Path(folder))
    rows = rows_of(definitions(nouns, counts_of(counts)))
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(content)
    print(f"{hashlib.sha256(content).hexdigest()}  {options.out}  {len(rows)} rows")


if __name__ == "__main__":
    main()
