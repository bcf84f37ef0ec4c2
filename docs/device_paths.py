"""Make docs/devices.md, which lists how each device path of each app was tested.

    python docs/device_paths.py            # writes the page, and the status lines of both READMEs
    python docs/device_paths.py --check    # only prints the differences

Each app lists its paths in tests/<app>/device_paths.py. The list must have every device that the app's --device
accepts, except auto. Each path with the status "run" or "simulated" must name an existing test. A path with the status
"proof" must list rows of tools/gpu_proof.sh, and the page shows the outcome of these rows from
benchmarks/gpu_proof.json. The program uses only the standard library.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_proof.report import PASSED, several_ranks_passed, table  # noqa: E402
from gpu_proof.rows import entries  # noqa: E402

PAGE = ROOT / "docs" / "devices.md"
GPU_PROOF = ROOT / "benchmarks" / "gpu_proof.json"
ROWS = [entry.name for entry in entries()]  # rows of tools/gpu_proof.sh
HOW = ("run", "simulated", "read", "proof")  # how a path was tested; "proof" means by rows of tools/gpu_proof.sh
ENGLISH_STATUS = (
    "The default tests run on CPU. ",
    " No app ran on Ascend ",
    "On one GPU, {passed} of {rows} checks passed; NCCL with several ranks has not run.",
    "On one GPU, shared by 1 to 4 ranks (NCCL), {passed} of {rows} checks passed; {failed}{left} did not run.",
    "{} failed, ",
)
# For each page: the phrases before and after the status, two texts of the status, and a text for failed rows. The
# second text of the status applies if a row with several ranks has passed.
STATUS = {
    "README.md": ENGLISH_STATUS,
    "docs/which_app.md": ENGLISH_STATUS,
    "README.zh.md": (
        "默认的测试只在 CPU 上运行。",
        "目前还没有任何应用在昇腾（Ascend）上跑过",
        "在一块 NVIDIA GPU 上，{rows} 项检查通过 {passed} 项，多个 rank 的 NCCL 尚未运行过。",
        "在一块 NVIDIA GPU 上（1 到 4 个 rank 经 NCCL 共用），{rows} 项检查通过 {passed} 项，{failed}{left} 项未运行。",
        "失败 {} 项，",
    ),
}
HEAD = """\
# Devices

