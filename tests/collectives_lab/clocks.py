"""Run primitives, aggregate and straggler on one rank with a simulated GPU, and report too early clock readings.

    clocks.py RUN_DIR

Tensors stay on the CPU. `distributed.session.device` is a GPU, whose fake stream counts waits and clock readings. A
clock reading is early if an operation or a collective ran after the last wait for the stream: a GPU might still compute
then. The program writes RUN_DIR/clocks.json. For each program, the file holds the number of clock readings, the places
of early readings (file and line), and the number of waits. The file also holds the device that each --device selects,
by the number of GPUs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

APP = Path(__file__).resolve().parents[2] / "apps" / "collectives_lab"
sys.path.insert(0, str(APP))

import aggregate  # type: ignore[import-not-found]  # noqa: E402
import distributed  # type: ignore[import-not-found]  # noqa: E402
import primitives  # type: ignore[import-not-found]  # noqa: E402
import straggler  # type: ignore[import-not-found]  # noqa: E402
from options import parse  # type: ignore[import-not-found]  # noqa: E402
from samestep import ConfigError, env  # noqa: E402


class Stream:
    """A fake GPU stream that counts waits and clock readings."""

    def __init__(self) -> None:
        self.waits = 0
        self.busy = False  # whether work was added since the last wait
        self.readings = 0
        self.early: list[str] = []

    def synchronize(self) -> None:
        self.waits += 1
        self.busy = False

    def read_clock(self) -> float:
        failing = sys.exc_info()[0] is not None  # times after a failure are not in a timeline
        if threading.current_thread() is threading.main_thread() and not failing:
            self.readings += 1
            if self.busy:
                frame = sys._getframe(1)
                self.early.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return time.monotonic()


class Busy(TorchDispatchMode):
    """Mark the stream as busy at every torch operation, collectives included."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.stream.busy = True
        return func(*args, **(kwargs or {}))


def choices(n: int, gpus: int) -> dict[str, str]:
    """Return the device and backend that each --device selects for the last of n ranks, given the number of GPUs."""
    world = env.World(n - 1, n, local_rank=n - 1, local_world_size=n)
    chosen = {}
    for wanted in ("auto", "cuda", "cpu"):
        with (
            mock.patch.object(torch.cuda, "device_count", return_value=gpus),
            mock.patch.object(torch.cuda, "set_device") as set_device,
        ):
            try:
                device = distributed.choose_device(wanted, world)
                assert [call.args for call in set_device.mock_calls] == [(device,)] * (device.type == "cuda")
                chosen[wanted] = f"{device}, {distributed.torch_distributed.backend(device)}"
            except ConfigError as problem:
                chosen[wanted] = f"error: {problem}"
    return chosen


def main() -> None:
    run_dir = sys.argv[1]
    found: dict[str, Any] = {"choices": {f"{gpus} for 2": choices(2, gpus) for gpus in (0, 1, 2)}}
    common = [f"--run-dir={run_dir}", "--quick", "--quiet", "--device=cpu"]
    place = distributed.rendezvous(parse(["primitives", *common]))
    distributed.session.device = torch.device("cuda", 0)
    straggler.BLOCK = 1
    for module, *options in (
        (primitives, "--max-bytes=1024", "--repeats=2"),
        (aggregate, "--max-steps=2", "--rounds=1", "--bytes=1000"),
        (straggler, "--delays=0,1", "--steps=4"),
    ):
        stream = Stream()
        clock = SimpleNamespace(**{**vars(time), "monotonic": stream.read_clock})
        sys.argv = [module.__name__, *common, *options]
        with (
            mock.patch.object(torch.cuda, "current_stream", return_value=stream),
            mock.patch.object(module, "rendezvous", return_value=place),  # a process can join the group only once
            mock.patch.object(module, "time", clock),
            mock.patch.object(distributed, "time", clock),
            mock.patch.object(module, "pictures", return_value=[]),  # drawing is slow and reads no clock
            Busy(stream),
        ):
            module.main()
        found[module.__name__] = {"readings": stream.readings, "early": stream.early, "waits": stream.waits}
    (Path(run_dir) / "clocks.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
