"""Test the copies of a script's folder, the keys of examples, and the steps that `Records` reads from events."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from samestep import ConfigError
from samestep_check import rows_resume
from samestep_check.records import Called, Records, ordered
from samestep_check.rows_processes import hangs
from samestep_check.rows_resume import compare_generators, compare_part, difference
from samestep_check.runner import CHECKPOINT, CLOSE
from samestep_check.source import Source, can_mount
from samestep_check.verdicts import CannotTell, Failed

LIMIT = 1.0  # MB


def copied(folder: Path, target: Path, links: Sequence[Path] = (), is_covered: bool = False) -> Source:
    source = Source(folder, links, is_covered=is_covered)
    source.check(LIMIT, target.parent)
    source.copy(target)
    return source


def test_a_copy_keeps_times_modes_and_links(tmp_path: Path) -> None:
    """Copy a folder with symbolic links, hard links, modes and times."""
    folder = tmp_path / "folder"
    target = tmp_path / "copies" / "1"
    target.parent.mkdir()
    (tmp_path / "data").write_text("outside")
    (folder / "out").mkdir(parents=True)
    script = folder / "train.sh"
    script.write_text("true")
    script.chmod(0o755)
    os.utime(script, (1000, 2000))
    os.link(script, folder / "out" / "same")
    (folder / "data").symlink_to("../data")
    (folder / "out" / "newest").symlink_to("../train.sh")
    os.utime(folder / "out", (1000, 3000))
    copied(folder, target)
    assert (target / "train.sh").stat().st_mtime == 2000
    assert (target / "train.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "out").stat().st_mtime == 3000
    assert (target / "out" / "same").samefile(target / "train.sh")
    assert (target / "data").read_text() == "outside"
    assert (target / "out" / "newest").samefile(target / "train.sh")


def test_special_files_are_left_out_and_named(tmp_path: Path) -> None:
    """Copy a folder with a FIFO and a socket."""
    folder = tmp_path / "folder"
    target = tmp_path / "copies" / "1"
    folder.mkdir()
    target.parent.mkdir()
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "socket"))  # relative: a socket's path is limited to 107 bytes
    source = copied(folder, target)
    assert source.special == ["fifo", "socket"]
    assert not [*target.iterdir()]


def test_words_of_the_command_mean_the_copy(tmp_path: Path) -> None:
    """Replace the folder's path in a command by the copy's path, except for a program of a virtual environment."""
    folder = tmp_path / "folder"
    target = tmp_path / "copies" / "1"
    (folder / "out").mkdir(parents=True)
    (folder / ".venv" / "bin").mkdir(parents=True)
    target.parent.mkdir()
    source = copied(folder, target)
    words = [f"{folder}/.venv/bin/python", f"{folder}/train.py", f"--out={folder}/out", "--name=x", f"{folder}-2/a"]
    wanted = [words[0], f"{target}/train.py", f"--out={target}/out", "--name=x", words[4]]
    assert source.in_copy(words, target) == wanted


@pytest.mark.skipif(not can_mount(), reason="the kernel refuses a mount namespace")
def test_a_copy_lies_over_the_folder_and_shares_its_linked_parts(tmp_path: Path) -> None:
    """Write to the folder's absolute path, in a copy with a virtual environment and --link."""
    folder = tmp_path / "folder"
    target = tmp_path / "copies" / "1"
    for name in ("data", ".venv", "out", "part/.venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "old").write_text(name)
    (folder / ".git").write_text("of a worktree")
    (folder / "node_modules").symlink_to("out")
    target.parent.mkdir()
    source = copied(folder, target, [Path("data")], is_covered=True)
    words = (
        f"cd {folder} && cat data/old .venv/old part/.venv/old .git node_modules/old; echo x > {folder}/out/new;"
        " rm out/old; ls out data"
    )
    done = subprocess.run(
        source.command(["sh", "-c", words], target),
        cwd=target,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.stdout == "data.venvpart/.venvof a worktreeoutdata:\nold\n\nout:\nnew\n", done.stderr
    assert [path.name for path in (folder / "out").iterdir()] == ["old"]
    assert [path.name for path in (target / "out").iterdir()] == ["new"]
    assert not [*(target / "data").iterdir()]
    copied(folder, target.with_name("2"), [Path("data")])
    assert (target.with_name("2") / "data").readlink() == folder / "data"


def test_copies_inside_the_folder_are_refused(tmp_path: Path) -> None:
    """Test that copies inside the script's folder and a --link to a missing file are refused."""
    with pytest.raises(ConfigError, match="would contain themselves: choose TMPDIR and --keep elsewhere"):
        Source(tmp_path, ()).check(LIMIT, tmp_path / "kept")
    with pytest.raises(ConfigError, match=r"--link .*data: it is missing"):
        Source(tmp_path, [Path("data")]).check(LIMIT, tmp_path.parent)


def test_fresh_files_are_left_out_and_old_checkpoints_are_named(tmp_path: Path) -> None:
    """Test --fresh, and the search for checkpoints in the folder."""
    folder = tmp_path / "folder"
    target = tmp_path / "copies" / "1"
    (folder / "out" / "more").mkdir(parents=True)
    target.parent.mkdir()
    for name in ("train.py", "checkpoint_tools.py", "old.pt", "out/last.pt", "out/more/first.pt"):
        (folder / name).touch()
    assert Source(folder, ()).checkpoints(CHECKPOINT) == ["old.pt", "out/last.pt", "out/more/first.pt"]
    source = Source(folder, (), ["out", "*.pt"])
    assert not source.checkpoints(CHECKPOINT)
    source.copy(target)
    copied_names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*"))
    assert copied_names == ["checkpoint_tools.py", "out", "train.py"]


def records(folder: Path, *ranks: Sequence[dict[str, Any]]) -> Records:
    for rank, events in enumerate(ranks):
        lines = [{"time": at, "rank": rank, **event} for at, event in enumerate(events)]
        (folder / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Records(folder)


def batch(number: int, *keys: Any) -> dict[str, Any]:
    return {"event": "batch", "loader": 1, "number": number, "indices": keys, "trains": True}


def step(*used: int, **values: Any) -> dict[str, Any]:
    return {"event": "step", "used": used, **values}


def test_a_skipped_batch_belongs_to_no_step(tmp_path: Path) -> None:
    """Read the events of a loop that skips a batch, and of a step without a batch."""
    begin = {"event": "iterate", "loader": 1, "size": 9, "batches": 9, "workers": 2}
    events = [begin, batch(1, 0), batch(2, 1), step(2), step(), batch(3, 2), batch(4, 3), step(3), step(4)]
    read = records(tmp_path, events)
    assert [each.indices for each in read.steps()] == [[1], [], [2], [3]]
    (notes,) = read.notes()
    assert (notes.is_inferred, notes.workers) == (False, 2)


def test_a_batch_of_an_evaluation_is_no_batch_of_a_step(tmp_path: Path) -> None:
    """Evaluate after the first step of a script that loads its training batches itself."""
    evaluates = {"event": "iterate", "loader": 1, "size": 9, "batches": 9}
    read = records(tmp_path, [step(), evaluates, {**batch(1, 0), "trains": False}, step()])
    assert [each.indices for each in read.steps()] == [None, None]


def test_a_step_before_the_first_batch_is_omitted(tmp_path: Path) -> None:
    """Horovod takes a step without examples, to create the optimizer's state."""
    begin = {"event": "iterate", "loader": 1, "size": 9, "batches": 9}
    read = records(tmp_path, [step(), begin, batch(1, 0), step(1), batch(2, 1), step(2)])
    assert [each.indices for each in read.steps()] == [[0], [1]]


def test_keys_of_any_kind_are_compared(tmp_path: Path) -> None:
    """Compare keys that are numbers, texts and tuples."""
    begin = {"event": "iterate", "loader": 1, "size": 9, "batches": 9}
    read = records(tmp_path, [begin, batch(1, [3, 0], "b", 2), step(1)], [begin, batch(1, 1, [1, 0]), step(1)])
    assert read.steps()[0].indices == [1, 2, "b", (1, 0), (3, 0)] == ordered([(3, 0), "b", (1, 0), 2, 1])


def test_the_last_checksum_of_each_optimizer_and_rank_is_kept(tmp_path: Path) -> None:
    """Read the events of two optimizers. The first takes a second step on rank 0 only."""
    first = step(optimizer=1, digest=5)
    second = step(optimizer=2, digest=6)
    later = step(optimizer=1, digest=7)
    found = records(tmp_path, [first, second, later], [first, second]).last_digests()
    assert found == {1: {0: 7, 1: 5}, 2: {0: 6, 1: 6}}


@pytest.mark.parametrize(
    ("timeout", "verdict", "words"),
    [
        (None, CannotTell, "its timeout is not known"),
        (20, Failed, "although its collectives wait 20 s only"),
        (300, CannotTell, "as its collectives wait 300 s: shorten the timeout"),
        (1800, Failed, "its collectives wait 1800 s, more than 600 s"),
    ],
)
def test_the_verdict_on_a_hang_follows_the_timeout_of_collectives(
    tmp_path: Path, timeout: float | None, verdict: type, words: str
) -> None:
    """The verdict on a script that hangs for 75 s depends on the timeout of the script's collectives."""
    event = {"event": "start"} if timeout is None else {"event": "timeout", "seconds": timeout}
    found = hangs(records(tmp_path, [event]), 75, limit=600)
    assert type(found) is verdict
    assert words in str(found)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([2, 0.0, 2], "exp_avg: 2 of 2 tensors start from zero"),
        ([1, 1.0, 0], "exp_avg: 1 tensors, 2 undisturbed"),
        ([2, 1.5, 0], "exp_avg differs by 3e-01"),
    ],
)
def test_a_part_of_the_state_that_is_not_restored_is_named(tmp_path: Path, state: list[float], words: str) -> None:
    """Compare an optimizer's state after a resume that lost a part of the state."""
    sound = step(state={"exp_avg": [2, 1.0, 0], "buffer running_mean": [1, 1.0, 0]})
    unsound = step(state={"exp_avg": state, "buffer running_mean": [3, 2.0, 0]})
    wanted, found = records(tmp_path, [sound, unsound]).steps()
    compare_part(wanted, found, "buffer running_mean", CLOSE, "running_mean")  # not compared: more modules ran
    compare_part(wanted, wanted, "exp_avg", CLOSE, "exp_avg")
    with pytest.raises(Failed, match=words):
        compare_part(wanted, found, "exp_avg", CLOSE, "exp_avg")


def test_a_module_that_is_called_without_gradients_is_compared_at_its_first_call(tmp_path: Path) -> None:
    """Compare a module that averages weights, and that is also called before the first batch."""
    called = {"event": "called", "name": "weights of Average", "norm": 2.0}
    read = records(tmp_path, [called, batch(1, 0), step(1), called, batch(2, 1), step(2), called])
    assert [len(each.called) for each in read.steps()] == [0, 1]
    assert read.last_called() == [Called("weights of Average", 2.0)]
    compared: set[str] = set()
    wanted = {"weights of Average": [2.0]}
    other = {"weights of Average": [3.0]}
    rows_resume._compare_norms((wanted, {"weights of Average": [2.5]}, other), compared, CLOSE, "")
    rows_resume._compare_norms((wanted, wanted, {}), compared, CLOSE, "")
    assert not compared  # the undisturbed runs differ, or the resumed run does not call the module
    with pytest.raises(Failed, match="the weights of Average, which is called without gradients, differ by 3e-01 at 9"):
        rows_resume._compare_norms((wanted, wanted, other), compared, CLOSE, "at 9")


def test_a_rank_that_skips_a_step_takes_the_later_ones_with_the_others(tmp_path: Path) -> None:
    """Rank 1 skips step 2 of 3."""
    begin = {"event": "iterate", "loader": 1, "size": 9, "batches": 3}
    whole = [begin, batch(1, 0), step(1), batch(2, 1), step(2), batch(3, 2), step(3)]
    skips = [begin, batch(1, 3), step(1), batch(2, 4), batch(3, 5), step(3)]
    assert [each.indices for each in records(tmp_path, whole, skips).steps()] == [[0, 3], [1], [2, 5]]


def test_another_setting_of_a_group_is_named() -> None:
    """A scheduler may set the momentum, too."""
    found = [{"momentum": 0.9}]
    wanted = [{"momentum": 0.85}]
    assert difference(found, wanted) == "momentum of group 1 is 0.9, 0.85 undisturbed"
    assert difference([], wanted) == "0 parameter groups, 1 undisturbed"


def test_a_step_is_done_when_the_first_rank_has_done_it(tmp_path: Path) -> None:
    """Rank 0 may save a checkpoint of a step before the other ranks finish the step."""
    read = records(tmp_path, [step(), step()], [{"event": "start"}, step(), step()])
    assert read.first_times() == [0, 1]
    assert [each.time for each in read.steps()] == [1, 2]


def begins(state: int) -> dict[str, Any]:
    """Return the event that a loader records when it begins, with the state of torch's generator."""
    loader = {"loader": 1, "size": 9, "batches": 9}
    return {"event": "iterate", **loader, "random": {"torch": state}}


def test_a_generator_may_be_restored_before_the_loader_draws_from_it(tmp_path: Path) -> None:
    """Resume in the middle of an epoch whose steps draw random numbers.

    In the undisturbed run, the generator has state 0 when the loader begins, and the states 11, 12 and 13 at the steps.
    """
    drawn = [step(random={"torch": 11}), step(random={"torch": 12}), step(random={"torch": 13})]
    saves = {"event": "save", "kind": "rename", "path": "x", "random": {"torch": 92}}
    steps = records(tmp_path, [begins(0), drawn[0], drawn[1], saves, drawn[2]]).steps()

    def resumed(*events: dict[str, Any]) -> tuple[list[str], list[str]]:
        (found,) = records(tmp_path, events).steps()
        return compare_generators(steps, steps, found, k=2)

    assert resumed(begins(5), drawn[2]) == ([], [])  # restored after the loader had begun
    assert resumed(begins(12), step(random={"torch": 77})) == (["torch"], [])  # restored before the loader began
    assert resumed(begins(92), step(random={"torch": 78})) == (["torch"], [])  # an evaluation drew before the save
    assert resumed(begins(0), step(random={"torch": 11})) == ([], ["torch"])  # not restored