Does an app run on your device? The tables list each device path of each app, with its status and its evidence.
`docs/device_paths.py` generates the tables from `tests/<app>/device_paths.py` and `benchmarks/gpu_proof.json`. Most
PyTorch apps have run on [one GPU](#one-gpu). No app has run on an Ascend device yet.

- **run**: the test in the last column, or the row of `tools/gpu_proof.sh` in the last column, ran on this device with
  this transport, on Linux with x86-64.
- **simulated**: the test runs the app's code, and replaces missing hardware or a missing function of a framework.
- **read**: no code ran. We compared the app's code with the framework's source file in the last column. Expect
  problems if you are the first user of this device path.
- **failed**, **not run**: a row of `tools/gpu_proof.sh` failed, or did not run on a GPU.
"""

ONE_GPU = """\
## One GPU

With `--share-gpu`, all ranks of a machine use the machine's first GPU, so you can test several ranks on one GPU. Use
this option only for tests and demonstrations, because several ranks on one GPU are slower than one rank. NCCL does not
support such a job, and refuses two ranks with the same host and GPU. The apps therefore set a different `NCCL_HOSTID`
for each rank. With NCCL 2.30 or later, the apps set `NCCL_MULTI_RANK_GPU_ENABLE=1` instead. Kills, hangs and
collectives then behave as on several GPUs, but the measured times do not apply to several GPUs.

To repeat the checks of the table below on a machine with one NVIDIA GPU, run this command. All rows take at most 9
minutes. To run half of the rows in at most 5 minutes, add `--half 1` or `--half 2`:

```bash
bash tools/gpu_proof.sh
```

`bash tools/gpu_proof.sh --device cpu` runs the same rows over gloo. `bash tools/gpu_proof.sh --table
benchmarks/gpu_proof.json` prints the table below. The weights of a run on a GPU and of a run on a CPU differ in their
last bits.

Earlier runs of these checks found four faults, which we have corrected:

- **gpt_fsdp could not resume on a GPU.** A restore put Adam's step counters on the CPU, but fused AdamW reads the
  counters on the GPU.
- **The benchmark's baseline loop aborted** if the version of torchvision matched the version of torch.
- **cifar_ddp with `--compile` trained with wrong gradients in torch 2.11**, also on a CPU. The compiler of torch 2.11
  computes wrong gradients after a function that ends in a cast. In torch 2.13, which cifar_ddp pins, the gradients were
  correct.
- **Convolutions in float32 used TF32**, which is torch's default on a GPU. The apps now disable TF32, and use only
  deterministic algorithms.
"""


class DevicePath(NamedTuple):
    """A combination of a device, a transport and a part of an app, and the evidence that the combination works."""

    device: str  # a value of --device
    transport: str
    part: str  # part of the program, or how the ranks are started
    how: str  # one of HOW
    by: str  # a folder of tests, file::function, a source (if ``how`` is "read"), or kinds of rows (if "proof")


def main() -> None:
    parser = argparse.ArgumentParser(description="make docs/devices.md")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    lists = {path.parent.name: listed(path) for path in sorted(ROOT.glob("tests/*/device_paths.py"))}
    problems = [f"tests/{app}/device_paths.py: {each}" for app in lists for each in mistakes(app, lists[app])]
    results = json.loads(GPU_PROOF.read_text())
    made = {PAGE: page(lists, results), **pages_with_status(results)}
    if check and not problems:
        wrong = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
        problems = [f"{path.relative_to(ROOT)} is not up to date: run docs/device_paths.py" for path in wrong]
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))
    if not check:
        for path, text in made.items():
            path.write_text(text)


def listed(path: Path) -> list[DevicePath]:
    return [DevicePath(*row) for row in runpy.run_path(str(path))["PATHS"]]


def mistakes(app: str, paths: list[DevicePath]) -> Iterator[str]:
    """Yield a message for each error in an app's list."""
    wanted, found = devices(app), {path.device for path in paths}
    if found != wanted:
        yield f"it has the devices {sorted(found)}, but --device takes {sorted(wanted)} beside auto"
    for path in paths:
        if path.how not in HOW:
            yield f"{path.how!r} is not one of {', '.join(HOW)}"
        elif path.how == "proof" and (unknown := _unknown_kinds(path.by)):
            yield f"tools/gpu_proof.sh has no row {unknown[0]!r}"
        elif path.how in ("run", "simulated") and not exists(path.by):
            yield f"there is no test {path.by}: name a folder of tests, or file.py::test_function"


def devices(app: str) -> set[str]:
    """Return the values, except auto, that the app or one of its commands accepts for --device."""
    sys.path.insert(0, str(ROOT / "core"))  # the app's options.py imports samestep
    parser = runpy.run_path(str(ROOT / "apps" / app / "options.py"))["build_parser"]()
    actions = [action for each in [parser, *parser.commands().values()] for action in each._actions]
    return {str(name) for action in actions if action.dest == "device" for name in action.choices or ()} - {"auto"}


def exists(by: str) -> bool:
    """Return whether ``by``, a folder of tests or file::function, exists."""
    file, _, function = by.partition("::")
    return (ROOT / file).is_dir() if not function else function in tests(ROOT / file)


def tests(file: Path) -> dict[str, bool]:
    """Return, by function name, whether a test function of a file has the mark `soak` of slow tests."""
    tree = ast.parse(file.read_text() if file.is_file() else "")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    soak = "pytest.mark.soak"
    return {each.name: soak in map(ast.unparse, each.decorator_list) for each in functions}


def _unknown_kinds(kinds: str) -> list[str]:
    return [kind for kind in kinds.split("; ") if not any(row.startswith(f"{kind} ") for row in ROWS)]


def outcomes_of(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the outcome of each row without its reason: "passed", "failed" or "not run"."""
    return {row["row"]: str(row["outcome"]).partition(":")[0] for row in results["rows"]}


def status(app: str, kinds: str, results: Mapping[str, Any]) -> str:
    """Return the outcome of an app's rows of the given kinds.

    Args:
        app: name of the app, such as mnist_ddp.
        kinds: kinds of rows, such as "bits; killed".
        results: content of benchmarks/gpu_proof.json.

    Returns:
        "run" if all rows passed, "failed" if one failed, otherwise "not run".
    """
    outcomes = outcomes_of(results)
    wanted = [row for kind in kinds.split("; ") for row in ROWS if re.match(rf"{kind} {app}\b", row)]
    found = [outcomes.get(row, "not run") for row in wanted]
    if found and all(outcome == PASSED for outcome in found):
        return "run"
    return "failed" if "failed" in found else "not run"


def pages_with_status(results: Mapping[str, Any]) -> dict[Path, str]:
    """Return the text of each page of STATUS, with the status that follows from the results."""
    texts = {}
    outcomes = [outcome for row, outcome in outcomes_of(results).items() if row in ROWS]
    passed = outcomes.count(PASSED)
    failed = outcomes.count("failed")
    left = len(ROWS) - passed - failed
    for name, (before, after, one, several, failures) in STATUS.items():
        claim = several if several_ranks_passed(results) else one
        words = failures.format(failed) if failed else ""
        claim = claim.format(passed=passed, rows=len(ROWS), failed=words, left=left)
        text = (ROOT / name).read_text()
        lines = [re.escape(phrase).replace(r"\ ", r"\s") for phrase in (before, after)]
        found = re.search(rf"{lines[0]}(.*?){lines[1]}", text, re.DOTALL)
        if not found:
            sys.exit(f"error: {name} lacks the status between {before!r} and {after!r}: write it")
        if " ".join(found[1].split()) != claim:
            text = text[: found.start(1)] + claim + text[found.end(1) :]
        texts[ROOT / name] = text
    return texts


def page(lists: dict[str, list[DevicePath]], results: Mapping[str, Any]) -> str:
    """Return the text of docs/devices.md."""
    lines = [HEAD]
    for app, paths in lists.items():
        lines += [f"## {app}", "", "| device | transport | part | status | shown by |", "|---|---|---|---|---|"]
        for path in paths:
            lines.append(f"| {path.device} | {path.transport} | {path.part} | {_shown(app, path, results)} |")
        lines.append("")
    return "\n".join([*lines, ONE_GPU, table(results, ROWS), ""])


def _shown(app: str, path: DevicePath, results: Mapping[str, Any]) -> str:
    """Return the two cells with the status and the evidence of a path."""
    if path.how == "read":
        return f"read | {path.by}"
    if path.how == "proof":
        return f"{status(app, path.by, results)} | [proof](#one-gpu): {path.by.replace('; ', ', ')}"
    file, _, function = path.by.partition("::")
    by = f'[test](../{file} "{function}")' if function else f"[{file}](../{file})"
    by += ", in the soak" if function and tests(ROOT / file).get(function) else ""
    return f"{path.how} | {by}"


if __name__ == "__main__":
    main()
