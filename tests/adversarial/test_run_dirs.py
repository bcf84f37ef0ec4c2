"""Test run dirs that another program, another user or a crash changed: a run resumes, or ends with one error line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import samestep
from amounts import amount
from attempts import Attempt, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samestep import ConfigError, NonRetryableError, RetryableError, checkpoint, log, metrics, rundir
from samestep.checkpoint import CorruptCheckpoint
from samestep.env import World
from samestep.options import Options
from samestep.recovery import hang_diagnosis, replica_check
from samestep.sharded import storage
from scratch_project import ScratchProject, environment

CORE = Path(samestep.__file__).parents[1]
LIMIT = 60  # seconds; every child process ends sooner

# PROGRAM runs one rank without a framework. Its weights depend on all updates and on the optimizer's state.
PROGRAM = """
import os
import sys
import numpy as np
from samestep import log
from samestep.env import World
from samestep.options import Parser, add_common, add_virtual_ranks
from samestep.recovery.watchdog import Watchdog
from samestep.run import Parts, Run
from samestep.sharding import GlobalBatches

class Alone:
    broadcast = staticmethod(lambda content: content)
    all_gather = staticmethod(lambda row: row[None])

def main():
    parser = Parser()
    add_common(parser, epochs=1, global_batch_size=4, lr="1", datasets=("none",), devices=("cpu",))
    add_virtual_ranks(parser)
    parser.add_argument("--dtype", default="float64")
    run = Run("toy", parser.parse(sys.argv[1:]), World(0, 1), Watchdog())
    weights, momentum = np.zeros(3), np.zeros(3)

    def load(groups):
        weights[:] = groups["model"]["w"]
        momentum[:] = groups.get("optimizer", {"m": momentum})["m"]

    groups = {"model": {"w": weights}, "optimizer": {"m": momentum}}
    run.restore(Alone, Parts(load, lambda: groups))
    metadata = {"device": os.environ.get("DEVICE", "one")}
    if "DRAWS" in os.environ:
        metadata["random_numbers"] = os.environ["DRAWS"]
    run.start(GlobalBatches(24, 4, 1), 4, "toy", "cpu", metadata)
    for step in range(run.first_step, run.last_step):
        momentum[:] = momentum / 2 + step
        weights[:] -= momentum
        actions = run.after_step(1.0)
        if actions.sync:
            actions = run.sync()
        if actions.log:
            run.log_metrics({"test_loss": 1.0} if actions.evaluate else {})
        if actions.save:
            run.save()
    run.finish({"test_loss": 1.0})
    run.report("numpy", "0", "none", "cpu")

log.run(main)
"""


def run_toy(
    run_dir: Path | str | bytes,
    *options: str,
    before_start: Callable[[], Any] = lambda: None,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM to its end, and check that it prints no traceback and at most one error of one line."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--checkpoint-every=2", "--log-every=1", "--run-dir", run_dir, *options],
        env=environment(PYTHONPATH=str(CORE), **environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        preexec_fn=before_start,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert len(errors(done)) == (done.returncode != 0), done.stderr
    return done


def errors(done: subprocess.CompletedProcess[str], kind: str = "error") -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith(f"{kind}: ")]


def result(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run dir of a finished run of 6 steps, with checkpoints of the steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run_toy(folder).returncode == 0
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, as a kill after step 4 would leave it."""
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    for path in (folder / "result.json", folder / "model.safetensors"):
        path.unlink()
    return folder


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and update its checksum."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({"manifest": body, "sha256": hashlib.sha256(canonical).hexdigest()}))


# --- 10: metrics.jsonl -------------------------------------------------------------------------------------------

LINES = {
    "null": '{"step": null}',
    "text": '{"step": "7"}',
    "infinity": '{"step": 1e400}',
    "NaN": '{"step": NaN}',
    "negative": '{"step": -1}',
    "true": '{"step": true}',
    "resumed": '{"resumed": 3}',
    "resumed null": '{"resumed": {"step": null}}',
    "list": "[1]",
    "number": "7",
    "nested": "[" * 100_000,
    "nested object": '{"step":' * 100_000,
    "digits": '{"step": ' + "9" * 10_000 + "}",
    "long": '{"step": 1, "x": "' + "x" * 50_000_000 + '"}',
    "not UTF-8": '{"step": 1, "\udcff',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_of_metrics_that_no_run_wrote_is_dropped(tmp_path: Path, line: str) -> None:
    good = ['{"app": "toy"}', '{"step": 1, "loss": 0.5}', '{"resumed": {"step": 1}}']
    text = "\n".join([*good[:2], line, good[2], '{"step": 9}', ""])
    (tmp_path / "metrics.jsonl").write_text(text, errors="surrogateescape")
    metrics.Metrics(tmp_path, {"app": "toy"}, 1)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:-1] == good


