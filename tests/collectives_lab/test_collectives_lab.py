"""Run collectives_lab by its launch script and without a launcher, with real processes and collectives."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import and_, mul, or_, xor
from pathlib import Path
from typing import Any

import pytest
from amounts import amount
from harness import ROOT, App, Harness, Job, Outcome, bare, python_path
from processes import free_port

APP = ROOT / "apps" / "collectives_lab"
PRIMITIVES = (
    "broadcast reduce all_reduce gather all_gather scatter reduce_scatter all_to_all barrier send_recv isend_irecv"
).split()
LIMIT = 900  # seconds for one command, which may start a dozen jobs
POINT_TO_POINT = {"send_recv", "isend_irecv"}
PLACES = ("backward", "start", "aggregation", "once")


class Lab(Harness):
    def command(self, n: int, command: str, *options: str, run_dir: Path | None = None, **environ: str) -> Job:
        """Start ``scripts/run_collectives_lab.sh n command options``."""
        run_dir = run_dir or self.folder / "run"
        script = str(ROOT / "scripts" / "run_collectives_lab.sh")
        words = ["bash", script, str(n), command, f"--run-dir={run_dir}", f"--device={self.device}", *options]
        return self.start_command(words, run_dir, **environ)

    def measure(self, n: int, command: str, *options: str, run_dir: Path | None = None) -> Outcome:
        outcome = self.command(n, command, *options, run_dir=run_dir).finish(limit=LIMIT)
        assert outcome.code == 0, outcome
        assert outcome.result["command"] == command
        assert "Traceback" not in outcome.stderr
        return outcome

    def bare(self, n: int, program: str, *options: str, name: str = "run") -> list[Job]:
        """Start the ranks of a program as a user at n terminals does. No launcher stops the ranks if one fails."""
        run_dir = self.folder / name
        words = [
            sys.executable,
            str(APP / f"{program}.py"),
            f"--run-dir={run_dir}",
            f"--device={self.device}",
            *options,
        ]
        where = {
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(n),
        }
        return [self.start_command(words, run_dir, **where, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(n)]


@pytest.fixture
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    """Yield a `Lab`, and check afterwards that no process is left."""
    app = App(name="collectives_lab", dataset="mnist-5k", test_examples=1000, small=(), exact=(), variants=())
    made = Lab(app, request.config.getoption("--device"), tmp_path)
    yield made
    made.check_nothing_left()


def read(run_dir: Path, name: str) -> Any:
    return json.loads((run_dir / f"{name}.json").read_text())


# --- primitives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 4))])
def test_every_primitive_does_what_its_definition_says(lab: Lab, n: int) -> None:
    lab.measure(n, "primitives", "--quick", "--max-bytes=4096", "--repeats=3")
    found = read(lab.folder / "run", f"primitives-{n}")
    expected = [name for name in PRIMITIVES if n > 1 or name not in POINT_TO_POINT]
    cases = {(case["primitive"], case["dtype"], case["layout"]): case for case in found["checks"]}
    assert set(cases) == {
        (name, dtype, layout)
        for name in expected
        for dtype in ("float32", "float64", "int64")
        for layout in ("contiguous", "strided", "empty")
    }
    assert all(case["wrong"] == {} and case["roots"] == n for case in cases.values())
    assert [each["primitive"] for each in found["values"]] == expected
    assert all(len(each["ranks"]) == n for each in found["values"])
    check_operators(found, n)
    timed = {(t["primitive"], t["bytes"]) for t in found["timings"]}
    assert len(timed) == 2 * (len(expected) - 1) + 1  # the barrier has no size
    assert all(len(t["seconds"]) == 3 and min(t["seconds"]) > 0 for t in found["timings"])
    if n == 3:
        check_values_by_hand({each["primitive"]: each["ranks"] for each in found["values"]})


OPERATORS = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split()
REDUCERS = "reduce all_reduce reduce_scatter".split()


def check_operators(found: dict[str, Any], n: int) -> None:
    """Check that no result is wrong on a rank. With gloo, a refused operator must have gloo's message and 0 cases."""
    assert all(case["wrong"] == {} for case in found["operator_checks"])
    if found["facts"]["backend"] != "gloo":
        return
    cases = {(c["operator"], c["primitive"], c["dtype"]): c for c in found["operator_checks"]}
    every = [(op, name, dtype) for op in OPERATORS for name in REDUCERS for dtype in ("float32", "float64", "int64")]
    assert list(cases) == every
    for (op, name, dtype), case in cases.items():
        refused = ""
        if op == "AVG" and dtype == "int64":
            refused = "result type Float can't be cast to the desired output type Long"
        elif op in ("BAND", "BOR", "BXOR") and dtype != "int64":
            refused = f"Cannot use ReduceOp.{op} with non-integral dtype"
        assert case["refused"] == refused
        assert case["defined"] == (not refused)
        assert case["cases"] == (0 if refused else 3 * (n if name == "reduce" else 1))  # 3 layouts, for each root
    shown = {(each["operator"], each["primitive"]): each for each in found["operators"]}
    assert list(shown) == [(op, name) for op in OPERATORS for name in REDUCERS]
    assert {key for key, each in shown.items() if each["dtype"] != "int64"} == {("AVG", name) for name in REDUCERS}
    before = [[3 + (2 * rank + i) % 8 for i in range(n)] for rank in range(n)]
    for (op, name), each in shown.items():
        assert [rank["before"] for rank in each["ranks"]] == before
        after = [reduced(op, column) for column in zip(*before)]
        expected = {"all_reduce": [after] * n, "reduce": [after, *[None] * (n - 1)]}.get(name, [[x] for x in after])
        assert [rank["after"] for rank in each["ranks"]] == expected, (op, name)


