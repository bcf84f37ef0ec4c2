"""Call parts of mnist_elastic on small inputs, and print their results as JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_elastic")]

import membership  # type: ignore[import-not-found]  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
from launcher import Job  # type: ignore[import-not-found]  # noqa: E402
from options import parse  # type: ignore[import-not-found]  # noqa: E402
from ranks import Ranks  # type: ignore[import-not-found]  # noqa: E402
from records import History, Records  # type: ignore[import-not-found]  # noqa: E402
from samestep import checkpoint, step_losses  # noqa: E402
from samestep.data import datasets  # noqa: E402
from samestep.env import World  # noqa: E402
from samestep.monitor import Monitor  # noqa: E402
from samestep.run import Groups, Run  # noqa: E402
from samestep.stop import Stopped  # noqa: E402

BATCH = 100
OPTIONS = ("--dataset=mnist-5k", f"--global-batch-size={BATCH}", "--epochs=1", "--log-every=5")
TERM = 15


class SevenStarter:
    """Start processes that end with code 7."""

    def start(self, rank: int, name: str, ranks: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])


class Launcher:
    """The launcher's records of a run in the new run dir ``name``, without ranks."""

    def __init__(self, name: str) -> None:
        self.options = parse([*OPTIONS, f"--run-dir={name}"])
        world = World(0, 1, 0, 1, 0, 1, launcher="torchft")
        self.run = Run("mnist_elastic", self.options, world, Monitor(), datasets.resolve)
        self.history = History(self.run)
        self.records = Records(self.run, self.options, self.history)

    def update(self, *steps: int) -> None:
        """Report updates. The mean loss of a step is the step's number."""
        for step in steps:
            self.history.update(step, float(step * BATCH))

    def state(self, step: int, save: bool = False, stop: int = 0) -> tuple[dict[str, Any], Groups]:
        """Return the message and the arrays of a state. Its only weight is the number of updates."""
        values = {"step": step, "loss": float(step * BATCH), "running_loss": 1.0, "save": save, "evaluation": {}}
        values |= {"evaluates": False, "stop": stop, "final": False}
        return values, {"model": {"weight": np.array([step])}, "optimizer": {}}

    def stop(self, *left: int) -> list[Any]:
        """Stop the run after ranks have left with these states.

        Returns:
            The message, and the step and the weight of the newest checkpoint if there is one.
        """
        for step in left:
            self.records.add_left(*self.state(step, stop=TERM))
        text = ""
        try:
            self.records.save_and_stop()
        except Stopped as stopped:
            text = str(stopped)
        checkpoint.finish()
        found = []
        for folder in checkpoint.folders(self.options.run_dir)[:1]:
            weights = safetensors.numpy.load_file(folder / "model.safetensors")
            found = [int(folder.name.removeprefix("step-")), int(weights["weight"][0])]
        return [text, *found]


def order() -> list[str]:
    """Return the names of members in order of rank. Two of the three members with the most progress have equal bits."""
    states = [("000000", 8, "x"), ("000001", 9, "y"), ("000005", 9, "x"), ("000003", 9, "x")]
    found = [{"name": name, "progress": progress, "digest": digest} for name, progress, digest in states]
    return [each["name"] for each in membership._in_order(found)]


def numbers_and_codes() -> tuple[list[int], list[int | None]]:
    """Return free rank numbers before and after rank 1 left, and rank 1's code with and without a connection."""
    ranks = Ranks(SevenStarter(), 2)
    for rank in (1, 2):
        ranks.start(rank)
    free = [ranks.free_rank()]
    first, second = ranks.all()
    for each in (first, second):
        each.process.wait()
    first.channel = SimpleNamespace()
    codes = [first.exit_code()]
    first.channel = None
    codes.append(first.exit_code())
    first.has_left = True
    free.append(ranks.free_rank())
    return free, codes


def history() -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Report two updates, the first one twice. Return the result of `History`, and the records of log/losses.bin."""
    launcher = Launcher("history")
    found = launcher.history
    found.regrouped(0, [1, 2])
    launcher.update(1, 1)
    found.pause()
    found.regrouped(1, [1])
    found.regrouped(1, [1])
    launcher.update(2)
    return found.result(), step_losses.read(launcher.options.run_dir).tolist()


def stops() -> dict[str, list[Any]]:
    """Return the results of `Launcher.stop` for several stops."""
    found = {}
    launcher = Launcher("nothing")
    found["before the first step"] = launcher.stop()

    launcher = Launcher("repeated")
    launcher.update(*range(1, 8))
    launcher.records.add(launcher.state(5)[0])  # a log line
    launcher.update(*range(1, 4))  # all ranks were lost
    found["while the ranks repeat steps before the last log line"] = launcher.stop(3)

    launcher = Launcher("after-line")
    launcher.update(*range(1, 8))
    launcher.records.add(launcher.state(5)[0])
    launcher.update(*range(1, 7))
    found["while the ranks repeat steps after the last log line"] = launcher.stop(6)

    launcher = Launcher("late")
    launcher.update(*range(1, 8))
    found["an earlier state arrives after a later"] = launcher.stop(7, 6)

    launcher = Launcher("older")
    launcher.update(*range(1, 5))
    launcher.records.add(*launcher.state(4, save=True))
    launcher.update(5)
    found["the only state is older than the checkpoint"] = launcher.stop(3)

    launcher = Launcher("saved")
    launcher.update(*range(1, 5))
    launcher.records.add(*launcher.state(4, save=True))
    found["the checkpoint has the state"] = launcher.stop(4)
    return found


def kills_after_repeated_updates() -> int:
    """Return how often the launcher kills a rank that requests a group after an update that repeats an earlier one."""
    launcher = Launcher("hang")
    launcher.update(9)
    launcher.history.updated_at = -math.inf  # step 9 was long ago
    ranks = Ranks(SevenStarter(), 1)
    ranks.start(1)
    (each,) = ranks.all()
    each.ready = True
    each.last_member = -math.inf
    kills: list[Any] = []
    each.process.wait()
    each.process = SimpleNamespace(kill=lambda: kills.append(each), wait=lambda: None)
    job = SimpleNamespace(_options=launcher.options, _ranks=ranks, _history=launcher.history, _has_begun=True)
    Job._updated(job, each, {"step": 1, "loss": 0.0})
    Job._kill_if_hung(job, each)
    each.waits = True
    Job._kill_if_hung(job, each)
    return len(kills)


def main() -> None:
    output = os.fdopen(os.dup(1), "w")  # a Run redirects the standard output to its log
    free, codes = numbers_and_codes()
    result, losses = history()
    cases = {"order": order(), "free": free, "exit codes": codes, "losses": losses, "result": result}
    cases |= {"stops": stops(), "kills": kills_after_repeated_updates()}
    print(json.dumps(cases), file=output, flush=True)


if __name__ == "__main__":
    main()
