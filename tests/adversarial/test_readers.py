"""Test samestep hang, watch and report on damaged run dirs: one line or a report, and no escape sequence."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st
from samestep_observe import hang_report, report, report_page, run_reader, watch
from scratch_project import CORE

ESCAPE = "\x1b]0;title\x07\x1b[2J\r\n\u202e\ud800"
NOW = 1_800_000_000.0
HEADER = {
    "app": "toy",
    "time": "2026-01-01T00:00:00",
    "options": {"lr": 0.1, "global_batch_size": 8},
    "world": {"world_size": 2},
}
LINES = [{"step": step, "loss": 1 / step, "samples_per_second": 9.0} for step in (1, 2, 3)]
STRAGGLER = {"step": 4, "stragglers": [{"rank": 1, "phase": "data", "seconds": 1.0, "others": 0.1}]}
EVENTS = [
    {"time": NOW, "kind": "start", "step": 0, "last_step": 9, "ranks": 2},
    {"time": NOW + 1, "kind": "start", "step": 2, "last_step": 9, "ranks": 2},
    {"time": NOW + 2, "kind": "failure", "step": 3, "text": "error: it failed"},
]
BEAT = {"rank": 0, "pid": 7, "step": 3, "time": NOW, "host": "alpha", "job": "j", "at": ["train.py", 3, "train"]}
HANG = {
    **BEAT,
    "world_size": 2,
    "waited": 9.0,
    "verdict": "rank 1 hangs",
    "trouble": "it is stopped",
    "collective": {"name": "all_reduce", "number": 3, "pending": True},
    "threads": [{"name": "MainThread", "calls": [["/a/train.py", 3, "train", "dist.all_reduce(x)"]]}],
}
STACK = 'Thread 0x1 (most recent call first):\n  File "{}", line 1 in main\n'
FILES: dict[str, Any] = {
    "metrics.jsonl": [HEADER, *LINES, STRAGGLER],
    "result.json": {"app": "toy", "steps": 4, "test_loss": 1.0, "framework": "f", "weights_sha256": "ab"},
    "evaluation.json": {"test_loss": 1.0},
    "log/events.jsonl": EVENTS,
    "log/alive-0": BEAT,
    "log/alive-1": {**BEAT, "rank": 1},
    "log/hang-0.json": HANG,
    "log/stack-1.txt": STACK.format("/a/train.py"),
    "log/launcher.log": "\n2026-01-01T00:00:00 torchrun train.py\nwarning: a line\n",
    "log/rank-0.log": "2026-01-01T00:00:00 toy, 2 ranks on cpu, steps 0 to 9, run dir r\n",
    "log/stalled": {"job": "j", "rank": 0},
    "log/no-restart": {"code": 1},
    "checkpoints/step-00000004/manifest.json": {"manifest": {"step": 4}, "sha256": "ab"},
    ".lock": "",
}
PROGRAMS = ("hang", "watch", "report")


def text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(json.dumps(each) + "\n" for each in content)
    if isinstance(content, str):
        return content
    return json.dumps(content)


def make(run_dir: Path, changes: dict[str, Any] | None = None) -> Path:
    for name, content in {**FILES, **(changes or {})}.items():
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(content))
    return run_dir


def escaped(content: Any) -> Any:
    """Return ``content`` with ESCAPE appended to every string, except the field kind."""
    if isinstance(content, dict):
        values = {name: escaped(value) for name, value in content.items()}
        return values | {name: value for name, value in content.items() if name == "kind"}
    if isinstance(content, list):
        return [escaped(each) for each in content]
    if isinstance(content, str):
        return f"{content}{ESCAPE}"
    return content


def escaped_file(content: Any) -> Any:
    """Return a file's content with ESCAPE appended to every string, or to every line."""
    if isinstance(content, str):
        return "".join(f"{line}{ESCAPE[:-1]}\n" for line in content.splitlines())
    return escaped(content)


