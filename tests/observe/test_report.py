"""Test the report: its page for runs that a toy's real `Run` made, and for run dirs that are damaged file by file."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import rundirs
from samestep import events
from samestep.env import World
from samestep.metrics import Metrics
from samestep.options import Options
from samestep.recovery import hang_diagnosis
from samestep.recovery.watchdog import Watchdog
from samestep_observe import report, report_page, run_reader
from samestep_observe.report_page import Page, Table

LOADS = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
VOID = {"meta", "br", "link", "img"}


class Checked(HTMLParser):
    """Parse a page, and collect its tags, IDs and faults: tags in the wrong order, loads and event handlers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.open += [] if tag in VOID else [tag]
        self.wrong += [f"<{tag} {name}>" for name in values if name in LOADS or name.startswith("on")]
        self.ids += [values["id"] or ""] if "id" in values else []
        for name in ("aria-labelledby", "aria-describedby"):
            self.named += (values.get(name) or "").split()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return rundirs.make(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def damaged_run(made: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the killed run with the files of a hang, which a test may damage."""
    copy = Path(shutil.copytree(made["killed"], tmp_path / "run"))
    leave_a_hang(copy)
    events.append_event(copy / "log", events.HANG, rank=0, step=7, text="no progress")
    (copy / "evaluation.json").write_text('{"test_loss": 0.25, "test_examples": 6}')
    return copy


def leave_a_hang(run_dir: Path) -> None:
    """Write the file of a hang as a watchdog does."""
    watchdog = Watchdog()
    watchdog.start(World(0, 2), Options(timeout=300.0))
    watchdog.resume_at(7)
    hang_diagnosis.dump_state(run_dir / "log", watchdog.state(), verdict="rank 1 (vm, pid 2) is at train.py:1")


def page_of(*run_dirs: Path) -> Page:
    return report.build([run_reader.read(run_dir) for run_dir in run_dirs])


def table(page: Page, title: str) -> Table:
    return next(each for each in page.tables if each.title == title)


def test_a_page_of_three_runs_says_what_happened_to_each(made: dict[str, Path]) -> None:
    page = page_of(made["whole"], made["killed"], made["stopped"])
    assert page.names == ["whole", "killed", "stopped"]
    assert [run.state.text for run in page.runs] == [
        "finished at step 12",
        "finished at step 12",
        "stopped by SIGTERM at step 6; the same --run-dir resumes from there",
    ]
    assert [run.problems for run in page.runs] == [[], [], []]
    killed, stopped = (page.timelines[i].events for i in (1, 2))
    assert [(event.kind, event.step) for event in killed] == [("restart", 8)]
    assert [(event.kind, event.step) for event in stopped] == [("signal", 6)]
    assert page.timelines[1].saved == [4, 8, 12]
    compared = table(page, "Losses against the first run").rows
    assert [(row[0], row[1], row[4]) for row in compared] == [
        ("killed", "12", "equal in all bits"),
        ("stopped", "6", "equal in all bits"),
    ]
    weights = [row[-1] for row in table(page, "Results").rows]
    assert weights[1] == f"{weights[0]} = first"
    assert weights[2] == ""
    assert "whole" not in table(page, "What happened").note
    assert "killed 2" in table(page, "What happened").note
    assert [panel.title for panel in page.panels] == [
        "Loss",
        "Difference from the first run",
        "Test accuracy",
        "Samples per second",
    ]


def test_the_page_begins_with_verdicts_and_results(tmp_path: Path) -> None:
    losses = {"a": [1.0, 2.0, 4.0], "same": [1.0, 2.0, 4.0], "near": [1.0, 2.0, 4.0 + 1e-15], "far": [1.0, 2.5, 8.0]}
    steps = {name: [{"step": i, "loss": loss} for i, loss in enumerate(each, 1)] for name, each in losses.items()}
    steps["none"] = [{"step": 9, "loss": 1.0}]
    page = page_of(*(write_run(tmp_path / name, each) for name, each in steps.items()))
    assert page.verdicts == [
        (True, "same matches a in all bits of the loss at 3 steps"),
        (True, "near matches a to 2e-16 in the loss at 3 steps"),
        (False, "far differs from a from step 2 on, by 0.25; 1 at most (tolerance 1e-04)"),
        (False, "none and a have no step in common"),
    ]
    text = report_page.html_of(page)
    places = [text.index(each) for each in ("2 of 4 runs match a", str(tmp_path / "near"), "<h2>Results", "<h2>Loss")]
    assert places == sorted(places)
    assert '<h1 class="differs">far differs' in report_page.html_of(page_of(tmp_path / "a", tmp_path / "far"))


def test_float64_must_match_more_closely(tmp_path: Path) -> None:
    lines = [[{"step": 1, "loss": loss}] for loss in (1.0, 1.0 + 1e-6)]
    for dtype, matches in (("float32", True), ("float64", False)):
        options = {"dtype": dtype}
        runs = [write_run(tmp_path / dtype / str(i), each, options=options) for i, each in enumerate(lines)]
        assert page_of(*runs).verdicts[0].matches == matches


def test_options_that_differ_are_marked_and_equal_ones_folded(made: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert rundirs.start(other, "whole", "--momentum=0.25", "--epochs=1") == 0
    page = page_of(made["whole"], other)
    differ = table(page, "Options that differ")
    assert [row[0] for row in differ.rows] == ["data_dir", "epochs", "momentum"]
    assert differ.rows[2] == ["momentum", "0.5", "0.25"]
    assert differ.marked == {(0, 2), (1, 2), (2, 2)}
    same = table(page, "Options that are equal")
    assert same.folded
    assert ["global_batch_size", "6"] in same.rows
    assert table(page, "Losses against the first run").rows[0][1] == "4"


def test_the_page_is_well_formed_names_its_parts_and_loads_nothing(made: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    assert report.main([*map(str, made.values()), "-o", str(output)]) == 0
    text = output.read_text()
    found = Checked(text)
    assert (found.wrong, found.open) == ([], [])
    assert len(found.ids) == len(set(found.ids))
    assert set(found.named) <= set(found.ids)
    assert found.tags.count("figure") == 5
    assert re.findall(r'class="axis"[^>]*>([^<]*)<', text) == [
        *("loss", "step", "relative difference", "step", "test accuracy", "step", "samples/s", "step", "step")
    ]
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text
    assert len(text) < 60_000


# --- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


WRONG = '{"step": {"a": []}, "rank": "x", "pid": -1, "time": [], "world": 3, "options": [], "app": {}, "loss": "<b>"}\n'
DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "of other types": lambda path: path.write_text(WRONG),
    "a list": lambda path: path.write_text("[[1, null], 1e999, NaN]\n"),
    "deep": lambda path: path.write_text("[" * 100_000 + "\n"),
    "one long line": lambda path: path.write_bytes(b"x" * (run_reader.BLOCK + 5) + b"\n"),
    "a pipe": fifo,
    "a folder": folder,
}
MANIFEST = "checkpoints/step-00000008/manifest.json"
FILES = {  # each file, and the damages that no problem line names
    "metrics.jsonl": set(),
    "result.json": {"missing", "of other types"},
    "evaluation.json": {"missing", "of other types"},
    "log/events.jsonl": {"missing", "truncated"},
    "log/launcher.log": {"truncated", "garbage", "of other types", "a list", "deep", "one long line"},
    "log/rank-0.log": {"truncated", "garbage", "of other types", "a list", "deep", "one long line"},
    "log/alive-0": {"missing"},
    "log/hang-0.json": {"missing"},
    MANIFEST: set(),
    "checkpoints/step-00000012/model.safetensors": {"garbage"},  # the report need not read arrays
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    name: str, damage: str, damaged_run: Path, tmp_path: Path
) -> None:
    DAMAGES[damage](damaged_run / name)
    output = tmp_path / "r.html"
    assert report.main([str(damaged_run), "-o", str(output)]) == 0
    text = output.read_text()
    assert Checked(text).wrong == []
    problems = run_reader.read(damaged_run).problems
    named = f"checkpoints/{Path(name).parent.name}" if name.startswith("checkpoints/") else name
    if damage not in FILES[name]:
        assert any(problem.startswith(named) for problem in problems), problems
        is_note = (name, damage) == ("log/launcher.log", "missing")  # torchrun alone writes no such file
        assert ("Missing or damaged" in text, "has no log/launcher.log" in text) == (not is_note, is_note)
    assert all(problem.startswith(named) for problem in problems if "safetensors" not in name), problems
    assert ("Difference from" in text, "<h2>Loss" in text) == (False, name != "metrics.jsonl" or damage == "truncated")


def test_a_run_without_anything_but_a_log_folder_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run" / "log").mkdir(parents=True)
    page = page_of(tmp_path / "run")
    assert page.runs[0].state.name == "new"
    assert [problem.partition(":")[0] for problem in page.runs[0].problems] == [
        *("metrics.jsonl", "log/launcher.log", "log/rank-0.log", "checkpoints")
    ]
    assert Checked(report_page.html_of(page)).wrong == []


def test_missing_and_quarantined_checkpoints_are_named(damaged_run: Path) -> None:
    for each in sorted((damaged_run / "checkpoints").iterdir())[:2]:
        each.rename(each.with_name(f"unequal-{each.name}"))
    data = run_reader.read(damaged_run)
    assert [each.quarantined for each in data.checkpoints] == ["unequal", "unequal", ""]
    assert [event.step for event in data.events if event.kind == "rollback"] == [4]
    shutil.rmtree(damaged_run / "checkpoints")
    assert "checkpoints: missing" in run_reader.read(damaged_run).problems


EVIL = "<script>alert(1)</script>"


def test_content_of_files_is_escaped(damaged_run: Path, tmp_path: Path) -> None:
    evil = damaged_run.rename(tmp_path / "<script>alert(1)<")
    lines = [json.loads(line) for line in (evil / "metrics.jsonl").read_text().splitlines()]
    for each in lines:
        for fields in (each, each.get("resumed", {})):
            fields |= {"app": EVIL, "</script>": 1.0, EVIL: 2.0} if fields else {}
            if "options" in fields:
                fields["options"][EVIL] = EVIL
                fields[EVIL] = EVIL
    lines[-1]["stragglers"] = [{"rank": EVIL, "phase": EVIL, "seconds": EVIL, "others": {}}]
    (evil / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (evil / "result.json").write_text(json.dumps({"app": EVIL, "steps": EVIL, EVIL: 3, "weights_sha256": EVIL}))
    with (evil / "log" / "rank-0.log").open("a") as log:
        log.write(f"2026-01-01T00:00:00 error: no progress for {EVIL} at step 3 \x1b[31m\n")
    output = tmp_path / "r.html"
    assert report.main([str(evil), "-o", str(output)]) == 0
    text = output.read_text()
    found = Checked(text)
    assert found.wrong == []
    assert found.tags.count("script") == 2
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "error: nowhere: no such folder: give a run dir"),
        (["metrics.jsonl"], "error: metrics.jsonl: no such folder"),
        (["."], "error: . holds no run: did you mean "),
        (["empty"], "error: empty holds no run: give the folder that holds metrics.jsonl and log/"),
        ([], "error: the following arguments are required: RUN_DIR (see --help)"),
        (
            ["run", "-o", "nowhere/r.html"],
            "error: cannot write nowhere/r.html: No such file or directory: name another",
        ),
        (["run", "--pgn", "x"], "error: unknown argument --pgn: did you mean --png?"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    message: str,
    damaged_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(damaged_run.parent)
    (damaged_run.parent / "empty").mkdir()
    (damaged_run.parent / "metrics.jsonl").write_text("a file where a folder is named")
    if arguments == ["."]:
        (damaged_run.parent / "metrics.jsonl").unlink()
    assert report.main(arguments) == 2
    out, errors = capsys.readouterr()
    assert (out, errors.count("\n")) == ("", 1)
    assert errors.startswith(message)


def test_a_picture_without_matplotlib_is_one_line(
    damaged_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert report.main([str(damaged_run), "--png", str(damaged_run / "r.png"), "-o", str(damaged_run / "r.html")]) == 2
    assert capsys.readouterr().err.startswith("error: --png needs matplotlib, which is not installed here: ")
    assert not (damaged_run / "r.html").exists()


# --- curves ----------------------------------------------------------------------------------------------------------


def write_run(run_dir: Path, lines: list[dict[str, Any]], app: str = "toy", **facts: Any) -> Path:
    """Write a run dir with these lines of metrics.jsonl, using `Metrics`."""
    (run_dir / "log").mkdir(parents=True)
    metrics = Metrics(
        run_dir, {"app": app, "options": {"global_batch_size": 8}, "world": {"world_size": 2}, **facts}, None
    )
    for line in lines:
        metrics.write(**line)
    return run_dir


def test_a_long_run_is_thinned_out_and_keeps_its_peaks(tmp_path: Path) -> None:
    peaks = {31_234: 9.5, 77_777: -3.25}
    lines = [{"step": i, "loss": peaks.get(i, 1 / i), "samples_per_second": 100.0} for i in range(1, 100_001)]
    page = page_of(write_run(tmp_path / "long", lines))
    line = page.panels[0].lines[0]
    points = dict(zip(line.steps, line.values))
    assert (line.total, len(points)) == (100_000, len(line.steps))
    assert len(points) <= report.MAX_POINTS
    assert peaks.items() <= points.items()
    assert (line.steps[0], line.steps[-1]) == (1, 100_000)
    assert "thinned out, from 100,000 points" in page.panels[0].note
    assert len(report_page.html_of(page)) < 100_000


def test_extreme_values_are_drawn(tmp_path: Path) -> None:
    extreme = [1.7e308, -1.7e308, 5e-324, 0.0, 10**400, True, "1", None]
    lines = [{"step": i + 1, "loss": value, "x": 1.0} for i, value in enumerate(extreme)]
    one = write_run(tmp_path / "one", lines)
    with (one / "metrics.jsonl").open("a") as file:  # a line of version 0.2
        file.write('{"step": 9, "loss": NaN, "x": 1.0}\n')
    two = write_run(tmp_path / "two", [{**line, "loss": 1.0} for line in lines])
    page = page_of(one, two)
    assert len(page.panels[0].lines[0].values) == 4
    assert "metrics.jsonl: 2 values left out: not finite numbers" in page.runs[0].problems
    assert Checked(report_page.html_of(page)).wrong == []


def test_runs_without_a_common_step_are_named(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [{"step": 2 * i, "loss": 1.0} for i in range(1, 5)])
    two = write_run(tmp_path / "two", [{"step": 2 * i + 1, "loss": 1.0} for i in range(1, 5)])
    row = table(page_of(one, two), "Losses against the first run").rows[0]
    assert row[4] == "no step that both logged: give both the same --log-every"


def test_a_straggler_is_shown_and_missing_records_are_explained(tmp_path: Path, made: dict[str, Path]) -> None:
    named = {"rank": 1, "phase": "input", "seconds": 0.213, "others": 0.004}
    page = page_of(write_run(tmp_path / "run", [{"step": 60, "loss": 1.0, "stragglers": [named]}]))
    assert table(page, "Time by phase and rank").rows == [["run", "60", "1", "input", "0.213", "0.004"]]
    (event,) = page.timelines[0].events
    assert event.text == "rank 1 is a straggler in input: 0.213 s per step, the others 0.004"
    phases = table(page_of(made["whole"]), "Time by phase and rank")
    assert phases.rows[0][0] == "no straggler was reported"
    assert "records no phases" in phases.note


def test_bits_per_byte_have_a_plot_and_apps_may_be_mixed(tmp_path: Path, made: dict[str, Path]) -> None:
    lines = [{"step": 1, "loss": 5.0, "test_loss": 4.0, "bits_per_byte": 5.8, "samples_per_second": 3.0}]
    page = page_of(made["whole"], write_run(tmp_path / "gpt", lines, app="gpt_fsdp"))
    assert "Bits per byte" in [panel.title for panel in page.panels]
    assert any("several apps" in note for note in page.notes)


def test_measurements_of_the_laboratory_are_listed(tmp_path: Path, made: dict[str, Path]) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    result = {"app": "collectives_lab", "command": "all", "world_size": 2, "seconds": 3.0}
    result["files"] = ["primitives-2.json", "aggregate-2.json", "report.html", "result.json"]
    (lab / "result.json").write_text(json.dumps(result))
    page = page_of(made["whole"], lab)
    (row,) = table(page, "Measurements of collectives_lab").rows
    assert row == ["lab", "all", "2", "aggregate, primitives", str(lab / "report.html")]
    assert (page.runs[1].problems, len(page.timelines)) == ([], 1)
    assert any("no curves" in note for note in page.notes)
    assert Checked(report_page.html_of(page_of(lab))).wrong == []


def test_more_runs_than_colors_are_distinguishable(tmp_path: Path) -> None:
    made = [write_run(tmp_path / f"{i}", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": i}]) for i in range(1, 20)]
    text = report_page.html_of(page_of(*made))
    assert Checked(text).wrong == []
    assert max(float(each) for each in re.findall(r'class="curve[^>]*stroke-width="([\d.]+)"', text)) == 3
    assert text.count('class="curve d2"') >= 2


def test_runs_of_one_name_get_different_names(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "x", tmp_path / "b" / "x"]
    assert report.names_of(folders) == ["a/x", "b/x"]
    assert report.names_of([folders[0], folders[0]]) == ["x (1)", "x (2)"]


def test_a_growing_run_is_read_without_its_incomplete_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    measured = run_reader.MetricsReader(run_dir)
    measured.read()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss"')
        file.flush()
        measured.read()
        assert (measured.step, measured.problems()) == (1, ["metrics.jsonl: its last line is cut off"])
        file.write(": 0.5}\n")
    measured.read()
    assert (measured.step, measured.problems()) == (2, [])
    Metrics(run_dir, {"app": "toy", "options": {}, "world": {}}, 1)  # a resume replaces the file by a shorter file
    measured.read()
    assert (measured.step, [start.step for start in measured.starts]) == (1, [0, 1])


def test_no_thread_is_left_running(made: dict[str, Path]) -> None:
    before = threading.active_count()
    page_of(*made.values())
    assert threading.active_count() == before
