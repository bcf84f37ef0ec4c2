"""Inject a fault at an exact moment. Python imports this module at startup from a folder of PYTHONPATH.

SAMESTEP_FAULT holds a JSON object. ``rank`` is the rank that has the fault. These keys send ``signal`` to that rank:

* ``audit`` and ``match``: before the first change of the kind ``audit`` to a path that matches ``match`` in a run dir.
  The kinds are "os.mkdir", "open" (of a new file) and "os.rename".
* ``updates``: after this update, counted from 1.
* ``step``: at the beginning of this step, counted from 0.
* ``evaluating``: at this evaluated batch, counted from 1 after the first step.

These keys send no signal. ``slow`` and ``modules`` need no ``rank``:

* ``differ``: one weight of this rank changes at the beginning of this step, counted from 0 (torch only). With
  ``frozen``, it is a weight that training does not change.
* ``flip``: one bit of this rank's shard of a weight flips at the beginning of this step, counted from 0 (torch only).
* ``slow`` and ``seconds``: for each ``[rank, phase, from, to]`` of the list ``slow``, the rank sleeps ``seconds`` in
  the phase of each step from ``from`` to ``to`` - 1.
* ``modules``: at its exit, each rank writes its loaded samestep modules and their files as JSON to this path, which
  gets the suffix "-<rank>".
* ``tell``: the rank writes the address and the number of values of each parameter to this file (torch only).

A fault disturbs only the first start of a job, unless it has ``every_start``.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rank_start import in_each_rank  # type: ignore[import-not-found]  # of this folder

_fault = json.loads(os.environ.get("SAMESTEP_FAULT", "null"))
gc.set_threshold(100_000)  # the import of torch is then 0.3 s faster


def _strike() -> None:
    number, _fault["signal"] = _fault["signal"], 0  # send the signal only once, because the rank may survive it
    os.kill(os.getpid(), number)


def _change_a_weight() -> None:
    """Change one weight of the smallest convolution, or of the smallest matrix if the model has no convolution."""
    import torch

    parameters = [found for found in gc.get_objects() if type(found) is torch.nn.Parameter]
    weights = [found for found in parameters if found.requires_grad != ("frozen" in _fault)]
    most = max(found.ndim for found in weights)
    weights = [found for found in weights if found.ndim == most]
    smallest = min(weights, key=torch.numel)
    place = torch.unravel_index(torch.tensor(7), smallest.shape)  # a channels_last weight has no flat view
    with torch.no_grad():
        smallest[place] += 0.5


def _flip_a_bit_of_a_shard() -> None:
    import torch
    from torch.distributed.tensor import DTensor

    weights = [found for found in gc.get_objects() if type(found) is DTensor and found.requires_grad and found.is_leaf]
    with torch.no_grad():
        max(weights, key=torch.numel).to_local().view(-1).view(torch.int32)[5] ^= 1


def _tell_addresses(path: str) -> None:
    """Write the process id, and the address and number of values of each parameter, to ``path`` atomically."""
    import torch

    weights = [found for found in gc.get_objects() if type(found) is torch.nn.Parameter]
    addresses = {"pid": os.getpid(), "weights": [[each.data_ptr(), each.numel()] for each in weights]}
    Path(f"{path}.tmp").write_text(json.dumps(addresses))
    Path(f"{path}.tmp").rename(path)


def _list_modules_at_exit(path: str) -> None:
    """Wrap os._exit, which ends each rank, so that this process, but not its children, writes its modules."""
    leave = os._exit
    pid = os.getpid()

    def list_and_exit(status: int) -> NoReturn:
        if os.getpid() == pid:
            files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
            ours = {name: file for name, file in files.items() if name.startswith("samestep") and file}
            Path(path).write_text(json.dumps(ours))
        leave(status)

    os._exit = list_and_exit


class _Slow:
    """Make this rank sleep in the phases of ``slow``, before the function that the program calls in the phase."""

    def __init__(self, rank: int) -> None:
        self.steps = {phase: range(first, last) for each, phase, first, last in _fault["slow"] if each == rank}
        self.step: int | None = None

    def make_slow(self, place: Any, name: str, phase: str) -> None:
        does = getattr(place, name)

        def sleep_and_do(*arguments: Any, **others: Any) -> Any:
            if self.step in self.steps.get(phase, ()):
                time.sleep(_fault["seconds"])
            return does(*arguments, **others)

        setattr(place, name, sleep_and_do)

    def make_framework_slow(self) -> None:
        if "torch" in sys.modules:
            for loss in ("nll_loss", "cross_entropy"):
                self.make_slow(sys.modules["torch.nn.functional"], loss, "computing")
            for optimizer in ("sgd", "adam"):  # AdamW is a subclass of Adam
                self.make_slow(sys.modules[f"torch.optim.{optimizer}"], optimizer, "optimizer")
        if "paddle" in sys.modules:
            self.make_slow(sys.modules["paddle.nn.functional"], "cross_entropy", "computing")
            for optimizer in (sys.modules["paddle"].optimizer.Momentum, sys.modules["paddle"].optimizer.Adam):
                self.make_slow(optimizer, "step", "optimizer")

    def make_batches_slow(self, batches: Any) -> None:
        """Wrap the method `indices`, the first call of each step. By then, the app has imported its framework."""
        self.make_slow(batches, "indices", "input")
        indices = batches.indices

        def indices_of(batches: Any, step: int, *micro_batch: Any) -> Any:
            if self.step is None:
                self.make_framework_slow()
            self.step = step
            return indices(batches, step, *micro_batch)

        batches.indices = indices_of


def _strike_before_change(method: str) -> None:
    """Send the signal before a `Root` changes a matching path. Audit events have only the last part of the path."""
    from samestep.root import Root

    change = getattr(Root, method)

    def strike_or_change(self: Root, name: str, *arguments: Any, **options: Any) -> Any:
        if re.search(_fault["match"], str(self.path / name)):
            _strike()
        return change(self, name, *arguments, **options)

    setattr(Root, method, strike_or_change)


def _kinds_of_batches() -> list[Any]:
    """Return the classes that have a method `indices` of their own."""
    from samestep.data.token_batches import TokenBatches
    from samestep.sharding import GlobalBatches

    return [GlobalBatches, TokenBatches]


def _strike_at_a_step(batches: Any) -> None:
    indices = batches.indices

    def indices_or_strike(self: Any, step: int, *micro_batch: Any) -> Any:
        if step == _fault.get("step"):
            _strike()
        if step == _fault.get("differ"):
            _change_a_weight()
        if step == _fault.get("flip"):
            _flip_a_bit_of_a_shard()
        if "tell" in _fault:
            _tell_addresses(_fault.pop("tell"))
        return indices(self, step, *micro_batch)

    batches.indices = indices_or_strike


def _strike_at_a_beat() -> None:
    """Send the signal after an update or in an evaluation. Beats before training, for verified shards, do not count."""
    from samestep.recovery.watchdog import Watchdog

    beat = Watchdog.beat
    evaluated: list[None] = []
    trained: list[int] = []

    def beat_or_strike(self: Any, step: int | None = None) -> None:
        beat(self, step)
        if step is not None:
            trained.append(step)
        elif trained:
            evaluated.append(step)
        is_update = step is not None and step == _fault.get("updates")
        if is_update or len(evaluated) == _fault.get("evaluating"):
            _strike()

    Watchdog.beat = beat_or_strike  # type: ignore[method-assign]


def _arm() -> None:
    from samestep import env
    from samestep.job_info import JobInfo

    rank = JobInfo.from_environ(os.environ).rank  # an elastic launcher passes the rank in the job info
    if rank is None:
        rank = env.detect(os.environ).rank
    if "slow" in _fault:
        slow = _Slow(rank)
        for batches in _kinds_of_batches():
            slow.make_batches_slow(batches)
    if "modules" in _fault:
        _list_modules_at_exit(f"{_fault['modules']}-{rank}")
    if rank != _fault.get("rank"):
        return
    if "audit" in _fault:
        _strike_before_change({"os.mkdir": "make_folder", "open": "create", "os.rename": "rename"}[_fault["audit"]])
    if not _fault.keys().isdisjoint({"step", "differ", "flip", "tell"}):
        for batches in _kinds_of_batches():
            _strike_at_a_step(batches)
    if not _fault.keys().isdisjoint({"updates", "evaluating"}):
        _strike_at_a_beat()


def _arm_rank() -> None:
    starts = (os.environ.get(name, "0") for name in ("SAMESTEP_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))
    if all(start == "0" for start in starts) or "every_start" in _fault:
        _arm()


if _fault:
    in_each_rank(_arm_rank)
