"""Test that checkpoints of a sharded model are atomic over all ranks and readable at any world size."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shards
from amounts import amount
from samestep import ConfigError, NonRetryableError, RemoteRankError, checkpoint
from samestep.checkpoint import CorruptCheckpoint
from samestep.sharded import storage, tensors
from samestep.sharded.tensors import StoredTensor, TensorShard
from shards import LAYOUT, cut, whole_array
from threads import Collectives, Meeting, put

BODY = {"app": "sharded toy", "state": {}, "arithmetic": {}}


def on_each(world_size: int, call: Callable[[Collectives, int], Any]) -> list[Any]:
    """Return the result or the exception of ``call`` on each of ``world_size`` threads."""
    meeting = Meeting(world_size)
    found = [None] * world_size

    def live(rank: int) -> None:
        try:
            found[rank] = call(Collectives(meeting, rank), rank)
        except Exception as problem:
            found[rank] = problem  # type: ignore[call-overload]
        finally:
            meeting.end(rank)

    threads = [threading.Thread(target=live, args=[rank], daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return found


def save(run_dir: Path, step: int, world_size: int = 3, first: float = 0.0) -> Path:
    """Save the toy's arrays, whose values begin at ``first``, with ``world_size`` ranks; return the folder."""
    folder = checkpoint.folder_of(run_dir, step)

    def write(ranks: Collectives, rank: int) -> None:
        groups = {"model": {name: cut(whole_array(name, first), name, rank, world_size) for name in LAYOUT}}
        storage.save(ranks, rank, folder, groups, {**BODY, "step": step} if rank == 0 else None, keep=9)

    assert on_each(world_size, write) == [None] * world_size
    checkpoint.finish()
    return folder


def arrays_of(folder: Path) -> dict[str, StoredTensor]:
    return dict(storage.stored_groups(storage.read(folder))["model"])


