"""Test that checkpoints are atomic, that any damage is detected, and that equal weights have equal hashes."""

from __future__ import annotations

import copy
import dataclasses
import errno
import hashlib
import json
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from samestep import ConfigError, NonRetryableError, RetryableError, checkpoint, checksums, rundir, snapshot, untrusted
from samestep.checkpoint import Arrays, Checkpoint, CorruptCheckpoint
from samestep.recovery import replica_check

CORE = str(Path(checkpoint.__file__).parents[1])
FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors")
ARITHMETIC = {"lr": 0.1, "seed": 1, "dataset": "mnist-5k"}


def values() -> dict[str, Arrays]:
    """Return two groups of arrays: several dtypes, 0-d, empty, strided and Fortran-order arrays, NaN and infinity."""
    grid = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, 1 / 3])
    return {
        "model": {
            "weight": grid,
            "transposed": grid.T,
            "every_second": grid[:, ::2],
            "fortran": np.asfortranarray(grid),
            "special": special,
            "scalar": np.array(7, dtype=np.int64),
            "empty": np.zeros((0, 3), dtype=np.float32),
        },
        "optimizer": {"momentum.weight": -grid, "step": np.array(2.5, dtype=np.float32)},
    }


def save(run_dir: Path, step: int, keep: int = 10, **changes: Any) -> Path:
    arguments: dict[str, Any] = {"groups": values(), "state": {"seconds": step / 3}, "resume_invariants": ARITHMETIC}
    folder = checkpoint.save(run_dir, "toy", step, **{**arguments, **changes}, keep=keep)
    checkpoint.finish()
    return folder


def steps(run_dir: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in (run_dir / "checkpoints").glob("step-*"))


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (name, found[name].dtype, found[name].shape) == (name, array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes(), name


def no_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


def sealed(body: Any) -> bytes:
    """Return a manifest with this body and the correct checksum."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"manifest": body, "sha256": hashlib.sha256(canonical).hexdigest()}).encode()


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    return body


def printable(problem: Exception) -> None:
    """Assert that a message has no control characters, because it is part of one line of a console or log file."""
    assert str(problem).isprintable(), str(problem)


def spoil(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def facts(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# --- round trip --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["model", "optimizer"])
def test_arrays_come_back_with_names_dtypes_shapes_and_bits(tmp_path: Path, group: str) -> None:
    save(tmp_path, 3)
    found = checkpoint.newest(tmp_path, no_warning)
    assert found is not None
    assert_same(found.arrays(group), values()[group])


def test_state_comes_back_exactly(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64).view(np.float64)
    state = {
        "floats": [*bits[np.isfinite(bits)].tolist(), 0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0],
        "big": 2**62,
        "text": "Füße\n",
        "nothing": None,
        "nested": {"yes": True, "list": [1, 2.0, "3"]},
        **{f"value {i}": i for i in range(100)},
    }
    save(tmp_path, 12, state=state)
    found = checkpoint.newest(tmp_path, no_warning)
    assert found is not None
    assert (found.app, found.step, found.resume_invariants) == ("toy", 12, ARITHMETIC)
    # In JSON, -0.0 differs from 0.0, and 2.0 from 2.
    assert json.dumps(found.state, sort_keys=True) == json.dumps(state, sort_keys=True)


def test_each_file_is_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    """The comparison passes arrays in C order, because the library's writer ignores the memory order."""
    for step in range(1, 5):
        folder = save(tmp_path, step, keep=2)
        assert_same(checkpoint.read(folder).arrays("model"), values()["model"])
        assert (folder / "model.safetensors").read_bytes() == safetensors.numpy.save(
            {name: np.asarray(array, order="C") for name, array in values()["model"].items()}
        )
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("dtype", ["complex128", "M8[s]", "U3", "O"])
def test_what_no_safetensors_file_can_hold_is_refused_with_its_name(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(NonRetryableError, match=r"weight is .*, which no safetensors file can hold"):
        save(tmp_path, 3, groups={"model": {"weight": np.zeros(2, dtype)}})
    assert checkpoint.newest(tmp_path, no_warning) is None


def test_the_newest_k_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [100_000_000, 100_000_001]
    found = checkpoint.newest(tmp_path, no_warning)
    assert found is not None
    assert found.step == 100_000_001
    save(tmp_path, 100_000_002, keep=1, protected_step=100_000_000)
    assert steps(tmp_path) == [100_000_000, 100_000_002]


def test_a_protected_step_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=2, protected_step=min(step, 2))
    assert steps(tmp_path) == [2, 4, 5]
    save(tmp_path, 6, keep=2, protected_step=5)
    assert steps(tmp_path) == [5, 6]


def test_two_saves_of_the_same_values_are_the_same_bytes(tmp_path: Path) -> None:
    one = save(tmp_path / "one", 1)
    two = save(tmp_path / "two", 1)
    for name in FILES:
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    for path in folder.iterdir():
        with pytest.raises((pickle.UnpicklingError, ValueError, KeyError, EOFError, IndexError)):
            pickle.loads(path.read_bytes())  # noqa: S301


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_bit_flipped_in_any_byte_is_noticed(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 3)
    good = checkpoint.read(folder)
    content = bytearray((folder / name).read_bytes())
    for at in range(len(content)):
        content[at] ^= 1 << at % 8
        (folder / name).write_bytes(content)
        try:
            found = checkpoint.read(folder)
        except CorruptCheckpoint:
            pass
        else:  # a flip may keep the value: 1e-07 and 1E-07 are the same number
            assert name == "manifest.json", f"{name}: the flipped bit of byte {at} went unnoticed"
            assert found == good, f"{name}: the flipped bit of byte {at} went unnoticed"
        content[at] ^= 1 << at % 8


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 0.5, -1])
def test_a_truncated_file_is_noticed(tmp_path: Path, name: str, cut: float) -> None:
    folder = save(tmp_path, 3)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(CorruptCheckpoint):
        checkpoint.read(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "longer", "zeroed", "a folder", "a dangling link"])
