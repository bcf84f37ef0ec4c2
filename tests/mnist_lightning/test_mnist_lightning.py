"""Test mnist_lightning: Lightning's epochs, loggers, signals and launchers."""

from __future__ import annotations

import csv
import json
import signal
import sys
from pathlib import Path

import pytest
from harness import ROOT, Harness, bare, metrics, told_by
from samestep import checkpoint
from samestep.data import datasets

TRAIN = str(ROOT / "apps" / "mnist_lightning" / "train.py")
SMALL = ["--dataset=mnist-5k", "--max-steps=6", "--log-every=1"]
PROBE = str(Path(__file__).with_name("probe.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


# --- Lightning's epochs and its validation -------------------------------------------------------------------------


def test_each_test_image_counts_once_and_the_run_dir_and_the_console_are_clean(harness: Harness) -> None:
    """Compare a plain pass over all test images with the result of 3 ranks, although 3 does not divide 1,000.

    The run dir has no pickle and one event file of the logger. The console has only the expected lines.
    """
    import torch
    import torch.nn.functional as F

    options = ["--epochs=2", "--global-batch-size=1333", "--checkpoint-every=3", "--logger=tensorboard"]
    outcome = harness.run(3, "--dataset=mnist-5k", *options)
    result = harness.checked(outcome, 3)
    assert len(list((harness.folder / "run").glob("log/lightning/version_0/events.*"))) == 1
    files = [path for path in (harness.folder / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".ckpt", ".pt", ".pth", ".pkl")]
    # A pickle begins with 0x80 and its protocol number. A file of torch begins with the signature of a zip archive.
    assert not [path for path in files if path.read_bytes()[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK")]
    assert not [path.name for path in harness.folder.iterdir() if path.name != "run"], "Lightning's default folders"
    lines = outcome.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["net", *["epoch"] * 2, "RESULT"]
    assert outcome.stderr == ""

    weights = checkpoint.load_weights(Path(result["run_dir"]) / "model.safetensors")
    net = {name: torch.from_numpy(array).double() for name, array in weights.items()}
    data = datasets.load("mnist-5k", harness.folder)
    x = (torch.from_numpy(data.test_images).unsqueeze(1).double() / 255 - datasets.MEAN) / datasets.STD
    labels = torch.from_numpy(data.test_labels).long()
    for name in ("conv1", "conv2"):
        x = F.relu(F.max_pool2d(F.conv2d(x, net[f"{name}.weight"], net[f"{name}.bias"]), 2))
    x = F.relu(F.linear(x.flatten(1), net["fc1.weight"], net["fc1.bias"]))
    scores = F.linear(x, net["fc2.weight"], net["fc2.bias"])
    assert result["test_loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-5)
    assert result["test_accuracy"] == (scores.argmax(dim=1) == labels).double().mean().item()


def test_an_epoch_that_max_steps_cuts_is_not_recorded_as_tested(harness: Harness) -> None:
    """Lightning validates when --max-steps cuts an epoch. The result uses this validation, but metrics.jsonl does not.

    The CSV logger starts a new version at each start of the program.
    """
    options = ["--dataset=mnist-5k", "--global-batch-size=250", "--log-every=7"]  # 16 steps per epoch
    cut = harness.train(1, *options, "--max-steps=20")
    whole = harness.train(1, *options, "--max-steps=32")
    lines = metrics(harness.folder / "run")
    tested = {line["step"]: "test_loss" in line for line in lines}
    assert tested == {7: False, 14: False, 16: True, 20: False, 21: False, 28: False, 32: True}
    assert whole["resumed_from_step"] == 20
    assert (cut["test_examples"], cut["test_loss"] > whole["test_loss"]) == (1000, True)
    assert whole["test_loss"] == lines[-1]["test_loss"]

    folder = harness.folder / "run" / "log" / "lightning"
    steps = []
    curve = []
    for version in ("version_0", "version_1"):
        with (folder / version / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        steps.append([int(row["step"]) for row in rows])
        curve += [float(row["loss"]) for row in rows]
    assert steps == [[7, 14, 16, 20], [21, 28, 32]]
    assert curve == [line["loss"] for line in lines]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="automatic"),
        pytest.param(["--virtual-ranks=2"], id="manual optimization", marks=pytest.mark.soak),
    ],
)
def test_lightning_counts_on_where_a_run_resumes(harness: Harness, options: list[str]) -> None:
    """Lightning's counts of epochs and steps continue after a resume, also in the middle of an epoch."""
    file = harness.folder / "probe.jsonl"
    command = [sys.executable, PROBE, "--dataset=mnist-5k", "--global-batch-size=250", "--run-dir=run", *options]
    for max_steps in (20, 40, 40):  # the last start trains no step
        harness.checked(bare(harness, [*command, f"--max-steps={max_steps}"], PROBE=str(file)), 1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["validated"] for line in lines if "validated" in line] == [16, 20, 32, 40, 0]
    steps = [line for line in lines if "step" in line]
    assert steps == [{"epoch": step // 16, "global_step": step, "step": step} for step in range(40)]


# --- GPUs, where there are none ------------------------------------------------------------------------------------

GPUS = """
import json
from pathlib import Path
from types import SimpleNamespace
import torch
torch.cuda.device_count = lambda: 4
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda device: None
import pytorch_lightning as pl
import train
from options import parse
from samestep.env import World
from samestep.torch import distributed

options = parse(["--logger=none"])
options.run_dir = Path()
told = []
for world in (World(2, 4, 2, 4, 0, 1), World(5, 8, 1, 4, 1, 2), World(1, 2, 0, 1, 1, 2)):
    device = distributed.choose_device("auto", world)
    trainer = train.build_trainer(SimpleNamespace(world=world), options, device, 1, pl.Callback())
    ddp = trainer.strategy
    told.append([str(device), str(ddp.root_device), ddp.determine_ddp_device_ids(), trainer.global_rank])

# One GPU, which 3 ranks share.
torch.cuda.device_count = lambda: 1
options.share_gpu = True
torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=80e9)
torch.cuda.set_per_process_memory_fraction = lambda fraction, device: None
world = World(2, 3, 2, 3, 0, 1)
device = distributed.choose_device("cuda:0", world)
trainer = train.build_trainer(SimpleNamespace(world=world), options, device, 1, pl.Callback())
ddp = trainer.strategy
place = trainer.global_rank, trainer.world_size
told.append([str(device), str(ddp.root_device), ddp.determine_ddp_device_ids(), *place])
print(json.dumps(told))
"""


def test_lightning_takes_the_gpu_that_the_rank_chose() -> None:
    """torch reports fake GPUs. The ranks are on one machine, on two machines, or share one GPU."""
    *own, shared = told_by("mnist_lightning", GPUS)
    assert own == [["cuda:2", "cuda:2", [2], 2], ["cuda:1", "cuda:1", [1], 5], ["cuda:0", "cuda:0", [0], 1]]
    assert shared == ["cuda:0", "cuda:0", [0], 2, 3]


# --- settings of Lightning that no checkpoint has ---------------------------------------------------------------------

REFUSED = """
import json
import sys
import pytorch_lightning as pl
import torch
from callback import RunCallback
from samestep import NonRetryableError

class Module(pl.LightningModule):
    def __init__(self, has_scheduler):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.has_scheduler = has_scheduler
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if self.has_scheduler else []
        return [optimizer], schedulers

def refused(has_scheduler, accumulate):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    callback = RunCallback(None, None)
    trainer = pl.Trainer(accelerator="cpu", accumulate_grad_batches=accumulate, callbacks=[callback], **quiet)
    try:
        trainer.fit(Module(has_scheduler), torch.utils.data.DataLoader(torch.ones(4, 3)))
    except NonRetryableError as error:
        return str(error)

print(json.dumps([refused(True, 1), refused(False, 2)]))
"""


def test_a_schedule_or_an_accumulation_that_a_resume_would_not_continue_is_refused() -> None:
    schedule, accumulation = told_by("mnist_lightning", REFUSED)
    assert schedule == "no checkpoint has an lr_scheduler: set the rate from run.step in training_step"
    assert accumulation == "accumulate_grad_batches would count each batch as a step: leave it at 1"


# --- what Lightning would do otherwise -----------------------------------------------------------------------------


def test_ctrl_c_ends_a_single_process_with_130_and_no_message(harness: Harness) -> None:
    command = [sys.executable, TRAIN, "--dataset=mnist-5k", "--epochs=1000", "--run-dir=run", "--log-every=1"]
    job = harness.start_command(command, harness.folder / "run")
    job.wait_for_step(5)
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish(limit=20)
    assert outcome.code == 130
    assert outcome.stderr == ""


# --- its launchers -------------------------------------------------------------------------------------------------


def test_plain_python_trains_in_one_process(harness: Harness) -> None:
    """Python starts one rank, although Lightning with devices=N would start N - 1 child processes."""
    outcome = bare(harness, [sys.executable, TRAIN, *SMALL, "--logger=none"])
    result = harness.checked(outcome, 1)
    assert result["launcher"] == "none"
    assert not (Path(result["run_dir"]) / "log" / "lightning").exists()
    assert outcome.stderr == ""
    assert len(outcome.stdout.splitlines()) == 2


def test_a_wrong_environment_is_one_line(harness: Harness) -> None:
    for environ, words in (({"RANK": "0"}, "WORLD_SIZE"), ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR")):
        outcome = bare(harness, [sys.executable, TRAIN, *SMALL], **environ)
        assert outcome.code == 2, outcome
        assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
        assert words in outcome.stderr
