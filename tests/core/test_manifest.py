"""Test that `checkpoint.newest` returns all values that `checkpoint.save` accepts, unchanged and of the same types."""

from __future__ import annotations

import collections
import datetime
import enum
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from amounts import amount
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samestep import ConfigError, NonRetryableError, checkpoint, log, manifest, rundir
from samestep.env import World
from samestep.options import Parser, add_common, json_value, resume_invariants
from samestep.run import Parts, Run
from samestep.sharded import storage
from samestep.sharded.tensors import TensorShard
from samestep.sharding import GlobalBatches


class Color(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Text(str):
    """Subclass str, as the type of ``torch.__version__`` does."""


GIVEN: dict[str, Any] = {"app": "toy", "step": 5, "groups": {"model": {"w": np.ones(3)}}, "state": {}, "keep": 3}
GIVEN["resume_invariants"] = {}


@pytest.fixture(autouse=True)
def no_pending_checkpoint() -> Iterator[None]:
    yield
    checkpoint.finish()


def save(run_dir: Path, **changes: Any) -> None:
    checkpoint.save(run_dir, **{**GIVEN, **changes})


def check_line(error: Exception, pattern: str = "") -> None:
    """Check that an error's message is one short line, and contains a match of ``pattern``."""
    assert str(error).isprintable()
    assert len(str(error)) < 1000
    assert re.search(pattern, str(error))


def is_same(found: Any, given: Any) -> bool:
    """Return whether two values are equal and of equal types at each node; NaN is equal to itself."""
    if type(found) is not type(given):
        return False
    if isinstance(given, dict):
        return found.keys() == given.keys() and all(is_same(found[key], given[key]) for key in given)
    if isinstance(given, list):
        return len(found) == len(given) and all(map(is_same, found, given))
    if isinstance(given, float) and math.isnan(given):
        return math.isnan(found)
    if isinstance(given, float):
        return bool(found == given) and math.copysign(1, found) == math.copysign(1, given)
    return bool(found == given)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([4000, 4299, 5000]).map(lambda digits: 10**digits)
    | st.sampled_from([2**63, -(2**200), Color.RED, Point(1)])
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=5)  # includes surrogates
    | st.sampled_from(["\ud83d\ude00", "\ude00\ud83d", "\0", Text("2.13"), b"", Path("x"), 1j, {1}, object()])
    | st.sampled_from([np.int64(3), np.float64(0.5), np.float32(0.1), np.bool_(True), np.zeros(2)])
)
KEYS = st.text(st.characters(exclude_categories=()), max_size=5) | st.integers() | st.sampled_from([None, True, 1.5])
KNOWN = st.sampled_from([*manifest._STATE, "step", "app", "state"])  # names that `Run` uses
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS | KNOWN, inner, max_size=3)
        | st.tuples(inner)
        | st.builds(collections.OrderedDict, st.dictionaries(st.text(max_size=3), inner, max_size=2))
    ),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.text(max_size=5) | KNOWN | KEYS, VALUES, max_size=3)


def test_save_raises_at_once_or_newest_returns_the_same_values(soak: bool) -> None:
    """Draw any values for the state, the options, the names of app and groups, the step, and the arrays."""
    arrays = st.sampled_from(
        [np.ones(3, ">f4"), np.ones(2, "f2"), np.ones((0, 2), "?"), np.ones(2, "O"), np.ones(1, "c8")]
    )
    names = st.text(st.characters(exclude_categories=()), max_size=4) | st.sampled_from(["__metadata__", "ema", "ema2"])
    names |= st.sampled_from(["x" * 201, "x" * 300, "model-00001", "../x", "MODEL"])
    groups = st.dictionaries(names | st.integers(), st.dictionaries(names | st.none(), arrays, max_size=2), max_size=2)
    steps = st.integers() | st.integers(0, 2**63) | st.sampled_from([np.int64(4), True, 2.0, None, 2**62])
    apps = st.text(max_size=5) | st.sampled_from(["x" * 1001, None, Text("toy"), "\ud83d\ude00"])
    accepted = refused = 0

    @given(MAPPINGS, MAPPINGS, steps | st.just(5), apps | st.just("toy"), groups | st.just(GIVEN["groups"]))
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=amount(soak, few=300, many=10_000))
    def attempt(state: Any, invariants: Any, step: Any, app: Any, groups: Any) -> None:
        nonlocal accepted, refused
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder)
            try:
                save(run_dir, state=state, resume_invariants=invariants, step=step, app=app, groups=groups)
            except NonRetryableError as error:
                check_line(error)
                assert list(run_dir.iterdir()) == []
                refused += 1
                return
            checkpoint.finish()
            found = checkpoint.newest(run_dir, pytest.fail)
            assert found is not None
            given = {"app": app, "step": step, "state": state, "resume_invariants": invariants}
            assert is_same({name: getattr(found, name) for name in given}, given)
            assert {group: [*found.arrays(group)] for group in found.contents}.keys() == groups.keys()
            for group, values in groups.items():
                for name, array in found.arrays(group).items():
                    assert (array.dtype, array.shape) == (values[name].dtype, values[name].shape)
                    assert array.tobytes() == values[name].tobytes()
            accepted += 1

    attempt()
    assert accepted > 20
    assert refused > 20