def test_a_run_resumes_with_each_such_line(run_dir: Path, finished: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write("\n".join(line for name, line in LINES.items() if name != "long"))
    assert run_toy(run_dir).returncode == 0
    assert result(run_dir)["weights_sha256"] == result(finished)["weights_sha256"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5, 6]


# --- 11, 19: checkpoints ---------------------------------------------------------------------------------------------

DROP: dict[str, Callable[[dict[str, Any]], Any]] = {
    "optimizer": lambda body: body["files"].pop("optimizer.safetensors"),
    "groups": lambda body: body["files"].clear(),
    "shards": lambda body: body.update(pieces={"model": {}, "optimizer": {}}, files={}),
}


@pytest.mark.parametrize("change", DROP.values(), ids=DROP)
def test_a_checkpoint_that_lacks_a_group_is_not_resumed_from(
    run_dir: Path, finished: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    reseal(run_dir / "checkpoints" / "step-00000004", change)
    done = run_toy(run_dir)
    assert done.returncode == 0
    (warning,) = [line for line in errors(done, "warning") if "damaged" in line]
    assert re.search(
        r"step-00000004 \(manifest.json lacks the group (model|optimizer)\) is damaged and skipped", warning
    )
    assert result(run_dir)["resumed_from_step"] == 2
    assert result(run_dir)["weights_sha256"] == result(finished)["weights_sha256"]


def test_a_run_without_any_whole_checkpoint_does_not_start_anew(run_dir: Path) -> None:
    for folder in (run_dir / "checkpoints").iterdir():
        reseal(folder, DROP["optimizer"])
    done = run_toy(run_dir)
    assert done.returncode == 1
    assert re.search(r"no checkpoint in \S+ is good: .* start a new run with --no-resume", done.stderr)
    # An evaluation needs only the weights, and succeeds.
    assert run_toy(run_dir, "--evaluate-only").returncode == 0


def test_only_the_model_is_needed_to_start_from(run_dir: Path, tmp_path: Path) -> None:
    weights = run_dir / "checkpoints" / "step-00000004" / "model.safetensors"
    assert run_toy(tmp_path / "new", f"--init-from={weights}").returncode == 0


STATES: dict[str, list[Any]] = {
    "seconds": ["x", None, -1, 1e400, float("nan"), 2**5000, []],
    "epoch_loss_sum": [None, "0", float("inf"), {}],
    "epoch_correct": [None, True],
    "train_loss": [[1], "x", float("nan")],
    "best": [3, "x", [], {}, {"step": "x"}, {"step": 2, "test_loss": "x"}, {"step": 2, "test_loss": float("nan")}],
    "requested_dataset": [3, {}],
    "dataset_fingerprint": [3, "x" * 10_000],
    "threads": [2, "x" * 10_000],
}
BODIES: dict[str, list[Any]] = {
    "step": [-4, 2**70, "4", 4.0, True, None],
    "app": [None, 3, ["toy"]],
    "state": [None, [], "x"],
    "arithmetic": [None, 3],
    "files": [None, [], {"model.safetensors": None}, {"model.safetensors": {}}, {"../x": {}}, {"x\n": {}}],
    "pieces": [None, [], 3],
}
ENTRIES: dict[str, list[Any]] = {"size": ["x", None, -1, 2**70, 1e400], "sha256": [None, 3, "x" * 65, ["x"]]}


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        *(("state", name, value) for name, values in STATES.items() for value in values),
        *((None, name, value) for name, values in BODIES.items() for value in values),
        *(("files", name, value) for name, values in ENTRIES.items() for value in values),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_manifest_with_a_field_of_another_kind_is_corrupt(
    finished: Path, tmp_path: Path, where: str | None, name: str, value: Any
) -> None:
    folder = shutil.copytree(finished / "checkpoints" / "step-00000004", tmp_path / "checkpoints" / "step-00000004")

    def change(body: dict[str, Any]) -> None:
        place = body[where] if where else body
        (place["model.safetensors"] if where == "files" else place)[name] = value

    sys.set_int_max_str_digits(0)  # lifts the limit of digits in this process; ranks keep the limit
    try:
        reseal(folder, change)
    finally:
        sys.set_int_max_str_digits(4300)
    for verify in (True, False):
        with pytest.raises(CorruptCheckpoint) as caught:
            checkpoint.read(folder, verify)
        assert len(str(caught.value)) < 500


def test_a_manifest_of_a_gigabyte_or_of_brackets_is_corrupt(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished / "checkpoints" / "step-00000004", tmp_path / "step-00000004")
    os.truncate(folder / "manifest.json", 2**30)
    with pytest.raises(CorruptCheckpoint, match="too large"):
        checkpoint.read(folder)
    (folder / "manifest.json").write_text('{"manifest":' * 100_000)
    with pytest.raises(CorruptCheckpoint, match="nested too deeply"):
        checkpoint.read(folder)


# --- 22: threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "warns"),
    [("2", "2", False), ("2", "1", True), ("", "1", True), ("2", "", True), ("", "", False), (None, "1", False)],
)
def test_another_number_of_threads_is_one_warning(tmp_path: Path, before: str | None, now: str, warns: bool) -> None:
    """``before`` is None for a checkpoint of a version that did not record the number of threads."""
    assert run_toy(tmp_path / "run", "--max-steps=2", OMP_NUM_THREADS=before or "").returncode == 0
    if before is None:
        reseal(tmp_path / "run" / "checkpoints" / "step-00000002", lambda body: body["state"].pop("threads"))
    done = run_toy(tmp_path / "run", "--max-steps=4", OMP_NUM_THREADS=now)
    assert done.returncode == 0
    found = [line for line in errors(done, "warning") if "OMP_NUM_THREADS" in line]
    assert len(found) == warns, done.stderr
    assert all(f"was {before or 'unset'} before this resume and is {now or 'unset'} now" in line for line in found)


@pytest.mark.parametrize("options", [(), ("--virtual-ranks=2",)])
def test_a_resume_on_another_processor_is_a_warning_where_bits_are_promised(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert run_toy(tmp_path / "run", "--max-steps=2", *options).returncode == 0
    done = run_toy(tmp_path / "run", "--max-steps=4", *options, DEVICE="two")
    assert done.returncode == 0
    found = [line for line in errors(done, "warning") if "device one before this resume, two now" in line]
    assert len(found) == len(options), done.stderr


@pytest.mark.parametrize("options", [(), ("--virtual-ranks=2",)])
def test_other_random_numbers_than_of_samestep_0_2_are_one_warning(tmp_path: Path, options: tuple[str, ...]) -> None:
    """A program without dropout does not record how it draws random numbers, and checkpoints of 0.2 do not either."""

    def warnings(steps: int, draws: bool) -> list[str]:
        words = f"--max-steps={steps}", *options
        done = run_toy(tmp_path / "run", *words, DRAWS="by row") if draws else run_toy(tmp_path / "run", *words)
        assert done.returncode == 0
        return [line for line in errors(done, "warning") if "random numbers" in line]

    assert warnings(2, draws=False) == []
    assert warnings(2, draws=True) == []  # the run has no step left
    assert warnings(4, draws=False) == []
    (line,) = warnings(6, draws=True)
    assert "random numbers of dropout differ from samestep 0.2's" in line
    assert "go on, or start a new run with --no-resume" in line
    assert warnings(8, draws=True) == []


# --- 16: the lock ----------------------------------------------------------------------------------------------------

READER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.lockf(descriptor, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def test_no_other_user_can_lock_a_new_run_dir(finished: Path) -> None:
    assert (finished / ".lock").stat().st_mode & 0o777 == 0o600


def test_a_lock_of_a_reader_does_not_name_a_dead_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, timeout=LIMIT, check=True)
    host = os.uname().nodename
    warned = StringIO()
    monkeypatch.setattr(log, "_console_errors", warned)
    texts = [f"toy (host {host}, pid {ended.stdout.strip()}, since now)", "\x1b[2J evil", "", "\xff" * 300]
    texts += [f"toy (host {host}, pid 99999999999999, since now)"]
    for text in texts:
        (tmp_path / ".lock").write_text(text)
        command = [sys.executable, "-c", READER, str(tmp_path / ".lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            try:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "held\n"
                lock = rundir.Lock(tmp_path, "me")
                with pytest.raises(ConfigError, match=r"is in use by another process: "):
                    lock.acquire(rundir.WRITER_BYTE, wait=0)
                os.close(lock._descriptor)
            finally:
                reader.kill()
    assert warned.getvalue().isprintable() or "\x1b" not in warned.getvalue()


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link"])
def test_a_lock_that_is_no_file_is_one_line(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "run").mkdir()
    put_in_the_way(tmp_path / "run" / ".lock", kind, outside)
    done = run_toy(tmp_path / "run")
    assert done.returncode == 2
    assert "not a regular file" in done.stderr
    assert outside.read_text() == "kept"


# --- 17: in the way --------------------------------------------------------------------------------------------------


def put_in_the_way(path: Path, kind: str, outside: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "file":
        path.write_text("in the way")
    elif kind == "hard link":
        path.hardlink_to(outside)
    else:
        path.symlink_to(outside)


# For a resumed run: a path, the kind of file at this path, the exit code, and the only error.
IN_THE_WAY = [
    ("log", "file", 2, r"cannot make \S+/log: Not a directory: name another place"),
    ("log/rank-0.log", "folder", 1, r"cannot write \S+rank-0.log: not a regular file"),
    ("log/rank-0.log", "FIFO", 1, r"cannot write \S+rank-0.log: not a regular file"),
    ("log/rank-0.log", "link", 1, r"cannot write \S+rank-0.log: not a regular file"),
    ("log/alive-0", "folder", 1, r"log/alive-0 is a directory"),
    ("metrics.jsonl", "folder", 1, r"cannot write \S+metrics.jsonl: Is a directory"),
    (".metrics.jsonl.tmp", "folder", 1, r"cannot write \S+metrics.jsonl: Is a directory"),
    ("result.json", "folder", 1, r"cannot write \S+result.json: Is a directory"),
    ("model.safetensors", "folder", 1, r"cannot write \S+model.safetensors: Is a directory"),
]
# Files that a run replaces or skips, so that it continues; the test creates all files of a kind at once.
HARMLESS = {
    "FIFO": "log/.alive-0.0.tmp log/events.jsonl log/stack-0.txt checkpoints/.step-00000002.tmp metrics.jsonl "
    "checkpoints/step-00000007/manifest.json .metrics.jsonl.tmp",
    "link": "log/alive-0 log/.alive-0.0.tmp log/events.jsonl log/stack-0.txt checkpoints/.step-00000006.tmp "
    "checkpoints/step-00000005 metrics.jsonl .metrics.jsonl.tmp result.json model.safetensors .model.safetensors.tmp",
    "file": "checkpoints/.step-00000006.tmp checkpoints/step-00000005",
    "folder": "checkpoints/step-00000007/manifest.json",
}


@pytest.mark.parametrize(
    ("names", "kind", "code", "error"),
    [*IN_THE_WAY, *((names, kind, 0, "") for kind, names in HARMLESS.items())],
    ids=lambda value: str(value).partition(" ")[0],
)
def test_what_is_in_the_way_is_named_or_replaced_and_nothing_outside_changes(
    run_dir: Path, tmp_path: Path, names: str, kind: str, code: int, error: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    if names == "log":
        shutil.rmtree(run_dir / "log")
    for name in names.split():
        put_in_the_way(run_dir / name, kind, outside if "step-" in name else outside / "kept")
    done = run_toy(run_dir)
    assert done.returncode == code, done.stderr
    assert re.search(error, "\n".join(errors(done))), done.stderr
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"kept": "kept"}
    if code and names != "log":
        assert json.loads((run_dir / "log" / "no-restart").read_text())["code"] == code  # no restart follows


def test_a_file_in_place_of_the_checkpoints_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    done = run_toy(tmp_path / "run")
    assert done.returncode == 2
    assert re.search(r"cannot use --run-dir \S+: Not a directory: \S+/checkpoints", done.stderr)


# --- 3, 12, 13: places and streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["loop", "x" * 300, "\udcff"], ids=["loop", "long", "not UTF-8"])
@pytest.mark.parametrize("option", ["--run-dir", "--init-from"])
def test_a_place_that_cannot_be_looked_at_is_one_line(tmp_path: Path, option: str, place: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    done = run_toy(tmp_path / "run", option, str(tmp_path / place))
    assert done.returncode == 2
    assert re.search(option if option == "--init-from" else "--run-dir|cannot make", done.stderr)
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_run_with_closed_streams_trains(tmp_path: Path, finished: Path, closed: tuple[int, ...]) -> None:

    def close() -> None:
        for each in closed:
            os.close(each)

    done = run_toy(tmp_path / "run", before_start=close)
    assert done.returncode == 0
    assert result(tmp_path / "run")["weights_sha256"] == result(finished)["weights_sha256"]
    text = (tmp_path / "run" / "log" / "rank-0.log").read_text()
    assert "RESULT" in text
    assert "Traceback" not in text


# --- through the launch script ---------------------------------------------------------------------------------------


def place(name: str, kind: str) -> Callable[[ScratchProject], dict[str, str]]:
    def prepare(project: ScratchProject) -> dict[str, str]:
        outside = project.work / "outside"
        outside.touch()
        put_in_the_way(project.run_dir / name, kind, outside)
        return {}

    return prepare


ATTEMPTS = [
    *(
        Attempt(
            16,
            f"a {kind} as .lock",
            2,
            r"cannot use --run-dir \S+: not a regular file \(remove it\): \S+/.lock",
            prepare=place(".lock", kind),
        )
        for kind in ("folder", "FIFO", "link")
    ),
    *(
        Attempt(16, f"a {kind} as {name}", 2, message, prepare=place(name, kind))
        for name, kind, message in [
            (".lock", "hard link", r"cannot use --run-dir \S+: a hard link: another name has the same content"),
            ("log", "link", r"\S+/log is a link: remove it, or name its target by --run-dir"),
            ("checkpoints", "link", r"\S+/checkpoints is a link: remove it, or name its target by --run-dir"),
            ("log/launcher.log", "hard link", r"cannot write to \S+launcher.log: a hard link"),
            ("log/rank-0.log", "hard link", r"\S+/log/rank-0.log is a hard link, another name of the same file"),
        ]
    ),
    *(
        Attempt(
            18, word, 2, rf"{word.partition('=')[0]}: '.*' is not a .* (less than|to) {limit}", arguments=("2", word)
        )
        for word, limit in [
            ("--timeout=1e10", r"1e\+07"),
            ("--grace=1e300", r"1e\+07"),
            ("--lr=1e308", r"1e\+38"),
            (f"--epochs={10**18}", "2147483647"),
            (f"--global-batch-size={2**62}", "2147483647"),
            (f"--log-every={2**31}", "2147483647"),
        ]
    ),
]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=str)
def test_an_attempt_ends_as_the_table_says(project: ScratchProject, attempt: Attempt) -> None:
    check(project, attempt)


# --- fuzzing ---------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, 2**70, -(2**63), 10**30])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["/dev/zero", "../../x", "\x1b[2J", "\0", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """Draw a copy of a JSON value in which one value is replaced or dropped."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 4)):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(list(keys)))
        copy = value.copy()
        if draw(st.integers(0, 5)):
            copy[key] = draw(mutated(value[key]))
        else:
            del copy[key]
        return copy
    return draw(VALUES)


def examples(soak: bool, default: int, high: int) -> settings:
    return settings(FUZZ, max_examples=amount(soak, few=default, many=high))


def test_any_manifest_is_read_or_corrupt(finished: Path, tmp_path: Path, soak: bool) -> None:
    folder = shutil.copytree(finished / "checkpoints" / "step-00000004", tmp_path / "step-00000004")
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    body["state"]["best"] = {"step": 2, "test_loss": 0.5}
    before = sorted(tmp_path.rglob("*"))

    @given(mutated(body))
    @examples(soak, 150, 3000)
    def attempt(changed: Any) -> None:
        canonical = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
        sealed = {"manifest": changed, "sha256": hashlib.sha256(canonical).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(sealed))
        for verify in (True, False):
            with contextlib.suppress(CorruptCheckpoint):
                found = checkpoint.read(folder, verify)
                assert found.state.get("seconds", 0) >= 0
                with contextlib.suppress(CorruptCheckpoint):
                    storage.stored_groups(found)

    attempt()
    assert sorted(tmp_path.rglob("*")) == before


def test_any_pieces_of_a_sharded_manifest_are_read_or_corrupt(tmp_path: Path, soak: bool) -> None:
    files: dict[str, Any] = {"model-00000.safetensors": {}, "model-00001.safetensors": {}}
    entry = {"dtype": "float32", "shape": [6, 4], "pieces": [[0, [0, 0], [3, 4]], [1, [3, 0], [3, 4]]]}
    pieces = {"model": {"w": entry, "b": {"dtype": "int64", "shape": [], "pieces": [[0, [], []]]}}}

    @given(mutated(pieces))
    @examples(soak, 150, 2000)
    def attempt(changed: Any) -> None:
        found = checkpoint.Checkpoint(tmp_path, "toy", 1, {}, {}, {}, files, changed)
        with contextlib.suppress(CorruptCheckpoint):
            for arrays in storage.stored_groups(found).values():
                for each in arrays.values():
                    assert all(path.parent == tmp_path for path, *_ in each.pieces)

    attempt()
    assert list(tmp_path.iterdir()) == []


def test_any_metrics_are_cut_back(tmp_path: Path, soak: bool) -> None:
    line = {"step": 3, "epoch": 0, "loss": 0.5, "resumed": {"step": 2, "app": "toy"}}
    texts = mutated(line).map(json.dumps) | st.text(max_size=50)

    @given(st.lists(texts, max_size=5))
    @examples(soak, 100, 2500)
    def attempt(lines: list[str]) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text("\n".join(lines), errors="replace")
        metrics.Metrics(tmp_path, {"app": "toy"}, 2)
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(type(each.get("step", 0)) is int or "resumed" in each for each in kept)
        assert sorted(os.listdir(tmp_path)) == ["log", "metrics.jsonl"]
        assert os.listdir(tmp_path / "log") == ["losses.bin"]

    attempt()


def test_any_files_of_ranks_are_diagnosed(tmp_path: Path, soak: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"rank": 0, "pid": os.getpid(), "host": os.uname().nodename, "job": "j", "step": 3, "updates": 3}
    now |= {"time": time.time(), "at": [__file__, 1, "f"], "waiting": True, "world_size": 2, "waited": 1.0}
    now |= {"collective": {"name": "sum", "number": 3, "pending": True}, "verdict": "rank 1 it is"}
    other = {**now, "rank": 1, "pid": 1}
    crash = f'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "{__file__}", line 3 in f\n'
    stacks = [crash, crash.replace(__file__, "/dev/zero"), "Thread \n" + '  File "x", line 1 in ' * 99]
    options = Options(run_dir=tmp_path, lr=0.1)
    world = World(0, 2)
    logs = tmp_path / "log"
    logs.mkdir()
    monkeypatch.setenv("SAMESTEP_RESTARTS", "1")

    @given(
        *(mutated(other) for _ in range(2)),
        mutated({"rank": 1}),
        mutated({"step": 3, "start": 0}),
        st.sampled_from(stacks),
    )
    @examples(soak, 60, 2500)
    def attempt(alive: Any, hang: Any, stalled: Any, note: Any, text: str) -> None:
        values = {"alive-1": alive, "hang-1.json": hang, "hanging": hang, "stalled": stalled, "not-finite": note}
        for name, value in values.items():
            (logs / name).write_text(json.dumps(value))
        (logs / "stack-1.txt").write_text(text, errors="replace")
        line = hang_diagnosis.explain(logs, now, time.monotonic())
        hang_diagnosis.save_diagnosis(logs, now, line)
        hang_diagnosis.dump_state_if_others_hang(logs, now, lambda: now)
        hang_diagnosis.all_ranks_alive(logs, "j", 2)
        assert len(hang_diagnosis.crashes(logs, "j")) < 5000
        assert isinstance(
            replica_check.not_finite("loss", float("nan"), 3, options, world), (RetryableError, NonRetryableError)
        )

    attempt()
    assert os.listdir(tmp_path) == ["log"]
