"""Test `exact` and the means on one and several ranks: equal steps at any world size, and refused arguments."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit_programs import run_ranks
from samestep.torch import FixedRows, GlobalBatchSampler, exact, global_mean, global_sum
from samestep.torch.dropout import MOST_BY_NUMPY, random_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DROPOUTS = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]


def rows(first: int, local: int, size: int) -> FixedRows:
    fixed = FixedRows()
    fixed.set(0, first, local, size)
    return fixed


def shape_for(kind: type[nn.Module]) -> list[int]:
    """Return a batch shape of 9 rows that the module accepts."""
    by_name = {"Dropout1d": [9, 4, 5], "Dropout2d": [9, 4, 2, 3], "Dropout3d": [9, 4, 2, 2, 2]}
    return by_name.get(kind.__name__, [9, 4, 3])


FREED = """
import faulthandler
faulthandler.dump_traceback_later(30, exit=True)

def train():
    group = dist.new_group()
    model = exact(DDP(nn.Linear(2, 2), process_group=group))
    model(torch.ones(2, 2)).sum().backward()
    gathered = [torch.empty(1000) for _ in range(world_size)]
    dist.all_gather(gathered, torch.ones(1000), group=group)
    dist.destroy_process_group(group)

for _ in range(20):
    train()
end()
"""


def test_a_model_can_be_freed_right_after_a_collective(tmp_path: Path) -> None:
    """Without `exact`, the second call of train deadlocks: DDP waits for gloo's thread, which needs the GIL."""
    run_ranks(FREED, 2, tmp_path)


@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_ranks_rows_get_the_masks_that_they_get_on_one_rank(kind: Any) -> None:
    x = torch.randn(shape_for(kind))
    torch.manual_seed(1)
    whole = exact(nn.Sequential(kind(0.5)), rows(0, 9, 9))(x)
    parts = []
    for first, stop in ((0, 4), (4, 4), (4, 9)):
        torch.manual_seed(1)
        parts.append(exact(nn.Sequential(kind(0.5)), rows(first, stop - first, 9))(x[first:stop]))
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(parts[0][:4], parts[2][:4])


@pytest.mark.parametrize("kind", DROPOUTS)
def test_masks_have_torchs_share_and_scale(kind: Any) -> None:
    x = torch.ones(200, 50, *shape_for(kind)[2:])
    torch.manual_seed(1)
    ours = exact(nn.Sequential(kind(0.3)), rows(0, 200, 200))(x)
    theirs = kind(0.3)(x)
    dropped = ours.min() if "Alpha" in kind.__name__ else 0
    kept = (ours != dropped).float().mean().item()
    assert abs(kept - 0.7) < 0.02
    assert torch.allclose(ours.unique(), theirs.unique())
    if kind not in (nn.Dropout, nn.AlphaDropout):
        assert torch.equal(ours, ours.flatten(2)[:, :, :1].view(200, 50, *[1] * (x.ndim - 2)).expand_as(ours))


@pytest.mark.parametrize("key", [-(2**63), -1, 0, 12345678901234567, 2**63 - 1])
def test_the_bits_of_a_position_do_not_depend_on_the_number_of_positions(key: int) -> None:
    """torch draws the bits of many positions, and NumPy draws the bits of few positions."""
    cpu = torch.device("cpu")
    many = random_bits(torch.tensor(key), 7, MOST_BY_NUMPY + 1, cpu)
    for first, stop in ((0, 50), (1000, 1000), (MOST_BY_NUMPY - 9, MOST_BY_NUMPY + 1)):
        few = random_bits(torch.tensor(key), 7 + first, stop - first, cpu)
        assert torch.equal(few, many[first:stop])


@pytest.mark.parametrize("shape", [(9, 6, 5), (9, 3, 6, 6)])
def test_masks_of_padded_rows_do_not_depend_on_the_padding(shape: tuple[int, ...]) -> None:
    """Pad the rows of one rank to 6 values and of another rank to 4 values, in each dimension of this size."""

    def mask(first: int, count: int, length: int, padded: bool) -> Tensor:
        torch.manual_seed(1)
        model = exact(nn.Sequential(nn.Dropout(0.5)), rows(first, count, 9), padded=padded)
        kept: Tensor = model(torch.ones(count, *(length if size == 6 else size for size in shape[1:])))
        return kept

    cut = tuple(slice(4 if size == 6 else size) for size in shape[1:])
    for padded in (True, False):
        whole = mask(0, 9, 6, padded)[(slice(5, 9), *cut)]
        assert torch.equal(mask(5, 4, 4, padded), whole) == padded
        assert 0.4 < whole.count_nonzero() / whole.numel() < 0.6


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_all_or_nothing_is_dropped(p: float) -> None:
    model = exact(nn.Sequential(nn.Dropout(p)), rows(0, 9, 9))
    assert model(torch.ones(9, 4)).sum() == 36 * (1 - p)
    assert model.eval()(torch.ones(9, 4)).sum() == 36


