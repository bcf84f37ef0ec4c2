"""Test how the scoreboard prepares its programs, and writes the verdicts of `samestep check` into its page.

Third-party examples need their libraries and a network. The tox environment `scoreboard` runs them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT
from processes import marked

pytestmark = pytest.mark.core_only
HERE = ROOT / "benchmarks" / "scoreboard"
MODULES = ("scoreboard", "sources", "subjects")


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield the scoreboard's modules by name, and unload them because other modules may have the same names."""
    monkeypatch.syspath_prepend(str(HERE))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_stopped_scoreboard_ends_its_job(tmp_path: Path) -> None:
    """Start a check through the scoreboard, stop it with TERM, and check that no process is left."""
    mark = str(tmp_path)
    command = [sys.executable, str(HERE / "scoreboard.py"), "--only=mnist_ddp", "--row=rank-killed"]
    environ = {**os.environ, "SCOREBOARD_TEST": mark, "TMPDIR": mark}
    with (tmp_path / "said.txt").open("w") as log:
        board = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while not list(tmp_path.glob("samestep-check-*/work-1/run/log/alive-1")):
                assert board.poll() is None, (tmp_path / "said.txt").read_text()
                assert time.monotonic() < until
                time.sleep(0.05)
            board.terminate()
            assert board.wait(60) == 128 + signal.SIGTERM
        finally:
            board.kill()
            board.wait()
    assert not marked("SCOREBOARD_TEST", mark)
    assert not [*tmp_path.glob("s*-*")]  # torchelastic leaves a folder too, but its name does not match


def test_edits_are_applied_from_the_end_and_nothing_else_is(board: dict[str, Any]) -> None:
    apply = board["sources"].apply
    text = "a\nb\nc\nd\n"
    assert apply(text, "") == text
    assert apply(text, "4a\ne\n.\n2,3c\nB\n.\n1d\n") == "B\nd\ne\n"
    for script in ("2s/b/B/\n", "1d\n4d\n", "5d\n", "0d\n"):
        with pytest.raises(ValueError, match=r"line \d of the edits"):
            apply(text, script)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in HERE.glob("*/origin.json")))
def test_an_example_is_known_to_the_byte_and_its_licence_allows_it(board: dict[str, Any], name: str) -> None:
    stored = json.loads((HERE / name / "origin.json").read_text())
    assert stored["licence"] in ("BSD-3-Clause", "Apache-2.0")
    for file in board["sources"].origin(name):
        assert len(file.sha256) == 64
        assert file.package or len(file.commit) == 40
        for script in filter(None, (file.edits, file.kit)):  # any text suffices to check the order of edits
            board["sources"].apply("\n" * 1000, (HERE / name / script).read_text())


def test_an_original_that_is_another_or_is_not_there_is_an_error(board: dict[str, Any], tmp_path: Path) -> None:
    sources = board["sources"]
    (file,) = sources.origin("pytorch")
    with pytest.raises(
        sources.SourceError, match=r"no such file; put https://raw\.githubusercontent\.com/pytorch/exam"
    ):
        sources.fetch(file, tmp_path)
    path = tmp_path / file.repository / file.path
    path.parent.mkdir(parents=True)
    path.write_text("import os\n")
    with pytest.raises(sources.SourceError, match=f"has the SHA-256 [0-9a-f]{{64}}, expected {file.sha256}"):
        sources.fetch(file, tmp_path)


def test_a_mistake_in_a_call_is_one_line(board: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in {
        "--only nobody": "error: --only nobody: there is none; choose of mnist_ddp, ",
        "--row nothing": "error: --row nothing: there is none; choose of rank-killed, ",
        "--keep x": "error: --keep is for one program",
        "--from-json nothing.json": "error: --from-json nothing.json: no such file",
    }.items():
        monkeypatch.setattr(sys, "argv", ["scoreboard.py", *words.split()])
        with pytest.raises(SystemExit) as raised:
            board["scoreboard"].main()
        assert str(raised.value).startswith(message)


def test_the_kit_adds_few_lines_and_its_table_has_the_rows_that_flip(board: dict[str, Any]) -> None:
    most = {"pytorch": 12, "accelerate": 9, "lightning": 10, "dcp": 6, "trainer": 4, "ray": 13}
    assert {subject.origin for subject in board["subjects"].SUBJECTS.values() if subject.kit} == set(most)
    assert all(0 < board["sources"].lines_of_kit(name) <= lines for name, lines in most.items())
    verdicts = {"term": ("failed", "passed"), "one-rank": ("failed", "failed"), "two-jobs": ("passed", "not seen")}
    cells = {}
    for row, (before, after) in verdicts.items():
        cells[row] = {"pytorch": {"verdict": before}, "pytorch-kit": {"verdict": after}}
    cells["stalled"] = {"pytorch": {"verdict": "failed"}}  # a row without a measurement of the script with the kit
    lines = board["scoreboard"].kit_table(cells)
    assert "| `pytorch-kit` | 12 | `term` | `two-jobs` | `one-rank` |" in lines
    assert "| `accelerate-kit` | 9 | not run | | |" in lines


def test_the_page_keeps_what_is_written_around_the_tables(board: dict[str, Any], tmp_path: Path) -> None:
    script = board["scoreboard"]
    page = tmp_path / "page.md"
    found = {"date": "2026-11-23", "versions": "torch 2", "machine": "one", "load": "3"}
    cells = {"verdict": "passed", "seen": "a | b", **found}, {"verdict": "not run", "seen": "no <reason>", **found}
    measured = script.table({"term": {"pytorch": cells[0]}, "rank-killed": {"pytorch": cells[0], "ray": cells[1]}})
    assert "| `--row` | `pytorch` | `ray` |\n|---|---|---|\n| `rank-killed` | passed | not run |\n" in measured
    assert "| `term` | passed | not run |\n" in measured
    assert measured.index("--row rank-killed") < measured.index("--row term")
    assert measured.count("| `--only pytorch` | passed | a / b |") == 2
    assert "| `--only ray` | not run | no &lt;reason> |" in measured
    page.write_text(f"before\n{script.MARKS[0]}\nold\n{script.MARKS[1]}\nafter\n")
    script.write_page(page, measured)
    assert page.read_text() == f"before\n{script.MARKS[0]}\n{measured}\n{script.MARKS[1]}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match=r"error: .*page\.md lacks the lines"):
        script.write_page(page, "new")
    assert os.listdir(tmp_path) == ["page.md"]
