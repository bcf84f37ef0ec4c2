"""Test apps that torchrun starts: without the launch script, on two machines, and with ranks that diverge.

These tests depend on an app's options.py, ranks.py and train.py, so a copy of an app also has them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import ROOT, Harness, Job, Shape, bare, faulty, last_step, options_of
from processes import free_port
from samestep import ConfigError

pytestmark = pytest.mark.torchrun

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def train(harness: Harness) -> str:
    return str(ROOT / "apps" / harness.app.name / "train.py")


def short(harness: Harness) -> list[str]:
    """Return the program and the options of a run of 6 steps."""
    return [train(harness), *harness.app.small, "--max-steps=6"]


def test_torchrun_alone_takes_the_same_steps_and_restarts(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """After torchrun restarts the ranks, they find the run dir by the key in the run dir's name."""
    reference = undisturbed(2)
    every = Shape.of(reference).every
    saved = [step for step in range(2 * every) if step % every == 0 or step % Shape.of(reference).epoch == 0]
    # Kill rank 0 when the second periodic checkpoint begins: the earlier checkpoints are then on the disk.
    fault = {"rank": 0, "audit": "os.mkdir", "match": rf"/\.step-{2 * every:08d}\.tmp", "signal": signal.SIGKILL}
    environ = {**faulty(fault), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", train(harness), *harness.app.small]
    result = harness.checked(bare(harness, command, **environ), 2)
    assert result["launcher"] == "torchrun"
    assert (result["restarts"], result["resumed_from_step"]) == (1, saved[-1])
    assert len(list((harness.folder / "runs" / harness.app.name).iterdir())) == 1
    assert result["weights_sha256"] == reference["weights_sha256"]


@pytest.mark.soak  # the quick tests use torchrun here, and torch.distributed.launch for another app
def test_torch_distributed_launch_alone_takes_the_same_steps(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """torch.distributed.launch, torchrun's predecessor, passes --local-rank to ranks; metrics.jsonl omits it."""
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port", free_port()]
    result = harness.checked(bare(harness, [*command, train(harness), *harness.app.small]), 2)
    assert result["launcher"] == "torchrun"
    assert result["weights_sha256"] == undisturbed(2)["weights_sha256"]
    run_dir = Path(result["run_dir"])
    header = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert "local_rank" not in header["options"]
    assert " --local-rank=1 " in (run_dir / "log" / "rank-1.log").read_text().splitlines()[0]


def test_local_rank_says_nothing_about_the_run(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank accepts torch.distributed.launch's option in both spellings, and refuses it unless LOCAL_RANK is equal."""
    parse = options_of(harness.app.name).parse
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert parse(["--local-rank=1"]) == parse(["--local_rank=1"]) == parse([])
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="--local-rank 1, but LOCAL_RANK is 0: start the ranks with torchrun"):
        parse(["--local-rank=1"])
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="--local-rank 1, but LOCAL_RANK is not set: start the ranks with torchrun"):
        parse(["--local-rank=1"])


@pytest.mark.core_only
def test_plain_python_trains_in_one_process(harness: Harness) -> None:
    result = harness.checked(bare(harness, [sys.executable, *short(harness)]), 1)
    assert result["launcher"] == "none"


# CORE_ALONE runs a program that cannot import samestep_launch, samestep_observe or samestep_check.
CORE_ALONE = """
import os, runpy, sys

class NoOtherPackage:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("samestep_"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoOtherPackage())
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.core_only
def test_two_processes_with_rank_and_world_size_train_together(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """Start two ranks without a launcher, as DLC does. The ranks can import core, but not the other packages."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-c", CORE_ALONE, train(harness), *harness.app.small, "--run-dir=run"]
    jobs = [harness.start_command(command, harness.folder / "run", **common, RANK=str(rank)) for rank in range(2)]
    first, second = (job.finish(limit=120) for job in jobs)
    result = harness.checked(first, 2)
    assert result["launcher"] == "env"
    assert second.code == 0
    assert second.stdout == ""
    assert result["weights_sha256"] == undisturbed(2)["weights_sha256"]


