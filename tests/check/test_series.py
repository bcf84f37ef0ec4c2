"""Test which checkpoints the rows about saves and resumes use, if a script writes several series of checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from samestep_check import states
from samestep_check.job import INSIDE
from samestep_check.records import Records, Step
from samestep_check.rows_resume import is_same_order, possible_steps, resume_optimizer, saved_at
from samestep_check.rows_saves import fatal_write, is_first, is_same, newest_files, second_save
from samestep_check.runner import CHECKPOINT, CLOSE, Faulted, Restart
from samestep_check.series import Save
from samestep_check.states import Recorded
from samestep_check.verdicts import CannotTell, NotSeen
from test_source import records, step


def writes(*paths_and_steps: tuple[str, int], kind: str = "rename") -> list[Save]:
    return [Save(at, float(time), kind, path) for time, (path, at) in enumerate(paths_and_steps)]


def event(kind: str, path: str, source: str | None = None, **values: Any) -> dict[str, Any]:
    return {"event": "save", "kind": kind, "path": path, "source": source, **values}


def killed(read: Records, fault_time: float, folder: Path) -> Faulted:
    return Faulted(9, fault_time, 1, 1.0, read, read.attempts(), folder, folder)


BEST = ("best.pt", 4), ("5.pt", 5), ("best.pt", 8), ("10.pt", 10), ("best.pt", 12)


def test_a_restart_may_resume_from_the_newest_checkpoint_of_each_series(tmp_path: Path) -> None:
    """Kill a run whose best weights are newer than its numbered checkpoint."""
    events = [step(), event("rename", "best.pt"), step(), event("rename", "2.pt"), step(), event("rename", "best.pt")]
    read = records(tmp_path, events)
    assert saved_at(killed(read, 9.0, tmp_path)) == [3, 2]
    assert saved_at(killed(read, 5.0, tmp_path)) == [3, 2, 1]  # the fault may have interrupted the last write


def test_a_thread_may_write_a_checkpoint_in_place_at_the_time_of_a_fault(tmp_path: Path) -> None:
    """Kill a run long after a thread opened a checkpoint's file. The checkpoint may be incomplete."""
    events = [step(thread=1), event("open", "1.pt", thread=2), step(thread=1), event("open", "2.pt", thread=2)]
    read = records(tmp_path, events)
    assert saved_at(killed(read, 9.0, tmp_path)) == [2, 1]


def test_a_checkpoint_before_the_first_step_is_no_step_to_resume_at(tmp_path: Path) -> None:
    """Save the initial weights, too. A restart that loads them starts over."""
    read = records(tmp_path, [event("rename", "init.pt"), step(), event("rename", "1.pt")])
    assert saved_at(killed(read, 9.0, tmp_path)) == [1]


def test_a_thread_writes_a_step_after_the_previous_one_of_its_series() -> None:
    """Write the best weights between two checkpoints of a thread."""
    first = Save(3, 0.0, "rename", "3.pt", in_background=True)
    best = Save(5, 1.0, "rename", "best.pt")
    second = Save(6, 2.0, "rename", "6.pt", in_background=True)
    assert possible_steps(second, [first, best, second]) == [6, 5, 4, 3]


@pytest.mark.parametrize(
    ("read", "number", "path"),
    [
        ({"5.pt"}, 4, "10.pt"),
        ({"best.pt"}, 3, "best.pt"),
        ((), 4, "10.pt"),  # each series has a complete checkpoint at this write
        ({"5.pt", "best.pt"}, 4, "10.pt"),
        ({"model.safetensors"}, 4, "10.pt"),
    ],
)
def test_the_second_checkpoint_is_of_a_series_that_restarts_read(read: Iterable[str], number: int, path: str) -> None:
    """Choose the write of a kill in a script that saves its best weights, too. Each run has its own folder."""
    saves = writes(*[(f"/work-1/{name}", at) for name, at in BEST])
    chosen, save = second_save(saves, {f"/work-2/{name}" for name in read})
    assert (chosen, save.path) == (number, f"/work-1/{path}")