def test_other_damage_to_a_file_is_noticed(tmp_path: Path, name: str, damage: str) -> None:
    folder = save(tmp_path, 3)
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "longer":
        path.write_bytes(content + b"\0")
    elif damage == "zeroed":
        path.write_bytes(bytes(len(content)))
    elif damage == "a folder":
        path.mkdir()
    elif damage == "a dangling link":
        path.symlink_to("nowhere")
    with pytest.raises(CorruptCheckpoint):
        checkpoint.read(folder)


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 3, groups={"model": {"w": np.zeros(4)}, "optimizer": {"w": np.ones(4)}})
    (folder / "model.safetensors").rename(tmp_path / "m")
    (folder / "optimizer.safetensors").rename(folder / "model.safetensors")
    (tmp_path / "m").rename(folder / "optimizer.safetensors")
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        checkpoint.read(folder)


def test_a_file_in_a_checkpoints_place_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000005").write_text("not a folder")
    with pytest.raises(NonRetryableError, match="step-00000005"):
        checkpoint.newest(tmp_path, no_warning)


NOT_MANIFESTS = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a string": b'"manifest"',
    "a number": b"1e400",
    "an empty object": b"{}",
    "not a number": b"NaN",
    "not text": b"\xff\xfe\x00\x01",
    "zeros": bytes(500),
    "half": b'{"manifest": {"format": 1',
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"manifest":' * 200_000,
    "deep and whole": b'{"sha256":"","manifest":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a huge number": b'{"manifest":' + b"9" * 100_000 + b',"sha256":""}',
    "a list as manifest": sealed([]),
    "a string as manifest": sealed("x"),
    "null as manifest": sealed(None),
    "no fields": sealed({}),
    "no checksum": b'{"manifest": {"format": 1}}',
    "a list as checksum": b'{"manifest": {"format": 1}, "sha256": []}',
}


@pytest.mark.parametrize("content", NOT_MANIFESTS.values(), ids=NOT_MANIFESTS.keys())
def test_what_is_not_a_manifest_is_damaged(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path, 3)
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint) as caught:
        checkpoint.read(folder)
    printable(caught.value)


def each(field: str, *wrong: Any) -> list[tuple[str, Any]]:
    return [(field, value) for value in wrong]


WRONG_FIELDS: list[tuple[str, Any]] = [
    *each("format", 0, 2, "1", None, [1], {}, "1\n2", "\ud800"),
    *each("step", 4, -3, "3", 3.5, None, [3], 10**40),
    *each("state", None, [], "x", 1),
    *each("arithmetic", None, [], "x", 1),
    *each("files", None, [], "x", 1, ["model.safetensors"]),
    ("files", {"model.safetensors": None}),
    ("files", {"model.safetensors": []}),
    ("files", {"model.safetensors": {}}),
    ("files", {"model.safetensors": {"size": "0", "sha256": 0}}),
    ("files", {"model.safetensors": {"size": "1\n2", "sha256": ""}}),
]


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS)
def test_a_sealed_manifest_with_a_wrong_field_is_damaged(tmp_path: Path, field: str, value: Any) -> None:
    folder = save(tmp_path, 3)
    (folder / "manifest.json").write_bytes(sealed({**body_of(folder), field: value}))
    with pytest.raises(CorruptCheckpoint) as caught:
        checkpoint.read(folder)
    printable(caught.value)