DEEP: list[Any] = []
for _ in range(manifest.MAX_DEPTH + 2):
    DEEP = [DEEP]

# The changed arguments of `checkpoint.save`, and the expected message, which names the value.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "int key": ({"state": {"counts": {9: 1}}}, r"state\.counts: key 9 is int, not str: make it a str"),
    "option": ({"resume_invariants": {"milestones": {9: 0.1}}}, r"resume_invariants\.milestones: key 9 is int"),
    "numpy": ({"state": {"a": [{"b": np.int64(3)}]}}, r"state\.a\[0\]\.b is int64, which JSON would change: make it"),
    "subclass": ({"state": {"torch": Text("2")}}, r"state\.torch is Text, which JSON would change"),
    "float subclass": ({"state": {"best_loss": np.float64(0.5)}}, r"state\.best_loss is float64, which JSON would"),
    "enum": ({"state": {"color": Color.RED}}, r"state\.color is Color, which JSON would change"),
    "surrogate key": ({"state": {"\ud83d\ude00": 1}}, "state has surrogates, which JSON would change"),
    "long group": ({"groups": {"x" * 201: {}}}, r"names the file 'xxx.*\.\.\.: a group has"),
    "surrogates in an array's name": ({"groups": {"model": {"\udcff": np.ones(1)}}}, "an array has the name"),
    "tuple": ({"state": {"betas": (0.9, 0.99)}}, r"state\.betas is tuple, which JSON would change"),
    "Path": ({"state": {"vocab": Path("v")}}, r"state\.vocab is (Posix)?Path, which"),
    "digits": ({"state": {"rng": 10**5000}}, r"state\.rng is an int of 16610 bits, more than 14000"),
    "depth": ({"state": {"x": DEEP}}, r"state\.x(\[0\])+\.*.* is nested too deeply: nest at most 100 values"),
    "surrogates": ({"state": {"x": "\ud83d\ude00"}}, r"state\.x has surrogates, which JSON would change"),
    "best": ({"state": {"best": 0.5}}, r"state\.best, which a run uses itself, is 0\.5"),
    "seconds": ({"state": {"seconds": -1}}, r"state\.seconds, which a run uses itself, is -1"),
    "NaN seconds": ({"state": {"seconds": math.nan}}, r"state\.seconds, which a run uses itself, is nan"),
    "threads": ({"state": {"threads": 4}}, r"state\.threads, which"),
    "metadata": ({"state": {"metadata": 4}}, r"state\.metadata, which"),
    "group": ({"groups": {"ema2": {}}}, r"names the file 'ema2\.safetensors': a group has small letters and _"),
    "long app": ({"app": "x" * 1001}, r"app is 'xxx.*\.\.\."),
    "negative step": ({"step": -1}, r"step -1: step is -1"),
    "numpy step": ({"step": np.int64(7)}, r"step is int64, which JSON would change"),
    "array's name": ({"groups": {"model": {"__metadata__": np.ones(1)}}}, r"name '__metadata__', which no"),
    "list as array": ({"groups": {"model": {"w": [1.0]}}}, r"w is list, not an array: convert it with numpy\.asarray"),
    "byte order": ({"groups": {"model": {"w": np.ones(1, ">f8")}}}, r"w is >f8, which no safetensors file can hold"),
    "keep": ({"keep": 0}, r"keep=0: keep at least 1"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_value_is_named_and_earlier_checkpoints_stay(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save(tmp_path, step=3)
    with pytest.raises(NonRetryableError, match=message) as refused:
        save(tmp_path, **change)
    assert str(refused.value).isprintable()
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 3


def test_nested_values_that_change_after_the_call_are_saved_as_they_were(tmp_path: Path) -> None:
    state = {"history": [1, 2]}
    invariants = {"schedule": {"warmup": 5}}
    save(tmp_path, state=state, resume_invariants=invariants, groups={"model": {"w": np.zeros(2_000_000)}})
    state["history"].append(3)
    invariants["schedule"]["warmup"] = 9
    checkpoint.finish()
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    assert (found.state, found.resume_invariants) == ({"history": [1, 2]}, {"schedule": {"warmup": 5}})


class OneRank:
    """Implement the collectives of a job with one rank."""

    def broadcast(self, content: bytes) -> bytes:
        return content

    def all_gather(self, row: Any) -> Any:
        return row[None]


SHARDED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "state": ({"state": {"counts": {9: 1}}}, {}, r"state\.counts: key 9 is int"),
    "step": ({"step": -1}, {}, "step is -1"),
    "group": ({}, {"ema2": {}}, "ema2"),
    "dtype": ({}, {"model": {"w": np.ones(2, "c16")}}, "w is complex128"),
}


@pytest.mark.parametrize(("change", "groups", "message"), SHARDED.values(), ids=SHARDED)
def test_sharded_save_refuses_the_same_values(
    tmp_path: Path, change: dict[str, Any], groups: dict[str, dict[str, Any]], message: str
) -> None:
    body = {"app": "toy", "step": 5, "state": {}, "arithmetic": {}, **change}
    shards = {
        group: {name: TensorShard(array, (0,), array.shape) for name, array in arrays.items()}
        for group, arrays in groups.items()
    }
    with pytest.raises(NonRetryableError, match=message):
        storage.save(OneRank(), 0, checkpoint.folder_of(tmp_path, 5), shards, body)
    assert list(tmp_path.iterdir()) == []  # refused before any rank waits or writes


def test_any_value_that_a_parser_may_return_has_one_json_value(soak: bool) -> None:
    """A resume compares the JSON values of options, so a checkpoint must return these values unchanged."""

    @given(VALUES)
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=amount(soak, few=200, many=10_000))
    def attempt(value: Any) -> None:
        try:
            converted = json_value(value)
        except ValueError as error:
            check_line(error)
            return
        assert is_same(json_value(converted), converted)
        with tempfile.TemporaryDirectory() as folder:
            try:
                save(Path(folder), resume_invariants={"option": converted})
            except NonRetryableError as error:
                check_line(error, r"resume_invariants\.option.* (surrogates|bits)")  # JSON has no such value
                return
            checkpoint.finish()
            found = checkpoint.newest(Path(folder), pytest.fail)
            assert found is not None
            assert is_same(found.resume_invariants["option"], converted)

    attempt()


