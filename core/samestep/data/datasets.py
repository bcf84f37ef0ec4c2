"""Find the files of datasets in their standard formats, and read them as uint8 arrays.

MNIST and Fashion-MNIST consist of four IDX files each. CIFAR-10 consists of six files in its binary version.

`resolve` searches these places in order, for plain and gzipped files:

1. In `<data_dir>`: the folder `<name>`, then torchvision's folder (`MNIST/raw` or `FashionMNIST/raw`) or the folder of
   CIFAR-10's archive (`cifar-10-batches-bin`), then `<data_dir>` itself. `resolve` also finds MNIST's files under
   Kaggle's names: `train-images.idx3-ubyte` may be a file, or a folder that contains the file. If the dataset is
   incomplete, or files with other names seem to belong to it, `resolve` raises ConfigError.
2. The folder of Debian's package dataset-fashion-mnist.
3. The user's cache `$XDG_CACHE_HOME/samestep/<name>`, by default `~/.cache/samestep/<name>`. If the cache is not
   writable, `$TMPDIR/samestep-<user id>/<name>` (by default in `/tmp`) replaces the cache.
4. The network. The files are downloaded to the cache, and their SHA-256 is verified.

If no mirror is available and the user chose no dataset, `resolve` replaces the default dataset and returns a notice.
`mnist-5k`, 5,000 MNIST digits in this package, replaces `mnist`. `synthetic-cifar10`, 1,280 generated images in
CIFAR-10's format, replaces `cifar10`; the files are generated at its first use. A launch script calls `resolve` before
it starts ranks, so that all files exist when a rank calls `load`.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep import ConfigError
from samestep.data import files
from samestep.data.files import MNIST_FILES, DatasetInfo, damaged, missing
from samestep.job_info import JobInfo
from samestep.untrusted import own_folder

NAMES = ("mnist", "fashion-mnist", "mnist-5k", "cifar10", "synthetic-cifar10")

# Mean and standard deviation of MNIST's training pixels, scaled to [0, 1]. Apps normalize every MNIST-like dataset by
# these values.
MEAN = 0.1307
STD = 0.3081

TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-bin"}
SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
EMBEDDED = Path(__file__).parent / "mnist-5k"
SHOWN_NAMES = 4  # maximum number of file names in an error message


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory. The training set and the test set have at least one image each.

    Attributes:
        name: name of the dataset, one of NAMES.
        train_images: uint8 [n, 28, 28] with background 0; for CIFAR-10, [n, 32, 32, 3] in the order red, green, blue.
        train_labels: uint8 [n], 0 to 9.
        test_images: as ``train_images``.
        test_labels: as ``train_labels``.
        fingerprint: SHA-256, in hexadecimal, of the four arrays and their shapes.
    """

    name: str
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]
    fingerprint: str


def resolve(name: str, data_dir: Path, fallback: bool = True) -> DatasetInfo:
    """Find a dataset, download it if it is missing, and read it once to verify it.

    Args:
        name: name of the dataset, one of NAMES.
        data_dir: the folder to search first. The folder may be missing or read-only.
        fallback: whether to replace mnist by mnist-5k, and cifar10 by synthetic-cifar10, if no mirror is available.

    Returns:
        Name, folder and fingerprint of the dataset, with a notice if it replaces the requested one.

    Raises:
        ConfigError: the name is unknown, data_dir is a file, files are missing or damaged, the download fails, or the
            cache is not writable.
    """
    info = _find(name, data_dir, fallback)
    return info._replace(fingerprint=_read(info).fingerprint)


def load(name: str, data_dir: Path) -> Dataset:
    """Find a dataset as `resolve` does, without fallback, and read it.

    Raises:
        ConfigError: as in `resolve`.
    """
    return _read(_find(name, data_dir, fallback=False))


