"""Test the examples of docs/kit.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import samestep.torch
from kit_programs import LIMIT, ROOT, environment

PAGE = (ROOT / "docs" / "kit.md").read_text()
RUN_ALL = """
import sys
for path in sys.argv[1:]:
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, {"__name__": "__main__"})
"""


def test_the_examples_run(tmp_path: Path) -> None:
    """Run all examples in one process, so that torch is imported once."""
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    for number, example in enumerate(examples):
        (tmp_path / f"{number}.py").write_text(example)
    names = [f"{number}.py" for number in range(len(examples))]
    command = [sys.executable, "-c", RUN_ALL, *names]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "of 99.0" in done.stdout


def test_every_name_has_an_example() -> None:
    imported = set(re.findall(r"\w+", " ".join(re.findall(r"^from samestep.torch import (.*)$", PAGE, re.M))))
    assert imported == set(samestep.torch.__all__)
