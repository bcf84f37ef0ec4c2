"""Test that a blocked or invalid data file causes one error line, without a wait and with little memory."""

from __future__ import annotations

import fcntl
import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import samestep

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IMAGES, LABELS = FILES[:2]
ROOM = 200 * 2**20  # bytes that a process may allocate after its imports
CHILD = f"""
import os, resource, sys
from pathlib import Path
from samestep import ConfigError
from samestep.data import datasets, download
name, data_dir, user = sys.argv[1:]
download.MIRRORS = dict.fromkeys(download.MIRRORS, ("http://127.0.0.1:1/",))
download.LOCK_TIMEOUT = 0.5
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {ROOM},) * 2)
if user and os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    print(datasets.resolve(name, Path(data_dir)).name)
except ConfigError as error:
    print("error:", error)
"""


def resolve(name: str, data_dir: Path | str, user: str = "", **environ: str) -> str:
    """Resolve a dataset in a process with little memory, and return the line that the process prints.

    If ``user`` is set and the tests run as root, the process runs as the user 65534.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHILD, name, str(data_dir), user],
        env={**os.environ, "PYTHONPATH": str(Path(samestep.__file__).parents[1]), "no_proxy": "*", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a folder that other users can read, with an empty cache and a tiny MNIST."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        (place / "data" / "mnist").mkdir(parents=True)
        for file, count in zip(FILES, (3, 3, 2, 2)):
            shape = (count, 28, 28) if "images" in file else (count,)
            (place / "data" / "mnist" / file).write_bytes(header(*shape) + bytes(count * (784 if shape[1:] else 1)))
        for name in ("cache", "tmp"):
            (place / name).mkdir()
        yield place


def header(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)


def bomb(start: bytes) -> bytes:
    """Return a gzip file of about 2 MB that expands to ``start`` and 400 MiB of zeros."""
    return gzip.compress(start) + 400 * gzip.compress(bytes(2**20), 1)


BAD_FILES: dict[str, tuple[str, bytes | int, str]] = {
    "a bomb of images": (f"{IMAGES}.gz", bomb(header(3, 28, 28)), "it has more bytes than shape [3, 28, 28]"),
    "a bomb of labels": (f"{LABELS}.gz", bomb(header(3)), "it has more bytes than shape [3]"),
    "a bomb that its header announces": (f"{LABELS}.gz", bomb(header(400 * 2**20)), "but train-images-idx3-ubyte has"),
    "a bomb in another format": (f"{LABELS}.gz", bomb(b"PK\3\4"), "it starts with 504b0304"),
    "2**31 images": (IMAGES, header(2**31, 28, 28), "truncated, 1683627180032 bytes are missing"),
    "2**31 images in gzip": (f"{IMAGES}.gz", gzip.compress(header(2**31, 28, 28)), "truncated, 1683627180032 bytes"),
    "a cut gzip": (f"{IMAGES}.gz", gzip.compress(header(3, 28, 28) + bytes(2352))[:-12], "gzip: "),
    "a terabyte": (IMAGES, 2**40, "it starts with 00000000"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_is_not_what_it_claims_costs_little_memory(place: Path, what: str) -> None:
    name, content, problem = BAD_FILES[what]
    file = place / "data" / "mnist" / name
    file.with_suffix("").unlink()
    write(file, content)
    line = resolve("mnist", place / "data")
    assert line.startswith(f"error: {file} is damaged ("), line
    assert problem in line


def test_a_cifar_file_is_read_no_further_than_its_images(place: Path) -> None:
    folder = place / "data" / "cifar10"
    folder.mkdir()
    for file in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        write(folder / file, 2**40)
    line = resolve("cifar10", place / "data")
    assert line.startswith(f"error: {folder}/data_batch_1.bin is damaged (it has more bytes than 10000 images)"), line


def write(path: Path, content: bytes | int) -> None:
    """Write bytes, or a sparse file of ``content`` zero bytes."""
    path.touch()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        os.truncate(path, content)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def unreadable(path: Path) -> None:
    path.mkdir()
    path.chmod(0)


def unreadable_file(path: Path) -> None:
    path.touch()
    path.chmod(0)


IN_THE_WAY: dict[str, tuple[Callable[[Path], object], str]] = {
    "a directory": (Path.mkdir, "Is a directory"),
    "a FIFO": (os.mkfifo, "it is not a regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    "a loop of links": (loop, "Too many levels of symbolic links"),
    "a file of mode 000": (unreadable_file, "Permission denied"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_is_in_the_way_of_a_file_is_named(place: Path, what: str, suffix: str) -> None:
    make, problem = IN_THE_WAY[what]
    file = place / "data" / "mnist" / f"{LABELS}{suffix}"
    file.with_suffix("").unlink()
    make(file)
    line = resolve("mnist", place / "data", user="another")
    # A link without a target is not a plain file, so the program looks for the .gz, which is missing.
    wanted = file.with_suffix(".gz") if what == "a loop of links" else file
    problem = "No such file or directory" if what == "a loop of links" and not suffix else problem
    assert line == f"error: cannot read {wanted}: {problem}: put a good file in its place"


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "is not a folder"),
    "a loop of links": (loop, "Too many levels of symbolic links"),
    "a folder of mode 000": (unreadable, "Permission denied"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_data_dir_that_cannot_be_looked_at_is_named(place: Path, what: str) -> None:
    make, problem = FOLDERS[what]
    make(place / "other")
    path = place / "other" / "below" if what == "a folder of mode 000" else place / "other"
    for dataset in ("mnist", "mnist-5k"):
        line = resolve(dataset, path, user="another", TMPDIR=str(place / "tmp"))
        assert line.startswith("error: "), line
        assert f"the data folder {path}" in line
        assert problem in line


def test_a_data_dir_of_too_long_a_name_is_named(place: Path) -> None:
    path = place / ("n" * 300)
    assert resolve("mnist", path).startswith(f"error: cannot look into the data folder {path}: File name too long: ")


@pytest.mark.parametrize("what", FOLDERS)
def test_what_is_in_the_way_of_a_datasets_folder_is_named(place: Path, what: str) -> None:
    folder = place / "empty" / "mnist"
    folder.parent.mkdir()
    FOLDERS[what][0](folder)
    line = resolve("mnist", folder.parent, user="another")
    assert line.startswith(f"error: cannot look into {folder}: "), line


CACHES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (Path.touch, "cannot look into {}/samestep/synthetic-cifar10: Not a directory"),
    "a FIFO": (os.mkfifo, "cannot look into {}/samestep/synthetic-cifar10: Not a directory"),
    "a loop of links": (loop, "cannot look into {}/samestep/synthetic-cifar10: Too many levels of symbolic links"),
}


@pytest.mark.parametrize("what", CACHES)
def test_what_is_in_the_way_of_the_cache_is_named(place: Path, what: str) -> None:
    make, problem = CACHES[what]
    make(place / "other")
    line = resolve("synthetic-cifar10", place, XDG_CACHE_HOME=str(place / "other"))
    assert line.startswith(f"error: {problem.format(place / 'other')}: "), line


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
@pytest.mark.parametrize("make", [unreadable, lambda path: None], ids=["a folder of mode 000", "nothing"])
def test_a_cache_that_cannot_be_made_is_among_temporary_files(place: Path, make: Callable[[Path], object]) -> None:
    make(place / "other")
    (place / "tmp").chmod(0o1777)
    found = resolve("synthetic-cifar10", place, "another", XDG_CACHE_HOME=f"{place}/other", TMPDIR=f"{place}/tmp")
    assert found == "synthetic-cifar10"
    assert (place / "tmp" / "samestep-65534").stat().st_mode & 0o777 == 0o700


def cache(place: Path) -> Path:
    """Make the cache folder of synthetic-cifar10, and return it."""
    folder = place / "cache" / "samestep" / "synthetic-cifar10"
    folder.mkdir(parents=True)
    return folder


def test_a_lock_that_is_a_fifo_is_not_waited_for(place: Path) -> None:
    os.mkfifo(cache(place) / ".lock")
    assert resolve("synthetic-cifar10", place, XDG_CACHE_HOME=str(place / "cache")) == "synthetic-cifar10"


def test_a_lock_that_is_a_link_leaves_its_target_as_it_is(place: Path) -> None:
    (place / "precious").write_text("precious")
    lock = cache(place) / ".lock"
    lock.symlink_to(place / "precious")
    line = resolve("synthetic-cifar10", place, XDG_CACHE_HOME=str(place / "cache"))
    assert line.startswith(f"error: cannot write the data cache {lock}: Too many levels of symbolic links: "), line
    assert (place / "precious").read_text() == "precious"


def test_a_lock_that_is_a_folder_is_named_and_a_partial_file_that_is_one_is_stepped_around(place: Path) -> None:
    folder = cache(place)
    (folder / "x.part").mkdir()
    (folder / ".lock").mkdir()
    line = resolve("synthetic-cifar10", place, XDG_CACHE_HOME=str(place / "cache"))
    assert line.startswith(f"error: cannot write the data cache {folder}/.lock: Is a directory: "), line
    (folder / ".lock").rmdir()
    assert resolve("synthetic-cifar10", place, XDG_CACHE_HOME=str(place / "cache")) == "synthetic-cifar10"


def test_a_lock_that_nobody_gives_back_is_named(place: Path) -> None:
    path = cache(place) / ".lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = resolve("synthetic-cifar10", place, XDG_CACHE_HOME=str(place / "cache"))
    assert line == f"error: another process has held {path} for 0.5 s: end it, or set XDG_CACHE_HOME elsewhere"


@pytest.mark.parametrize("what", ["a link", "a folder that all may write to"])
def test_a_cache_among_temporary_files_that_others_made_is_not_used(place: Path, what: str) -> None:
    """A program that followed the link would write into another folder of the user."""
    own = place / "own"
    taken = place / "tmp" / f"samestep-{os.getuid()}"
    own.mkdir()
    if what == "a link":
        taken.symlink_to(own)
    else:
        taken.mkdir()
        taken.chmod(0o777)
    line = resolve("synthetic-cifar10", place, XDG_CACHE_HOME="", HOME="nowhere", TMPDIR=str(place / "tmp"))
    assert line == f"error: no home folder to keep data in, and {taken} is someone else's: set XDG_CACHE_HOME"
    assert not list(own.iterdir())