@pytest.mark.parametrize("field", ["format", "app", "step", "state", "arithmetic", "files"])
def test_a_sealed_manifest_without_a_field_is_damaged(tmp_path: Path, field: str) -> None:
    folder = save(tmp_path, 3)
    body = body_of(folder)
    del body[field]
    (folder / "manifest.json").write_bytes(sealed(body))
    with pytest.raises(CorruptCheckpoint):
        checkpoint.read(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("good"), 3)


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    """Draw a manifest: any JSON, any JSON with the correct checksum, or a valid manifest with any JSON in one place."""
    shape = draw(st.sampled_from(["any", "sealed", "field", "file", "fact"]))
    value = draw(JSON)
    if shape == "any":
        return json.dumps(value).encode()
    if shape == "sealed":
        return sealed(value)
    body = {"format": 1, "app": "toy", "step": 3, "state": {}, "arithmetic": {}, "files": {}}
    name = draw(st.text(max_size=20) | st.sampled_from(["model.safetensors", "../step-00000003/model.safetensors"]))
    if shape == "field":
        body[draw(st.sampled_from(sorted(body)))] = value
    elif shape == "file":
        body["files"] = {name: value}
    else:
        body["files"] = {name: {"size": value, "sha256": draw(JSON)}}
    return sealed(body)


@settings(max_examples=400, deadline=None)
@given(content=manifests())
def test_any_manifest_is_read_or_damaged_and_nothing_else(good_folder: Path, content: bytes) -> None:
    path = good_folder / "manifest.json"
    original = path.read_bytes()
    try:
        path.write_bytes(content)
        found = checkpoint.read(good_folder)
        assert isinstance(found.state, dict)
        assert isinstance(found.resume_invariants, dict)
        assert found.step == 3
    except CorruptCheckpoint as problem:
        printable(problem)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "../x.safetensors", "{root}/x.safetensors", "sub/x.safetensors", "..", ".", "", "x"]
)
def test_a_manifest_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 3)
    name = name.format(root=tmp_path)
    content = safetensors.numpy.save({"w": np.ones(3)})
    for place in (tmp_path, tmp_path / "checkpoints", folder / "sub", folder):
        place.mkdir(exist_ok=True)
        (place / "x.safetensors").write_bytes(content)
        (place / "x").write_bytes(content)
    (folder / "manifest.json").write_bytes(sealed({**body_of(folder), "files": {name: facts(content)}}))
    with pytest.raises(CorruptCheckpoint, match="names the file"):
        checkpoint.read(folder)


def test_a_folder_renamed_to_another_step_is_damaged(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    folder = folder.rename(folder.with_name("step-00000009"))
    with pytest.raises(CorruptCheckpoint, match="step 3"):
        checkpoint.read(folder)


def test_another_format_says_both_numbers(tmp_path: Path) -> None:
    save(tmp_path, 2)
    folder = save(tmp_path, 3)
    (folder / "manifest.json").write_bytes(sealed({**body_of(folder), "format": 2}))
    with pytest.raises(CorruptCheckpoint, match=r"format 2\b.* 1$"):
        checkpoint.read(folder)
    with pytest.raises(ConfigError, match=r"of another version of samestep: .*: use that version, or start a new run"):
        checkpoint.newest(tmp_path, no_warning)  # the older checkpoint is not used instead


GARBAGE = {
    "empty": b"",
    "short": b"\x01\x02",
    "noise": bytes(range(256)) * 4,
    "text": b"hello, I am no safetensors file",
    "endless header": b"\xff" * 8 + b"{}",
    "header is a list": struct.pack("<Q", 2) + b"[]",
    "pickle": pickle.dumps({"w": [1.0, 2.0]}),
}


def tensor_file(dtype: Any, shape: Any, offsets: Any = (0, 0), data: bytes = b"") -> bytes:
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}).encode()
    return struct.pack("<Q", len(header)) + header + data


GARBAGE |= {
    "unknown dtype": tensor_file("F31", [0]),
    "a dtype numpy lacks": tensor_file("BF16", [2], (0, 4), bytes(4)),
    "shape beyond the data": tensor_file("F32", [10**6], (0, 4), bytes(4)),
    "shape beyond memory": tensor_file("F64", [2**40, 2**20], (0, 8), bytes(8)),
    "shape beyond numpy": tensor_file("F32", [0, 2**63]),
    "too many dimensions": tensor_file("F32", [0] * 100),
    "offsets beyond the file": tensor_file("F32", [4], (0, 16), bytes(4)),
    "offsets backwards": tensor_file("F32", [1], (4, 0), bytes(4)),
    "shape of strings": tensor_file("F32", ["1"], (0, 4), bytes(4)),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_arrays_trusts_no_file_however_well_vouched_for(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path, 3)
    (folder / "model.safetensors").write_bytes(content)
    files = {**body_of(folder)["files"], "model.safetensors": facts(content)}
    (folder / "manifest.json").write_bytes(sealed({**body_of(folder), "files": files}))
    found = checkpoint.read(folder)  # the bytes match the manifest's checksums
    with pytest.raises(NonRetryableError, match=r"model\.safetensors cannot be read") as caught:
        found.arrays("model")
    printable(caught.value)
    assert found.arrays("optimizer").keys() == values()["optimizer"].keys()


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NonRetryableError, match=r"ema\.safetensors"):
        checkpoint.read(save(tmp_path, 3)).arrays("ema")


