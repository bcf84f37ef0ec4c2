"""Where are the bytes? Data sets as files in their standard format, and as uint8 arrays in memory.

MNIST and its like are four IDX files, CIFAR-10 is the six files of its binary version.

Files are looked for in this order; plain and .gz names are both read:

1. `<data_dir>/<name>/`, then torchvision's layout, `<data_dir>/MNIST/raw` or `<data_dir>/FashionMNIST/raw`, or the
   folder of CIFAR-10's archive, `<data_dir>/cifar-10-batches-bin`;
2. where the system has them (Debian's package dataset-fashion-mnist);
3. the user's cache, `$XDG_CACHE_HOME/samestep/<name>`, by default `~/.cache/samestep/<name>`;
4. the network, into that cache: once per machine, checked against a SHA-256.

`mnist-5k`, 5,000 real MNIST digits, is part of the package. With no network it stands in for `mnist`, and says so;
for `cifar10` that is `synthetic-cifar10`, 1,280 images made up in the same format, which the first use generates.
A launch script calls `resolve` once, before it starts any rank, so that a rank's `load` finds everything in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import math
import os
import random
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
TIMEOUT = 5.0  # seconds, for each connection and each read

# CIFAR-10's binary version, and how many images each of its files has; the last is the test set.
CIFAR_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_RECORDS = {"cifar10": (10_000,) * 6, "synthetic-cifar10": (205, 205, 205, 205, 204, 256)}
CIFAR_SIDE = 32

# Tried in turn. Plain http is safe here: what arrives must have the SHA-256 below.
MIRRORS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion-mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
}
# SHA-256 of FILES, in their order, each as <file>.gz; of CIFAR-10's archive.
SHA256 = {
    "mnist": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion-mnist": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    "cifar10": ("c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",),
}


@dataclass(frozen=True)
class Found:
    """Where a data set is. `name` is the one that was found, `folder` holds its files, and `notice` is a
    sentence to show when it is not the one asked for (else None)."""

    name: str
    folder: Path
    notice: str | None


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


class _NoNetworkError(Exception):
    """No mirror gave an answer. Says why."""


def resolve(name: str, data_dir: Path, fallback: bool = True) -> Found:
    """Find the data set, download it where that is needed and possible, and read it once to know that it is whole.

    Args:
        name: one of NAMES.
        data_dir: folder to look in first; may be missing or read-only; nothing is written to it.
        fallback: when there is no network give mnist-5k for mnist, synthetic-cifar10 for cifar10, with a notice.

    Raises:
        UserError: unknown name; data_dir is a file; a folder holds only some of the files; a file is damaged; no
            network and no fallback; a download that breaks off or has the wrong checksum; a cache that cannot be
            written.
    """
    found = _find(name, data_dir, fallback)
    _read(found)
    return found


def load(name: str, data_dir: Path) -> Dataset:
    """Read and verify a data set. Looks where `resolve` looks, without fallback.

    Raises:
        UserError: as `resolve`.
    """
    return _read(_find(name, data_dir, fallback=False))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or gzipped (told by its content, not its name).

    Format: 0, 0, 8 (the code of uint8), number of dimensions; then each dimension as a big-endian uint32; then the
    values in C order. Source: http://yann.lecun.com/exdb/mnist/, "The IDX file format".

    Returns:
        uint8 array, writable, of the shape the file states.

    Raises:
        UserError: the file cannot be read or is damaged; names it.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)  # checks gzip's CRC-32 and length
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, f"gzip: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; put a good file in its place") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != 8 or data[3] == 0:
        raise _damaged(path, f"not an IDX file of unsigned bytes, it starts with {data[:4].hex() or 'nothing'}")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise _damaged(path, "truncated in its header")
    shape = [int(size) for size in np.frombuffer(data, ">u4", data[3], 4)]
    excess = len(data) - start - math.prod(shape)
    if excess:
        trouble = f"truncated, {-excess} bytes are missing" if excess < 0 else f"{excess} bytes too many"
        raise _damaged(path, f"{trouble} for shape {shape}")
    try:
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()
    except ValueError:  # more dimensions than NumPy has, or sizes beside a 0 that it cannot count
        raise _damaged(path, f"impossible shape {shape}") from None


def read_cifar(path: Path, records: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read one file of CIFAR-10's binary version.

    Format: one record an image, its label in one byte, then its red, its green and its blue plane, each 32 x 32 in C
    order. Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".

    Returns:
        images uint8 [records, 32, 32, 3], the planes now last, and labels uint8 [records].

    Raises:
        UserError: the file cannot be read or is damaged; names it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; put a good file in its place") from None
    size = 1 + 3 * CIFAR_SIDE**2
    excess = len(data) - records * size
    if excess:
        trouble = f"truncated, {-excess} bytes are missing" if excess < 0 else f"{excess} bytes too many"
        raise _damaged(path, f"{trouble} for {records} images")
    rows = np.frombuffer(data, np.uint8).reshape(records, size)
    if rows[:, 0].max() > 9:
        raise _damaged(path, f"label {rows[:, 0].max()}, expected 0 to 9")
    images = rows[:, 1:].reshape(records, 3, CIFAR_SIDE, CIFAR_SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, 0].copy()


def _damaged(path: Path, trouble: str) -> UserError:
    return UserError(f"{path} is damaged ({trouble}); delete it or put a good one in its place")


def _read(found: Found) -> Dataset:
    """The files as a Dataset, checked against each other."""
    arrays = _read_cifar_files(found) if found.name in CIFAR_RECORDS else _read_idx_files(found)
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"uint8 {list(array.shape)}\n".encode())
        digest.update(array.data)
    train_images, train_labels, test_images, test_labels = arrays
    return Dataset(found.name, train_images, train_labels, test_images, test_labels, digest.hexdigest())


def _read_cifar_files(found: Found) -> list[NDArray[np.uint8]]:
    files = [read_cifar(found.folder / file, records) for file, records in zip(CIFAR_FILES, CIFAR_RECORDS[found.name])]
    images, labels = zip(*files[:-1])
    return [np.concatenate(images), np.concatenate(labels), *files[-1]]


def _read_idx_files(found: Found) -> list[NDArray[np.uint8]]:
    arrays: list[NDArray[np.uint8]] = []
    for images_file, labels_file in (FILES[:2], FILES[2:]):
        images_path, labels_path = _path(found.folder, images_file), _path(found.folder, labels_file)
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.ndim != 3 or images.shape[1:] != (28, 28) or not len(images):
            raise _damaged(images_path, f"shape {list(images.shape)}, expected [n, 28, 28] with n >= 1")
        if labels.shape != images.shape[:1]:
            raise _damaged(labels_path, f"shape {list(labels.shape)}, but {images_path.name} has {len(images)} images")
        if labels.max() > 9:
            raise _damaged(labels_path, f"label {labels.max()}, expected 0 to 9")
        arrays += [images, labels]
    return arrays


def _path(folder: Path, file: str) -> Path:
    """The plain file if it is there (torchvision leaves both; it is the quicker to read), else the .gz."""
    plain = folder / file
    return plain if os.path.exists(plain) else folder / f"{file}.gz"


def _files(name: str) -> tuple[str, ...]:
    return CIFAR_FILES if name in CIFAR_RECORDS else FILES


def _missing(folder: Path, name: str) -> list[str]:
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
        return Found(name, EMBEDDED, None)
    if name == "synthetic-cifar10":
        return Found(name, _generated(name), None)
    system = [SYSTEM[name]] if name in SYSTEM else []
    for folder in (data_dir / name, data_dir / TORCHVISION[name], *system):
        missing = _missing(folder, name)
        if not missing:
            return Found(name, folder, None)
        if len(missing) < len(_files(name)):
            packed = "" if name in CIFAR_RECORDS else "[.gz]"
            raise UserError(f"{folder} lacks {', '.join(f'{file}{packed}' for file in missing)}; add what is missing")
    cache = _cache() / name
    try:
        if _missing(cache, name):
            with _alone(name, cache):
                _download(name, cache)
    except _NoNetworkError as error:
        if name == "mnist" and fallback:
            return Found(
                "mnist-5k",
                EMBEDDED,
                f"MNIST could not be downloaded ({error}): using the embedded sample mnist-5k instead, 4,000 training "
                f"and 1,000 test images; for all of MNIST put its four files in {data_dir / name}",
            )
        if name == "cifar10" and fallback:
            return Found(
                "synthetic-cifar10",
                _generated("synthetic-cifar10"),
                f"CIFAR-10 could not be downloaded ({error}): using synthetic-cifar10 instead, 1,024 training and 256 "
                f"test images that are made up; for CIFAR-10 unpack {CIFAR_ARCHIVE} in {data_dir}",
            )
        if name == "cifar10":
            raise UserError(
                f"cannot download {name} ({error}); choose synthetic-cifar10, or unpack {CIFAR_ARCHIVE} in {data_dir}"
            ) from None
        package = "install Debian's package dataset-fashion-mnist" if name in SYSTEM else "choose mnist-5k"
        files = ", ".join(f"{file}.gz" for file in FILES)
        raise UserError(f"cannot download {name} ({error}); {package}, or put {files} in {data_dir / name}") from None
    return Found(name, cache, None)


def _cache() -> Path:
    """The XDG base directory specification says to ignore a relative path."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):
        root = os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        raise UserError("no home folder to keep downloaded data in; set XDG_CACHE_HOME to an absolute path")
    return Path(root, "samestep")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into the caller's mistake that it is here: a full disk, or a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the data cache {folder}: {error.strerror}; make room there, or set XDG_CACHE_HOME elsewhere"
        ) from None


