"""Test docs/own_loop_exact.py in processes: losses are equal at any world size, and after kills and stops."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kit_programs import LIMIT, ROOT, environment
from processes import environments, free_port, kill_marked, marked, parent

SCRIPT = ROOT / "docs" / "own_loop_exact.py"
FAULT = Path(__file__).parent / "fault.py"
EPOCHS = 2
STEPS = 28  # per epoch of 1,000 examples in global batches of 37


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder, and check after the test that no process marked with the folder is left."""
    yield tmp_path
    left = marked("SAMESTEP_TEST", str(tmp_path))
    kill_marked("SAMESTEP_TEST", str(tmp_path), LIMIT)
    assert left == []


def arguments(out: Path, workers: int, batch_size: int = 37, dtype: str = "float32", epochs: int = EPOCHS) -> list[str]:
    settings = {"epochs": epochs, "batch-size": batch_size, "workers": workers, "dtype": dtype, "out": out}
    return [f"--{name}={value}" for name, value in settings.items()]


class Group:
    """Start ranks in one process group, as Slurm does; the ranks' output goes to one file."""

    def __init__(self, folder: Path, world_size: int, command: list[str]) -> None:
        self.log = folder / f"{world_size}-{os.urandom(4).hex()}.log"
        self.ranks: list[subprocess.Popen[bytes]] = []
        port = free_port()
        with self.log.open("wb") as file:
            for rank in range(world_size):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SAMESTEP_TEST": str(folder)}
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env=environment(**variables),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    process_group=self.ranks[0].pid if self.ranks else 0,
                )
                self.ranks.append(process)

    def wait(self) -> list[int]:
        return [process.wait(timeout=LIMIT) for process in self.ranks]

    def text(self) -> str:
        return self.log.read_text()


def losses(text: str) -> list[tuple[int, int, float]]:
    """Return (epoch, step, loss) of each line. A message of another rank may follow the loss without a line break."""
    return [(int(e), int(s), float(x)) for e, s, x in re.findall(r"epoch (\d+) step (\d+) loss ([^\s\[]+)", text)]


def evaluations(text: str) -> list[str]:
    return re.findall(r"epoch \d+ accuracy \S+ \(\d+ of \d+\)", text)


def weights(out: Path) -> bytes:
    state = torch.load(out / "model.pt", weights_only=True)
    return b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in state.items())