def reduced(operator: str, numbers: Sequence[int]) -> float:
    """Return the reduction of ``numbers`` in Python's arithmetic."""
    pair: dict[str, Callable[[Any, Any], Any]] = {
        "PRODUCT": mul, "MIN": min, "MAX": max, "BAND": and_, "BOR": or_, "BXOR": xor,
    }  # fmt: skip
    if operator in pair:
        return float(reduce(pair[operator], numbers))
    return sum(numbers) / (len(numbers) if operator == "AVG" else 1)


def check_values_by_hand(shown: dict[str, list[dict[str, Any]]]) -> None:
    """Check the results of 3 ranks that hold [10, 11, 12], [20, 21, 22], [30, 31, 32], or the values 10, 20, 30."""
    assert [rank["before"] for rank in shown["broadcast"]] == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    after = {name: [rank["after"] for rank in ranks] for name, ranks in shown.items()}
    assert after["broadcast"] == [[10, 11, 12]] * 3
    assert after["reduce"] == [[60, 63, 66], None, None]
    assert after["all_reduce"] == [[60, 63, 66]] * 3
    assert after["gather"] == [[10, 20, 30], None, None]
    assert after["all_gather"] == [[10, 20, 30]] * 3
    assert after["scatter"] == [[10], [11], [12]]
    assert after["reduce_scatter"] == [[60], [63], [66]]
    assert after["all_to_all"] == [[10, 20, 30], [11, 21, 31], [12, 22, 32]]
    assert after["send_recv"] == after["isend_irecv"] == [[30, 31, 32], [10, 11, 12], [20, 21, 22]]


def ends(jobs: list[Job]) -> list[Outcome]:
    return [job.finish() for job in jobs]


# The quick tests use primitives that fail in different ways: in a collective, in a send, in a comparison of shapes.
FAULTS = {
    "killed": ["all_reduce", "send_recv"],
    "stopped": ["broadcast", "isend_irecv"],
    "shapes": ["all_to_all"],
    "missing": list(PRIMITIVES),
}