@pytest.mark.core_only
@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)  # the quick tests have these cases in tests/core/test_env.py
            for case in [
                ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2'"),
                ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
                ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR"),
                ({"RANK": "0", "WORLD_SIZE": "2", "NPROC_PER_NODE": "4"}, "scripts/run_"),
                ({"JOB_COMPLETION_INDEX": "0"}, "NNODES"),
            ]
        ),
    ],
    ids=str,
)
def test_a_wrong_environment_is_one_line(harness: Harness, environ: dict[str, str], words: str) -> None:
    requirements = (ROOT / "apps" / harness.app.name / "requirements.in").read_text()
    if "lightning" in requirements and environ.get("RANK") == "x":
        pytest.skip("Lightning's import already fails")
    outcome = bare(harness, [sys.executable, *short(harness)], **environ)
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert words in outcome.stderr


@pytest.mark.core_only
def test_a_taken_master_port_is_one_line(harness: Harness) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        outcome = bare(harness, [sys.executable, *short(harness)], **environ)
    assert outcome.code == 2, outcome
    assert len(outcome.errors) == 1
    assert f"MASTER_PORT {port} is in use" in outcome.errors[0]
    assert "Traceback" not in outcome.stderr


@pytest.mark.core_only
def test_ranks_end_when_torchrun_is_killed(harness: Harness) -> None:
    """torchrun starts each rank in its own session, so only the rank's watchdog can end the rank."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", train(harness), *harness.app.small]
    job = harness.start_command([*command, "--run-dir=run", "--epochs=1000"], harness.folder / "run")
    job.wait_for_step(5)
    job.process.kill()
    job.process.communicate()
    harness.check_nothing_left()


def two_machines(harness: Harness) -> list[Job]:
    """Start two launch scripts with 1 and 2 ranks, each in its own folder."""
    script = str(ROOT / "scripts" / f"run_{harness.app.name}.sh")
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    jobs = []
    for node in range(2):
        folder = harness.folder / f"machine-{node}"
        folder.mkdir(exist_ok=True)
        command = ["bash", script, str(node + 1), *harness.app.small, "--run-dir=run"]
        jobs.append(harness.start_command(command, folder / "run", folder, **nodes, NODE_RANK=str(node)))
    return jobs


@pytest.mark.soak  # the quick tests pull a cable between two hosts (tests/multihost)
def test_two_machines_without_a_shared_disk_stop_together(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """A signal to the second script stops both machines. After a new start, both resume at the same step."""
    jobs = two_machines(harness)
    jobs[0].wait_for_step(2)
    os.kill(jobs[1].process.pid, signal.SIGUSR1)
    assert [job.finish().code for job in jobs] == [138, 138]
    stopped = last_step(jobs[0].run_dir)
    first, second = (job.finish() for job in two_machines(harness))
    result = harness.checked(first, 3)
    assert (result["resumed_from_step"], second.code) == (stopped, 0)
    assert result["weights_sha256"] == undisturbed(3)["weights_sha256"]


@pytest.mark.soak  # the quick tests pull a cable between two hosts (tests/multihost)
def test_two_machines_without_a_shared_disk_recover_together(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """Kill a rank on the second machine."""
    expected = undisturbed(3)
    jobs = two_machines(harness)
    jobs[0].wait_for_step(10)
    os.kill(jobs[1].ranks()[2], signal.SIGKILL)
    first, second = (job.finish() for job in jobs)
    result = harness.checked(first, 3)
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert (result["node_count"], result["restarts"]) == (2, 1)
    assert (second.code, second.stdout) == (0, "")
    # Each machine's run dir has the heartbeats of that machine's ranks.
    for job, ranks in zip(jobs, ({"alive-0"}, {"alive-1", "alive-2"})):
        assert {path.name for path in (job.run_dir / "log").glob("alive-*")} == ranks


# --- ranks that differ --------------------------------------------------------------------------------------------


@pytest.mark.compared
@pytest.mark.soak  # the quick tests flip a bit, which a job survives
def test_what_ranks_do_not_share_is_named_and_never_saved(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """A fault changes one weight of rank 1 two steps before a checkpoint."""
    expected = undisturbed(2)
    run = Shape.of(expected)
    at = next(step for step in range(run.epoch + 3, 2 * run.epoch) if step % run.every == 0)
    fault = {"rank": 1, "differ": at - 2, "signal": 0}
    outcome = harness.run(2, *harness.app.small, "--max-restarts=0", **faulty(fault))
    assert outcome.code == 1, outcome
    differ = rf"error: ranks 0 and 1 differ at step {at}, first in (model|ema) \S+: not saved"
    assert re.match(differ, outcome.errors[0])
    assert [error for error in outcome.errors[1:] if "the job ended with code 1" not in error] == []
    assert "RESULT" not in outcome.stdout
    kept = sorted(int(path.name[5:]) for path in (harness.folder / "run" / "checkpoints").iterdir())
    assert kept == [step for step in range(1, at) if step % run.every == 0 or step % run.epoch == 0][-3:]
    result = harness.train(2, *harness.app.small)
    assert (result["resumed_from_step"], result["weights_sha256"]) == (kept[-1], expected["weights_sha256"])


@pytest.mark.compared
@pytest.mark.core_only
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_flipped_bit_is_named_and_undone(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]], soak: bool, n: int
) -> None:
    """Flip one of the upper 24 bits of a random weight after a random step, through /proc/<pid>/mem.

    Rounding may remove the flip of a lower bit before the ranks compare their weights.
    """
    reference = undisturbed(n)
    chance = random.Random(n)
    for i in range(amount(soak, few=1, many=20)):
        addresses = harness.folder / f"addresses-{i}"
        rank = chance.randrange(n)
        after = chance.randrange(1, reference["steps"] - Shape.of(reference).every - 1)
        fault = {"rank": rank, "tell": str(addresses), "signal": 0}
        run_dir = harness.folder / str(i)
        job = harness.start(n, *harness.app.small, run_dir=run_dir, **faulty(fault))
        job.wait_for_step(after)
        bit = chance.randrange(8, 32)
        if soak and i == 0:  # this bit makes a weight huge, so the loss becomes NaN or infinite
            bit = 30
        address = flip_a_bit(json.loads(addresses.read_text()), chance, bit)
        outcome = job.finish()
        where = f"run {i}: bit {bit} at {address}, rank {rank}, after step {after}: {outcome}"
        result = harness.checked(outcome, n)
        assert result["weights_sha256"] == reference["weights_sha256"], where
        assert result["restarts"] == 1, where
        differs = "error: ranks 0 and 1 differ at step "
        if n > 2:
            differs = f"error: rank {rank} differs from all others at step "
        no_number = r"error: at step \d+ the (test )?loss.* is (nan|inf): lower --lr, now \S+, unless a flipped bit"
        assert outcome.errors[0].startswith(differs) or re.match(no_number, outcome.errors[0]), where
        assert len(outcome.errors) == 1, where


def flip_a_bit(addresses: dict[str, Any], chance: random.Random, bit: int) -> int:
    """Flip a bit of a random float32 weight in the memory of a process, and return the weight's address."""
    place = chance.choice([first + 4 * i for first, count in addresses["weights"] for i in range(count)])
    with open(f"/proc/{addresses['pid']}/mem", "r+b", buffering=0) as memory:
        memory.seek(place + bit // 8)  # little-endian
        byte = memory.read(1)[0] ^ 1 << bit % 8
        memory.seek(place + bit // 8)
        memory.write(bytes([byte]))
    return int(place)
