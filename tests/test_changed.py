"""`bash scripts/test.sh --changed`: every tracked file has a rule, and the rules and CI know every environment."""

from __future__ import annotations

import configparser
import fnmatch
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

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


def test_ci_has_a_job_for_each_environment() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    listed = [environment for job in jobs.values() for environment in job["strategy"]["matrix"]["environment"]]
    assert sorted(listed) == sorted(matrix())
