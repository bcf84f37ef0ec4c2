"""Test that pages match the code: links have targets, claims name tests, and no message is missing."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import walk
from samestep import ConfigError, env
from samestep.data import datasets
from samestep.options import Parser, add_common

ROOT = Path(__file__).resolve().parents[1]
# A link's text, target and title (with the text "test", the title names a function), and a note that the soak has the
# test.
LINK = re.compile(r'\[([^\]]*)\]\(([^)\s]+)(?:\s"([^"]*)")?\)(,?\s\(?in\sthe\ssoak|\W慢测试)?')
CODE = re.compile(r"^```.*?^```|``.+?``|`[^`\n]+`", re.MULTILINE | re.DOTALL)
# Files whose errors only repeat a message of another machine or file.
PASSED_ON = {
    "apps/*/data.py",  # rows.py and this data.py find a row's line and problem
    "apps/*/rows.py",
    "apps/*/placement.py",  # the text is in make_rank_table.py
    "apps/*/distributed.py",  # the text is in Horovod's options.py
    "core/samestep/log.py",  # log.py prints all other errors
    "launch/samestep_launch/app.py",
    "launch/samestep_launch/preflight.py",
    "launch/samestep_launch/supervise.py",  # the text is in HeartbeatWatch
    "observe/samestep_observe/replay_job.py",  # the error of the program that replay_job.py runs
}


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache  # pages name the same tests
def functions(file: Path) -> dict[str, list[str]]:
    """Return ``{function: its decorators}`` of a test file."""
    found = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: [*map(ast.unparse, node.decorator_list)] for node in found}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_a_heading_and_a_test(page: Path) -> None:
    text = CODE.sub(lambda match: match[0] if "\n" not in match[0] else "", page.read_text())
    for words, target, title, note in LINK.findall(text):
        if re.match("[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file / "README.md" if file.is_dir() else file), target
        name = title or words.strip("`")
        if name.startswith("test_"):
            decorators = functions(file)
            assert name in decorators, f"{target} has no function {name}"
            assert bool(note) == ("pytest.mark.soak" in decorators[name]), f"{name}: in the soak, or not?"


def test_each_concept_names_the_tests_that_prove_it() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text()
    notes = dict(re.findall(r"^\[\^(\d+)\]: (.*)$", text, re.MULTILINE))
    sections = text.split("\n## ")[1:]
    assert {section.partition("\n")[0] for section in sections} == {
        "The global batch",
        "Sharding",
        "Weighting",
        "Recovery",
        "Signals",
        "Launching",
        "Checkpoints",
        "Run dirs",
    }
    for section in sections:
        claims = re.findall(r"^- .*?(?=^- |^$|\Z)", section, re.MULTILINE | re.DOTALL)
        unproved = []
        for claim in claims:
            evidence = [notes[number] for number in re.findall(r"\[\^(\d+)\]", claim)]
            if not any("tests/" in each for each in evidence):
                unproved.append(claim)
        assert len(claims) >= 3
        assert not unproved


def test_the_page_of_options_lists_those_of_the_parsers() -> None:
    command = [sys.executable, "docs/options.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_changes_of_own_loop_lead_to_the_finished_program(tmp_path: Path) -> None:
    """The README's diff gives the same program, except for a function that is no longer called."""
    usual = ROOT / "docs" / "usual_loop.py"
    program = tmp_path / "docs" / "usual_loop.py"
    program.parent.mkdir()
    shutil.copy(usual, program)
    walk.git(tmp_path, "init", "--quiet")
    added = [each[1] for each in walk.apply_patches(tmp_path, ROOT / "docs" / "own_loop.md")]
    assert len(added) == 5
    finished = (ROOT / "docs" / "own_loop.py").read_text()
    assert program.read_text() == finished
    picture = runpy.run_path(str(ROOT / "docs" / "first_picture.py"))
    diff = picture["diff_of_the_page"]((ROOT / "README.md").read_text())
    changed = picture["changed"](usual.read_text(), diff)
    uncalled = re.search(r"^def load_snapshot.*?\n\n\n", changed, re.MULTILINE | re.DOTALL)
    assert uncalled
    assert sorted(changed.replace(uncalled[0], "").splitlines()) == sorted(finished.splitlines())


@pytest.mark.parametrize("name", ["usual_loop.py", "own_loop_run.py"])
def test_a_page_that_shows_a_program_shows_it_as_it_is(name: str) -> None:
    assert f"```python\n{(ROOT / 'docs' / name).read_text()}```" in (ROOT / "docs" / "own_loop.md").read_text()


def test_the_recipes_train_the_network_of_own_loop_on_its_images() -> None:
    own = ast.parse((ROOT / "docs" / "own_loop_exact.py").read_text()).body
    recipes = ast.parse((ROOT / "docs" / "recipes" / "images.py").read_text()).body
    shown = {node.name: ast.unparse(node) for node in own if isinstance(node, ast.ClassDef)}
    assert shown == {node.name: ast.unparse(node) for node in recipes if isinstance(node, ast.ClassDef)}
    assert shown.keys() == {"Images", "Net"}


def test_a_page_shows_the_differences_that_its_diff_prints() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text()
    shown = re.findall(r"```bash\n(diff [^\n]*)\n```\n\n```diff\n(.*?)```", text, re.DOTALL)
    for command, output in shown:
        done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == output, f"copy what this prints into docs/migrating.md: {command}"
    assert len(shown) == 7


