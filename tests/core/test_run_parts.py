"""Test each part of a `Run` alone, without processes, threads or other parts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from samestep import ConfigError, NonRetryableError, RetryableError, log, metrics, step_sync, stop
from samestep.arithmetic import Arithmetic
from samestep.best import BestEvaluation
from samestep.cadence import Cadence
from samestep.loss_guard import LossGuard
from samestep.monitor import Monitor
from samestep.progress import Progress
from samestep.recorder import Recorder
from samestep.sharding import RANDOM_NUMBERS, GlobalBatches
from samestep.step_sync import StepSync, Totals
from samestep.step_timer import PHASES, StepTimer

BATCHES = GlobalBatches(20, 6, seed=1)  # 4 updates per epoch: 6, 6, 6 and 2 samples


def no_exit(stopped: stop.Stopped) -> None:
    raise AssertionError(stopped)


def new_sync(grace: float = 30.0) -> StepSync:
    return StepSync(stop.StopRequest(grace, no_exit), StepTimer(), grace)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, kind="": found.append(text))
    return found


def test_cadence_needs_no_run() -> None:
    cadence = Cadence(log_every=5, evaluate_every=0, checkpoint_every=3, steps_per_epoch=4, last_step=10)
    names = {}
    for done in range(1, 11):
        actions = cadence.after(done)
        assert actions.sync == actions.log
        names[done] = "".join(name[0] for name in ("log", "evaluate", "save") if getattr(actions, name))
    assert names == {1: "", 2: "", 3: "ls", 4: "les", 5: "l", 6: "ls", 7: "", 8: "les", 9: "ls", 10: "ls"}
    assert cadence.after(1, is_sync_due=True) == (True, False, False, False)


def test_step_sync_adds_the_rows_of_all_ranks_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test makes the row of the second rank, whose stop signal reaches this rank."""
    sync = new_sync()
    sync.start(4)
    sync.add(1.5, {"correct": 2})
    sync.add(np.float32(2.5), {"correct": 1})

    def all_gather(row: NDArray[Any]) -> NDArray[Any]:
        assert row[:2].tolist() == [2.5, 4.0]  # the last step's loss, and the sum since the last log line
        assert row[-3:].tolist() == [3, 1.5, 2.5]  # the count of correct predictions, and the losses of both steps
        slots = [float(number == stop.STOP_SIGNALS[1]) for number in stop.STOP_SIGNALS]
        other = [10.0, 20.0, 99.0, *slots, 0.0, *[0.25] * len(PHASES), 4.0, 8.0, 10.0]
        return np.stack([row, np.array(other)])

    totals = sync.reduce(6, all_gather)
    assert totals is sync.totals
    assert (totals.loss, totals.running_loss, dict(totals.counts)) == (12.5, 24.0, {"correct": 7.0})
    assert (totals.stop_signal, totals.launcher_died) == (stop.STOP_SIGNALS[1], False)
    assert totals.seconds_per_step < 99.0  # rank 0's time counts
    assert totals.phase_seconds == (0.0,) * len(PHASES) + (0.25,) * len(PHASES)
    assert totals.step_losses == (9.5, 12.5)


def test_step_sync_keeps_its_sums_until_a_log_line_reports_them() -> None:
    sync = new_sync()
    sync.start(0)
    for step, expected in ((1, 1.0), (2, 2.0)):
        sync.add(1.0, {})
        assert sync.reduce(step, lambda row: row[None]).running_loss == expected
    sync.end_log_line()
    sync.add(1.0, {})
    assert sync.reduce(3, lambda row: row[None]).running_loss == 1.0


def test_step_sync_is_due_after_the_first_update_and_then_by_the_grace() -> None:
    sync = new_sync(grace=30.0)
    sync.start(7)
    assert [sync.is_due(step) for step in (7, 8)] == [False, True]
    sync.apply(8, Totals(seconds_per_step=1.0))
    interval = 30.0 / step_sync.SYNCS_PER_GRACE
    assert [sync.is_due(8 + steps) for steps in (1, int(interval) - 1, int(interval))] == [False, False, True]
    sync.apply(9, Totals(seconds_per_step=1000.0))  # a step is slower than the grace, so each update syncs
    assert sync.is_due(10)


