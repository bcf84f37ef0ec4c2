"""Test each command of the pages without a framework; docs/commands.md lists the commands that no test runs.

test_commands_started.py starts apps, with the options in a page's comment.
"""

from __future__ import annotations

import configparser
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import commands
import numpy as np
import pytest
from commands import Command
from harness import APPS, options_of
from repository import Ended, clone, ran
from samestep import ConfigError
from samestep.__main__ import PROGRAMS
from samestep.checkpoint import save_weights
from samestep_check.command import build_parser as check_parser
from samestep_check.command import parse_rows
from samestep_launch import run_command

ROOT = commands.ROOT
LIMIT = 120.0


@cache
def ruled() -> dict[str, list[Command]]:
    """Return the commands that match a rule, by their pages."""
    found: dict[str, list[Command]] = {}
    for command in commands.found():
        if commands.rule_of(command.filled):
            found.setdefault(command.page, []).append(command)
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("commands") / "samestep")


def shell(repository: Path, text: str) -> Ended:
    """Run a page's command in bash, in a clone. PATH starts with this Python, and launchers' variables are unset."""
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ["PATH"] = f"{repository / 'bin'}{os.pathsep}{environ['PATH']}"
    environ["HOME"] = str(repository.parent)
    (repository / "bin").mkdir(exist_ok=True)
    python = shlex.quote(sys.executable)
    programs = {"samestep": f"{python} -m samestep", **dict.fromkeys(("python", "python3", "python3.11"), python)}
    for name, program in programs.items():
        link = repository / "bin" / name
        if not link.exists():
            link.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            link.chmod(0o755)
    return ran(repository, "bash", "-c", text, environ=environ, limit=LIMIT)


@cache  # pages repeat commands
def repeated(repository: Path, text: str) -> Ended:
    """Run a command that leaves nothing behind, once for all pages."""
    return shell(repository, text)


@pytest.mark.parametrize("page", ruled())
def test_the_commands_of_a_page_work(repository: Path, page: str) -> None:
    """Check the commands that match a rule, in the order of the page."""
    wrong = [
        f"{command.place}: {problem}"
        for command in ruled()[page]
        for problem in CHECKS[commands.rule_of(command.filled) or ""](repository, command.filled)
    ]
    assert not wrong, "\n".join(wrong)


# Each check yields the problems of a command as text.


def _ends(
    repository: Path, text: str, codes: tuple[int, ...] = (0,), run: Callable[[Path, str], Ended] = repeated
) -> Iterator[str]:
    done = run(repository, text)
    if done.returncode not in codes:
        yield f"{text} ends with {done.returncode}: {(done.stderr or done.stdout)[-1000:]}"


def as_it_stands(repository: Path, text: str) -> Iterator[str]:
    # Without an Ascend device, the addresses of devices come from a file.
    server = re.search(r"make_rank_table\.py make .*\b(\d+)\b --out", text)
    if server and "--device-ips" not in text:
        addresses = [f"address_{i}=192.168.{server[1]}.{i + 1}\n" for i in range(8)]
        (repository / "hccn.conf").write_text("".join(addresses))
        text += " --hccn-conf hccn.conf"
    yield from _ends(repository, text, (0, 1) if text.startswith("diff ") else (0,), shell)


def shown(repository: Path, text: str) -> Iterator[str]:
    """Run the script with --dry-run, which installs nothing and checks N, the options and the machines."""
    text = re.sub(r"PYTHON=\S+ ", "PYTHON=python ", text)
    if text.endswith(" FILE"):
        save_weights(repository / "FILE", {"fc.weight": np.zeros((10, 4), np.float32)})
    yield from _ends(repository, text if "--help" in text else f"{text} --dry-run")


def seen(repository: Path, text: str) -> Iterator[str]:
    for name in ("x", "mnist_ddp/x", *re.findall(r"\bruns/(\w+)", text)):
        (repository / "runs" / name / "log").mkdir(parents=True, exist_ok=True)
    yield from _ends(repository, text)


def planned(repository: Path, text: str) -> Iterator[str]:
    yield from _ends(repository, f"{text} --dry-run")


