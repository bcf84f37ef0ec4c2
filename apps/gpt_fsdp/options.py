"""Define the options of this app, which extend the options that all apps share.

The launch script imports this module with the system's Python, so the module imports no third-party package.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samestep import ConfigError, env
from samestep.hooks import AppHooks
from samestep.options import (
    DATA,
    MODEL,
    CommonOptions,
    Parser,
    add_local_rank,
    bounded_float,
    bounded_int,
    dataset_option,
    device_option,
    keep_best_option,
    lr_option,
    make_parser,
    option,
    parse_as,
    share_gpu_option,
    start_method_option,
    trace_every_option,
    virtual_ranks_option,
)

TEXTS = Path(__file__).resolve().parent / "text"
SIZES = {"jargon": None, "jargon-64k": 2**16}  # number of bytes from the start of the embedded text; None means all
BLOCKS = 64  # number of blocks that a file's fingerprint covers
BLOCK = 2**16  # size of a block, in bytes


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's size and of BLOCKS blocks spread over the file.

    The function reads only these blocks, because reading a large file would need too much time.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        for i in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def resolve(data_file: Path | None, name: str, data_dir: Path, fallback: bool = True) -> Any:
    """Return the name, folder and fingerprint of the text, as `samestep.data.datasets.resolve` does for a dataset.

    Raises:
        ConfigError: ``name`` is "file" without a ``data_file``, or the file or the data folder cannot be used.
    """
    from samestep.data.files import DatasetInfo  # not at the top, because the launch script does not need it

    if name == "file" and data_file is None:
        raise ConfigError("--dataset file needs a file, also to resume a run: name it by --data-file")
    path = data_file or TEXTS / "jargon.txt"
    if os.path.exists(data_dir) and not os.path.isdir(data_dir):
        raise ConfigError(f"--data-dir: the data folder {data_dir} is not a folder")
    try:
        return DatasetInfo(name, path.resolve().parent, fingerprint=fingerprint(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}: name another --data-file") from error


positive = bounded_int(1)


@dataclass
class Options(CommonOptions):
    """The options of this app, with their defaults, types and help texts."""

    epochs: int = 1
    global_batch_size: int = 16
    lr: float = lr_option("0.001")
    device: str = device_option("auto", "cpu", "cuda")
    dataset: str = dataset_option(*SIZES, "file")
    keep_best: bool | str = keep_best_option("test_loss", "bits_per_byte")
    start_method: str | None = start_method_option()
    virtual_ranks: int | None = virtual_ranks_option(refusal="FSDP reduces gradients in its own order")
    trace_every: int = trace_every_option()
    share_gpu: bool = share_gpu_option()
    layers: int = option(4, "number of transformer blocks", group=MODEL, type=positive, metavar="L")
    width: int = option(128, "features per byte", group=MODEL, type=bounded_int(2), metavar="W")
    heads: int = option(4, "attention heads per block", group=MODEL, type=positive, metavar="H")
    context: int = option(128, "bytes per window; a sample is one window", group=MODEL, type=positive, metavar="T")
    dropout: float | None = option(
        None,
        "dropout probability of the embedding, and of what attention and feed-forward add (default: 0)",
        group=MODEL,
        type=bounded_float(0.0, below=1.0),
        metavar="P",
    )
    mesh: str | None = option(
        None,
        "data-parallel times tensor-parallel ranks, such as 2x2 (default: all data-parallel)",
        may_change=True,
        metavar="DPxTP",
    )
    checkpoint_activations: bool = option(
        False, "recompute activations in the backward pass, to save memory", may_change=True
    )
    accumulate: int = option(1, "micro-batches per global batch", type=positive, metavar="K")
    clip_norm: float | None = option(
        None,
        "maximum norm of the global batch's gradient (default: none)",
        type=bounded_float(0.0, above=True),
        metavar="C",
    )
    autocast: str = option(
        "none", "type of the forward pass; weights and optimizer stay in float32", choices=("none", "bfloat16")
    )
    dtype: str = option("float32", "type of weights and gradients", choices=("float32", "float64"))
    weight_decay: float = option(0.1, "AdamW's weight decay, except for norms", type=bounded_float(0.0), metavar="W")
    schedule: str = option("cosine", "schedule of the learning rate over --epochs", choices=("cosine", "constant"))
    warmup_steps: int = option(30, "steps of linear warm-up before the schedule", type=bounded_int(0), metavar="S")
    data_file: Path | None = option(
        None,
        "file to train on; implies --dataset file (default: none)",
        group=DATA,
        may_change=True,
        type=Path,
        metavar="FILE",
    )


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Train a small GPT on a text's bytes with PyTorch FSDP2 and tensor parallelism: every "
        "step is the same at any mesh, and a killed run resumes at any other."
    )
    parser = make_parser(Options, description, prog=prog, usage=usage)
    add_local_rank(parser)
    return parser


def mesh_of(options: Options, ranks: int) -> tuple[int, int]:
    """Return the numbers (dp, tp) of data-parallel and tensor-parallel ranks.

    Raises:
        ConfigError: the product of --mesh is not ``ranks``, or tp does not divide --heads.
    """
    mesh = options.mesh or f"{ranks}x1"
    dp, tp = _mesh_sizes(mesh)
    if dp * tp != ranks:
        raise ConfigError(f"--mesh {options.mesh} is not DPxTP with a product of {ranks}, the number of ranks")
    if options.heads % tp:
        raise ConfigError(f"--mesh {options.mesh} cuts {options.heads} heads into {tp}: choose a divisor of --heads")
    return dp, tp


def _mesh_sizes(mesh: str) -> tuple[int, int]:
    """Return the two numbers of a mesh such as 2x1, or (0, 0) if ``mesh`` has another form."""
    first, _, second = mesh.partition("x")
    if not first.isdecimal() or not second.isdecimal():
        return 0, 0
    return int(first), int(second)


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if --mesh does not fit ``ranks`` ranks per machine. The launch script calls this function."""
    _, machines = env.machine_count(os.environ)
    if not machines:
        mesh_of(options, ranks)
    elif machines.isdecimal():
        mesh_of(options, ranks * max(1, int(machines)))


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    options.lr = options.lr or 0.001
    options.dropout = options.dropout or None  # checkpoints of versions without this option contain None
    if options.width % (2 * options.heads):
        raise ConfigError(f"--width {options.width} is not a multiple of 2 x --heads {options.heads}: choose one")
    if options.autocast != "none" and options.dtype == "float64":
        raise ConfigError(f"--autocast {options.autocast} is less precise than --dtype float64: leave one of them out")
    if options.data_file is not None:
        if options.dataset not in (None, "file"):
            raise ConfigError(f"--data-file and --dataset {options.dataset}: leave one of them out")
        options.dataset = "file"
        options.data_file = options.data_file.absolute()
    options.resolve_dataset = partial(resolve, options.data_file)
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule depends on --epochs, but not on --max-steps
    return options


HOOKS: AppHooks[Options] = AppHooks(check_ranks=check_ranks)