@pytest.mark.parametrize("writers", [1, 2, 3, 4, 9])
def test_any_part_is_read_whoever_wrote_it(tmp_path: Path, writers: int) -> None:
    arrays = arrays_of(save(tmp_path, 5, writers))
    assert arrays.keys() == LAYOUT.keys()
    for name, stored in arrays.items():
        expected = whole_array(name)
        assert (stored.shape, stored.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(stored.read(), expected)
        for readers in (1, 2, 3, 5):  # world sizes that read the checkpoint
            for rank in range(readers):
                local = cut(expected, name, rank, readers)
                np.testing.assert_array_equal(stored.read(local.offset, local.values.shape), local.values)
        every = [
            [(low, high - low) for low, high in itertools.combinations(range(length + 1), 2)] for length in stored.shape
        ]
        for region in itertools.islice(itertools.product(*every), 0, None, 7):
            offset = tuple(low for low, _ in region)
            shape = tuple(count for _, count in region)
            there = tuple(slice(low, low + count) for low, count in region)
            np.testing.assert_array_equal(stored.read(offset, shape), expected[there])


def test_a_piece_is_written_once_and_copies_are_not(tmp_path: Path) -> None:
    folder = save(tmp_path, 5, 3)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert sizes.keys() == {f"model-{rank:05d}.safetensors" for rank in range(3)}
    held = sum(
        sum(StoredTensor.read(stored).nbytes for stored in storage.stored_file(folder / name).values())
        for name in sizes
    )
    assert held == sum(whole_array(name).nbytes for name in LAYOUT)
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert manifest["pieces"]["model"]["tall"] == {
        "dtype": "float32",
        "shape": [7, 5],
        "pieces": [[0, [0, 0], [3, 5]], [1, [3, 0], [3, 5]], [2, [6, 0], [1, 5]]],
    }


@pytest.mark.parametrize("block", [1, 40, 64, 10**6])
def test_what_is_gathered_is_what_one_rank_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """weights_sha256 and the file do not depend on the world size or the block size."""
    monkeypatch.setattr(tensors, "BLOCK", block)
    arrays = arrays_of(save(tmp_path, 5, 3))
    wholes = {name: whole_array(name) for name in LAYOUT}
    for name, stored in arrays.items():
        blocks = [*stored.blocks()]
        assert all(each.nbytes <= max(block, 4) for each in blocks)
        assert b"".join(each.tobytes() for each in blocks) == wholes[name].tobytes()
    checkpoint.save_weights(tmp_path / "expected.safetensors", wholes)
    digest = storage.consolidate(arrays, tmp_path / "model.safetensors")
    assert digest == storage.consolidate(arrays) == checkpoint.weights_sha256(wholes)
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    from_file = storage.stored_file(tmp_path / "model.safetensors")
    assert storage.consolidate(from_file) == digest
    assert not list(tmp_path.glob(".*"))


def test_gathering_holds_a_block_and_not_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "BLOCK", 2**16)
    folder = checkpoint.folder_of(tmp_path, 1)

    def write(ranks: Collectives, rank: int) -> None:
        values = np.full((1000, 500), rank, np.float32)
        storage.save(
            ranks,
            rank,
            folder,
            {"model": {"w": TensorShard(values, (1000 * rank, 0), (2000, 500))}},
            {"step": 1, **BODY},
        )

    on_each(2, write)
    checkpoint.finish()
    tracemalloc.start()
    try:
        digest = storage.consolidate(arrays_of(folder), tmp_path / "model.safetensors")
        part = arrays_of(folder)["w"].read((999, 0), (2, 500))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 < 4 * 2000 * 500
    np.testing.assert_array_equal(part, [[0] * 500, [1] * 500])
    w = np.repeat(np.array([0, 1], np.float32), 1000)[:, None].repeat(500, axis=1)
    assert digest == checkpoint.weights_sha256({"w": w})


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "model-00001.safetensors"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "model-00001.safetensors has "),
    "flipped": (flip, "model-00001.safetensors does not match its checksum"),
    "of another save": (
        lambda path: shutil.copy(path.parents[1] / "step-00000004" / path.name, path),
        "model-00001.safetensors does not match its checksum",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 4, first=0.25)
    folder = save(tmp_path, 5)
    strike, message = DAMAGES[damage]
    strike(folder / "model-00001.safetensors")
    with pytest.raises(CorruptCheckpoint, match=message):
        storage.read(folder)
    warnings: list[str] = []
    found = checkpoint.newest(tmp_path, warnings.append, reader=storage.read)
    assert found is not None
    assert found.step == 4
    assert len(warnings) == 1
    assert message in warnings[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: pieces["tall"]["pieces"].pop(),
        lambda pieces: pieces["tall"]["pieces"][0].__setitem__(0, 7),
        lambda pieces: pieces["tall"]["pieces"][0].__setitem__(1, [0]),
        lambda pieces: pieces["tall"].__setitem__("dtype", "float99"),
        lambda pieces: pieces["tall"].pop("shape"),
        lambda pieces: pieces.__setitem__("tall", 5),
    ],
)
def test_a_manifest_that_does_not_make_sense_is_damaged(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """Write a manifest with a correct checksum and wrong pieces."""
    folder = save(tmp_path, 5)
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    change(body["pieces"]["model"])
    checkpoint.temporary_of(folder).mkdir()
    for path in folder.glob("*.safetensors"):
        shutil.copy(path, checkpoint.temporary_of(folder))
    checkpoint.commit(folder, body, 1, None)
    checkpoint.finish()
    with pytest.raises(CorruptCheckpoint, match="manifest"):
        storage.read(folder)


def test_pieces_that_leave_a_gap_are_never_saved(tmp_path: Path) -> None:
    def write(ranks: Collectives, rank: int) -> None:
        piece = TensorShard(np.zeros((2, 2), np.float32), (2 * rank, 0), (5, 2))
        storage.save(ranks, rank, checkpoint.folder_of(tmp_path, 1), {"model": {"w": piece}}, {"step": 1, **BODY})

    assert all(isinstance(each, ValueError) and "w" in str(each) for each in on_each(2, write))
    assert checkpoint.newest(tmp_path, print, reader=storage.read) is None


FINISHES = {"the end": None, "the next save": 6}


@pytest.mark.parametrize("name", ["model-00001.safetensors", ".report-00001.json.1.tmp"])
@pytest.mark.parametrize("moment", FINISHES)
def test_a_rank_that_cannot_write_reports_why_and_no_checkpoint_is_lost(tmp_path: Path, moment: str, name: str) -> None:
    """A thread of the rank writes the file, so the rank raises the error when it waits for the thread."""
    save(tmp_path, 4)
    folder = checkpoint.folder_of(tmp_path, 5)
    (checkpoint.temporary_of(folder) / name).mkdir(parents=True)
    next_step = FINISHES[moment]

    def write(ranks: Collectives, rank: int) -> None:
        groups = {"model": {name: cut(whole_array(name), name, rank, 3) for name in LAYOUT}}
        storage.save(ranks, rank, folder, groups, {**BODY, "step": 5})
        if next_step is None:
            storage.finish(ranks, rank)
        else:
            storage.save(ranks, rank, checkpoint.folder_of(tmp_path, next_step), groups, {**BODY, "step": next_step})

    ends = on_each(3, write)
    assert [type(each) for each in ends] == [RemoteRankError, NonRetryableError, RemoteRankError]
    assert f"cannot write checkpoint {folder}" in str(ends[1])
    assert name.removeprefix(".").removesuffix(".1.tmp") in str(ends[1])
    assert "Is a directory" in str(ends[1])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    assert storage.read(folder.with_name("step-00000004")).step == 4


def test_a_rank_that_cannot_save_keeps_all_from_it_at_once(tmp_path: Path) -> None:
    """A dtype that no file can hold causes an error before anything is written."""
    save(tmp_path, 4)

    def write(ranks: Collectives, rank: int) -> None:
        values = np.zeros((1, 2), np.float32 if rank else np.complex128)
        groups = {"model": {"w": TensorShard(values, (rank, 0), (3, 2))}}
        storage.save(ranks, rank, checkpoint.folder_of(tmp_path, 5), groups, {**BODY, "step": 5})

    ends = on_each(3, write)
    assert [type(each) for each in ends] == [NonRetryableError, RemoteRankError, RemoteRankError]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 2), (NonRetryableError, 1)])
