"""Whose folder is it? A run's folder, its locks, and what a run in it goes on from: a checkpoint, on the same data.

A launch script resolves this before it starts any rank, by the checkpoints' manifests alone; rank 0 does so again, and
verifies them. Under a bare launcher rank 0 is the first to.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import FatalError, UserError, checkpoint, datasets, log
from samestep.checkpoint import Arrays
from samestep.options import Options, arithmetic
from samestep.safetensors_writer import encode

# A run dir's .lock has two bytes to lock: the launch script holds the first, rank 0 the second, so that a new launch
# script also waits for a rank 0 that outlived its own. A rank 0 without a launch script holds both.
LAUNCHER_BYTE, WRITER_BYTE = 0, 1
LOCK_SECONDS = 30.0


@dataclass(frozen=True)
class Resolved:
    """What is decided once, before training: where, on which data, and from which checkpoint (None: a new run)."""

    run_dir: Path
    lock: Lock
    dataset: str
    fingerprint: str | None  # of the data set's content
    requested_dataset: str
    checkpoint: checkpoint.Checkpoint | None


def resolve(
    app: str,
    options: Options,
    fresh: bool = True,
    verify: bool = True,
    reader: Callable[..., checkpoint.Checkpoint] | None = None,
) -> Resolved:
    """Decide run dir, data set and checkpoint, and lock the run dir.

    ``fresh`` is False in a process that a launcher started again: --no-resume then no longer applies. Without
    ``verify`` checkpoints are judged by their manifests, and neither renamed nor warned of: rank 0 will do so.
    ``reader`` is `checkpoint.newest`'s.
    Raises UserError when the run dir holds another run or other data, FatalError when none of its checkpoints is good.
    """
    if options.evaluate_only and not (options.init_from or checkpoint.folders(options.run_dir)):
        raise UserError(f"--evaluate-only: {options.run_dir} has no checkpoint: name a run that has, or --init-from")
    resolve_dataset = options.resolve_dataset or datasets.resolve
    run_dir, lock = claim(app, options.run_dir or _of_this_job(app))
    found = None
    if options.resume or not fresh:
        found = checkpoint.newest(run_dir, log.warning if verify else lambda text: None, verify, reader)
    else:
        set_aside(run_dir)

    asked = options.requested_dataset or options.dataset  # None: the user named none
    if found is None:
        source = resolve_dataset(options.dataset or str(options.default_dataset), options.data_dir)
        if source.notice:
            log.warning(source.notice)
        return Resolved(run_dir, lock, source.name, source.fingerprint, asked or str(options.default_dataset), None)
    # A resumed run keeps its data set.
    recorded, asked_before = str(found.arithmetic.get("dataset")), found.state.get("requested_dataset")
    same = asked in (None, recorded, asked_before)
    check_same_run(found, app, {**arithmetic(options), "dataset": recorded if same else asked})
    source = resolve_dataset(recorded, options.data_dir, fallback=False)
    _check_same_data(found, source, verify)
    if verify and not options.evaluate_only:
        retire_newer(found)
    return Resolved(run_dir, lock, source.name, source.fingerprint, asked_before or asked or source.name, found)


def open_run(
    app: str, options: Options, fresh: bool, load: Callable[[Mapping[str, Arrays]], None]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """For rank 0 in `Run.restore`: what all ranks are to know, and the files of arrays, already loaded here.

    Raises as `resolve`, and UserError or FatalError where ``load`` finds that arrays do not fit.
    """
    resolved = resolve(app, options, fresh=fresh)
    found, init_from = resolved.checkpoint, options.init_from
    contents: dict[str, bytes] = {}
    groups: Mapping[str, Arrays] = {}
    if found:
        contents = found.contents
        groups = {group: found.arrays(group) for group in contents}
        if init_from:
            log.info(f"{found.folder.name} of the run dir wins over --init-from {init_from}")
    elif init_from:
        groups = {"model": checkpoint.load_weights(init_from)}
        contents = {"model": b"".join(encode(groups["model"]))}
    try:
        if groups:
            load(groups)
    except ValueError as problem:
        raise misfit(found.folder if found else None, init_from, problem) from problem
    return {**answer(resolved), "groups": list(contents)}, contents


def misfit(folder: object, init_from: object, problem: ValueError) -> UserError | FatalError:
    """For arrays that do not fit the model: of the checkpoint ``folder``, or, where there is none, of --init-from."""
    if folder:
        return FatalError(f"checkpoint {folder} does not fit the model: {problem}")
    return UserError(f"--init-from {init_from} does not fit the model: {problem}")


def answer(resolved: Resolved) -> dict[str, Any]:
    """What all ranks are to know of what rank 0 resolved."""
    found = resolved.checkpoint
    state = {} if found is None else found.state
    state |= {"requested_dataset": resolved.requested_dataset, "dataset_fingerprint": resolved.fingerprint}
    its = {"run_dir": str(resolved.run_dir), "dataset": resolved.dataset, "state": state}
    return {**its, "step": found.step if found else None}


def check_same_run(found: checkpoint.Checkpoint, app: str, arithmetic: Mapping[str, Any]) -> None:
    """Raise UserError, with both values, where resuming ``found`` would take other steps than it took so far."""
    if found.app != app:
        raise UserError(f"{found.folder.parents[1]} holds a run of {found.app}, not of {app}: choose another --run-dir")
    differing = [
        f"--{name.replace('_', '-')} {found.arithmetic.get(name)} in the checkpoint, {arithmetic.get(name)} now"
        for name in sorted({*found.arithmetic, *arithmetic})
        if found.arithmetic.get(name) != arithmetic.get(name)
    ]
    if differing:
        raise UserError(
            f"{found.folder.parents[1]} holds another run: {'; '.join(differing)}: "
            "repeat its options, or choose another --run-dir"
        )


def retire_newer(used: checkpoint.Checkpoint) -> None:
    """Rename the damaged checkpoints newer than ``used``, so that they are kept but no longer counted."""
    for folder in checkpoint.folders(used.folder.parents[1]):
        if int(folder.name[5:]) > used.step:
            checkpoint.retire(folder, "damaged")


def _check_same_data(found: checkpoint.Checkpoint, source: datasets.Found, warn: bool) -> None:
    """Raise UserError where the data are not those that ``found`` was trained on, as far as it says."""
    trained_on = found.state.get("dataset_fingerprint")
    if trained_on is None and warn:
        log.warning(f"{found.folder.name} does not say which data it saw: taking {source.name} as it is now for them")
    if trained_on not in (None, source.fingerprint):
        raise UserError(
            f"{found.folder.parents[1]} was trained on other data: {source.folder.resolve()} has changed since "
            f"(SHA-256 {str(trained_on)[:12]} in the checkpoint, {str(source.fingerprint)[:12]} now): put the former "
            "files back, or choose another --run-dir"
        )


# --- the folder --------------------------------------------------------------------------------------------------


def claim(app: str, run_dir: Path) -> tuple[Path, Lock]:
    """Make the run dir and lock it; returns it as an absolute path. Raises UserError where that is not possible."""
    run_dir = run_dir.resolve()
    make_folder(run_dir / "log")
    under_script = "SAMESTEP_LAUNCHER" in os.environ
    lock = Lock(run_dir, f"{app}, started by {Path(sys.argv[0]).name}")
    for byte in (WRITER_BYTE,) if under_script else (LAUNCHER_BYTE, WRITER_BYTE):
        lock.acquire(byte)
    return run_dir, lock


def new(app: str, suffix: str = "") -> Path:
    """A run dir of its own, ``runs/<app>/<UTC time><suffix>``."""
    folder = Path("runs", app, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + suffix)
    try:
        return make_unique(folder)
    except OSError as problem:
        raise UserError(f"cannot make {folder.resolve()}: {problem.strerror}: name another with --run-dir") from problem


def _of_this_job(app: str) -> Path:
    """Under a bare launcher: a new run dir, found again by the ranks that the same launcher starts anew.

    Its name carries a key: the launcher's own id of the job, or the launcher's process.
    """
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    slurm = os.environ.get("SLURM_JOB_ID")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or "0"
    key = elastic if elastic != "none" else f"slurm-{slurm}" if slurm else f"{socket.gethostname()}-{os.getppid()}"
    suffix = "-" + hashlib.sha256(key.encode()).hexdigest()[:8]
    earlier = sorted(Path("runs", app).glob(f"*{suffix}*"))
    return earlier[-1] if earlier and restarts != "0" else new(app, suffix)


def set_aside(run_dir: Path) -> None:
    """Move an earlier run's checkpoints and results to ``earlier-<UTC time>/``, for --no-resume."""
    left = ("checkpoints", "metrics.jsonl", "model.safetensors", "result.json", "evaluation.json")
    names = [name for name in left if (run_dir / name).exists()]
    names += [path.name for path in run_dir.glob("model-*.safetensors")]  # the best, an average
    if names:
        aside = make_unique(run_dir / time.strftime("earlier-%Y%m%dT%H%M%SZ", time.gmtime()))
        for name in names:
            (run_dir / name).rename(aside / name)


