"""Test the output and the files of a run, and that steps are the same at any world size."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import ROOT, Harness, Shape, losses, metrics, options_of, relative_difference
from samestep import checkpoint, env

# The fields that every result has, besides the size of the global batch.
RESULT_KEYS = set(
    "app framework framework_version launcher backend device dtype world_size node_count dataset train_examples epochs "
    "steps seed train_loss test_loss test_examples seconds samples_per_second restarts "
    "resumed_from_step weights_sha256 run_dir".split()
)


@pytest.mark.fixed_world
@pytest.mark.core_only
@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4))])
def test_the_defaults_reach_the_limit_of_their_metric(harness: Harness, n: int) -> None:
    outcome = harness.run(n, "--data-dir=nowhere", *harness.app.defaults)
    result = harness.checked(outcome, n)
    assert set(result) >= RESULT_KEYS | {harness.app.batch_field, harness.app.metric}
    assert result["dataset"] == harness.app.dataset
    if harness.app.metric_limit is not None:
        reached = result[harness.app.metric]
        if harness.app.direction == "max":
            assert reached >= harness.app.metric_limit
        else:
            assert reached <= harness.app.metric_limit
    assert result["steps"] > 0
    assert result["resumed_from_step"] is None
    assert result["restarts"] == 0
    lines = metrics(Path(result["run_dir"]))
    assert lines[-1]["step"] == result["steps"]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert lines[-1]["test_loss"] == result["test_loss"]
    # If a dataset cannot be downloaded, only rank 0 warns about the substitute.
    parsed = options_of(harness.app.name).parse([*harness.app.defaults])
    wanted = parsed.dataset or parsed.default_dataset
    notices = [line for line in outcome.stderr.splitlines() if harness.app.dataset in line]
    assert len(notices) == (wanted != harness.app.dataset)
    evaluations = harness.app.evaluates_first + sum("test_loss" in line for line in lines)
    assert len(outcome.stdout.splitlines()) == 1 + evaluations + 1


def test_a_run_leaves_what_the_design_says(undisturbed: Callable[..., dict[str, Any]]) -> None:
    result = undisturbed(2)
    run_dir = Path(result["run_dir"])
    header = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert header["world"]["world_size"] == 2
    assert header["options"]["seed"] == result["seed"]
    assert not {"default_dataset", "resume_mutable"} & set(header["options"])
    assert {"python", "threads", "app", "device"} <= set(header)
    assert header["device"].strip() not in ("", "cpu", "cuda", "gpu")  # the name of the processor or GPU
    assert result["framework_version"] in header.values()
    assert losses(run_dir)
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert len(kept) == 3
    assert kept[-1] == f"step-{result['steps']:08d}"
    logs = {path.name for path in (run_dir / "log").iterdir()}
    assert {"rank-0.log", "rank-1.log", "alive-0", "alive-1", "launcher.log"} <= logs
    assert not [path for path in run_dir.rglob("*.tmp") if path.parent.name != "log"]


@pytest.mark.fixed_world
def test_a_rank_loads_a_thin_part_of_the_package(undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Ranks that train, evaluate and save import neither samestep.data.download nor a module of another package."""
    folder = Path(undisturbed(2)["run_dir"]).parent
    loaded = [json.loads((folder / f"modules-{rank}").read_text()) for rank in range(2)]
    assert {"samestep.run", "samestep.checkpoint", "samestep.recovery.watchdog"} <= loaded[0].keys()
    assert not [name for rank in loaded for name in rank if re.match(r"samestep_|samestep\.data\.download", name)]


@pytest.mark.fixed_world
def test_our_own_code_causes_no_warning(undisturbed: Callable[..., dict[str, Any]]) -> None:
    """If a user sets PYTHONWARNINGS=error, a warning ends the run."""
    folder = Path(undisturbed(2)["run_dir"])
    ours = "|".join(re.escape(str(ROOT / name)) for name in ("core", "launch", "apps"))
    for log in sorted((folder / "log").glob("*.log")):
        assert not re.findall(rf"^(?:{ours})/.*:\d+: \w*Warning: .*", log.read_text(errors="replace"), re.MULTILINE)


