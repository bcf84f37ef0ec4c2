"""Record the numbers of a replayed step, as a line of JSON in a file for each rank.

``samestep replay`` puts this folder first on PYTHONPATH. The probes only read the training's tensors, so they change no
bit of the training. They record the steps from ``first`` to ``last`` of `config`. The modules
``samestep_probe_torch`` and ``samestep_probe_paddle`` contain the hooks for the frameworks. This module imports
no third-party package, because every Python process of a replay imports this module.
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
    """The state of the probes in this process.

    Attributes:
        run: the rank's `samestep.run.Run`; None before the end of `Run.start`.
        frameworks: the `Framework` of each framework that the program has imported.
        unseen: the first error of each hook, by the hook's name.
    """

    def __init__(self) -> None:
        self.run: Any = None
        self.frameworks: list[Framework] = []
        self.unseen: dict[str, str] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether the current step must be recorded."""
        if self.run is None:
            return False
        return bool(config["first"] <= self.run.step + 1 <= config["last"])


class Framework:
    """The observations of one framework's hooks during a step. Each framework has a subclass."""

    def take(self, rows: int, targets: list[int] | None) -> dict[str, Any]:
        """Return the observations of the step as JSON values, and clear them.

        Args:
            rows: number of samples of this rank.
            targets: number of losses of each sample; None if all samples have the same number.
        """
        raise NotImplementedError

    def keep_batch(self, batch: Any, lengths: list[int] | None) -> None:
        """Record a batch that the training loop receives.

        Args:
            batch: nested tensors. The first tensor has the inputs of this rank's samples.
            lengths: length of each sample; None if the inputs are not padded.
        """

    def forget(self) -> None:
        """Clear the observations of a step."""
        vars(self).update(vars(type(self)()))


probe = Probe()
Hook = TypeVar("Hook", bound=Callable[..., Any])


def guarded(hook: Hook) -> Hook:
    """Wrap a hook so that its exceptions never reach the training; the first exception of each hook is recorded."""

    @functools.wraps(hook)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return hook(*arguments, **named)
        except Exception as error:
            probe.unseen.setdefault(hook.__qualname__, f"{type(error).__name__}: {error}"[:300])
            return None

    return call  # type: ignore[return-value]


def on_import(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Register a guarded hook, which is called with the module after the module's import."""
    _hooks.setdefault(module, []).append(guarded(hook))


def start() -> None:
    """Install the hooks if this process belongs to a replay."""
    if not config:
        return
    # These imports are not at the top of the file, because both modules import this module.
    import samestep_probe_paddle
    import samestep_probe_torch

    on_import("samestep.run", _watch_run)
    samestep_probe_torch.start()
    samestep_probe_paddle.start()
    sys.meta_path.insert(0, _Finder())


def _watch_run(module: ModuleType) -> None:
    """Patch `Run` to record its steps, to skip evaluations, and to end the process after the last step."""
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
    def record_and_count(run: Any, done: int) -> None:
        if probe.is_wanted:
            _record(run, done - 1)
        count_step(run, done)

    @functools.wraps(actions_after)
    def actions_without_evaluation(run: Any, done: int) -> Any:
        return actions_after(run, done)._replace(evaluate=False)

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
    """Wait until this rank's last checkpoint is on the disk, and end this process, because a replay needs no result."""
    run.storage.finish(run)
    run.collectives.broadcast(b"")  # collective: a barrier, because a rank's end may make its launcher kill the others
    run.monitor.stop()
    end_workers()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None:  # Horovod's thread would report another rank's end as an error
        horovod.shutdown()
    os._exit(0)


def end_workers() -> None:
    """Kill the workers of data loaders. They ignore TERM, and a forked rank would wait for them."""
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
    """Write this rank's record of the update ``step``, counted from 0."""
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
    """Return a rank's sample indices at ``step``, counted from 0, in the order of their computation."""
    from dataclasses import replace  # this import takes milliseconds, and not every process needs it

    batches = replace(batches)  # the copy has a separate cache
    if batches.virtual_ranks is None and batches.accumulate == 1:
        return [int(sample) for sample in batches.indices(step)]
    samples = []
    for micro_batch in batches.micro_batches(step):
        samples += [int(sample) for sample in batches.indices(step, micro_batch)]
    return samples


def of_samples(batches: Any, name: str, samples: list[int]) -> list[int] | None:
    """Return an attribute of `TokenBatches` for each sample; None if the batches lack this attribute.

    Args:
        batches: the `GlobalBatches` or `TokenBatches` of this process.
        name: name of the attribute, such as "lengths".
        samples: sample indices.
    """
    values = getattr(batches, name, None)
    if values is None:
        return None
    return [int(values[sample]) for sample in samples]


def shards(batches: Any, step: int, world_size: int) -> list[list[int]]:
    """Return the sample indices of each rank of the recorded run, whose world size may differ from the replay's.

    Ranks of a tensor-parallel group share their samples, so there may be fewer shards than ranks.

    Args:
        batches: the `GlobalBatches` of this process.
        step: the step, counted from 0.
        world_size: number of ranks of the replay.
    """
    from dataclasses import replace

    count = batches.world_size
    if count == world_size:
        count = config["ranks"]
    return [indices(replace(batches, rank=rank, world_size=count), step) for rank in range(count)]


class _Finder(importlib.abc.MetaPathFinder):
    """An import finder that calls the hooks of a module after its import."""

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
