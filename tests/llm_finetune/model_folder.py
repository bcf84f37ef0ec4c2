"""Make a folder with a small model and a chat template in Hugging Face's format."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness import ROOT, python_path

APP = ROOT / "apps" / "llm_finetune"
FOLDER = """
import json
from pathlib import Path
from model import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
from transformers import PreTrainedTokenizerFast

folder = Path({folder!r})
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
words = {{letter: i for i, letter in enumerate(letters)}}
inner = Tokenizer(models.BPE(vocab=words, merges=[]))
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
inner.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
tokenizer.chat_template = (
    "{{% for m in messages %}}#{{{{ m['role'] }}}}:{{{{ m['content'] }}}}<|im_end|>{{% endfor %}}"
    "{{% if add_generation_prompt %}}#assistant:{{% endif %}}"
)
tokenizer.save_pretrained(folder)
tiny_model().save_pretrained(folder)
"""


def run_program(*words: str) -> str:
    """Run a program of the app, and return its stdout."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(APP)}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_folder(folder: Path, more: str = "") -> None:
    """Write the model and its tokenizer to a folder.

    Args:
        folder: the new folder.
        more: Python code to run afterwards. It may use ``folder``, ``model`` and ``tokenizer``.
    """
    run_program("-c", FOLDER.format(folder=str(folder)) + more)
