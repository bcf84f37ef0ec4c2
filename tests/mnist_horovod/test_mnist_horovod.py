"""Test mnist_horovod: Horovod's build, launcher, compression and optimizer."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, Outcome, bare, losses, options_of, relative_difference
from samestep import ConfigError

TRAIN = str(ROOT / "apps" / "mnist_horovod" / "train.py")
BUILD = str(ROOT / "apps" / "mnist_horovod" / "build_horovod.py")
SCRIPT = str(ROOT / "scripts" / "run_mnist_horovod.sh")
SMALL = ["--dataset=mnist-5k", "--max-steps=6", "--log-every=1"]
HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]


# --- what it sends -------------------------------------------------------------------------------------------------


def test_gradients_may_be_sent_in_half_precision(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    """Train with fp16 compression on the host of HOROVOD_HOSTS."""
    expected = losses(Path(undisturbed(2)["run_dir"]))[:6]
    options = [*harness.app.small, "--max-steps=6", "--compression=fp16"]
    here = harness.train(2, *options, HOROVOD_HOSTS="127.0.0.1:2")
    assert here["launcher"] == "horovodrun"
    found = losses(harness.folder / "run")
    assert found[0] == expected[0]
    assert found[1:] != expected[1:]
    assert relative_difference(found, expected) < 1e-2
    outcome = harness.run(1, *harness.app.small, "--max-steps=7")
    assert outcome.code == 2
    assert "--compression" in outcome.errors[0]


def test_a_distributed_optimizer_takes_the_same_steps(
    harness: Harness, undisturbed: Callable[..., dict[str, Any]]
) -> None:
    """Horovod's DistributedOptimizer on 3 ranks has the losses of grouped gradients on 2 ranks, up to rounding."""
    expected = losses(Path(undisturbed(2)["run_dir"]))[:8]
    harness.train(3, *harness.app.small, "--gradients=optimizer", "--max-steps=8")
    assert relative_difference(expected, losses(harness.folder / "run")) < 1e-5


@pytest.mark.soak  # the quick tests use float32 (the test above)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_distributed_optimizer_takes_the_steps_of_one_rank(harness: Harness, kind: str) -> None:
    """Train in float64, and resume at another world size."""
    options = [*harness.app.exact, f"--optimizer={kind}", "--global-batch-size=127"]
    harness.train(1, *options, "--max-steps=50", run_dir=harness.folder / "alone")
    for first, then in ((3, 2), (2, 3), (1, 1)):
        run_dir = harness.folder / str(first)
        for n, last in ((first, 25), (then, 50)):
            harness.train(n, *options, "--gradients=optimizer", f"--max-steps={last}", run_dir=run_dir)
        assert relative_difference(losses(harness.folder / "alone"), losses(run_dir)) < 1e-9, (first, then)


def test_a_distributed_optimizer_has_no_virtual_ranks() -> None:
    with pytest.raises(ConfigError, match="--gradients optimizer sums whole shards: leave it or --virtual-ranks out"):
        options_of("mnist_horovod").parse(["--gradients=optimizer", "--virtual-ranks=4"])


# --- its launcher --------------------------------------------------------------------------------------------------


def test_horovodrun_alone_takes_the_same_steps(harness: Harness, undisturbed: Callable[..., dict[str, Any]]) -> None:
    command = [*HOROVODRUN, "-np", "2", sys.executable, TRAIN, *harness.app.small, "--run-dir=run", "--max-steps=20"]
    outcome = bare(harness, command)
    assert outcome.code == 0, outcome
    assert losses(harness.folder / "run") == losses(Path(undisturbed(2)["run_dir"]))[:20]
    assert "[0]<stdout>:RESULT {" in outcome.stdout.splitlines()[-1]


def test_plain_python_trains_in_one_process(harness: Harness) -> None:
    result = harness.checked(bare(harness, [sys.executable, TRAIN, *SMALL]), 1)
    assert result["launcher"] == "none"