def collected(repository: Path, text: str) -> Iterator[str]:
    words = shlex.split(text)[2:]
    own = words
    selected = []
    if "--" in words:
        own = words[: words.index("--")]
        selected = words[words.index("--") + 1 :]
    if own in (["--changed"], ["--fast"]):  # tested in tests/test_changed.py and tests/test_matrix.py
        return
    if own and (len(own) != 2 or own[0] != "-e"):
        yield "give scripts/test.sh -e and names alone"
        return
    names = own[1].split(",") if own else []
    yield from (f"tox.ini has no environment {name}" for name in names if name not in environments())
    command = environments().get(names[0], "") if names else ""
    program = re.match(r"python (\S+)", command)
    if program:  # the environment runs no tests
        yield from _unknown(Path(program[1]), " ".join(["", *selected]))
    elif selected:
        app = next((app for app in APPS if names[0].startswith(f"{app}-")), "mnist_ddp")
        paths = ["-o", re.findall(r"testpaths=[^\"]*", command)[0]] if "testpaths=" in command else []
        pytest_words = ["python", "-m", "pytest", "--collect-only", "--quiet", f"--app={app}", *paths, *selected]
        yield from _ends(repository, shlex.join(pytest_words))


def _unknown(path: Path, words: str) -> Iterator[str]:
    """Yield a problem for each option in these words that the program's source lacks."""
    source = (ROOT / path).read_text()
    options = re.findall(r" (--[\w-]+)", words)
    yield from (f"{path} has no option {option}" for option in options if f'"{option}"' not in source)


@cache
def tox() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "tox.ini")
    return config


def environments() -> dict[str, str]:
    """Return the commands of tox.ini's environments by name; `a-{b,c}` gives two names."""
    found: dict[str, str] = {}
    for section in tox().sections():
        if section.startswith("testenv:"):
            parts = re.split(r"\{(.*?)\}", section.removeprefix("testenv:"))
            choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
            found |= dict.fromkeys(map("".join, itertools.product(*choices)), tox()[section]["commands"])
    return found


def known(repository: Path, text: str) -> Iterator[str]:
    path = Path(text.split()[1])
    if not (ROOT / path).is_file():
        yield f"there is no {path}"
        return
    yield from _unknown(path, text)
    tests = "".join(test.read_text() for test in (ROOT / "tests").glob("*/test_*.py"))
    if not re.search(rf'"{path.stem}"|{path.name}', tests):
        yield f"no test runs {path}"


def parsed(repository: Path, text: str) -> Iterator[str]:
    app, words = re.findall(r" apps/(\w+)/train\.py(.*)", text)[0]
    try:
        options_of(app).parse(shlex.split(words))
    except Exception as error:  # a ConfigError, or an app that does not exist
        yield str(error)


def samestep(repository: Path, text: str) -> Iterator[str]:
    words = shlex.split(text)[1:]
    if len(words) == 1 and words[0] in PROGRAMS:  # the page only names the command
        return
    try:
        if words[0] == "check":
            options = check_parser().parse(words[1 : [*words, "--"].index("--")])
            parse_rows("--faults", options.faults)
            return
        options = run_command.build_parser().parse(words[1:])
    except ConfigError as error:
        yield str(error)
        return
    if not (ROOT / options.program).is_file():
        yield f"there is no {options.program}"


CHECKS = {
    "as it stands": as_it_stands,
    "shown": shown,
    "planned": planned,
    "seen": seen,
    "collected": collected,
    "known": known,
    "parsed": parsed,
    "samestep": samestep,
}


# --- what is not run -------------------------------------------------------------------------------------------------


def test_every_command_is_run_or_listed_with_its_reason() -> None:
    """Fail for a command that nothing runs, and for a row whose command is on no page."""
    assert CHECKS.keys() == commands.RULES.keys()
    listed = commands.not_run()
    pages: dict[str, set[str]] = {}
    unknown = []
    for command in commands.found():
        if commands.rule_of(command.filled) or command.started:
            continue
        text = commands.of_any_app(command.text)
        pages.setdefault(text, set()).add(commands.of_any_app(command.page))
        if text not in listed:
            unknown.append(command.place)
    remedy = "give it a rule in tests/commands.py, a comment `<!-- run in ... -->`, or a row in docs/commands.md"
    assert not unknown, f"nothing runs these: {remedy}\n" + "\n".join(unknown)
    stale = "\n".join(sorted(listed.keys() - pages.keys()))
    assert not stale, f"no page has these, or a test runs them: take their rows out of docs/commands.md\n{stale}"
    assert {text: where for text, (where, _) in listed.items()} == pages


