"""Write the batches and gradients of replayed steps to PNG, text, JSON and safetensors files."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from samestep import ConfigError

from samestep_observe.replay_job import Record, Replayed
from samestep_observe.replay_report import losses_by_sample

MOST_IMAGES = 4096  # maximum number of images or texts of one rank's step
_PNG = b"\x89PNG\r\n\x1a\n"


@contextlib.contextmanager
def new_folder(folder: Path | None) -> Iterator[None]:
    """Create the folder of --export. If an exception ends the context, delete the folder unless it has files.

    Args:
        folder: value of --export; None without the option.

    Raises:
        ConfigError: the folder exists or cannot be created.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"--export {folder} exists: name a new folder") from None
    except OSError as error:
        raise ConfigError(f"--export {folder}: {error.strerror}: name another folder") from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the folder has files
            folder.rmdir()
        raise


def write(replayed: Replayed, folder: Path) -> None:
    """Write a folder ``step-<K>`` for each recorded step.

    The folder has ``samples.json`` (sample, rank, loss) and the safetensors files of batches and gradients. A sample
    whose inputs are an image or a text also has a file ``<sample>.png`` or ``<sample>.txt``.
    """
    for step, records in replayed.records.items():
        target = folder / f"step-{step:08d}"
        target.mkdir()
        losses = losses_by_sample(records)
        samples = []
        for record in records:
            for sample in record["samples"]:
                samples.append({"sample": sample, "rank": record["rank"], "loss": losses.get(sample)})
            _write_inputs(replayed.files, record, step=step, folder=target)
        (target / "samples.json").write_text(json.dumps(samples, indent=1) + "\n")
        for path in sorted(replayed.files.glob(f"*-{step}-*.safetensors")):
            what, _, rank = path.stem.split("-")
            (target / f"{what}-rank-{rank}.safetensors").write_bytes(path.read_bytes())


def _write_inputs(files: Path, record: Record, step: int, folder: Path) -> None:
    """Write the inputs of a rank's first MOST_IMAGES samples, if these inputs are images or texts."""
    path = files / f"batch-{step}-{record['rank']}.safetensors"
    try:
        inputs = safetensors.numpy.load_file(path)["0"]
    except (OSError, KeyError, TypeError, safetensors.SafetensorError):  # missing file, or a dtype that numpy lacks
        return
    for sample, row in zip(record["samples"][:MOST_IMAGES], inputs):
        if is_image(row):
            (folder / f"{sample}.png").write_bytes(png(row))
        elif is_text(row):
            (folder / f"{sample}.txt").write_bytes(row.astype(np.uint8).tobytes())


def is_image(row: NDArray[Any]) -> bool:
    """Return whether an array is an image: [channels, height, width] with 1 or 3 channels and sides above 1."""
    return row.ndim == 3 and row.shape[0] in (1, 3) and min(row.shape[1:]) > 1


def is_text(row: NDArray[Any]) -> bool:
    """Return whether an array is a text of bytes: integers in [0, 256), shape [length]."""
    if row.ndim != 1 or row.dtype.kind not in "iu" or not row.size:
        return False
    return bool(row.min() >= 0 and row.max() < 256)


def png(image: NDArray[Any]) -> bytes:
    """Return an image as PNG, in which the smallest value is black and the largest value is white.

    Args:
        image: array [1 or 3, height, width] of any real dtype.
    """
    values = np.nan_to_num(image.astype(np.float64))
    low = float(values.min())
    span = float(values.max()) - low
    pixels = np.round((values - low) * (255 / span if span else 0)).astype(np.uint8)
    channels, height, width = image.shape
    rows = pixels.transpose(1, 2, 0).reshape(height, width * channels)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # each row begins with filter type 0
    color_type = 2 if channels == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes())), (b"IEND", b""))
    return _PNG + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