def test_ranks_end_when_horovodrun_is_killed(harness: Harness) -> None:
    command = [*HOROVODRUN, "-np", "2", sys.executable, TRAIN, "--dataset=mnist-5k", "--epochs=1000"]
    job = harness.start_command([*command, "--run-dir=run", "--log-every=1"], harness.folder / "run")
    job.wait_for_step(5)
    job.process.kill()
    job.process.communicate()
    harness.check_nothing_left()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HOROVOD_HOSTS": "server1"}, "HOROVOD_HOSTS='server1'"),
        ({"HOROVOD_HOSTS": "server1:0"}, "host:ranks"),
        ({"HOROVOD_HOSTS": "server1:4,"}, "host:ranks"),
        ({"HOROVOD_HOSTS": "server1:4;touch x:1"}, "host:ranks"),
        ({"HOROVOD_HOSTS": "{python}:4"}, "host:ranks"),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            "HOROVOD_HOSTS",
        ),
    ],
    ids=str,
)
def test_a_mistake_about_machines_is_one_line(harness: Harness, environ: dict[str, Any], words: str) -> None:
    outcome = harness.run(2, *SMALL, **environ)
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert words in outcome.stderr
    assert outcome.stdout == ""


def test_horovod_hosts_become_horovodruns_option(harness: Harness) -> None:
    shown = harness.run(8, "--dry-run", HOROVOD_HOSTS="server1:4,10.0.0.2:4").stdout
    assert "horovod.runner.launch --gloo -np 8 -H server1:4,10.0.0.2:4 " in shown


def test_ranks_that_horovod_did_not_start_are_refused(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, TRAIN, *SMALL], RANK="0", WORLD_SIZE="2")
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert "HOROVOD_HOSTS" in outcome.stderr


@pytest.mark.parametrize("option", ["--local-rank=0", "--local_rank=1"])
def test_torchs_old_launcher_is_refused_with_the_command_to_use(option: str) -> None:
    with pytest.raises(ConfigError, match="use horovodrun"):
        app_options().parse([option])


# --- device, and transport of the gradients -------------------------------------------------------------------------