def run(folder: Path, world_size: int, *options: str, fault: tuple[object, ...] = ()) -> Group:
    group = Group(folder, world_size, [*([str(FAULT), *map(str, fault)] if fault else []), str(SCRIPT), *options])
    group.wait()
    return group


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[str]]:
    """Return the final weights and the evaluations of an undisturbed run on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    group = run(folder, 2, *arguments(folder / "out", workers=0))
    assert len(losses(group.text())) == EPOCHS * STEPS, group.text()
    return weights(folder / "out"), evaluations(group.text())


def assert_equal_losses(folder: Path, cases: list[tuple[int, int]], batch_size: int, epochs: int) -> None:
    """Assert that losses agree to 1e-12 for all (world size, number of workers) of ``cases``."""
    found = {}
    for world_size, workers in cases:
        out = folder / f"{world_size}-{workers}-{batch_size}"
        group = run(folder, world_size, *arguments(out, workers, batch_size, "float64", epochs))
        found[world_size, workers] = losses(group.text())
        assert len(evaluations(group.text())) == epochs, group.text()
        assert all(line.endswith("of 999)") for line in evaluations(group.text()))
    expected = found.pop(cases[0])
    assert len(expected) == epochs * -(-1000 // batch_size)
    for case, values in found.items():
        assert [value[:2] for value in values] == [value[:2] for value in expected]
        assert max(abs(one[2] - other[2]) for one, other in zip(expected, values)) < 1e-12, case


def test_losses_are_equal_at_any_number_of_ranks(folder: Path) -> None:
    """The script uses augmentation, batch norm, dropout, AdamW and OneCycle; its last batch has one example."""
    assert_equal_losses(folder, [(1, 0), (3, 2)], batch_size=37, epochs=1)


@pytest.mark.soak  # the quick tests run test_losses_are_equal_at_any_number_of_ranks
@pytest.mark.parametrize("batch_size", [32, 37])
def test_losses_are_equal_with_any_number_of_workers(folder: Path, batch_size: int) -> None:
    cases = [(world_size, workers) for world_size in (1, 2, 3) for workers in (0, 2)]
    assert_equal_losses(folder, cases, batch_size, epochs=2)


def assert_stopped(
    folder: Path, undisturbed: tuple[bytes, list[str]], stops: list[tuple[int, str]], workers: int
) -> None:
    """Stop a run by signals to its process group after exact steps, restart it, and compare the results."""
    out = folder / "out"
    text = ""
    for step, name in stops:
        group = run(folder, 2, *arguments(out, workers), fault=(-1, step, name))
        number = getattr(signal, name)
        assert [process.returncode for process in group.ranks] == [128 + number] * 2, group.text()
        assert f"stopped by signal {int(number)} at step {step}, which is saved" in group.text()
        text += group.text()
    last = run(folder, 2, *arguments(out, workers))
    assert [process.returncode for process in last.ranks] == [0, 0], last.text()
    text += last.text()
    assert "killed by signal" not in text
    done = [(epoch, step) for epoch, step, _ in losses(text)]
    stopped = {divmod(step - 1, STEPS) for step, _ in stops}  # a step that ends in a stop is not printed
    assert sorted(done) == sorted({divmod(step, STEPS) for step in range(EPOCHS * STEPS)} - stopped)
    assert (weights(out), evaluations(text)) == undisturbed


def test_stops_at_the_last_step_of_an_epoch_and_of_the_run_lose_nothing(
    folder: Path, undisturbed: tuple[bytes, list[str]]
) -> None:
    assert_stopped(folder, undisturbed, [(STEPS, "SIGTERM"), (EPOCHS * STEPS, "SIGUSR1")], workers=2)


@pytest.mark.soak  # the quick tests run test_stops_at_the_last_step_of_an_epoch_and_of_the_run_lose_nothing
@pytest.mark.parametrize("seed", range(10))
def test_stops_at_random_steps_lose_nothing(folder: Path, undisturbed: tuple[bytes, list[str]], seed: int) -> None:
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(1, EPOCHS * STEPS), 2))
    stops = [(step, rng.choice(["SIGTERM", "SIGUSR1", "SIGINT"])) for step in steps]
    assert_stopped(folder, undisturbed, stops, workers=rng.choice([0, 2]))


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=20", "--monitor-interval=0.2"]
SAMESTEP = ["-m", "samestep", "run", "--max-restarts=20"]


class Job:
    """Run the script by torchrun or by `samestep run`. Both restart failed ranks."""

    def __init__(self, folder: Path, world_size: int, launcher: list[str], words: list[str]) -> None:
        self.log = folder / "job.log"
        self._folder = folder
        own = [f"--nproc={world_size}", f"--run-dir={folder / 'run'}"]
        if launcher is TORCHRUN:
            own = [f"--nproc-per-node={world_size}"]
        self._command = [sys.executable, *launcher, *own, *words]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SAMESTEP_TEST": str(folder)}
        self._environment = environment(**variables)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for_steps(self, count: int) -> None:
        """Wait until the job has done ``count`` more steps, or has ended."""
        before = len(losses(self.log.read_text()))
        deadline = time.monotonic() + LIMIT
        while self.process.poll() is None and len(losses(self.log.read_text())) < before + count:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Return the process IDs of the ranks, without the loaders' workers, which have the same environment."""
        mine = {pid: each for pid, each in environments().items() if each.get("SAMESTEP_TEST") == str(self._folder)}
        of_ranks = [pid for pid, each in mine.items() if "LOCAL_RANK" in each]
        found = []
        for pid in of_ranks:
            with contextlib.suppress(OSError):  # the process has ended
                if parent(pid) not in of_ranks:
                    found.append(pid)
        return found

    def kill(self, kind: str, rng: random.Random) -> None:
        """Kill a rank, all ranks, or the job with its launcher; restart a killed job."""
        ranks = self.ranks()
        if kind == "job":
            kill_marked("SAMESTEP_TEST", str(self._folder), LIMIT)
            self.process.wait(timeout=LIMIT)
            self.start()
            return
        targets = [rng.choice(ranks)] if kind == "rank" and ranks else ranks
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def assert_killed(
    folder: Path,
    undisturbed: tuple[bytes, list[str]],
    kinds: list[str],
    world_size: int,
    workers: int,
    seed: int,
    launcher: list[str],
) -> None:
    """Kill at random steps; compare weights and evaluations with an undisturbed run."""
    rng = random.Random(seed)
    job = Job(folder, world_size, launcher, [str(SCRIPT), *arguments(folder / "out", workers)])
    for kind in kinds:
        job.wait_for_steps(rng.randrange(3, 25))
        if job.process.poll() is None:
            time.sleep(rng.random() * 0.05)
            job.kill(kind, rng)
    assert job.process.wait(timeout=LIMIT) == 0, job.log.read_text()[-3000:]
    assert weights(folder / "out") == undisturbed[0]
    assert set(evaluations(job.log.read_text())) == set(undisturbed[1])