@pytest.mark.parametrize("fault", [*list(FAULTS)[:3], pytest.param("missing", marks=pytest.mark.soak)])
def test_a_rank_that_fails_in_a_collective_is_reported_by_the_others(lab: Lab, fault: str, soak: bool) -> None:
    """Run a job without a launcher for each primitive, all at the same time. A soak tests all possible primitives."""
    n = amount(soak, few=2, many=4)
    possible = [name for name in PRIMITIVES if (fault, name) != ("shapes", "barrier")]
    names = amount(soak, few=FAULTS[fault], many=possible)
    started = {
        name: lab.bare(n, "primitives", f"--fault={fault}", f"--only={name}", "--timeout=8", name=name)
        for name in names
    }
    for name, jobs in started.items():
        for rank, outcome in enumerate(ends(jobs[:-1])):
            assert outcome.code == 1, (name, outcome)
            (error,) = outcome.errors
            assert name in error, outcome
            assert fault == "shapes" or f"rank {rank}: " in error
            assert "Traceback" not in outcome.stderr
        if fault == "stopped":
            jobs[-1].process.kill()
        faulty = jobs[-1].finish()
        assert faulty.code == {"killed": -9, "stopped": -9, "shapes": 1}.get(fault, faulty.code)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_under_a_launcher_too_every_rank_says_where_it_was(lab: Lab, n: int) -> None:
    """torchrun stops the other ranks as soon as one rank dies, often before they detect the failure.

    The console shows one error if all ranks report the lost connection. The launcher's log has all errors.
    """
    job = lab.command(n, "primitives", "--only=all_reduce", "--fault=killed", "--timeout=20")
    outcome = job.finish()
    assert outcome.code == 1
    assert any("all_reduce" in line for line in outcome.errors), outcome
    log = (job.run_dir / "log" / "launcher.log").read_text()
    assert set(re.findall(r"^error: rank (\d): all_reduce ", log, re.MULTILINE)) == set(map(str, range(n - 1))), log


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2"], "COMMAND"),
        (["2", "primitivs"], "invalid choice: 'primitivs'"),
        (["2", "--quick", "all"], "put it after its command"),
        (["2", "primitives", "--quik"], "did you mean --quick?"),
        (["2", "primitives", "--only=sum"], "--only"),
        (["2", "primitives", "--fault=killed"], "--fault needs --only"),
        (["1", "primitives", "--only=send_recv"], "--only send_recv needs 2 ranks, N is 1"),
        (["1", "primitives", "--only=broadcast", "--fault=killed"], "--only broadcast --fault needs 2 ranks"),
        (["2", "primitives", "--only=reduce", "--fault=killed", "--fault-rank=2"], "--fault-rank 2 is not below N=2"),
        (["2", "straggler", "--slow-rank=2"], "--slow-rank 2 is not below N=2"),
        (["2", "straggler", "--where=twice"], "--where: 'twice' is not one of start, aggregation, backward, once"),
        (["2", "launchers", "--launchers=mpirun"], "--launchers: 'mpirun' is not one of torchrun, torch.distributed.l"),
        (["2", "aggregate", "--virtual-ranks=4"], "--virtual-ranks"),
        (["2", "straggler", "--delays=x"], "--delays: 'x'"),
        (["2", "straggler", "--sleeps=once:1,twice:2"], "--sleeps: 'twice:2' is not PLACE:MS"),
        (["2", "straggler", "--sleeps=once:1", "--kind=random"], "omit --delays, --where and --kind"),
        (["2", "straggler", "--strategies=ddp"], "--strategies: 'ddp'"),
        (["2", "aggregate", "--strategies=ring,star"], "'star' is not one of ddp, "),
        (["0", "all"], "N=0"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(lab: Lab, words: list[str], message: str) -> None:
    script = str(ROOT / "scripts" / "run_collectives_lab.sh")
    outcome = lab.start_command(["bash", script, *words], lab.folder / "run").finish(limit=60)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert len(outcome.stderr.splitlines()) == 1
    assert outcome.stderr.startswith("error: ")
    assert message in outcome.stderr
    assert list(lab.folder.iterdir()) == []


@pytest.mark.parametrize("command", ["primitives", "aggregate", "straggler", "launchers", "predict", "report", "all"])
def test_the_help_of_every_command_teaches(lab: Lab, command: str) -> None:
    script = str(ROOT / "scripts" / "run_collectives_lab.sh")
    outcome = lab.start_command(["bash", script, "2", command, "--help"], lab.folder / "run").finish(limit=60)
    assert outcome.code == 0
    assert f"run_collectives_lab.sh N {command} [options]" in outcome.stdout
    assert "--run-dir" in outcome.stdout


def lab_options() -> Any:
    """Return the app's options.py as a module. The module needs only the standard library and samestep."""
    spec = importlib.util.spec_from_file_location("lab_options", APP / "options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_states_the_defaults_that_the_programs_get() -> None:
    """Compare each "(default: ...)" of the help with the value that ``parse`` returns, with and without --quick."""
    options = lab_options()
    stated = {}
    for command, parser in options.build_parser().commands().items():
        usual, quick = (vars(options.parse([command, *more])) for more in ([], ["--quick"]))
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or action.nargs == 0:  # a hidden option or a flag
                continue
            text = parser._get_formatter()._expand_help(action)
            match = re.fullmatch(r".*\(default: (.*?)(?:; (\S+) with --quick)?\)", text)
            values = [usual.get(action.dest), quick.get(action.dest)]
            shown = [",".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in values]
            if match:
                stated[command, action.dest] = match[1]
                in_words = values[0] is None or match[1] == "all"
                assert in_words or match[1] == shown[0], (command, action.dest)
                assert (match[2] or match[1]) == shown[1] or (in_words and not match[2]), (command, action.dest)
            else:  # the option has no default, or its default is one of the choices in --help
                assert values[0] == values[1]
                assert values[0] is None or values[0] in (action.choices or ()), (command, action.dest)
    assert stated["primitives", "repeats"] == "30 up to 1 MiB, 10 up to 16 MiB, 5 beyond"
    counts = (1, 2**20, 2**20 + 1, 2**24, 2**24 + 1, 2**40)
    assert [options.timed_calls(count) for count in counts] == [30, 30, 10, 10, 5, 5]
    assert stated["aggregate", "ranks"] == "1, 2, 4 up to N, N"
    assert (stated["aggregate", "epochs"], stated["straggler", "steps"]) == ("5", "128")


def test_no_program_has_a_default_of_its_own() -> None:
    """A default written as ``options.x or ...`` may be missing in --help. The help describes the expected two."""
    found = []
    for path in sorted(APP.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
                own = re.fullmatch(r"options\.\w+", ast.unparse(node.values[0]))
                found += [f"{path.name}: {ast.unparse(node)}"] if own else []
    assert found == [
        "lab.py: options.ranks or sorted({r for r in RANKS if r <= n} | {n})",
        "primitives.py: options.repeats or timed_calls(count)",
    ]


@pytest.mark.parametrize("command", ["primitives", "aggregate", "straggler", "launchers"])
def test_torch_distributed_launch_may_pass_local_rank(command: str) -> None:
    """The launcher adds --local-rank=<r> before the program's arguments. Before torch 2.0, it added --local_rank.

    Test that every command accepts both spellings, and that --help omits them. Another test starts the launcher.
    """
    options = lab_options()
    for words in (["--local_rank=1"], ["--local-rank", "1"]):
        assert options.parse([command, *words]).local_rank == 1
    assert "local" not in options.build_parser().commands()[command].format_usage()


def test_on_a_gpu_every_timestamp_waits_for_the_device(lab: Lab) -> None:
    """clocks.py simulates the GPU. Each timestamp must be taken after the end of the device's earlier work."""
    run_dir = lab.folder / "run"
    words = [sys.executable, str(Path(__file__).with_name("clocks.py")), str(run_dir)]
    outcome = lab.start_command(words, run_dir).finish(limit=LIMIT)
    assert outcome.code == 0, (run_dir / "log" / "rank-0.log").read_text()
    found = read(run_dir, "clocks")
    for program in ("primitives", "aggregate", "straggler"):
        assert found[program]["early"] == []
        assert min(found[program]["waits"], found[program]["readings"]) > 400
    assert found["choices"].pop("2 for 2") == {"auto": "cuda:1, nccl", "cuda": "cuda:1, nccl", "cpu": "cpu, gloo"}
    for gpus, choices in found["choices"].items():  # there are fewer GPUs than ranks
        message = choices.pop("cuda")
        assert message.startswith(f"error: --device cuda: this machine has {gpus[0]} GPUs for 2 ranks: ")
        assert choices == {"auto": "cpu, gloo", "cpu": "cpu, gloo"}


def test_only_what_nothing_defines_may_be_refused_or_go_unchecked(lab: Lab) -> None:
    """A rounding difference that grows over many steps is not an error. outcomes.py fakes results for the test."""
    run_dir = lab.folder / "run"
    words = [sys.executable, str(Path(__file__).with_name("outcomes.py")), str(run_dir)]
    outcome = lab.start_command(words, run_dir).finish(limit=LIMIT)
    assert outcome.code == 0, outcome
    found = read(run_dir, "outcomes")
    for name, message in {
        "SUM fails": "no such kernel",
        "BAND fails": "no such kernel",  # for int64; a backend may refuse floating point
        "BAND times out": "Timed out waiting 8000ms for recv operation: another rank is stopped, or never came",
    }.items():
        error = re.sub(r" after [\d.]+ s: ", ": ", found[name])
        assert error == f"error: rank 0: all_reduce with {name.split()[0]} failed: {message}"
    assert found["BAND fails on NCCL"] == {"cells": ["refused"] * 3, "cases": [0, 0, 0], "shown": []}
    unchecked = "accepted, undefined"
    assert found["BAND takes floats"] == {
        "cells": [unchecked, unchecked, "3 of 3"], "cases": [0, 0, 3], "shown": ["int64"],
    }  # fmt: skip
    assert found["AVG takes whole numbers"] == {
        "cells": ["3 of 3", "3 of 3", unchecked], "cases": [3, 3, 0], "shown": ["float64"],
    }  # fmt: skip
    assert found["close"] == ["told", "error", "told", "error", "error"]


@pytest.mark.soak  # the quick tests run test_a_mistake_is_one_line
def test_a_primitive_of_two_ranks_is_refused_on_one(lab: Lab) -> None:
    """A rank without the launch script must refuse the primitive. The script itself refuses before it starts a rank."""
    (job,) = lab.bare(1, "primitives", "--only=send_recv")
    outcome = job.finish()
    assert outcome.code == 2
    assert len(outcome.errors) == 1
    assert "needs 2 ranks" in outcome.errors[0]


# --- aggregate -----------------------------------------------------------------------------------------------------

SYNCHRONOUS = (
    "ddp overlap module per_parameter all_reduce reduce_broadcast gather_scatter all_gather ring local_1".split()
)


def test_all_synchronous_strategies_take_the_same_steps_and_send_what_the_formulas_say(lab: Lab, soak: bool) -> None:
    """Train in float64 with dropout and batches that 3 does not divide. The soak adds a smaller last batch."""
    steps = amount(soak, few=8, many=50)
    size = amount(soak, few=2**23, many=2**25)
    options = ["--dtype=float64", "--epochs=2", f"--max-steps={steps}", "--rounds=2", f"--bytes={size}"]
    counts = amount(soak, few=(3,), many=(1, 2, 3, 4))
    if not soak:  # the reference is one rank with any strategy, because one rank has nothing to average
        (job,) = lab.bare(1, "aggregate", *options, "--strategies=ddp")
        assert job.finish(limit=LIMIT).code == 0
    lab.measure(counts[-1], "aggregate", *options, f"--ranks={','.join(map(str, counts))}")
    found = {n: read(lab.folder / "run", f"aggregate-{n}") for n in counts}
    reference = read(lab.folder / "run", "aggregate-1")["training"][0]["losses"]
    assert len(reference) == steps
    assert reference[-1] < reference[0] / amount(soak, few=1, many=1.5)
    for n, of in found.items():
        by_name = {each["strategy"]: each for each in of["training"]}
        assert [name for name, each in by_name.items() if each["synchronous"]] == SYNCHRONOUS
        for name in SYNCHRONOUS:
            assert by_name[name]["weights_difference"] < 1e-12, (n, name)
            # The losses agree at all world sizes: nothing is averaged twice, and no sample is repeated.
            assert max(abs(a / b - 1) for a, b in zip(by_name[name]["losses"], reference)) < 1e-12, (n, name)
        assert {f"local_{k}" for k in (4, 16)} < set(by_name)
        least = amount(soak, few=0.2, many=0.5)
        assert all(each["curve"][-1]["test_accuracy"] > least for each in by_name.values())
        ring = by_name["ring"]
        assert ring["sent_bytes_per_step"] == ring["formula_bytes_per_step"] == 2 * (n - 1) * 21_840 * 8
        assert ring["sent_messages_per_step"] == 2 * n * (n - 1)

        large = of["large"]
        assert large["bytes"] == size
        ring = large["schemes"]["ring"]
        assert sum(ring["sent_bytes"]) == ring["formula_bytes"] == 2 * (n - 1) * size
        assert sum(ring["sent_messages"]) == ring["formula_messages"] == 2 * n * (n - 1)
        for name, scheme in large["schemes"].items():
            assert len(scheme["seconds"]) == len(scheme["loopback_bytes"]) == 2
            least = min(scheme["loopback_bytes"])  # other programs may use loopback in one round
            assert least >= 0.95 * scheme["formula_bytes"], (n, name)
            if large["alone_on_loopback"]:
                assert least <= 1.05 * scheme["formula_bytes"] + 10_000, (n, name)


TWICE = """
import os
import torch
import torch.distributed as dist
from distributed import session
from samestep.env import World
from strategies import GradientAverage

world_size = int(os.environ["WORLD_SIZE"])
rank = next((rank for rank in range(1, world_size) if os.fork() == 0), 0)  # torch is imported once
os.environ["RANK"] = str(rank)
dist.init_process_group("gloo")
session.device, session.timeout, session.world = torch.device("cpu"), 60.0, World(rank, world_size)
torch.manual_seed(rank)
model = torch.nn.Linear(3, 2)  # other weights on each rank
wrapped = GradientAverage(model)
inputs = torch.arange(3.0).repeat(rank + 1, 1)
wrapped(inputs).sum().backward()
weights, gradient = model.weight.detach().clone(), model.weight.grad.clone()
torch.manual_seed(0)
assert torch.equal(weights, torch.nn.Linear(3, 2).weight)  # rank 0's
assert torch.equal(gradient, torch.arange(3.0).repeat(2, 1) * (world_size + 1) / 2)  # the mean of 1, 2, ..., N

group = dist.new_group([0])  # what the tutorial adds after backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM, group=group)
    parameter.grad.data /= world_size
assert torch.equal(model.weight.grad, gradient / world_size), (model.weight.grad, gradient)
dist.barrier()
assert rank or all(os.wait()[1] == 0 for _ in range(world_size - 1))
os._exit(0)  # gloo's threads may abort an orderly end
"""


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_to_average_in_a_group_of_rank_0_divides_by_n_twice(lab: Lab, n: int) -> None:
    """The wrapped model already averages the gradients. The lines that a tutorial adds divide them by n again."""
    program = lab.folder / "program.py"
    program.write_text(TWICE)
    environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path(APP)}
    environ |= {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    outcome = bare(lab, [sys.executable, str(program)], **environ)
    assert outcome.code == 0, outcome


@pytest.mark.soak  # the quick tests take the same steps with batches that 3 does not divide
def test_a_group_that_the_batch_does_not_divide_by_takes_the_same_steps(lab: Lab) -> None:
    options = ["--dtype=float64", "--global-batch-size=10", "--max-steps=6", "--rounds=1", "--bytes=1000"]
    lab.measure(3, "aggregate", *options, "--ranks=1,3", "--strategies=ddp,overlap,ring,gather_scatter")
    one, three = (read(lab.folder / "run", f"aggregate-{n}")["training"] for n in (1, 3))
    for each in (*one, *three):
        assert max(abs(a / b - 1) for a, b in zip(each["losses"], one[0]["losses"])) < 1e-12
        assert each["weights_difference"] < 1e-12


# --- straggler -----------------------------------------------------------------------------------------------------


def test_the_timeline_accounts_for_every_moment_of_every_rank(lab: Lab, soak: bool) -> None:
    """Check the chosen strategies, places and kind of sleep. With --trace, all collectives are recorded.

    A soak runs all conditions of --quick.
    """
    usual = ["--delays=0,100", "--steps=32", "--quick", "--global-batch-size=16", "--trace"]
    chosen = ["--strategies=reduce_broadcast,overlap,local_4", f"--where={','.join(PLACES)}", "--kind=constant"]
    outcome = lab.measure(2, "straggler", *usual, *amount(soak, few=chosen, many=[]))
    found = read(lab.folder / "run", "straggler-2")
    assert found["slow_rank"] == 1
    conditions = {condition["name"]: condition for condition in found["conditions"]}
    planned = [line.removeprefix("planned: ") for line in outcome.stdout.splitlines() if line.startswith("planned: ")]
    assert planned == list(conditions)
    first = amount(soak, few="reduce_broadcast", many="all_reduce")
    for condition in conditions.values():
        assert len(condition["blocks"]) == 2
        for block in condition["blocks"]:
            for rank in block["ranks"]:
                parts = [rank[part] for part in ("computed", "slept", "waited", "communicated")]
                assert min(parts) > -1e-9
                assert abs(sum(parts) - rank["seconds"]) < 1e-9
                assert len(rank["step_seconds"]) == 16
            calls = {"all_reduce": 16, "reduce_broadcast": 32, "overlap": 48, "local_4": 4, "local_16": 1}
            assert len(block["waited_for"]) == calls[condition["strategy"]]
    for block in conditions[f"{first}, one rank sleeps 100 ms in aggregation"]["blocks"]:
        assert block["ranks"][1]["slept"] >= 16 * 0.100  # sleep never returns early
        assert block["ranks"][0]["slept"] == 0
        # Even on a busy machine, rank 0 waits for rank 1 after more than half of rank 1's 16 sleeps of 100 ms.
        assert block["waited_for"].count(1) > 8
        # Rank 0 waits because rank 1 is late, so it waits no longer than rank 1 spends outside of collectives.
        assert block["ranks"][0]["waited"] <= block["ranks"][1]["slept"] + block["ranks"][1]["computed"]
    assert set(found["timelines"]) == set(conditions)
    assert list((lab.folder / "run").glob("straggler-*.svg"))
    assert "Train time of 32 steps" in outcome.stdout
    if soak:
        return
    most = {"nobody sleeps": [0, 0]}  # number of sleeps of 100 ms in each block
    most |= {f"one rank sleeps 100 ms in {where}": [16, 16] for where in ("aggregation", "backward")}
    most |= {"one rank sleeps 100 ms in start": [1, 1], "one rank sleeps 100 ms once": [1, 0]}
    names = ("reduce_broadcast", "overlap", "local_4")
    assert sorted(planned) == sorted(f"{name}, {way}" for name in names for way in most)
    for way, counts in most.items():
        for block, count in zip(conditions[f"overlap, {way}"]["blocks"], counts):
            assert 0.1 * count <= block["ranks"][1]["slept"] <= 0.3 * count, way
    check_trace(lab, outcome, conditions)


def check_trace(lab: Lab, outcome: Outcome, conditions: dict[str, Any]) -> None:
    """Check that each rank's trace has every collective of the run in order.

    In the table, the slow rank must be the last rank of most collectives that follow its sleeps.
    """
    folder = lab.folder / "run" / "trace-straggler-2"
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.iterdir())]
    blocks = {name: sum(len(c["blocks"]) + 1 for c in conditions.values() if c["strategy"] == name)
              for name in ("reduce_broadcast", "overlap", "local_4")}  # fmt: skip
    for calls in files:
        count = Counter(call["collective"] for call in calls)
        assert count["reduce"] == count["broadcast"] == 16 * blocks["reduce_broadcast"]
        assert count["all_reduce of a bucket"] == 48 * blocks["overlap"]
        assert count["all_reduce"] == 4 * blocks["local_4"]
        times = [call[when] for call in calls if call["collective"] != "backward" for when in ("before", "after")]
        assert times == sorted(times)
    found = read(lab.folder / "run", "trace-straggler-2")["collectives"]
    shown = {each["condition"]: each for each in found if each["collective"] == "reduce"}
    slept = shown["reduce_broadcast, one rank sleeps 100 ms in aggregation"]
    assert sum(slept["last"]) == 32  # the calls of the two blocks in which a rank slept
    assert slept["last"][1] > 16
    assert slept["waited"][0] >= 1.6
    title = "Who waited for whom in straggler, 2 ranks: reduce_broadcast, one rank sleeps 100 ms in aggregation"
    assert title in outcome.stdout


def test_sleeps_are_compared_in_one_table(lab: Lab) -> None:
    sleeps = "--sleeps=once:1,aggregation:2,aggregation:50"
    outcome = lab.measure(2, "straggler", "--strategies=all_reduce,reduce_broadcast", sleeps, "--steps=16")
    table = outcome.stdout.split("Train time of 16 steps, 2 ranks\n")[1].split("\n\n")[0]
    rows = re.findall(r"^(\w+) +(nobody|one rank +\w+ +constant \d+ ms) +[\d.]+ s$", table, re.MULTILINE)
    ways = ["nobody", "once 1", "aggregation 2", "aggregation 50"]
    shown = [(name, re.sub(r"one rank +| +constant| ms", "", way)) for name, way in rows]
    assert shown == [(name, way) for name in ("all_reduce", "reduce_broadcast") for way in ways], outcome.stdout


# --- launchers -----------------------------------------------------------------------------------------------------


LAUNCHERS = ["torchrun", "torch.distributed.launch", "multiprocessing.spawn", "Process"]


def test_every_launcher_does_the_same_job_and_reports_a_death(lab: Lab, soak: bool) -> None:
    """Run a job with each launcher, also with a killed rank. The quick tests leave out torchrun and Process."""
    chosen = amount(soak, few=LAUNCHERS[1:3], many=LAUNCHERS)
    option = f"--launchers={','.join(chosen)}"
    lab.measure(2, "launchers", "--steps=6", *amount(soak, few=[option], many=[]))
    found = read(lab.folder / "run", "launchers")
    ways = found["ways"]
    assert list(ways) == chosen
    shas = set()
    for way in ways:
        whole = ways[way]["whole"]
        killed = ways[way]["killed"]
        assert (whole["code"], whole["ranks_done"], len(whole["weights_sha256"])) == (0, 2, 1)
        shas.add(whole["weights_sha256"][0])
        assert killed["code"] != 0
        assert killed["left_running"] == 0
        assert any("rank 0: all_reduce" in line for line in killed["said"]), killed
    assert len(shas) == 1
    for way in {*chosen} & {*LAUNCHERS[:2]}:
        assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} <= set(ways[way]["whole"]["sets"])
    assert "RANK" not in ways["multiprocessing.spawn"]["whole"]["sets"]
    added = {way: ["--local-rank=1"] if way == "torch.distributed.launch" else [] for way in chosen}
    assert {way: runs["whole"]["arguments"] for way, runs in ways.items()} == added
    if lab.device == "cpu":
        check_data_parallel(found["data_parallel"])


