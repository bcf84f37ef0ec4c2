"""Test apps on several hosts by their own launchers: equal losses, broken links, late hosts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import (
    APPS,
    ROOT,
    Harness,
    Job,
    Shape,
    app_spec,
    last_step,
    losses,
    metrics,
    options_of,
    relative_difference,
)
from hosts import Host, network
from processes import environments
from ssh import ssh_between

PORT = "29400"  # each host has its own ports
STEPS = 6


@pytest.fixture
def of(tmp_path: Path) -> Iterator[Callable[[str], Harness]]:
    """Yield a function that returns an app's harness. Check at the end that no process is left."""
    made: dict[str, Harness] = {}

    def one(app: str) -> Harness:
        if app not in made:
            folder = tmp_path / app
            folder.mkdir()
            made[app] = Harness(app_spec(app), "cpu", folder)
        return made[app]

    yield one
    for harness in made.values():
        harness.check_nothing_left()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with network(3) as made:
        yield made


def start(
    harness: Harness, hosts: Sequence[Host], ranks: Sequence[int], *options: str, folder: str = "run", **environ: str
) -> list[Job]:
    """Start the launch script on each host, in separate folders, because the hosts share no disk."""
    return [start_on(harness, hosts, number, n, *options, folder=folder, **environ) for number, n in enumerate(ranks)]


def start_on(
    harness: Harness,
    hosts: Sequence[Host],
    number: int,
    n: int,
    *options: str,
    folder: str = "run",
    prefix: Sequence[str] = (),  # words before the launch script
    **environ: str,
) -> Job:
    work = harness.folder / f"node{number}"
    work.mkdir(exist_ok=True)
    several = {
        "NNODES": str(len(hosts)),
        "NODE_RANK": str(number),
        "MASTER_ADDR": "node0",
        "MASTER_PORT": PORT,
        **environ,
    }
    script = ["bash", str(ROOT / "scripts" / f"run_{harness.app.name}.sh"), str(n), f"--run-dir={folder}", *options]
    command = hosts[number].command(*prefix, *script)
    return harness.start_command(command, work / folder, work, **several)


def finish(harness: Harness, jobs: Sequence[Job], n: int) -> dict[str, Any]:
    """Check that all hosts succeeded, and return the first host's result."""
    outcomes = [job.finish() for job in jobs]
    assert [outcome.code for outcome in outcomes] == [0] * len(jobs), outcomes
    assert [outcome.stdout for outcome in outcomes[1:]] == [""] * (len(jobs) - 1)
    return harness.checked(outcomes[0], n)


# --- the losses of one host --------------------------------------------------------------------------------------


def exact(harness: Harness) -> list[str]:
    """Return the options of a run of STEPS steps whose losses are compared, with an odd global batch size."""
    app = harness.app
    size = getattr(options_of(app.name).parse([*app.small]), app.batch_field) // 2
    return [*app.exact, *app.variants[0], f"{app.batch_option}={size - 1 + size % 2}", f"--max-steps={STEPS}"]


def check_losses(harness: Harness, folder: Path) -> None:
    harness.train(1, *exact(harness), run_dir=harness.folder / "alone")
    alone = losses(harness.folder / "alone")
    assert len(alone) == STEPS
    assert relative_difference(alone, losses(folder)) < harness.app.tolerance


# cifar_ddp starts its ranks as mnist_ddp does. It needs torchvision, which would prevent the import of Lightning. The
# quick tests run mnist_ddp on three hosts (below) for all apps of torchrun. MindSpore compiles for a minute here, and
# mnist_elastic has a separate test.
@pytest.mark.parametrize(
    "app",
    [
        pytest.param(app, marks=[pytest.mark.soak] * (app_spec(app).launcher in ("torchrun", "msrun")))
        for app in APPS
        if app not in ("mnist_horovod", "cifar_ddp", "mnist_elastic")
    ],
)
def test_two_hosts_take_the_steps_of_one(app: str, of: Callable[[str], Harness], hosts: list[Host]) -> None:
    harness = of(app)
    finish(harness, start(harness, hosts[:2], (1, 1), *exact(harness)), 2)
    check_losses(harness, harness.folder / "node0" / "run")


