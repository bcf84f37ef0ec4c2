"""Manage a run's folder: its name, its locks, and the checkpoint and dataset from which a run starts.

A launch script calls `resolve` before it starts ranks, and reads only the checkpoints' manifests. Rank 0 calls
`resolve` again and verifies the checkpoints. Without a launch script, only rank 0 calls `resolve`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from samestep import ConfigError, NonRetryableError, checkpoint, env, events, log, step_losses, trace, untrusted
from samestep.checkpoint import Arrays, Checkpoint, GroupNames, Reader
from samestep.job_info import JobInfo
from samestep.options import Options, resume_invariants
from samestep.root import LinkError, Root, try_lock
from samestep.untrusted import shown

# The file .lock of a run dir has two bytes to lock. The launch script locks both and releases the second to rank 0.
# Therefore a new launch script also waits for a rank 0 that is still running after its launch script has ended. Without
# a launch script, rank 0 locks both bytes.
LAUNCHER_BYTE = 0
WRITER_BYTE = 1
LOCK_SECONDS = 30.0
BEGUN = "begun"  # file in ``log`` with the name of the job that began the run because of --no-resume


def no_dataset(name: str, data_dir: Path, fallback: bool = True) -> SimpleNamespace:
    """Accept any name of a dataset without a check.

    Args:
        name: name of the dataset.
        data_dir: folder of the dataset.
        fallback: ignored.

    Returns:
        An object with the attributes of the result of `samestep.data.datasets.resolve`.
    """
    return SimpleNamespace(name=name, folder=data_dir, notice=None, fingerprint=None)


@dataclass(frozen=True)
class Resolved:
    """The run dir, the dataset and the checkpoint (None for a new run) from which a run starts."""

    run_dir: Path
    lock: Lock
    dataset: Any  # a `samestep.data.files.DatasetInfo`
    requested_dataset: str
    checkpoint: Checkpoint | None


def resolve(
    app: str, options: Options, fresh: bool = True, verify: bool = True, reader: Reader = None, groups: GroupNames = ()
) -> Resolved:
    """Find the run dir, the dataset and the checkpoint, and lock the run dir.

    Args:
        app: the app's name, which its checkpoints contain.
        options: the parsed options. Their function ``resolve_dataset`` finds the dataset; if it is None, the dataset
            is not checked.
        fresh: whether --no-resume applies in any case. In a process that a launcher has restarted, the value is False,
            and --no-resume applies only if no earlier process of the job has begun the run.
        verify: whether to verify checkpoints, and to report and rename corrupt ones. With False, `resolve` reads only
            manifests.
        reader: passed to `checkpoint.newest`.
        groups: passed to `checkpoint.newest`.

    Raises:
        ConfigError: the run dir contains another run or a run with other data, cannot be used, is in use by another
            job, or has no checkpoint for --evaluate-only.
        NonRetryableError: all checkpoints of the run dir are corrupt.
    """
    _check_evaluate_only(options)
    run_dir, lock = lock_run_dir(app, options.run_dir or _run_dir_of_job(app))
    saved = None
    if options.resume or (not fresh and _was_begun_by_job(run_dir)):
        warn = _warn_of_damage if verify else _no_warning
        saved = checkpoint.newest(run_dir, warn, verify=verify, reader=reader, groups=groups)
    else:
        archive_previous_run(run_dir)
        with checkpoint.writing(run_dir / "log" / BEGUN):
            checkpoint.write_atomic(run_dir / "log" / BEGUN, env.job_key(os.environ)[0].encode())
    dataset, requested = _resolve_data(app, options, saved=saved, verify=verify)
    if saved and verify and not options.evaluate_only:
        quarantine_newer(saved)
    return Resolved(run_dir, lock, dataset=dataset, requested_dataset=requested, checkpoint=saved)


def _check_evaluate_only(options: Options) -> None:
    """Raise ConfigError if --evaluate-only has neither a checkpoint nor --init-from."""
    if not options.evaluate_only or options.init_from:
        return
    if not checkpoint.folders(options.run_dir):
        raise ConfigError(f"--evaluate-only: {options.run_dir} has no checkpoint: name a run that has, or --init-from")


def _warn_of_damage(text: str) -> None:
    log.warning(text, events.DAMAGE)


def _no_warning(text: str) -> None:
    pass


def _resolve_data(app: str, options: Options, saved: Checkpoint | None, verify: bool) -> tuple[Any, str]:
    """Return (dataset, requested name of the dataset). A resumed run keeps its dataset."""
    resolve_dataset = options.resolve_dataset or no_dataset
    requested = options.requested_dataset or options.dataset  # None if the user chose no dataset
    if saved is None:
        name = options.dataset or str(options.default_dataset)
        dataset = resolve_dataset(name, options.data_dir, fallback=options.dataset is None)
        if dataset.notice:
            log.warning(dataset.notice)
        return dataset, requested or str(options.default_dataset)
    recorded = str(saved.resume_invariants.get("dataset"))
    requested_before = saved.state.get("requested_dataset")
    is_same = requested in (None, recorded, requested_before)
    invariants = resume_invariants(options)
    invariants["dataset"] = recorded if is_same else requested
    check_same_run(saved, app, invariants)
    dataset = resolve_dataset(recorded, options.data_dir, fallback=False)
    _check_same_data(saved, dataset, verify)
    return dataset, requested_before or requested or dataset.name


def open_run(
    app: str, options: Options, fresh: bool, load: Callable[[Mapping[str, Arrays]], None], required: GroupNames
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Call `resolve` on rank 0, and load the arrays of the checkpoint or --init-from, for `Run.restore`.

    Args:
        app: name of the app, such as "cifar_ddp".
        options: the run's parsed command-line options.
        fresh: as in `resolve`.
        load: function that loads arrays by group and name into the model.
        required: groups without which a checkpoint counts as corrupt.

    Returns:
        The message that rank 0 broadcasts, and the content of each group's safetensors file.

    Raises:
        ConfigError: as in `resolve`, or the arrays of --init-from do not fit the model.
        NonRetryableError: as in `resolve`, or the arrays of the checkpoint do not fit the model.
    """
    resolved = resolve(app, options, fresh, groups=required)
    saved = resolved.checkpoint
    init_from = options.init_from
    contents: dict[str, bytes] = {}
    groups: Mapping[str, Arrays] = {}
    if saved:
        contents = saved.contents
        groups = {group: saved.arrays(group) for group in contents}
        if init_from:
            log.info(f"{saved.folder.name} of the run dir wins over --init-from {init_from}")
    elif init_from:
        groups = {"model": checkpoint.load_weights(init_from)}
        contents = {"model": checkpoint.serialize(groups["model"])}
    try:
        if groups:
            load(groups)
    except ValueError as error:
        folder = saved.folder if saved else None
        raise shape_mismatch_error(folder, init_from, error) from error
    return {**restore_message(resolved), "groups": list(contents)}, contents