def check_data_parallel(found: dict[str, Any]) -> None:
    """Without a GPU, DataParallel changes no bit of a step. Its algorithm in 2 pieces and DDP change the rounding."""
    assert (found["world_size"], found["steps"], found["devices_of_data_parallel"]) == (2, 6, [])
    names = ["plain", "DataParallel", "its algorithm, in 2 pieces", "DistributedDataParallel"]
    assert [each["way"] for each in found["ways"]] == names
    assert [each["calls_per_step"] for each in found["ways"]] == [1, 1, 2, 1]
    assert [each["processes"] for each in found["ways"]] == [1, 1, 1, 2]
    for each, most in zip(found["ways"], (0.0, 0.0, 1e-12, 1e-12)):
        assert each["gradients_difference"] <= most
        assert each["weights_difference"] <= most
    # There are 21,840 parameters and 125 images of 784 pixels, in float64. The second device gets at most 63 images.
    assert found["memory"]["measured"] == []
    assert found["memory"]["computed"] == {
        "weights": [174_720, 174_720], "gradients": [174_720, 174_720], "momentum": [174_720, 0],
        "images": [784_000, 395_136], "outputs": [10_000, 5_040],
    }  # fmt: skip


# --- predict and report --------------------------------------------------------------------------------------------

LATENCY = 5e-5
BYTE = 1e-9
REDUCE = 2e-10  # LATENCY is in seconds, BYTE in seconds per byte, REDUCE in seconds per summed byte


