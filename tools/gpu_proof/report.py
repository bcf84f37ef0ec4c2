"""Read and write the results of one machine: a JSON file, its Markdown table, and a summary."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PASSED = "passed"
NOT_RUN = "not run"
ENDED_FIRST = f"{NOT_RUN}: the proof ended first"


class Results:
    """The results of the rows so far. The method `note` adds results, and writes all results to a file."""

    def __init__(self, path: Path, machine: Mapping[str, Any], date: str, keep: bool) -> None:
        """Read the file if ``keep`` is true. Exit with 2 if the file is from another machine."""
        self._path = path
        self._lock = threading.Lock()
        self.values: dict[str, Any] = {"machine": dict(machine), "date": date, "rows": []}
        if keep and path.exists():
            earlier = json.loads(path.read_text())
            if earlier["machine"] != self.values["machine"]:
                where = f"{path} is of another machine, {earlier['machine']}"
                print(f"error: {where}: name another --output", file=sys.stderr)
                sys.exit(2)
            self.values["rows"] = earlier["rows"]

    def note(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, replace rows with the same names, and write the file."""
        with self._lock:
            names = {row["row"] for row in rows}
            self.values["rows"] = [row for row in self.values["rows"] if row["row"] not in names] + list(rows)
            partial = self._path.with_suffix(".part")
            partial.write_text(json.dumps(self.values, indent=1) + "\n")
            os.replace(partial, self._path)


def machine_of(device: str) -> dict[str, Any]:
    """Return the device, the number of CPU cores and software versions. Exit with 2 if torch finds no GPU."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cpu":
        return {**versions, "device": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"}
    if not torch.cuda.is_available():
        print("error: --device cuda: torch finds no GPU here: use --device cpu, or another machine", file=sys.stderr)
        sys.exit(2)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions |= {"cuda": str(torch.version.cuda), "nccl": nccl, "driver": driver()}
    return {**versions, "device": torch.cuda.get_device_name(0), "cores": len(os.sched_getaffinity(0))}


def driver() -> str:
    """Return the version of NVIDIA's driver, or "unknown" if nvidia-smi is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def table(results: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a Markdown table of the results. For a row in ``names`` without a result, the table shows "not run"."""
    where = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    lines = [f"{where}; {results['date']}", "", "| row | outcome | seconds | figures |", "|---|---|---|---|"]
    found = {row["row"]: row for row in results["rows"]}
    for name in dict.fromkeys([*names, *found]):
        row = found.get(name, {"outcome": NOT_RUN, "seconds taken": ""})
        figures = {key: value for key, value in row.items() if key not in ("row", "outcome", "seconds taken")}
        shown = ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
        outcome = str(row["outcome"]).replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {outcome} | {row['seconds taken']} | {shown} |")
    return "\n".join(lines)


def _short(value: Any) -> str:
    """Return a value as text. Round a small float to two digits, and list the items of a dict."""
    if isinstance(value, float) and 0 < value < 1e-3:
        return f"{value:.1e}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return str(value)


def several_ranks_passed(results: Mapping[str, Any]) -> bool:
    """Return whether a row "bits", or a row "killed" with 2 or 3 ranks, passed over NCCL."""
    is_gpu = "nccl" in results["machine"]
    passed = [row["row"] for row in results["rows"] if row["outcome"] == PASSED]
    return is_gpu and any(re.match(r"bits|killed .*[23] ranks", name) for name in passed)


def summary(results: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return how many rows passed, failed and did not run, as text."""
    found = {row["row"]: str(row["outcome"]).partition(":")[0] for row in results["rows"]}
    outcomes = [found.get(name, NOT_RUN) for name in names]
    passed = outcomes.count(PASSED)
    failed = outcomes.count("failed")
    parts = [f"{passed} of {len(names)} rows passed"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{len(names) - passed - failed} did not run"] if passed + failed < len(names) else []
    return ", ".join(parts)