# --- the newest good one -----------------------------------------------------------------------------------------


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "nowhere", no_warning) is None
    assert checkpoint.newest(tmp_path, no_warning) is None
    for name in ("step-1", "step-0000000x", "damaged-step-00000001", ".step-00000002.tmp", "notes.txt"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint.newest(tmp_path, no_warning) is None


def test_damaged_ones_are_skipped_and_named(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    spoil(tmp_path / "checkpoints" / "step-00000001")  # not read, because a newer checkpoint is used
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    spoil(tmp_path / "checkpoints" / "step-00000004")
    warnings: list[str] = []
    found = checkpoint.newest(tmp_path, warnings.append)
    assert found is not None
    assert found.step == 2
    assert [text[: len("checkpoint step-00000004")] for text in warnings] == [
        "checkpoint step-00000004",
        "checkpoint step-00000003",
    ]
    assert all("using step-00000002" in text for text in warnings)


def test_with_none_good_the_run_stops_and_lists_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        spoil(save(tmp_path, step))
    with pytest.raises(NonRetryableError) as caught:
        checkpoint.newest(tmp_path, no_warning)
    text = str(caught.value)
    assert all(f"step-0000000{step}" in text for step in (1, 2, 3))
    assert "--no-resume" in text
    assert "\n" not in text
    assert steps(tmp_path) == [1, 2, 3]  # the damaged checkpoints stay in place


def test_retired_ones_are_kept_but_no_longer_counted(tmp_path: Path) -> None:
    for _ in range(2):  # the second time, the folders' new names already exist
        for step in (1, 2, 3, 4):
            save(tmp_path, step)
        for step in (3, 4):
            spoil(tmp_path / "checkpoints" / f"step-{step:08d}")
        used = checkpoint.newest(tmp_path, lambda text: None)
        assert used is not None
        rundir.quarantine_newer(used)
        assert steps(tmp_path) == [1, 2]
        assert len(list((tmp_path / "checkpoints").glob("damaged-step-*"))) == 2
        assert checkpoint.newest(tmp_path, no_warning) == used
    save(tmp_path, 3, keep=2)
    assert steps(tmp_path) == [2, 3]


def test_a_damaged_one_in_its_place_is_replaced(tmp_path: Path) -> None:
    spoil(save(tmp_path, 3))
    save(tmp_path, 3, state={"seconds": 99})
    found = checkpoint.newest(tmp_path, no_warning)
    assert found is not None
    assert found.state == {"seconds": 99}


def test_a_half_written_one_is_ignored_and_cleaned(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    others = tmp_path / "others"
    for name in (".step-00000004.tmp", ".step-00000009.tmp"):
        shutil.copytree(folder, folder.with_name(name))
    others.mkdir()
    folder.with_name(".step-00000007.tmp").symlink_to(others)
    folder.with_name(".step-00000008.tmp").touch()
    folder.with_name("notes.tmp").touch()  # a file of the user
    found = checkpoint.newest(tmp_path, no_warning)
    assert found is not None
    assert found.step == 3
    save(tmp_path, 4)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["notes.tmp", "step-00000003", "step-00000004"]
    assert others.is_dir()


def test_the_newest_in_which_ranks_differed_is_kept_but_no_longer_counted(tmp_path: Path) -> None:
    replica_check.quarantine_newest(tmp_path)  # no checkpoint exists yet
    for _ in range(2):  # the second time, the folder's new name already exists
        for step in (1, 2, 3):
            save(tmp_path, step)
        replica_check.quarantine_newest(tmp_path)
        assert steps(tmp_path) == [1, 2]
        assert sorted(path.name for path in (tmp_path / "checkpoints").glob("u*")) == ["unequal-step-00000003"]
        found = checkpoint.newest(tmp_path, no_warning)
        assert found is not None
        assert found.step == 2
    save(tmp_path, 3, keep=2)
    assert steps(tmp_path) == [2, 3]


# --- by manifests alone ------------------------------------------------------------------------------------------


def test_by_its_manifest_alone_no_array_is_read(tmp_path: Path) -> None:
    """The launch script reads only the manifest. Rank 0 reads and verifies the arrays, which may be a terabyte."""
    folder = save(tmp_path, 3)
    verified = checkpoint.read(folder)
    for name in FILES[1:]:
        (folder / name).write_bytes(bytes((folder / name).stat().st_size))
    found = checkpoint.read(folder, verify=False)
    assert found.contents == {}
    assert dataclasses.replace(found, contents=verified.contents) == verified
    with pytest.raises(CorruptCheckpoint):
        checkpoint.read(folder)


def test_by_its_manifest_alone_arrays_that_cannot_be_read_are_not_missed(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"")
    size = 1 << 42  # a sparse file of 4 TiB, larger than the memory
    os.truncate(folder / "model.safetensors", size)
    files = {**body_of(folder)["files"], "model.safetensors": {**facts(content), "size": size}}
    (folder / "manifest.json").write_bytes(sealed({**body_of(folder), "files": files}))
    assert checkpoint.read(folder, verify=False).step == 3


@pytest.mark.parametrize("damage", ["longer", "shorter", "missing"])
def test_by_its_manifest_alone_a_files_size_still_counts(tmp_path: Path, damage: str) -> None:
    folder = save(tmp_path, 3)
    path = folder / "optimizer.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content + b"\0" if damage == "longer" else content[:-1])
    with pytest.raises(CorruptCheckpoint, match=r"optimizer\.safetensors"):
        checkpoint.read(folder, verify=False)


def test_by_manifests_alone_the_newest_may_be_one_that_verification_skips(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    spoil(tmp_path / "checkpoints" / "step-00000003")
    quick = checkpoint.newest(tmp_path, no_warning, verify=False)
    verified = checkpoint.newest(tmp_path, lambda text: None)
    assert quick is not None
    assert verified is not None
    assert (quick.step, verified.step) == (3, 2)


def test_by_manifests_alone_a_damaged_manifest_is_skipped_and_named(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_bytes(b"{}")
    warnings: list[str] = []
    found = checkpoint.newest(tmp_path, warnings.append, verify=False)
    assert found is not None
    assert found.step == 1
    (text,) = warnings
    assert text.startswith("checkpoint step-00000002 (")


def test_what_was_given_may_change_while_the_disk_is_waited_for(tmp_path: Path) -> None:
    arrays = {"large": np.zeros(1_000_000), "small": np.zeros(10), "scalar": np.array(0.0)}
    for step in range(1, 6):
        for array in arrays.values():
            array[...] = step
        checkpoint.save(tmp_path, "toy", step, {"model": arrays}, {}, {}, keep=3)
    for array in arrays.values():
        array[...] = -1
    checkpoint.finish()
    for step in (3, 4, 5):
        found = checkpoint.read(tmp_path / "checkpoints" / f"step-{step:08d}").arrays("model")
        assert all((array == step).all() for array in found.values())


def test_saves_reuse_one_copy(tmp_path: Path) -> None:
    snapshot._free.clear()
    for step in range(1, 4):
        checkpoint.save(tmp_path, "toy", step, {"model": {"w": np.full(1000, step)}}, {}, {}, keep=3)
    checkpoint.finish()
    (memory,) = snapshot._free
    assert 8000 < len(memory) < 9000
    checkpoint.save(
        tmp_path, "toy", 4, {"model": {"w": np.zeros(500)}, "optimizer": {"m": np.zeros(3)}}, {}, {}, keep=3
    )
    checkpoint.finish()
    assert snapshot._free[0] is memory


def test_a_save_whose_comparison_fails_writes_nothing_and_frees_its_copy(tmp_path: Path) -> None:
    snapshot._free.clear()
    groups = {"model": {"w": np.ones(3)}}
    compared: list[Any] = []
    saved = checkpoint.save(tmp_path, "toy", 1, groups, {}, {}, keep=3, compare=compared.append)
    checkpoint.finish()
    assert compared == [checksums.of_groups(groups)]

    def fail(own: Any) -> None:
        raise RetryableError("rank 1 differs")

    with pytest.raises(RetryableError):
        checkpoint.save(tmp_path, "toy", 2, groups, {}, {}, keep=3, compare=fail)
    assert len(snapshot._free) == 1
    checkpoint.finish()
    assert checkpoint.folders(tmp_path) == [saved]


def test_a_wait_for_the_checkpoint_before_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint.write_file

    def write_file(folder: Path, name: str, content: Any) -> dict[str, Any]:
        time.sleep(0.6)
        return original(folder, name, content)

    monkeypatch.setattr(checkpoint, "write_file", write_file)
    monkeypatch.setattr(checkpoint, "_is_wait_reported", False)
    lines: list[str] = []
    for step in range(1, 4):
        checkpoint.save(tmp_path, "toy", step, {"model": {"w": np.ones(3)}}, {}, {}, keep=3, report=lines.append)
    checkpoint.finish()
    (line,) = lines
    assert re.fullmatch(
        r"training waited \d\.\d s before the save of step 2, until the checkpoint before was on the disk: "
        "save less often, or to a faster disk",
        line,
    )
    assert steps(tmp_path) == [1, 2, 3]


def test_a_program_that_forgets_to_finish_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    done = python(SAVE + "save(1, 10**6)\n", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(tmp_path) == [1]


def test_an_interrupted_wait_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit function waits for a write that runs after Ctrl-C."""
    can_close = threading.Event()
    monkeypatch.setattr(snapshot.Snapshot, "close", lambda each: can_close.wait(60))
    checkpoint.save(tmp_path, "app", 1, values(), {}, ARITHMETIC, keep=1)
    monkeypatch.setattr(Future, "result", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.finish()
    monkeypatch.undo()
    can_close.set()
    checkpoint.finish()
    assert [path.name for path in checkpoint.folders(tmp_path)] == ["step-00000001"]


@pytest.mark.parametrize(("code", "step"), [(errno.ESTALE, 2), (errno.EACCES, 1)])
def test_a_file_that_a_network_disk_cannot_read_at_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, step: int
) -> None:
    """A resume would set the checkpoint aside, and lose its steps."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    read_bytes = untrusted.read_bytes
    failures = [OSError(code, os.strerror(code))]

    def fail_once(path: Path, *rest: Any) -> bytes:
        if failures:
            raise failures.pop()
        return read_bytes(path, *rest)

    monkeypatch.setattr(untrusted, "read_bytes", fail_once)
    monkeypatch.setattr(checkpoint, "RETRY_SECONDS", (0.01,))
    found = checkpoint.newest(tmp_path, lambda text: None)
    assert found is not None
    assert found.step == step


def test_a_disk_that_fails_later_is_reported_by_the_next_call(tmp_path: Path) -> None:
    save(tmp_path, 1)
    in_the_way = tmp_path / "checkpoints" / "step-00000002"
    in_the_way.write_text("a file, which no folder can replace")
    checkpoint.save(tmp_path, "toy", 2, values(), {}, {}, keep=3)
    with pytest.raises(NonRetryableError, match=r"cannot write checkpoint .*step-00000002"):
        checkpoint.save(tmp_path, "toy", 3, values(), {}, {}, keep=3)
    in_the_way.unlink()
    save(tmp_path, 3)  # the failure is not reported again
    assert steps(tmp_path) == [1, 3]
    in_the_way.write_text("again")
    checkpoint.save(tmp_path, "toy", 2, values(), {}, {}, keep=3)
    with pytest.raises(NonRetryableError, match="step-00000002"):
        checkpoint.save_weights(tmp_path / "model.safetensors", weights())
    in_the_way.unlink()
    assert not list(tmp_path.glob("checkpoints/.*"))


def test_files_are_synced_before_their_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the order of calls, because a test cannot crash a machine to lose unsynced data."""
    save(tmp_path, 1)
    calls: list[str] = []
    open_files = len(os.listdir("/proc/self/fd"))

    def synced(descriptor: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir() or path.stat().st_size:
            return str(path)
        return "nothing, as the content is still in a buffer"

    def record(function: str, name: Callable[..., object]) -> None:
        original = getattr(os, function)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(f"{function} {Path(str(name(*arguments))).name}")
            return original(*arguments, **options)

        monkeypatch.setattr(os, function, call)

    record("fsync", synced)
    record("rename", lambda source, target: target)
    record("replace", lambda source, target: target)
    save(tmp_path, 2, keep=1)
    files = ["fsync model.safetensors", "fsync optimizer.safetensors", "fsync manifest.json"]
    named = ["fsync .step-00000002.tmp", "rename step-00000002", "fsync checkpoints"]
    assert calls == [*files, *named, "rename .step-00000001.tmp"]
    calls.clear()
    checkpoint.save_weights(tmp_path / "model.safetensors", weights())
    assert calls == ["fsync .model.safetensors.tmp", "rename model.safetensors"]
    assert len(os.listdir("/proc/self/fd")) == open_files


# --- killed while saving -----------------------------------------------------------------------------------------

SAVE = """
import os, signal, sys
from pathlib import Path
import numpy as np
from samestep import checkpoint

run_dir = Path(sys.argv[1])

def save(step, size=100_000):
    arrays = {"w": np.full(size, step, dtype=np.float32), "b": np.full(7, step / 3)}
    groups = {"model": arrays, "optimizer": {"m": arrays["w"]}}
    checkpoint.save(run_dir, "toy", step, groups, {"third": step / 3}, {"seed": 1}, keep=2)

def whole(least):
    # All that is there is whole and says the same step everywhere; returns the newest step.
    found = [checkpoint.read(folder) for folder in run_dir.glob("checkpoints/step-*")]
    assert len(found) >= least, found
    for one in found:
        assert one.state == {"third": one.step / 3}
        assert set(one.arrays("model")["w"]) == set(one.arrays("optimizer")["m"]) == {one.step}
        assert set(one.arrays("model")["b"]) == {one.step / 3}
    return max((one.step for one in found), default=0)
"""

KILLED_AT_EVERY_CALL = """
if os.fork() == 0:  # the thread that waits for the disk would not be in the children
    save(1, 10), save(2, 10), checkpoint.finish()
    os._exit(0)
os.wait()
kills = 0
while True:
    newest = whole(2)
    pid = os.fork()
    if pid == 0:
        calls = 0
        def hook(event, arguments):
            global calls
            if event == "open" or event.startswith(("os.", "shutil.")) and event != "os.kill":
                calls += 1
                if calls > kills:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save(newest + 1, 10)
        checkpoint.finish()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    kills += 1
assert whole(2) == newest + 1
print(kills)
"""


def python(code: str, *arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": CORE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **settings,
    )


def test_killed_before_any_system_call_of_a_save_only_whole_ones_are_left(tmp_path: Path) -> None:
    done = python(SAVE + KILLED_AT_EVERY_CALL, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10  # the process was killed many times


@pytest.mark.slow
def test_killed_at_any_moment_only_whole_ones_are_left(tmp_path: Path) -> None:
    """Kill a saving process 15 times. Each new process continues from the newest checkpoint."""
    # A save waits for the previous save, so each printed step is on the disk.
    script = SAVE + "step = whole(0)\nwhile True:\n    step += 1\n    save(step), print(step - 1, flush=True)\n"
    chance = random.Random(1)
    last = 0
    for _ in range(15):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": CORE},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                assert select.select([process.stdout], [], [], 30)[0], "the process saves nothing"
                assert process.stdout.readline().strip(), "the process failed"  # this line repeats the newest step
                assert process.stdout.readline().strip(), "the process failed"
                time.sleep(chance.uniform(0, 0.06))
            finally:
                process.kill()
        found = checkpoint.newest(tmp_path, no_warning)
        assert found is not None
        assert found.step > last
        assert found.state == {"third": found.step / 3}
        assert set(found.arrays("model")["w"]) == set(found.arrays("optimizer")["m"]) == {found.step}
        last = found.step


# --- the disk is full --------------------------------------------------------------------------------------------

FILL = """
ends = {"saved": 0, "refused": 0}
save(1, 1000), checkpoint.finish()
print(flush=True)
for size in range(10_000, 400_000, 10_000):
    before = checkpoint.newest(run_dir, sys.exit).step
    try:
        save(before + 1, size), checkpoint.finish()
        ends["saved"] += 1
    except checkpoint.NonRetryableError as problem:
        ends["refused"] += 1
        assert "\\n" not in str(problem) and "step-" in str(problem), problem
        assert whole(1) == before
    assert whole(1) == checkpoint.newest(run_dir, sys.exit).step
    assert not list(run_dir.glob("checkpoints/.*")), list(run_dir.glob("checkpoints/.*"))
weights = {"w": np.ones(1000, dtype=np.float32)}
checkpoint.save_weights(run_dir / "model.safetensors", weights)
try:
    checkpoint.save_weights(run_dir / "model.safetensors", {"w": np.ones(1_000_000, dtype=np.float32)})
    sys.exit("written beyond the limit")
except checkpoint.NonRetryableError as problem:
    told = str(problem)
assert "\\n" not in told
assert checkpoint.weights_sha256(checkpoint.load_weights(run_dir / "model.safetensors")) == \\
    checkpoint.weights_sha256(weights)
assert not list(run_dir.glob(".*")), list(run_dir.glob(".*"))
print(told)
assert min(ends.values()) > 0, ends
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a file system of 2 MB; skip the test if mounting is not permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_reported_and_costs_no_earlier_checkpoint(small_disk: Path) -> None:
    done = python(SAVE + FILL, small_disk)
    assert done.returncode == 0, done.stderr
    assert "no space left on the disk" in done.stdout


def test_a_write_that_fails_is_reported_and_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    """Limit the size of files to 1 MB instead of filling a disk, so that the test needs no permission to mount."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    done = python(SAVE + FILL, tmp_path, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout


def test_a_run_dir_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot use --run-dir \S+: Not a directory: \S+/checkpoints"):
        save(tmp_path, 1)


# --- the same run? -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"lr": 0.2}, ["--lr 0.1 in the checkpoint, 0.2 now"]),
        ({"lr": 0.2, "seed": 5}, ["--lr 0.1 in the checkpoint, 0.2 now", "--seed 1 in the checkpoint, 5 now"]),
        ({"global_batch_size": 64}, ["--global-batch-size None in the checkpoint, 64 now"]),
        ({"dataset": "mnist"}, ["--dataset mnist-5k in the checkpoint, mnist now"]),
    ],
)
def test_other_arithmetic_is_refused_with_both_values(tmp_path: Path, now: dict[str, Any], expected: list[str]) -> None:
    found = checkpoint.read(save(tmp_path, 3))
    with pytest.raises(ConfigError) as caught:
        rundir.check_same_run(found, "toy", {**ARITHMETIC, **now})
    assert all(text in str(caught.value) for text in expected)
    assert str(tmp_path) in str(caught.value)
    printable(caught.value)


def test_an_option_that_is_gone_is_refused(tmp_path: Path) -> None:
    found = checkpoint.read(save(tmp_path, 3))
    with pytest.raises(ConfigError, match=r"--lr 0\.1 in the checkpoint, None now"):
        rundir.check_same_run(found, "toy", {name: ARITHMETIC[name] for name in ("seed", "dataset")})


def test_another_app_is_refused_and_the_same_run_is_not(tmp_path: Path) -> None:
    found = checkpoint.read(save(tmp_path, 3))
    rundir.check_same_run(found, "toy", copy.deepcopy(ARITHMETIC))
    with pytest.raises(ConfigError, match="of toy, not of lenet"):
        rundir.check_same_run(found, "lenet", ARITHMETIC)


# --- weights -----------------------------------------------------------------------------------------------------


def weights() -> dict[str, NDArray[Any]]:
    return {"b": np.array([[1, 2], [3, 4]], dtype=np.float64), "a": np.array([1.0, -0.5], dtype=np.float32)}


def test_the_weights_hash_is_the_one_computed_by_hand() -> None:
    content = b"a float32 [2]\n" + struct.pack("<2f", 1.0, -0.5)
    content += b"b float64 [2, 2]\n" + struct.pack("<4d", 1, 2, 3, 4)
    assert checkpoint.weights_sha256(weights()) == hashlib.sha256(content).hexdigest()
    golden = "cc79e7951f73f33d8784622f90bd76938c1c63b60539634ae9bb983e9776a834"
    assert checkpoint.weights_sha256(weights()) == golden
    assert checkpoint.weights_sha256({}) == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(
    "same",
    [
        lambda w: dict(reversed(w.items())),
        lambda w: {name: np.asfortranarray(array) for name, array in w.items()},
        lambda w: {name: np.repeat(array, 2, axis=0)[::2] for name, array in w.items()},
        lambda w: {name: array.astype(array.dtype.newbyteorder(">")) for name, array in w.items()},
    ],
    ids=["order", "fortran", "strided", "big-endian"],
)
def test_the_weights_hash_ignores_order_and_memory_layout(same: Callable[[Any], Any]) -> None:
    assert checkpoint.weights_sha256(same(weights())) == checkpoint.weights_sha256(weights())


def flip_one_bit(array: NDArray[Any]) -> NDArray[Any]:
    content = bytearray(array.tobytes())
    content[0] ^= 1
    return np.frombuffer(bytes(content), array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    "other",
    [
        lambda w: {"c": w["a"], "b": w["b"]},
        lambda w: {"a": w["a"]},
        lambda w: {**w, "a": w["a"].view(np.int32)},
        lambda w: {**w, "b": w["b"].reshape(4)},
        lambda w: {**w, "b": w["b"].reshape(1, 2, 2)},
        lambda w: {**w, "a": flip_one_bit(w["a"])},
        lambda w: {**w, "b": w["b"].T},
        lambda w: {**w, "empty": np.zeros(0)},
    ],
    ids=["name", "missing", "dtype", "shape", "leading 1", "one bit", "transposed", "one more"],
)
def test_the_weights_hash_tells_all_else(other: Callable[[Any], Any]) -> None:
    assert checkpoint.weights_sha256(other(weights())) != checkpoint.weights_sha256(weights())


def test_the_weights_hash_tells_a_scalar_from_a_row_of_one() -> None:
    row = np.array([1.5], dtype=np.float32)
    assert checkpoint.weights_sha256({"w": row}) != checkpoint.weights_sha256({"w": row.reshape(())})


def test_saved_weights_come_back_and_hash_alike(tmp_path: Path) -> None:
    given = values()["model"]
    checkpoint.save_weights(tmp_path / "model.safetensors", given)
    found = checkpoint.load_weights(tmp_path / "model.safetensors")
    assert_same(found, given)
    assert checkpoint.weights_sha256(found) == checkpoint.weights_sha256(given)
    assert checkpoint.state_dict_diff(found, given) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "w is missing"),
        ({"w": np.zeros((2, 3), np.float32), "v": np.zeros(1)}, "v is not part of it"),
        ({"w": np.zeros((3, 2), np.float32)}, "w has shape [3, 2], not [2, 3]"),
        ({"w": np.zeros((2, 3), np.float64)}, "w is float64, not float32"),
        ({"w": np.ones((2, 3), np.float32)}, None),
    ],
)
def test_mismatch_says_the_first_difference_in_words(given: Arrays, expected: str | None) -> None:
    assert checkpoint.state_dict_diff(given, {"w": np.zeros((2, 3), np.float32)}) == expected


def test_weights_that_are_not_there_are_the_callers_mistake(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path, Path("/proc/self/mem")):
        with pytest.raises(ConfigError) as caught:
            checkpoint.load_weights(path)
        assert f"--init-from {path}" in str(caught.value)


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_weights_that_are_garbage_are_the_callers_mistake(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        checkpoint.load_weights(path)
    assert f"--init-from {path}" in str(caught.value)
    printable(caught.value)


def test_weights_cut_or_flipped_anywhere_raise_nothing_but_user_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    content = safetensors.numpy.save(weights())
    for at in range(len(content)):
        for bad in (content[:at], content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]):
            path.write_bytes(bad)
            try:
                checkpoint.load_weights(path)  # may succeed: a flipped bit of a weight gives another valid weight
            except ConfigError as problem:
                printable(problem)


def test_write_atomic_replaces_whole_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    for content in (b"first", b"", b"second" * 1000):
        checkpoint.write_atomic(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        checkpoint.write_atomic(tmp_path / "folder", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_checkpoint_holds_what_it_was_given_not_what_became_of_it(tmp_path: Path) -> None:
    groups = values()
    folder = save(tmp_path, 3, groups=groups)
    groups["model"]["weight"][:] = 0
    found: Checkpoint = checkpoint.read(folder)
    (folder / "model.safetensors").unlink()  # the arrays come from the verified bytes, not from the file
    np.testing.assert_array_equal(found.arrays("model")["weight"], values()["model"]["weight"])