def test_a_killed_rank_and_a_killed_job_end_with_the_same_weights(
    folder: Path, undisturbed: tuple[bytes, list[str]]
) -> None:
    assert_killed(folder, undisturbed, ["rank", "job"], world_size=2, workers=2, seed=1, launcher=TORCHRUN)


@pytest.fixture(scope="module")
def undisturbed_by_size(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[bytes, list[str]]]:
    """Return ``{world size: (final weights, evaluations)}`` of undisturbed runs."""
    found = {}
    for world_size in (2, 3):
        folder = tmp_path_factory.mktemp(f"undisturbed-{world_size}")
        group = run(folder, world_size, *arguments(folder / "out", workers=0))
        found[world_size] = weights(folder / "out"), evaluations(group.text())
    return found


@pytest.mark.soak  # the quick tests run test_a_killed_rank_and_a_killed_job_end_with_the_same_weights
@pytest.mark.parametrize("launcher", [TORCHRUN, SAMESTEP], ids=["torchrun", "samestep"])
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_steps_end_with_the_same_weights(
    folder: Path, undisturbed_by_size: dict[int, tuple[bytes, list[str]]], launcher: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    world_size = 2 + seed % 2
    kinds = [rng.choice(["rank", "all", "job"]) for _ in range(3)]
    workers = seed // 2 % 2 * 2
    assert_killed(folder, undisturbed_by_size[world_size], kinds, world_size, workers, seed, launcher)


def with_workers(method: str) -> str:
    """Return the script with persistent workers of this start method. Only the training loader has workers."""
    context = f"multiprocessing_context={method!r}, persistent_workers=True"
    changes = {
        "batch_sampler=sampler, ": f"batch_sampler=sampler, {context}, ",
        "100), num_workers=args.workers": "100)",
    }
    text = SCRIPT.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


@pytest.mark.soak  # the quick tests run test_stops_at_the_last_step_of_an_epoch_and_of_the_run_lose_nothing
@pytest.mark.parametrize(
    ("launcher", "name", "method"),
    [
        pytest.param(TORCHRUN, "SIGTERM", "fork", id="torchrun"),
        pytest.param(TORCHRUN, "SIGINT", "forkserver", id="torchrun, forkserver"),
        pytest.param(TORCHRUN, "SIGTERM", "spawn", id="torchrun, spawn"),
        pytest.param(SAMESTEP, "SIGINT", "fork", id="samestep"),
        pytest.param(SAMESTEP, "SIGUSR1", "forkserver", id="samestep, forkserver"),
        pytest.param(SAMESTEP, "SIGTERM", "spawn", id="samestep, spawn"),
    ],
)
def test_a_stop_of_the_launcher_saves_a_step(
    folder: Path, undisturbed: tuple[bytes, list[str]], launcher: list[str], name: str, method: str
) -> None:
    """A second start ends with the weights of an undisturbed run, for loader workers of each start method."""
    script = folder / "script.py"
    script.write_text(with_workers(method))
    fault = [str(FAULT), "0", "0", name]  # no signal at step 0; ranks exchange stop requests at each step
    job = Job(folder, 2, launcher, [*fault, str(script), *arguments(folder / "out", workers=1)])
    job.wait_for_steps(STEPS + 5)
    os.kill(job.process.pid, getattr(signal, name))
    assert job.process.wait(timeout=LIMIT) != 0, job.log.read_text()[-3000:]
    (step,) = {int(each) for each in re.findall(r"at step (\d+), which is saved", job.log.read_text())}
    assert STEPS < step < EPOCHS * STEPS
    job.start()
    assert job.process.wait(timeout=LIMIT) == 0, job.log.read_text()[-3000:]
    assert (weights(folder / "out"), evaluations(job.log.read_text())) == undisturbed
