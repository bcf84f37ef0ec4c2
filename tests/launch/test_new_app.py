"""Test scripts/new_app.sh: it copies each app that trains, into the repository or into a new project.

One clone holds all copies, so that the slow parts (a wheel, the tests of layout and pages) run once. tests/copies
trains the copies.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import REPOSITORY, clone
from scratch_project import CORE, environment, wait_for

# Pages and a record that programs make: docs/app_tables.py, device_paths.py, messages.py, and `tox -e pythons`.
GENERATED = {"README.md", "README.zh.md", "docs/devices.md", "docs/messages.md", "tools/python_versions.json"}
APPS = sorted(path.parent.name for path in REPOSITORY.glob("tests/*/app_spec.py"))
ALL = sorted(path.name for path in REPOSITORY.glob("apps/*") if (path / "options.py").exists())
# The longest and the shortest names: lines with them must still be formatted.
NAMES = dict(zip(APPS, ["q1", *(f"copy{i}_of_somebodys" for i in range(len(APPS) - 1))]))
LEFT_BEHIND = {
    "cifar_ddp": {"test_benchmark.py", "test_make_it_yours.py", "test_usual_ways.py"},
    "mnist_ddp": {
        "test_dlc.py",
        "test_docs_programs.py",
        "test_first_run.py",
        "test_gpu_proof.py",
        "test_readme.py",
        "test_replay_after_kill.py",
        "test_signals.py",
        "test_torchvision.py",
    },
    "mnist_horovod": {"test_and_mnist_ddp.py"},
    "mnist_lightning": {"test_and_mnist_ddp.py"},
    "gpt_fsdp": {"test_benchmark.py"},
    "lenet_paddle": set(),
    "llm_finetune": {"test_finetune_proof.py", "test_measured_tables.py", "test_wrong_ways.py"},
    "mnist_elastic": set(),
    "resnet50_mindspore": {
        "test_depth_50.py",
        "test_readme.py",
        "test_stored_run.py",
        "mindspore_side.py",
        "torchvision_side.py",
    },
}
MEASURING = "wrong_ways.py"  # prints figures of the app's README, so it is not copied
SPECS = "import harness, json; print(json.dumps({n: harness.app_spec(n).__dict__ for n in harness.APPS}))"


def run(folder: Path, *command: str, limit: float = 120, **environ: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def new_app(root: Path, *words: str | Path, **environ: Any) -> subprocess.CompletedProcess[str]:
    return run(root, "bash", "scripts/new_app.sh", *map(str, words), **environ)


def content(root: Path) -> dict[str, bytes]:
    """Return the content of all files by path, without git's files and Python's caches."""
    files = (path for path in root.rglob("*") if path.is_file() and not {".git", "__pycache__"} & {*path.parts})
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def listed(root: Path) -> set[str]:
    return {*run(root, "git", "ls-files").stdout.split()}


def python(root: Path, *words: str, limit: float = 120) -> subprocess.CompletedProcess[str]:
    """Run this Python in ``root``, with this repository's core and with the modules of the tests in ``root``."""
    paths = os.pathsep.join(map(str, (root / "tests", root / "tests" / "common", CORE)))
    return run(root, sys.executable, *words, limit=limit, PYTHONPATH=paths)


def specs(root: Path) -> dict[str, dict[str, Any]]:
    """Return the specifications of all apps in ``root``, as the harness reads them."""
    done = python(root, "-c", SPECS)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def check_ruff(root: Path) -> None:
    for words in (["check"], ["format", "--check"]):
        done = python(root, "-m", "ruff", *words, "--no-cache", ".")
        assert done.returncode == 0, done.stdout


def imported_tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module tools/new_app.py, which is in ``sys.modules`` until the end of the test."""
    spec = importlib.util.spec_from_file_location("new_app", REPOSITORY / "tools" / "new_app.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "new_app", tool)
    spec.loader.exec_module(tool)
    return tool


def check_script(root: Path, name: str) -> None:
    """Check --help and --dry-run of a copy's launch script."""
    script = str(root / "scripts" / f"run_{name}.sh")
    usage = run(root, "bash", script, "--help")
    assert usage.stdout.startswith(f"usage: bash scripts/run_{name}.sh N [options]\n"), usage
    shown = run(root, "bash", script, "2", "--dry-run", MASTER_PORT="29500")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert str(root / "apps" / name / "train.py") in shown.stdout
    assert str(root / ".venvs" / name / "bin" / "python") in shown.stdout


# --- in the repository ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("repository") / "samestep")


