"""Write docs/mend_a_row.md from check/samestep_check/mending.py.

    python docs/mending.py

The page keeps its paragraphs before the first heading of level 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("core", "check")]

from samestep_check.mending import markdown  # noqa: E402
from samestep_check.rows import ROWS  # noqa: E402

PAGE = ROOT / "docs" / "mend_a_row.md"


def main() -> None:
    """Write the page."""
    titles = {name: row.title for name, row in ROWS.items()}
    head, _, _ = PAGE.read_text().partition("## ")
    PAGE.write_text(head + markdown(titles))


if __name__ == "__main__":
    main()
