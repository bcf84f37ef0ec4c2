"""Record the numbers of a replayed step, as a line of JSON in a file for each rank.

``samestep replay`` puts this folder first on PYTHONPATH. The probes read and never write: they change no bit of the
training. Only the steps in [``first``, ``last``] are recorded. The modules ``samestep_probe_torch`` and
``samestep_probe_paddle`` have the hooks of frameworks. This module uses the standard library alone, because every
Python that the launch script starts runs it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeVar

config: dict[str, Any] = json.loads(os.environ.get("SAMESTEP_INSIDE") or "{}")
_hooks: dict[str, list[Callable[[ModuleType], None]]] = {}


class Probe:
    """The observations of this rank during its current step.

    Attributes:
        run: the rank's `samestep.run.Run`; None before it has started.
        frameworks: the hooks of the frameworks that the program has imported.
        unseen: the errors of hooks, by their name.
    """

    def __init__(self) -> None:
        self.run: Any = None
        self.frameworks: list[Framework] = []
        self.unseen: dict[str, str] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether the step that is computed now must be recorded."""
        if self.run is None:
            return False
        return bool(config["first"] <= self.run.step + 1 <= config["last"])


class Framework:
    """The hooks of one framework. Subclasses return their observations of a step."""

    def take(self, rows: int, targets: list[int] | None) -> dict[str, Any]:
        """Return the values of the step as JSON, and forget them.

        Args:
            rows: number of samples of this rank.
            targets: number of losses of each sample, if samples differ in it.
        """
        raise NotImplementedError

    def keep_batch(self, batch: Any, lengths: list[int] | None) -> None:
        """Look at the batch that the loop has received.

        Args:
            batch: tensors. The first one has the inputs of this rank's samples.
            lengths: length of each sample, if the inputs are padded.
        """

    def forget(self) -> None:
        """Forget the observations of a step."""
        vars(self).update(vars(type(self)()))


probe = Probe()
Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """Wrap a hook: its exception is recorded, once for each hook, and never reaches the training."""

    @functools.wraps(hook)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return hook(*arguments, **named)
        except Exception as error:
            probe.unseen.setdefault(hook.__qualname__, f"{type(error).__name__}: {error}"[:300])
            return None

    return call  # type: ignore[return-value]


def on_import(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call a guarded hook with a module once it has been imported."""
    _hooks.setdefault(module, []).append(guarded(hook))


def start() -> None:
    """Install the hooks, in a process of a replay alone."""
    if not config:
        return
    # These modules import this one.
    import samestep_probe_paddle
    import samestep_probe_torch

    on_import("samestep.run", _watch_run)
    samestep_probe_torch.start()
    samestep_probe_paddle.start()
    sys.meta_path.insert(0, _Finder())


def _watch_run(module: ModuleType) -> None:
    """Follow the steps of this process's Run, which evaluates nothing and ends after the last one."""
    run_class = module.Run
    start_run = run_class.start
    batches_of = run_class.batches
    count_step = run_class.count_step
    actions_after = run_class.actions
    save = run_class.save

    @functools.wraps(start_run)
    def start_and_follow(run: Any, *arguments: Any, **named: Any) -> None:
        start_run(run, *arguments, **named)
        probe.run = run

    @functools.wraps(batches_of)
    def batches(run: Any, loader: Any) -> Any:
        for batch in batches_of(run, loader):
            if probe.is_wanted:
                _keep_batch(run, batch)
            yield batch

    @functools.wraps(count_step)
    def record_and_count(run: Any, step: int) -> None:
        if probe.is_wanted:
            _record(run, step)
        count_step(run, step)

    @functools.wraps(actions_after)
    def actions_without_evaluation(run: Any, step: int) -> Any:
        return actions_after(run, step)._replace(evaluate=False)

    @functools.wraps(save)
    def save_and_end(run: Any) -> None:
        save(run)
        if run.step >= config["last"]:
            _end(run)

    run_class.start = start_and_follow
    run_class.batches = batches
    run_class.count_step = record_and_count
    run_class.actions = actions_without_evaluation
    run_class.save = save_and_end


def _end(run: Any) -> NoReturn:
    """End this rank when the last checkpoint is on the disk. Nobody reads the weights and the result of a replay."""
    run.storage.finish(run)
    run.collectives.broadcast(b"")  # collective: a rank that ends may make its launcher end the others
    run.monitor.stop()
    end_workers()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None:  # its thread would report the end of another rank as an error
        horovod.shutdown()
    os._exit(0)


def end_workers() -> None:
    """Kill the workers of data loaders. They ignore TERM, and a forked rank would wait for their end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error when a worker ends
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()


@guarded
def _keep_batch(run: Any, batch: Any) -> None:
    batches = run.progress.batches
    lengths = of_samples(batches, "lengths", indices(batches, run.step))
    for framework in probe.frameworks:
        framework.keep_batch(batch, lengths)


@guarded
def _record(run: Any, step: int) -> None:
    """Write the record of the update ``step``, from 0."""
    batches = run.progress.batches
    own = indices(batches, step)
    values: dict[str, Any] = {"step": step + 1, "rank": run.world.rank, "samples": own}
    if run.world.rank == 0:
        values["shards"] = shards(batches, step, run.world.world_size)
    for framework in probe.frameworks:
        values.update(framework.take(len(own), of_samples(batches, "targets", own)))
    values["unseen"] = probe.unseen
    path = os.path.join(config["records"], f"rank-{run.world.rank}.jsonl")
    with open(path, "a") as file:
        file.write(json.dumps(values) + "\n")


def indices(batches: Any, step: int) -> list[int]:
    """Return the samples of a rank at ``step``, from 0, in the order in which it computes them."""
    from dataclasses import replace  # it takes milliseconds, in every Python of the launch script

    batches = replace(batches)  # a copy with a cache of its own
    if batches.virtual_ranks is None and batches.accumulate == 1:
        return [int(sample) for sample in batches.indices(step)]
    samples = []
    for micro_batch in batches.micro_batches(step):
        samples += [int(sample) for sample in batches.indices(step, micro_batch)]
    return samples


def of_samples(batches: Any, name: str, samples: list[int]) -> list[int] | None:
    """Return a number of each sample, which `TokenBatches` has; None for batches of other classes.

    Args:
        batches: the global batches.
        name: name of the numbers, such as "lengths".
        samples: the samples.
    """
    values = getattr(batches, name, None)
    if values is None:
        return None
    return [int(values[sample]) for sample in samples]


def shards(batches: Any, step: int, world_size: int) -> list[list[int]]:
    """Return the samples of each rank of the recorded run, which may have had another number of ranks.

    Ranks of a tensor-parallel group share their samples, so that there are fewer shards than ranks.

    Args:
        batches: `GlobalBatches` of this process.
        step: the step, counted from 0.
        world_size: number of ranks of the replay.
    """
    from dataclasses import replace

    count = batches.world_size
    if count == world_size:
        count = config["ranks"]
    return [indices(replace(batches, rank=rank, world_size=count), step) for rank in range(count)]


class _Finder(importlib.abc.MetaPathFinder):
    """Call the hooks of a module after its import."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in _hooks:
            return None
        functions = _hooks.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for function in functions:
                function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
