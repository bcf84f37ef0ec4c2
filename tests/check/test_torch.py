"""``samestep check`` on a script of torch's, sound and with one fault each: program/train.py."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from pathlib import Path

import pytest
from test_command import Done, Replaced, check, program

TRAIN = Path(__file__).with_name("program") / "train.py"


def unloaded(name: str) -> Replaced:
    return ((f'        {name}.load_state_dict(state["{name}"])\n', ""),)


# The row that must find a fault, and the texts that make it.
FAULTS: dict[str, tuple[str, Replaced]] = {
    "random numbers by rank": ("one-rank", (("SEED + epoch)", "SEED + epoch + rank)"),)),
    "padded evaluation": (
        "evaluation",
        (
            ("DataLoader(own, batch_size=8)", "DataLoader(own.dataset, 8, sampler=DistributedSampler(own.dataset))"),
            ("import DataLoader,", "import DataLoader, DistributedSampler,"),
        ),
    ),
    "optimizer not saved": ("resume-optimizer", unloaded("optimizer")),
    "scheduler not saved": ("resume-optimizer", unloaded("scheduler")),
    "TERM ignored": ("term", (("signal.SIGTERM, lambda *_: stopping.fill_(1)", "signal.SIGTERM, signal.SIG_IGN"),)),
    "mean over ranks": (
        "odd-batch",
        (("** 2).sum()\n        loss", "** 2).mean()\n        loss"), ("/= count", "/= size")),
    ),
    "epoch not set": ("epoch-order", (("SEED + epoch)", "SEED)"),)),
    "written in place": (
        "save-killed",
        (
            ('FOLDER / f"{step:04}.pt"', 'FOLDER / "last.pt"'),
            ('path.with_suffix(".pt.tmp")', "path"),
            ("    temporary.rename(path)\n", ""),
        ),
    ),
    "resumed by epoch": ("resume-position", (("99, epoch, step % steps_per_epoch", "99, epoch, 0"),)),
    "fixed port": (
        "two-jobs",
        (
            (
                '"gloo", timeout',
                '"gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=dist.TCPStore('
                '"127.0.0.1", PORT, int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"), timeout',
            ),
        ),
    ),
}


def torchrun(folder: Path, rows: str) -> Done:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    return check(folder, f"--faults={rows}", "--", *launcher)


def test_two_rows_on_the_sound_script(tmp_path: Path) -> None:
    """In the matrix no other test shows that torch's loaders and optimizers are seen, and a resume is compared."""
    done, verdicts = torchrun(program(tmp_path / "sound", TRAIN), "resume-optimizer,resume-position")
    assert {*verdicts.values()} == {"passed"}, done.stdout + done.stderr
    assert done.returncode == 0


def test_two_rows_on_an_unsound_script(tmp_path: Path) -> None:
    """In the matrix no other test has torch's DistributedSampler."""
    replaced = FAULTS["padded evaluation"][1] + FAULTS["epoch not set"][1]
    done, verdicts = torchrun(program(tmp_path / "unsound", TRAIN, replaced), "epoch-order,evaluation")
    assert verdicts == {"epoch-order": "failed", "evaluation": "failed"}, done.stdout + done.stderr
    assert "at 2 ranks 1 of 25 examples count twice, 0 are missing" in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("rows", ["quick", "all"])
def test_no_row_of_the_sound_script_fails(tmp_path: Path, rows: str, table: list[str]) -> None:
    """No other test runs all rows on a script of torch's, and measures their time."""
    begun = time.monotonic()
    done, verdicts = torchrun(program(tmp_path / "sound", TRAIN), rows)
    took = f"{time.monotonic() - begun:.0f} s"
    table.append(f"check: {rows} rows | 2 | none; {took} | {len(verdicts)} | {[*verdicts.values()].count('passed')}")
    assert {*verdicts.values()} == {"passed"}, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_row(tmp_path: Path, fault: str) -> None:
    """No other test shows which faults a check finds."""
    row, replaced = FAULTS[fault]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replaced = tuple((before, after.replace("PORT", str(port))) for before, after in replaced)
    done, verdicts = torchrun(program(tmp_path / "unsound", TRAIN, replaced), row)
    assert verdicts == {row: "failed"}, done.stdout + done.stderr


@pytest.mark.soak
def test_no_row_of_an_app_fails(tmp_path: Path, table: list[str]) -> None:
    """No other test has an adapter for a script with an optimizer of torch's, or a launcher that restarts its ranks."""
    folder = tmp_path / "app"
    shutil.copytree(TRAIN.parents[3] / "apps" / "mnist_ddp", folder)
    launcher = "-m samestep.launch run -n 2 --run-dir runs/x --timeout 20 train.py".split()
    small = "--dataset mnist-5k --epochs 2 --global-batch-size 501 --checkpoint-every 3".split()
    adapter = f"--adapter={TRAIN.with_name('adapter.py')}"
    done, verdicts = check(folder, adapter, "--", sys.executable, *launcher, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    others = {name: verdict for name, verdict in verdicts.items() if verdict != "passed"}
    assert not others, done.stdout
    table.append(f"check: all rows of mnist_ddp | 2 | none | {len(verdicts)} | {len(verdicts) - len(others)}")
