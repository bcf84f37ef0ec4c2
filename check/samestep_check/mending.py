"""The changes to a script that make failed rows pass, in 1 to 4 lines, without and with the kit (`samestep.torch`).

A test compares these changes with docs/mend_a_row.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Mending(NamedTuple):
    """The change to a PyTorch script that makes a failed row pass.

    Attributes:
        plain: lines of Python without samestep.
        kit: lines with samestep.torch; empty if the kit does not help.
    """

    plain: str
    kit: str = ""


_ALL_STATE = """\
if rank == 0:
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}, "new.tmp")
    os.replace("new.tmp", "checkpoint.pt")"""
_STOP = """\
signal.signal(signal.SIGTERM, lambda *_: stopping.fill_(1))  # stopping = torch.zeros(1)
dist.all_reduce(stopping, op=dist.ReduceOp.MAX)  # after each step, on all ranks
if stopping.item():
    save(step)  # and sys.exit(143)"""
_CHECKPOINTS = """\
checkpoints = Checkpoints("out", every=100, model=model, optimizer=optimizer, sampler=sampler)
checkpoints.restore()  # before the loop
checkpoints.step()  # after each optimizer step, on all ranks; it also saves at TERM"""
_SAMPLER = """\
sampler = GlobalBatchSampler(len(train_set), global_batch_size=64, seed=1)
loader = DataLoader(train_set, batch_sampler=sampler)  # of samestep.torch
epochs = range(sampler.epoch, epochs)  # of the loop; a part of Checkpoints restores the sampler"""
_GLOBAL_BATCHES = """\
order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch)).tolist()
batches = [order[i : i + 64][rank::world_size] for i in range(0, len(order), 64)]
loader = DataLoader(train_set, batch_sampler=batches[step % len(batches) :])"""
_PARENT = """\
parent = os.getppid()  # before the loop
if os.getppid() != parent:  # in each step
    os._exit(1)"""
_FSYNC = """\
torch.save(state, "new.tmp")  # on rank 0 only
with open("new.tmp", "rb") as file:
    os.fsync(file.fileno())
os.replace("new.tmp", f"checkpoint-{step:06}.pt")  # delete older ones after it"""
_TIMEOUT = 'dist.init_process_group("gloo", timeout=timedelta(seconds=60))'

MENDING: dict[str, Mending] = {
    "rank-killed": Mending(_ALL_STATE, _CHECKPOINTS),
    "term": Mending(_STOP, _CHECKPOINTS),
    "resume-position": Mending(_GLOBAL_BATCHES, _SAMPLER),
    "resume-optimizer": Mending(_ALL_STATE, _CHECKPOINTS),
    "odd-batch": Mending(
        "dist.all_reduce(count := torch.tensor(len(y)))\n"
        'loss = cross_entropy(model(x), y, reduction="sum") * world_size / count  # DDP divides by world_size',
        'loss = global_mean(cross_entropy(model(x), y, reduction="sum"), len(y))',
    ),
    "epoch-order": Mending("sampler.set_epoch(epoch)  # before each epoch", _SAMPLER),
    "evaluation": Mending(
        "own = Subset(test_set, range(rank, len(test_set), world_size))  # no DistributedSampler, which pads\n"
        "dist.all_reduce(totals)  # sums of correct and counted examples, after the loop",
        "loader = DataLoader(test_set, batch_sampler=EvalSampler(len(test_set), batch_size=100))\n"
        "correct, count = global_sum(correct, count)  # after the loop",
    ),
    "one-rank": Mending(
        _GLOBAL_BATCHES + "\ntorch.manual_seed(step)  # before each step, alike on all ranks",
        _SAMPLER + "\nmodel = exact(DDP(model), sampler)",
    ),
    "exit-codes": Mending("sys.exit(143)  # after TERM; and let an exception end the process", _CHECKPOINTS),
    "leftovers": Mending(_PARENT),
    "recovery-time": Mending(_ALL_STATE, _CHECKPOINTS),
    "lost-work": Mending("if step % 100 == 0 and rank == 0:\n    save(step)", _CHECKPOINTS),
    "launcher-killed": Mending(_PARENT),
    "stalled": Mending(_TIMEOUT),
    "save-killed": Mending(
        'if rank == 0:\n    torch.save(state, "new.tmp")\n    os.replace("new.tmp", "checkpoint.pt")',
        _CHECKPOINTS,
    ),
    "checkpoint-damaged": Mending(
        "content = path.read_bytes()  # of a file that begins with the SHA-256 of the rest\n"
        "if hashlib.sha256(content[32:]).digest() != content[:32]:\n"
        "    continue  # to the checkpoint before it",
        _CHECKPOINTS,
    ),
    "other-n": Mending(
        "if rank == 0:\n    save(step)  # one state for all ranks, with the number of the global step",
        _CHECKPOINTS,
    ),
    "two-jobs": Mending(
        'dist.init_process_group("gloo")  # takes the launcher\'s address and free port, no fixed one\n'
        'command = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]  # each job gets a free port'
    ),
    "all-killed": Mending(_ALL_STATE, _CHECKPOINTS),
    "replicas": Mending(
        "bad = (~torch.isfinite(loss.detach())).float()\n"
        "dist.all_reduce(bad)  # all ranks skip the step, or none\n"
        "if not bad:\n"
        "    optimizer.step()"
    ),
    "workers": Mending(
        "ignore = lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "loader = DataLoader(train_set, num_workers=2, worker_init_fn=ignore)",
        "loader = DataLoader(train_set, batch_sampler=sampler, num_workers=2)  # of samestep.torch",
    ),
    "save-every-write": Mending(
        'torch.save(state, "new.tmp")  # on rank 0; everything in one file, also the step\n'
        'os.replace("new.tmp", f"checkpoint-{step:06}.pt")\n'
        "for old in older_checkpoints:\n"
        "    old.unlink()  # only now",
        _CHECKPOINTS,
    ),
    "save-power-cut": Mending(_FSYNC, _CHECKPOINTS),
    "disk-full": Mending(
        "if rank == 0:\n"
        '    torch.save(state, "new.tmp")  # it may fail; the checkpoint before it stays\n'
        '    os.replace("new.tmp", "checkpoint.pt")',
        _CHECKPOINTS,
    ),
}


def markdown(titles: dict[str, str]) -> str:
    """Return the sections of docs/mend_a_row.md, one for each change: the rows that need the change, and its code.

    Args:
        titles: title of each row, by the name of the row.
    """
    rows: dict[Mending, list[str]] = {}
    for name, mending in MENDING.items():
        rows.setdefault(mending, []).append(name)
    lines = []
    for mending, names in rows.items():
        lines.append(f"## {', '.join(f'`{name}`' for name in names)}")
        lines += ["", *(f"- `{name}`: {titles[name]}" for name in names), ""]
        lines += ["```python", mending.plain, "```", ""]
        if mending.kit:
            lines += ["With the kit:", "", "```python", mending.kit, "```", ""]
    return "\n".join(lines)
