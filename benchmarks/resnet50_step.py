"""Measure the time of ResNet-50's training step on CPU, with several settings of MindSpore and with torchvision.

The script prints a table in Markdown, and a breakdown of the time of MindSpore's step. All steps start from the same
weights. MindSpore and torch need separate environments:

    bash scripts/run_resnet50_mindspore.sh 1 --max-steps 0        # makes .venvs/resnet50_mindspore
    python3.11 -m venv /tmp/torch && /tmp/torch/bin/pip install torch==2.13.0 torchvision==0.28.0
    .venvs/resnet50_mindspore/bin/python benchmarks/resnet50_step.py --torch /tmp/torch/bin/python

Each run of a setting starts a new process. The settings take turns in `--rounds` rounds, which spreads the machine's
other load over all settings. The table includes the elapsed time, and the processor time of all threads, which varies
less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from arguments import at_least

ROOT = Path(__file__).resolve().parents[1]


def measure(step: Any, steps: int) -> dict[str, Any]:
    """Return the loss and seconds of the first step, and the median seconds and processor seconds of later steps."""
    begun = time.monotonic()
    first = step()
    compiled = time.monotonic() - begun
    wall = []
    cpu = []
    for _ in range(steps):
        at = time.monotonic()
        used = time.process_time()
        step()
        wall.append(time.monotonic() - at)
        cpu.append(time.process_time() - used)
    return {"loss": first, "first": compiled, "wall": sorted(wall)[steps // 2], "cpu": sorted(cpu)[steps // 2]}


def mindspore_step(depth: int, batch: int, size: int, steps: int, weights: Path, mode: str) -> dict[str, Any]:
    """Measure the app's training step in this process, and return the result of `measure`.

    Args:
        depth: number of layers of the ResNet, such as 50.
        batch: number of images per step.
        size: side of an image, in pixels.
        steps: number of timed steps.
        weights: path of the initial weights, which the function writes if the file is missing.
        mode: execution mode of MindSpore, "graph" or "pynative".
    """
    sys.path.insert(0, str(ROOT / "apps" / "resnet50_mindspore"))
    import mindspore as ms
    import numpy as np
    from distributed import choose_device
    from mindspore import Tensor
    from model import Forward, build_loss, build_model
    from options import parse
    from samestep import checkpoint
    from train import TrainStep, build_optimizer
    from weights import load_model, model_arrays

    if os.environ["ONEDNN_MAX_CPU_ISA"] == "app":
        del os.environ["ONEDNN_MAX_CPU_ISA"]  # choose_device sets the app's value
    choose_device("cpu")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    options = parse([f"--depth={depth}"])
    model = build_model(depth, False, seed=1)
    if weights.exists():
        load_model(model, checkpoint.load_weights(weights))
    else:
        checkpoint.save_weights(weights, model_arrays(model))
    model.set_train(True)
    step = TrainStep(Forward(model, build_loss(options.loss)), build_optimizer(options, model), False, 1)
    images, labels = data(batch, size)
    given = Tensor(images), Tensor(labels.astype(np.int32)), Tensor(np.ones(batch, np.float32))
    return measure(lambda: float(step(*given).asnumpy()), steps)


def torch_step(depth: int, batch: int, size: int, steps: int, weights: Path) -> dict[str, Any]:
    """Measure a training step of torchvision's model with the app's default settings, and return `measure`'s result."""
    sys.path[:0] = [str(ROOT / "core"), str(ROOT / "benchmarks" / "loops")]
    import torch
    from common import torchvision_that_imports

    torchvision_that_imports()
    import safetensors.torch
    import torchvision

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = getattr(torchvision.models, f"resnet{depth}")(num_classes=10)
    model.load_state_dict(safetensors.torch.load_file(weights))  # this call checks names and shapes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = (torch.from_numpy(array) for array in data(batch, size))

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss)

    return measure(step, steps)


def data(batch: int, size: int) -> Any:
    import numpy as np

    random = np.random.default_rng(1)
    return random.standard_normal((batch, 3, size, size), np.float32), random.integers(0, 10, batch)


def kernels(verbose: str) -> list[str]:
    """Return a line for each of the 8 slowest kinds of oneDNN primitive and implementation, with its milliseconds."""
    spent: dict[str, float] = defaultdict(float)
    for line in verbose.splitlines():
        fields = line.split(",")
        if line.startswith("onednn_verbose,v1,primitive,exec"):
            spent[f"{fields[5]}, {fields[7].replace('undef', 'forward')}: {fields[6]}"] += float(fields[-1])
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return [f"{milliseconds:10.1f} ms  {name}" for name, milliseconds in ordered[:8]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="a Python that has torch, torchvision, numpy and safetensors")
    parser.add_argument("--depth", type=at_least(1), default=50)
    parser.add_argument("--batch", type=at_least(1), default=32)
    parser.add_argument("--size", type=at_least(1), default=32)
    parser.add_argument("--steps", type=at_least(1), default=3)
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--weights", type=Path, default=Path(f"/tmp/resnet50_step-{os.getpid()}.safetensors"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    given = options.depth, options.batch, options.size, options.steps, options.weights
    if options.one:
        answer = torch_step(*given) if options.one == "torch" else mindspore_step(*given, options.one)
        print("ANSWER", json.dumps(answer), flush=True)
        os._exit(0)

    # Each setting has a name, a mode, oneDNN's instruction set and a number of threads.
    settings = [
        ("MindSpore, graph (the app's default)", "graph", "app", 1),
        ("MindSpore, graph, 2 threads", "graph", "app", 2),
        ("MindSpore, graph, AVX", "graph", "AVX", 1),
        ("MindSpore, graph, oneDNN's own choice", "graph", "DEFAULT", 1),
        ("MindSpore, PyNative", "pynative", "app", 1),
    ]
    if options.torch:
        settings += [
            ("torchvision, 1 thread", "torch", "DEFAULT", 1),
            ("torchvision, 2 threads", "torch", "DEFAULT", 2),
        ]
    answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    accounts: dict[str, list[str]] = {}
    for turn in range(options.rounds):
        for name, mode, isa, threads in settings:
            environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "ONEDNN_MAX_CPU_ISA": isa, "GLOG_v": "3"}
            if turn == 0 and mode == "graph":
                environ["ONEDNN_VERBOSE"] = "1"
            arguments = [f"--{key}={getattr(options, key)}" for key in ("depth", "batch", "size", "steps", "weights")]
            python = options.torch if mode == "torch" else sys.executable
            command = [python, __file__, f"--one={mode}", *arguments]
            ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
            if not lines:
                sys.exit(f"error: {name} failed: {ran.stderr[-2000:]}")
            answers[name].append(json.loads(lines[0][7:]))
            accounts.setdefault(name, kernels(ran.stdout))
    options.weights.unlink()

    images = f"{options.batch} images of {options.size} x {options.size}"
    print(f"ResNet-{options.depth}, {images}, {os.cpu_count()} processors\n")
    print("| | first step, s | step, s | processor s a step | first loss |\n|---|---|---|---|---|")
    for name, found in answers.items():
        least = {key: min(one[key] for one in found) for key in ("first", "wall", "cpu", "loss")}
        print(f"| {name} | {least['first']:.1f} | {least['wall']:.2f} | {least['cpu']:.2f} | {least['loss']:.5f} |")
    for name in (settings[0][0], settings[3][0]):
        print(f"\n{name}: oneDNN's time over {options.steps + 1} steps")
        print("\n".join(accounts[name]))


if __name__ == "__main__":
    main()
