"""Define the scoreboard's programs, with their data and the commands from their documentation."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import sources

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TORCHRUN = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
HOROVODRUN = "horovodrun --gloo --disable-cache"
HOROVOD = "--no-cuda --epochs=3"
NEWEST = "$(ls -d saved/epoch_* 2>/dev/null | sort -V | tail -n 1)"
# This script starts $1 ranks under two names of this host, because Horovod starts no further rank on a host on which a
# rank has failed.
ELASTIC = f"""printf '#!/bin/sh\\necho localhost:%d; [ %d = 0 ] || echo 127.0.0.1:%d\\n' \\
  $((($1 + 1) / 2)) $(($1 / 2)) $(($1 / 2)) >discover_hosts.sh
chmod +x discover_hosts.sh
exec {HOROVODRUN} -np $1 --min-np 1 --network-interfaces lo --host-discovery-script ./discover_hosts.sh \\
  python pytorch_mnist_elastic.py {HOROVOD} --batch-size=$((480 / $1))
"""
# This script starts the lighthouse, and one torchrun for each of $1 replica groups. TERM also stops these children.
TORCHFT = """trap 'trap - TERM; kill 0' TERM
probe='import socket; probe = socket.socket(); probe.bind(("127.0.0.1", 0)); print(probe.getsockname()[1])'
export RUST_BACKTRACE=1 NUM_REPLICA_GROUPS=$1 TORCHFT_LIGHTHOUSE=http://127.0.0.1:$(python -c "$probe")
torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000 --bind ${TORCHFT_LIGHTHOUSE#*//} &
service=$!
for group in $(seq 0 $(($1 - 1))); do
  export REPLICA_GROUP_ID=$group
  torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=1 --max-restarts=10 train_ddp.py &
  groups="$groups $!"
done
code=0
for group in $groups; do wait $group || code=$?; done
kill $service
exit $code
"""


def mnist(folder: Path, name: str = "MNIST") -> None:
    """Write mnist-5k in the layout of torchvision's MNIST or FashionMNIST.

    The files omit the last example, so that the number of examples is odd.
    """
    raw = folder / "data" / name / "raw"
    raw.mkdir(parents=True)
    for path in (ROOT / "core" / "samestep" / "data" / "mnist-5k").glob("*.gz"):
        content = bytearray(gzip.decompress(path.read_bytes()))
        content[4:8] = (int.from_bytes(content[4:8], "big") - 1).to_bytes(4, "big")
        (raw / path.stem).write_bytes(content[: -784 if "images" in path.name else -1])


def fashion_mnist(folder: Path) -> None:
    """Write mnist-5k as FashionMNIST into the home folder, where Ray's example looks for it."""
    mnist(folder.parent / "home", "FashionMNIST")


def jpegs(folder: Path) -> None:
    """Write training digits of mnist-5k as JPEG files, named as in the dataset of Accelerate's example.

    The example trains on 3195 files and evaluates on 799. Both numbers are odd.
    """
    from PIL import Image
    from samestep.data.datasets import load

    (folder / "images").mkdir()
    digits = load("mnist-5k", folder)
    for number, (image, label) in enumerate(zip(digits.train_images[:3994], digits.train_labels)):  # 3195 + 799
        Image.fromarray(image).save(folder / "images" / f"digit-{label}_{number}.jpg")


SIZES = {
    "vocab_size": 201,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SHAPES = {
    "model.embed_tokens.weight": (201, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (201, 32),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.mlp.gate_proj.weight": (64, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (32, 32) for name in "qkvo"},
}


def language_model(folder: Path) -> None:
    """Write 999 texts of 17 words, a tokenizer and a small Llama.

    The function does not import transformers, because that import needs an adapter.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    draw = random.Random(0)
    words = [f"w{number}" for number in range(200)]
    lines = [" ".join(draw.choices(words, k=17)) for _ in range(999)]
    (folder / "stories.txt").write_text("\n".join(lines) + "\n")
    model = folder / "model"
    model.mkdir()
    end = "</s>"
    vocabulary = {word: number for number, word in enumerate([end, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (model / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    of_model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 32, **SIZES}
    (model / "config.json").write_text(json.dumps(of_model))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in SHAPES.items():
        drawn = torch.randn(shape, generator=generator) * 0.02
        weights[name] = torch.ones(shape) if "norm" in name else drawn
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def no_data(folder: Path) -> None:
    """Write nothing, because the program generates its inputs."""


class Subject(NamedTuple):
    """A program, with its command and options for `samestep check`. ``origin`` is the name of an example's folder."""

    command: Sequence[str]
    packages: Sequence[str] = ("torch",)
    origin: str | None = None
    prepare: Callable[[Path], None] = mnist
    options: Sequence[str] = (f"--adapter={HERE / 'cpu_torchvision.py'}",)
    environ: Mapping[str, str] = {}
    script: str = ""  # content of run.sh, which the command calls
    kit: bool = False  # whether to apply the edits that add samestep.torch

    def put(self, folder: Path, given: Path | None) -> None:
        """Write the program and its data into a new folder."""
        if self.origin is None:
            shutil.copytree(ROOT / "apps" / "mnist_ddp", folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
            return
        folder.mkdir()
        sources.put(self.origin, folder, given=given, kit=self.kit)
        self.prepare(folder)
        if self.script:
            (folder / "run.sh").write_text(self.script)


OPTIONS = "--timeout 20 --dataset mnist-5k --device cpu --epochs 3 --global-batch-size 481 --checkpoint-every 3"
PYTORCH = "multigpu_torchrun.py 3 1 --batch_size={480/n}"
ACCELERATE_KIT = f"{TORCHRUN} complete_cv_example.py --cpu --data_dir=images --output_dir=saved"
ACCELERATE = f"{ACCELERATE_KIT} --checkpointing_steps=epoch"
LIGHTNING = """python backbone_image_classifier.py --trainer.accelerator=cpu --trainer.strategy=ddp
--trainer.devices={n} --trainer.max_epochs=3 --trainer.enable_progress_bar=false --data.batch_size={480/n}"""
TRAINER = f"""{TORCHRUN} nd_parallel_trainer.py --device-type=cpu --model-name=model --sequence-length=16
--checkpoint-frequency=3 --save-dir=saved"""
RAY = "python torch_fashion_mnist_example.py {n}"
OF_RAY = {"RAY_OVERRIDE_RESOURCES": f'{{"CPU": {max(4, len(os.sched_getaffinity(0)))}}}'}
DCP = "python async_checkpointing_example.py {n}"
OF_DCP = [f"--adapter={HERE / 'dcp' / 'adapter.py'}"]
OF_TRAINER = "torch", "accelerate", "transformers", "datasets"
CPU = Subject([]).options

SUBJECTS: dict[str, Subject] = {
    "mnist_ddp": Subject(
        f"samestep run -n 2 --start-method fork --run-dir run train.py {OPTIONS}".split(),
        options=[f"--adapter={ROOT / 'tests' / 'check' / 'program' / 'adapter.py'}"],
    ),
    "mnist_elastic": Subject(
        f"bash {ROOT}/scripts/run_mnist_elastic.sh {{n}} --run-dir run {OPTIONS}".split(),
        ("torch", "torchft"),
        options=[f"--adapter={ROOT / 'tests' / 'check' / 'program' / 'adapter_elastic.py'}"],
        environ={"PYTHON": sys.executable},
    ),
    "pytorch": Subject(f"{TORCHRUN} {PYTORCH}".split(), origin="pytorch"),
    "pytorch-restarts": Subject(f"{TORCHRUN} --max-restarts=3 {PYTORCH}".split(), origin="pytorch"),
    "pytorch-kit": Subject(f"{TORCHRUN} {PYTORCH}".split(), origin="pytorch", kit=True),
    "accelerate": Subject(
        ACCELERATE.split(),
        ("torch", "accelerate", "timm"),
        "accelerate",
        jpegs,
        (
            *CPU,
            "--link=images",
            f"--resume-command=sh -c '{ACCELERATE.replace('=2', '={n}')} --resume_from_checkpoint={NEWEST}'",
        ),
    ),
    "accelerate-kit": Subject(
        ACCELERATE_KIT.split(),
        ("torch", "accelerate", "timm"),
        "accelerate",
        jpegs,
        (*CPU, "--link=images"),
        kit=True,
    ),
    "lightning": Subject(LIGHTNING.split(), ("torch", "lightning"), "lightning"),
    "lightning-kit": Subject(
        [*LIGHTNING.split(), "--trainer.use_distributed_sampler=false"], ("torch", "lightning"), "lightning", kit=True
    ),
    "dcp": Subject(DCP.split(), origin="dcp", prepare=no_data, options=OF_DCP),
    "dcp-kit": Subject(DCP.split(), origin="dcp", prepare=no_data, options=OF_DCP, kit=True),
    "trainer": Subject(TRAINER.split(), OF_TRAINER, "trainer", language_model, CPU, {"HF_HUB_OFFLINE": "1"}),
    "trainer-kit": Subject(
        TRAINER.split(), OF_TRAINER, "trainer", language_model, CPU, {"HF_HUB_OFFLINE": "1"}, kit=True
    ),
    "horovod": Subject(
        f"{HOROVODRUN} -np 2 python pytorch_mnist.py {HOROVOD} --batch-size={{480/n}}".split(),
        ("torch", "horovod"),
        "horovod",
    ),
    "horovod-elastic": Subject("sh run.sh {n}".split(), ("torch", "horovod"), "horovod-elastic", script=ELASTIC),
    "torchft": Subject("sh run.sh {n}".split(), ("torch", "torchft"), "torchft", script=TORCHFT),
    "ray": Subject(RAY.split(), ("torch", "ray"), "ray", fashion_mnist, environ=OF_RAY),
    "ray-kit": Subject(RAY.split(), ("torch", "ray"), "ray", fashion_mnist, environ=OF_RAY, kit=True),
}
