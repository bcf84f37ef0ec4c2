"""Define the options of this app, which extend the options that all apps share.

The launch script imports this module with the system's Python, so the module imports no third-party package.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from samestep import ConfigError
from samestep.hooks import AppHooks
from samestep.options import (
    DATA,
    MODEL,
    CommonOptions,
    Parser,
    absent_option,
    add_local_rank,
    bounded_float,
    bounded_int,
    dataset_option,
    device_option,
    lr_option,
    make_parser,
    option,
    parse_as,
    share_gpu_option,
    start_method_option,
    threads_option,
    trace_every_option,
    virtual_ranks_option,
)

TEXT = Path(__file__).resolve().parent / "text" / "definitions.jsonl"
SIZES = {"definitions-240": 240, "definitions": None}  # rows from the start of the embedded file; None means all
MODELS = ("smollm2-135m", "tiny")  # names for --model; any other value of --model is a folder
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = 64  # number of blocks that a file's fingerprint covers
BLOCK = 2**16  # size of a block, in bytes


fraction = bounded_float(0.0, below=1.0)
positive = bounded_float(0.0, above=True)
count = bounded_int(1)


@dataclass
class Options(CommonOptions):
    """The options of this app. The sizes of global batches are numbers of tokens.

    Attributes:
        model_sha256: fingerprint of the model's files, or None for the model tiny.
        requested_model: value of --model on the command line, or None.
    """

    RESULT_FIELDS = ("dataset", "epochs", "step_tokens", "seed", "dtype", "model")
    __slots__ = ("requested_model",)

    epochs: int = 1
    global_batch_size: int = absent_option(0)
    lr: float = lr_option("0.001 with LoRA, 1e-5 without")
    device: str = device_option("auto", "cpu", "cuda")
    dataset: str = dataset_option(*SIZES, "file")
    straggler: float = 0.0
    start_method: str | None = start_method_option()
    virtual_ranks: int | None = virtual_ranks_option()
    threads: int | None = threads_option()
    trace_every: int = trace_every_option()
    share_gpu: bool = share_gpu_option()
    model: str = option(
        None,
        "smollm2-135m, tiny (random weights, for tests), or a folder in Hugging Face's format "
        "(default: smollm2-135m; tiny if it cannot be downloaded)",
        group=MODEL,
        metavar="MODEL",
    )
    model_sha256: str | None = None
    lora: int = option(8, "rank of LoRA; 0 trains all weights", group=MODEL, type=bounded_int(0), metavar="R")
    lora_alpha: float = option(None, "LoRA's scale is A / R (default: 2 R)", group=MODEL, type=positive, metavar="A")
    lora_dropout: float = option(
        0.0, "dropout probability before LoRA's matrices", group=MODEL, type=fraction, metavar="P"
    )
    lora_targets: str = option(
        ",".join(LINEAR_LAYERS),
        "names of the layers with LoRA, separated by commas (default: all seven linear layers of a block)",
        group=MODEL,
        metavar="NAMES",
    )
    step_tokens: int = option(512, "tokens per step, over all ranks", type=count, metavar="T")
    micro_tokens: int = option(256, "tokens per micro-batch with padding; bounds the memory", type=count, metavar="M")
    pack: bool = option(False, "compute the samples of a micro-batch in one row, without padding")
    clip_norm: float = option(1.0, "maximum norm of the gradient", type=positive, metavar="C")
    weight_decay: float = option(0.0, "AdamW's weight decay, except for norms", type=bounded_float(0.0), metavar="W")
    schedule: str = option("cosine", "schedule of the learning rate over --epochs", choices=("cosine", "constant"))
    warmup_steps: int = option(2, "steps of linear warm-up before the schedule", type=bounded_int(0), metavar="S")
    autocast: str = option(
        "none",
        "type of the forward pass; bfloat16 is slow on CPUs without AVX512-BF16",
        choices=("none", "bfloat16"),
    )
    dtype: str = option("float32", "type of weights and gradients", choices=("float32", "float64"))
    data_file: Path | None = option(
        None,
        "JSON Lines with prompt and completion, or messages; implies --dataset file (default: none)",
        group=DATA,
        may_change=True,
        type=Path,
        metavar="FILE",
    )
    max_length: int = option(
        256, "tokens of a sample; longer samples are left out", group=DATA, type=bounded_int(2), metavar="L"
    )


def build_parser(prog: str | None = None, usage: str | None = None) -> Parser:
    """Return the command-line parser of this app."""
    description = (
        "Fine-tune a language model on prompts and completions with PyTorch DistributedDataParallel: every "
        "step is the same at any number of ranks, and a killed run resumes."
    )
    parser = make_parser(Options, description, prog=prog, usage=usage)
    add_local_rank(parser)
    return parser


def parse(argv: Sequence[str], prog: str | None = None, usage: str | None = None) -> Options:
    """Return the options with all defaults filled in.

    Raises:
        ConfigError: an option is invalid, or options contradict each other.
    """
    options = parse_as(Options, build_parser(prog, usage), argv)
    check(options)
    if not options.lr:
        options.lr = 1e-3 if options.lora else 1e-5
    options.lora_alpha = options.lora_alpha or 2.0 * options.lora
    if options.data_file is not None:
        options.dataset = "file"
        options.data_file = options.data_file.absolute()
    options.requested_model = options.model
    set_model(options)
    options.resolve_dataset = partial(resolve, options.data_file)
    if options.schedule != "constant":
        options.resume_pinned = ("epochs",)  # the schedule depends on --epochs, but not on --max-steps
    return options


def check(options: Options) -> None:
    """Raise ConfigError for options that contradict each other."""
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
    if options.data_file is not None and options.dataset not in (None, "file"):
        raise ConfigError(f"--data-file and --dataset {options.dataset}: leave one of them out")


# --- the data ------------------------------------------------------------------------------------------------------


def resolve(data_file: Path | None, name: str, data_dir: Path, fallback: bool = True) -> Any:
    """Return the name, folder and fingerprint of the data, as `samestep.data.datasets.resolve` does for a dataset.

    Raises:
        ConfigError: ``name`` is "file" without a ``data_file``, the file or the data folder cannot be used, or a row is
            invalid.
    """
    from rows import read_rows  # not at the top, because the first stage of the launch script does not need it
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
    """Return the cache folder of SmolLM2."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "samestep", "smollm2-135m-instruct")


