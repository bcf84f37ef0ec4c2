"""Define the rows that compare the device with the CPU, and the rows that measure time.

A row's function returns figures for the table of results, and raises an exception if the row fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gpu_proof.jobs import ROOT, NotRunError, Row, last_errors, losses, metrics, result, start_process
from gpu_proof.several import BATCH, CIFAR, FOR_EVER, check_resumed, stop

MNIST_FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
TARGET = 0.99
# Dropout is off, because a GPU draws other random numbers than the CPU.
APPS: dict[str, list[str]] = {
    "mnist_ddp": ["--dataset=mnist-5k", "--dropout=0"],
    "mnist_lightning": ["--dataset=mnist-5k", "--dropout=0"],
    # A larger learning rate amplifies rounding errors. At 0.1, losses in float32 and float64 differ by 1e-3 after 5
    # updates.
    "cifar_ddp": ["--dataset=synthetic-cifar10", "--dropout=0", "--lr=0.003"],
    "gpt_fsdp": ["--dataset=jargon-64k", "--layers=2", "--width=64"],
    "llm_finetune": ["--model=tiny", "--dataset=definitions-240", "--lora=4"],
}
FLOAT32 = 1e-4
BFLOAT16 = 2e-2  # bfloat16 has 8 bits of precision, and the order of sums depends on the device
LOSSES: list[tuple[str, list[str], float]] = [
    ("mnist_ddp", [], FLOAT32),
    ("mnist_ddp", ["--backend=gloo"], FLOAT32),
    ("mnist_lightning", [], FLOAT32),
    ("cifar_ddp", [], FLOAT32),
    ("cifar_ddp", ["--autocast=bfloat16"], BFLOAT16),
    ("cifar_ddp", ["--compile"], FLOAT32),
    ("gpt_fsdp", [], FLOAT32),
    ("gpt_fsdp", ["--autocast=bfloat16"], BFLOAT16),
]
RECOVERY = {"cifar_ddp": 1, "gpt_fsdp": 1, "mnist_lightning": 2}  # number of ranks; mnist_ddp has its own rows
RECOVERY_STEPS = 20
COMPILE_SECONDS = 60.0  # seconds for a compiled run and a killed run, with a warm compiler cache
ROUNDS = 5  # largest number of rounds of `speed`
ROUND_SECONDS = 30.0  # duration of one round, in seconds


def first_losses(row: Row, app: str, options: Sequence[str], tolerance: float) -> dict[str, Any]:
    """Compare the first losses of one rank with the losses of a run on the CPU without torch.compile."""
    steps = 2 if row.proof.quick else 5
    common = [*APPS[app], *FOR_EVER, f"--max-steps={steps}", "--log-every=1", "--checkpoint-every=0"]
    on_cpu = [*common, *(each for each in options if each != "--compile")]
    calls = [
        partial(row.run, app, 1, [*common, *options], share=False),
        partial(row.undisturbed, app, 1, on_cpu, device="cpu"),
    ]
    here, there = (losses(run_dir) for run_dir in row.together(calls))
    difference = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(here, there))
    if not (len(here) == len(there) == steps and difference <= tolerance):
        raise RuntimeError(f"losses {here}, on the CPU {there}")
    return {"largest difference": difference, "tolerance": tolerance}


def recovery(row: Row, app: str, ranks: int) -> dict[str, Any]:
    """Kill a rank, stop the restarted job, resume it, and compare the weights with an undisturbed run."""
    steps = RECOVERY_STEPS
    options = [*APPS[app], *FOR_EVER, f"--max-steps={steps}", f"--checkpoint-every={steps // 4}"]
    share = ranks > 1

    def disturbed() -> Path:
        kill = {"rank": ranks - 1, "step": steps // 3, "kind": "kill"}
        run_dir = stop(row, app, ranks, options, 2 * steps // 3, before=kill, share=share)
        row.run(app, ranks, options, run_dir=run_dir, share=share)
        return run_dir

    calls: list[Callable[[], Path]] = [partial(row.run, app, ranks, options, share=share), disturbed]
    whole, run_dir = row.together(calls)
    figures = check_resumed(whole, run_dir, times=2)
    return {**figures, "resumed from step": result(run_dir)["resumed_from_step"], "steps": steps}


def collectives(row: Row, ranks: int) -> dict[str, Any]:
    """Compare every collective of the device's backend with its definition, in collectives_lab."""
    only = ["--only=all_reduce"] if row.proof.quick else []
    with row.start("collectives_lab", ranks, ["primitives", "--no-timing", *only]) as job:
        job.wait(0)
        (path,) = job.run_dir.glob("primitives-*.json")
        facts = json.loads(path.read_text())["facts"]
    return {"backend": facts["backend"]}


