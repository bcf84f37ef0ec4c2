"""Test that statements of the pages that were wrong once agree with the code, with results, and with each other."""

from __future__ import annotations

import json
import re
import runpy
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import commands
import pytest
from harness import APPS

ROOT = Path(__file__).resolve().parents[1]
APP_PAGES = {"coming_from": "docs/coming_from/*.md", "README": "README*.md"}
QUOTED_LINE = re.compile(r"\btrain\.py:(\d+)\s+in\s+(\w+)\s+\((.+?)\)[,;]", re.DOTALL)


def read(name: str) -> str:
    return (ROOT / name).read_text()


def one_line(text: str) -> str:
    return " ".join(text.split())


@cache
def cells() -> dict[str, Any]:
    """Return the results of `samestep check` on the programs of the scoreboard."""
    found: dict[str, Any] = json.loads(read("benchmarks/scoreboard/cells.json"))
    return found


def options_of(app: str) -> Any:
    return runpy.run_path(str(ROOT / "apps" / app / "options.py"))["build_parser"]()


def test_the_table_of_kills_has_a_date_and_a_commit() -> None:
    results = read("docs/same_step.md").partition("## Test results")[2]
    introduction = one_line(results.partition("|")[0])
    assert re.search(r"\d{4}-\d{2}-\d{2} \(commit [0-9a-f]{7}\)", introduction)


@pytest.mark.parametrize("app", APPS)
def test_the_help_of_an_app_promises_no_more_than_its_page(app: str) -> None:
    page = one_line(read(f"apps/{app}/README.md"))
    differs = "runs at different numbers of ranks differ" in page
    description = one_line(options_of(app).description or "")
    promises = "every step is the same at any number of ranks" in description
    assert not (differs and promises) or "--freeze-bn" in description


@pytest.mark.parametrize("app", APPS)
def test_the_limits_of_an_app_know_the_devices_on_which_it_ran(app: str) -> None:
    rows = re.findall(rf"^## {app}\n(.*?)(?=^## |\Z)", read("docs/devices.md"), re.MULTILINE | re.DOTALL)
    ran_on_gpu = re.search(r"^\| (?:cuda|gpu) \|.*\| run \|", rows[0], re.MULTILINE)
    assert not ran_on_gpu or "never on a GPU" not in one_line(read(f"apps/{app}/README.md"))


def test_pages_have_the_seconds_of_the_scoreboard() -> None:
    elastic = cells()["recovery-time"]["mnist_elastic"]["seen"].partition(" s ")[0]
    assert f"continues after {elastic} s" in one_line(read("docs/coming_from/horovod.md"))
    assert f"{elastic} 秒后继续" in read("docs/coming_from/horovod.zh.md")
    assert f"after {elastic} s" in one_line(read("apps/mnist_horovod/README.md"))


def test_tested_ways_of_several_machines_are_rows_of_the_devices() -> None:
    rows = read("docs/devices.md").splitlines()
    assert [row for row in rows if "test_horovod_starts_both_hosts_from_one_by_ssh" in row and "| run |" in row]
    scale_out = re.search(r"^\| collectives_lab \| (.*?) \|", read("docs/scale-out.md"), re.MULTILINE)
    assert scale_out
    assert scale_out[1] == "torchrun; `straggler` on one machine"
    assert "`straggler` works on one machine only" in read("apps/collectives_lab/README.md")


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("apps/mnist_elastic/README.md", r"(?m)^- All sockets listen on 127\.0\.0\.1"),
        ("apps/lenet_paddle/README.md", r"Paddle refuses the address 127\.0\.0\.1"),
        ("docs/troubleshooting.md", r"compiling, so raise `--first-step-timeout`\."),
    ],
)
def test_a_statement_without_its_condition_does_not_come_back(page: str, wrong: str) -> None:
    assert not re.search(wrong, read(page))


def test_lines_that_a_report_of_a_hang_quotes_are_in_the_program() -> None:
    source = read("apps/mnist_ddp/train.py").splitlines()
    quoted = QUOTED_LINE.findall(read("docs/hangs.md"))
    assert len(quoted) == 2
    for number, function, code in quoted:
        assert source[int(number) - 1].strip().startswith(one_line(code).removesuffix("..."))
        above = [line for line in source[: int(number)] if line.startswith("def ")]
        assert above[-1].startswith(f"def {function}(")


def first_starts() -> Iterator[tuple[str, str]]:
    """Yield each page for newcomers, and its first command that starts an app."""
    for pattern in APP_PAGES.values():
        for path in sorted(ROOT.glob(pattern)):
            page = str(path.relative_to(ROOT))
            found = [each.text for each in commands.commands(page, path.read_text()) if "scripts/run_" in each.text]
            if "collectives_lab" not in found[0]:  # its first command reads no data
                yield page, found[0]


@pytest.mark.parametrize(("page", "command"), list(first_starts()))
def test_the_first_command_trains_on_the_same_data_with_and_without_a_network(page: str, command: str) -> None:
    assert re.search(r"--dataset[ =](?:mnist-5k|synthetic-cifar10)", command)


def test_pages_name_the_versions_of_python_that_the_first_app_has_wheels_for() -> None:
    line = re.search(r"^# python: (.*)$", read("apps/mnist_ddp/requirements.in"), re.MULTILINE)
    assert line
    versions = line[1].split()
    for page, words in (
        ("README.md", "Python {} to {}"),
        ("README.zh.md", "Python {} 到 {}"),
        ("docs/first_run.md", "Python {} to {}"),
    ):
        assert words.format(versions[0], versions[-1]) in one_line(read(page))


def test_the_pages_of_horovod_label_it_as_legacy() -> None:
    readme = read("apps/mnist_horovod/README.md").splitlines()
    assert readme[2].startswith("**Horovod is legacy:**")
    row = re.search(r"^\| \[mnist_horovod\].*$", read("README.md"), re.MULTILINE)
    assert row
    assert "no release since 2023" in row[0]


def test_the_seconds_after_a_kill_are_those_of_the_measured_kills() -> None:
    rows = json.loads(read("benchmarks/recovery_time.json"))["rows"]
    words = {"rank": "a rank", "ranks": "all ranks", "save": "rank 0 during a save"}
    page = read("docs/speed.md")
    for row in rows:
        seconds = row["seconds"]
        assert len(seconds) == 10
        assert row["equal"]
        figures = [statistics.median(seconds), min(seconds), max(seconds)]
        cells = " | ".join(f"{each:.2f}" for each in figures)
        assert f"| {words[row['fault']]} | {row['method']} | {cells} |" in page
    a_rank = next(row for row in rows if (row["fault"], row["method"]) == ("rank", "fork"))
    assert f"[{statistics.median(a_rank['seconds']):.1f} s](docs/speed.md" in read("README.md")
