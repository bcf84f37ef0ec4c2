"""Measure a training step of Paddle's LeNet and each of its layers on one thread of a CPU.

    OMP_NUM_THREADS=1 .venvs/lenet_paddle/bin/python benchmarks/paddle_step.py

The script prints the median milliseconds of one step of 64 images, and of each layer's forward and backward pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F

BATCH = 64
TIMES = 60


def median(work: Callable[[], object]) -> float:
    """Call ``work`` repeatedly, and return the median milliseconds of the calls after the first 10."""
    taken = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - begun))
    return statistics.median(taken[10:])


def main() -> None:
    """Time the step and each layer, and print a Markdown table."""
    network = paddle.vision.models.LeNet()
    optimizer = paddle.optimizer.Adam(0.001, parameters=network.parameters())
    images = paddle.randn([BATCH, 1, 28, 28])
    labels = paddle.randint(0, 10, [BATCH])

    def step() -> None:
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        optimizer.clear_grad()

    whole = median(step)
    print(f"| what | milliseconds | share |\n|---|---|---|\n| whole step | {whole:.2f} | 100 % |")
    x = images
    for layer in [*network.features, paddle.nn.Flatten(), *network.fc]:
        inputs = x.detach()
        inputs.stop_gradient = layer is network.features[0]  # images need no gradient

        def forward_and_backward(layer: Any = layer, inputs: Any = inputs) -> None:
            layer(inputs).sum().backward()

        if not isinstance(layer, paddle.nn.Flatten):
            taken = median(forward_and_backward)
            print(f"| {type(layer).__name__} of {inputs.shape} | {taken:.2f} | {100 * taken / whole:.0f} % |")
        x = layer(x)
    print(f"| Adam | {(adam := median(optimizer.step)):.2f} | {100 * adam / whole:.0f} % |")


if __name__ == "__main__":
    main()
