"""Define the options of this app: those that every app has, and its own.

The launch script imports this module on the system's Python, so it uses the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from samestep import ConfigError
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

TEXT = Path(__file__).resolve().parent / "text" / "definitions.jsonl"
SIZES = {"definitions-240": 240, "definitions": None}  # rows from the start of the embedded file, or None for all
MODELS = ("smollm2-135m", "tiny")  # names; any other --model is a folder
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = 64  # of a file that a fingerprint covers
BLOCK = 2**16  # bytes


class TokenOptions(Options):
    """The options of an app whose global batches are measured in tokens.

    Attributes:
        requested_model: --model as given, or None.
    """

    RESULT_FIELDS = ("dataset", "epochs", "step_tokens", "seed", "dtype", "model")
    __slots__ = ("requested_model",)


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog=prog,
        usage=usage,
        description="Fine-tune a language model on prompts and completions with PyTorch DistributedDataParallel: every "
        "step is the same at any number of ranks, and a killed run resumes.",
    )
    parser.kind = TokenOptions
    add_common(
        parser,
        epochs=1,
        global_batch_size=None,
        lr="0.001 with LoRA, 1e-5 without",
        datasets=(*SIZES, "file"),
        devices=("auto", "cpu", "cuda"),
        resume_mutable=("data_file",),
    )
    parser.set_defaults(straggler=0.0)
    add_start_method(parser)
    add_virtual_ranks(parser)
    add_share_gpu(parser.group("Training"))
    default, count, positive = "(default: %(default)s)", bounded_int(1), bounded_float(0.0, above=True)
    add = parser.group("Model").add_argument
    models = "smollm2-135m, tiny (random weights, for tests), or a folder in Hugging Face's format"
    fallback = "(default: smollm2-135m; tiny if it cannot be downloaded)"
    add("--model", metavar="MODEL", help=f"{models} {fallback}")
    add("--lora", type=bounded_int(0), default=8, metavar="R", help=f"rank of LoRA; 0 trains all weights {default}")
    add("--lora-alpha", type=positive, metavar="A", help="LoRA's scale is A / R (default: 2 R)")
    dropout = f"dropout probability before LoRA's matrices {default}"
    add("--lora-dropout", type=bounded_float(0.0, below=1.0), default=0.0, metavar="P", help=dropout)
    layers = "names of the layers with LoRA, separated by commas (default: all seven linear layers of a block)"
    add("--lora-targets", default=",".join(LINEAR_LAYERS), metavar="NAMES", help=layers)
    add = parser.group("Training").add_argument
    tokens = f"tokens per step, over all ranks {default}"
    add("--step-tokens", type=count, default=512, metavar="T", help=tokens)
    tokens = f"tokens per micro-batch with padding; bounds the memory {default}"
    add("--micro-tokens", type=count, default=256, metavar="M", help=tokens)
    add("--clip-norm", type=positive, default=1.0, metavar="C", help=f"maximum norm of the gradient {default}")
    decay = f"AdamW's weight decay, except for norms {default}"
    add("--weight-decay", type=bounded_float(0.0), default=0.0, metavar="W", help=decay)
    schedule = f"schedule of the learning rate over --epochs {default}"
    add("--schedule", choices=("cosine", "constant"), default="cosine", help=schedule)
    warmup = f"steps of linear warm-up before the schedule {default}"
    add("--warmup-steps", type=bounded_int(0), default=2, metavar="S", help=warmup)
    autocast = "type of the forward pass; bfloat16 is slow on CPUs without AVX512-BF16"
    add("--autocast", choices=("none", "bfloat16"), default="none", help=f"{autocast} {default}")
    add("--dtype", choices=("float32", "float64"), default="float32", help=f"type of weights and gradients {default}")
    add = parser.group("Data").add_argument
    rows = "JSON Lines with prompt and completion, or messages; implies --dataset file (default: none)"
    add("--data-file", type=Path, metavar="FILE", help=rows)
    longest = f"tokens of a sample; longer samples are left out {default}"
    add("--max-length", type=bounded_int(2), default=256, metavar="L", help=longest)
    add_local_rank(parser)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in. Raises ConfigError for a mistake."""
    options = build_parser(prog, usage).parse(argv)
    if options.lr is None:
        options.lr = 1e-3 if options.lora else 1e-5
    if options.lora_alpha is None:
        options.lora_alpha = 2.0 * options.lora
    if options.autocast != "none" and options.dtype == "float64":
        raise ConfigError(f"--autocast {options.autocast} is less precise than --dtype float64: leave one of them out")
    if options.micro_tokens < options.max_length:
        raise ConfigError(
            f"--micro-tokens {options.micro_tokens} is below --max-length {options.max_length}: raise it, or lower "
            "--max-length"
        )
    if options.straggler:
        raise ConfigError(
            "--straggler: ranks differ in their numbers of micro-batches, so it is off here: leave it out"
        )
    if options.data_file is not None:
        if options.dataset not in (None, "file"):
            raise ConfigError(f"--data-file and --dataset {options.dataset}: leave one of them out")
        options.dataset, options.data_file = "file", options.data_file.absolute()
    options.requested_model = options.model
    set_model(options)
    options.resolve_dataset = partial(resolve, options.data_file)
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule's horizon; --max-steps only stops before it
    return options


