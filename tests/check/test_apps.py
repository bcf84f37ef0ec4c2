"""Run ``samestep check`` on five apps of this repository: no row may fail. Each app's environment checks the app."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest
from test_command import PLAIN, check

ROOT = Path(__file__).resolve().parents[2]
MNIST = "--dataset=mnist-5k", "--global-batch-size=501"
WORKERS = {"workers": "not seen"}  # the apps load data without workers
# These rows need weights and an optimizer of torch.
PADDLE = WORKERS | dict.fromkeys(("resume-optimizer", "odd-batch", "replicas"), "not seen")
# For each app: its launcher, its options, its adapter (None if the app uses a DataLoader), and the rows that do not
# pass.
APPS: dict[str, tuple[str, tuple[str, ...], str | None, dict[str, str]]] = {
    "mnist_ddp": ("torchrun", MNIST, None, WORKERS),
    "cifar_ddp": ("torchrun", ("--dataset=synthetic-cifar10", "--global-batch-size=101"), "adapter", WORKERS),
    "mnist_lightning": ("torchrun", MNIST, None, WORKERS),
    "mnist_horovod": ("horovodrun", MNIST, None, WORKERS),
    "lenet_paddle": ("paddle", (*MNIST, "--log-every=1"), "adapter_paddle", PADDLE),
}


@pytest.mark.soak
def test_no_row_of_an_app_fails(tmp_path: Path, request: pytest.FixtureRequest, table: list[str]) -> None:
    """Check an app with its own launcher and, if needed, an adapter."""
    app = request.config.getoption("--app")
    launcher, options, adapter, expected = APPS[app]
    folder = tmp_path / "app"
    shutil.copytree(ROOT / "apps" / app, folder)
    run = f"-n 2 --launcher {launcher} --run-dir runs/x --max-restarts 0 --timeout 20 train.py"
    adapters = [f"--adapter={PLAIN.with_name(adapter)}.py"] if adapter else []
    begun = time.monotonic()
    limits = "--row-limit=240", "--total-limit=1800"
    done, verdicts = check(
        folder,
        *adapters,
        *limits,
        "--",
        *(sys.executable, "-m", "samestep", "run", *run.split()),
        *("--epochs=2", "--checkpoint-every=3", *options),
    )
    took = time.monotonic() - begun
    print(f"{app} {took:.0f} s", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    others = {name: verdict for name, verdict in verdicts.items() if verdict != "passed"}
    assert others == expected, done.stdout
    table.append(f"check: all rows of {app} | 2 | none; {took:.0f} s | {len(verdicts)} | {len(verdicts) - len(others)}")