def test_files_without_digits_may_be_one_series() -> None:
    """Write each checkpoint to a name of its own, or only one checkpoint and the best weights."""
    assert second_save(writes(("a.pt", 3), ("b.pt", 6)))[0] == 2
    with pytest.raises(NotSeen, match="one checkpoint only"):
        second_save(writes(("best.pt", 4), ("5.pt", 5)), {"5.pt"})


def test_a_checkpoint_before_the_first_step_is_not_the_first_of_two() -> None:
    """Save numbered checkpoints from step 0 on."""
    number, save = second_save(writes(("0.pt", 0), ("5.pt", 5), ("10.pt", 10)))
    assert (number, save.path) == (3, "10.pt")


def test_a_kill_hits_the_open_of_the_temporary_file(tmp_path: Path) -> None:
    """Write numbered checkpoints by temporary files, and the best weights in place."""
    events = []
    for at in (1, 2):
        temporary = event("open", f"{at}.pt.tmp")
        events += [step(), temporary, event("rename", f"{at}.pt", f"{at}.pt.tmp"), event("open", "best.pt")]
    read = records(tmp_path, events)
    assert [save.path for save in read.saves()] == ["1.pt", "best.pt", "2.pt", "best.pt"]
    number, save = second_save(read.opens(), {"1.pt"})
    assert (number, save.path) == (3, "2.pt.tmp")
    assert fatal_write(read, "open", 3) == save
    assert fatal_write(read, "open", 9) is None


def test_a_rotated_checkpoint_is_no_temporary_file(tmp_path: Path) -> None:
    """Rename the old checkpoint before the new one is written in place."""
    rotated = event("rename", "previous.pt", "last.pt")
    read = records(tmp_path, [step(), event("open", "last.pt"), step(), rotated, event("open", "last.pt")])
    assert [(save.path, save.step) for save in read.saves()] == [("last.pt", 1), ("previous.pt", 2), ("last.pt", 2)]


def test_reads_count_until_the_first_step(tmp_path: Path) -> None:
    """Read the best weights at the end of the training, for a last evaluation."""
    reads = [{"event": "read", "path": path} for path in ("5.pt", "best.pt")]
    assert records(tmp_path, [reads[0], step(), reads[1]]).reads() == {"5.pt"}


