"""The scoreboard measures two of its cells, and evaluates its programs' logs.

The examples of others need their libraries, and a network for their files, so they run in the environment `scoreboard`.
These tests kill mnist_ddp, and a loop as tutorials write it, whose text is in the test.
"""

from __future__ import annotations

import importlib
import json
import os
import re
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
MODULES = ("job", "rows", "scoreboard", "sources", "subjects")
# One process a rank; a checkpoint after each epoch, which holds the number of that epoch and not of the next.
TUTORIAL = """
import os, sys, told, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
data = TensorDataset(torch.randn(4000, 4), torch.zeros(4000, dtype=torch.int64))
told.dataset(data)
model = torch.nn.Linear(4, 2)
begin = 0
if os.path.exists("saved.safetensors"):
    from safetensors.torch import load_file
    stored = load_file("saved.safetensors")
    begin = int(stored.pop("epoch"))
    model.load_state_dict(stored)
    told.restored()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
loader = DataLoader(data, int(sys.argv[2]), sampler=(sampler := DistributedSampler(data)))
for epoch in range(begin, int(sys.argv[1])):
    sampler.set_epoch(epoch)
    for batch, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        told.step(epoch, batch, loss, x)
    if dist.get_rank() == 0:
        from safetensors.torch import save_file
        save_file({**model.state_dict(), "epoch": torch.tensor(epoch)}, "saved.safetensors")
        told.saved(epoch, len(loader) - 1)
dist.destroy_process_group()
"""


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modules of the harness, by name; and none of them afterwards, as their names are plain."""
    monkeypatch.syspath_prepend(str(HERE))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.soak
def test_a_rank_of_ours_is_killed(board: dict[str, Any], tmp_path: Path) -> None:
    what = board["scoreboard"].cell(
        board["subjects"].SUBJECTS["mnist_ddp"], "rank-killed", tmp_path, None, tmp_path / "run"
    )
    # The end of the second epoch.
    assert re.match(r"resumes by itself after [\d.]+ s at step 18, \d of 2\d lost; ", what), what
    assert what.endswith(" lost; samples repeated 0, lost 0; exit 0"), what


@pytest.mark.soak
def test_a_rank_of_a_tutorials_loop_is_killed(board: dict[str, Any], tmp_path: Path) -> None:
    class Tutorial(board["subjects"].Subject):  # type: ignore[misc]
        name = "tutorial"

        def prepare(self, folder: Path, given: Path | None) -> None:
            (folder / "tutorial.py").write_text(TUTORIAL)

        def starts(self, setting: Any, folder: Path, again: bool) -> list[Any]:
            words = ["tutorial.py", str(setting.epochs), str(setting.batch // setting.n)]
            return [board["job"].Start(board["subjects"].torchrun(setting.n, *words))]

    what = board["scoreboard"].cell(Tutorial(), "rank-killed", tmp_path, None, tmp_path / "run")
    assert what.startswith("job ends, exit 1, "), what
    # From the beginning of the epoch that it had finished: all of it once more.
    assert re.search(r"restarted: resumes at step 9 of 27, ", what), what
    assert what.endswith(" lost, samples repeated 4,000, lost 0"), what
    assert not marked("SCOREBOARD_TOLD", str(tmp_path / "run" / "told-0"))
    assert not marked("SCOREBOARD_TOLD", str(tmp_path / "run" / "told-1"))


def test_told_to_stop_it_ends_its_job(tmp_path: Path) -> None:
    mark = str(tmp_path)
    command = [sys.executable, str(HERE / "scoreboard.py"), "--only=mnist_ddp", "--row=rank-killed"]
    environ = {**os.environ, "SCOREBOARD_TEST": mark, "TMPDIR": mark}
    with (tmp_path / "said.txt").open("w") as log:
        board = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while not list(tmp_path.glob("scoreboard-*/run/log/alive-1")):
                assert board.poll() is None, (tmp_path / "said.txt").read_text()
                assert time.monotonic() < until
                time.sleep(0.05)
            board.terminate()
            assert board.wait(60) == 128 + signal.SIGTERM
        finally:
            board.kill()
            board.wait()
    assert not marked("SCOREBOARD_TEST", mark)
    assert not list(tmp_path.glob("scoreboard-*"))


def tell(folder: Path, rank: int, pid: int, *events: tuple[Any, ...]) -> None:
    """Lines of a process: (time, event, epoch, batch, indices)."""
    folder.mkdir(exist_ok=True)
    lines = []
    for at, event, *values in events:
        names = ("epoch", "batch", "indices")
        line = {"event": event, "time": at, "rank": rank, "pid": pid, **dict(zip(names, values))}
        lines.append(json.dumps({**line, "loss": 1.0} if event == "step" else line))
    (folder / f"{rank}-{pid}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_weights_come_of_what_was_saved_and_of_what_was_made_since(board: dict[str, Any], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    tell(one, 0, 10, (1, "step", 0, 0, [0]), (2, "step", 0, 1, [1]), (3, "saved", 0, 0), (4, "step", 1, 0, [1]))
    tell(one, 1, 11, (1, "step", 0, 0, [2]), (2, "step", 0, 1, [3]), (4, "step", 1, 0, [0]))
    record = board["job"].Told.read(one)
    assert record.lineage() == {(0, 0): [[0, 2]], (0, 1): [[1, 3]], (1, 0): [[1, 0]]}
    assert record.repeated_and_lost(range(4), 2) == (0, 2)  # of the second epoch half is not trained
    tell(two, 0, 20, (5, "restored"), (6, "step", 0, 0, [0]), (7, "step", 0, 1, [3]))
    tell(two, 1, 21, (5, "restored"), (6, "step", 0, 0, [2]), (7, "step", 0, 1, [3]))
    record = board["job"].Told.read(one, two)
    assert record.lineage() == {(0, 0): [[0, 2], [0, 2]], (0, 1): [[3, 3]]}
    assert record.repeated_and_lost(range(4), 1) == (3, 1)
    assert (record.pid(1), [step.time for step in record.steps(0)]) == (21, [1, 2, 4, 6, 7])


def test_a_process_that_restored_nothing_begins_anew(board: dict[str, Any], tmp_path: Path) -> None:
    tell(tmp_path / "one", 0, 10, (1, "step", 0, 0, [0]), (2, "step", 0, 1, [1]))
    tell(tmp_path / "two", 0, 20, (3, "step", 0, 0, [1]))
    assert board["job"].Told.read(tmp_path / "one", tmp_path / "two").lineage() == {(0, 0): [[1]]}


def test_edits_are_applied_from_the_end_and_nothing_else_is(board: dict[str, Any]) -> None:
    apply, text = board["sources"].apply, "a\nb\nc\nd\n"
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
        if file.edits:  # in order, whatever the text is
            board["sources"].apply("\n" * 1000, (HERE / name / file.edits).read_text())


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
        "--keep x": "error: --keep is for one cell",
        "--from-json nothing.json": "error: --from-json nothing.json: no such file",
    }.items():
        monkeypatch.setattr(sys, "argv", ["scoreboard.py", *words.split()])
        with pytest.raises(SystemExit) as raised:
            board["scoreboard"].main()
        assert str(raised.value).startswith(message)


def test_the_page_keeps_what_is_written_around_the_tables(board: dict[str, Any], tmp_path: Path) -> None:
    script, page = board["scoreboard"], tmp_path / "page.md"
    found = {"what": "ends", "date": "2026-11-23", "versions": "torch 2", "machine": "one", "load": "3"}
    measured = script.table({"term": {"pytorch": found}, "rank-killed": {"pytorch": found}})
    assert measured.index("--row rank-killed") < measured.index("--row term")
    assert measured.count("| `--only pytorch` | ends |") == 2
    page.write_text(f"before\n{script.MARKS[0]}\nold\n{script.MARKS[1]}\nafter\n")
    script.write_page(page, measured)
    assert page.read_text() == f"before\n{script.MARKS[0]}\n{measured}\n{script.MARKS[1]}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match=r"error: .*page\.md lacks the lines"):
        script.write_page(page, "new")
    assert os.listdir(tmp_path) == ["page.md"]