def test_options_of_any_type_equal_themselves_after_a_resume(tmp_path: Path) -> None:
    values = {"vocab": Path("v"), "betas": (0.9, 0.99), "color": Color.RED, "day": datetime.date(2026, 1, 2)}
    values |= {"scale": np.float32(0.1), "names": {"b", "a"}, "limit": math.nan, "big": 10**400}
    options = Parser().parse([])
    vars(options).update(values)
    save(tmp_path, resume_invariants=resume_invariants(options))
    checkpoint.finish()
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    vars(options).update(values)
    rundir.check_same_run(found, "toy", resume_invariants(options))
    for name, other in {"vocab": Path("w"), "betas": (0.9, 0.9), "limit": 0.5}.items():
        vars(options).update({**values, name: other})
        with pytest.raises(ConfigError, match=rf"holds another run: --{name} "):
            rundir.check_same_run(found, "toy", resume_invariants(options))


def test_an_option_without_a_stable_text_is_refused_by_the_parser() -> None:
    parser = Parser()
    parser.add_argument("--loss", type=lambda text: object())
    with pytest.raises(
        ConfigError, match=r"--loss has the value <object object at 0x\w+>, which is another one in each"
    ):
        parser.parse(["--loss=x"])


def new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Run:
    monkeypatch.setattr(log, "start", lambda *arguments: None)  # log.start would redirect this process's output
    parser = Parser()
    add_common(parser, epochs=1, global_batch_size=4, lr="1", datasets=("none",), devices=("cpu",))
    parser.set_defaults(dtype="float64", **options)
    return Run("toy", parser.parse([f"--run-dir={tmp_path / 'run'}"]), World(0, 1))


def test_options_that_no_checkpoint_can_hold_end_a_run_before_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, monkeypatch, corpus="\ud83d\ude00")
    run.restore(OneRank(), Parts(lambda groups: None, dict))
    with pytest.raises(NonRetryableError, match=r"resume_invariants\.corpus has surrogates, which JSON would change"):
        run.start(GlobalBatches(24, 4, 1), 4, "toy", "cpu", {})


@pytest.mark.parametrize("dtype", ["O", "V2", "c16"])
def test_arrays_that_no_checkpoint_can_hold_end_a_run_before_its_first_update(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy gives a bfloat16 array the dtype V2."""
    run = new_run(tmp_path, monkeypatch)
    with pytest.raises(NonRetryableError, match=r"w is .*, which no safetensors file can hold: convert it"):
        run.restore(OneRank(), Parts(lambda groups: None, lambda: {"model": {"w": np.zeros(2, dtype)}}))
