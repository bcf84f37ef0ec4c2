"""Inject faults at exact moments of a step. Python imports this module at startup from a folder of PYTHONPATH.

SAMESTEP_FAULTS holds a JSON list of faults. Each fault has ``step``, ``at``, ``done`` and optionally ``rank``; without
``rank``, the fault strikes the first rank that reaches the moment. A fault creates the file ``done``, so that it
strikes only once. ``at`` is one of these moments:

* ``updated``: the rank has updated its weights, but not yet reported the update. The rank gets ``signal``.
* ``reduced``: the reduction succeeds on all other ranks and fails on this rank.
* ``copying``: the rank has sent half of its state to a member that needs it. The rank gets ``signal``.
* ``stranger``: a restarted rank connects to the group without proving the key. If the other ranks then send their
  state to this rank, this rank creates the file ``<done>-state``.
* ``differs``: one weight of the rank changes during this step.

SAMESTEP_COMPLETE is a number of members. With fewer members, each step takes 0.25 s more. A starting rank then misses
few steps and gets processor time.
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


def _info() -> dict[str, Any]:
    """Return the job info that the launcher passed to this rank."""
    return dict(json.loads(os.environ.get("SAMESTEP_JOB_INFO", "{}")))


def _strikes(fault: dict[str, Any], at: str, step: int) -> bool:
    rank = _info().get("rank", 0)
    if fault["at"] != at or step < fault["step"] or fault.get("rank", rank) != rank:
        return False
    try:
        os.close(os.open(fault["done"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _arm(module: ModuleType, faults: list[dict[str, Any]]) -> None:
    members: Any = module.Members
    members.regroup = _regroup_or_lie(module, faults)
    members.after_step = _after_step_or_strike(members.after_step, faults)
    members.note = _note_or_change(members.note, faults)
    members.all_gather = _all_gather_or_fail(members.all_gather, module, faults)
    members._copy_state = _copy_state_or_strike(members._copy_state, module, faults)


def _after_step_or_strike(after_step: Any, faults: list[dict[str, Any]]) -> Any:
    complete = int(os.environ.get("SAMESTEP_COMPLETE", "0"))

    def after_step_or_strike(self: Any, step: int) -> None:
        for fault in faults:
            if _strikes(fault, "updated", step):
                os.kill(os.getpid(), fault["signal"])
        after_step(self, step)
        if self.world_size < complete:
            time.sleep(0.25)

    return after_step_or_strike


def _note_or_change(note: Any, faults: list[dict[str, Any]]) -> Any:
    def note_or_change(self: Any, step: int, loss: Any) -> None:
        for fault in faults:
            if _strikes(fault, "differs", step):
                self._parts.groups()["model"]["fc1.weight"][0, 0] += 0.5  # the array shares memory with the model
        note(self, step, loss)

    return note_or_change


def _all_gather_or_fail(all_gather: Any, module: Any, faults: list[dict[str, Any]]) -> Any:
    def all_gather_or_fail(self: Any, tensor: Any) -> Any:
        gathered = all_gather(self, tensor)
        for fault in faults:
            if _strikes(fault, "reduced", self._progress.step):
                raise module.Failed("the test's fault")
        return gathered

    return all_gather_or_fail


def _copy_state_or_strike(copy_state: Any, module: Any, faults: list[dict[str, Any]]) -> Any:
    def copy_state_or_strike(self: Any, *arguments: Any) -> None:
        distributed = module.distributed
        broadcast = distributed.broadcast
        calls: list[bytes] = []

        def broadcast_or_strike(content: bytes) -> bytes:
            calls.append(content)
            for fault in faults:
                if len(calls) == 3 and self.rank == 0 and _strikes(fault, "copying", self._progress.step):
                    os.kill(os.getpid(), fault["signal"])
            return bytes(broadcast(content))

        distributed.broadcast = broadcast_or_strike
        try:
            copy_state(self, *arguments)
        finally:
            distributed.broadcast = broadcast

    return copy_state_or_strike


def _regroup_or_lie(module: Any, faults: list[dict[str, Any]]) -> Any:
    """Return a `Members.regroup` that joins the group once without the job's key, if a fault ``stranger`` is due."""
    members = module.Members
    dist = module.dist
    regroup = members.regroup
    prove_key = module.prove_key

    def prove_nothing(key: bytes, group: str) -> None:
        zeros = module.torch.zeros(dist.get_world_size(), 32, dtype=module.torch.uint8)
        dist.all_to_all_single(module.torch.empty_like(zeros), zeros)

    def regroup_or_lie(self: Any) -> None:
        was_restarted = int(_info()["name"]) >= _info()["ranks"]
        lies = [fault for fault in faults if was_restarted and _strikes(fault, "stranger", sys.maxsize)]
        copy_state = members._copy_state

        def copy_and_tell(self: Any, *arguments: Any) -> None:
            copy_state(self, *arguments)
            open(f"{lies[0]['done']}-state", "x").close()

        if lies:
            module.prove_key = prove_nothing
            members._copy_state = copy_and_tell
        try:
            regroup(self)
        finally:
            module.prove_key = prove_key
            members._copy_state = copy_state

    return regroup_or_lie


class _Finder(importlib.abc.MetaPathFinder):
    """Install the faults in the app's module `membership` when a rank imports it."""

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
