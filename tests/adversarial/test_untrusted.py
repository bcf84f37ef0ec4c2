"""Test that input from other programs is read within limits, or refused by ValueError."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samestep import untrusted

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
SCHEMA = {"rank": untrusted.integer(0, 9), "host": untrusted.text(5), "files": untrusted.mapping(untrusted.text(3), 2)}


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", "[" * 100_000, '{"a":' * 100_000, "\x00", b"\xff\xfe{}"])
def test_what_is_no_object_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        untrusted.parse_object(text)


@given(st.binary(max_size=200) | st.text(max_size=200) | VALUES.map(json.dumps))
@settings(max_examples=500, deadline=None)
def test_any_text_is_an_object_or_a_value_error(text: str | bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(untrusted.parse_object(text), dict)


@given(st.fixed_dictionaries({}, optional={"rank": VALUES, "host": VALUES, "files": VALUES}))
@settings(max_examples=300, deadline=None)
def test_a_field_of_another_kind_is_named(values: dict[str, Any]) -> None:
    problem = ""
    try:
        untrusted.check(values, SCHEMA)
    except ValueError as error:
        problem = str(error)
    if problem:
        assert problem.isprintable()
        assert problem.partition(" ")[0] in SCHEMA
    else:
        assert type(values["rank"]) is int
        assert len(values["host"]) <= 5


def test_only_regular_files_are_read_and_only_so_much(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b"x" * (untrusted.MAX_BYTES + 1))
    assert untrusted.read_text(tmp_path / "fifo") == ""
    assert len(untrusted.read_text(tmp_path / "large")) == untrusted.MAX_BYTES
    for name in ("fifo", "folder", "large", "missing"):
        assert untrusted.read_object(tmp_path / name) == {}
