"""Test that nothing in the repository loads a pickle, because a pickle can run its author's code."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# CALLS are functions that unpickle. COLLECTIVES send Python objects as pickles.
CALLS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "torch.load",
    "paddle.load",
    "np.load",
    "numpy.load",
    "pd.read_pickle",
    "ms.load_checkpoint",
}
COLLECTIVES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"}
COLLECTIVES |= {"broadcast_object", "allgather_object", "broadcast_optimizer_state"}  # functions of Horovod


def findings(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rpartition(".")[2] in COLLECTIVES:
                found.append(name)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


def test_the_search_finds_each_kind_of_pickle() -> None:
    bad = ["import pickle", "from joblib import load", "import torch\ntorch.load('x')", "dist.broadcast_object_list(x)"]
    assert all(findings(source) for source in bad)
    assert not findings("import json\njson.load(open('x'))\nsafetensors.numpy.load(b'')")


def test_no_file_loads_a_pickle() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    assert len(files) > 10
    found = {str(file.relative_to(ROOT)): findings(file.read_text()) for file in files}
    found.pop("docs/usual_loop.py")  # a tutorial's loop, which loads with weights_only
    found.pop("tests/check/program/train.py")  # a typical script, which loads with weights_only
    found.pop("tests/check/scripts/training.py")  # the same
    found.pop("tests/check/scripts/no_checksum.py")  # the same
    found.pop("tests/kit/test_own_loop.py")  # the test reads a loop's file with weights_only
    found.pop("tests/recipes/test_recipes.py")  # the same
    found.pop("tests/kit/test_samplers.py")  # the test sends batches as torch sends them to workers
    found.pop("tests/core/test_checkpoint.py")  # the test writes a harmful pickle, to show that nothing loads it
    assert {file: names for file, names in found.items() if names} == {}