def test_two_dropouts_and_two_calls_have_masks_of_their_own() -> None:
    model = exact(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), rows(0, 9, 9))
    x = torch.ones(9, 100)
    masks = [model[0](x), model[1](x), model[0](x)]
    assert not any(torch.equal(one, other) for one, other in zip(masks, masks[1:]))


def test_a_sequence_is_dropped_by_row_too() -> None:
    """Rows may be [batch * time, ...]. The number of a rank's rows is then a multiple of the number of its examples."""
    x = torch.ones(12, 3)
    torch.manual_seed(1)
    whole = exact(nn.Sequential(nn.Dropout(0.5)), rows(0, 4, 4))(x)
    torch.manual_seed(1)
    part = exact(nn.Sequential(nn.Dropout(0.5)), rows(3, 1, 4))(x[9:])
    assert torch.equal(part, whole[9:])
    with pytest.raises(ValueError, match=r"gets 3 rows, which is not a multiple of the batch's 4: exact\(\) needs"):
        exact(nn.Sequential(nn.Dropout(0.5)), rows(0, 4, 4))(torch.ones(3, 5))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}])
def test_on_one_rank_batch_norm_is_torchs(kind: Any, options: dict[str, Any]) -> None:
    theirs = kind(4, **options).double()
    ours = exact(copy.deepcopy(theirs))
    assert isinstance(ours, kind)
    dims = {"BatchNorm1d": [7, 4], "BatchNorm2d": [7, 4, 3, 2], "BatchNorm3d": [7, 4, 3, 2, 2]}[kind.__name__]
    for _ in range(3):
        x = torch.randn(dims, dtype=torch.float64, requires_grad=True)
        results = []
        for norm in (ours, theirs):
            norm.zero_grad()
            x.grad = None
            y = norm(x)
            (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
            results.append([y, x.grad, *(parameter.grad for parameter in norm.parameters()), *norm.buffers()])
        for one, other in zip(*results):
            torch.testing.assert_close(one, other)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_second_derivatives_of_batch_norm_are_refused() -> None:
    model = exact(nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()))
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"has no second derivatives: leave out create_graph=True, or use GroupNorm"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient,) = torch.autograd.grad(model.eval()(x).sum(), x, create_graph=True)
    gradient.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_has_the_gradients_of_batch_norm(use_reentrant: bool) -> None:
    model = exact(nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()))
    x = torch.randn(4, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_copy_sees_the_same_batches_and_a_saved_model_loads(tmp_path: Path) -> None:
    fixed = rows(0, 9, 9)
    model = exact(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), fixed)
    average = torch.optim.swa_utils.AveragedModel(model)
    assert average.module.get_submodule("1").rows is model[1].rows
    average.update_parameters(model)
    x = torch.ones(9, 3)
    assert torch.equal(average.eval()(x), model.eval()(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_drops_the_same_values_again(use_reentrant: bool) -> None:
    shared = nn.Dropout(0.5)
    linear = nn.Linear(50, 50).double()
    net = exact(nn.Sequential(linear, shared, linear, shared), rows(0, 6, 6))
    x = torch.ones(6, 50, dtype=torch.float64, requires_grad=True)
    gradients: list[Any] = []
    for use_checkpoint in (False, True):
        linear.weight.grad = None
        torch.manual_seed(7)
        y = checkpoint(net, x, use_reentrant=use_reentrant) if use_checkpoint else net(x)
        y.sum().backward()
        gradients.append(linear.weight.grad)
    assert torch.equal(*gradients)


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


class AttentionDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


@pytest.mark.parametrize(("module", "x"), [(FunctionalDropout(), (3, 2)), (AttentionDropout(), (3, 2, 4, 4))])
def test_modules_that_draw_are_found_in_the_first_forward_pass(module: nn.Module, x: tuple[int, ...]) -> None:
    model = exact(nn.ModuleDict({"own": nn.Sequential(module, nn.Dropout(0.1))})["own"], rows(0, 3, 3))
    model.eval()(torch.ones(x))  # an earlier evaluation does not count as the first pass
    with pytest.raises(ValueError, match=rf"^0 \({type(module).__name__}\) draws random numbers in its forward pass"):
        model.train()(torch.ones(x))


class NumpyDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(np.random.rand(len(x), 1) > 0.5)


def test_a_module_that_draws_from_numpy_causes_one_warning() -> None:
    model = exact(nn.Sequential(nn.Sequential(NumpyDropout()), nn.Dropout(0.1)), rows(0, 3, 3))
    with pytest.warns(UserWarning, match=r"0.0 \(NumpyDropout\) draws from random or numpy.random") as caught:
        [model(torch.ones(3, 2)) for _ in range(2)]
    assert len(caught) == 1


@pytest.mark.parametrize("module", [nn.Dropout(0.1), nn.BatchNorm1d(2)])
def test_a_module_that_is_added_later_is_found_in_the_first_forward_pass(module: nn.Module) -> None:
    model = exact(nn.Sequential(nn.Linear(2, 2)), rows(0, 3, 3))
    model.append(module)
    with pytest.raises(ValueError, match=rf"^1 \({type(module).__name__}\) was added to the model after exact\(\)"):
        model(torch.ones(3, 2))


def test_modules_that_change_nothing_can_be_added_later() -> None:
    model = exact(nn.Sequential(nn.Linear(2, 2)), rows(0, 3, 3))
    model.extend([nn.Dropout(0.0), nn.BatchNorm1d(2).eval(), nn.Tanh()])
    model(torch.ones(3, 2))


class OwnNorm(nn.BatchNorm1d):
    pass


class OwnDropout(nn.Dropout):
    pass


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LSTM(2, 2, 2, dropout=0.1), r"0 \(LSTM\) has a dropout of 0.1"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), r"0 \(MultiheadAttention\) has a dropout of 0.1"),
        (nn.RReLU(), r"0 \(RReLU\) draws random numbers"),
        (nn.FractionalMaxPool2d(2, output_size=1), r"0 \(FractionalMaxPool2d\) draws"),
        (nn.BatchNorm1d(3, track_running_stats=False), "0 keeps no running statistics"),
        (
            nn.InstanceNorm1d(3, track_running_stats=True),
            "0 keeps running statistics of one rank's rows: use track_runn",
        ),
        (OwnNorm(3), "0 is a .*OwnNorm, which exact"),
        (OwnDropout(), "0 is a .*OwnDropout, which exact"),
        (nn.LazyBatchNorm1d(), "0 is a .*LazyBatchNorm1d, which exact"),
        (exact(nn.BatchNorm1d(3)), "0 is exact already"),
    ],
)
def test_modules_that_cannot_be_exact_are_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        exact(nn.Sequential(module), rows(0, 3, 3))


