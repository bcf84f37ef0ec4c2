"""Make docs/devices.md: the state of testing of every device path of every app.

    python docs/device_paths.py            # writes the page
    python docs/device_paths.py --check    # compares, and prints the differences

Each app lists its own paths in tests/<app>/device_paths.py. A list must have the devices that the app's --device
accepts, except auto. Each path that was run or simulated must name a test that exists. Standard library only.
"""

from __future__ import annotations

import argparse
import ast
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "devices.md"
HOW = ("run", "simulated", "read")
HEAD = """\
# Devices

This page lists the device paths of every app, and how each was tested. `docs/device_paths.py` makes it from
`tests/<app>/device_paths.py`. The PyTorch apps have run on [one GPU](#one-gpu). No Ascend has been tested yet.

- **run**: the named test, or the named row of `tools/gpu_proof.sh`, ran on this device with this transport, on Linux,
  x86-64.
- **simulated**: the test runs the app's own code, and replaces missing hardware or a missing function of a framework.
- **read**: nothing has run. The app's code was compared with the named source of the framework. Expect problems if you
  are the first to run it.
"""

ONE_GPU = """\
## One GPU

`bash tools/gpu_proof.sh` on a machine with one NVIDIA GPU gave these results, in two calls. `python3 tools/gpu_proof.py
--table benchmarks/gpu_proof.json` prints them again. A run of `recovery` was killed, restarted, stopped and resumed.
It ended with the weights of an undisturbed run, to the bit.

On the first machine, two rows failed. The second machine ran some of the rows: `recovery gpt_fsdp` passed, `speed` did
not run, and mnist_lightning's rows failed for a missing package. The calls found four faults, all mended:

- **gpt_fsdp could not resume on a GPU.** It restored Adam's step counters to the CPU, and the fused AdamW reads them on
  the GPU.
- **The textbook loop of the benchmark aborted** where torchvision fits torch. The second call was cut before the row
  ended.
- **cifar_ddp with `--compile` trained wrongly with torch 2.11**, on a CPU too: that compiler has wrong gradients after
  a function that ends in a cast. With torch 2.13, which this app pins, gradients were right.
- **Convolutions in float32 were in TF32**, which is torch's default on a GPU. The apps switch it off, and take
  deterministic algorithms alone.
"""
GPU_PROOFS = [ROOT / "benchmarks" / name for name in ("gpu_proof.json", "gpu_proof_h100.json")]


class DevicePath(NamedTuple):
    """Describe a device, a transport and a part of an app that a test or a source covers."""

    device: str  # as --device has it
    transport: str
    part: str  # how the ranks are started, or which part of the program it is
    how: str  # one of HOW
    by: str  # a folder of tests or file::function; for "read" a source


def main() -> None:
    parser = argparse.ArgumentParser(description="make docs/devices.md")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    lists = {path.parent.name: listed(path) for path in sorted(ROOT.glob("tests/*/device_paths.py"))}
    problems = [f"tests/{app}/device_paths.py: {each}" for app in lists for each in mistakes(app, lists[app])]
    made = page(lists)
    if check and not problems and (not PAGE.exists() or PAGE.read_text() != made):
        problems = ["docs/devices.md is not what tests/<app>/device_paths.py say: run docs/device_paths.py"]
    if problems:
        sys.exit("\n".join(f"error: {problem}" for problem in problems))
    if not check:
        PAGE.write_text(made)


def listed(path: Path) -> list[DevicePath]:
    return [DevicePath(*row) for row in runpy.run_path(str(path))["PATHS"]]


def mistakes(app: str, paths: list[DevicePath]) -> Iterator[str]:
    """Yield what is wrong with an app's list."""
    wanted, found = devices(app), {path.device for path in paths}
    if found != wanted:
        yield f"it has the devices {sorted(found)}, but --device takes {sorted(wanted)} beside auto"
    for path in paths:
        if path.how not in HOW:
            yield f"{path.how!r} is not one of {', '.join(HOW)}"
        elif path.how != "read" and not exists(path.by):
            yield f"there is no test {path.by}: name a folder of tests, or file.py::test_function"


def devices(app: str) -> set[str]:
    """Return the values of the app's --device except auto; if the app has commands, all commands' values."""
    sys.path.insert(0, str(ROOT / "core"))  # an app's options.py needs nothing else
    parser = runpy.run_path(str(ROOT / "apps" / app / "options.py"))["build_parser"]()
    actions = [action for each in [parser, *parser.commands().values()] for action in each._actions]
    return {str(name) for action in actions if action.dest == "device" for name in action.choices or ()} - {"auto"}


def exists(by: str) -> bool:
    """Return whether this folder of tests, or this function in a file of tests, exists."""
    file, _, function = by.partition("::")
    return (ROOT / file).is_dir() if not function else function in tests(ROOT / file)


def tests(file: Path) -> dict[str, bool]:
    """Return the functions of a file of tests, and whether each is a soak test."""
    tree = ast.parse(file.read_text() if file.is_file() else "")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    soak = "pytest.mark.soak"
    return {each.name: soak in map(ast.unparse, each.decorator_list) for each in functions}


def page(lists: dict[str, list[DevicePath]]) -> str:
    """Return the text of docs/devices.md."""
    lines = [HEAD]
    for app, paths in lists.items():
        lines += [f"## {app}", "", "| device | transport | part | status | shown by |", "|---|---|---|---|---|"]
        for path in paths:
            file, _, function = path.by.partition("::")
            by = f'[test](../{file} "{function}")' if function else f"[{file}](../{file})"
            by = path.by if path.how == "read" else by
            by += ", in the soak" if function and tests(ROOT / file).get(function) else ""
            lines.append(f"| {path.device} | {path.transport} | {path.part} | {path.how} | {by} |")
        lines.append("")
    table = runpy.run_path(str(ROOT / "tools" / "gpu_proof.py"))["table"]
    tables = [table(json.loads(path.read_text())) for path in GPU_PROOFS]
    return "\n".join([*lines, ONE_GPU, "\n\n".join(tables), ""])


if __name__ == "__main__":
    main()