# GPUS is a module on PYTHONPATH that simulates machines with GPUs.
GPUS = """
import importlib.util, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.cuda.device_count = lambda: 4
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def four_gpus(harness: Harness) -> dict[str, str]:
    folder = harness.folder / "gpus"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(GPUS)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def test_gpus_that_this_horovod_cannot_use_are_left_alone(harness: Harness, four_gpus: dict[str, str]) -> None:
    command = ["bash", SCRIPT, "2", *SMALL, "--run-dir=run"]
    outcome = bare(harness, command, **four_gpus)
    assert harness.checked(outcome, 2)["device"] == "cpu"
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("warning: this Horovod was built without CUDA: training on the CPU, not on 4 GPUs")
    assert (harness.folder / "run" / "log" / "launcher.log").read_text().count(line) == 1  # only one of the ranks warns


def test_cuda_without_a_horovod_that_has_it_is_one_line(harness: Harness, four_gpus: dict[str, str]) -> None:
    command = ["bash", SCRIPT, "1", *SMALL, "--run-dir=run", "--device=cuda"]
    outcome = bare(harness, command, **four_gpus)
    assert outcome.code == 2, outcome
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: --device cuda: this Horovod was built without CUDA: ")
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in line


def test_mpi_without_a_horovod_that_has_it_is_one_line(harness: Harness) -> None:
    outcome = bare(harness, [sys.executable, TRAIN, *SMALL, "--transport=mpi"])
    assert outcome.code == 2, outcome
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: --transport mpi: this Horovod was built without MPI: ")
    shown = harness.run(2, "--transport", "mpi", "--dry-run").stdout
    assert "horovod.runner.launch --mpi -np 2 " in shown
    outcome = harness.run(2, *SMALL, "--transport=mpi")  # the app refuses before horovodrun does
    assert (outcome.code, outcome.stderr.splitlines()) == (2, [line])
    assert not (harness.folder / "run").exists()


# --- the installation ----------------------------------------------------------------------------------------------


def verify(harness: Harness, *arguments: str) -> Outcome:
    return bare(harness, ["bash", str(ROOT / "scripts" / "verify_horovod.sh"), *arguments])


def test_the_installation_is_verified(harness: Harness) -> None:
    outcome = verify(harness, "2")
    assert outcome.code == 0, outcome
    rows = outcome.stdout.splitlines()
    assert len(rows) >= 14
    assert sum("batch of rank" in row and "images: " in row for row in rows) == 2
    assert all(row.startswith("ok ") for row in rows)
    assert "FAILED" not in outcome.stdout


def test_a_failed_check_is_reported(harness: Harness) -> None:
    """horovodrun starts no rank, because the hosts have fewer slots than ranks."""
    outcome = bare(harness, ["bash", str(ROOT / "scripts" / "verify_horovod.sh"), "3"], HOROVOD_HOSTS="localhost:1")
    assert outcome.code == 1, outcome
    assert "FAILED" in outcome.stdout


def test_a_missing_compiler_is_one_line(harness: Harness) -> None:
    """Build with an empty cache and an empty folder on PATH."""
    environ = {"PATH": str(harness.folder), "XDG_CACHE_HOME": str(harness.folder / "cache")}
    outcome = bare(harness, [sys.executable, BUILD, "--rebuild"], **environ)
    assert outcome.code == 1
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert outcome.stderr.startswith("error: building Horovod needs c++")


@pytest.mark.parametrize(("compiler", "needs"), [(False, "nvcc"), (True, "a torch that has CUDA")])
def test_a_build_for_gpus_that_cannot_be_made_is_one_line(harness: Harness, compiler: bool, needs: str) -> None:
    environ = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(harness.folder)}
    if compiler:
        (harness.folder / "bin").mkdir()
        (harness.folder / "bin" / "nvcc").touch()
        # The torch of some package indexes has CUDA.
        (harness.folder / "torch.py").write_text("class version: cuda = None")
        environ["PYTHONPATH"] = str(harness.folder)
    outcome = bare(harness, [sys.executable, BUILD, "--rebuild"], XDG_CACHE_HOME=str(harness.folder), **environ)
    assert outcome.code == 1
    assert outcome.stderr.startswith(f"error: building Horovod for GPUs needs {needs}")
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr


@pytest.mark.parametrize(
    ("variables", "option", "expected"),
    [
        ({}, "gloo", {}),
        ({"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "1"}, "gloo", {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        ({}, "mpi", {"HOROVOD_WITH_MPI": "1"}),
    ],
)
def test_the_build_follows_horovods_variables_and_the_transport(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], option: str, expected: dict[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = app_options()
    found = options.setup_environment(options.parse([f"--transport={option}"]))
    assert ("HOROVOD_MPICXX" in found) == (option == "mpi")
    found.pop("HOROVOD_MPICXX", None)
    assert found == expected


@pytest.mark.parametrize(
    ("variables", "transport"),
    [
        ({}, "gloo"),
        ({"HOROVOD_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}, "gloo"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mpi"),
        ({"PMI_RANK": "0"}, "mpi"),
    ],
)
def test_the_transport_follows_what_started_the_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], transport: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert app_options().parse([]).transport == transport
    assert app_options().parse([], usage="the launch script's").transport == "gloo"


@pytest.mark.parametrize(
    "prefix", ["[0]<stderr>:", "[1,0]<stderr>:", "[1,12]<stderr>: ", "[prterun-vm-9@1,2]<stderr>: ", "[0] "]
)
def test_what_launchers_put_before_a_line_is_known(prefix: str) -> None:
    line = f"{prefix}error: x"
    found = re.match(app_options().HOOKS.line_prefix, line)
    assert found
    assert line[found.end() :] == "error: x"


def test_an_mpi_of_the_environment_comes_before_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build uses the environment's MPI, or the MPI on PATH, or else installs Open MPI."""
    build = app_module("build_horovod")
    own = tmp_path / "own"
    other = tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
    monkeypatch.setattr(build, "BIN", own)
    monkeypatch.setenv("PATH", str(other))
    installed: list[str] = []
    monkeypatch.setattr(build, "run", lambda command, what: installed.append(command[-1]))
    assert build.find_mpi() == own
    assert installed == [str(build.MPI_LOCK)]
    for folder in (other, own):
        (folder / "mpicxx").write_text("")
        (folder / "mpicxx").chmod(0o755)
        assert build.find_mpi() == folder
    assert len(installed) == 1
    (own / "mpirun").write_text(f"#!{sys.executable}\nprint('some MPI 1.0')")
    (own / "mpirun").chmod(0o755)
    assert build.mpi_version(own) == "some MPI 1.0\n"
    with pytest.raises(SystemExit):
        build.mpi_version(other)