@contextlib.contextmanager
def limited(seconds: int = 20) -> Iterator[None]:
    """Raise an error if the block lasts longer than ``seconds``."""

    def end(number: int, frame: object) -> None:
        raise AssertionError("it took too long")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read_by_all(run_dir: Path, output: Path) -> None:
    """Run the three programs in this process, and check their exit codes."""
    with limited():
        for main, words in (
            (hang_report.main, ["--threads"]),
            (watch.main, ["--once"]),
            (report.main, ["-o", str(output)]),
        ):
            assert main([str(run_dir), *words]) in (0, 2)


def start(program: str, *words: str | bytes | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run one of the programs as a user does, and check its output for tracebacks and control characters."""
    done = subprocess.run(
        [sys.executable, "-m", "samestep", program, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(CORE), **environ},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", done.stdout + done.stderr), done
    return done


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_escape_sequence_reaches_the_terminal(tmp_path: Path, program: str) -> None:
    make(tmp_path / "run")
    for name, content in FILES.items():
        (tmp_path / "run" / name).write_text(text_of(escaped_file(content)))
    assert start(program, tmp_path / "run", cwd=tmp_path).returncode == 0
    for name in ("log/hang-0.json", "result.json"):
        (tmp_path / "run" / name).unlink()
    start(program, tmp_path / "run", cwd=tmp_path)
    if program == "report":
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", (tmp_path / "report.html").read_text())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_path_that_is_no_text_is_read_or_named_in_one_line(tmp_path: Path, program: str) -> None:
    names = [b"run-\xff\x1b[2J", b"missing-\xff\x1b[2J", b"x" * 5000]
    shutil.copytree(make(tmp_path / "run"), tmp_path / os.fsdecode(names[0]))
    codes = []
    for name in names:
        done = start(program, name, cwd=tmp_path, PYTHONIOENCODING="ascii")
        codes.append(done.returncode)
        if done.returncode:
            assert re.fullmatch(rb"error: .+\n", done.stderr), done.stderr
    assert codes[0] in (0, 2)
    assert codes[1:] == [2, 2]


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.touch(),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 99),
    "number": lambda path: path.write_text("7"),
    "deep JSON": lambda path: path.write_text('{"a":' * 100_000),
    "less deep JSON": lambda path: path.write_text(
        json.dumps({**FILES["log/hang-0.json"], **HEADER}).replace('"job": "j"', '"host": ' + "[" * 900 + "]" * 900)
    ),
    "a large sparse file": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**26),
    "long numbers": lambda path: path.write_text(
        f"2026-01-01T00:00:00 toy, {'9' * 5000} ranks on cpu, steps 0 to {'9' * 5000}, run dir r\n"
        f"2026-01-01T00:00:00 toy, 2 ranks on cpu, steps 0 to {'9' * 400}, run dir r\n"
    ),
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_is_in_a_files_place_is_named_and_passed_over(tmp_path: Path, kind: str) -> None:
    run_dir = make(tmp_path / "run")
    for name in [*FILES, "log", "checkpoints", "checkpoints/step-00000004"]:
        place = run_dir / name
        kept = tmp_path / "kept"
        place.rename(kept)
        OBSTACLES[kind](place)
        read_by_all(run_dir, tmp_path / "report.html")
        if place.is_dir() and not place.is_symlink():
            place.rmdir()
        else:
            place.unlink()
        kept.rename(place)


def test_a_stack_does_not_lead_to_a_file_that_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    run_dir = make(tmp_path / "run", {"log/stack-1.txt": STACK.format(tmp_path / "train.py")})
    (run_dir / "log" / "hang-0.json").unlink()
    read_by_all(run_dir, tmp_path / "report.html")


WRONG: list[Any] = [None, True, -1, 2**63, 10**400, 1e308, float("nan"), "text", [], [[]], {}, {"a": []}, "9" * 5000]


def changed(content: Any, value: Any) -> Iterator[Any]:
    """Yield copies of ``content`` with one of its values replaced by ``value``."""
    yield value
    pairs: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        pairs = [*content.items()]
    elif isinstance(content, list):
        pairs = [*enumerate(content)]
    for key, inner in pairs:
        for each in changed(inner, value):
            copied = copy.copy(content)
            copied[key] = each
            yield copied


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
def test_a_value_of_another_kind_is_passed_over(
    tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make(tmp_path / "run")
    for name, readers in (("log/hang-0.json", [hang_report.main]), ("log/alive-1", [hang_report.main, watch.main])):
        for content in changed(FILES[name], value):
            (run_dir / name).write_text(text_of(content if isinstance(content, dict) else [content]))
            with limited():
                assert all(main([str(run_dir)]) in (0, 2) for main in readers)
        (run_dir / name).write_text(text_of(FILES[name]))
    for name in ("metrics.jsonl", "log/events.jsonl", "result.json", "evaluation.json"):
        contents = [*changed(FILES[name], value)]
        for content in contents:
            (run_dir / name).write_text(text_of(content))
            with limited():
                assert watch.main([str(run_dir)]) == 0
                report_page.html_of(report.build([run_reader.read(run_dir)] * 2)).encode()
        (run_dir / name).write_text(text_of(FILES[name]))


def test_a_job_of_a_million_ranks_that_left_one_file_is_shown_at_once(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", {"log/hang-0.json": {**HANG, "world_size": 2**20}})
    with limited(10):
        assert hang_report.main([str(run_dir)]) == 0


def test_measurements_without_end_are_left_out(tmp_path: Path) -> None:
    many = {"step": 5, **{f"m{i}": 1.0 for i in range(5000)}}
    run_dir = make(tmp_path / "run", {"metrics.jsonl": [HEADER, *LINES, many]})
    data = run_reader.read(run_dir)
    assert len(data.metrics.curves) == run_reader.MAX_CURVES
    assert any("values left out: of more than" in problem for problem in data.problems)


EXTREMES = [[0.0, 1e308], [-1.7e308, 1.7e308], [5e-324, 0.0], [1e308] * 99, [1.7e308], [-1.7e308]]


@pytest.mark.parametrize("values", EXTREMES, ids=lambda values: repr(values)[:12])
def test_a_curve_of_extreme_values_is_drawn(tmp_path: Path, values: list[float]) -> None:
    curve = run_reader.Curve()
    curve.values.extend(values)
    assert watch.sparkline(curve, 8)
    lines = [HEADER, *({"step": step, "loss": value} for step, value in enumerate(values, 1))]
    run_dir = make(tmp_path / "run", {"metrics.jsonl": lines})
    assert "Loss" in report_page.html_of(report.build([run_reader.read(run_dir)]))


# --- fuzz ------------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.sampled_from(WRONG),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def objects(examples: list[dict[str, Any]]) -> st.SearchStrategy[Any]:
    """Return a strategy for objects like the examples with up to 3 fields replaced, and for any other value."""
    names = st.sampled_from(sorted({name for example in examples for name in example}))
    changes = st.dictionaries(names, VALUES, max_size=3)
    return st.tuples(st.sampled_from(examples), changes).map(lambda pair: {**pair[0], **pair[1]}) | VALUES


LINES_OF = {
    "metrics.jsonl": objects([HEADER, *LINES, STRAGGLER, {"resumed": HEADER}]),
    "log/events.jsonl": objects(EVENTS),
}
OBJECTS_OF = {
    name: objects([FILES[name]]) for name in ("log/alive-1", "log/hang-0.json", "result.json", "log/no-restart")
}


def test_any_run_dir_is_shown(tmp_path: Path, soak: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make(tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    lines = {name: st.lists(line, max_size=4) for name, line in LINES_OF.items()}
    texts = {"log/rank-0.log": st.text(max_size=50), "log/stack-1.txt": st.text(max_size=50).map(STACK.format)}
    files = st.fixed_dictionaries({**lines, **OBJECTS_OF, **texts})

    @given(files)
    @settings(max_examples=amount(soak, few=60, many=1500), deadline=None, database=None)
    def attempt(contents: dict[str, Any]) -> None:
        for name, content in contents.items():
            (run_dir / name).write_text(text_of(content), errors="replace")
        with limited():
            for main in (hang_report.main, watch.main):
                assert main([str(run_dir)]) in (0, 2)
            report_page.html_of(report.build([run_reader.read(run_dir)] * 2)).encode()
        printed = "".join(capsys.readouterr())
        assert printed.replace("\n", "").isprintable()

    attempt()