def measurements(noise: float = 0.0) -> dict[str, Any]:
    """Return a fake result of ``primitives`` on 2 ranks.

    Each duration is the formula's value, multiplied by 1 + ``noise`` or 1 - ``noise`` in turn.
    """
    timings = []
    for index, count in enumerate(2**k for k in range(10, 28, 2)):
        factor = 1 + noise * (-1) ** index
        line = LATENCY + count * BYTE
        ring = 2 * LATENCY + count * BYTE + count / 2 * REDUCE  # p = 2
        timings.append({"primitive": "isend_irecv", "bytes": count, "seconds": [factor * line] * 3})
        timings.append({"primitive": "all_reduce", "bytes": count, "seconds": [factor * ring] * 3})
    facts = {"world_size": 2, "torch": "2.13.0", "backend": "gloo"}
    return {"facts": facts, "values": [], "checks": [], "timings": timings}


def test_the_fit_finds_latency_and_bandwidth_and_says_how_wrong_it_is(lab: Lab) -> None:
    run_dir = lab.folder / "run"
    run_dir.mkdir()
    (run_dir / "primitives-2.json").write_text(json.dumps(measurements()))
    outcome = lab.measure(2, "predict")
    assert "Fitted" in outcome.stdout
    found = read(run_dir, "predict")
    link = found["link"]
    assert abs(link["latency"] / LATENCY - 1) < 1e-9
    assert abs(link["byte"] / BYTE - 1) < 1e-9
    assert abs(link["reduce"] / REDUCE - 1) < 1e-6
    lines = found["fits"][0]["lines"]
    assert len(lines["all_reduce"]["errors"]) == 4  # every second of 9 sizes is held out
    assert max(abs(error) for line in lines.values() for error in line["errors"]) < 1e-9

    # These values are computed by hand for 4 ranks and 1 GB.
    row = next(row for row in found["times"] if row["ranks"] == 4 and row["bytes"] == 10**9)
    n = 10**9
    c = REDUCE
    assert abs(row["ring"] - (6 * LATENCY + 1.5 * n * BYTE + 0.75 * n * c)) < 1e-6
    assert abs(row["halving-doubling"] - (4 * LATENCY + 1.5 * n * BYTE + 0.75 * n * c)) < 1e-6
    assert abs(row["tree"] - (4 * (LATENCY + n * BYTE) + 2 * n * c)) < 1e-6
    assert abs(row["parameter server"] - (8 * (LATENCY + n * BYTE) + 4 * n * c)) < 1e-6
    assert {row["ranks"] for row in found["times"]} == {2**k for k in range(1, 17)}
    assert {min(row["bytes"] for row in found["times"]), max(row["bytes"] for row in found["times"])} == {
        87_360,
        10**11,
    }

    # The expected maximum of p exponential delays is mean (1 + 1/2 + ... + 1/p).
    rows = found["simulation"]["rows"]
    assert rows[-1]["ranks"] == 65_536
    assert all(abs(row["longest_delay"] / row["expected_longest_delay"] - 1) < 0.2 for row in rows)
    assert all(row["local_16"] < row["local_4"] < row["synchronous"] for row in rows)


