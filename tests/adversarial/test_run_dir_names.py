"""Test that a run changes nothing outside its run dir, even if a path in the run dir is a link, FIFO or folder."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from amounts import amount
from scratch_project import environment
from test_run_dirs import CORE, LIMIT, PROGRAM

# One process imports the toy, and forks a rank for each line of its input: [arguments, path of the output].
SERVER = (
    PROGRAM.replace("log.run(main)", "")
    + """
import json
for line in sys.stdin:
    arguments, output = json.loads(line)
    pid = os.fork()
    if pid == 0:
        sys.argv[1:] = arguments
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        log.run(main)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
)
KINDS = ("link", "hard link", "FIFO", "folder", "long name")
# Other names that a launch script and its ranks may create in a run dir, in addition to the names of the toy's run.
OTHERS = """
.metrics.jsonl.tmp .model.safetensors.tmp .result.json.tmp checkpoints/.step-00000006.tmp checkpoints/step-00000006
checkpoints/damaged-step-00000006 checkpoints/unequal-step-00000006 evaluation.json log/.alive-0.0.tmp log/hang-0.json
log/hanging log/launcher.log log/no-restart log/not-finite log/stack-0.txt log/stalled model-best.safetensors
model-ema.safetensors model.safetensors result.json
""".split()


class Toy:
    """Run the toy in forks of one process."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._numbers = itertools.count()

    def run(self, run_dir: Path, *options: str) -> tuple[int, list[str]]:
        """Run the toy, and return its exit code and the lines of its output; fail if the run does not end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = self._folder / f"output-{next(self._numbers)}"
        arguments = ["--checkpoint-every=2", "--log-every=1", f"--run-dir={run_dir}", *options]
        print(json.dumps([arguments, str(output)]), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], LIMIT)[0], "the run does not end"
        return int(self._process.stdout.readline()), output.read_text().splitlines()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    folder = tmp_path_factory.mktemp("toy")
    variables = environment(PYTHONPATH=str(CORE))
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Toy(process, folder)
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


@pytest.fixture(scope="module")
def killed(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run dir with checkpoints of the steps 2 and 4, as after a kill."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    code, lines = toy.run(run_dir, "--max-steps=4", "--keep-best")
    assert code == 0, lines
    for name in ("result.json", "model.safetensors", "model-best.safetensors"):
        (run_dir / name).unlink()
    return run_dir


def put(kind: str, path: Path, outside: Path) -> bool:
    """Put a file of ``kind`` in place of ``path``, whose content moves to ``outside``; return False if impossible."""
    is_folder = path.is_dir() or path.name.lstrip(".").startswith(("step-", "damaged-", "unequal-"))
    if kind == "long name":
        fill = "9" if is_folder and "step" in path.name else "x"
        path = path.with_name(path.name.ljust(250, fill))
        path.mkdir() if is_folder else path.write_text("kept")
        return True
    path.parent.mkdir(exist_ok=True)
    target = outside / path.name
    if path.exists():
        path.rename(target)
    elif is_folder:
        target.mkdir()
        (target / "file").write_text("kept")
    else:
        target.write_text("kept")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "hard link" and not is_folder:
        path.hardlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder" and not is_folder:
        path.mkdir()
    else:
        return False
    return True


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and the modification time (ns) of all files and folders in a folder, by path."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.lstat().st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_of_a_run_dir_changes_anything_outside(
    toy: Toy, killed: Path, tmp_path: Path, kind: str, soak: bool
) -> None:
    """A run trains or evaluates, or ends with one error line; it never prints a traceback."""
    options = amount(soak, few=["--resume"], many=["--resume", "--no-resume", "--evaluate-only"])
    names = sorted({str(path.relative_to(killed)) for path in killed.rglob("*")} | {*OTHERS})
    assert {"log", "checkpoints", ".lock", "checkpoints/step-00000004/manifest.json", "log/rank-0.log"} <= {*names}
    ends = []
    for number, (name, option) in enumerate(itertools.product(names, options)):
        run_dir = tmp_path / f"run-{number}"
        outside = tmp_path / f"outside-{number}"
        shutil.copytree(killed, run_dir)
        outside.mkdir()
        if put(kind, run_dir / name, outside):
            before = tree(outside)
            code, lines = toy.run(run_dir, option)
            what = f"{name} is a {kind}, {option}: {lines}"
            assert tree(outside) == before, what
            assert code in (0, 1, 2), what
            assert sum(line.startswith("error: ") for line in lines) == (code != 0), what
            assert not any("Traceback" in line for line in lines), what
            logs = [path for path in run_dir.glob("log/*.log") if path.is_file()]
            assert not any("Traceback" in path.read_text(errors="replace") for path in logs), what
            ends.append(code)
        shutil.rmtree(run_dir)
        shutil.rmtree(outside)
    assert {0} <= {*ends}
    assert len(ends) > 20