def test_rank_0_reports_what_another_rank_cannot_load(kind: type[ConfigError | NonRetryableError], code: int) -> None:
    """A RemoteRankError alone has no message, so the job would end without one."""
    ends = on_each(3, lambda ranks, rank: storage.raise_first(ranks, rank, kind("no é") if rank == 1 else None))
    assert type(ends[0]) is kind
    assert str(ends[0]) == "rank 1: no é"
    for end in ends[1:]:
        assert type(end) is RemoteRankError
        assert end.exit_code == code


def save_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> Path:
    """Begin a save by two ranks that need ``seconds[name]`` longer to write the file ``name``; return the folder."""
    original = checkpoint.write_file

    def write_file(folder: Path, name: str, content: Any) -> dict[str, Any]:
        time.sleep(seconds.get(name, 0.0))
        return original(folder, name, content)

    monkeypatch.setattr(checkpoint, "write_file", write_file)
    folder = checkpoint.folder_of(tmp_path, 5)

    def write(ranks: Collectives, rank: int) -> None:
        groups = {"model": {"w": TensorShard(np.zeros((1, 2), np.float32), (rank, 0), (2, 2))}}
        storage.save(ranks, rank, folder, groups, {**BODY, "step": 5})

    assert on_each(2, write) == [None, None]
    return folder


def test_a_checkpoint_gets_its_name_when_the_slowest_rank_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_slowly(tmp_path, monkeypatch, {"model-00001.safetensors": 0.5})
    assert not folder.exists()
    checkpoint.finish()
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model-00000.safetensors",
        "model-00001.safetensors",
    ]
    assert storage.read(folder).step == 5


