"""Where are the bytes? Data sets as files in their standard format (IDX), and as uint8 arrays in memory.

Files are looked for in this order; plain and .gz names are both read:

1. `<data_dir>/<name>/`, then torchvision's layout, `<data_dir>/MNIST/raw` or `<data_dir>/FashionMNIST/raw`;
2. where the system has them (Debian's package dataset-fashion-mnist);
3. the user's cache, `$XDG_CACHE_HOME/samestep/<name>`, by default `~/.cache/samestep/<name>`;
4. the network, into that cache: once per machine, checked against a SHA-256.

`mnist-5k`, 5,000 real MNIST digits, is part of the package. With no network it stands in for `mnist`, and says so.
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
import sys
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

NAMES = ("mnist", "fashion-mnist", "mnist-5k")

# Mean and standard deviation of MNIST's training pixels, scaled to [0, 1]; all data sets here are normalised by them.
MEAN = 0.1307
STD = 0.3081

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
EMBEDDED = Path(__file__).parent / "data" / "mnist-5k"
TIMEOUT = 5.0  # seconds, for each connection and each read

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
}
# SHA-256 of FILES, in their order, each as <file>.gz.
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
}


@dataclass(frozen=True)
class Found:
    """Where a data set is. `name` is the one that was found, `folder` holds its four IDX files, and `notice` is a
    sentence to show when it is not the one asked for (else None)."""

    name: str
    folder: Path
    notice: str | None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory: images uint8 [n, 28, 28], 0 is background; labels uint8 [n], 0 to 9; n >= 1 in both sets.

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
        fallback: give mnist-5k, with a notice, for mnist when there is no network.

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


def _damaged(path: Path, trouble: str) -> UserError:
    return UserError(f"{path} is damaged ({trouble}); delete it or put a good one in its place")


def _read(found: Found) -> Dataset:
    """The four files as a Dataset, checked against each other."""
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
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"uint8 {list(array.shape)}\n".encode())
        digest.update(array.data)
    train_images, train_labels, test_images, test_labels = arrays
    return Dataset(found.name, train_images, train_labels, test_images, test_labels, digest.hexdigest())


def _path(folder: Path, file: str) -> Path:
    """The plain file if it is there (torchvision leaves both; it is the quicker to read), else the .gz."""
    plain = folder / file
    return plain if os.path.exists(plain) else folder / f"{file}.gz"


def _missing(folder: Path) -> list[str]:
    """Those of FILES that the folder lacks under either name; all of them if there is no such folder."""
    try:
        present = os.listdir(folder)
    except FileNotFoundError:
        present = []
    except OSError as error:
        raise UserError(
            f"cannot look into {folder}: {error.strerror}; make it a readable folder, or move it away"
        ) from None
    return [file for file in FILES if file not in present and f"{file}.gz" not in present]


def _find(name: str, data_dir: Path, fallback: bool) -> Found:
    if name not in NAMES:
        raise UserError(f"unknown data set {name!r}; choose from {', '.join(NAMES)}")
    if os.path.exists(data_dir) and not os.path.isdir(data_dir):
        raise UserError(f"the data folder {data_dir} is not a folder; name one, or one that does not exist yet")
    if name == "mnist-5k":
        return Found(name, EMBEDDED, None)
    system = [SYSTEM[name]] if name in SYSTEM else []
    for folder in (data_dir / name, data_dir / TORCHVISION[name], *system):
        missing = _missing(folder)
        if not missing:
            return Found(name, folder, None)
        if len(missing) < len(FILES):
            raise UserError(f"{folder} lacks {', '.join(f'{file}[.gz]' for file in missing)}; add what is missing")
    cache = _cache() / name
    try:
        if _missing(cache):
            _download(name, cache)
    except _NoNetworkError as error:
        if name == "mnist" and fallback:
            return Found(
                "mnist-5k",
                EMBEDDED,
                f"MNIST could not be downloaded ({error}): using the embedded sample mnist-5k instead, 4,000 training "
                f"and 1,000 test images; for all of MNIST put its four files in {data_dir / name}",
            )
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


def _download(name: str, folder: Path) -> None:
    """Fetch what the folder lacks, one process at a time; one that had to wait finds the work done."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that downloads {name} to {folder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: files are renamed into place whole, so at worst each is fetched twice
        for stale in folder.glob("*.part"):  # of a process that was killed: it would hold the lock if it were alive
            stale.unlink(missing_ok=True)
        for file, sha256 in zip(FILES, SHA256[name]):
            if file in _missing(folder):
                _fetch(name, f"{file}.gz", sha256, folder)


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