def test_progress_resumes_from_its_own_state() -> None:
    """The sums of an epoch are the same with and without a resume within the epoch."""
    whole = Progress(BATCHES, 0, last_step=8, state={})
    first = Progress(BATCHES, 0, last_step=8, state={})
    lines = {}
    for step, loss in ((1, 6.0), (2, 12.0), (4, 24.0), (5, 6.0)):
        totals = Totals(loss=loss, running_loss=loss, counts={"correct": step})
        whole.step = step
        lines[step] = whole.add(totals)
        if step <= 2:
            first.step = step
            first.add(totals)
    assert lines[2] | {"samples_per_second": 0} == {
        "step": 2,
        "epoch": 0,
        "samples_seen": 12,
        "loss": 2.0,
        "accuracy": 2 / 6,
        "samples_per_second": 0,
    }
    resumed = Progress(BATCHES, 2, last_step=8, state=first.state(), seconds=100.0)
    assert resumed.train_loss == 18.0 / 12
    resumed.step = 4
    resumed.add(Totals(loss=24.0, running_loss=24.0, counts={"correct": 4}))
    assert (resumed.train_loss, resumed.train_accuracy) == (42.0 / 20, 7 / 20)
    resumed.step = 5
    resumed.add(Totals(loss=6.0, running_loss=6.0, counts={"correct": 5}))  # a new epoch has its own sums
    assert (resumed.train_loss, resumed.train_accuracy) == (1.0, 5 / 6) == (whole.train_loss, whole.train_accuracy)
    assert resumed.seconds > 100.0


def test_progress_refuses_another_number_of_examples() -> None:
    state = Progress(BATCHES, 2, last_step=8, state={}).state()
    other = GlobalBatches(10, 6, seed=1)
    with pytest.raises(ConfigError, match=r"was trained on 20 examples, not on 10, .* or pass another --run-dir"):
        Progress(other, 2, last_step=8, state=state)
    Progress(other, 2, last_step=2, state=state)  # an evaluation takes no further step


class Strict(Monitor):
    """Raise ``error`` at a loss that is NaN or infinite, as the watchdog does."""

    error: type[Exception] = RetryableError

    def check_losses(self, losses: Any, step: int) -> None:
        if not all(math.isfinite(value) for value in losses.values()):
            raise self.error(f"at step {step}")


def test_loss_guard_raises_once_and_then_reports_null(warnings: list[str]) -> None:
    monitor = Strict()
    guard = LossGuard(monitor)
    evaluation = {"test_loss": math.inf, "test_accuracy": 0.5, "test_examples": None}
    with pytest.raises(RetryableError):
        guard.check_evaluation(evaluation, 8, is_of_update=True)
    monitor.error = NonRetryableError
    for _ in range(2):
        assert guard.check_evaluation(evaluation, 8, is_of_update=True) == evaluation | {"test_loss": None}
    assert len(warnings) == 1
    assert "at step 8 the test loss is NaN or infinite" in warnings[0]


def test_loss_guard_names_the_value_that_is_not_finite(warnings: list[str]) -> None:
    guard = LossGuard(Strict())
    evaluation = {"test_loss": 1.0, "macro_f1": math.nan, "test_examples": None}
    assert guard.check_evaluation(evaluation, 8, is_of_update=True) == evaluation | {"macro_f1": None}
    assert "at step 8 the macro f1 is NaN or infinite" in warnings[0]
    guard.check_evaluation({"test_loss": 1.0, "test_examples": None}, 9)
    guard.check_evaluation({"test_loss": math.nan}, 10)  # None in the line above did not count as an overflow
    assert len(warnings) == 2


def test_loss_guard_returns_pythons_own_numbers() -> None:
    """A line of metrics.jsonl and the state of a checkpoint are JSON."""
    evaluation = {"test_loss": np.float32(0.5), "hits": np.array(3), "none": None}
    found = LossGuard(Strict()).check_evaluation(evaluation, 8)
    assert json.dumps(found) == '{"test_loss": 0.5, "hits": 3, "none": null}'
    for value, kind in (([1.0], "list"), ("high", "str"), (np.ones(2), "ndarray")):
        with pytest.raises(NonRetryableError, match=f"the evaluation's worst is a {kind}: return a number"):
            LossGuard(Strict()).check_evaluation({"worst": value}, 8)


def test_a_line_of_metrics_is_json_also_with_nan() -> None:
    line = {"step": 1, "loss": 0.5, "norm": math.nan, "norms": {"a": -math.inf, "b": [1, np.float32(2)]}, "text": "a\n"}
    found = json.loads(metrics.encode(line), parse_constant=pytest.fail)
    assert found == {**line, "norm": None, "norms": {"a": None, "b": [1, 2.0]}}
    with pytest.raises(NonRetryableError, match=r"norm cannot be stored as JSON \(.*\): pass a number"):
        metrics.encode({"norm": {1, 2}})