def test_the_newest_files_are_those_that_a_restart_reads(tmp_path: Path) -> None:
    """Find the newest files among numbered checkpoints, a copy of the best one, and a link to the newest one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    names = "3.pt", "6.pt", "best.pt", "6.safetensors"
    for name in names:
        (folder / name).write_bytes(b"1")
    (folder / "latest.pt").symlink_to("6.pt")
    at = ("3.pt", 3), ("latest.pt", 3), ("best.pt", 3), ("6.pt", 6), ("latest.pt", 6), ("best.pt", 6)
    saves = writes(*[(str(folder / name), number) for name, number in at])

    def newest(*read: str) -> set[str]:
        return {path.name for path in newest_files(saves, CHECKPOINT, [str(folder / name) for name in read])}

    assert newest() == {"6.pt", "best.pt", "6.safetensors"}
    assert newest("6.pt") == {"6.pt", "6.safetensors"}
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    pointer.write_text("6")
    saves += writes((str(pointer), 6))
    assert newest("6.pt", f"../{pointer.name}") == {"6.pt", "6.safetensors"}
    assert newest() == {"6.pt", "best.pt", "6.safetensors", pointer.name}


def test_the_only_checkpoint_of_a_series_is_known() -> None:
    """A restart can skip a damaged checkpoint only if there is an older one."""
    saves = writes(*BEST[:3])
    assert is_first(Path("5.pt"), saves)
    assert not is_first(Path("best.pt"), saves)
    assert is_first(Path("5.pt"), writes(("0.pt", 0), ("5.pt", 5)))
    assert is_first(Path("step-3/model.pt"), writes(("step-3", 3)))
    assert not is_first(Path("step-6/model.pt"), writes(("step-3", 3), ("step-6", 6)))


def test_a_later_phase_may_create_only_its_own_optimizer(tmp_path: Path) -> None:
    """Compare steps whose optimizers have other numbers after a resume."""

    def steps(*numbers: int, kind: str = "AdamW") -> list[Step]:
        return records(tmp_path, [step(optimizer=number, kind=kind) for number in numbers]).steps()

    (second,) = steps(2)
    (first,) = steps(1)
    assert is_same(second, first, CLOSE)
    assert not is_same(second, steps(2, kind="SGD")[0], CLOSE)
    assert is_same_order(steps(2, 2, 3), steps(1, 1, 2))
    assert not is_same_order(steps(1, 2, 1), steps(2, 1, 2))
    assert not is_same_order(steps(1, 2), steps(1, 1))


def test_the_saves_of_several_series_are_recorded() -> None:
    """Write the best weights more often than numbered checkpoints, and a large cache once."""

    def written(time: float, name: str) -> list[Recorded]:
        return [Recorded("open", f"{name}.tmp", None, time, 0), Recorded("rename", f"{name}.tmp", name, time, 100)]

    calls = [
        Recorded("write", "cache", None, 1.2, 1000),
        *written(1.5, "best.pt"),
        *written(2.5, "2.pt"),
        *written(3.5, "best.pt"),
        *written(4.5, "4.pt"),
        Recorded("unlink", "2.pt", None, 4.6, 100),
        *written(5.5, "best.pt"),
    ]
    found = states.saves(calls, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [save.done for save in found] == [1, 2, 3, 4, 5]
    assert states.chosen(found, total=6) == found[3]


def test_a_launcher_may_write_the_initial_weights(tmp_path: Path) -> None:
    """Write one file in the launcher, and two checkpoints in a rank."""
    ranks = [step(), event("rename", "1.pt"), step(), event("rename", "2.pt")]
    read = records(tmp_path, [event("rename", "init.pt")], ranks)
    assert [save.path for save in read.opens()] == ["1.pt", "2.pt"]


LINKS = """
import os
from pathlib import Path
from types import SimpleNamespace
from samestep_record import record_step
Path("1.pt").write_text("one")
os.symlink("1.pt", "latest.pt")
record_step()
Path("2.pt").write_text("two")
os.symlink("2.pt", "link")
os.replace("link", "latest.pt")
"""


def recorded(work: Path, program: str, name: str) -> Records:
    """Run a Python program in a folder, as the check would, and return the records of its process."""
    folder = work.with_name(name)
    folder.mkdir()
    config = {"source": str(work), "work": str(work), "records": str(folder), "allowed": [], "checkpoint": CHECKPOINT}
    environ = {"PYTHONPATH": str(INSIDE), "SAMESTEP_INSIDE": json.dumps(config)}
    subprocess.run([sys.executable, "-c", program], cwd=work, env=environ, timeout=20, check=True)
    return Records(folder)


def test_a_rename_over_a_link_replaces_the_link(tmp_path: Path) -> None:
    """Record a script that renames a new link over the link to the newest checkpoint, and reads it after a restart."""
    work = tmp_path / "work"
    work.mkdir()
    read = recorded(work, LINKS, "first")
    assert [(Path(save.path).name, save.step) for save in read.saves()] == [("1.pt", 0), ("2.pt", 1), ("latest.pt", 1)]
    again = recorded(work, 'assert open("latest.pt").read() == "two"', "again")
    assert again.reads() == {str(work / "2.pt")}
    assert newest_files(read.saves(), CHECKPOINT, again.reads()) == [work / "2.pt"]


def test_a_repetition_with_fewer_steps_differs(tmp_path: Path) -> None:
    """Compare the optimizers of a script that ends by time, and whose repetition takes fewer steps."""
    steps = records(tmp_path, [step(state={}), step(state={}), step(state={})]).steps()
    run = killed(Records(tmp_path), 9.0, tmp_path)
    run.restart = Restart(0, "", steps[1:], None)
    twin = SimpleNamespace(steps=steps[:1])
    runner: Any = SimpleNamespace(killed=run, twin=twin, steps=steps, bound=lambda: CLOSE)
    with pytest.raises(CannotTell, match="differs from itself: 3 steps, then 1"):
        resume_optimizer(runner)
