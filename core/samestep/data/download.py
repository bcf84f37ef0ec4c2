"""Download datasets to the user's cache, or generate the synthetic dataset.

`datasets` imports this module only if a file is missing in the cache. A launch script fills the cache before it starts
ranks, so these ranks do not import the module.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import io
import math
import os
import random
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from samestep import ConfigError
from samestep.data import files
from samestep.data.files import CIFAR_ARCHIVE, CIFAR_FILES, CIFAR_SIDE, MNIST_FILES

TIMEOUT = 5.0  # maximum seconds for each connection and each read
LOCK_TIMEOUT = 900.0  # maximum seconds to wait for another process's download
MAX_BYTES = 200_000_000  # maximum size of a file; the largest file, CIFAR-10's archive, has 170 MB

# Mirrors by dataset, in the order in which they are tried. Plain http is safe, because SHA-256 is verified.
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
# SHA-256 of each of MNIST_FILES as <file>.gz, in their order, and of CIFAR-10's archive.
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


class NoNetworkError(Exception):
    """No mirror is available: each is unreachable or returns an HTTP error. The message has the first reason."""


def substitute(name: str, data_dir: Path, fallback: bool, error: NoNetworkError) -> tuple[str, str]:
    """Choose the dataset that replaces ``name`` if no mirror is available.

    Args:
        name: name of the dataset.
        data_dir: folder that was searched.
        fallback: whether another dataset may replace the requested one.
        error: the error of the download.

    Returns:
        (name of the replacement, notice for the user).

    Raises:
        ConfigError: the dataset has no replacement, or ``fallback`` is False.
    """
    if name == "mnist" and fallback:
        sample = "using the embedded sample mnist-5k instead, 4,000 training and 1,000 test images; for all of MNIST"
        return "mnist-5k", f"MNIST could not be downloaded ({error}): {sample} put its four files in {data_dir / name}"
    if name == "cifar10" and fallback:
        sample = "using synthetic-cifar10 instead, 1,024 training and 256 test images that are made up; for CIFAR-10"
        remedy = f"unpack {CIFAR_ARCHIVE} in {data_dir}"
        return "synthetic-cifar10", f"CIFAR-10 could not be downloaded ({error}): {sample} {remedy}"
    remedy = f"put {', '.join(f'{file}.gz' for file in MNIST_FILES)} in {data_dir / name}"
    remedies = {
        "mnist": f"choose mnist-5k, or {remedy}",
        "fashion-mnist": f"install Debian's package dataset-fashion-mnist, or {remedy}",
        "cifar10": f"choose synthetic-cifar10, or unpack {CIFAR_ARCHIVE} in {data_dir}",
    }
    raise ConfigError(f"cannot download {name} ({error}): {remedies[name]}") from None


class _BrokenDownloadError(Exception):
    """A mirror sent an incomplete or wrong file. The message has the reason."""


def fill(name: str, folder: Path) -> None:
    """Download the missing files of a dataset to its folder in the cache.

    Raises:
        NoNetworkError: no mirror is available.
        ConfigError: a download fails or has the wrong checksum, or the folder cannot be written.
    """
    with _locked(name, folder):
        lacking = files.missing(folder, name)
        if name == "cifar10" and lacking:
            _unpack_cifar(_download(name, CIFAR_ARCHIVE, SHA256[name][0]), folder)
        elif name != "cifar10":
            for file, sha256 in zip(MNIST_FILES, SHA256[name]):
                if file in lacking:
                    _write(folder / f"{file}.gz", _download(name, f"{file}.gz", sha256))


def _unpack_cifar(archive: bytes, folder: Path) -> None:
    """Write the CIFAR-10 files of an archive to ``folder``, and ignore all other files."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = Path(member.name).name
            if file not in CIFAR_FILES:
                continue
            content = tar.extractfile(member)
            if content is not None:
                _write(folder / file, content.read())