# --- the data ------------------------------------------------------------------------------------------------------


def resolve(data_file: Path | None, name: str, data_dir: Path, fallback: bool = True) -> Any:
    """Return the data, as `samestep.data.datasets.resolve` returns a dataset. Raises ConfigError for a bad row."""
    from rows import read_rows  # not at the top: the first stage of the launch script does without them
    from samestep.data.files import DatasetInfo

    if name == "file" and data_file is None:
        raise ConfigError("--dataset file needs a file, also to resume a run: name it by --data-file")
    if os.path.exists(data_dir) and not os.path.isdir(data_dir):
        raise ConfigError(f"--data-dir: the data folder {data_dir} is not a folder")
    path = data_file or TEXT
    read_rows(path)
    return DatasetInfo(name, path.resolve().parent, fingerprint=hashlib.sha256(path.read_bytes()).hexdigest())


# --- the model -----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder in which SmolLM2 is kept in Hugging Face's format."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "samestep", "smollm2-135m-instruct")


def is_cached() -> bool:
    """Return whether the cache has SmolLM2. Its folder appears whole."""
    return (cache_folder() / "config.json").is_file()


def model_folder(model: str) -> Path | None:
    """Return the folder of a model, or None for tiny."""
    if model == "tiny":
        return None
    return cache_folder() if model in MODELS else Path(model)


def set_model(options: Options) -> None:
    """Set the model's name, and the fingerprint of its files. A resume must have the same.

    Without --model, the model is smollm2-135m if the cache has it, and else tiny. Raises ConfigError for a folder
    without a model.
    """
    default = "smollm2-135m" if is_cached() else "tiny"
    options.model = options.requested_model or default
    if options.model not in MODELS:
        options.model = os.path.abspath(options.model)
    folder = model_folder(options.model)
    is_missing = options.model == "smollm2-135m" and not is_cached()
    options.model_sha256 = None if folder is None or is_missing else fingerprint(folder)


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of a model's files: JSON files whole, weights by blocks, which is quick for any size.

    Raises:
        ConfigError: the folder lacks config.json or weights in safetensors.
    """
    if not (folder / "config.json").is_file():
        choices = ", ".join(MODELS)
        raise ConfigError(f"--model {folder} has no config.json: choose from {choices}, or name a model's folder")
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {folder} has no *.safetensors: convert its weights, as pickle is never loaded")
    digest = hashlib.sha256()
    try:
        for path in sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("*.safetensors")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for i in range(BLOCKS):
                    file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
                    digest.update(file.read(BLOCK))
    except OSError as error:
        raise ConfigError(f"cannot read --model {folder}: {error.strerror}: name another folder") from None
    return digest.hexdigest()


def check_installed(options: Options, ranks: int) -> None:
    """Put SmolLM2 into the cache before a rank starts, if the run needs it and the cache lacks it.

    The launch script calls this function in the app's environment.

    Raises:
        ConfigError: the user asked for the model by name, and it cannot be downloaded.
    """
    if options.requested_model not in (None, "smollm2-135m") or is_cached():
        return
    from samestep import log

    program = Path(__file__).resolve().with_name("base.py")
    done = subprocess.run([sys.executable, str(program)], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        set_model(options)
        return
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
    if options.requested_model:
        raise ConfigError(f"--model smollm2-135m cannot be had: {reason}: choose --model tiny, or name a folder")
    log.warning(
        f"SmolLM2 cannot be had ({reason}): training the tiny model instead, whose weights are random; for a real "
        "model, name a folder by --model"
    )
