"""Faults at an exact moment of a step: Python imports this at start when its folder is on PYTHONPATH.

SAMESTEP_FAULTS holds a JSON list. Each fault has ``step``, ``rank`` (none: the first rank that gets there), ``at``, and
``done``, a file that is made when the fault strikes, so that it strikes once. The moments are:

* ``updated``: the rank has updated its weights, and told nobody. It gets ``signal``.
* ``reduced``: the reduction has succeeded on all ranks, and fails on this one.
* ``copying``: the rank has sent half of its state to a member that needs it. It gets ``signal``.
* ``differs``: before this step one weight of the rank changes.

SAMESTEP_COMPLETE is a number of members. With fewer, each step takes 0.25 s more, so that a rank that starts misses few
steps on any machine, and the others leave it the processors.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from types import ModuleType
from typing import Any


def _strikes(fault: dict[str, Any], at: str, step: int) -> bool:
    rank = int(os.environ.get("SAMESTEP_RANK", "0"))
    if fault["at"] != at or step < fault["step"] or fault.get("rank", rank) != rank:
        return False
    try:
        os.close(os.open(fault["done"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _arm(module: ModuleType, faults: list[dict[str, Any]]) -> None:  # noqa: C901
    members: Any = module.Members
    complete = int(os.environ.get("SAMESTEP_COMPLETE", "0"))
    after_step, note, all_gather, copy_state = (
        getattr(members, name) for name in ("after_step", "note", "all_gather", "_copy_state")
    )

    def after_step_or_strike(self: Any, step: int) -> None:
        for fault in faults:
            if _strikes(fault, "updated", step):
                os.kill(os.getpid(), fault["signal"])
        after_step(self, step)
        if self.world_size < complete:
            time.sleep(0.25)

    def note_or_change(self: Any, step: int, loss: Any) -> None:
        for fault in faults:
            if _strikes(fault, "differs", step):
                self._arrays()["model"]["fc1.weight"][0, 0] += 0.5  # shares its memory with the model
        note(self, step, loss)

    def all_gather_or_fail(self: Any, tensor: Any) -> Any:
        gathered = all_gather(self, tensor)
        for fault in faults:
            if _strikes(fault, "reduced", self._step):
                raise module.Failed("the test's fault")
        return gathered

    def copy_state_or_strike(self: Any, *arguments: Any) -> None:
        distributed = module.distributed
        broadcast, calls = distributed.broadcast, []

        def broadcast_or_strike(content: bytes) -> bytes:
            calls.append(content)
            for fault in faults:
                if len(calls) == 3 and self.rank == 0 and _strikes(fault, "copying", self._step):
                    os.kill(os.getpid(), fault["signal"])
            return bytes(broadcast(content))

        distributed.broadcast = broadcast_or_strike
        try:
            copy_state(self, *arguments)
        finally:
            distributed.broadcast = broadcast

    members.after_step, members.note = after_step_or_strike, note_or_change
    members.all_gather, members._copy_state = all_gather_or_fail, copy_state_or_strike


class _Finder(importlib.abc.MetaPathFinder):
    """Arms the app's module `membership` when it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "membership":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_arm(module: ModuleType) -> None:
            execute(module)
            _arm(module, json.loads(os.environ.get("SAMESTEP_FAULTS", "[]")))

        loader.exec_module = execute_and_arm
        return spec


if {"SAMESTEP_FAULTS", "SAMESTEP_COMPLETE"} & os.environ.keys():
    sys.meta_path.insert(0, _Finder())
