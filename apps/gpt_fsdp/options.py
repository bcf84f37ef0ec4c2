"""The options of this app: those every app has, and its own. Standard library only."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samestep import ConfigError
from samestep.options import Options, Parser, add_common, bounded_float, bounded_int

TEXTS = Path(__file__).resolve().parent / "text"
SIZES = {"jargon": None, "jargon-64k": 2**16}  # bytes of the embedded text's beginning; None: all
BLOCKS, BLOCK = 64, 2**16  # of a file, spread over it, that its fingerprint is of


def fingerprint(path: Path) -> str:
    """SHA-256 over a file's size and a sample of it: 10**10 bytes are not read before each start. Raises OSError."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        for i in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def resolve(data_file: Path | None, name: str, data_dir: Path, fallback: bool = True) -> Any:
    """Find the text, as `samestep.data.datasets.resolve` finds a dataset."""
    from samestep.rundir import DatasetInfo  # not at the top: it needs numpy, and the launch script has none

    if name == "file" and data_file is None:
        raise ConfigError("--dataset file, but which? Name it by --data-file, also to go on with a run of one")
    path = data_file or TEXTS / "jargon.txt"
    if os.path.exists(data_dir) and not os.path.isdir(data_dir):
        raise ConfigError(f"--data-dir: the data folder {data_dir} is not a folder")
    try:
        return DatasetInfo(name, path.resolve().parent, fingerprint=fingerprint(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}: name another --data-file") from error


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a small GPT on a text's bytes with PyTorch FSDP2 and tensor parallelism: the same steps "
        "at any mesh, checkpoints that any other mesh reads, and a run that can be killed and resumed.",
    )
    add_common(
        parser,
        epochs=1,
        global_batch_size=16,
        lr="0.001",
        datasets=(*SIZES, "file"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("mesh", "data_file", "checkpoint_activations"),
    )
    default = "(default: %(default)s)"
    add = parser.add_argument_group("model").add_argument
    add("--layers", type=bounded_int(1), default=4, metavar="L", help=default)
    add("--width", type=bounded_int(2), default=128, metavar="W", help=default)
    add("--heads", type=bounded_int(1), default=4, metavar="H", help=default)
    add(
        "--context",
        type=bounded_int(1),
        default=128,
        metavar="T",
        help=f"bytes of a window, of which a sample is one {default}",
    )
    add = parser.add_argument_group("the ranks").add_argument
    add("--mesh", metavar="DPxTP", help="data-parallel times tensor-parallel ranks, such as 2x2 (default: Nx1)")
    recompute = "compute a block again in backward instead of keeping what it computed"
    add("--checkpoint-activations", action="store_true", help=recompute)
    add = parser.add_argument_group("the step").add_argument
    add("--accumulate", type=bounded_int(1), default=1, metavar="K", help=f"micro-batches of a global batch {default}")
    add(
        "--clip-norm",
        type=bounded_float(0.0, above=True),
        metavar="C",
        help="of the global batch's gradient (default: none)",
    )
    add("--autocast", choices=("none", "bfloat16"), default="none", help="weights and optimizer stay in float32")
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64 for comparisons")
    add = parser.add_argument_group("optimizer (AdamW)").add_argument
    add("--weight-decay", type=bounded_float(0.0), default=0.1, metavar="W", help=f"of all but norms {default}")
    add("--schedule", choices=("cosine", "constant"), default="cosine", help=f"of --lr, over --epochs {default}")
    add("--warmup-steps", type=bounded_int(0), default=30, metavar="S", help=f"linear, before the schedule {default}")
    parser.add_argument_group("data").add_argument("--data-file", type=Path, metavar="FILE", help="train on its bytes")
    # torch.distributed.launch gives it beside LOCAL_RANK: by its own name, and before torch 2.0 with an underscore.
    parser.add_argument("--local-rank", "--local_rank", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def mesh_of(options: Options, ranks: int) -> tuple[int, int]:
    """Data-parallel and tensor-parallel ranks, of ``ranks`` in all. Raises UserError where --mesh does not suit."""
    sizes = (options.mesh or f"{ranks}x1").split("x")
    dp, tp = (int(size) if size.isdecimal() else 0 for size in (*sizes, "0")[:2])
    if len(sizes) != 2 or dp * tp != ranks:
        raise ConfigError(f"--mesh {options.mesh} is not DPxTP with a product of {ranks}, the number of ranks")
    if options.heads % tp:
        raise ConfigError(
            f"--mesh {options.mesh} cuts {options.heads} heads into {tp}: choose a divisor, or other --heads"
        )
    return dp, tp


def check_ranks(options: Options, ranks: int) -> None:
    """For the launch script: raises UserError where --mesh does not suit N ranks on each machine."""
    nodes = os.environ.get("NNODES") or os.environ.get("PET_NNODES") or "1"
    if nodes.isdecimal():
        mesh_of(options, ranks * max(1, int(nodes)))


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Parse and complete the options; raises UserError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    local_rank = vars(options).pop("local_rank", None)  # says nothing about the run
    if local_rank not in (None, os.environ.get("LOCAL_RANK")):
        found = os.environ.get("LOCAL_RANK", "not set")
        raise ConfigError(f"--local-rank {local_rank}, but LOCAL_RANK is {found}: start the ranks with torchrun")
    if options.lr is None:
        options.lr = 0.001
    if options.width % (2 * options.heads):
        raise ConfigError(
            f"--width {options.width} is no multiple of 2 x --heads {options.heads}: heads have even parts"
        )
    if options.autocast != "none" and options.dtype == "float64":
        raise ConfigError(f"--autocast {options.autocast} computes in less than --dtype float64: leave one of them out")
    if options.data_file is not None:
        if options.dataset not in (None, "file"):
            raise ConfigError(f"--data-file and --dataset {options.dataset}: leave one of them out")
        options.dataset, options.data_file = "file", options.data_file.absolute()
    options.resolve_dataset = partial(resolve, options.data_file)
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule's horizon; --max-steps only stops before it
    return options