# --- rows that measure ---------------------------------------------------------------------------------------------


def accuracy(row: Row) -> dict[str, Any]:
    """Measure the seconds of training, without start-up, until mnist_ddp's accuracy on MNIST reaches TARGET."""
    given = row.proof.mnist
    if given is None or not all((given / name).is_file() for name in MNIST_FILES):
        raise NotRunError(f"no data: name a folder that has {', '.join(MNIST_FILES)} by --mnist")
    data = row.proof.new_folder()
    (data / "mnist").mkdir(parents=True)
    for name in MNIST_FILES:
        (data / "mnist" / name).symlink_to((given / name).resolve())
    options = ["--dataset=mnist", f"--data-dir={data}", "--epochs=10", "--global-batch-size=512", "--lr=0.1"]
    options += ["--dropout=0.25", "--evaluate-every=50", "--log-every=50"]
    lines = metrics(row.run("mnist_ddp", 1, options, share=False))
    seconds = 0.0
    for before, line in zip([{"samples_seen": 0}, *lines], lines):
        seconds += (line["samples_seen"] - before["samples_seen"]) / line["samples_per_second"]
        if line.get("test_accuracy", 0.0) >= TARGET:
            return {"seconds": round(seconds, 2), "step": line["step"], "test accuracy": line["test_accuracy"]}
    raise RuntimeError(f"the best evaluation of 10 epochs had less than {TARGET}")


def speed(row: Row) -> dict[str, Any]:
    """Measure samples per second of mnist_ddp, its compute limit and the baseline loop, in up to ROUNDS rounds."""
    row.need(2 * ROUND_SECONDS)
    output = row.proof.new_folder()
    deadline = row.begin_job()
    left = row.left(deadline)
    rounds = 1 if row.proof.quick else max(1, min(ROUNDS, int(left / ROUND_SECONDS) - 1))
    sizes = ["--warm-up=10", "--steps=20"] if row.proof.quick else ["--steps=200"]
    contestants = "app,limit" if row.proof.quick else "textbook,app,limit"
    command = [sys.executable, str(ROOT / "benchmarks" / "throughput.py"), "--apps=mnist_ddp", "--ranks=1", *sizes]
    command += [f"--device={row.proof.device}", f"--contestants={contestants}", "--attempts=1", f"--json={output}"]
    process = start_process([*command, f"--rounds={rounds}"], row.proof.folder, row.proof.device)
    try:
        _, errors = row.communicate(process, deadline)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise row.late(f"not measured in time: {last_errors(process.communicate()[1], 2)}") from None
    if process.returncode:
        raise RuntimeError(" / ".join(last_errors(errors, 3))[-1000:])
    (measured,) = json.loads(output.read_text())["results"]
    speeds = {name: round(median(values)) for name, values in measured["speeds"].items()}
    return {"samples per second": speeds, "rounds": rounds}


def compiled(row: Row, kind: str) -> dict[str, Any]:
    """Measure cifar_ddp's steps per second, eager, compiled or with CUDA graphs. Check the weights after a kill."""
    row.need(COMPILE_SECONDS if kind != "eager" else ROUND_SECONDS)
    steps = 10 if row.proof.quick else 60
    options = [*CIFAR, f"--max-steps={steps}", f"--checkpoint-every={steps // 2}", "--log-every=10"]
    options = [each for each in options if not each.startswith("--accumulate")]
    options += [] if kind == "eager" else ["--compile", "--first-step-timeout=300"]
    if kind == "CUDA graphs" and row.proof.device != "cuda":
        raise NotRunError("CUDA graphs need a GPU")
    graphs = [{"rank": 0, "start": start, "kind": "graphs"} for start in (0, 1) if kind == "CUDA graphs"]
    kill = {"rank": 0, "step": steps * 2 // 3, "kind": "kill"}
    whole = row.run("cifar_ddp", 1, options, share=False, faults=graphs)
    rates = [line["samples_per_second"] / BATCH for line in metrics(whole)][1:]
    killed = row.run("cifar_ddp", 1, options, share=False, faults=[*graphs, kill])
    return {**check_resumed(whole, killed, times=1), "steps per second": round(median(rates), 1)}
