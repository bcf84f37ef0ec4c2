"""Run training loops of many shapes over six batches, and record each loop's name and the batches of its steps."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import samestep_record
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

Batches = list[list[int]]
ALL: Batches = [[0], [1], [2], [3], [4], [5]]
SOME: Batches = [[0], [1], [3], [5]]
SKIPPED = 2, 4
CASES: list[Callable[[], Batches]] = []

torch.set_num_threads(1)
DATA = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))


def case(function: Callable[[], Batches]) -> Callable[[], Batches]:
    CASES.append(function)
    return function


def batches(**options: Any) -> Iterator[Any]:
    return iter(DataLoader(DATA, batch_size=8, **options))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@case
def converted() -> Batches:
    model, optimizer = parts()
    for x, y in batches():
        x = (x.to(torch.float64).float() - 0.1) / 0.3
        step(optimizer, functional.cross_entropy(model(x), y.clone()))
    return ALL


@case
def skipped_before_the_forward_pass() -> Batches:
    model, optimizer = parts()
    for k, (x, y) in enumerate(batches()):
        if k not in SKIPPED:
            step(optimizer, functional.cross_entropy(model(x), y))
    return SOME


@case
def skipped_after_the_forward_pass() -> Batches:
    model, optimizer = parts()
    for k, (x, y) in enumerate(batches()):
        loss = functional.cross_entropy(model(x), y)
        if k not in SKIPPED:
            step(optimizer, loss)
    return SOME


@case
def skipped_after_the_backward_pass() -> Batches:
    model, optimizer = parts()
    for k, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if k not in SKIPPED:
            optimizer.step()
    return SOME


@case
def accumulated() -> Batches:
    model, optimizer = parts()
    for k, (x, y) in enumerate(batches()):
        functional.cross_entropy(model(x), y).backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [[0, 1], [2, 3], [4, 5]]


@case
def two_loaders() -> Batches:
    model, optimizer = parts()
    for (x, y), (u, _) in zip(batches(), batches()):
        step(optimizer, functional.cross_entropy(model(x), y) + model(u).pow(2).mean())
    return [[2 * k, 2 * k + 1] for k in range(6)]


@case
def generator_and_discriminator() -> Batches:
    model, optimizer = parts()
    generator = nn.Linear(4, 8)
    other = torch.optim.Adam(generator.parameters())
    for x, _ in batches():
        fake = generator(torch.randn(8, 4))
        step(optimizer, model(x).mean() - model(fake.detach()).mean())
        step(other, model(fake).mean())
    wanted = []
    for k in range(6):
        wanted += [[k], []]
    return wanted


@case
def one_loss_for_two_optimizers() -> Batches:
    models = [parts(), parts()]
    for x, _ in batches():
        for _, optimizer in models:
            optimizer.zero_grad()
        torch.stack([model(x).pow(2).mean() for model, _ in models]).sum().backward()
        for _, optimizer in models:
            optimizer.step()
    wanted = []
    for k in range(6):
        wanted += [[k], []]
    return wanted


@case
def queue_of_earlier_outputs() -> Batches:
    model, optimizer = parts()
    queue = torch.zeros(8, 3)
    for x, y in batches():
        output = model(x)
        step(optimizer, functional.cross_entropy(output, y) + (output @ queue.T).mean())
        with torch.no_grad():
            queue.copy_(output.detach())
    return ALL


@case
def prefetched() -> Batches:
    model, optimizer = parts()
    iterator = batches()
    following = next(iterator)
    while following is not None:
        x, y = following
        following = next(iterator, None)
        step(optimizer, functional.cross_entropy(model(x), y))
    return ALL


@case
def static_buffers() -> Batches:
    model, optimizer = parts()
    inputs = torch.zeros(8, 8)
    labels = torch.zeros(8, dtype=torch.long)
    for x, y in batches():
        inputs.copy_(x)
        labels[:] = y
        step(optimizer, functional.cross_entropy(model(inputs), labels))
    return ALL


@case
def inputs_from_numpy() -> Batches:
    model, optimizer = parts()
    for x, y in batches():
        x = torch.from_numpy(x.numpy() * 2)
        step(optimizer, functional.cross_entropy(model(x), y))
    return ALL


@case
def without_a_module() -> Batches:
    weights = torch.zeros(8, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for x, y in batches():
        step(optimizer, ((x @ weights).squeeze() - y).pow(2).mean())
    return ALL


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@case
def objects_as_batches() -> Batches:
    model, optimizer = parts()

    def collate(rows: list[Any]) -> Pair:
        return Pair(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    for pair in batches(collate_fn=collate):
        step(optimizer, functional.cross_entropy(model(pair.x), pair.y))
    return ALL


@case
def lists_of_examples() -> Batches:
    model, optimizer = parts()
    for rows in batches(collate_fn=list):
        x = torch.stack([x for x, _ in rows])
        y = torch.stack([y for _, y in rows])
        step(optimizer, functional.cross_entropy(model(x), y))
    return ALL


@case
def compiled() -> Batches:
    model, optimizer = parts()
    compiled_model = torch.compile(model, backend="aot_eager")
    for x, y in batches():
        step(optimizer, functional.cross_entropy(compiled_model(x), y))
    return ALL


@case
def compiled_loss() -> Batches:
    model, optimizer = parts()

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    for x, y in batches():
        step(optimizer, loss(x, y))
    return ALL


@case
def recomputed() -> Batches:
    from torch.utils.checkpoint import checkpoint

    model, optimizer = parts()
    for x, y in batches():
        step(optimizer, functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y))
    return ALL


@case
def functional_gradients() -> Batches:
    model, optimizer = parts()
    for x, y in batches():
        weights = {name: each.detach() for name, each in model.named_parameters()}

        def loss(weights: Any, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            return functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

        gradients = torch.func.grad(loss)(weights)
        for name, each in model.named_parameters():
            each.grad = gradients[name]
        optimizer.step()
    return ALL


@case
def loader_with_a_worker() -> Batches:
    model, optimizer = parts()
    for x, y in batches(num_workers=1):
        step(optimizer, functional.cross_entropy(model(x), y))
    return ALL


@case
def closure() -> Batches:
    model, _ = parts()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for x, y in batches():

        def loss(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            value = functional.cross_entropy(model(x), y)
            value.backward()
            return float(value)

        optimizer.step(loss)
    return ALL


@case
def filled_by_a_thread() -> Batches:
    model, optimizer = parts()
    loaded = queue.Queue[Any](maxsize=1)
    inputs = batches()
    loaded.put(next(inputs))

    def fill() -> None:
        for batch in inputs:
            loaded.put(batch)
        loaded.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    for x, y in iter(loaded.get, None):
        step(optimizer, functional.cross_entropy(model(x * 2 - 1), y))
    thread.join()
    return ALL


class Doubled(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for x, y in batches():
            yield x * 2, y


@case
def loader_of_another_loaders_batches() -> Batches:
    model, optimizer = parts()
    for x, y in DataLoader(Doubled(), batch_size=None):
        step(optimizer, functional.cross_entropy(model(x), y))
    return [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


@case
def steps_that_raise() -> Batches:
    model, optimizer = parts()
    update = optimizer.param_groups[0]
    for k, (x, y) in enumerate(batches()):
        x = (x.to(torch.float64).float() - 0.1) / 0.3
        update["lr"] = None if k in SKIPPED else 0.1
        with contextlib.suppress(TypeError):
            step(optimizer, functional.cross_entropy(model(x), y.clone()))
    return SOME


@case
def state_created_by_a_step_without_gradients() -> Batches:
    model, optimizer = parts()
    state_dict.get_optimizer_state_dict(model, optimizer)
    for x, y in batches():
        step(optimizer, functional.cross_entropy(model(x), y))
    return ALL


@case
def other_device_context() -> Batches:
    model, optimizer = parts()
    for x, y in batches():
        with torch.device("meta"):  # adds a torch dispatch mode on top of the recorder's mode
            step(optimizer, functional.cross_entropy(model(x), y))
    return ALL


for each in CASES:
    samestep_record.record("begin_case", name=each.__name__)
    samestep_record.record("end_case", wanted=each())