def test_horovod_starts_both_hosts_from_one_by_ssh(
    of: Callable[[str], Harness], hosts: list[Host], tmp_path: Path
) -> None:
    harness = of("mnist_horovod")
    with ssh_between(hosts[:2], tmp_path, harness.environ()) as command:
        result = finish(harness, start_horovod(harness, hosts, command, *exact(harness)), 2)
    check_losses(harness, Path(result["run_dir"]))


def test_horovod_is_not_started_by_a_name_that_leads_nowhere(of: Callable[[str], Harness], hosts: list[Host]) -> None:
    harness = of("mnist_horovod")
    words = ["bash", str(ROOT / "scripts" / "run_mnist_horovod.sh"), "2"]
    job = harness.start_command(hosts[0].command(*words), harness.folder / "run", HOROVOD_HOSTS="node0:1,node1:1")
    assert refused([job]) == (
        2,
        "error: this host's name, node0, resolves to 127.0.1.1, which the other hosts of HOROVOD_HOSTS cannot reach: "
        "give each host an address in /etc/hosts that the others reach, or use --transport mpi",
    )


def test_three_hosts_that_come_late_train_together(of: Callable[[str], Harness], hosts: list[Host], soak: bool) -> None:
    """Start 1, 2 and 1 ranks. At first, no host name resolves. The third host joins while the other hosts wait.

    With virtual ranks, the run ends with the bits of one rank.
    """
    harness = of("mnist_ddp")
    for run in range(amount(soak, few=1, many=20)):
        seconds = {0: 60.0}.get(run, run * 1.5)
        late = amount(soak, few=4.0, many=seconds)
        folder = f"run-{run}"
        options = [*exact(harness), "--dtype=float32", "--virtual-ranks=4"]
        hosts[0].network.write_names([])
        jobs = [start_on(harness, hosts, number, 1 + number, *options, folder=folder) for number in (0, 1)]
        time.sleep(late / 2)
        hosts[0].network.write_names(hosts)
        time.sleep(late / 2)
        jobs.append(start_on(harness, hosts, 2, 1, *options, folder=folder))
        result = finish(harness, jobs, 4)
        assert result["node_count"] == 3
        if run == 0:
            alone = harness.train(1, *options, run_dir=harness.folder / "alone")
        assert result["weights_sha256"] == alone["weights_sha256"]


# --- a cable is pulled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "app",
    [
        "mnist_ddp",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("lenet_paddle", "mnist_horovod", "gpt_fsdp")),
    ],
)
def test_a_pulled_cable_ends_all_processes_and_costs_no_weights(
    app: str, of: Callable[[str], Harness], hosts: list[Host], tmp_path: Path
) -> None:
    """Each job ends with code 1 and a reason, and all ranks end within twice the timeout. A new start resumes."""
    harness = of(app)
    timeout = 20
    expected = harness.train(2, *harness.app.small, run_dir=harness.folder / "undisturbed")
    with contextlib.ExitStack() as stack:
        if app == "mnist_horovod":
            command = stack.enter_context(ssh_between(hosts[:2], tmp_path, harness.environ()))
            begin = functools.partial(start_horovod, harness, hosts, command)
        else:
            begin = functools.partial(start, harness, hosts[:2], (1, 1))
        jobs = begin(*harness.app.small, f"--timeout={timeout}", "--max-restarts=0")
        jobs[0].wait_for_step(Shape.of(expected).every + 1)
        hosts[1].cut()
        cut = time.monotonic()
        outcomes = [job.finish(limit=3 * timeout) for job in jobs]
        assert [outcome.code for outcome in outcomes] == [1] * len(jobs), outcomes
        for outcome in outcomes:
            reasons = [line for line in outcome.errors if "no progress for" in line or re.search(r"rank \d", line)]
            assert reasons, outcome  # the job's exit code alone is not a reason
            assert "Traceback" not in outcome.stderr
        left = 2 * timeout  # seconds after the cut; ranks on the unreachable host also end
        while ranks := [pid for pid, words in harness.left_running().items() if "train.py" in words]:
            assert time.monotonic() < cut + left, ranks
            time.sleep(0.2)
        hosts[1].join()
        result = finish(harness, begin(*harness.app.small), 2)
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["resumed_from_step"] >= Shape.of(expected).every
    steps = [line["step"] for line in metrics(Path(result["run_dir"]))]
    assert steps == list(range(1, expected["steps"] + 1))


