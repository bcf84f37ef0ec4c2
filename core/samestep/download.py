"""Where do the bytes come from? The user's cache, filled from the network or, with the made-up data set, right here.

`datasets` imports this only where the cache lacks a file, so that a rank, which finds everything in place, never does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import random
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from samestep import UserError, datasets

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


class NoNetworkError(Exception):
    """No mirror gave an answer. Says why."""


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


def fetch(name: str, cache: Path, data_dir: Path, fallback: bool) -> datasets.Found:
    """The data set, in the user's cache from here on; with ``fallback`` what stands in for it where no network is.

    Raises UserError as `datasets.resolve` says.
    """
    try:
        fill(name, cache)
    except NoNetworkError as error:
        if name == "mnist" and fallback:
            return datasets.Found(
                "mnist-5k",
                datasets.EMBEDDED,
                f"MNIST could not be downloaded ({error}): using the embedded sample mnist-5k instead, 4,000 training "
                f"and 1,000 test images; for all of MNIST put its four files in {data_dir / name}",
            )
        if name == "cifar10" and fallback:
            return datasets.Found(
                "synthetic-cifar10",
                generated("synthetic-cifar10"),
                f"CIFAR-10 could not be downloaded ({error}): using synthetic-cifar10 instead, 1,024 training and 256 "
                f"test images that are made up; for CIFAR-10 unpack {datasets.CIFAR_ARCHIVE} in {data_dir}",
            )
        if name == "cifar10":
            raise UserError(
                f"cannot download {name} ({error}); choose synthetic-cifar10, or unpack {datasets.CIFAR_ARCHIVE} in "
                f"{data_dir}"
            ) from None
        package = "install Debian's package dataset-fashion-mnist" if name in datasets.SYSTEM else "choose mnist-5k"
        files = ", ".join(f"{file}.gz" for file in datasets.FILES)
        raise UserError(f"cannot download {name} ({error}); {package}, or put {files} in {data_dir / name}") from None
    return datasets.Found(name, cache)


def fill(name: str, folder: Path) -> None:
    """Fetch what the folder of the cache lacks. Raises NoNetworkError, and UserError as `datasets.resolve` says."""
    with _alone(name, folder):
        if name == "cifar10":
            if datasets.missing(folder, name):
                _fetch(name, datasets.CIFAR_ARCHIVE, SHA256[name][0], folder)
                _unpack(folder)
            return
        for file, sha256 in zip(datasets.FILES, SHA256[name]):
            if file in datasets.missing(folder, name):
                _fetch(name, f"{file}.gz", sha256, folder)


def generated(name: str) -> Path:
    """The folder of the made-up data set, generated if it is not there."""
    folder = datasets.cache_folder(name)
    if datasets.missing(folder, name):
        generate(name, folder)
    return folder


def generate(name: str, folder: Path) -> None:
    """Fill a folder of the cache with the made-up data set: in CIFAR-10's format, the same everywhere."""
    with _alone(name, folder), _writing(folder):
        for file, content in zip(datasets.CIFAR_FILES, _made_up(datasets.CIFAR_RECORDS[name])):
            _write(folder / file, content)


def _unpack(folder: Path) -> None:
    """CIFAR-10's files out of its archive, whose checksum is known to be right; the archive goes."""
    archive = folder / datasets.CIFAR_ARCHIVE
    with _writing(folder), tarfile.open(archive) as tar:
        for member in tar:
            file = Path(member.name).name
            content = tar.extractfile(member) if file in datasets.CIFAR_FILES else None
            if content:
                _write(folder / file, content.read())
    archive.unlink()


def _made_up(counts: tuple[int, ...]) -> Iterator[bytes]:
    """Files of ``counts`` images of ten classes. Each class is a coarse pattern of 4 x 4 colours, under heavy noise.

    Python promises that its generator gives the same bytes in every version; NumPy does not.
    """
    draw = random.Random("synthetic-cifar10").randbytes
    patterns = np.frombuffer(draw(10 * 3 * 16), np.uint8).reshape(10, 3, 4, 4)
    patterns = (
        patterns.repeat(datasets.CIFAR_SIDE // 4, axis=2).repeat(datasets.CIFAR_SIDE // 4, axis=3).astype(np.uint16)
    )
    for count in counts:
        labels = np.arange(count, dtype=np.uint8) % 10
        noise = np.frombuffer(draw(count * 3 * datasets.CIFAR_SIDE**2), np.uint8).reshape(
            count, 3, datasets.CIFAR_SIDE, datasets.CIFAR_SIDE
        )
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
                failure = NoNetworkError(f"{url}: {getattr(error, 'reason', None) or error}")
            continue
        with response:
            trouble = _save(response, folder / file, sha256)
        if trouble is None:
            return
        if not isinstance(failure, UserError):
            failure = UserError(f"download of {url} failed: {trouble}; try again, or put the files in place by hand")
    raise failure or NoNetworkError("no mirror is known")


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