def test_loss_guard_reads_weights_only_after_an_evaluation_that_overflowed(warnings: list[str]) -> None:
    guard = LossGuard(Monitor())
    weights = {"count": np.zeros(2, np.int64), "w": np.array([1.0, np.nan])}
    guard.check_weights(weights, 3)
    guard.check_evaluation({"test_loss": math.nan}, 3)
    with pytest.raises(NonRetryableError, match="at step 3 weights are NaN or infinite: lower --lr"):
        guard.check_weights(weights, 3)
    guard.check_evaluation({}, 4)  # without an evaluation, the last evaluation counts
    with pytest.raises(NonRetryableError):
        guard.check_weights(weights, 4)
    guard.check_evaluation({"test_loss": 1.0}, 5)
    guard.check_weights(weights, 5)


def test_recorder_reports_a_straggler_in_one_line() -> None:
    class Lines:
        """Keep the lines of metrics.jsonl in memory."""

        def __init__(self) -> None:
            self.lines: list[dict[str, Any]] = []

        def write(self, **values: Any) -> None:
            self.lines.append(values)

    metrics: Any = Lines()
    recorder = Recorder(2, 0, metrics=metrics)
    recorder.stragglers += [{"rank": 1}]
    recorder.write({"step": 1})
    recorder.write({"step": 2})
    assert metrics.lines == [{"step": 1, "stragglers": [{"rank": 1}]}, {"step": 2}]
    Recorder(2, 0).write({"step": 1})  # a rank without a metrics file writes nothing


def test_arithmetic_describes_each_change_since_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    now = Arithmetic.of_process({"torch": "2.9", "gpus": "A", RANDOM_NUMBERS: 2, "path": Path("x")})
    assert now.metadata["path"] == "x"
    assert (now.threads_change(now.state(), "--threads"), now.metadata_change(now.state())) == (None, None)
    assert (now.threads_change({}, "--threads"), now.metadata_change({})) == (None, None)  # a new run
    before = {"threads": None, "metadata": {"torch": "2.8", "gpus": "B", "path": "x"}}
    words = "sums may round differently; set it back for the same bits"
    assert now.threads_change(before, "--threads") == f"--threads was unset before this resume and is 4 now: {words}"
    assert now.metadata_change(before) == ("torch 2.8 before this resume, 2.9 now: the bits may differ from here on")
    assert "random numbers of dropout differ" in str(now.random_numbers_change(before))
    assert now.random_numbers_change(now.state()) is None


def test_best_evaluation_keeps_the_first_of_equals_and_ignores_null() -> None:
    best = BestEvaluation(None)
    for step, value in ((1, 0.5), (2, None), (3, 0.75), (4, 0.75), (5, 0.25)):
        best.update(step, {"test_loss": 1.0 / step, "test_accuracy": value} if value else {})
    assert best.state == {"step": 3, "test_accuracy": 0.75}
    assert BestEvaluation(best.state).step == 3


def test_best_evaluation_of_a_metric_that_the_user_names() -> None:
    """A new metric starts without a best value. Without --keep-best the state stays. An unknown name is an error."""
    best = BestEvaluation({"step": 1, "test_accuracy": 0.75}, "min:bits_per_byte")
    for step, value in ((2, 3.0), (3, 2.5), (4, 2.5), (5, None), (6, 2.75)):
        best.update(step, {"test_accuracy": 1.0, "bits_per_byte": value})
    assert best.state == {"step": 3, "bits_per_byte": 2.5}
    unused = BestEvaluation(best.state, False)
    unused.update(7, {"bits_per_byte": 0.0})
    assert unused.state == best.state
    message = "--keep-best max:f1: the evaluation has no such metric: use one of test_accuracy, test_loss"
    with pytest.raises(NonRetryableError, match=message):
        BestEvaluation(None, "max:f1").update(8, {"test_accuracy": 0.5, "test_loss": 1.0})


def test_best_evaluation_falls_back_to_the_loss() -> None:
    best = BestEvaluation(None)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
        best.update(step, {"test_loss": loss, "test_examples": 6})
    assert best.state == {"step": 2, "test_loss": 1.0}
