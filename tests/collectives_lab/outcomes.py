"""Run one rank with replaced collectives, to produce outcomes that occur neither with gloo nor in a short job.

    outcomes.py RUN_DIR

The program writes RUN_DIR/outcomes.json, which holds the cells of a table or the error, by name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

APP = Path(__file__).resolve().parents[2] / "apps" / "collectives_lab"
sys.path.insert(0, str(APP))

import distributed  # type: ignore[import-not-found]  # noqa: E402
import launchers  # type: ignore[import-not-found]  # noqa: E402
import primitives  # type: ignore[import-not-found]  # noqa: E402
from options import parse  # type: ignore[import-not-found]  # noqa: E402
from samestep import NonRetryableError  # noqa: E402


def outcome(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except NonRetryableError as problem:
        return f"error: {problem}"


def operator_cells(
    operator: str, collective: Callable[..., Any], world: Any, device: Any, backend: str = "gloo"
) -> Any:
    """Return the operator's table cells (float32 to int64), counts of cases, and shown dtypes for a fake all_reduce."""
    with (
        mock.patch.dict(primitives.REDUCERS, all_reduce=collective),
        mock.patch.object(primitives, "backend", return_value=backend),
    ):
        checks = primitives.check_operators(["all_reduce"], [operator], device)
        shown = primitives.show_operators(checks, device)
    found = {"facts": distributed.run_metadata(world, device), "operator_checks": checks, "operators": shown}
    cells = [*primitives.operator_tables(found)][1].rows[0][1:4]
    return {"cells": cells, "cases": [case["cases"] for case in checks], "shown": [each["dtype"] for each in shown]}


def failing(words: str) -> Callable[..., Any]:
    def collective(*_: Any, **__: Any) -> Any:
        raise RuntimeError(words)

    return collective


def accepting(x: Any, *_: Any, **__: Any) -> Any:
    """Return ``x``, which is the result of any reduction on one rank."""
    return x


def data_parallel(options: Any, steps: int, gradients: float, weights: float) -> str:
    """Return "told" if ``launchers`` accepts these differences, else "error"."""

    def job(what: str, words: list[str], run_dir: Path) -> dict[str, Any]:
        ways = [{"way": "DDP", "gradients_difference": gradients, "weights_difference": weights}]
        run_dir.mkdir(exist_ok=True)
        (run_dir / "data_parallel.json").write_text(json.dumps({"steps": steps, "ways": ways}))
        return {"code": 0}

    with mock.patch.object(launchers, "run_job", job):
        result = outcome(lambda: launchers.compare_data_parallel(2, options, options.run_dir / "DataParallel"))
    if "does not take the plain step" in result:
        return "error"
    return "told"


def main() -> None:
    run_dir = Path(sys.argv[1])
    options = parse(["launchers", f"--run-dir={run_dir}", "--quiet", "--device=cpu"])
    place = distributed.rendezvous(options)
    outcomes = {
        name: outcome(lambda operator=operator, how=how: operator_cells(operator, how[0], *place, *how[1:]))  # type: ignore[misc]
        for name, operator, *how in (
            ("SUM fails", "SUM", failing("no such kernel")),
            ("BAND fails", "BAND", failing("no such kernel")),
            ("BAND fails on NCCL", "BAND", failing("Cannot use ReduceOp.BAND with NCCL"), "nccl"),
            ("BAND times out", "BAND", failing("Timed out waiting 8000ms for recv operation")),
            ("BAND takes floats", "BAND", accepting),
            ("AVG takes whole numbers", "AVG", accepting),
        )
    }
    outcomes["close"] = [
        data_parallel(options, steps, gradients, weights)
        for steps, gradients, weights in (
            (100, 1e-16, 1e-15),
            (100, 1e-16, 1e-11),
            (101, 1e-16, 1e-3),
            (5000, 1e-11, 0.0),
            (5000, float("nan"), 0.0),
        )
    ]
    (run_dir / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
