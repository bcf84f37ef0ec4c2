"""Find the Python versions for which an app's pins and all their dependencies have wheels.

    bash scripts/test.sh -e pythons                 # writes python_versions.json and the lines `# python:`
    bash scripts/test.sh -e pythons -- --check      # only compares

uv resolves each app's requirements.in, together with core's own requirements, for each Python, from metadata alone. uv
needs a minute for all apps, and downloads 20 MB. uv resolves for Linux on x86-64 with glibc 2.28 or newer.

The program records the versions in python_versions.json beside this file, and writes them to the line
``# python: 3.11 3.12`` of each requirements.in. The launch script looks for Pythons in the order of this line. If
wheels exist for a Python that the app does not support, a line of requirements.in lists the supported versions::

    # python limit: 3.11, because ...

`tests/test_layout.py` compares the record with the pins and with these lines, without a network.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"
TRACKERS = ROOT / "launch" / "samestep_launch" / "tracker_locks"
RECORD = Path(__file__).with_suffix(".json")
PYTHONS = ("3.11", "3.10", "3.12", "3.13", "3.14")  # the launch script looks for the tests' Python first
PLATFORM = "x86_64-manylinux_2_28"
LINE = re.compile(r"^# python: (.*)$", re.MULTILINE)
LIMIT = re.compile(r"^# python limit: ([\d. ]+), because ", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description="derive the Pythons that each app can have from its pins")
    parser.add_argument("--check", action="store_true", help="compare with what is recorded, and write nothing")
    check = parser.parse_args().check
    found = {app_of(path): resolve(path) for path in requirements()}
    if check:
        problems = [
            f"{path}: {problem}"
            for path in requirements()
            for problem in differences(path.read_text(), found[app_of(path)])
        ]
        recorded = json.loads(RECORD.read_text())
        problems += [f"{RECORD.name}: {app} is not what uv finds" for app in found if found[app] != recorded.get(app)]
        if problems:
            sys.exit("\n".join(f"error: {problem}: bash scripts/test.sh -e pythons mends it" for problem in problems))
        return
    RECORD.write_text(json.dumps(found, indent=2) + "\n")
    for path in requirements():
        text = path.read_text()
        path.write_text(LINE.sub(f"# python: {' '.join(pythons(text, found[app_of(path)]))}", text))


def requirements() -> list[Path]:
    """Return the paths of the requirements.in of each app and of --track."""
    return sorted([*ROOT.glob("apps/*/requirements.in"), TRACKERS / "requirements.in"])


def app_of(path: Path) -> str:
    """Return the name of the app that a requirements.in belongs to, or "trackers"."""
    if path.parent == TRACKERS:
        return "trackers"
    return path.parent.name


def resolve(path: Path) -> dict[str, Any]:
    """Return an app's pins, the Pythons for which uv finds all wheels, and the reason for each other Python.

    Exit with an error if uv fails for a reason other than missing wheels.
    """
    refused: dict[str, str] = {}
    for python in PYTHONS:
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--native-tls",
            f"--python={sys.executable}",
        ]
        command += [f"--python-version={python}", f"--python-platform={PLATFORM}", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, str(path), str(PROJECT)], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode != 0:
            said = " ".join(done.stderr.split())
            if "No solution found" not in said:
                sys.exit(f"error: uv could not resolve {path} for Python {python}: {said or 'is it installed?'}")
            why = re.search("Because (.*?) and (samestep depends|you require)", said)
            refused[python] = why.group(1) if why else said
    return {"pins": pins(path.read_text()), "wheels": [p for p in PYTHONS if p not in refused], "refused": refused}


def pins(text: str) -> list[str]:
    """Return the requirements in ``text``, without comments, and core's own requirements."""
    lines = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines()]
    return [*filter(None, lines), *tomllib.loads(PROJECT.read_text())["project"]["dependencies"]]


def pythons(text: str, record: dict[str, Any]) -> list[str]:
    """Return the recorded Pythons of a requirements.in that are within the limit in ``text``."""
    limit = LIMIT.search(text)
    return [python for python in record["wheels"] if limit is None or python in limit.group(1).split()]


def differences(text: str, record: dict[str, Any] | None) -> list[str]:
    """Return messages about the differences between a requirements.in with the content ``text`` and its record."""
    if record is None or record["pins"] != pins(text):
        return [f"{RECORD.name} was not made of its pins and {PROJECT.relative_to(ROOT)}"]
    line = LINE.search(text)
    derived = " ".join(pythons(text, record))
    if line and line.group(1) == derived:
        return []
    return [f"it lacks the line `# python: {derived}`"]


if __name__ == "__main__":
    main()
