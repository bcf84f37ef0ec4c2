"""Test users' mistakes: each causes a one-line error with a remedy, exit code 2, and no files."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from harness import ROOT, Harness

# Each row has N, options, environment, and words of the error that the launch script's first stage reports.
MISTAKES = [
    ("0", [], {}, "N=0"),
    ("-1", [], {}, "N=-1"),
    ("x", [], {}, "N=x"),
    ("2.5", [], {}, "N=2.5"),
    ("", [], {}, "N"),
    ("2", ["--epoch=3"], {}, "did you mean --epochs"),
    ("2", ["extra"], {}, "extra"),
    ("2", ["--epochs", "-3"], {}, "--epochs: '-3'"),
    ("2", ["--lr", "nan"], {}, "--lr: 'nan'"),
    ("2", ["--lr=0"], {}, "--lr: '0'"),
    ("2", ["{batch_option}", "0"], {}, "{batch_option}: '0'"),
    ("2", ["--seed=-1"], {}, "--seed: '-1'"),
    ("2", ["--seed=99999999999999999999999"], {}, "--seed"),
    ("2", ["--timeout=inf"], {}, "--timeout"),
    ("2", ["--dataset=imagenet"], {}, "--dataset"),
    ("2", ["--data-dir={file}"], {}, "--data-dir"),
    ("2", ["--run-dir={file}"], {}, "--run-dir"),
    ("2", ["--init-from={missing}"], {}, "--init-from"),
    ("2", ["--init-from={file}"], {}, "safetensors"),
    ("2", [], {"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
    ("2", [], {"NNODES": "2"}, "NODE_RANK"),
    ("2", [], {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "NODE_RANK=2"),
    ("2", [], {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
    ("2", [], {"NNODES": "two"}, "NNODES=two"),
    ("2", [], {"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
    ("2", [], {"PYTHON": "/no/such/python"}, "PYTHON=/no/such/python"),
]


@pytest.mark.core_only
@pytest.mark.parametrize(("n", "options", "environ", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(
    harness: Harness, n: str, options: list[str], environ: dict[str, str], words: str
) -> None:
    file = harness.folder / "a-file"
    missing = harness.folder / "missing"
    file.write_text("not what was expected")
    if environ.get("NNODES") == "2":
        words = harness.app.refused_machines or words
    batch_option = harness.app.batch_option
    given = [option.format(file=file, missing=missing, batch_option=batch_option) for option in options]
    command = ["bash", str(ROOT / "scripts" / f"run_{harness.app.name}.sh"), *([n] if n else []), *given]
    outcome = harness.start_command(command, harness.folder, **environ).finish(limit=20)
    assert outcome.code == 2, outcome
    assert outcome.stdout == ""
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert outcome.stderr.startswith("error: ")
    assert words.format(batch_option=batch_option) in outcome.stderr
    assert not list(harness.folder.glob("runs/*")), "a mistake must not leave a run dir"


def test_the_first_stage_needs_no_packages(harness: Harness) -> None:
    """The launch script reports each mistake before an installation, when Python has only the standard library."""
    bare = harness.folder / "bin"
    bare.mkdir()
    (bare / "python3").write_text(f'#!/bin/sh\nexec {Path("/proc/self/exe").resolve()} -S "$@"\n')
    (bare / "python3").chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / f"run_{harness.app.name}.sh"), "2", "--epochs=x"]
    path = f"{bare}:/usr/bin:/bin"
    outcome = harness.start_command(command, harness.folder, PATH=path).finish(limit=20)
    assert outcome.code == 2
    assert "--epochs: 'x'" in outcome.stderr


@pytest.mark.core_only
def test_a_taken_port_is_named(harness: Harness) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        outcome = harness.run(2, *harness.app.small, MASTER_PORT=port)
    assert outcome.code == 2
    assert len(outcome.stderr.splitlines()) == 1
    assert f"MASTER_PORT={port} is in use" in outcome.stderr


@pytest.mark.weights
def test_weights_that_do_not_fit_are_refused(harness: Harness) -> None:
    weights = harness.folder / "other.safetensors"
    weights.write_bytes(safetensors.numpy.save({"conv9.weight": np.zeros((2, 2), np.float32)}))
    outcome = harness.run(1, *harness.app.small, f"--init-from={weights}")
    assert outcome.code == 2, outcome
    assert len(outcome.errors) == 1, outcome.stderr
    assert "--init-from" in outcome.errors[0]
    assert "Traceback" not in outcome.stderr
    assert "starting it again" not in outcome.stderr


def test_dry_run_prints_the_launcher_and_starts_nothing(harness: Harness) -> None:
    outcome = harness.run(3, *harness.app.small, "--dry-run")
    assert outcome.code == 0
    assert len(outcome.stdout.splitlines()) == 1
    assert f"apps/{harness.app.name}/train.py" in outcome.stdout
    assert not (harness.folder / "run").exists()


def test_help_teaches(harness: Harness) -> None:
    script = str(ROOT / "scripts" / f"run_{harness.app.name}.sh")
    outcome = harness.start_command(["bash", script, "--help"], harness.folder).finish(limit=20)
    assert outcome.code == 0
    options = f"{harness.app.batch_option} --epochs --max-steps --lr --seed --init-from --dataset --data-dir --run-dir "
    options += (
        "--resume --checkpoint-every --keep-checkpoints --log-every --device --max-restarts --timeout --quiet --dry-run"
    )
    assert all(re.search(rf"{option}\b", outcome.stdout) for option in options.split())
    assert all(name in outcome.stdout for name in ("NNODES", "PYTHON", "OMP_NUM_THREADS", "exit codes"))


@pytest.mark.soak  # the quick tests cover this with threads (tests/core)
def test_all_ranks_agree_on_a_loss_that_is_not_a_number(harness: Harness) -> None:
    """The job restarts once. The second failure shows that no flipped bit was the cause."""
    options = [*harness.app.small, *harness.app.diverges, "--log-every=1", "--max-restarts=1"]
    outcome = harness.run(2, *options)
    assert outcome.code == 1
    errors = [error for error in outcome.errors if "error: the job ended with code 1" not in error]
    assert len(errors) == 2, outcome.stderr
    assert all("lower --lr" in error for error in errors)
    assert all("in an earlier start" in error for error in errors[1:])
    assert outcome.stderr.count("starting it again") == 1
