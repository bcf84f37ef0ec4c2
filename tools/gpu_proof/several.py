"""Define the rows with several ranks, which test bits, kills, stops, hangs, and losses at several world sizes.

A row's function returns figures for the table of results, and raises an exception if the row fails.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_proof.jobs import (
    Fault,
    Job,
    Row,
    check_equal,
    largest_difference,
    last_errors,
    losses,
    result,
    resumes,
)
from gpu_proof.ranks import printed, run_ranks

FOR_EVER = ["--epochs=1000"]
BATCH = 64
MNIST = ["--dataset=mnist-5k", *FOR_EVER]
# These options use all features of a step except --compile, which excludes --virtual-ranks. The learning rate is small,
# because a larger rate amplifies rounding errors.
CIFAR = ["--dataset=synthetic-cifar10", *FOR_EVER, "--accumulate=2", "--clip-norm=1", "--warmup-steps=3", "--ema=0.9"]
CIFAR += ["--label-smoothing=0.1", "--dropout=0.1", "--augment", "--lr=0.003", f"--global-batch-size={BATCH}"]
FINETUNE = ["--model=tiny", "--dataset=definitions-240", "--max-length=200", "--micro-tokens=400", "--step-tokens=1200"]
FINETUNE += ["--lora=4", "--lora-dropout=0.1", "--lr=0.01", *FOR_EVER]
OPTIONS = {"mnist_ddp": MNIST, "cifar_ddp": CIFAR, "llm_finetune": FINETUNE}
STEPS = {"mnist_ddp": 100, "cifar_ddp": 20, "llm_finetune": 20}
QUICK_STEPS = 12
SAME_STEPS = {"mnist_ddp": 20, "cifar_ddp": 10}  # rounding errors grow with the number of steps
TOLERANCE = 1e-12
END_LIMIT = 10.0  # time limit for the other ranks to end, in seconds
# Seconds without progress until the watchdog reports a hang. This limit exceeds the duration of an optimizer's import
# and of CUDA's start.
HANG_TIMEOUTS = {"cpu": 25, "cuda": 40}
STOP_CODE = 128 + signal.SIGTERM


def steps_of(row: Row, app: str) -> int:
    if row.proof.quick:
        return QUICK_STEPS
    return STEPS[app]


def options_of(row: Row, app: str, *more: str) -> list[str]:
    """Return the options of a run with four checkpoints."""
    steps = steps_of(row, app)
    return [*OPTIONS[app], f"--max-steps={steps}", f"--checkpoint-every={steps // 4}", *more]


# --- the first row -------------------------------------------------------------------------------------------------


def all_reduce(row: Row, ranks: int) -> dict[str, Any]:
    """Run all_reduce.py with ``ranks`` ranks and without a launcher, and return the JSON object that rank 0 prints."""
    program = str(Path(__file__).with_name("all_reduce.py"))
    return printed(run_ranks(row, [program, row.proof.device], ranks))


# --- bits ----------------------------------------------------------------------------------------------------------


def bits(row: Row, app: str) -> dict[str, Any]:
    """Compare the weights of runs with 1 to 4 ranks, and of a killed run with 3 ranks. Return the weights' digest."""
    steps = steps_of(row, app)
    options = options_of(row, app, "--virtual-ranks=4")
    counts = (1, 3) if row.proof.quick else (1, 2, 3, 4)
    fault = {"rank": 1, "step": steps * 2 // 3, "kind": "kill"}
    calls = {f"{ranks} ranks": partial(row.result, app, ranks, options) for ranks in counts}
    calls["killed at 3"] = partial(row.result, app, 3, options, faults=[fault])
    if row.proof.device != "cpu":
        calls["CPU"] = partial(row.result, app, 1, options, device="cpu")
    found = dict(zip(calls, row.together(list(calls.values()))))
    hashes = {name: each["weights_sha256"] for name, each in found.items()}
    on_cpu = hashes.pop("CPU", None)
    check_equal("weights", hashes)
    if found["killed at 3"]["restarts"] != 1:
        raise RuntimeError(f"the killed run was started again {found['killed at 3']['restarts']} times, not once")
    figures = {"weights": hashes["1 ranks"][:12], "steps": steps, "backend": found["3 ranks"]["backend"]}
    if on_cpu:
        return {**figures, "the CPU's": on_cpu[:12]}
    return figures


# --- losses --------------------------------------------------------------------------------------------------------


def same_step(row: Row, app: str, faults: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Compare losses in float64 at 1, 2 and 3 ranks, with the options in OPTIONS. ``faults`` happen at 2 ranks."""
    steps = 5 if row.proof.quick else SAME_STEPS[app]
    options = [*OPTIONS[app], "--dtype=float64", f"--max-steps={steps}", "--log-every=1", "--checkpoint-every=0"]
    counts = (1, 2) if row.proof.quick else (1, 2, 3)
    calls = [partial(row.run, app, ranks, options, faults=faults if ranks == 2 else ()) for ranks in counts]
    curves = [losses(run_dir) for run_dir in row.together(calls)]
    difference = largest_difference(curves, steps)
    if not difference <= TOLERANCE:
        raise RuntimeError(f"losses differ by {difference:.1e}: {curves}")
    return {"largest difference": difference, "tolerance": TOLERANCE, "steps": steps}


# --- kills and stops -----------------------------------------------------------------------------------------------


def killed(row: Row, ranks: int, blocked: bool = False) -> dict[str, Any]:
    """Kill a rank during an all-reduce. Check that the other ranks end, and that the job resumes with the same weights.

    If ``blocked`` is true, rank 0 waits in C code, which a lost connection does not interrupt.
    """
    options = options_of(row, "mnist_ddp")
    step = steps_of(row, "mnist_ddp") * 2 // 3
    faults = [{"rank": ranks - 1, "step": step, "kind": "kill"}]
    faults += [{"rank": 0, "step": step, "kind": "block"}] if blocked else []
    ended: dict[str, Any] = {}

    def disturbed() -> Path:
        with row.start("mnist_ddp", ranks, options, faults=faults) as job:
            ended.update(end_of_others(job, ranks))
            job.wait(0)
            return job.run_dir

    calls: list[Callable[[], Path]] = [partial(row.undisturbed, "mnist_ddp", ranks, options), disturbed]
    whole, run_dir = row.together(calls)
    figures = check_resumed(whole, run_dir, times=1)
    if ended["seconds"] > END_LIMIT:
        raise RuntimeError(f"the other ranks ended after {ended['seconds']} s, not within {END_LIMIT:g} s: {ended}")
    if ranks == 1:
        return figures
    return {**figures, "others ended after": ended["seconds"], "by": ended["by"]}


def end_of_others(job: Job, ranks: int) -> dict[str, Any]:
    """Wait until a rank is killed and the other ranks end. Return the seconds until their end, and its cause."""
    struck_at = job.wait_for("the kill", partial(time_of, job.path()))
    pids = job.pids()
    job.wait_for("the end of the other ranks", lambda: not any(map(is_alive, pids.values())))
    seconds = round(time.time() - struck_at, 1)
    return {"seconds": seconds, "by": what_ended(job.run_dir / "log" / "rank-0.log") if ranks > 1 else ""}


def time_of(path: Path) -> float:
    """Return the time in a file that a fault writes, or 0 if the file does not exist yet."""
    with contextlib.suppress(OSError, ValueError):
        return float(path.read_text())
    return 0.0


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def what_ended(log: Path) -> str:
    """Return the cause of a rank's end after a peer's kill (a lost connection or a signal), from the rank's log."""
    text = log.read_text(errors="replace")
    if "another rank has ended" in text:
        return "the launcher's signal"
    if "error: " in text:
        error = re.sub(r"\[/\S*\] ?", "", last_errors(text, 1)[0].partition("error: ")[2])  # without C++ source lines
        return f"a lost connection ({error[:100]})"
    return "SIGKILL by the launcher"


def check_resumed(whole: Path, run_dir: Path, times: int) -> dict[str, Any]:
    """Compare a resumed run with the undisturbed run, and return figures: weights' digest, backend, number of ranks.

    Args:
        whole: run dir of the undisturbed run.
        run_dir: run dir of the resumed run.
        times: expected number of resumes.

    Raises:
        RuntimeError: the weights of the two runs differ, or the number of resumes is not ``times``.
    """
    expected = result(whole)
    found = result(run_dir)
    check_equal("weights", {"undisturbed": expected["weights_sha256"], "disturbed": found["weights_sha256"]})
    if resumes(run_dir) != times:
        raise RuntimeError(f"the run was resumed {resumes(run_dir)} times, not {times}")
    return {"weights": found["weights_sha256"][:12], "backend": found["backend"], "ranks": found["world_size"]}


def stopped(row: Row, ranks: int) -> dict[str, Any]:
    """Send TERM to the script. Check that the ranks save the step, and that the job resumes with the same weights."""
    options = options_of(row, "mnist_ddp")
    steps = steps_of(row, "mnist_ddp")

    def disturbed() -> Path:
        run_dir = stop(row, "mnist_ddp", ranks, options, steps // 2 + 1)
        return row.run("mnist_ddp", ranks, options, run_dir=run_dir)

    calls: list[Callable[[], Path]] = [partial(row.undisturbed, "mnist_ddp", ranks, options), disturbed]
    whole, run_dir = row.together(calls)
    return {**check_resumed(whole, run_dir, times=1), "resumed from step": result(run_dir)["resumed_from_step"]}


def stop(
    row: Row, app: str, ranks: int, options: Sequence[str], step: int, before: Fault | None = None, **others: Any
) -> Path:
    """Run an app, send TERM to its script in update ``step``, check that the step is saved, and return the run dir.

    Rank 0 waits in this step until the signal arrives, because a step is only milliseconds long. If a fault ``before``
    is given, the job restarts before this step.

    Args:
        row: row that starts the job.
        app: name of the app, such as mnist_ddp.
        ranks: number of ranks.
        options: further options of the app.
        step: number of the update, from 1.
        before: a fault that happens first, or None.
        others: further arguments of `Row.start`.

    Raises:
        RuntimeError: the exit code is not `STOP_CODE`, or the newest checkpoint is older than ``step``.
    """
    pause = {"rank": 0, "step": step - 1, "kind": "pause", "start": 1 if before else 0}
    with row.start(app, ranks, options, faults=[*([before] if before else []), pause], **others) as job:
        job.wait_for(f"step {step}", job.path(-1).exists)
        job.process.send_signal(signal.SIGTERM)
        job.wait(STOP_CODE)
        saved = sorted(path.name for path in (job.run_dir / "checkpoints").iterdir())[-1]
        if int(saved.partition("-")[2]) < step:
            raise RuntimeError(f"the newest checkpoint is {saved}, and step {step} was stopped: {job.reason()}")
        return job.run_dir


# --- hangs ---------------------------------------------------------------------------------------------------------


def hang(row: Row, ranks: int, kind: str = "stop") -> dict[str, Any]:
    """Stop a rank. Check that the report shows the rank, its line, and the collective in which the other ranks wait."""
    step = steps_of(row, "mnist_ddp") // 2
    options = [
        *MNIST,
        "--max-steps=1000",
        "--log-every=1",
        f"--timeout={HANG_TIMEOUTS[row.proof.device]}",
        "--max-restarts=0",
    ]
    with row.start("mnist_ddp", ranks, options, faults=[{"rank": 1, "step": step, "kind": kind}]) as job:
        errors = job.wait(1).splitlines()
    report = next((line for line in errors if line.startswith("error: no progress for ")), "")
    suspect = re.search(r"no progress for \d+ s: rank 1 \([^)]*\) .*?(at \w+\.py:\d+ in \w+)", report)
    others = report.partition("; ")[2]
    collective = re.search(r"waits? in (\w+ \d+ [^;]*?) at \w+\.py:\d+ in \w+", others)
    if not suspect or not collective:
        raise RuntimeError(f"the report does not name rank 1, its line and a collective: {report or errors}")
    return {"rank 1": suspect[1], "others wait in": collective[1]}