@pytest.mark.soak  # the quick tests run test_evaluate_only_leaves_the_run_as_it_is
@pytest.mark.fixed_world
def test_zero_steps_keep_the_weights_and_evaluate_them(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    trained = undisturbed(2)
    average = Path(trained["run_dir"]) / "model-ema.safetensors"
    evaluated = average if average.exists() else average.with_name("model.safetensors")
    copied = harness.train(2, *harness.app.small, "--max-steps=0", f"--init-from={evaluated}")
    assert copied["steps"] == 0
    assert copied["train_loss"] is None
    assert copied["weights_sha256"] == checkpoint.weights_sha256(checkpoint.load_weights(evaluated))
    assert copied["test_loss"] == trained["test_loss"]


@pytest.mark.best
@pytest.mark.slow
def test_evaluations_between_epochs_change_no_step_and_the_best_is_kept(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """The best step is the first of equal evaluations, and model-best.safetensors has its weights."""
    reference = undisturbed(2)
    run_dir = harness.folder / "run"
    run = Shape.of(reference)
    metric = harness.app.metric
    options = [*harness.app.small, f"--evaluate-every={run.every}", f"--keep-best={harness.app.direction}:{metric}"]
    result = harness.train(2, *options, "--keep-checkpoints=1")
    assert result["weights_sha256"] == reference["weights_sha256"]
    tested = {line["step"]: line for line in metrics(run_dir) if "test_loss" in line}
    steps = range(1, result["steps"] + 1)
    ends = {result["steps"]}
    assert tested.keys() == {step for step in steps if step % run.every == 0 or step % run.epoch == 0} | ends
    choose = {"max": max, "min": min}[harness.app.direction]
    value = choose(line[metric] for line in tested.values())
    best = min(step for step, line in tested.items() if line[metric] == value)
    assert (result["best_step"], result[f"best_{metric}"]) == (best, value)
    kept = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert kept == {f"step-{best:08d}", f"step-{result['steps']:08d}"}
    last = run_dir / "model.safetensors"
    average = run_dir / "model-ema.safetensors"
    if average.exists():  # the app evaluates the averaged weights
        last = average
    the_best, at_the_end = (checkpoint.load_weights(path) for path in (run_dir / "model-best.safetensors", last))
    same = checkpoint.weights_sha256(the_best) == checkpoint.weights_sha256(at_the_end)
    assert same == (best == result["steps"])


def test_evaluate_only_leaves_the_run_as_it_is(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Evaluate a run on 1 rank in place of 2, with environment variables that other launchers left."""
    result = undisturbed(2)
    run_dir = harness.folder / "run"
    shutil.copytree(result["run_dir"], run_dir)
    before = {path: path.read_bytes() for path in run_dir.glob("*.*") if path.is_file() and path.name != ".lock"}
    names = [name for name in env.launcher_variables() if not name.startswith("PET_")]  # launch scripts read PET_NNODES
    left: dict[str, Any] = dict.fromkeys(names, "3")
    outcome = harness.run(1, *harness.app.small, "--evaluate-only", **left)
    assert outcome.code == 0, outcome
    assert outcome.result["weights_sha256"] == result["weights_sha256"]
    assert outcome.result["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)
    alone = json.loads((run_dir / "evaluation.json").read_text())
    assert alone == outcome.result
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.soak  # the quick tests compare apps with a plain loop or with each other
@pytest.mark.fixed_world
@pytest.mark.parametrize("which", [0, 1])
def test_losses_are_the_same_at_any_number_of_ranks(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, which: int
) -> None:
    batch = Shape.of(undisturbed(2)).odd_batch(harness.app.parts[which])
    for i, variant in enumerate(harness.app.variants):
        # Without --soak, the first variant trains with one batch size, and the last variant with the other.
        if not soak and i != which * (len(harness.app.variants) - 1):
            continue
        steps = harness.app.exact_steps[0]
        if i > 0 and not soak:
            steps = harness.app.exact_steps[1]
        curves = {}
        counts = amount(soak, few=(1, 3), many=(1, 2, 3, 4))
        if not soak and "slow" in harness.app.skipped_marks:
            counts = (1, 2)
        for n in counts:
            run_dir = harness.folder / f"{i}-{n}"
            options = [*harness.app.exact, *variant, f"{harness.app.batch_option}={batch}", f"--max-steps={steps}"]
            harness.train(n, *options, run_dir=run_dir)
            curves[n] = losses(run_dir)
            assert len(curves[n]) == steps
        assert min(curves[1][1:-1]) < curves[1][0]  # the last step may have a single sample, whose loss is noise
        for n in counts[1:]:
            assert relative_difference(curves[1], curves[n]) < harness.app.tolerance, (variant, n)


@pytest.mark.soak  # the quick tests compare 1 and 3 ranks with dropout (tests/conformance)
@pytest.mark.fixed_world
def test_the_default_options_take_the_same_first_steps(harness: Harness, soak: bool) -> None:
    """The runs use float32 and draw equal dropout masks, so losses differ only by rounding."""
    curves = []
    for n in amount(soak, few=(1, 3), many=(1, 2, 3, 4)):
        run_dir = harness.folder / str(n)
        options = [f"--dataset={harness.app.dataset}", *harness.app.first_steps, "--max-steps=10", "--log-every=1"]
        harness.train(n, *options, run_dir=run_dir)
        curves.append(losses(run_dir))
    assert all(relative_difference(curves[0], other) < harness.app.first_tolerance for other in curves[1:])


@pytest.mark.soak  # the quick tests check the exit code of each job
@pytest.mark.fixed_world
def test_exit_codes_are_reliable(harness: Harness, soak: bool) -> None:
    """A process that used collectives may abort while it exits. The job must still exit with 0.

    The first two runs choose their own run dirs, and the third run has --quiet.
    """
    options = [*harness.app.small, "--max-steps=2", "--max-restarts=0"]
    script = str(ROOT / "scripts" / f"run_{harness.app.name}.sh")
    results = [harness.start_command(["bash", script, "2", *options], harness.folder).finish() for _ in range(2)]
    folders = [Path(harness.checked(outcome, 2)["run_dir"]) for outcome in results]
    assert folders[0] != folders[1]
    assert all(folder.parent == harness.folder / "runs" / harness.app.name for folder in folders)

    quiet = harness.run(2, *options, "--quiet")
    harness.checked(quiet, 2)
    assert len(quiet.stdout.splitlines()) == 1
    assert quiet.stderr == ""

    for i in range(amount(soak, few=2, many=3 * harness.app.kills // 2)):
        harness.train(2, *options, run_dir=harness.folder / str(i))
