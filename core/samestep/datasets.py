"""Where are the bytes? Data sets as files in their standard format, and as uint8 arrays in memory.

MNIST and its like are four IDX files, CIFAR-10 is the six files of its binary version.

Files are looked for in this order; plain and .gz names are both read:

1. `<data_dir>/<name>/`, then torchvision's layout, `<data_dir>/MNIST/raw` or `<data_dir>/FashionMNIST/raw`, or the
   folder of CIFAR-10's archive, `<data_dir>/cifar-10-batches-bin`;
2. where the system has them (Debian's package dataset-fashion-mnist);
3. the user's cache, `$XDG_CACHE_HOME/samestep/<name>`, by default `~/.cache/samestep/<name>`, and where that cannot be
   written `/tmp/samestep-<user id>/<name>`;
4. the network, into that cache: once per machine, checked against a SHA-256.

`mnist-5k`, 5,000 real MNIST digits, is part of the package. With no network it stands in for `mnist`, and says so;
for `cifar10` that is `synthetic-cifar10`, 1,280 images made up in the same format, which the first use generates.
A launch script calls `resolve` once, before it starts any rank, so that a rank's `load` finds everything in place.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep import UserError

NAMES = ("mnist", "fashion-mnist", "mnist-5k", "cifar10", "synthetic-cifar10")

# Mean and standard deviation of MNIST's training pixels, scaled to [0, 1]; all MNIST-like sets are normalised by them.
MEAN = 0.1307
STD = 0.3081

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-bin"}
SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
EMBEDDED = Path(__file__).parent / "data" / "mnist-5k"

# CIFAR-10's binary version, and how many images each of its files has; the last is the test set.
CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_RECORDS = {"cifar10": (10_000,) * 6, "synthetic-cifar10": (205, 205, 205, 205, 204, 256)}
CIFAR_SIDE = 32


@dataclass(frozen=True)
class Found:
    """Where a data set is. `name` is the one that was found, `folder` holds its files, and `notice` is a
    sentence to show when it is not the one asked for (else None). `resolve` adds the content's `fingerprint`."""

    name: str
    folder: Path
    notice: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory: images uint8 [n, 28, 28], 0 is background, or, of CIFAR-10, [n, 32, 32, 3] in red, green
    and blue; labels uint8 [n], 0 to 9; n >= 1 in both sets.

    `fingerprint` is the SHA-256, in hex, of the four decoded arrays with their shapes: the same however the files are
    named or compressed.
    """

    name: str
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]
    fingerprint: str


def resolve(name: str, data_dir: Path, fallback: bool = True) -> Found:
    """Find the data set, download it where that is needed and possible, and read it once to know that it is whole.

    ``name`` is one of NAMES; ``data_dir``, looked in first, may be missing or read-only, and nothing is written to it.
    With ``fallback`` and no network, mnist-5k is given for mnist and synthetic-cifar10 for cifar10, with a notice.

    Raises:
        UserError: unknown name; data_dir is a file; a folder holds only some of the files; a file is damaged; no
            network and no fallback; a download that breaks off or has the wrong checksum; a cache that cannot be
            written.
    """
    found = _find(name, data_dir, fallback)
    return replace(found, fingerprint=_read(found).fingerprint)


def load(name: str, data_dir: Path) -> Dataset:
    """Read and verify a data set. Looks where `resolve` looks, without fallback; raises UserError as it does."""
    return _read(_find(name, data_dir, fallback=False))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or gzipped (told by its content, not its name).

    Format: 0, 0, 8 (the code of uint8), number of dimensions; then each dimension as a big-endian uint32; then the
    values in C order. Source: http://yann.lecun.com/exdb/mnist/, "The IDX file format".

    Returns a writable uint8 array of the shape that the file states. Raises UserError, which names the file, when it
    cannot be read or is damaged.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)  # checks gzip's CRC-32 and length
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, f"gzip: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; put a good file in its place") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != 8 or data[3] == 0:
        raise damaged(path, f"not an IDX file of unsigned bytes, it starts with {data[:4].hex() or 'nothing'}")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise damaged(path, "truncated in its header")
    shape = [int(size) for size in np.frombuffer(data, ">u4", data[3], 4)]
    if excess := len(data) - start - math.prod(shape):
        trouble = f"truncated, {-excess} bytes are missing" if excess < 0 else f"{excess} bytes too many"
        raise damaged(path, f"{trouble} for shape {shape}")
    try:
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()
    except ValueError:  # more dimensions than NumPy has, or sizes beside a 0 that it cannot count
        raise damaged(path, f"impossible shape {shape}") from None


def damaged(path: Path, trouble: str) -> UserError:
    return UserError(f"{path} is damaged ({trouble}); delete it or put a good one in its place")


def _read(found: Found) -> Dataset:
    """The files as a Dataset, checked against each other."""
    if found.name in CIFAR_RECORDS:
        from samestep import cifar  # here, because most ranks have no use for it

        arrays = cifar.read_files(found)
    else:
        arrays = _read_idx_files(found)
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"uint8 {list(array.shape)}\n".encode())
        digest.update(array.data)
    train_images, train_labels, test_images, test_labels = arrays
    return Dataset(found.name, train_images, train_labels, test_images, test_labels, digest.hexdigest())


def _read_idx_files(found: Found) -> list[NDArray[np.uint8]]:
    arrays: list[NDArray[np.uint8]] = []
    for images_file, labels_file in (FILES[:2], FILES[2:]):
        images_path, labels_path = _path(found.folder, images_file), _path(found.folder, labels_file)
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.ndim != 3 or images.shape[1:] != (28, 28) or not len(images):
            raise damaged(images_path, f"shape {list(images.shape)}, expected [n, 28, 28] with n >= 1")
        if labels.shape != images.shape[:1]:
            raise damaged(labels_path, f"shape {list(labels.shape)}, but {images_path.name} has {len(images)} images")
        if labels.max() > 9:
            raise damaged(labels_path, f"label {labels.max()}, expected 0 to 9")
        arrays += [images, labels]
    return arrays


def _path(folder: Path, file: str) -> Path:
    """The plain file if it is there (torchvision leaves both; it is the quicker to read), else the .gz."""
    plain = folder / file
    return plain if os.path.exists(plain) else folder / f"{file}.gz"


def _files(name: str) -> tuple[str, ...]:
    return CIFAR_FILES if name in CIFAR_RECORDS else FILES


def missing(folder: Path, name: str) -> list[str]:
    """The files that the folder lacks under either name; all of them if there is no such folder."""
    try:
        present = os.listdir(folder)
    except FileNotFoundError:
        present = []
    except OSError as error:
        raise UserError(
            f"cannot look into {folder}: {error.strerror}; make it a readable folder, or move it away"
        ) from None
    packed = "" if name in CIFAR_RECORDS else ".gz"
    return [file for file in _files(name) if file not in present and f"{file}{packed}" not in present]


def _find(name: str, data_dir: Path, fallback: bool) -> Found:
    if name not in NAMES:
        raise UserError(f"unknown data set {name!r}; choose from {', '.join(NAMES)}")
    if os.path.exists(data_dir) and not os.path.isdir(data_dir):
        raise UserError(f"the data folder {data_dir} is not a folder; name one, or one that does not exist yet")
    if name == "mnist-5k":
        return Found(name, EMBEDDED)
    if name == "synthetic-cifar10":
        from samestep import download  # here, because most ranks have no use for it

        return Found(name, download.generated(name))
    system = [SYSTEM[name]] if name in SYSTEM else []
    for folder in (data_dir / name, data_dir / TORCHVISION[name], *system):
        if not (lacking := missing(folder, name)):
            return Found(name, folder)
        if len(lacking) < len(_files(name)):
            packed = "" if name in CIFAR_RECORDS else "[.gz]"
            raise UserError(f"{folder} lacks {', '.join(f'{file}{packed}' for file in lacking)}; add what is missing")
    cache = cache_folder(name)
    if not missing(cache, name):
        return Found(name, cache)
    from samestep import download  # here, because a rank finds everything in place

    return download.fetch(name, cache, data_dir, fallback)


def cache_folder(name: str) -> Path:
    """The data set's folder in the user's cache: where it is complete, else where it can be put.

    A container's home often is none, or cannot be written: then a folder for temporary files has a cache, too. The XDG
    base directory specification says to ignore a relative path.
    """
    roots = [os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")]
    spare = Path(os.environ.get("TMPDIR") or "/tmp", f"samestep-{os.getuid()}")
    caches = [Path(root, "samestep") for root in roots if os.path.isabs(root)][:1]
    caches += [] if spare.exists() and spare.stat().st_uid != os.getuid() else [spare]
    if not caches:
        raise UserError(f"no home folder to keep data in, and {spare} is someone else's: set XDG_CACHE_HOME")
    full = (cache for cache in caches if os.path.isdir(cache / name) and not missing(cache / name, name))
    writable = (cache for cache in caches if os.access(next(filter(os.path.exists, (cache, *cache.parents))), os.W_OK))
    return (next(full, None) or next(writable, caches[0])) / name