@pytest.mark.soak  # the quick tests resume by a new start
def test_the_same_scripts_resume_when_the_cable_is_back(of: Callable[[str], Harness], hosts: list[Host]) -> None:
    """The launch scripts restart the ranks and wait for each other."""
    harness = of("mnist_ddp")
    expected = harness.train(2, *harness.app.small, run_dir=harness.folder / "undisturbed")
    jobs = start(harness, hosts[:2], (1, 1), *harness.app.small, "--timeout=20")
    jobs[0].wait_for_step(Shape.of(expected).every + 1)
    hosts[1].cut()
    time.sleep(30)
    hosts[1].join()
    result = finish(harness, jobs, 2)
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["restarts"] >= 1


def test_ranks_come_and_go_on_two_hosts(of: Callable[[str], Harness], hosts: list[Host], soak: bool) -> None:
    """Stop the second host by a signal, as for maintenance, let it rejoin, and then kill one of its ranks.

    The soak also pulls the host's cable for 20 s, in which the host takes no step.
    """
    harness = of("mnist_elastic")
    options = ["--dataset=mnist-5k", "--global-batch-size=100", "--log-every=1", "--virtual-ranks=3"]
    options.append(f"--epochs={amount(soak, few=5, many=60)}")
    options.append(f"--timeout={amount(soak, few=60, many=15)}")
    faults = os.pathsep.join([str(ROOT / "tests" / "mnist_elastic" / "faults"), harness.environ()["PYTHONPATH"]])
    slow = amount(soak, few={"PYTHONPATH": faults, "SAMESTEP_COMPLETE": "3"}, many={})  # for missing ranks
    alone = harness.train(1, *options, run_dir=harness.folder / "alone")
    first, second = start(harness, hosts[:2], (1, 2), *options, **slow)
    first.wait_for_step(10)
    os.kill(newest(harness, NODE_RANK="1", SAMESTEP_JOB_INFO=""), signal.SIGTERM)  # the launch script
    assert second.finish().code == 128 + signal.SIGTERM
    second = start_on(harness, hosts[:2], 1, 2, *options, **slow)
    first.wait_for(lambda: [1] in (found := members(first.run_dir)) and found[-1] == [1, 2, 3])
    os.kill(newest(harness, info='"rank":3,'), signal.SIGKILL)
    if soak:
        first.wait_for_step(last_step(first.run_dir) + 100)
        hosts[1].cut()
        time.sleep(20)
        hosts[1].join()
    result = finish(harness, [first, second], 3)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert losses(first.run_dir) == losses(harness.folder / "alone")
    assert (result["restarts"], result["node_count"]) == (0, 2)
    trained = [{*entry["ranks"]} for entry in result["members"]]
    assert trained[0] == {1, 2, 3}
    assert {1} in trained
    assert {1, 2, 3} in trained[trained.index({1}) :]
    assert result["rejoins"] >= 1  # rank 3 may rejoin before the other ranks regroup
    if soak:
        assert trained[-1] > {1} in trained[trained.index({1}) + 1 :]


def members(run_dir: Path) -> list[list[int]]:
    """Return the ranks of each group that trained, in the order of the events."""
    lines = [json.loads(line) for line in (run_dir / "log" / "events.jsonl").read_text().splitlines()]
    return [line["ranks"] for line in lines if line["kind"] == "members"]


def newest(harness: Harness, info: str = "", **variables: str) -> int:
    """Return the id of the test's newest process with these environment variables.

    An empty value means that the variable is unset. The SAMESTEP_JOB_INFO of the process contains ``info``.
    """
    return max(
        pid
        for pid, environ in environments().items()
        if environ.get("SAMESTEP_TEST") == harness.mark
        and all(environ.get(name, "") == value for name, value in variables.items())
        and info in environ.get("SAMESTEP_JOB_INFO", "")
    )


def start_horovod(
    harness: Harness, hosts: Sequence[Host], command: Callable[..., list[str]], *options: str
) -> list[Job]:
    """Start the launch script on the first host. Horovod's launcher starts the ranks of both hosts."""
    work = harness.folder / "node0"
    work.mkdir(exist_ok=True)
    hosts[0].network.write_names(hosts, own=True)
    script = ["bash", str(ROOT / "scripts" / "run_mnist_horovod.sh"), "2", "--run-dir=run", *options]
    words = command(hosts[0], *script)
    return [harness.start_command(words, work / "run", work, HOROVOD_HOSTS="node0:1,node1:1")]