def test_toxs_environments_build_what_they_are_named_for() -> None:
    build = app_module("build_horovod")
    environments = (ROOT / "tox.ini").read_text()
    mpi = build.MPI_LOCK.with_suffix(".in").read_text().splitlines()[-1]
    assert f"  mpi: {mpi}\n" in environments
    assert "  gpu: HOROVOD_GPU_OPERATIONS = {env:HOROVOD_GPU_OPERATIONS:NCCL}\n" in environments
    assert f'"{app_options().BUILD_VARIABLE}"' in Path(build.__file__).read_text()


def app_options() -> Any:
    return app_module("options")


def app_module(name: str) -> Any:
    """Return the app's file ``name``.py as a module."""
    path = ROOT / "apps" / "mnist_horovod" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"horovod_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks up a class's module in sys.modules
    spec.loader.exec_module(module)
    return module


def test_a_second_environment_does_not_build_again(harness: Harness) -> None:
    """A new environment gets the wheel from the cache, without a compiler."""
    environ = {"PATH": os.pathsep.join([str(harness.folder), "/nowhere"])}
    venv = harness.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    # Link this environment's packages, except Horovod, without copies.
    packages = next((venv / "lib").glob("python*")) / "site-packages"
    for found in (Path(entry) for entry in sys.path if entry.endswith("site-packages")):
        for item in found.iterdir():
            if not item.name.lower().startswith("horovod") and not (packages / item.name).exists():
                (packages / item.name).symlink_to(item)
    outcome = bare(harness, [str(venv / "bin" / "python"), BUILD], **environ)
    assert outcome.code == 0, outcome
    assert "building" not in outcome.stderr
    assert (packages / "horovod").is_dir()
    check = [str(venv / "bin" / "python"), "-c", "import horovod.torch as hvd; hvd.init(); print(hvd.size())"]
    assert bare(harness, check).stdout == "1\n"


def test_a_damaged_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The build compares the SHA-256 of the archive with the published one before it runs code of the archive."""
    source = tmp_path / "horovod-0.28.1"
    ran = tmp_path / "ran"
    source.mkdir()
    setup = f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='horovod', version='0.28.1')"
    (source / "setup.py").write_text(setup)
    shutil.make_archive(str(source), "gztar", tmp_path, source.name)
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "work").mkdir()
    with pytest.raises(SystemExit) as stop:
        app_module("build_horovod").download(tmp_path / "work", tmp_path / "tools")
    assert stop.value.code == 1
    message = capfd.readouterr().err
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in message
    assert message.splitlines()[-1].startswith("error: could not download the source of Horovod 0.28.1: ")
    assert not ran.exists()


TREE = """
import os
import torch
import distributed
import horovod.torch as hvd
from samestep.sharding import GlobalBatches
from samestep.torch import virtual_ranks
from torch import nn

hvd.init()
virtual_ranks.GATHER_MAX_BYTES = 0  # so that large gradients go by all-to-all
collectives = distributed.all_to_all, distributed.all_gather_tensor
for step in (0, 8):  # the last batch has one sample: two ranks have none
    sums = []
    for rank, world_size in ((0, 1), (hvd.rank(), hvd.size())):
        batches, model = GlobalBatches(65, 8, 1, rank, world_size, 5), nn.Linear(7, 5)
        tree = virtual_ranks.GradientTree(model, batches, (), *collectives)
        for micro_batch in batches.micro_batches(step):
            torch.manual_seed(micro_batch[0])
            model.weight.grad, model.bias.grad = torch.randn(5, 7), torch.randn(5)
            tree.add(micro_batch, torch.randn(()))
        tree.all_reduce(step)
        sums.append([model.weight.grad, model.bias.grad])
    assert all(map(torch.equal, *sums))
os._exit(0)
"""


def test_large_gradients_of_virtual_ranks_have_the_bits_of_one_rank(harness: Harness) -> None:
    (harness.folder / "tree.py").write_text(TREE)
    command = [*HOROVODRUN, "-np", "3", sys.executable, "tree.py"]
    folders = [str(ROOT / "apps" / "mnist_horovod"), os.environ.get("PYTHONPATH", "")]
    outcome = bare(harness, command, PYTHONPATH=os.pathsep.join(folders))
    assert outcome.code == 0, outcome