def read_idx(path: Path, check: Callable[[list[int]], str] = lambda shape: "") -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or gzipped. Detect gzip by the content, not by the file's name.

    The file begins with the bytes 0, 0, 8 (the code of uint8) and the number of dimensions. The dimensions follow as
    big-endian uint32, and then the values in C order. Source: http://yann.lecun.com/exdb/mnist/, "The IDX file format".

    Args:
        path: path of the file.
        check: function that returns an error for an invalid shape, else "". `read_idx` calls it with the header's
            shape before it reads the values.

    Returns:
        A writable uint8 array with the shape from the file.

    Raises:
        ConfigError: the file cannot be read or is damaged; the message has the path.
    """
    with files.opened(path) as file:
        start = file.read(4)
        if len(start) < 4 or start[:3] != b"\0\0\x08" or start[3] == 0:
            raise damaged(path, f"not an IDX file of unsigned bytes, it starts with {start.hex() or 'nothing'}")
        sizes = file.read(4 * start[3])
        if len(sizes) < 4 * start[3]:
            raise damaged(path, "truncated in its header")
        shape = [int(size) for size in np.frombuffer(sizes, ">u4")]
        problem = check(shape)
        if problem:
            raise damaged(path, f"shape {shape}, {problem}")
        data = files.read_rest(file, path, math.prod(shape), f"shape {shape}")
    try:
        return np.frombuffer(data, np.uint8).reshape(shape)
    except ValueError:  # too many dimensions for NumPy, or a 0 among dimensions whose product overflows
        raise damaged(path, f"impossible shape {shape}") from None


def _read(info: DatasetInfo) -> Dataset:
    """Read the files of a dataset, and check that images and labels match."""
    records = files.CIFAR_RECORDS.get(info.name)
    if records:
        from samestep.data import cifar

        arrays = cifar.read_files(info.folder, records)
    else:
        train_images_file, train_labels_file, test_images_file, test_labels_file = MNIST_FILES
        arrays = _read_split(info.folder, train_images_file, train_labels_file)
        arrays += _read_split(info.folder, test_images_file, test_labels_file)
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"uint8 {list(array.shape)}\n".encode())
        digest.update(array.data)
    train_images, train_labels, test_images, test_labels = arrays
    return Dataset(info.name, train_images, train_labels, test_images, test_labels, digest.hexdigest())


def _read_split(folder: Path, images_file: str, labels_file: str) -> list[NDArray[np.uint8]]:
    images_path = files.path_of(folder, images_file)
    labels_path = files.path_of(folder, labels_file)
    images = read_idx(images_path, _check_images)

    def check_labels(shape: list[int]) -> str:
        if shape == [len(images)]:
            return ""
        return f"but {images_path.name} has {len(images)} images"

    labels = read_idx(labels_path, check_labels)
    if labels.max() > 9:
        raise damaged(labels_path, f"label {labels.max()}, expected 0 to 9")
    return [images, labels]


def _check_images(shape: list[int]) -> str:
    if shape[1:] == [28, 28] and shape[0] > 0:
        return ""
    return "expected [n, 28, 28] with n >= 1"


def _find(name: str, data_dir: Path, fallback: bool) -> DatasetInfo:
    if name not in NAMES:
        raise ConfigError(f"unknown dataset {name!r}: choose from {', '.join(NAMES)}")
    _check_data_dir(data_dir)
    if name == "mnist-5k":
        return DatasetInfo(name, EMBEDDED)
    if name == "synthetic-cifar10":
        return DatasetInfo(name, _synthetic_cifar())
    given = _find_given(name, data_dir)
    if given:
        return DatasetInfo(name, given)
    if name in SYSTEM and _has_files(SYSTEM[name], name):
        return DatasetInfo(name, SYSTEM[name])
    cache = cache_folder(name)
    if missing(cache, name):
        from samestep.data import download  # if the cache has the files, a rank does not need this module

        try:
            download.fill(name, cache)
        except download.NoNetworkError as error:
            substitute, notice = download.substitute(name, data_dir, fallback, error)
            return _find(substitute, data_dir, fallback)._replace(notice=notice)
    return DatasetInfo(name, cache)


def _check_data_dir(data_dir: Path) -> None:
    """Raise ConfigError if the data folder is a file, or its status cannot be read. The folder may be missing."""
    try:
        status = os.stat(data_dir)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot look into the data folder {data_dir}: {error.strerror}: name another one") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the data folder {data_dir} is not a folder: name a folder or a new path")


def _find_given(name: str, data_dir: Path) -> Path | None:
    """Return the folder in or below ``data_dir`` that has the dataset's files, or None.

    Raises:
        ConfigError: a folder has only some of the files, or files with other names seem to belong to the dataset.
            Without this error, a run would ignore the data that the user put into ``data_dir``.
    """
    for folder in (data_dir / name, data_dir / TORCHVISION[name], data_dir):
        if _has_files(folder, name):
            return folder
    strangers = files.lookalikes(data_dir, name)
    if strangers:
        shown = ", ".join(strangers[:SHOWN_NAMES])
        if len(strangers) > SHOWN_NAMES:
            shown += ", ..."
        wanted = _listed(files.names(name))
        raise ConfigError(
            f"{data_dir} has {shown}, which {name} does not read: put {wanted} in {data_dir / name}, or name another "
            "--data-dir"
        )
    return None


def _has_files(folder: Path, name: str) -> bool:
    """Return whether a folder has all files of the dataset.

    Raises:
        ConfigError: the folder has only some of the files.
    """
    lacking = missing(folder, name)
    if 0 < len(lacking) < len(files.names(name)):
        raise ConfigError(f"{folder} lacks {_listed(lacking)}: add them")
    return not lacking


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name if name in files.CIFAR_FILES else f"{name}[.gz]" for name in names)


def _synthetic_cifar() -> Path:
    """Return the folder of the generated dataset. Generate the files if they are missing."""
    folder = cache_folder("synthetic-cifar10")
    if missing(folder, "synthetic-cifar10"):
        from samestep.data import download

        download.generate("synthetic-cifar10", folder)
    return folder


def cache_folder(name: str) -> Path:
    """Return the dataset's folder in a cache: the first one with all files, else the first writable, else the first.

    In a container, the user may have no writable home. Then the cache is in the folder for temporary files.
    """
    caches = _caches()
    for cache in caches:
        folder = cache / name
        if os.path.isdir(folder) and not missing(folder, name):
            return folder
    for cache in caches:
        if _is_writable(cache):
            return cache / name
    return caches[0] / name


def _caches() -> list[Path]:
    """Return the usable caches: the user's cache, then the cache in the folder for temporary files.

    According to the XDG base directory specification, a relative XDG_CACHE_HOME is ignored.

    Raises:
        ConfigError: neither cache is usable.
    """
    caches = []
    for root in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(root):
            caches.append(Path(root, "samestep"))
            break
    # The launch script deletes the job's TMPDIR at the end of the job, so the cache is in the user's TMPDIR.
    temporary_root = JobInfo.from_environ(os.environ).tmpdir or os.environ.get("TMPDIR") or "/tmp"
    temporary = Path(temporary_root, f"samestep-{os.getuid()}")
    if _is_own(temporary):
        caches.append(temporary)
    if not caches:
        raise ConfigError(f"no home folder to keep data in, and {temporary} is someone else's: set XDG_CACHE_HOME")
    return caches


def _is_writable(folder: Path) -> bool:
    """Return whether this user can write to a folder, or create it if it is missing."""
    for existing in (folder, *folder.parents):
        if os.path.exists(existing):
            return os.access(existing, os.W_OK)
    return False


def _is_own(folder: Path) -> bool:
    """Return whether this user owns a folder that is not world-writable. Create the folder if it is missing."""
    status = own_folder(folder)
    return status is not None and not status.st_mode & stat.S_IWOTH