def copied(soak: bool) -> dict[str, str]:
    """Return ``{app: name of its copy}``: all apps in a soak, else cifar_ddp and resnet50_mindspore."""
    return {app: name for app, name in NAMES.items() if soak or app in ("cifar_ddp", "resnet50_mindspore")}


def test_each_app_under_a_name_of_its_own(tmp_path: Path, soak: bool) -> None:
    """git lists the copies. ruff, the launch scripts and the tests of layout and pages pass. Nothing else changes."""
    root = clone(tmp_path / "samestep")
    before = content(root)
    there = listed(root)
    names = copied(soak)
    first = next(iter(names))
    dry = new_app(root, names[first], "--from", first, "--dry-run")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert content(root) == before
    for app, name in names.items():
        done = new_app(root, name, "--from", app)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert f"\nbash scripts/run_{name}.sh 2 " in done.stdout
        assert all(f"tests/{app}/{file}" in done.stdout for file in LEFT_BEHIND[app])
        if app == first:
            written = {path for path, now in content(root).items() if now != before.get(path)}
            left = {f"tests/{app}/{file}" for file in LEFT_BEHIND[app]}
            left |= {path for path in before if path.startswith(f"tests/{app}/stored/")}
            left |= {f"apps/{app}/{MEASURING}"} & before.keys()
            assert {*re.findall(r"^  (\S+)$", dry.stdout, re.MULTILINE)} == written | left
            own = (f"apps/{name}/", f"tests/{name}/")
            assert len([path for path in written - GENERATED if not path.startswith(own)]) <= 3
    after = content(root)
    changed = {path for path in before if after.get(path) != before[path]}
    assert changed == {"tox.ini", *GENERATED}
    assert listed(root) == there | after.keys()
    for app, name in names.items():
        check_files(root, app, name)
        check_script(root, name)
    found = specs(root)
    for app, name in names.items():
        slow = ["slow"] if "slow" in found[app]["skipped_marks"] else []
        assert found[name] == {**found[app], "name": name, "skipped_marks": ["core_only", *slow]}
    check_ruff(root)
    done = python(root, "-m", "pytest", "-q", "tests/test_docs.py", "tests/test_layout.py", limit=300)
    assert done.returncode == 0, done.stdout


def test_lines_with_a_name_of_any_length_are_formatted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formatter would join or split no line of a copy of any app, with the longest and the shortest name."""
    tool = imported_tool(monkeypatch)
    shutil.copy(REPOSITORY / "ruff.toml", tmp_path)
    for app, letter in zip(APPS, string.ascii_lowercase):
        longest = letter * 18
        files = tool.Copy(app, longest, wheel="samestep.whl").files()
        short = {path.replace(longest, letter): text.replace(longest, letter) for path, text in files.items()}
        tool.write(tmp_path, {**files, **short})
    check_ruff(tmp_path)


@pytest.mark.soak  # the quick tests run test_each_app_under_a_name_of_its_own
def test_a_copy_can_be_copied(tmp_path: Path) -> None:
    """A copy's name may begin with the name of its origin; the script must not confuse the two."""
    root = clone(tmp_path / "samestep")
    for name, origin in (("mnist_ddp_big", "mnist_ddp"), ("third_one", "mnist_ddp_big"), ("fourth_one", "mnist_ddp")):
        done = new_app(root, name, "--from", origin)
        assert (done.returncode, done.stderr) == (0, ""), done
    for name in ("mnist_ddp_big", "third_one", "fourth_one"):
        assert {path.name for path in (root / "tests" / name).iterdir()} - {"__pycache__"} == {
            *(
                "about.json",
                "app_spec.py",
                "device_paths.py",
                "hangs",
                "test_device.py",
                "test_hangs.py",
                f"test_{name}.py",
            ),
            *("test_load.py", "test_phases.py", "test_seeing.py", "test_weights.py", "two_buckets.py"),
        }
    for path, text in content(root).items():
        if path.startswith(("apps/third_one", "tests/third_one", "scripts/run_third_one", "deploy/slurm/third_one")):
            assert b"mnist_ddp_big" not in text.replace(b"a copy of `apps/mnist_ddp_big`", b""), path