def test_held_out_errors_are_reported_whatever_they_are(lab: Lab) -> None:
    run_dir = lab.folder / "run"
    run_dir.mkdir()
    (run_dir / "primitives-2.json").write_text(json.dumps(measurements(noise=0.5)))  # factor 1.5 or 0.5 in turn
    outcome = lab.measure(2, "predict")
    errors = read(run_dir, "predict")["fits"][0]["lines"]["all_reduce"]["errors"]
    assert all(abs(error - 2.0) < 0.01 for error in errors)
    assert "200%" in outcome.stdout

    # A run dir may hold results of an earlier version, which did not compare DataParallel.
    earlier = {"facts": {"world_size": 2}, "ways": {}}
    (run_dir / "launchers.json").write_text(json.dumps(earlier))
    page = page_of(lab)
    assert "What each launcher does, 2 ranks" in page
    assert "DataParallel beside DDP" not in page


def page_of(lab: Lab) -> str:
    """Check that report.md has well-formed tables and that the HTML page loads no other file. Return the HTML page."""
    outcome = lab.measure(2, "report", "--markdown")
    text = (lab.folder / "run" / "report.md").read_text()
    assert text in outcome.stdout
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)]
    assert len(tables) >= 2
    for table in tables:
        assert len(table) >= 2
        assert re.fullmatch(r"\|( --- \|)+", table[1])
        assert len({line.count(" |") for line in table}) == 1, table
    page = (lab.folder / "run" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") >= 2
    assert "<table>" in page
    for outside in ("<script", "<link", "<img", "@import", 'src="', 'href="http'):
        assert outside not in page.replace('xlink:href="#', "")
    return page


def test_a_report_on_nothing_is_one_line(lab: Lab) -> None:
    outcome = lab.command(1, "report").finish()
    assert outcome.code == 2
    assert len(outcome.errors) == 1
    assert "has no results" in outcome.errors[0]


@pytest.mark.soak  # the quick tests run each command separately
def test_the_command_all_makes_one_page_of_every_measurement(lab: Lab) -> None:
    outcome = lab.command(2, "all", "--quick").finish(limit=2 * LIMIT)
    assert outcome.code == 0, outcome
    page = page_of(lab)
    for section in ("primitives", "aggregate", "straggler", "launchers", "predict"):
        assert f'<h2 id="{section}">' in page