@contextlib.contextmanager
def _alone(name: str, folder: Path) -> Iterator[None]:
    """Fill a folder of the cache, one process at a time; one that had to wait finds the work done."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that puts {name} in {folder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: files are renamed into place whole, so at worst each is fetched twice
        for stale in folder.glob("*.part"):  # of a process that was killed: it would hold the lock if it were alive
            stale.unlink(missing_ok=True)
        yield


def _download(name: str, folder: Path) -> None:
    """Fetch what the folder lacks."""
    if name == "cifar10":
        if _missing(folder, name):
            _fetch(name, CIFAR_ARCHIVE, SHA256[name][0], folder)
            _unpack(folder)
        return
    for file, sha256 in zip(FILES, SHA256[name]):
        if file in _missing(folder, name):
            _fetch(name, f"{file}.gz", sha256, folder)


def _unpack(folder: Path) -> None:
    """CIFAR-10's files out of its archive, whose checksum is known to be right; the archive goes."""
    archive = folder / CIFAR_ARCHIVE
    with _writing(folder), tarfile.open(archive) as tar:
        for member in tar:
            file = Path(member.name).name
            content = tar.extractfile(member) if file in CIFAR_FILES else None
            if content:
                _write(folder / file, content.read())
    archive.unlink()


def _generated(name: str) -> Path:
    """The folder of the made-up data set, generated if it is not there: in CIFAR-10's format, the same everywhere."""
    folder = _cache() / name
    if _missing(folder, name):
        with _alone(name, folder), _writing(folder):
            for file, content in zip(CIFAR_FILES, _made_up(CIFAR_RECORDS[name])):
                _write(folder / file, content)
    return folder