def check_files(root: Path, app: str, name: str) -> None:
    """Check that a copy has its origin's files, and the old name only in paths to files that were not copied."""

    def under(folder: str) -> dict[str, bytes]:
        return content(root / folder)

    origin = under(f"apps/{app}")
    copy = under(f"apps/{name}")
    assert origin.keys() - {MEASURING} == copy.keys()
    for path in origin.keys() & {"model.py", "distributed.py", "requirements.in", "weights.py"}:
        assert copy[path] == origin[path].replace(app.encode(), name.encode())
    assert f"`apps/{app}`" in copy["README.md"].decode()
    originals = {path for path in under(f"tests/{app}") if not path.startswith("stored/")}
    tests = {path.replace(app, name) for path in originals - LEFT_BEHIND[app]}
    assert under(f"tests/{name}").keys() == tests
    for path, text in {**copy, **under(f"tests/{name}")}.items():
        if path == "about.json":  # names its origin
            continue
        kept = {*re.findall(rf"[\w./-]*(?<![A-Za-z0-9]){app}(?![A-Za-z0-9])[\w./-]*", text.decode(errors="ignore"))}
        assert [each for each in kept if not (root / re.sub(r"^(\.\./)+", "", each)).exists()] == [], path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["My-App", "--from", "mnist_ddp"], "'My-App' is no name for an app"),
        (["a__b", "--from", "mnist_ddp"], "'a__b' is no name for an app"),
        (["../up", "--from", "mnist_ddp"], "'../up' is no name for an app"),
        (["a" * 19, "--from", "mnist_ddp"], "has 19 letters: use 18 at most"),
        (["gpu", "--from", "mnist_ddp"], "gpu means something to tox"),
        (["py311", "--from", "mnist_ddp"], "py311 means something to tox"),
        (["train", "--from", "mnist_ddp"], "train is a word in "),
        (["cifar_ddp", "--from", "mnist_ddp"], "cifar_ddp is taken, by apps/cifar_ddp: choose another name"),
        (["common", "--from", "mnist_ddp"], "common is taken, by tests/common"),
        (["cifar_ddp", "--from", "mnist_ddp", "--out", "{out}"], "cifar_ddp is taken"),
        (["my_app", "--from", "no_app"], "no_app is no app: name one of cifar_ddp, "),
        (["my_app", "--from", "collectives_lab"], "collectives_lab measures instead of training"),
        (["my_app"], "the following arguments are required: --from"),
        (["--from", "mnist_ddp"], "the following arguments are required: NAME"),
        (["my_app", "--from", "mnist_ddp", "--no-such"], "unrecognized arguments: --no-such"),
        (["my_app", "--from", "mnist_ddp", "--wheel", "x"], "--wheel goes with --out"),
        (["my_app", "--from", "mnist_ddp", "--out", "{out}", "--wheel", "x"], "--wheel x is not a file samestep-*.whl"),
        (["my_app", "--from", "mnist_ddp", "--out", "{out}/in/that"], "there is no folder "),
        (["my_app", "--from", "mnist_ddp", "--out", "{full}"], "is not an empty folder"),
        (["my_app", "--from", "mnist_ddp", "--out", "{root}/mine"], "is in this repository"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_mistake_is_one_line(
    repository: Path, tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """main() reports the mistake before it reads anything; the shell script only finds a Python."""
    tool = imported_tool(monkeypatch)
    monkeypatch.setattr(tool, "ROOT", repository)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    places = {"out": tmp_path / "out", "full": tmp_path / "full", "root": repository}
    assert tool.main([word.format(**places) for word in words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("error: ")
    assert message in err
    assert {path.name for path in tmp_path.iterdir()} == {"full"}


def test_a_failure_half_way_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """First the last step fails, then SIGTERM arrives during the last step, then README.md lacks its table."""
    root = clone(tmp_path / "samestep")
    page = Path("docs", "device_paths.py")
    (root / page).write_text("import sys\nfrom pathlib import Path\nsys.exit('error: nothing to show')\n")
    before = content(root)
    done = new_app(root, "my_own", "--from", "mnist_horovod")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.endswith("cannot make docs/devices.md: error: nothing to show\n")
    assert content(root) == before
    assert not (root / "apps" / "my_own").exists()

    waits = "import time\nfrom pathlib import Path\nPath('reached').touch()\nPath('docs/devices.md').write_text('')\n"
    (root / page).write_text(f"{waits}time.sleep(600)\n")
    before = content(root)
    command = ["bash", str(root / "scripts" / "new_app.sh"), "my_own", "--from", "mnist_horovod"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for((root / "reached").exists)
            process.terminate()
            assert process.wait(timeout=40) == 128 + signal.SIGTERM
        finally:
            process.kill()
    (root / "reached").unlink()
    assert content(root) == before

    (root / "README.md").write_text("# No apps\n")
    before = content(root)
    done = new_app(root, "my_own", "--from", "mnist_ddp")
    assert (done.returncode, content(root)) == (2, before)
    assert done.stderr.startswith("error: docs/app_tables.py cannot make README.md: error: README.md lacks its table")


def test_it_is_written_in_the_language_of_python_3_9() -> None:
    ast.parse((REPOSITORY / "tools" / "new_app.py").read_text(), feature_version=(3, 9))
    oldest = shutil.which("python3.9")
    if oldest and run(REPOSITORY, oldest, "-c", "").returncode == 0:
        done = run(REPOSITORY, oldest, "tools/new_app.py", "my_own", "--from", "mnist_lightning", "--dry-run")
        assert (done.returncode, done.stderr) == (0, "")


# --- a project of its own ------------------------------------------------------------------------------------------


def test_each_app_as_a_project_of_its_own(repository: Path, tmp_path: Path, soak: bool) -> None:
    """No file names another app, and no path leads out of the project; only the first copy builds the wheel."""
    before = content(repository)
    wheel: list[str | Path] = []
    names = copied(soak)
    for app, name in names.items():
        root = tmp_path / f"project of {name}"
        words: list[str | Path] = [name, "--from", app, "--out", root, *wheel]
        dry = new_app(repository, *words, "--dry-run")
        assert (dry.returncode, dry.stderr, root.exists()) == (0, "", False)
        done = new_app(repository, *words)
        assert (done.returncode, done.stderr) == (0, ""), done
        listing, _, _ = dry.stdout.partition("would leave behind")
        assert content(root).keys() == {*re.findall(r"^  (\S+)$", listing, re.MULTILINE)} == listed(root)
        wheel = ["--wheel", next(root.glob("vendor/samestep-*.whl"))]
        check_words(root, name)
        check_script(root, name)
        check_ruff(root)
        tox = (root / "tox.ini").read_text()
        assert re.findall(r"(?m)^env_list = (.*)", tox) == [
            f"lint, {name}-cpu, {name}-mpi" if app == "mnist_horovod" else f"lint, {name}-cpu"
        ]
        assert {each: spec["skipped_marks"] for each, spec in specs(root).items()} == {
            name: ["core_only", "slow"] if app == "resnet50_mindspore" else ["core_only"]
        }
    assert content(repository) == before
    assert {path.name for path in tmp_path.iterdir()} == {f"project of {name}" for name in names.values()}

    # In the last project, pytest finds all common tests, also the tests for core alone, and --app accepts no other app.
    collected = python(root, "-m", "pytest", "--collect-only", "-q", "--every-case", "tests/common").stdout
    assert len(re.findall("^tests/common/.*::", collected, re.MULTILINE)) > 40, collected
    needed = python(root, "-c", "import runpy; print(runpy.run_path('tools/lock.py')['core_requirements']())").stdout
    assert needed.split() == ["numpy>=1.26", "safetensors>=0.5", "tqdm>=4.60"]  # requirements of the wheel
    other = python(root, "-m", "pytest", "--app=mnist_ddp")
    assert "argument --app: invalid choice: 'mnist_ddp'" in other.stderr


def check_words(root: Path, name: str) -> None:
    """Check that no file of a project names another app, and that the project's links and paths exist."""
    files = {path: text.decode(errors="ignore") for path, text in content(root).items() if not path.endswith(".whl")}
    others = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(ALL)})(?![A-Za-z0-9])")
    assert [(path, line) for path, text in files.items() for line in text.splitlines() if others.search(line)] == []
    for path in (path for path in files if path.endswith(".md")):
        for link in re.findall(r"\]\(([^)#:]+)", files[path]):
            assert (root / Path(path).parent / link).exists(), (path, link)
    words = files["README.md"] + files["tox.ini"]
    for path in re.findall(r"(?<=[ `])(?:apps|scripts|tests|vendor|deploy)/[\w./-]*\w(?![\w*])", words):
        assert (root / path).exists(), path
    assert files["README.md"].startswith(f"# {name}\n")
    assert f"\nbash scripts/run_{name}.sh 2 " in files["README.md"]
    assert files[f"apps/{name}/README.md"].startswith(f"# {name}: ")


def test_a_project_that_cannot_be_finished_is_not_there(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    git = tmp_path / "bin" / "git"
    git.write_text("#!/bin/sh\necho 'fatal: no space left' >&2\nexit 128\n")
    git.chmod(0o755)
    wheel = tmp_path / "samestep-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    path = f"{git.parent}{os.pathsep}{os.environ['PATH']}"
    before = {*tmp_path.iterdir()}
    done = new_app(
        repository, "my_own", "--from", "cifar_ddp", "--out", tmp_path / "my_own", "--wheel", wheel, PATH=path
    )
    assert (done.returncode, done.stderr) == (2, "error: git cannot make a repository: fatal: no space left\n")
    assert {*tmp_path.iterdir()} == before