def test_rank_0_gives_a_checkpoint_up_if_others_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ends before it reports its file, and this process fails. The next start resumes from step 4."""
    save(tmp_path, 4)
    monkeypatch.setattr(storage, "GIVE_UP", 0.1)
    monkeypatch.setattr(storage._Part, "report", lambda part, outcome: None)
    folder = save_slowly(tmp_path, monkeypatch, {})
    checkpoint.process_fails.set()
    try:
        checkpoint.finish()
    finally:
        checkpoint.process_fails.clear()
    assert not folder.exists()
    found = checkpoint.newest(tmp_path, pytest.fail, reader=storage.read)
    assert found is not None
    assert found.step == 4


def test_a_rank_that_never_reports_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SILENCE", 0.1)
    monkeypatch.setattr(storage._Part, "report", lambda part, outcome: None)
    folder = save_slowly(tmp_path, monkeypatch, {})
    with pytest.raises(
        NonRetryableError, match=f"cannot write checkpoint {folder}: rank 1 has written nothing for 0.1 s"
    ):
        checkpoint.finish()


def test_contents_of_any_length_are_exchanged() -> None:
    contents = [b"", b"\0", b"three\n\0", bytes(1000)]
    assert on_each(4, lambda ranks, rank: storage.all_gather_bytes(ranks, contents[rank])) == [contents] * 4
    assert on_each(2, lambda ranks, rank: storage.all_gather_bytes(ranks, b"")) == [[b"", b""]] * 2


# --- the life of a run, its ranks being processes --------------------------------------------------------------------


class Toy:
    """Run jobs of the toy in one run dir."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self._folder = folder
        self._count = 0

    def job(self, world_size: int, *options: str, **more: Any) -> list[tuple[int, str, str]]:
        """Run a job, and return the exit code, stdout and stderr of each rank."""
        self._count += 1
        arguments = [f"--run-dir={self.run_dir}", f"--data-dir={self._folder / 'data'}", "--log-every=1", *options]
        return shards.end(shards.start(world_size, self._folder / f"talk-{self._count}", *arguments, **more))

    def done(self, world_size: int, *options: str, **more: Any) -> dict[str, Any]:
        """Run a job that must succeed, and return its result."""
        ends = self.job(world_size, "--checkpoint-every=2", *options, **more)
        assert [code for code, *_ in ends] == [0] * world_size, ends
        found: dict[str, Any] = json.loads(ends[0][1].splitlines()[-1].removeprefix("RESULT "))
        weights = checkpoint.load_weights(Path(found["run_dir"]) / "model.safetensors")
        assert found["weights_sha256"] == checkpoint.weights_sha256(weights)
        return found

    def steps(self) -> list[int]:
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line["step"] for line in lines if "step" in line]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    for name in [name for name in os.environ if name.startswith("SAMESTEP_")]:
        monkeypatch.delenv(name)
    put(tmp_path / "data")
    return Toy(tmp_path)


