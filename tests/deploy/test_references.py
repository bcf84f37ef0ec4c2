"""Test that the paths, variables, options and image arguments in the files of deploy/ exist."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import PACKAGES

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (REPOSITORY / "deploy").rglob("*") if path.is_file())
FILES += [REPOSITORY / "docs" / name for name in ("scale-out.md", "slurm.md")]
APPS = sorted(path.parent.name for path in REPOSITORY.glob("apps/*/options.py"))
OURS = re.compile(
    r"\b(?:NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|PET_\w+|JOB_COMPLETION_INDEX|HOROVOD_\w+|SAMESTEP_\w+"
    r"|RANK_TABLE_FILE|XDG_CACHE_HOME|OMP_NUM_THREADS)\b"
)
FOLDERS = "|".join(("apps", "benchmarks", *PACKAGES, "deploy", "docs", "scripts", "tests", "tools"))
PATHS = re.compile(rf"(?<![\w.-])(?:{FOLDERS})/[\w./-]*\w(?![\w*$<{{])")


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@functools.cache
def known_options(app: str, command: str = "") -> frozenset[str]:
    """Return the options that an app's launch script lists in --help."""
    script = REPOSITORY / "scripts" / f"run_{app}.sh"
    environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    words = ["bash", str(script), "1", *filter(None, [command]), "--help"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return frozenset(re.findall(r"--[a-z][a-z-]*", done.stdout))


@functools.cache
def programs() -> str:
    """Return the text of all .py and .sh files of the scripts, the packages and the apps."""
    folders = [REPOSITORY / name for name in ("scripts", *PACKAGES, "apps")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".sh"}]
    return "\n".join(path.read_text() for path in paths)


def starts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the app and the arguments of every command in ``text`` that starts an app."""
    text = re.sub(r"\\\n#?\s*", " ", text)
    for found in re.finditer(
        r"(?:scripts/run_(\w+)\.sh|apps/(\w+)/train\.py|deploy/slurm/(\w+)\.sbatch)([^\n`#|;&\"]*)", text
    ):
        yield found[1] or found[2] or found[3], found[4]
    for found in re.finditer(r"^#.* samestep/(\w+):\w+ (\d[^\n`]*)", text, re.MULTILINE):  # by an image's entry point
        entry = re.search(r"^ENTRYPOINT .*run_(\w+)\.sh", text, re.MULTILINE)
        assert entry, found[0]
        yield entry[1], found[2]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_paths_and_variables_are_there(path: Path) -> None:
    text = path.read_text()
    for found in PATHS.findall(text):
        assert (REPOSITORY / found).exists() or (path.parent / found).exists(), found
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if path.suffix == ".md" else []:
        assert (path.parent / link).exists(), link
    for variable in OURS.findall(text):
        assert variable in programs(), f"nothing of ours reads {variable}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_options_are_those_of_their_app(path: Path) -> None:
    for app, rest in starts(path.read_text()):
        assert app in APPS, rest
        command = next((word for word in rest.split() if re.fullmatch(r"[a-z]+", word)), "") if "lab" in app else ""
        unknown = set(re.findall(r"--[a-z][a-z-]*", rest)) - known_options(app, command)
        assert not unknown, f"run_{app}.sh has no {unknown}"


def test_arguments_of_images_are_declared() -> None:
    dockerfiles = sorted((REPOSITORY / "deploy" / "images").glob("Dockerfile.*"))
    assert len(dockerfiles) == 7
    for path in dockerfiles:
        text = path.read_text()
        declared = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
        assert set(re.findall(r"--build-arg[ =](\w+)=", text)) <= declared, path
        assert re.search(r"^ARG BASE=\S+:3\.11\.\d+\S*@sha256:[0-9a-f]{64}$", text, re.MULTILINE), path
        assert re.search(r"^USER \d+:\d+$", text, re.MULTILINE), path
        copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for source in (word for line in copied for word in line.split()):
            assert (REPOSITORY / source).exists(), source


@pytest.mark.parametrize("path", sorted((REPOSITORY / "deploy" / "images").glob("Dockerfile.*")), ids=name)
def test_an_image_has_all_files_that_its_entry_point_imports(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    for source, target in re.findall(r"^COPY (\w\S*) (/samestep\S*)$", text, re.MULTILINE):
        shutil.copytree(
            REPOSITORY / source, tmp_path / target.lstrip("/"), ignore=shutil.ignore_patterns("__pycache__")
        )
    (script,) = re.findall(r"/samestep/(scripts/run_\w+\.sh)", text.rpartition("ENTRYPOINT")[2])
    words = ["bash", str(tmp_path / "samestep" / script), "2", "--dry-run"]
    environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "app"),
    [
        ("run: scripts/run_mnist_ddp.sh 2 --epoch=3\n", "mnist_ddp"),
        ("mpirun python /samestep/apps/mnist_horovod/train.py \\\n  --no-such\n", "mnist_horovod"),
        ("scripts/run_collectives_lab.sh 2 straggler --bytes\n", "collectives_lab"),
    ],
)
def test_an_unknown_option_is_found(text: str, app: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(AssertionError, match=f"run_{app}"):
        test_options_are_those_of_their_app(tmp_path / "page.md")