def shape_mismatch_error(folder: object, init_from: object, error: ValueError) -> ConfigError | NonRetryableError:
    """Return the error for arrays that do not fit the model.

    Args:
        folder: the checkpoint that the arrays come from; None if they come from --init-from.
        init_from: value of --init-from.
        error: the exception that the app's load function raised.
    """
    if folder:
        return NonRetryableError(f"checkpoint {folder} does not fit the model: {error}")
    return ConfigError(f"--init-from {init_from} does not fit the model: {error}")


def restore_message(resolved: Resolved) -> dict[str, Any]:
    """Return the JSON values about ``resolved`` that rank 0 broadcasts."""
    saved = resolved.checkpoint
    dataset = resolved.dataset
    state = dict(saved.state) if saved else {}
    state["requested_dataset"] = resolved.requested_dataset
    state["dataset_fingerprint"] = dataset.fingerprint
    return {
        "run_dir": str(resolved.run_dir),
        "dataset": dataset.name,
        "step": saved.step if saved else None,
        "dataset_folder": shown(os.path.realpath(dataset.folder), limit=4096),
        "state": state,
    }


def check_same_run(saved: Checkpoint, app: str, invariants: Mapping[str, Any]) -> None:
    """Raise ConfigError, with old and new values, if the checkpoint belongs to another app or another run.

    Args:
        saved: the checkpoint to resume from.
        app: name of the app, such as "cifar_ddp".
        invariants: the options that a resume must repeat, with their values now.
    """
    run_dir = saved.folder.parents[1]
    recorded = saved.resume_invariants
    if saved.app != app:
        raise ConfigError(f"{run_dir} holds a run of {shown(saved.app)}, not of {app}: choose another --run-dir")
    differences = []
    for name in sorted({*recorded, *invariants}):
        before = recorded.get(name)
        now = invariants.get(name)
        if not _is_same(before, now):
            option = f"--{shown(name).replace('_', '-')}"
            differences.append(f"{option} {shown(before)} in the checkpoint, {shown(now)} now")
    if differences:
        listed = shown("; ".join(differences), limit=1000)
        raise ConfigError(f"{run_dir} holds another run: {listed}: repeat its options, or choose another --run-dir")


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two JSON values are equal; NaN is equal to itself."""
    return bool(before == now) or json.dumps(before, sort_keys=True) == json.dumps(now, sort_keys=True)


def quarantine_newer(used: Checkpoint) -> None:
    """Rename the corrupt checkpoints newer than ``used``, so that later resumes ignore them."""
    for folder in checkpoint.folders(used.folder.parents[1]):
        if int(folder.name[5:]) > used.step:
            checkpoint.quarantine(folder, "damaged")


def _check_same_data(saved: Checkpoint, dataset: Any, warn: bool) -> None:
    """Raise ConfigError if the checkpoint has another fingerprint of the dataset."""
    recorded = saved.state.get("dataset_fingerprint")
    if recorded is None and warn:
        log.warning(f"{saved.folder.name} does not record its data: assuming that {dataset.name} has not changed")
    if recorded not in (None, dataset.fingerprint):
        before = shown(str(recorded)[:12])
        now = str(dataset.fingerprint)[:12]
        raise ConfigError(
            f"{saved.folder.parents[1]} was trained on other data: {dataset.folder.resolve()} has changed since "
            f"(SHA-256 {before} in the checkpoint, {now} now): put the former files back, or choose another --run-dir"
        )


# --- the folder --------------------------------------------------------------------------------------------------


def lock_run_dir(app: str, run_dir: Path) -> tuple[Path, Lock]:
    """Create and lock the run dir, and return (absolute path, lock).

    Raises:
        ConfigError: the run dir cannot be created, is not usable, or is locked by another job.
    """
    run_dir = Path(os.path.realpath(run_dir))  # Path.resolve() raises RuntimeError for a loop of links
    make_log_folder(run_dir)
    lock = Lock(run_dir, f"{app}, started by {Path(sys.argv[0]).name}")
    has_launch_script = JobInfo.from_environ(os.environ).launcher != ""
    for byte in (WRITER_BYTE,) if has_launch_script else (LAUNCHER_BYTE, WRITER_BYTE):
        lock.acquire(byte)
    return run_dir, lock


def make_log_folder(run_dir: Path) -> None:
    """Create the run dir's folder ``log``.

    Raises:
        ConfigError: the folder cannot be created, or a folder on its path is a link.
    """
    try:
        Root(run_dir).make_folder("log")
    except LinkError as error:
        raise ConfigError(f"{error.filename} is a link: remove it, or name its target by --run-dir") from error
    except OSError as error:
        raise ConfigError(
            f"cannot make {run_dir / 'log'}: {error.strerror}: name another place with --run-dir"
        ) from error
    checkpoint.folders(run_dir)


def new(app: str, suffix: str = "") -> Path:
    """Create a new run dir, ``runs/<app>/<UTC time><suffix>``, and return its path."""
    folder = Path("runs", app, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + suffix)
    return make_folder(folder, unique=True)


def _run_dir_of_job(app: str) -> Path:
    """Return the run dir of a job without --run-dir: a new folder, or the existing folder after a restart.

    The folder's name contains a hash of the launcher's name for the job, or else of the host and the launcher's pid.
    """
    key, is_restarted = env.job_key(os.environ)
    key = key or f"{socket.gethostname()}-{os.getppid()}"
    suffix = "-" + hashlib.sha256(key.encode()).hexdigest()[:8]
    earlier = sorted(Path("runs", app).glob(f"*{suffix}*"))
    if earlier and is_restarted:
        return earlier[-1]
    return new(app, suffix)


def _was_begun_by_job(run_dir: Path) -> bool:
    """Return whether an earlier process of this job has begun the run because of --no-resume.

    The result is also True if the launcher gives the job no name, because a wrong False would lose the job's own steps.
    """
    name, _ = env.job_key(os.environ)
    if not name:
        return True
    with contextlib.suppress(OSError, ValueError):
        return untrusted.read_text(run_dir / "log" / BEGUN) == name
    return False


def archive_previous_run(run_dir: Path) -> None:
    """Move an earlier run's checkpoints, metrics, weights, results, losses and trace to ``earlier-<UTC time>/``."""
    left = ("checkpoints", "metrics.jsonl", "model.safetensors", "result.json", "evaluation.json")
    root = Root(run_dir)
    # Files of the best weights and of averaged weights have names that begin with "model-".
    names = [name for name in root.names() if name in left or re.fullmatch(r"model-.*\.safetensors", name)]
    records = [name for name in (step_losses.NAME, trace.NAME) if (run_dir / name).exists()]
    if names or records:
        aside = make_folder(run_dir / time.strftime("earlier-%Y%m%dT%H%M%SZ", time.gmtime()), unique=True)
        if records:
            root.make_folder(f"{aside.name}/log")
        for name in [*names, *records]:
            root.rename(name, f"{aside.name}/{name}")