def test_a_refused_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.RReLU())
    with pytest.raises(ValueError, match="RReLU"):
        exact(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_a_dropout_needs_rows() -> None:
    with pytest.raises(ValueError, match=r"^drop is a dropout, which needs the rows of the batch: pass the sampler"):
        exact(nn.ModuleDict({"drop": nn.Dropout(0.1)}))
    exact(nn.Sequential(nn.Dropout(0.0), nn.LSTM(2, 2), nn.InstanceNorm1d(2), nn.GroupNorm(1, 2)))


def test_one_value_per_channel_is_refused() -> None:
    for model in (exact(nn.BatchNorm1d(3)), exact(nn.BatchNorm1d(3), rows(0, 1, 1))):
        with pytest.raises(ValueError, match="more than 1 value per channel in the global batch: use drop_last=True"):
            model(torch.ones(1, 3))


def test_sub_shards_of_one_example_are_refused() -> None:
    sampler = GlobalBatchSampler(9, 4, 0, 1, virtual_ranks=2)
    with pytest.raises(ValueError, match="1 examples of an epoch's last batch make 1 sub-shards"):
        exact(nn.BatchNorm1d(3), sampler)


def test_a_mean_without_weight_is_0_and_has_no_gradient() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    mean = global_mean(loss, 0)
    mean.backward()
    assert (mean.item(), loss.grad) == (0, torch.tensor(0.0))


@pytest.mark.parametrize(
    ("loss", "weights", "message"),
    [
        (torch.ones(3), {"weight_sum": 3}, r"loss_sum has shape \[3\]: pass its sum"),
        (torch.ones(()), {"weight_sum": torch.ones(2)}, r"weight_sum has shape \[2\]: pass its sum"),
        (torch.ones(()), {}, "either weight_sum or of"),
        (torch.ones(()), {"weight_sum": 1, "of": 2}, "either weight_sum or of"),
    ],
)
def test_bad_means_are_refused(loss: Tensor, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        global_mean(loss, **weights)
    with pytest.raises(ValueError, match="has shape"):
        global_sum(torch.ones(2))


GROUPS = """
from samestep.torch import ranks

groups = [dist.new_group([each]) for each in range(world_size)]

def gradients(limit, use_exact, model, x, **options):
    ranks.GATHER_MAX_BYTES = limit
    torch.manual_seed(rank if options else 0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    ddp = DDP(model, **options)
    if use_exact:
        exact(ddp)
    ddp(x).square().sum().backward()
    return [parameter.grad.to_dense().tolist() for parameter in model.parameters()]

def same(make, *arguments, **options):
    expected = gradients(0, False, make(), *arguments, **options)
    return [gradients(limit, True, make(), *arguments, **options) == expected for limit in (2**22, 0)]

own = torch.arange(6.0).view(2, 3) + rank
print(same(lambda: nn.Linear(3, 1), own, process_group=groups[rank]))
tokens = torch.tensor([rank, 3])
print(same(lambda: nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)), tokens))
norm = exact(DDP(nn.BatchNorm1d(3), process_group=groups[rank]))
norm(own)
print(torch.allclose(norm.module.running_mean, own.mean(0) / 10))
end()
"""


def test_ddp_reduces_the_gradients_of_its_process_group_and_sparse_gradients(tmp_path: Path) -> None:
    outputs = run_ranks(GROUPS, 2, tmp_path)
    assert outputs == ["[True, True]\n[True, True]\nTrue\n"] * 2


BUFFERS = """
class Centered(nn.Module):
    def __init__(self, is_reduced, persistent=True):
        super().__init__()
        self.is_reduced = is_reduced
        self.register_buffer("mean", torch.zeros(3), persistent)
    def forward(self, x):
        mean = x.detach().mean(0)
        if self.is_reduced:
            dist.all_reduce(mean)
        self.mean.lerp_(mean, 0.1)
        return x - self.mean

def first_pass(module, rows=None):
    torch.manual_seed(0)
    model = exact(DDP(nn.Sequential(module, nn.BatchNorm1d(3), nn.Linear(3, 1))), rows)
    try:
        for step in range(2):
            model(torch.full((2, 3), 1.0 + rank)).sum().backward()
        return "equal"
    except ValueError as error:
        return error

print(first_pass(Centered(False)))
print(first_pass(Centered(True)))
fixed = FixedRows(virtual_ranks=2)
fixed.set(0, 2 * rank, 2, 4)
print(first_pass(Centered(True), fixed))
print(first_pass(Centered(False, persistent=False)))  # a cache
print(first_pass(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))))
end()
"""


def test_buffers_that_differ_between_ranks_are_found_in_the_first_forward_pass(tmp_path: Path) -> None:
    outputs = run_ranks(BUFFERS, 2, tmp_path)
    refused = (
        "the forward pass computes the buffer 0.mean from the batches of one rank: reduce its update over all ranks"
    )
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert [line.startswith(refused) for line in lines] == [True, False, True, False, False]
    assert [line for line in lines if not line.startswith(refused)] == ["equal"] * 3


STEPS = """
import json
from contextlib import nullcontext
from samestep.torch.reduction import gradient_tree

class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        norms = [nn.BatchNorm2d(8), nn.BatchNorm1d(8)] if norm else [nn.Identity(), nn.Identity()]
        self.convolve = nn.Sequential(nn.Conv2d(2, 8, 3, bias=False), norms[0], nn.ReLU(), nn.Dropout2d(0.2))
        self.norm = norms[1]
        self.last = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 5), nn.AlphaDropout(0.1))
    def forward(self, x):
        return self.last(self.norm(self.convolve(x).mean((2, 3))))

generator = torch.Generator().manual_seed(3)
dataset = [(torch.randn(2, 6, 6, generator=generator).double(), i % 5) for i in range(25)]

def losses_of(model, x, y):
    parameter = next(model.parameters())
    return F.cross_entropy(model(x.to(parameter.dtype)), y, reduction="none")

def by_samples(model, sampler, batch):
    loss = sampler.scale(losses_of(model, *batch).sum())
    loss.backward()
    return global_sum(loss)[0]

def by_weights(model, sampler, batch):
    x, y = batch
    weights = y + 0.5
    loss = global_mean((losses_of(model, x, y) * weights).sum(), weights.sum())
    loss.backward()
    return loss.item()

def by_weights_of_the_step(model, sampler, batch):
    x, y = batch
    of = global_sum((y + 0.5).sum())[0]
    total = 0.0
    for images, labels in sampler.micro_batches((x, y)):
        loss = global_mean((losses_of(model, images, labels) * (labels + 0.5)).sum(), of=of)
        loss.backward()
        total += loss.item()
    return total

def by_sub_shards(model, sampler, batch):
    for images, labels in sampler.micro_batches(batch):
        loss_sum = losses_of(model, images, labels).sum()
        sampler.scale(loss_sum).backward()
        trees[sampler].add(sampler.micro_batch, loss_sum)
    return global_sum(trees[sampler].all_reduce(sampler.step - 1))[0]

trees = {}

def train(step, dtype=torch.float64, norm=True, drop_last=True, **cut):
    torch.manual_seed(0)
    sampler = GlobalBatchSampler(25, 8, drop_last=drop_last, **cut)
    loader = DataLoader(dataset, batch_sampler=sampler)
    model = exact(DDP(Net(norm).to(dtype)), sampler)
    if sampler.virtual_ranks:
        trees[sampler] = gradient_tree(model, sampler.batches)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            losses.append(step(model, sampler, batch))
            optimizer.step()
    state = {name: value.flatten().tolist() for name, value in model.module.state_dict().items()}
    return losses, state
"""


def trained(tmp_path: Path, world_size: int, calls: dict[str, str]) -> dict[str, Any]:
    """Run the calls of `train` on ``world_size`` ranks; return their results, which must be equal on all ranks."""
    lines = [f"results[{name!r}] = train({arguments})" for name, arguments in calls.items()]
    program = STEPS + "\n".join(["results = {}", *lines, "print(json.dumps(results))", "end()"])
    outputs = run_ranks(program, world_size, tmp_path)
    assert len(set(outputs)) == 1
    results: dict[str, Any] = json.loads(outputs[0])
    return results


CALLS = {
    "samples": "by_samples",
    "weights": "by_weights",
    "an empty shard": "by_samples, norm=False, drop_last=False",  # the last batch has one example
    "micro-batches": "by_weights_of_the_step, accumulate=3",
    "one micro-batch without norm": "by_weights, norm=False",
    "micro-batches without norm": "by_weights_of_the_step, norm=False, accumulate=3",
    "sub-shards": "by_sub_shards, torch.float32, virtual_ranks=3",
    "micro-batches of sub-shards": "by_sub_shards, torch.float32, virtual_ranks=2, accumulate=2",
}


def difference(one: Any, other: Any) -> float:
    """Return the largest absolute difference between two runs' losses and between the values of their states."""
    (losses, state), (other_losses, other_state) = one, other
    assert len(losses) == len(other_losses)
    values = [abs(a - b) for a, b in zip(losses, other_losses)]
    values += [abs(a - b) for name in state for a, b in zip(state[name], other_state[name])]
    return float(max(values))


def test_steps_are_the_same_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Results in float64 agree to 1e-12, and results of sub-shards are equal bit for bit."""
    alone = trained(tmp_path, 1, CALLS)
    for world_size in (2, 3):
        several = trained(tmp_path, world_size, CALLS)
        for name, results in several.items():
            limit = 0 if "sub-shards" in name else 1e-12
            assert difference(alone[name], results) <= limit, (name, world_size)
    assert difference(alone["samples"], alone["weights"]) > 1e-3
    one = alone["one micro-batch without norm"]
    cut = alone["micro-batches without norm"]
    assert difference(one, cut) < 1e-12


BUCKETS = """
import hashlib
from samestep.torch import FixedRows, ranks

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(390, 390, bias=False) for _ in range(3))  # 0.6 MB each
    def forward(self, x):
        for layer in [self.layers[1], self.layers[0], self.layers[2]]:  # DDP rebuilds its buckets in this order
            x = layer(x).tanh()
        return x

def train(model, steps):
    ddp = exact(DDP(model, bucket_cap_mb=1))
    for step in steps:
        torch.manual_seed(10 * step + rank)
        model.zero_grad()
        ddp(torch.randn(4, 390)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()

def make():
    torch.manual_seed(0)
    return Net()

for limit in (2**23, 3 * 700_000, 0):  # all on rank 0; single buckets would be; none
    ranks.GATHER_MAX_BYTES = limit
    whole = train(make(), range(3))
    model = make()
    train(model, range(1))
    print(limit, whole == train(model, range(1, 3)))
end()
"""


def test_gradients_have_the_same_bits_in_a_process_that_started_later(tmp_path: Path) -> None:
    """DDP uses other buckets in its first step than in later steps."""
    outputs = run_ranks(BUCKETS, 3, tmp_path)
    assert outputs == ["8388608 True\n2100000 True\n0 True\n"] * 3
