"""Test that `Root` changes only files and folders below its own folder, and follows no link there."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from samestep import ConfigError, NonRetryableError, checkpoint, log, rundir, untrusted
from samestep.root import Root, try_lock

# METHODS calls each method for "log" or for a path below it.
METHODS: dict[str, Callable[[Root], object]] = {
    "open": lambda root: os.close(root.open("log/x", os.O_WRONLY | os.O_APPEND)),
    "append": lambda root: root.append("log/x").close(),
    "create": lambda root: root.create("log/x").close(),
    "make_folder": lambda root: root.make_folder("log/x"),
    "rename from": lambda root: root.rename("log/x", "y"),
    "rename to": lambda root: root.rename("kept", "log/x"),
    "unlink": lambda root: root.unlink("log/x"),
    "delete": lambda root: root.delete("log/x"),
    "delete_folder": lambda root: root.delete_folder("log/x"),
    "touch": lambda root: root.touch("log/x"),
    "names": lambda root: root.names("log"),
    "sync": lambda root: root.sync("log"),
}


def content(folder: Path) -> dict[str, bytes | None]:
    """Return all paths below a folder, with the bytes of files."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_no_method_follows_a_link_in_place_of_a_folder(tmp_path: Path, method: Callable[[Root], object]) -> None:
    outside = tmp_path / "outside"
    run_dir = tmp_path / "run"
    for folder in (outside / "x", run_dir):
        folder.mkdir(parents=True)
    (outside / "x" / "file").write_text("kept")
    (run_dir / "kept").write_text("kept")
    (run_dir / "log").symlink_to(outside)
    before = content(outside)
    status = (outside / "x").stat()
    with pytest.raises(OSError, match="is a link") as refused:
        method(Root(run_dir))
    assert refused.value.filename == str(run_dir / "log")
    assert content(outside) == before
    assert (outside / "x").stat().st_mtime_ns == status.st_mtime_ns
    assert (run_dir / "kept").read_text() == "kept"


@pytest.mark.parametrize("name", ["../outside", "log/../../outside", "/tmp/outside"])
def test_no_name_leads_out_of_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / "log").mkdir(parents=True)
    with pytest.raises(OSError, match="leads out of its folder"):
        Root(tmp_path / "run").create(f"{name}/x")
    with pytest.raises(OSError, match="leads out of its folder"):
        Root(tmp_path / "run").make_folder(name)


def test_open_refuses_each_file_that_is_not_the_run_dirs_alone(tmp_path: Path) -> None:
    root = Root(tmp_path / "run")
    outside = tmp_path / "outside"
    root.make_folder("log")
    outside.write_text("kept")
    (root.path / "link").symlink_to(outside)
    (root.path / "hard link").hardlink_to(outside)
    os.mkfifo(root.path / "FIFO")
    for name, problem in {"link": "regular", "hard link": "hard link", "FIFO": "regular", "log": "regular"}.items():
        with pytest.raises(OSError, match=problem) as refused:
            root.open(name, os.O_RDWR)
        assert refused.value.filename == str(root.path / name)
    assert outside.read_text() == "kept"
    descriptor = root.open("new", os.O_WRONLY | os.O_APPEND, mode=0o600)
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    os.close(descriptor)


def test_create_replaces_links_and_delete_removes_them(tmp_path: Path) -> None:
    root = Root(tmp_path / "run")
    outside = tmp_path / "outside"
    root.make_folder("log")
    outside.mkdir()
    (outside / "file").write_text("kept")
    (root.path / "log" / "a").symlink_to(outside / "file")
    (root.path / "log" / "b").hardlink_to(outside / "file")
    (root.path / "log" / "c").symlink_to(outside)
    for name in ("a", "b"):
        with root.create(f"log/{name}") as file:
            file.write(b"new")
    root.delete("log/c")
    root.make_folder("deep/er")
    (root.path / "deep" / "link").symlink_to(outside)
    root.delete("deep")
    root.delete("deep")  # the second call does nothing
    assert content(root.path) == {"log": None, "log/a": b"new", "log/b": b"new"}
    assert content(outside) == {"file": b"kept"}


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    checkpoint.save(tmp_path / "run", "toy", 3, {}, {}, {}, keep=1)
    checkpoint.finish()
    assert checkpoint.newest(tmp_path / "run", pytest.fail) is not None


def test_descriptors_are_closed(tmp_path: Path) -> None:
    root = Root(tmp_path / "run")
    root.make_folder("log/x")
    (root.path / "link").symlink_to(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for method in METHODS.values():
        for failing in (root, Root(tmp_path / "missing"), Root(root.path / "link")):
            try:
                method(failing)
            except OSError:
                continue
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["log", "checkpoints"])
def test_a_run_dir_with_a_link_for_a_folder_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    message = rf"{tmp_path}/run/{name} is a link: remove it, or name its target by --run-dir"
    with pytest.raises(ConfigError, match=message):
        rundir.lock_run_dir("toy", tmp_path / "run")
    assert list((tmp_path / "outside").iterdir()) == []


# --- file systems without locks, or without a sync of folders -------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_one_warning(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(code, "injected")

    warnings: list[str] = []
    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(log, "warning", lambda text, kind="": warnings.append(text))
    monkeypatch.delenv("SAMESTEP_JOB_INFO", raising=False)
    _, lock = rundir.lock_run_dir("toy", tmp_path / "run")  # lock_run_dir locks two bytes
    lock.release(rundir.WRITER_BYTE)
    assert len(warnings) == 1
    assert "has no locks, so two jobs can write to it at the same time: start only one" in warnings[0]


def test_other_errors_of_a_lock_stay_errors() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "injected")

    def hold() -> None:
        raise OSError(errno.EACCES, "injected")

    with pytest.raises(OSError, match="injected"):
        try_lock(fail)
    assert try_lock(hold) is False
    assert try_lock(lambda: None) is True


@pytest.mark.parametrize(("code", "is_saved"), [(errno.EINVAL, True), (errno.ENOSYS, True), (errno.EIO, False)])
def test_only_a_sync_of_folders_that_is_not_supported_is_left_out(
    tmp_path: Path, code: int, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, "injected")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    checkpoint.save(tmp_path, "toy", 3, {}, {}, {}, keep=1)
    if is_saved:
        checkpoint.finish()
        assert Root(tmp_path).sync() is False
    else:
        with pytest.raises(NonRetryableError, match="injected"):
            checkpoint.finish()
    assert (checkpoint.newest(tmp_path, pytest.fail) is not None) == is_saved


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (None, "None"),
        ("x\nerror: the disk burns", "x error: the disk burns"),
        ("\x1b[2J", "\N{REPLACEMENT CHARACTER}[2J"),
        ("x" * 80, "x" * 80),
        ("x" * 81, f"{'x' * 77}..."),
        ("x" * 10_000_000, f"{'x' * 77}..."),
        (" " * 1000 + "x", "..."),
        (10**5000, "a very long int"),
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else "int",
)
def test_shown_value_is_one_short_printable_line(value: object, text: str) -> None:
    assert untrusted.shown(value) == text
