"""Test replay, verify and diff on run dirs that a toy's real `Run` made."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rundirs
from samestep import ConfigError, checkpoint, manifest, step_losses, trace
from samestep_observe import diff, replay, replay_export, replay_report, report, run_reader, traces, verify
from samestep_observe.recorded import Comparison, RecordedRun, compare
from samestep_observe.replay_job import find_script, kept_arguments, make_plan, start_words
from samestep_observe.run_reader import MetricsReader, read_losses

STEP = rundirs.STEPS
RECORD = step_losses.RECORD.itemsize


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the runs of `rundirs.make`, and a run ``other`` with another momentum but the same losses."""
    folder = tmp_path_factory.mktemp("runs")
    found = rundirs.make(folder)
    found["other"] = folder / "other"
    assert rundirs.start(found["other"], "whole", "--momentum=0.25", "--log-every=5") == 0
    return found


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["killed"], tmp_path / "run"))


def output(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return found.out + found.err


# --- records of a run ------------------------------------------------------------------------------------------------


def test_losses_file_has_each_step_once_after_a_kill_and_a_restart(made: dict[str, Path]) -> None:
    """metrics.jsonl may have a line only for every fifth step; its losses equal the recorded losses bit for bit."""
    for name in ("whole", "killed", "other"):
        records = step_losses.read(made[name])
        assert records["step"].tolist() == [*range(1, STEP + 1)]
        reader = MetricsReader(made[name])
        reader.read()
        losses = dict(zip(records["step"].tolist(), records["loss"].tolist()))
        for step, loss in zip(reader.curves["loss"].steps, reader.curves["loss"].values):
            assert losses[step] == loss
    assert step_losses.read(made["whole"]).tobytes() == step_losses.read(made["killed"]).tobytes()


def test_losses_are_cut_back_to_the_step_of_a_resume(tmp_path: Path) -> None:
    writer = step_losses.StepLosses(tmp_path, None)
    writer.write([(1, 0.5), (2, 0.25), (3, math.nan)])
    with (tmp_path / step_losses.NAME).open("ab") as file:
        file.write(b"cut off")
    assert step_losses.read(tmp_path)["step"].tolist() == [1, 2, 3]
    step_losses.StepLosses(tmp_path, 2).write([(3, 0.125)])
    assert step_losses.read(tmp_path).tolist() == [(1, 0.5), (2, 0.25), (3, 0.125)]
    step_losses.StepLosses(tmp_path, None)
    assert (tmp_path / step_losses.NAME).read_bytes() == b""


@pytest.mark.parametrize(("steps", "last", "count"), [([1, 2, 3], 9, 3), ([1, 3, 2], 9, 2), ([0, 1], 9, 0), ([], 9, 0)])
def test_records_count_while_their_steps_rise(steps: list[int], last: int, count: int) -> None:
    records = np.zeros(len(steps), step_losses.RECORD)
    records["step"] = steps
    assert step_losses.count_until(records, last) == count


def test_a_manifest_has_a_digest_of_each_tensor(made: dict[str, Path]) -> None:
    saved = checkpoint.read(checkpoint.folder_of(made["whole"], STEP))
    for name, entry in saved.files.items():
        assert entry["tensors"] == checkpoint.tensor_digests(saved.contents[name.removesuffix(".safetensors")])
    assert set(saved.files["model.safetensors"]["tensors"]) == {"w", "updates"}


# --- the plan of a replay --------------------------------------------------------------------------------------------


def test_a_replay_starts_from_the_newest_checkpoint_before_its_step(made: dict[str, Path]) -> None:
    run = RecordedRun(made["whole"])
    steps = [each.step for each in run.checkpoints]
    assert make_plan(run, steps[-1], last=steps[-1]).start_step == steps[-2]
    assert make_plan(run, steps[0], last=steps[0]).start is None
    assert make_plan(run, steps[0] + 1, last=STEP).start_step == steps[0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"world": {"world_size": 2}}, "ranks: 2, 1"),
        ({"options": {"init_from": "w.safetensors"}}, "--init-from: w.safetensors, None"),
        ({"torch": "1.0"}, "torch: 1.0, None"),
    ],
)
def test_a_replay_does_not_join_steps_of_starts_with_other_settings(
    copy: Path, values: dict[str, Any], text: str
) -> None:
    """The killed run was resumed at step 8. A replay from the seed to step 10 is one start, so it rounds otherwise."""
    change_header(copy, **values)
    run = RecordedRun(copy)
    first, second = run.metrics.starts
    assert first.step < second.step < 10
    with pytest.raises(ConfigError, match=re.escape(f"resumed at step {second.step} with other settings ({text})")):
        make_plan(run, 10, last=10, start=0)
    assert make_plan(run, 10, last=10).start_step >= second.step
    assert make_plan(run, second.step, last=second.step, start=0).start is None