def is_cached() -> bool:
    """Return whether the cache contains SmolLM2. An existing folder is complete: base.py creates it atomically."""
    return (cache_folder() / "config.json").is_file()


def model_folder(model: str) -> Path | None:
    """Return the folder of a model, or None for "tiny"."""
    if model == "tiny":
        return None
    if model in MODELS:
        return cache_folder()
    return Path(model)


def set_model(options: Options) -> None:
    """Set ``model`` and ``model_sha256`` in ``options``. A resume must have the same values.

    The default of --model is smollm2-135m if the cache contains it, otherwise tiny.

    Raises:
        ConfigError: the model's folder lacks config.json or *.safetensors, or a file cannot be read.
    """
    default = "smollm2-135m" if is_cached() else "tiny"
    options.model = options.requested_model or default
    if options.model not in MODELS:
        options.model = os.path.abspath(options.model)
    folder = model_folder(options.model)
    is_missing = options.model == "smollm2-135m" and not is_cached()
    options.model_sha256 = None
    if folder and not is_missing:
        options.model_sha256 = fingerprint(folder)


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the name, the size and BLOCKS blocks of each of a model's files.

    The function reads only these blocks, because reading large files would need too much time.

    Raises:
        ConfigError: the folder lacks config.json or *.safetensors, or a file cannot be read.
    """
    if not (folder / "config.json").is_file():
        choices = ", ".join(MODELS)
        raise ConfigError(f"--model {folder} has no config.json: choose from {choices}, or name a model's folder")
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {folder} has no *.safetensors: convert its weights, as pickle is never loaded")
    paths = [*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("*.safetensors")]
    digest = hashlib.sha256()
    try:
        for path in sorted(paths):
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
    """Download SmolLM2 to the cache if the run needs it.

    The launch script calls this function in the app's environment, before a rank starts. If the download fails and
    --model is not given, the function logs a warning, and the run trains the model tiny.

    Raises:
        ConfigError: --model is smollm2-135m, and SmolLM2 cannot be downloaded.
    """
    if options.requested_model not in (None, "smollm2-135m") or is_cached():
        return
    from samestep import log

    program = Path(__file__).resolve().with_name("base.py")
    done = subprocess.run([sys.executable, str(program)], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        set_model(options)
        return
    lines = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
    reason = lines[-1].removeprefix("error: ")
    if options.requested_model:
        raise ConfigError(f"--model smollm2-135m cannot be had: {reason}: choose --model tiny, or name a folder")
    log.warning(
        f"SmolLM2 cannot be had ({reason}): training the tiny model instead, whose weights are random; for a real "
        "model, name a folder by --model"
    )


HOOKS: AppHooks[Options] = AppHooks(check_installed=check_installed)
