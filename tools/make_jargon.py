"""Make apps/gpt_fsdp/text/jargon.txt, which has about 1 MB of the Jargon File. The Jargon File is in the public domain.

    python tools/make_jargon.py [--deb jargon-text_4.4.7-4.1_all.deb] [--out FILE]

The script downloads Debian's package jargon-text 4.4.7-4.1 with apt-get (unless --deb is given), checks the SHA-256 of
its text, and writes the file. A second run writes the same bytes. The script needs Debian's dpkg-deb.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "jargon-text=4.4.7-4.1"
MEMBER = "usr/share/doc/jargon-text/jargon.txt.gz"
SHA256 = "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"  # of MEMBER's uncompressed content
SIZE = 1_000_000  # limit in bytes; the text ends with a complete paragraph
OUT = Path(__file__).resolve().parent.parent / "apps" / "gpt_fsdp" / "text" / "jargon.txt"


def unpack(deb: Path, folder: Path) -> str:
    subprocess.run(["dpkg-deb", "-x", str(deb), str(folder)], check=True)
    content = gzip.decompress((folder / MEMBER).read_bytes())
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        sys.exit(f"error: {deb}: {MEMBER} has SHA-256 {digest}, expected {SHA256}")
    return content.decode()


def cut(text: str) -> bytes:
    """Return the introduction's chapters and the lexicon's first entries, without tables of contents and margins."""
    lines = text.replace("\u00a0", " ").split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("Chapter 1."))
    last = next(i for i, line in enumerate(lines) if i > first and line == "Glossary")
    entry = next(i for i, line in enumerate(lines) if i > last and re.match("   :.*:", line))
    kept = [line.removeprefix("   ").rstrip() for line in lines[first:last] + lines[entry:]]
    content = re.sub("\n{3,}", "\n\n", "\n".join(kept)).encode()
    return content[: content.rfind(b"\n\n", 0, SIZE) + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="make the embedded text of gpt_fsdp")
    parser.add_argument("--deb", type=Path, help=f"Debian's {PACKAGE} (default: download it with apt-get)")
    parser.add_argument("--out", type=Path, default=OUT, help="the file to write (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        deb = options.deb
        if deb is None:
            subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
            deb = next(Path(folder).glob("*.deb"))
        content = cut(unpack(deb, Path(folder)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(content)
    print(f"{hashlib.sha256(content).hexdigest()}  {options.out}  {len(content)} bytes")


if __name__ == "__main__":
    main()