def test_arguments_of_a_replay_leave_out_trackers() -> None:
    words = ["--lr=1", "--track", "wandb", "--seed", "3", "--track=mlflow"]
    assert kept_arguments(words) == ["--lr=1", "--seed", "3"]


def test_a_run_dir_never_names_the_program_to_start(made: dict[str, Path]) -> None:
    """The toy is not an app of this project, so the caller must give its program."""
    run = RecordedRun(made["whole"])
    plan = make_plan(run, 1, last=1)
    with pytest.raises(ConfigError, match="name it by --program"):
        start_words(plan, run.command, None)
    assert start_words(plan, run.command, Path("mine.py")) == [sys.executable, "-m", "samestep", "run", "-n1"]


def test_launch_script_is_found_by_the_place_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project has the package in an environment, and the caller may be in any folder."""
    script = tmp_path / "scripts" / "run_my_app.sh"
    for path in (script, tmp_path / "apps" / "my_app" / "train.py"):
        path.parent.mkdir(parents=True)
        path.touch()
    assert find_script("my_app") is None
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venvs" / "my_app"))
    assert find_script("my_app") == script


def change_header(run_dir: Path, **values: Any) -> None:
    """Change the header of metrics.jsonl; None removes a value."""
    first, *others = (run_dir / "metrics.jsonl").read_text().splitlines()
    header = {name: value for name, value in {**json.loads(first), **values}.items() if value is not None}
    (run_dir / "metrics.jsonl").write_text("\n".join([json.dumps(header), *others]) + "\n")


@pytest.mark.parametrize(
    ("header", "step", "expected"),
    [
        ({"mindspore": "2.10.0"}, 1, "whose steps samestep replay cannot run again"),
        ({"world": {"launcher": "torchft"}}, 1, "whose steps samestep replay cannot run again"),
        ({"command": None}, 1, "an earlier version of samestep wrote it"),
        ({"command": {"arguments": "rm"}}, 1, "does not say how it was started"),
        ({}, STEP + 1, f"has the steps 1 to {STEP}, not {STEP + 1}"),
        ({"app": "../../x"}, 1, "not of an app of this project"),
    ],
)
def test_a_run_that_cannot_be_replayed_is_one_line(
    made: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    header: dict[str, Any],
    step: int,
    expected: str,
) -> None:
    run_dir = Path(shutil.copytree(made["whole"], tmp_path / "run"))
    change_header(run_dir, **header)
    assert replay.main([str(run_dir), f"--step={step}"]) == 2
    errors = [line for line in output(capsys).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert expected in errors[0]


def test_a_long_replay_from_the_seed_asks_for_yes(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_STEPS", 2)
    plan = make_plan(RecordedRun(made["whole"]), 3, last=3)
    with pytest.raises(ConfigError, match=r"step 3 needs 3 steps from the seed.*add --yes"):
        replay.check_length(plan, is_allowed=False)
    replay.check_length(plan, is_allowed=True)


# --- the output ------------------------------------------------------------------------------------------------------


def test_losses_are_compared_to_the_bit() -> None:
    one = {1: 0.5, 2: math.nan, 3: 0.1 + 0.2, 4: 1.0}
    assert compare(one, {1: 0.5, 2: math.nan, 5: 1.0}) == Comparison(count=2, equal=2, first=None)
    assert compare(one, {1: 0.5, 3: 0.3, 4: 2.0}) == Comparison(count=3, equal=1, first=3)
    assert not compare(one, {}).is_equal


def test_norms_add_up_the_parts_of_all_ranks() -> None:
    """Each of two replicas counts half, and a shard counts fully."""
    whole = {"shape": [2], "weight": 4.0, "gradient": 9.0, "update": 1.0, "share": 0.5}
    shard = {**whole, "weight": 2.0, "share": 1.0}
    records = [{"tensors": {"a": whole, "b": shard}}, {"tensors": {"a": whole, "b": shard}}]
    replica, sharded = replay_report.layers(records)
    assert (replica.weight, replica.gradient) == (2.0, 3.0)
    assert sharded.weight == 2.0


def test_largest_activation_of_a_module_is_nan_if_a_rank_has_nan() -> None:
    records = [{"activations": {"a": math.nan, "b": 1.0}}, {"activations": {"a": 2.0, "b": 3.0}}]
    found = replay_report.activations(records[::-1])
    assert math.isnan(found["a"])
    assert found["b"] == 3.0


def test_an_image_becomes_a_png() -> None:
    content = replay_export.png(np.arange(6, dtype=np.float32).reshape(1, 2, 3))
    assert struct.unpack(">II", content[16:24]) == (3, 2)
    begin = content.index(b"IDAT") + 4
    assert zlib.decompress(content[begin:-16]) == bytes([0, 0, 51, 102, 0, 153, 204, 255])


# --- verify ----------------------------------------------------------------------------------------------------------


def edit_lines(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def tamper(run_dir: Path) -> None:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        (run_dir / "metrics.jsonl").write_text("\n".join(change(lines)) + "\n")

    return tamper


def edit_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def tamper(run_dir: Path) -> None:
        path = run_dir / name
        path.write_bytes(change(path.read_bytes()))

    return tamper


def edit_result(**values: Any) -> Callable[[Path], None]:
    def tamper(run_dir: Path) -> None:
        result = json.loads((run_dir / "result.json").read_text())
        (run_dir / "result.json").write_text(json.dumps({**result, **values}))

    return tamper


def replace_checkpoint(**values: Any) -> Callable[[Path], None]:
    """Return a function that changes the last checkpoint's manifest and its checksum."""

    def tamper(run_dir: Path) -> None:
        path = checkpoint.folder_of(run_dir, STEP) / "manifest.json"
        body = {**json.loads(path.read_text())["manifest"]}
        for name, value in values.items():
            body[name] = {**body[name], **value} if isinstance(value, dict) else value
        content = manifest.encode(body)
        digest = hashlib.sha256(content).hexdigest().encode()
        path.write_bytes(b'{"manifest": %b, "sha256": "%b"}' % (content, digest))

    return tamper