def _made_up(counts: tuple[int, ...]) -> Iterator[bytes]:
    """Files of ``counts`` images of ten classes. Each class is a coarse pattern of 4 x 4 colours, under heavy noise.

    Python promises that its generator gives the same bytes in every version; NumPy does not.
    """
    draw = random.Random("synthetic-cifar10").randbytes
    patterns = np.frombuffer(draw(10 * 3 * 16), np.uint8).reshape(10, 3, 4, 4)
    patterns = patterns.repeat(CIFAR_SIDE // 4, axis=2).repeat(CIFAR_SIDE // 4, axis=3).astype(np.uint16)
    for count in counts:
        labels = np.arange(count, dtype=np.uint8) % 10
        noise = np.frombuffer(draw(count * 3 * CIFAR_SIDE**2), np.uint8).reshape(count, 3, CIFAR_SIDE, CIFAR_SIDE)
        images = ((patterns[labels] + 2 * noise.astype(np.uint16)) // 3).astype(np.uint8)
        yield np.concatenate([labels[:, None], images.reshape(count, -1)], axis=1).tobytes()


def _write(path: Path, content: bytes) -> None:
    """A file of the cache, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _fetch(name: str, file: str, sha256: str, folder: Path) -> None:
    """One file from the first mirror that gives it whole. A mirror that gave something else makes it an error; only
    if none gave anything is there no network."""
    failure: Exception | None = None
    for mirror in MIRRORS[name]:
        url = mirror + file
        try:
            response = urllib.request.urlopen(url, timeout=TIMEOUT)
        except (OSError, http.client.HTTPException) as error:  # URLError, HTTPError and timeouts are OSErrors
            if failure is None:
                failure = _NoNetworkError(f"{url}: {getattr(error, 'reason', None) or error}")
            continue
        with response:
            trouble = _save(response, folder / file, sha256)
        if trouble is None:
            return
        if not isinstance(failure, UserError):
            failure = UserError(f"download of {url} failed: {trouble}; try again, or put the files in place by hand")
    raise failure or _NoNetworkError("no mirror is known")


def _save(response: Any, target: Path, sha256: str) -> str | None:
    """Write the response's body to the target, whole and verified or not at all; says what went wrong, if it did."""
    from tqdm import tqdm  # here, because only downloads need it

    length = response.headers.get("Content-Length")
    total = int(length) if length and length.isdigit() else None
    digest = hashlib.sha256()
    done = 0
    temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
    # disable=None: a bar on a terminal only
    bar = tqdm(desc=target.name, total=total, unit="B", unit_scale=True, disable=None)
    try:
        with _writing(target.parent), open(temporary, "wb") as file, bar:
            while True:
                try:
                    chunk = response.read(1 << 16)
                except (OSError, http.client.HTTPException) as error:
                    return f"it broke off after {done} bytes ({error})"
                if not chunk:
                    break
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                bar.update(len(chunk))
            if total is not None and done < total:
                return f"it broke off after {done} of {total} bytes"
            if digest.hexdigest() != sha256:
                return f"its SHA-256 is {digest.hexdigest()}, expected {sha256}"
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        return None
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
