"""Define the options of this app: those that every app has, and its own.

The launch script imports this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samestep import ConfigError, env
from samestep.options import (
    Options,
    Parser,
    add_common,
    add_local_rank,
    add_share_gpu,
    add_start_method,
    add_virtual_ranks,
    bounded_float,
    bounded_int,
)

TEXTS = Path(__file__).resolve().parent / "text"
SIZES = {"jargon": None, "jargon-64k": 2**16}  # number of bytes from the start of the embedded text; None: all
BLOCKS, BLOCK = 64, 2**16  # number and size of the blocks of a file that its fingerprint covers


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's size and of blocks spread over it, which is quick for any size. Raises OSError."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        for i in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def resolve(data_file: Path | None, name: str, data_dir: Path, fallback: bool = True) -> Any:
    """Return the text, as `samestep.data.datasets.resolve` returns a dataset. Raises ConfigError."""
    from samestep.data.files import DatasetInfo  # not at the top: the launch script does without it

    if name == "file" and data_file is None:
        raise ConfigError("--dataset file needs a file, also to resume a run: name it by --data-file")
    path = data_file or TEXTS / "jargon.txt"
    if os.path.exists(data_dir) and not os.path.isdir(data_dir):
        raise ConfigError(f"--data-dir: the data folder {data_dir} is not a folder")
    try:
        return DatasetInfo(name, path.resolve().parent, fingerprint=fingerprint(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}: name another --data-file") from error


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Train a small GPT on a text's bytes with PyTorch FSDP2 and tensor parallelism: every step is the "
        "same at any mesh, and a killed run resumes at any other.",
    )
    add_common(
        parser,
        epochs=1,
        global_batch_size=16,
        lr="0.001",
        datasets=(*SIZES, "file"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("mesh", "data_file", "checkpoint_activations"),
        metrics=("test_loss", "bits_per_byte"),
    )
    add_start_method(parser)
    add_virtual_ranks(parser, "FSDP reduces gradients in its own order")
    add_share_gpu(parser.group("Training"))
    default, count = "(default: %(default)s)", bounded_int(1)
    add = parser.group("Model").add_argument
    add("--layers", type=count, default=4, metavar="L", help=f"number of transformer blocks {default}")
    add("--width", type=bounded_int(2), default=128, metavar="W", help=f"features per byte {default}")
    add("--heads", type=count, default=4, metavar="H", help=f"attention heads per block {default}")
    add("--context", type=count, default=128, metavar="T", help=f"bytes per window; a sample is one window {default}")
    add(
        "--dropout",
        type=bounded_float(0.0, below=1.0),
        metavar="P",
        help="dropout probability of the embedding, and of what attention and feed-forward add (default: 0)",
    )
    add = parser.group("Training").add_argument
    add(
        "--mesh",
        metavar="DPxTP",
        help="data-parallel times tensor-parallel ranks, such as 2x2 (default: all data-parallel)",
    )
    recompute = "recompute activations in the backward pass, to save memory"
    add("--checkpoint-activations", action="store_true", help=recompute)
    add("--accumulate", type=count, default=1, metavar="K", help=f"micro-batches per global batch {default}")
    clip = "maximum norm of the global batch's gradient (default: none)"
    add("--clip-norm", type=bounded_float(0.0, above=True), metavar="C", help=clip)
    autocast = f"type of the forward pass; weights and optimizer stay in float32 {default}"
    add("--autocast", choices=("none", "bfloat16"), default="none", help=autocast)
    add("--dtype", choices=("float32", "float64"), default="float32", help=f"type of weights and gradients {default}")
    add(
        "--weight-decay",
        type=bounded_float(0.0),
        default=0.1,
        metavar="W",
        help=f"AdamW's weight decay, except for norms {default}",
    )
    schedule = f"schedule of the learning rate over --epochs {default}"
    add("--schedule", choices=("cosine", "constant"), default="cosine", help=schedule)
    warmup = f"steps of linear warm-up before the schedule {default}"
    add("--warmup-steps", type=bounded_int(0), default=30, metavar="S", help=warmup)
    add = parser.group("Data").add_argument
    add("--data-file", type=Path, metavar="FILE", help="file to train on; implies --dataset file (default: none)")
    add_local_rank(parser)
    return parser


def mesh_of(options: Options, ranks: int) -> tuple[int, int]:
    """Return the numbers (dp, tp) of data-parallel and tensor-parallel ranks.

    Raises ConfigError unless --mesh has ``ranks`` ranks in total, and cuts the heads into equal parts.
    """
    sizes = (options.mesh or f"{ranks}x1").split("x")
    dp, tp = (int(size) if size.isdecimal() else 0 for size in (*sizes, "0")[:2])
    if len(sizes) != 2 or dp * tp != ranks:
        raise ConfigError(f"--mesh {options.mesh} is not DPxTP with a product of {ranks}, the number of ranks")
    if options.heads % tp:
        raise ConfigError(f"--mesh {options.mesh} cuts {options.heads} heads into {tp}: choose a divisor of --heads")
    return dp, tp


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ConfigError if --mesh does not fit ``ranks`` ranks on each machine. The launch script calls it."""
    _, machines = env.machine_count(os.environ)
    if not machines:
        mesh_of(options, ranks)
    elif machines.isdecimal():
        mesh_of(options, ranks * max(1, int(machines)))


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in. Raises ConfigError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = 0.001
    options.dropout = options.dropout or None  # as in checkpoints that are older than the option
    if options.width % (2 * options.heads):
        raise ConfigError(f"--width {options.width} is not a multiple of 2 x --heads {options.heads}: choose one")
    if options.autocast != "none" and options.dtype == "float64":
        raise ConfigError(f"--autocast {options.autocast} is less precise than --dtype float64: leave one of them out")
    if options.data_file is not None:
        if options.dataset not in (None, "file"):
            raise ConfigError(f"--data-file and --dataset {options.dataset}: leave one of them out")
        options.dataset, options.data_file = "file", options.data_file.absolute()
    options.resolve_dataset = partial(resolve, options.data_file)
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule's horizon; --max-steps only stops before it
    return options