# --- hosts that do not fit -----------------------------------------------------------------------------------------


def refused(jobs: Sequence[Job]) -> tuple[int, str]:
    """Check that all hosts end with the same exit code and error line. Return the code and the line."""
    outcomes = [job.finish(limit=60) for job in jobs]
    assert len({outcome.code for outcome in outcomes}) == 1, outcomes
    assert {outcome.stdout for outcome in outcomes} == {""}
    errors = {tuple(outcome.errors) for outcome in outcomes}
    assert len(errors) == 1, outcomes
    (line,) = errors.pop()
    return outcomes[0].code, line


def test_hosts_that_do_not_fit_are_named_on_all(of: Callable[[str], Harness], hosts: list[Host]) -> None:
    """Each host reports the contradiction with the hosts' names, before it imports a framework."""
    harness = of("mnist_ddp")
    two = hosts[:2]
    jobs = [start_on(harness, two, 0, 1, "--epochs=2"), start_on(harness, two, 1, 1, "--epochs=3")]
    assert refused(jobs) == (
        2,
        "error: --epochs is 2 on machine 0 (node0) and 3 on machine 1 (node1): give all machines the same options",
    )

    jobs = [start_on(harness, two, 0, 1), start_on(harness, two, 1, 1, NODE_RANK="0")]
    code, line = refused(jobs)
    assert code == 2
    assert line.endswith("both have NODE_RANK=0: give each machine its own")
    assert {"node0", "node1"} <= set(line.split())

    jobs = [start_on(harness, hosts, number, 1) for number in (0, 1)] + [start_on(harness, hosts, 2, 1, NODE_RANK="1")]
    code, line = refused(jobs)
    assert code == 2
    assert line.endswith("both have NODE_RANK=1: give each machine its own")
    assert {"node1", "node2"} <= set(line.split())

    (harness.folder / "node1" / "file").touch()
    jobs = [start_on(harness, two, 0, 1), start_on(harness, two, 1, 1, folder="file/run")]
    code, line = refused(jobs)
    assert code == 2
    assert line.startswith(f"error: machine 1 (node1): cannot make {harness.folder / 'node1' / 'file' / 'run'}")

    hosts[1].cut()
    alone = [start_on(harness, two, number, 1, "--timeout=3") for number in (0, 1)]
    first, second = (job.finish(limit=60) for job in alone)
    assert (first.code, second.code) == (1, 1)
    assert "machine 1 of 2 did not come within 3 s: start the script there too" in first.errors[0]
    assert "machine 1 (node1) did not reach machine 0 at MASTER_ADDR=node0 MASTER_PORT=29400" in second.errors[0]


def test_a_sharded_run_needs_a_run_dir_that_all_hosts_share(of: Callable[[str], Harness], hosts: list[Host]) -> None:
    """The second host has another file system at the path of the first host's run dir."""
    harness = of("gpt_fsdp")
    two = hosts[:2]
    options = [*exact(harness), "--max-restarts=0"]
    work = harness.folder / "node0"
    work.mkdir()
    elsewhere = ["bash", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(work)]
    jobs = [start_on(harness, two, 0, 1, *options), start_on(harness, two, 1, 1, *options, prefix=elsewhere)]
    first, second = (job.finish() for job in jobs)
    assert (first.code, second.code) == (2, 2), (first, second)
    line = f"error: --run-dir {work / 'run'} is not shared by all ranks: "
    line += "rank 1 (node1) does not see the files of rank 0 (node0)"
    assert first.errors[0].startswith(line)
    assert not list(work.rglob("checkpoints/*"))


def test_another_number_of_ranks_is_refused_where_the_launcher_wants_equal_ones(
    of: Callable[[str], Harness], hosts: list[Host]
) -> None:
    harness = of("resnet50_mindspore")
    assert refused(start(harness, hosts[:2], (1, 2))) == (
        2,
        "error: N is 1 on machine 0 (node0) and 2 on machine 1 (node1): this app's launcher wants as many ranks on "
        "each machine",
    )
