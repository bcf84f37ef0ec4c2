"""Test the app's options.py: the common options, mistakes as errors, and the options that a resume must repeat."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Harness, options_of
from samestep import ConfigError, options
from samestep.options import Parser, add_common, resume_invariants

FIRST_STAGE = """
import runpy, sys
sys.path[:0] = [sys.argv[1]]
parsed = runpy.run_path(sys.argv[2])["parse"](["--epochs", "1", "--no-resume"])
assert parsed.epochs == 1 and parsed.resume is False
own = {name for name in sys.modules if name.startswith("samestep")}
small = {f"samestep.{name}" for name in ("data", "data.files", "env", "hooks", "job_info", "root", "untrusted")}
assert own <= {"samestep", "samestep.options", *small}, own
others = {name.partition(".")[0] for name in sys.modules} - {"samestep", "__main__"}
assert others <= {*sys.stdlib_module_names}, others
print("ok")
"""


@pytest.fixture
def module(harness: Harness) -> Any:
    return options_of(harness.app.name)


def test_it_has_the_common_options_and_what_a_result_repeats(harness: Harness, module: Any) -> None:
    common = Parser()
    add_common(common, epochs=1, global_batch_size=1, lr="", datasets=("mnist-5k",), devices=("auto",))
    parsed = module.parse([])
    expected = vars(common.parse([])).keys() - {"global_batch_size"} | {harness.app.batch_field}
    assert expected <= vars(parsed).keys()
    assert set(parsed.RESULT_FIELDS) <= vars(parsed).keys()
    assert parsed.lr is not None  # the app's default is recorded and saved in checkpoints
    assert json.loads(json.dumps(resume_invariants(parsed))) == resume_invariants(parsed)


def test_the_help_has_the_usage_and_the_common_options(harness: Harness, module: Any) -> None:
    text = module.build_parser(usage="the usage").format_help()
    assert "the usage" in text
    for option in "epochs max-steps seed lr no-resume init-from run-dir timeout max-restarts".split():
        assert f"--{option}" in text
    assert harness.app.batch_option in text


@pytest.mark.parametrize("bad", [["--epochs=x"], ["--lr=0"], ["--no-such-option"], ["5"]], ids=str)
def test_a_mistake_is_a_user_error(module: Any, bad: list[str]) -> None:
    with pytest.raises(ConfigError):
        module.parse(bad)


def test_a_near_miss_of_the_launch_scripts_own_option_is_named(module: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean --dry-run"):
        module.parse(["--dry-rum"], usage="bash scripts/run.sh N")
    with pytest.raises(ConfigError) as caught:  # train.py has no --dry-run
        module.parse(["--dry-rum"])
    assert "--dry-run" not in str(caught.value)


def test_what_changes_the_arithmetic_is_what_a_resume_must_repeat(harness: Harness, module: Any) -> None:
    small = resume_invariants(module.parse([*harness.app.small]))
    kept = {changed.partition("=")[0] for changed in harness.app.resume_invariants}
    for changed in harness.app.resume_invariants:
        found = resume_invariants(module.parse([*harness.app.small, changed]))
        name = changed.partition("=")[0].removeprefix("--").replace("-", "_")
        assert name in {key for key in found if found[key] != small[key]}
    for free in ("--epochs=9", "--max-steps=9", "--checkpoint-every=9", "--log-every=9", "--timeout=9", "--quiet"):
        if free.partition("=")[0] in kept:  # in some apps, --epochs sets the length of a schedule
            continue
        assert resume_invariants(module.parse([*harness.app.small, free])) == small


def test_it_needs_only_the_standard_library_of_python_3_9(harness: Harness) -> None:
    """The launch script runs options.py on the system's Python before an installation. -I and -S omit site-packages."""
    path = ROOT / "apps" / harness.app.name / "options.py"
    ast.parse(path.read_text(), feature_version=(3, 9))
    core = str(Path(options.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", FIRST_STAGE, core, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