def test_a_block_is_all_commands_or_marks_them() -> None:
    """If the first line of a block is a command without `$ `, each line must be a command."""
    listed = commands.not_run()
    lines = [each for each in commands.found() if not commands.is_command(each.text, 0)]
    unknown = "\n".join(each.place for each in lines if commands.of_any_app(each.text) not in listed)
    assert not unknown, f"a program that tests/commands.py lacks, or output without `$ ` before commands\n{unknown}"


def test_a_page_that_has_an_app_started_names_an_app_and_a_start() -> None:
    for page in commands.pages():
        text = (ROOT / page).read_text()
        prose = commands.INLINE.sub("", commands.FENCE.sub("", text))
        notes = commands.NOTE.findall(prose)
        assert len(notes) == prose.count("<!-- run"), page
        assert {app for app, _ in notes} <= {*APPS, "collectives_lab"}, page
        found = list(commands.commands(page, text))
        for note in notes:
            assert any((each.app, each.added) == note and each.started for each in found), (page, note)


PAGE = """
<!-- run in mnist_ddp: --max-steps=2 -->
```
bash scripts/run_mnist_ddp.sh 4    # a comment
NNODES=2 MASTER_ADDR=10.0.0.1 bash scripts/run_mnist_ddp.sh 4 \\
    --lr 0.1
python x.py &
```

`torchrun` is a name, `bash scripts/run_<app>.sh N [options]` and ``pip
install x`` are not; `python -u x.py` <!-- run in cifar_ddp: -->
but not `<!-- run in cifar_ddp: -->` in `python -m x`

```
$ python -m this
Beautiful is better than ugly.
```

```
python: can't open file
```

```python
import this
```
"""


def test_first_cells_of_other_tutorials_commands_are_not_ours() -> None:
    row = "| `ps -ef \\| python a.py`, `python b.py` | `python c.py` |\n"
    assert [each.text for each in commands.commands("docs/coming_from/x.md", row)] == ["python c.py"]
    assert [each.text for each in commands.commands("docs/x.md", row)] == ["python b.py", "python c.py"]


def test_commands_are_found_where_they_stand() -> None:
    found = list(commands.commands("page.md", PAGE))
    assert [(command.line, command.text, command.started) for command in found] == [
        (4, "bash scripts/run_mnist_ddp.sh 4", "bash scripts/run_mnist_ddp.sh 4 --max-steps=2"),
        (5, "NNODES=2 MASTER_ADDR=10.0.0.1 bash scripts/run_mnist_ddp.sh 4 --lr 0.1", None),
        (7, "python x.py", "python x.py --max-steps=2"),
        (15, "python -m this", None),
        (10, "bash scripts/run_<app>.sh N [options]", None),
        (10, "pip install x", None),
        (11, "python -u x.py", "python -u x.py"),
        (12, "python -m x", None),
    ]
    assert found[4].filled == "bash scripts/run_mnist_ddp.sh 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bash scripts/run_mnist_ddp.sh 4 --epoch 3", "--epochs"),
        ("diff apps/mnist_ddp/train.py apps/no_such/train.py", "No such file"),
        ("bash scripts/test.sh -e mnist_dpp-cpu", "no environment mnist_dpp-cpu"),
        ("bash scripts/test.sh -e core -- tests/test_docs.py -k no_such", "ends with 5"),
        ("python3.11 benchmarks/throughput.py --app=mnist_ddp", "no option --app"),
        ("python3.11 benchmarks/no_such.py", "there is no benchmarks/no_such.py"),
        ("torchrun apps/mnist_ddp/train.py --epoch 3", "--epoch"),
        ("samestep run -n 0 docs/own_loop_run.py", "--nproc"),
        ("samestep run -n 2 docs/no_such.py", "there is no docs/no_such.py"),
        ("samestep check --faults no-such -- torchrun train.py", "there is no row 'no-such'"),
        ("bash scripts/new_app.sh my_app --from no_such", "no_such is no app"),
    ],
)
def test_a_command_that_no_longer_works_is_reported(repository: Path, text: str, message: str) -> None:
    (problem,) = CHECKS[commands.rule_of(text) or ""](repository, text)
    assert message in problem
