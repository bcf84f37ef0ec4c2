"""Test `bash scripts/test.sh --changed`: rules cover every tracked file, and rules and CI cover every environment."""

from __future__ import annotations

import configparser
import fnmatch
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from repository import ran, without_git

ROOT = Path(__file__).resolve().parents[1]
CHANGED = runpy.run_path(str(ROOT / "tools" / "changed.py"))
RULES = CHANGED["RULES"]


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def matrix() -> set[str]:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    return set(re.split(r",\s*", tox["tox"]["env_list"]))


def test_every_tracked_file_has_a_rule_and_every_rule_a_file() -> None:
    paths = tracked()
    first = [next((pattern for pattern, _ in RULES if fnmatch.fnmatchcase(path, pattern)), None) for path in paths]
    assert [path for path, pattern in zip(paths, first) if pattern is None] == []
    assert [pattern for pattern, _ in RULES if pattern not in first] == []


def test_the_rules_name_environments_of_the_matrix_and_all_of_them() -> None:
    named = {environment for path in tracked() for environment in CHANGED["environments_of"](path)}
    assert named - {CHANGED["ALL"]} == matrix()


@pytest.mark.parametrize(
    ("paths", "environments"),
    [
        (["README.md"], ["core", "docs", "lint"]),
        (["apps/cifar_ddp/ema.py"], ["cifar_ddp-cpu", "core", "lint"]),
        (["tests/lenet_paddle/test_lenet_paddle.py", "README.md"], ["core", "docs", "lenet_paddle-cpu", "lint"]),
        (["README.md", "a/file/of/no/rule"], ["ALL"]),
        ([], []),
    ],
)
def test_a_change_needs_what_its_paths_need(paths: list[str], environments: list[str]) -> None:
    assert CHANGED["needed"](paths) == environments


def jobs_of(workflow: str) -> list[str]:
    """Return the environments of a workflow's jobs."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())["jobs"]
    return [environment for job in jobs.values() for environment in job["strategy"]["matrix"]["environment"]]


def test_ci_has_a_job_for_each_environment() -> None:
    assert sorted(jobs_of("tests.yml")) == sorted(matrix())
    soak = runpy.run_path(str(ROOT / "tools" / "soak.py"))
    assert sorted(jobs_of("soak.yml")) == sorted(soak["environments"]())


# --- revisions, in a repository of its own ----------------------------------------------------------------------------


class Repository:
    """A git repository with tools/changed.py in one commit on the branch ``main``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("tools/changed.py", (ROOT / "tools" / "changed.py").read_text())
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def git(self, *words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *author, *words], cwd=self.folder, env=without_git(), capture_output=True, check=True)

    def write(self, path: str, text: str = "") -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=a change")

    def changed(self, *words: str) -> tuple[int, str, str]:
        """Run the tool, and return its exit code, its stdout and its stderr."""
        program = [sys.executable, str(self.folder / "tools" / "changed.py"), *words]
        done = ran(self.folder, *program, environ=without_git())
        return done.returncode, done.stdout.strip(), done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.mark.parametrize("branch", ["main", "master"])
def test_a_commit_on_a_branch_is_a_change_without_origin(repository: Repository, branch: str) -> None:
    repository.git("branch", "--move", branch)
    repository.git("switch", "--quiet", "--create", "work")
    assert repository.changed()[:2] == (0, "")
    repository.write("README.md")
    repository.commit()
    code, environments, messages = repository.changed()
    assert (code, environments) == (0, "core,docs,lint")
    assert messages.startswith(f"compared with {branch} (")
    assert messages.endswith("): changed files: 1\n")


def test_a_branch_of_origin_comes_before_the_own_one(repository: Repository) -> None:
    repository.git("update-ref", "refs/remotes/origin/main", "HEAD")
    repository.write("README.md")
    repository.commit()
    code, environments, messages = repository.changed()
    assert (code, environments) == (0, "core,docs,lint")
    assert messages.startswith("compared with origin/main (")


def test_the_main_branch_alone_needs_a_revision(repository: Repository) -> None:
    repository.write("README.md")
    repository.commit()
    code, environments, messages = repository.changed()
    assert (code, environments) == (2, "")
    assert "name a revision, such as HEAD~1" in messages
    assert repository.changed("HEAD~1")[:2] == (0, "core,docs,lint")


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("--output=other", "error: --output=other is no revision: name a commit or a branch\n"),
        ("no_such", "error: git knows no revision no_such: name a commit or a branch\n"),
    ],
)
def test_a_revision_that_does_not_exist_is_refused(repository: Repository, revision: str, message: str) -> None:
    assert repository.changed(revision) == (2, "", message)
    assert not (repository.folder / "other").exists()


def test_the_path_that_needs_all_environments_is_reported(repository: Repository) -> None:
    repository.write("README.md")
    repository.write("a file of no rule")
    code, environments, messages = repository.changed("HEAD")
    assert (code, environments) == (0, "ALL")
    assert messages.endswith("): changed files: 2\n'a file of no rule' needs all environments\n")


def test_names_may_have_any_characters(repository: Repository) -> None:
    repository.write("docs/über\nzwei.md")
    assert repository.changed("HEAD")[:2] == (0, "core,docs,lint")
    repository.commit()
    assert repository.changed("HEAD~1")[:2] == (0, "core,docs,lint")
