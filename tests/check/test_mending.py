"""Test the changes that `samestep check` suggests for failed rows, and their page docs/mend_a_row.md."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from samestep import ConfigError
from samestep_check.command import build_parser, wanted_rows
from samestep_check.mending import MENDING, markdown
from samestep_check.results import Result, as_json, table
from samestep_check.rows import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "mend_a_row.md"


def test_each_row_has_a_change_of_one_to_four_lines_that_python_reads() -> None:
    """Parse the suggested change of each row."""
    assert [*MENDING] == [*ROWS]
    for name, mending in MENDING.items():
        for code in filter(None, mending):
            assert code.count("\n") < 4, name
            ast.parse(code)


def test_the_page_has_the_changes_of_the_table() -> None:
    """Compare docs/mend_a_row.md with the changes. To update the page, run python docs/mending.py."""
    titles = {name: row.title for name, row in ROWS.items()}
    assert PAGE.read_text().endswith(markdown(titles)), "run python docs/mending.py"


def test_a_failed_row_has_the_change_without_and_with_the_kit() -> None:
    """The table has the suggested change below each failed row."""
    failed = [Result(row, "failed", "step 4", 1.0) for row in ("odd-batch", "rank-killed", "lost-work")]
    text = table([*failed, Result("term", "passed", "ends", 1.0)])
    assert MENDING["odd-batch"].kit in text
    assert text.count("or with samestep.torch:") == 3
    assert text.endswith("or with samestep.torch: as for rank-killed\nterm                passed       ends")
    assert "signal.signal" not in text


def test_rows_that_failed_are_read_from_the_last_file(tmp_path: Path) -> None:
    """Test --faults=failed, which reads the failed rows from the file that --json wrote."""
    path = tmp_path / "check.json"
    options = build_parser().parse(["--faults=failed,term", f"--json={path}"])
    with pytest.raises(ConfigError, match=r"check\.json: No such file"):
        wanted_rows(options)
    results = [Result("evaluation", "failed", "", 1.0), Result("term", "passed", "", 1.0)]
    path.write_text(as_json(results, ["true"], []))
    assert wanted_rows(options) == ["evaluation", "term"]
    path.write_text(json.dumps({"rows": [{"row": "evaluation", "verdict": "passed"}]}))
    with pytest.raises(ConfigError, match="no row failed"):
        wanted_rows(options)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a file of samestep check"):
        wanted_rows(options)
    with pytest.raises(ConfigError, match="give --json FILE"):
        wanted_rows(build_parser().parse(["--faults=failed"]))
