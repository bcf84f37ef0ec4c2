"""Test that a test runs each statement of the tutorial pages that was wrong once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = "docs/coming_from"
# Corrected statements of these pages: a part of the text, and the test that runs it.
RUN_BY = {
    (f"{TUTORIALS}/pytorch_ddp_dlc.md", "run_mnist_ddp.sh 2 --dataset mnist-5k"): (
        "tests/test_statements.py",
        "test_the_first_command_trains_on_the_same_data_with_and_without_a_network",
    ),
    (f"{TUTORIALS}/mindspore_ascend.md", "make --server 10.0.0.1 --form group --device-ips 192.1.27.6,192.2.27.6"): (
        "tests/resnet50_mindspore/test_rank_table.py",
        "test_make_writes_the_tutorials_table",
    ),
    (f"{TUTORIALS}/mindspore_ascend.md", "`log/rank-<r>.log` in the run dir, which has the losses"): (
        "tests/resnet50_mindspore/test_each_device.py",
        "test_a_rehearsal_on_cpu_takes_the_steps_of_one_process",
    ),
    (f"{TUTORIALS}/pytorch_collectives.md", "`straggler --where aggregation --delays 6000`: after the backward pass"): (
        "tests/collectives_lab/test_collectives_lab.py",
        "test_the_timeline_accounts_for_every_moment_of_every_rank",
    ),
    (f"{TUTORIALS}/pytorch_collectives.md", "The console has a table for each condition"): (
        "tests/collectives_lab/test_collectives_lab.py",
        "test_the_timeline_accounts_for_every_moment_of_every_rank",
    ),
    (f"{TUTORIALS}/paddle.md", "`fleet.py` started by fleetrun"): (
        "tests/lenet_paddle/test_lenet_paddle.py",
        "test_the_tutorials_five_programs_take_the_same_steps",
    ),
    (f"{TUTORIALS}/paddle.md", "one address may be 127.0.0.1"): (
        "tests/lenet_paddle/test_lenet_paddle.py",
        "test_the_tutorials_five_programs_take_the_same_steps",
    ),
}


def read(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(("page", "statement"), RUN_BY)
def test_each_statement_for_the_tutorials_readers_that_was_wrong_has_a_test_that_runs_it(
    page: str, statement: str
) -> None:
    file, test = RUN_BY[page, statement]
    assert statement in " ".join(read(page).split())
    assert re.search(rf"^def {test}\(", read(file), re.MULTILINE)


def test_the_page_shows_what_the_check_of_the_tutorials_rank_table_prints() -> None:
    shown = re.findall(
        r"^\$ python (\S+ check \S+)\n(error: .*\n)", read(f"{TUTORIALS}/mindspore_ascend.md"), re.MULTILINE
    )
    command, printed = shown[0]
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (2, printed)