def test_the_page_of_slow_tests_shows_the_stored_results_and_each_counterpart() -> None:
    soak = runpy.run_path(str(ROOT / "tools" / "soak.py"))
    page = soak["PAGE"].read_text()
    made = soak["page"](json.loads(soak["RESULTS"].read_text()))
    assert {*page.splitlines()} <= {*made.splitlines()}, "run python tools/soak.py --page"
    # An app that a user makes has rows that the page lacks. A slow test without a comment has no counterpart.
    assert "test_ten_kills_in_a_row_change_no_bit" in made


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "messages.py"))


def test_the_page_of_messages_is_what_the_programs_say() -> None:
    command = [sys.executable, "docs/messages.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_error_that_is_made_has_its_words_on_the_page(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "messages.md").read_text()
    made = 0
    passed_on = set()
    for path in script["files"]():
        for words, _ in script["Source"](path).messages():
            if not re.search("[a-z]", words):
                passed_on.add(re.sub(r"^apps/\w+/", "apps/*/", str(path.relative_to(ROOT))))
                continue
            made += 1
            assert script["_code"](words) in page, words
    assert made > 200
    assert passed_on <= PASSED_ON, "give these errors words, or name their file above"


EXAMPLE = """
NO_MPI = "no MPI: use gloo"

def check(name, count):
    if count:
        raise ConfigError(f"{name}={count} is " + ("odd" if count % 2 else "even") + ": choose another")
    remedy = "start again"
    first, remedy = "x", "buy a disk"
    for thing, left in (("ranks", 1), ("machines", 2)):
        raise samestep.NonRetryableError(f"{thing} are gone ({reason(left)}): {remedy}")
    raise ConfigError(NO_MPI)

def reason(left):
    return "stopped" if left else f"{left} left"

def tuple_of(n):
    if n:
        return f"rank {n} is odd", ""
    return "all are odd", ", so nobody is"

def together():
    who, proof = tuple_of(1)
    raise NonRetryableError(f"{who}{proof}")

def fail(message):
    raise RetryableError(message)

def other():
    fail("a bit flipped")
    fail(f"{other} differs")
    remedy = "wait"
    remedy += f" for {other}" if other else ", then start again"
    fail(remedy)
    raise ConfigError(str(problem))
    print_stderr(f"error: the job ended with code {code}")
    print_stderr("waiting")
    log.error(f"rank {rank} is gone")
    raise ValueError("a bug")
"""


def test_words_are_found_behind_names_calls_and_choices(script: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    assert set(script["Source"](tmp_path / "example.py").messages()) == {
        ("…=… is odd: choose another", "2"),
        ("…=… is even: choose another", "2"),
        *(
            (f"{thing} are gone ({why}): {remedy}", "1")
            for thing in ("ranks", "machines")
            for why in ("stopped", "… left")
            for remedy in ("start again", "buy a disk")
        ),
        ("no MPI: use gloo", "2"),
        ("rank … is odd", "1"),
        ("all are odd, so nobody is", "1"),
        ("a bit flipped", "again"),
        ("… differs", "again"),
        ("wait", "again"),
        ("wait for …", "again"),
        ("wait, then start again", "again"),
        ("…", "2"),
        ("the job ended with code …", "1"),
        ("rank … is gone", "1"),
    }


def parse(*arguments: str) -> None:
    parser = Parser(prog="toy")
    add_common(parser, epochs=1, global_batch_size=1, lr="1", datasets=("mnist",), devices=("auto",))
    parser.parse(arguments)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: env.detect({"RANK": "1"}),
        lambda: env.detect({"RANK": "3", "WORLD_SIZE": "2"}),
        lambda: parse("--epoch=3"),
        lambda: parse("--epochs=-1"),
        lambda: parse("--evaluate-only"),
        lambda: datasets.resolve("nist", Path("data")),
        lambda: datasets.read_idx(Path("nowhere")),
    ],
)
def test_what_is_said_is_found_on_the_page(mistake: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        mistake()
    shown = re.findall(
        r"^\| `+ ?(.*?) ?`+ \| (?:2|1|again) ", (ROOT / "docs" / "messages.md").read_text(), re.MULTILINE
    )
    patterns = [".*".join(map(re.escape, words.replace("\\|", "|").split("…"))) for words in shown]
    found = [pattern for pattern in patterns if re.fullmatch(pattern, str(raised.value))]
    # One option's message follows its name: "--epochs: '-1' is not a whole number ... (see --help)".
    assert [pattern for pattern in found if len(pattern) > 15], raised.value


def test_the_diffs_for_other_tools_use_names_of_the_kit() -> None:
    kit = (ROOT / "core" / "samestep" / "torch" / "__init__.py").read_text()
    diffs = "\n".join(re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "migrating_loops.md").read_text(), re.DOTALL))
    added = re.findall(r"^\+.*", diffs, re.MULTILINE)
    names = set(re.findall(r"\b(GlobalBatchSampler|DataLoader|exact|global_mean|Checkpoints)\(", "\n".join(added)))
    assert len(names) >= 4
    assert not [name for name in names if f'"{name}"' not in kit]


def test_the_readme_shows_rows_of_the_check_that_a_tutorial_prints() -> None:
    readme = (ROOT / "README.md").read_text()
    tutorial = (ROOT / "docs" / "make_it_survive.md").read_text()
    shown = re.findall(r"^[\w-]+ +(?:passed|failed) .*$", readme, re.MULTILINE)
    assert len(shown) == 3
    assert not [line for line in shown if line not in tutorial]