def make_folder(path: Path) -> None:
    """Raises UserError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"cannot make {path}: {problem.strerror}: name another place") from problem


def make_unique(folder: Path) -> Path:
    """Create ``folder``, or ``folder-2``, ``folder-3``... where it is taken, and return it."""
    candidate, count = folder, 1
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            count += 1
            candidate = folder.with_name(f"{folder.name}-{count}")


# --- its locks ---------------------------------------------------------------------------------------------------


class Lock:
    """Bytes of ``<run-dir>/.lock`` that this process holds, until it ends or releases them.

    POSIX record locks: the kernel drops them when the process ends, however it ends, and they also work on NFS. Closing
    any file descriptor of the file would drop them all, so there is one.
    """

    def __init__(self, run_dir: Path, who: str) -> None:
        """``who`` is what another job is told of the holder. Raises UserError where there can be no such file."""
        self._run_dir, self._who = run_dir, who
        try:
            self._descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as problem:
            raise UserError(f"cannot use --run-dir {run_dir}: {problem.strerror}") from problem

    def acquire(self, byte: int, wait: float | None = None) -> None:
        """Lock a byte, within ``wait`` seconds (default: LOCK_SECONDS). Raises UserError that names the holder."""
        wait = LOCK_SECONDS if wait is None else wait
        deadline, warned = time.monotonic() + wait, False
        while not self._try(byte):
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another job"
            if time.monotonic() > deadline:
                remedy = "wait for it, stop it, or choose another --run-dir"
                raise UserError(f"--run-dir {self._run_dir} is in use by {holder}: {remedy}")
            if not warned:
                log.warning(f"{self._run_dir} is in use by {holder}; waiting up to {wait:.0f} s")
                warned = True
            time.sleep(0.2)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(
            self._descriptor,
            f"{self._who} (host {socket.gethostname()}, pid {os.getpid()}, since {since})\n".encode(),
            0,
        )

    def _try(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as problem:
            if problem.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        return True

    def release(self, byte: int) -> None:
        """Give up one byte."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