@pytest.mark.slow
def test_a_sharded_run_resumes_at_another_number_of_ranks(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    put(tmp_path / "whole" / "data")
    reference = Toy(tmp_path / "whole").done(1)
    at = 0
    for world_size, steps in ((3, 2), (1, 5), (2, 7), (9, 11), (2, 12)):
        result = toy.done(world_size, f"--max-steps={steps}")
        assert result["resumed_from_step"] == (at or None)
        at = steps
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert toy.steps() == [*range(1, 13)]
    again = toy.done(3)  # a finished run takes no step, and returns its result again
    assert (again["weights_sha256"], again["resumed_from_step"]) == (reference["weights_sha256"], 12)


@pytest.mark.slow
def test_a_sharded_run_starts_from_weights_and_evaluates_alone(toy: Toy, tmp_path: Path) -> None:
    fresh = toy.done(2, "--max-steps=0")
    assert fresh["weights_sha256"] == checkpoint.weights_sha256({name: whole_array(name) for name in LAYOUT})
    trained = toy.done(3, "--max-steps=4", "--keep-best", "--evaluate-every=1", "--keep-checkpoints=1")
    assert trained["best_step"] == 1
    best = checkpoint.load_weights(toy.run_dir / "model-best.safetensors")
    kept = storage.read(checkpoint.folder_of(toy.run_dir, 1))
    assert checkpoint.weights_sha256(best) == storage.consolidate(storage.stored_groups(kept)["model"])
    before = sorted(toy.run_dir.rglob("*"))
    only = toy.job(2, "--evaluate-only")
    assert [code for code, *_ in only] == [0, 0], only
    assert trained["weights_sha256"] in only[0][1]
    assert {*toy.run_dir.rglob("*")} - {*before} == {toy.run_dir / "evaluation.json"}
    weights = shutil.copy(toy.run_dir / "model.safetensors", tmp_path / "weights.safetensors")
    toy.run_dir = tmp_path / "another"
    assert toy.done(2, "--max-steps=0", f"--init-from={weights}")["weights_sha256"] == trained["weights_sha256"]


def test_weights_that_do_not_fit_are_reported_once(toy: Toy, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    checkpoint.save_weights(weights, {"tall": np.zeros((7, 5), np.float32)})
    for file, message in (
        (weights, "count is missing"),
        (tmp_path / "none", "No such file"),
        (Path(__file__), "safetensors"),
    ):
        ends = toy.job(2, f"--init-from={file}")
        assert [code for code, *_ in ends] == [2, 2], ends
        assert message in ends[0][2]
        assert ends[1][2] == ""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(toy: Toy, damage: str) -> None:
    reference = toy.done(3)
    folder = toy.run_dir / "checkpoints" / "step-00000012"
    shutil.copytree(folder.with_name("step-00000010"), folder.with_name("step-00000004"))  # another save's shard
    strike, message = DAMAGES[damage]
    strike(folder / "model-00001.safetensors")
    ends = toy.job(2)
    assert [code for code, *_ in ends] == [0, 0], ends
    assert f"step-00000012 ({message}" in ends[0][2] or (damage == "missing" and message in ends[0][2])
    assert "skipped; using step-00000010" in ends[0][2]
    assert reference["weights_sha256"] in ends[0][1]
    assert (toy.run_dir / "checkpoints" / "damaged-step-00000012").is_dir()


@pytest.mark.parametrize("lost", ["optimizer", "pieces"])
def test_a_checkpoint_without_all_groups_is_not_resumed_from(toy: Toy, lost: str) -> None:
    reference = toy.done(2)
    folder = toy.run_dir / "checkpoints" / "step-00000012"
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    body["pieces"].pop("optimizer") if lost == "optimizer" else body.pop("pieces")
    shutil.copytree(folder, checkpoint.temporary_of(folder))
    checkpoint.commit(folder, body, 9, None)
    ends = toy.job(2)
    assert [code for code, *_ in ends] == [0, 0], ends
    assert "skipped; using step-00000010" in ends[0][2]
    assert reference["weights_sha256"] in ends[0][1]


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_of_a_save_resumes(toy: Toy, soak: bool) -> None:
    """Kill one rank before each of its file operations of a save. The newest checkpoint stays valid."""
    reference = toy.done(3, "--max-steps=4")["weights_sha256"]
    template = toy.run_dir.rename(toy.run_dir.with_name("template"))
    shutil.rmtree(template / "checkpoints" / "step-00000004")
    found: dict[int, list[int]] = {}
    for rank in range(amount(soak, few=2, many=3)):  # rank 2 does what rank 1 does
        for count in itertools.count(1):
            shutil.rmtree(toy.run_dir, ignore_errors=True)
            shutil.copytree(template, toy.run_dir)
            environ = {rank: {"SAMESTEP_KILL": str(count)}}
            ends = toy.job(3, "--checkpoint-every=2", "--max-steps=4", "--keep-checkpoints=1", environ=environ)
            if all(code == 0 for code, *_ in ends):
                break
            assert ends[rank][0] == -9, ends
            newest = checkpoint.newest(toy.run_dir, pytest.fail, reader=storage.read)
            assert newest is not None
            found.setdefault(rank, []).append(newest.step)
            if count == 3:  # resume one of the killed runs to its end
                assert toy.done(2, "--max-steps=4")["weights_sha256"] == reference
    assert all(found[rank] == [2, 2, 2, 2] for rank in [*found][1:])  # killed before the folder, two files, the report
    assert found[0][:7] == [2, 2, 2, 2, 2, 2, 4]  # also before the manifest and the rename; later kills leave step 4
    assert {*found[0][6:]} == {4}


def test_a_run_dir_that_a_rank_does_not_see_is_refused(toy: Toy) -> None:
    """Mount another disk over one rank's run dir, as on a machine that does not share the folder."""
    toy.run_dir.mkdir()
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    folder = toy.run_dir.parent / "talk"
    options = [f"--run-dir={toy.run_dir}", f"--data-dir={toy.run_dir.parent / 'data'}"]
    first, second = shards.start(2, folder, *options)
    second.kill()
    mount = f'mount -t tmpfs tmpfs {toy.run_dir} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", *map(str, second.args)]  # type: ignore[arg-type]
    paths = os.pathsep.join([str(Path(checkpoint.__file__).parents[1]), str(Path(__file__).parent)])
    other = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    begun = time.monotonic()
    ends = shards.end([first, other])
    second.communicate()
    assert [code for code, *_ in ends] == [2, 2], ends
    assert ends[0][2].startswith(f"error: --run-dir {toy.run_dir} is not shared by all ranks: rank 1 (")
    assert len(ends[0][2].splitlines()) == 1
    assert time.monotonic() - begun < 25
    assert sys.platform == "linux"