def generate(name: str, folder: Path) -> None:
    """Write a synthetic dataset in CIFAR-10's format, with the same bytes on every machine, to a folder in the cache.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with _locked(name, folder):
        for file, content in zip(CIFAR_FILES, _generated_files(files.CIFAR_RECORDS[name])):
            _write(folder / file, content)


def _generated_files(counts: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the content of a file for each number of images in ``counts``.

    Each of the ten classes has a pattern of 4 x 4 colors. Each image is a weighted mean: 1/3 pattern and 2/3 noise.
    Python's generator provides the random bytes, because the stream of NumPy's Generator may change between versions.
    """
    draw = random.Random("synthetic-cifar10").randbytes
    patterns = np.frombuffer(draw(10 * 3 * 16), np.uint8).reshape(10, 3, 4, 4)
    scale = CIFAR_SIDE // 4
    patterns = patterns.repeat(scale, axis=2).repeat(scale, axis=3).astype(np.uint16)
    for count in counts:
        labels = np.arange(count, dtype=np.uint8) % 10
        noise = np.frombuffer(draw(count * patterns[0].size), np.uint8).reshape(count, *patterns[0].shape)
        images = ((patterns[labels] + 2 * noise.astype(np.uint16)) // 3).astype(np.uint8)
        yield np.concatenate([labels[:, None], images.reshape(count, -1)], axis=1).tobytes()


def _download(name: str, file: str, sha256: str) -> bytes:
    """Download a file from the first mirror that sends it completely, and return its content.

    Raises:
        ConfigError: all mirrors fail, and at least one of them sent an incomplete or wrong file.
        NoNetworkError: no mirror is available.
    """
    broken: list[Exception] = []
    unreachable: list[Exception] = []
    for url in [mirror + file for mirror in MIRRORS[name]]:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                return _read_verified(response, file, sha256)
        except _BrokenDownloadError as error:
            remedy = "try again, or put the files in place by hand"
            broken.append(ConfigError(f"download of {url} failed: {error}: {remedy}"))
        except (OSError, http.client.HTTPException) as error:  # URLError, HTTPError and timeouts are OSErrors
            unreachable.append(NoNetworkError(f"{url}: {getattr(error, 'reason', None) or error}"))
    raise [*broken, *unreachable, NoNetworkError("no mirror is known")][0]


def _read_verified(response: Any, file: str, sha256: str) -> bytes:
    """Return the body of a response.

    Raises:
        _BrokenDownloadError: the body is incomplete, exceeds MAX_BYTES, or has another SHA-256.
    """
    length = response.headers.get("Content-Length") or ""
    total = int(length) if length.isdigit() else None
    content = bytearray()
    with tqdm(desc=file, total=total, unit="B", unit_scale=True, disable=None) as bar:  # show only on a terminal
        try:
            while chunk := response.read(1 << 16):
                content += chunk
                bar.update(len(chunk))
                if len(content) > MAX_BYTES:
                    raise _BrokenDownloadError(f"it has more than {MAX_BYTES} bytes")
        except (OSError, http.client.HTTPException) as error:
            raise _BrokenDownloadError(f"it broke off after {len(content)} bytes ({error})") from None
    if total is not None and len(content) < total:
        raise _BrokenDownloadError(f"it broke off after {len(content)} of {total} bytes")
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise _BrokenDownloadError(f"its SHA-256 is {digest}, expected {sha256}")
    return bytes(content)


@contextlib.contextmanager
def _locked(name: str, folder: Path) -> Iterator[None]:
    """Lock a folder in the cache, so that one process at a time fills it.

    Raises:
        ConfigError: the folder cannot be written, or another process holds the lock for too long.
    """
    path = folder / ".lock"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Mode 600 prevents a lock by another user. O_NOFOLLOW and O_NONBLOCK protect against a link or a FIFO.
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), "rb", 0)
    with lock:
        _wait_for(lock, path, name)
        for stale in folder.glob("*.part"):  # files of killed processes: a running process would hold the lock
            with contextlib.suppress(OSError):
                stale.unlink()
        yield


def _wait_for(lock: IO[bytes], path: Path, name: str) -> None:
    """Lock a file. If the file system has no locks, return without a lock.

    Raises:
        ConfigError: another process holds the lock for more than LOCK_TIMEOUT seconds.
    """
    deadline = math.inf
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline == math.inf:
                notice = f"waiting up to {LOCK_TIMEOUT:g} s for another process that puts {name} in {path.parent}"
                print(notice, file=sys.stderr, flush=True)
                deadline = time.monotonic() + LOCK_TIMEOUT
        except OSError:
            return None  # the file system has no locks; writes are atomic, so a second download is harmless
        time.sleep(0.2)
    remedy = "end it, or set XDG_CACHE_HOME elsewhere"
    raise ConfigError(f"another process has held {path} for {LOCK_TIMEOUT:g} s: {remedy}")


def _write(path: Path, content: bytes) -> None:
    """Write a file in the cache atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    with _writing(path.parent):
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Convert an OSError, such as for a full disk, to ConfigError."""
    try:
        yield
    except OSError as error:
        remedy = "make room there, or set XDG_CACHE_HOME elsewhere"
        raise ConfigError(
            f"cannot write the data cache {error.filename or folder}: {error.strerror}: {remedy}"
        ) from None