def make_folder(path: Path, unique: bool = False) -> Path:
    """Create a folder and its parents, and return its path.

    If ``unique`` is True and ``path`` exists, the new folder is the first of ``path-2``, ``path-3`` and so on that is
    missing.

    Raises:
        ConfigError: the folder cannot be created.
    """
    candidate = path
    count = 1
    while True:
        try:
            candidate.mkdir(parents=True, exist_ok=not unique)
            return candidate
        except OSError as error:
            if not (unique and isinstance(error, FileExistsError)):
                raise ConfigError(
                    f"cannot make {candidate.absolute()}: {error.strerror}: name another place with --run-dir"
                ) from error
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")


# --- its locks ---------------------------------------------------------------------------------------------------


class Lock:
    """A lock on bytes of ``<run-dir>/.lock``. This process holds each acquired byte until `release` or until its end.

    The lock is a POSIX record lock, which the kernel releases when the process ends, and which also works on NFS.
    If this process closed any descriptor of the file, all its locks on the file would end. Therefore a Lock opens the
    file only once, and keeps the descriptor open.
    """

    def __init__(self, run_dir: Path, who: str) -> None:
        """Open the lock file.

        Args:
            run_dir: folder of the run.
            who: description of this process for the messages of other jobs.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._run_dir = run_dir
        self._who = who
        self._warned = JobInfo.from_environ(os.environ).launcher != ""  # a launch script has logged the warning
        try:
            # Only the owner may read the file, because any user who can read a file can lock it.
            self._descriptor = Root(run_dir).open(".lock", os.O_RDWR, mode=0o600)
        except OSError as error:
            raise ConfigError(f"cannot use --run-dir {run_dir}: {checkpoint.os_error_message(error)}") from error

    def acquire(self, byte: int, wait: float | None = None) -> None:
        """Lock a byte.

        Args:
            byte: LAUNCHER_BYTE or WRITER_BYTE.
            wait: maximum seconds to wait for another process that holds the lock; by default LOCK_SECONDS.

        Raises:
            ConfigError: another process holds the lock for longer; the message describes the holder.
        """
        if wait is None:
            wait = LOCK_SECONDS
        deadline = time.monotonic() + wait
        if not self._try(byte):
            in_use = f"{self._run_dir} is in use by {self._holder()}"
            log.warning(f"{in_use}; waiting up to {wait:.0f} s")
            while not self._try(byte):
                if time.monotonic() > deadline:
                    raise ConfigError(f"--run-dir {in_use}: wait for it, stop it, or choose another --run-dir")
                time.sleep(0.2)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"{self._who} (host {socket.gethostname()}, pid {os.getpid()}, since {since})\n"
        with contextlib.suppress(OSError):  # on a full disk, messages call the holder "another process"
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(errors="replace"), 0)

    def _holder(self) -> str:
        """Return the file's description of the lock's holder; "another process" if the description is outdated.

        A process that can only read the file can hold the lock, but cannot write its description.
        """
        text = shown(os.pread(self._descriptor, 200, 0).decode(errors="replace"), limit=200)
        found = re.search(r"\(host (.+), pid ([0-9]{1,7}), since", text)
        if not found:
            return "another process"
        host, pid = found.groups()
        if host != socket.gethostname() or Path("/proc", pid).exists():
            return text
        return "another process"

    def _try(self, byte: int) -> bool:
        """Try to lock a byte, and return whether the byte is locked. Return True if the file system has no locks."""
        taken = try_lock(fcntl.lockf, self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        if taken is None and not self._warned:
            risk = "two jobs can write to it at the same time: start only one"
            log.warning(f"the file system of {self._run_dir} has no locks, so {risk}")
            self._warned = True
        return taken is not False

    def release(self, byte: int) -> None:
        """Unlock a byte."""
        try_lock(fcntl.lockf, self._descriptor, fcntl.LOCK_UN, 1, byte)