def flip(content: bytes) -> bytes:
    """Flip the lowest bit of the last byte."""
    return content[:-1] + bytes([content[-1] ^ 1])


def with_value(name: str, value: Any, number: int) -> Callable[[list[str]], list[str]]:
    """Return a function that changes a value in line ``number``, counted from 0."""

    def change(lines: list[str]) -> list[str]:
        line = {**json.loads(lines[number]), name: value}
        return [*lines[:number], json.dumps(line), *lines[number + 1 :]]

    return change


def repeat_a_line_of_a_trace(run_dir: Path) -> None:
    record = trace.Record(2, {"w": 1}, {"w": 2})
    trace.TraceFile(run_dir, None).write([record, record])


LAST = f"checkpoints/step-{STEP:08d}"
TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit in weights of a checkpoint": (edit_bytes(f"{LAST}/model.safetensors", flip), "tensor "),
    "a flipped bit in a manifest": (edit_bytes(f"{LAST}/manifest.json", flip), f"{LAST}: "),
    "a cut file of a checkpoint": (edit_bytes(f"{LAST}/optimizer.safetensors", lambda content: content[:-4]), LAST),
    "a checkpoint of another app": (replace_checkpoint(app="other"), "it is of other, not of toy"),
    "a checkpoint with another option": (replace_checkpoint(arithmetic={"seed": 7}), "its --seed is 7"),
    "a checkpoint of other data": (replace_checkpoint(state={"dataset_fingerprint": "a"}), "other data"),
    "a checkpoint with another loss": (replace_checkpoint(state={"train_loss": 99.0}), "its mean loss of the epoch"),
    "a line left out": (edit_lines(lambda lines: lines[:5] + lines[6:]), "step 5 has no line"),
    "a line repeated": (edit_lines(lambda lines: lines[:5] + lines[4:]), "line 6: step 4 follows 4"),
    "two lines exchanged": (edit_lines(lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]]), "line 5: step"),
    "a line cut off": (edit_bytes("metrics.jsonl", lambda content: content[:-9]), "its last line is cut off"),
    "a line that is no JSON": (edit_lines(lambda lines: [*lines[:3], "{", *lines[4:]]), "line 4 is no JSON object"),
    "the header left out": (edit_lines(lambda lines: lines[1:]), "its first line is no header"),
    "all lines left out": (edit_lines(lambda lines: lines[:1]), "step 1 has no line"),
    "a changed loss": (edit_lines(with_value("loss", 0.125, 2)), "step 2 has "),
    "a changed sample count": (edit_lines(with_value("samples_seen", 1, 3)), "line 4: samples_seen 1 follows"),
    "a changed evaluation": (edit_lines(with_value("test_loss", 0.5, -1)), "test_loss is "),
    "a changed loss of a step": (edit_bytes("log/losses.bin", flip), f"step {STEP} has "),
    "losses cut off": (edit_bytes("log/losses.bin", lambda content: content[: 5 * RECORD]), "it ends at step 5"),
    "losses repeated": (edit_bytes("log/losses.bin", lambda content: content[:RECORD] + content), "record 2 is of"),
    "losses left out": (edit_bytes("log/losses.bin", lambda content: content[RECORD:]), "record 1 is of step 2"),
    "a line of a trace repeated": (repeat_a_line_of_a_trace, "line 2 is damaged, or of a step that does not follow"),
    "a changed result": (edit_result(test_loss=0.5), "test_loss is 0.5"),
    "a result of another seed": (edit_result(seed=7), "seed is 7"),
    "a result of fewer steps": (edit_result(steps=4), "it has 4 steps"),
    "a result of other weights": (edit_result(weights_sha256="0" * 64), "their SHA-256 is "),
    "changed weights": (edit_bytes("model.safetensors", flip), "their SHA-256 is "),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_verify_names_what_was_tampered_with(copy: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    tamper, expected = TAMPERED[name]
    tamper(copy)
    assert verify.main([str(copy), "--steps=0"]) in (1, 2)
    assert expected in output(capsys)


def test_verify_finds_nothing_wrong_with_sound_runs(made: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """One of the runs was stopped before its end."""
    for run_dir in made.values():
        assert verify.main([str(run_dir), "--steps=0"]) == 0, output(capsys)


def test_verify_finds_nothing_wrong_with_a_run_that_is_extended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run keeps the result of its earlier end, until it ends again."""
    run_dir = tmp_path / "run"
    assert rundirs.start(run_dir, "whole", "--max-steps=4") == 0
    assert rundirs.start(run_dir, "killed", "--max-steps=12") == 137
    assert verify.main([str(run_dir), "--steps=0"]) == 0, output(capsys)
    assert "of an earlier end, at step 4" in output(capsys)


def test_stretches_lie_between_checkpoints(made: dict[str, Path]) -> None:
    found = verify.stretches(RecordedRun(made["whole"]))
    assert [stretch.start for stretch in found[1:]] == [stretch.end for stretch in found[:-1]]
    assert (found[0].start, found[-1].end) == (0, STEP)
    assert len(verify.choose(found, 2)) == 2


# --- diff ------------------------------------------------------------------------------------------------------------


def test_runs_with_equal_losses_and_checkpoints_are_identical(
    made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff.main([str(made["whole"]), str(made["killed"])]) == 0
    assert f"identical: the losses of {STEP} steps and " in output(capsys)


def test_diff_names_the_setting_and_the_tensor_after_equal_losses(
    made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff.main([str(made["whole"]), str(made["other"])]) == 1
    text = output(capsys)
    assert "settings: --momentum: 0.5, 0.25" in text
    assert "model: w differs, after equal losses" in text


def test_diff_compares_final_weights_if_the_checkpoints_are_deleted(
    made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No loss depends on the last update."""
    run_dir = shutil.copytree(made["other"], tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    assert diff.main([str(made["whole"]), str(run_dir)]) == 1
    assert "different: the SHA-256 of the final weights in result.json, after equal losses" in output(capsys)


def test_a_reader_that_ends_early_does_not_make_different_runs_equal(made: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "samestep", "diff", str(made["whole"]), str(made["other"]), "--no-replay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) in (1, 128 + signal.SIGPIPE)


def test_diff_names_the_first_step_with_another_loss(
    made: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = edit_bytes("log/losses.bin", lambda content: content[: 7 * RECORD] + flip(content[7 * RECORD :]))
    change(copy)
    assert diff.main([str(made["whole"]), str(copy), "--no-replay"]) == 1
    assert f"losses: different from step {STEP} on: " in output(capsys)


def test_a_report_finds_a_difference_between_two_lines_of_the_metrics(made: dict[str, Path], tmp_path: Path) -> None:
    run_dir = shutil.copytree(made["other"], tmp_path / "run")  # metrics.jsonl has a line for every fifth step
    edit_bytes("log/losses.bin", lambda content: flip(content[: 7 * RECORD]) + content[7 * RECORD :])(run_dir)
    divergence = report.loss_divergence(run_reader.read(made["other"]), run_reader.read(run_dir))
    assert [step for step, difference in divergence.items() if difference] == [7]
    assert len(divergence) == STEP


def test_page_of_a_diff_marks_the_step_at_which_the_runs_part(
    made: dict[str, Path], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are equal, but a gradient differs. The page shows the lines that the command prints."""
    for run_dir, changed in ((made["whole"], 0), (copy, 1)):
        records = [trace.Record(step, {"w": step, "b": 2}, {"w": step + changed * (step > 5)}) for step in (4, 5, 6, 7)]
        trace.TraceFile(run_dir, None).write(records)
    page = copy.parent / "page.html"
    try:
        assert diff.main([str(made["whole"]), str(copy), f"--html={page}"]) == 1
    finally:
        (made["whole"] / trace.NAME).unlink()
    line = "trace: step 6, tensor w: other gradients from equal weights"
    assert line in output(capsys)
    text = page.read_text()
    assert "part at step 6</text>" in text
    assert line in text
    assert diff.main([str(made["whole"]), str(made["killed"]), f"--html={page}"]) == 0
    assert "part at" not in page.read_text()


def test_traces_part_at_the_first_digest_that_differs() -> None:
    one = {2: {"weights": {"a": "0", "b": "1"}, "gradients": {"a": "2"}}, 4: {"weights": {"a": "3"}, "gradients": {}}}
    assert traces.first_difference(one, one) is None
    assert traces.describe(one, one) == "trace: 2 common steps with equal weights and gradients"
    assert traces.describe(one, {3: one[2]}) == ""
    later = {**one, 4: {"weights": {"a": "9"}, "gradients": {}}}
    assert traces.describe(one, later).endswith(
        "step 4, tensor a: other weights at its start, after equal weights and gradients of step 2"
    )
    others = {2: {"weights": {"a": "9", "b": "9"}, "gradients": {"a": "2"}}}
    assert traces.describe(one, others).endswith(
        "step 2, tensor a and 1 more: other weights at its start, and no step before it is traced"
    )


def test_diff_names_samples_with_other_values() -> None:
    one = [{"shards": [[3, 1], [2]], "samples": [3, 1, 2], "inputs": ["a", "b", "c"]}]
    other = [{"shards": [[3, 1], [2]], "samples": [3, 1, 2], "inputs": ["a", "x", "c"]}]
    swapped = [{"shards": [[1, 3], [2]], "samples": [1, 3, 2], "inputs": ["b", "a", "c"]}]
    assert "the values of sample 1 differ, first used in step 5" in diff.unlike_inputs(one, other, 5)
    assert "in another order" in diff.unlike_inputs(one, swapped, 5)
    assert "the settings above decide it" in diff.unlike_inputs(one, one, 5)


def test_a_run_with_an_event_in_its_process_is_the_one_that_departs_from_its_replay() -> None:
    own = diff.OwnReplay(Comparison(4, 4, None), is_comparable=True, records=[])
    flipped = diff.OwnReplay(Comparison(4, 3, 101), is_comparable=True, records=[])
    assert "B departs from its own replay, A does not" in diff.conclude(own, flipped, 101)
    assert "given different inputs" in diff.conclude(own, own, 101)


def test_read_losses_takes_those_of_metrics_where_the_file_has_none(copy: Path) -> None:
    reader = MetricsReader(copy)
    reader.read()
    whole = read_losses(copy, reader)
    (copy / step_losses.NAME).unlink()
    assert read_losses(copy, reader) == whole
