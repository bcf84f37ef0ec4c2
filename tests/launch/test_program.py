"""Test that a program forked as a rank leaves the same files and exit codes as a program that Python starts."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 60  # seconds
FORKED = """
import os, sys
from pathlib import Path
from samestep_launch.program import Program

program = Program(Path(sys.argv[1]))
program.load([])
rank = os.fork()
if rank == 0:
    os._exit(program.run([]))
os._exit(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
"""


def run(folder: Path, code: str) -> int:
    """Run a program in a forked process with this folder as current folder, and return the exit code."""
    path = folder / "program.py"
    path.write_text(code)
    done = subprocess.run([sys.executable, "-c", FORKED, path], cwd=folder, timeout=LIMIT, check=False)
    return done.returncode


@pytest.mark.parametrize(
    "body",
    [
        "kept = open('out', 'w'); kept.write('line\\n')",
        "import csv; kept = csv.writer(open('out', 'w'), lineterminator='\\n'); kept.writerow(['line'])",
        "kept = at_import; kept.write('line\\n')",
        "kept = open('out', 'wb'); kept.write(b'line\\n')",
        "kept = [open('out', 'w')]; kept[0].write('line\\n'); raise SystemExit(3)",
    ],
    ids=["text", "csv", "opened before the fork", "binary", "with a failure"],
)
def test_the_contents_of_open_files_reach_the_disk(tmp_path: Path, body: str) -> None:
    code = run(tmp_path, f"at_import = open('out', 'w')\nif __name__ == '__main__':\n    {body}\n")
    assert (tmp_path / "out").read_text() == "line\n"
    assert code == (3 if "SystemExit" in body else 0)


def test_a_compressed_file_gets_its_end(tmp_path: Path) -> None:
    body = "kept = gzip.open('out', 'wt'); kept.write('line\\n')"
    assert run(tmp_path, f"import gzip\nif __name__ == '__main__':\n    {body}\n") == 0
    assert gzip.decompress((tmp_path / "out").read_bytes()) == b"line\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_waits_for_its_threads(tmp_path: Path, code: int) -> None:
    """A program may save in a thread, also after a failure or a stop."""
    late = "import pathlib, sys, threading, time\ndef late():\n    time.sleep(0.3)\n    pathlib.Path('late').touch()\n"
    block = f"if __name__ == '__main__':\n    threading.Thread(target=late).start()\n    sys.exit({code})\n"
    assert run(tmp_path, late + block) == code
    assert (tmp_path / "late").exists()


def test_a_pickle_names_a_class_as_a_program_started_by_python_does(tmp_path: Path) -> None:
    classes = "class State:\n    class Inner: pass\n    def method(self): pass\ndef function(): pass\n"
    names = "State, State.Inner, State.method, function"
    body = f"print({{each.__module__ for each in ({names})}}, file=open('out', 'w'))"
    assert run(tmp_path, f"{classes}if __name__ == '__main__':\n    {body}\n") == 0
    assert (tmp_path / "out").read_text() == "{'__main__'}\n"


def test_an_exit_inside_a_try_block_is_an_exit(tmp_path: Path) -> None:
    block = "if __name__ == '__main__':\n    try:\n        os._exit(0)\n    except:\n        os._exit(1)\n"
    assert run(tmp_path, f"import os\n{block}") == 0
