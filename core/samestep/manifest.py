"""Check the values in a checkpoint's manifest, with the same checks for saving and reading.

`seal` applies `verify` to a manifest before a save returns. `checkpoint.read` applies `verify` to a stored manifest.
Therefore every checkpoint that a save accepts can be read, with the same values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Union

from samestep import NonRetryableError, untrusted
from samestep.untrusted import shown

FORMAT = 1
MAX_BYTES = 2**27  # maximum size of a manifest, which lists each rank's part of each sharded array
MAX_DEPTH = 100  # maximum depth of nested lists and objects, because the decoder's own limit varies
MAX_BITS = 14_000  # maximum bits of an integer, because Python does not parse more than 4,300 digits
STEP = untrusted.integer(0, 2**62)
STEP_FOLDER = re.compile(r"step-(\d{8,19})")
_FILE_NAME = re.compile(r"[a-z_]{1,200}(-[0-9]{5,9})?\.safetensors")
_NUMBER = untrusted.number()
_TEXT = untrusted.text(1000)
MAPPING = untrusted.mapping(lambda value: True, 10**6)
_BODY = {
    "app": _TEXT,
    "step": STEP,
    "state": MAPPING,
    "arithmetic": MAPPING,
    "files": MAPPING,
    "pieces": MAPPING,
}
# Checks for those values of the state that a run itself uses.
_STATE: dict[str, untrusted.Check] = {
    "requested_dataset": untrusted.optional(_TEXT),
    "dataset_fingerprint": untrusted.optional(_TEXT),
    "threads": untrusted.optional(_TEXT),
    "metadata": MAPPING,
    "epoch_loss_sum": _NUMBER,
    "epoch_correct": _NUMBER,
    "train_loss": untrusted.optional(_NUMBER),
    "seconds": untrusted.number(0, 1e15),
    "best": lambda value: untrusted.mapping(_NUMBER)(value) and STEP(value.get("step")),
}
_FILE = {"size": untrusted.integer(0, 2**62), "sha256": untrusted.text(64)}
Path = tuple[Union[str, int], ...]  # keys and indices that lead to a value
_NAMES = {"arithmetic": "resume_invariants"}  # names in a manifest that differ from the parameters of `checkpoint.save`


def verify(body: Mapping[str, Any]) -> None:
    """Raise ValueError, with the path of the first invalid value, unless ``body`` is valid content of a manifest."""
    for name, value in body.items():
        _check_json(value, (_NAMES.get(name, name),), MAX_DEPTH)
    untrusted.check(body, _BODY)
    state = body["state"]
    for name, value in state.items():
        if name in _STATE and not _STATE[name](value):
            raise ValueError(f"state.{name}, which a run uses itself, is {shown(repr(value), limit=60)}")
    for name, entry in body["files"].items():
        if not _FILE_NAME.fullmatch(name):  # the name must not lead out of the checkpoint's folder
            allowed = "a group has small letters and _ in its name"
            raise ValueError(f"it names the file {shown(repr(name), limit=60)}: {allowed}")
        if not MAPPING(entry):
            raise ValueError(f"it names the file {name} without its size")
        untrusted.check(entry, _FILE)


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's content as a later `checkpoint.read` decodes it.

    The result is a copy, so ``body`` may change afterwards.

    Args:
        body: app, step, state and arithmetic (the options that a resume must repeat), and optionally the entries of
            files and pieces. All are JSON values: None, bool, int, float (including NaN and infinities), str, list, and
            dict with keys of type str. Subclasses of these types, such as np.float64 and IntEnum, are invalid, because
            they would be read as the base type.

    Raises:
        NonRetryableError: a value cannot be read, or would be read as another value; the message has the value's path.
    """
    body = {"format": FORMAT, "files": {}, "pieces": {}, **body}
    try:
        verify(body)
        content = encode(body)
        if len(content) > MAX_BYTES:
            raise ValueError(
                f"its manifest has {len(content)} bytes, more than {MAX_BYTES}: keep large values as arrays"
            )
    except ValueError as error:
        raise NonRetryableError(f"cannot save a checkpoint of step {shown(body.get('step'))}: {error}") from error
    sealed: dict[str, Any] = json.loads(content)
    return sealed


def encode(value: Any) -> bytes:
    """Encode a value as JSON with sorted keys, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _check_json(value: Any, path: Path, depth: int) -> None:
    """Raise ValueError, with the path of the value, unless decoding its JSON returns the same value and type."""
    if depth < 0:
        raise ValueError(f"{_text(path)} is nested too deeply: nest at most {MAX_DEPTH} values")
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                key_type = type(key).__name__
                raise ValueError(f"{_text(path)}: key {shown(key)} is {key_type}, not str: make it a str")
            _check_text(key, path)
            _check_json(inner, (*path, key), depth - 1)
    elif type(value) is list:
        for number, inner in enumerate(value):
            _check_json(inner, (*path, number), depth - 1)
    else:
        _check_scalar(value, path)


def _check_scalar(value: Any, path: Path) -> None:
    if type(value) is str:
        _check_text(value, path)
    elif type(value) is int:
        if value.bit_length() > MAX_BITS:
            raise ValueError(f"{_text(path)} is an int of {value.bit_length()} bits, more than {MAX_BITS}")
    elif value is not None and type(value) not in (bool, float):
        remedy = "make it a None, bool, int, float, str, list or dict"
        raise ValueError(f"{_text(path)} is {shown(type(value).__qualname__)}, which JSON would change: {remedy}")


def _check_text(text: str, path: Path) -> None:
    """Raise ValueError if a text has surrogates that JSON would join into one character."""
    if not text.isascii() and json.loads(json.dumps(text)) != text:
        raise ValueError(f"{_text(path)} has surrogates, which JSON would change: decode its bytes in another way")


def _text(path: Path) -> str:
    """Return a path as text, such as "state.counts[3]"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return shown(text.removeprefix("."), limit=200)
