"""lenet_paddle beside the loop that Paddle's users copy: paddle.Model.fit over per-image transforms.

    python benchmarks/paddle_fit.py [--rounds 5] [--ranks 1,2] [--quick]

Same LeNet, Adam, learning rate and global batch of 64, the same number of steps on the same 4,000 digits, on the same
machine in one run, in interleaved rounds. Start-up, evaluation and checkpoints are outside of what is timed: the speed
of a round is the median over windows of 10 steps. Beside them the compute limit: the same step fed one resident batch.
``--profile`` shows what that step spends its time on. Run it with a Python that has the app's requirements.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "core"))
BATCH, WINDOW = 64, 10


def textbook(folder: Path, epochs: int) -> None:
    """What a rank runs: the program of the Paddle tutorials, but for the callback that looks at the clock."""
    import paddle
    from paddle.vision.transforms import ToTensor

    world_size = int(os.environ["PADDLE_TRAINERS_NUM"])
    files = [str(folder / f"train-{kind}.gz") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    dataset = paddle.vision.datasets.MNIST(*files, mode="train", transform=ToTensor())
    model = paddle.Model(paddle.vision.models.LeNet())
    model.prepare(
        paddle.optimizer.Adam(learning_rate=0.001, parameters=model.parameters()),
        paddle.nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(topk=(1, 2)),
    )
    speeds: list[float] = []
    seen_at = time.monotonic()

    def on_train_batch_end(step: int, logs: dict[str, Any] | None = None) -> None:
        nonlocal seen_at
        if step % WINDOW == 0:
            now = time.monotonic()
            if step:
                speeds.append(WINDOW * BATCH / (now - seen_at))
            seen_at = now

    clock = paddle.callbacks.Callback()
    clock.on_train_batch_end = on_train_batch_end
    model.fit(dataset, epochs=epochs, batch_size=BATCH // world_size, verbose=0, callbacks=[clock])
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        (folder / "speed.json").write_text(json.dumps(statistics.median(speeds)))
    os._exit(0)  # Paddle's gloo threads may abort an orderly end


def limit(folder: Path, epochs: int) -> None:
    """What a rank runs: as many steps on one and the same batch, already in memory."""
    import paddle
    import paddle.distributed as dist
    import paddle.nn.functional as F

    world_size = int(os.environ["PADDLE_TRAINERS_NUM"])
    dist.init_parallel_env()
    network = paddle.vision.models.LeNet()
    model = paddle.DataParallel(network) if world_size > 1 else network
    optimizer = paddle.optimizer.Adam(0.001, parameters=network.parameters())
    images, labels = paddle.randn([BATCH // world_size, 1, 28, 28]), paddle.randint(0, 10, [BATCH // world_size])
    speeds = []
    for _ in range(epochs * 6):
        begun = time.monotonic()
        for _ in range(WINDOW):
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.clear_grad()
        speeds.append(WINDOW * BATCH / (time.monotonic() - begun))
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        (folder / "speed.json").write_text(json.dumps(statistics.median(speeds)))
    os._exit(0)


def profile() -> None:
    """Milliseconds of one step of 64 images on one thread, and of each layer's forward and backward pass in it."""
    import paddle
    import paddle.nn.functional as F

    network = paddle.vision.models.LeNet()
    optimizer = paddle.optimizer.Adam(0.001, parameters=network.parameters())
    images, labels = paddle.randn([BATCH, 1, 28, 28]), paddle.randint(0, 10, [BATCH])

    def median(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(60):
            begun = time.perf_counter()
            work()
            taken.append(1000 * (time.perf_counter() - begun))
        return statistics.median(taken[10:])

    def step() -> None:
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.clear_grad()

    whole = median(step)
    print(f"| whole step | {whole:.2f} ms | 100 % |")
    x = images
    for layer in [*network.features, nn_flatten, *network.fc]:
        inputs = x.detach()
        inputs.stop_gradient = layer is network.features[0]  # of images no gradient is asked

        def both(layer: Any = layer, inputs: Any = inputs) -> None:
            layer(inputs).sum().backward()

        taken = median(both) if layer is not nn_flatten else 0.0
        if taken:
            print(f"| {type(layer).__name__} of {inputs.shape} | {taken:.2f} ms | {100 * taken / whole:.0f} % |")
        x = layer(x)
    print(f"| Adam | {(adam := median(optimizer.step)):.2f} ms | {100 * adam / whole:.0f} % |")


def nn_flatten(x: Any) -> Any:
    return x.flatten(1)


def run(command: list[str], folder: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "core")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")


def speed_of_rank(kind: str, n: int, epochs: int, folder: Path) -> float:
    launch = ["-m", "paddle.distributed.launch", f"--nproc_per_node={n}", "--host=127.0.0.1", f"--log_dir={folder}/log"]
    run([sys.executable, *launch, __file__, f"--{kind}={folder}", f"--epochs={epochs}"], folder)
    return float(json.loads((folder / "speed.json").read_text()))


def speed_of_app(n: int, epochs: int, folder: Path, api: str) -> float:
    run_dir = folder / f"run-{time.monotonic_ns()}"
    script = ["bash", str(ROOT / "scripts" / "run_lenet_paddle.sh"), str(n), f"--run-dir={run_dir}", f"--api={api}"]
    options = ["--dataset=mnist-5k", f"--epochs={epochs}", f"--log-every={WINDOW}", "--checkpoint-every=0"]
    run([*script, *options, f"--global-batch-size={BATCH}"], folder)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if line.get("step", 0) > WINDOW and line["step"] % WINDOW == 0]
    # The first window after an epoch's end is shorter, and the line of its end holds the evaluation.
    return statistics.median(line["samples_per_second"] for line in windows if "test_loss" not in line)


def write_digits(folder: Path) -> None:
    """The embedded digits as the files that paddle.vision.datasets.MNIST reads."""
    from samestep import datasets

    found = datasets.load("mnist-5k", folder)
    for kind, array in (("images-idx3-ubyte", found.train_images), ("labels-idx1-ubyte", found.train_labels)):
        array = array.astype(np.uint8)
        magic = (2048 + array.ndim).to_bytes(4, "big")
        content = magic + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()
        (folder / f"train-{kind}.gz").write_bytes(gzip.compress(content, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of one epoch: that it still runs")
    parser.add_argument("--profile", action="store_true", help="where a step's time goes, instead")
    parser.add_argument("--textbook", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.textbook:
        textbook(options.textbook, options.epochs)
    if options.limit:
        limit(options.limit, options.epochs)
    if options.profile:
        return profile()
    rounds, epochs = (1, 1) if options.quick else (options.rounds, options.epochs)

    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, one thread a rank, {rounds} rounds, samples/s\n"
    )
    print("| ranks | paddle.Model.fit with ToTensor | --api basic | ratio | --api highlevel | ratio | limit | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for n in (int(each) for each in options.ranks.split(",")):
        found: dict[str, list[float]] = {"textbook": [], "basic": [], "highlevel": [], "limit": []}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                write_digits(folder)
                for kind in ("textbook", "limit"):
                    found[kind].append(speed_of_rank(kind, n, epochs, folder))
                for api in ("basic", "highlevel"):
                    found[api].append(speed_of_app(n, epochs, folder, api))

        def shown(values: list[float], digits: int = 0) -> str:
            return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"

        cells = [shown(found["textbook"])]
        for kind in ("basic", "highlevel", "limit"):
            ratios = [ours / theirs for ours, theirs in zip(found[kind], found["textbook"])]
            cells += [shown(found[kind]), shown(ratios, 2)]
        print(f"| {n} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
