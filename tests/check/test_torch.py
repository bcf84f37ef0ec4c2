"""Run ``samestep check`` on a torch script (program/train.py), without faults and with one fault at a time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import own_loop_rows
import pytest
import table as table_of_scripts
import tutorial
from samestep_check import job
from test_command import Done, Replaced, check, program

TRAIN = Path(__file__).with_name("program") / "train.py"


def unloaded(name: str) -> Replaced:
    return ((f'        {name}.load_state_dict(state["{name}"])\n', ""),)


# For each fault: the row that must find it, and the replacements in the script.
FAULTS: dict[str, tuple[str, Replaced]] = {
    "random numbers by rank": ("one-rank", (("SEED + epoch)", "SEED + epoch + rank)"),)),
    "padded evaluation": (
        "evaluation",
        (
            ("DataLoader(own, batch_size=8)", "DataLoader(own.dataset, 8, sampler=DistributedSampler(own.dataset))"),
            ("import DataLoader,", "import DataLoader, DistributedSampler,"),
        ),
    ),
    "optimizer not saved": ("resume-optimizer", unloaded("optimizer")),
    "scheduler not saved": ("resume-optimizer", unloaded("scheduler")),
    "TERM ignored": ("term", (("signal.SIGTERM, lambda *_: stopping.fill_(1)", "signal.SIGTERM, signal.SIG_IGN"),)),
    "mean over ranks": (
        "odd-batch",
        (("** 2).sum()\n        loss", "** 2).mean()\n        loss"), ("/= count", "/= size")),
    ),
    "epoch not set": ("epoch-order", (("SEED + epoch)", "SEED)"),)),
    "written in place": (
        "save-killed",
        (
            ('FOLDER / f"{step:04}.pt"', 'FOLDER / "last.pt"'),
            ('path.with_suffix(".pt.tmp")', "path"),
            ("    temporary.rename(path)\n", ""),
        ),
    ),
    "resumed by epoch": ("resume-position", (("99, epoch, step % steps_per_epoch", "99, epoch, 0"),)),
    "fixed port": (
        "two-jobs",
        (
            (
                '"gloo", timeout',
                '"gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=dist.TCPStore('
                '"127.0.0.1", PORT, int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"), timeout',
            ),
        ),
    ),
}


def torchrun(folder: Path, rows: str) -> Done:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    return check(folder, f"--faults={rows}", "--", *launcher)


def test_two_rows_on_the_sound_script(tmp_path: Path) -> None:
    """Record torch's loaders and optimizers in a sound script, and compare a resumed run."""
    done, verdicts = torchrun(program(tmp_path / "sound", TRAIN), "resume-optimizer,resume-position")
    assert {*verdicts.values()} == {"passed"}, done.stdout + done.stderr
    assert done.returncode == 0


def test_two_rows_on_an_unsound_script(tmp_path: Path) -> None:
    """The script has two faults: a padded evaluation, and an epoch order that never changes."""
    replaced = FAULTS["padded evaluation"][1] + FAULTS["epoch not set"][1]
    done, verdicts = torchrun(program(tmp_path / "unsound", TRAIN, replaced), "epoch-order,evaluation")
    assert verdicts == {"epoch-order": "failed", "evaluation": "failed"}, done.stdout + done.stderr
    assert "at 2 ranks 1 of 25 examples count twice, 0 are missing" in done.stdout


def test_two_rows_on_forked_ranks(tmp_path: Path) -> None:
    """The ranks are forked after the import of torch. The recorder must still record each rank."""
    folder = program(tmp_path / "forked", TRAIN)
    head, first, rest = (folder / "train.py").read_text().partition("stopping = ")
    (folder / "train.py").write_text(f"{head}if __name__ == '__main__':\n{textwrap.indent(first + rest, '    ')}")
    run = "-m samestep run -n2 --start-method=fork --max-restarts=0 --run-dir=runs/x train.py"
    done, verdicts = check(folder, "--faults=resume-optimizer,rank-killed", "--", sys.executable, *run.split())
    assert verdicts == {"resume-optimizer": "passed", "rank-killed": "passed"}, done.stdout + done.stderr


STEPS = """
import torch
optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
def lose_a_rank():
    raise RuntimeError
for closure in (None, lose_a_rank, None):
    try:
        optimizer.step(closure)
    except RuntimeError:
        pass
"""


def test_a_step_that_fails_hides_none_of_the_next(tmp_path: Path) -> None:
    """Ranks of Horovod Elastic catch the exception of a step and continue."""
    assert len(recorded_steps(tmp_path, STEPS)) == 2


RESTORED = """
import torch
for order in ((0, 1), (1, 0)):
    weights = [torch.full((3,), 0.1 * k, requires_grad=True) for k in (1, 2)]
    optimizer = torch.optim.Adam(weights)
    for k in order:
        values = torch.full((3,), 0.3 * k + 0.7)
        names = ("exp_avg", "exp_avg_sq", "step") if k else ("step", "exp_avg_sq", "exp_avg")
        state = {"step": torch.tensor(2.0), "exp_avg": values, "exp_avg_sq": values.square()}
        optimizer.state[weights[k]] = {name: state[name] for name in names}
        weights[k].grad = torch.full((3,), 0.2)
    optimizer.step()
"""


def test_the_order_in_which_a_rank_restores_its_state_is_no_difference(tmp_path: Path) -> None:
    first, second = recorded_steps(tmp_path, RESTORED)
    assert first["weights"] == second["weights"]
    assert first["digest"] == second["digest"]


def recorded_steps(folder: Path, program: str) -> list[dict[str, Any]]:
    """Run a program under the recorder, and return the events of its steps."""
    config: dict[str, Any] = {name: str(folder) for name in ("work", "source", "records")} | {"checkpoint": "none"}
    config |= {"allowed": [tempfile.gettempdir()]}  # torch searches for a writable folder
    environ = {"PYTHONPATH": str(job.INSIDE), "SAMESTEP_INSIDE": json.dumps(config)}
    subprocess.run([sys.executable, "-c", program], env=environ, timeout=60, check=True)
    (record,) = folder.glob("*.jsonl")
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


@pytest.mark.soak
@pytest.mark.parametrize("rows", ["quick", "all"])
def test_no_row_of_the_sound_script_fails(tmp_path: Path, rows: str, table: list[str]) -> None:
    """The results of the soak include the duration of the rows."""
    begun = time.monotonic()
    done, verdicts = torchrun(program(tmp_path / "sound", TRAIN), rows)
    took = f"{time.monotonic() - begun:.0f} s"
    table.append(f"check: {rows} rows | 2 | none; {took} | {len(verdicts)} | {[*verdicts.values()].count('passed')}")
    others = {name: verdict for name, verdict in verdicts.items() if verdict != "passed"}
    assert others == ({"workers": "not seen"} if rows == "all" else {}), done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_row(tmp_path: Path, fault: str) -> None:
    """Put one fault into the sound script, and run the row that must find it."""
    row, replaced = FAULTS[fault]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replaced = tuple((before, after.replace("PORT", str(port))) for before, after in replaced)
    done, verdicts = torchrun(program(tmp_path / "unsound", TRAIN, replaced), row)
    assert verdicts == {row: "failed"}, done.stdout + done.stderr


@pytest.mark.soak
def test_the_tables_of_the_tutorial(tmp_path: Path, table: list[str]) -> None:
    """Apply the tutorial's changes in turn. After each change, the check must find the verdicts of the page."""
    verdicts = dict[str, str]()
    count = 0
    for shown in tutorial.tables(tmp_path, tutorial.PAGE.read_text()):
        found = {name: verdict for name, (verdict, _) in tutorial.rows(tutorial.run(tmp_path, shown.command)).items()}
        verdicts |= {name: verdict for name, (verdict, _) in tutorial.rows(shown.text).items()}
        assert found == {name: verdicts[name] for name in found}, f"table {count + 1}"
        count += 1
    table.append(f"check: the tables of the tutorial | 2 | none | {count} | {count}")


@pytest.mark.soak
def test_each_change_of_own_loop_gains_the_rows_of_the_page(table: list[str]) -> None:
    """Check the script of docs/own_loop.md before the first change and after each change."""
    found = own_loop_rows.table()
    assert found in own_loop_rows.PAGE.read_text()
    changes = len(found.splitlines()) - len(own_loop_rows.HEAD)
    table.append(f"check: the changes of docs/own_loop.md | {own_loop_rows.RANKS} | none | {changes} | {changes}")


@pytest.mark.parametrize("name", [name for name, script in table_of_scripts.scripts().items() if script.quick])
def test_a_script_of_the_table_has_the_verdicts_of_its_rows(name: str) -> None:
    """Check the quick rows of each script of the table."""
    script = table_of_scripts.scripts()[name]
    checked = table_of_scripts.check(script, ",".join(script.quick))
    assert not [*checked.wrong()]


def test_the_table_has_each_script_and_at_most_ten_in_the_matrix() -> None:
    """Compare table.toml with the scripts in its folder."""
    found = table_of_scripts.scripts()
    files = {path.stem for path in table_of_scripts.SCRIPTS.glob("*.py")} - {"training"}
    assert found.keys() == files
    assert sum(bool(script.quick) for script in found.values()) <= 10
    for name, script in found.items():
        docstring = (table_of_scripts.SCRIPTS / f"{name}.py").read_text().partition("\n")[0]
        # The fault of a script "Not seen" is one that no row can observe without an adapter.
        wanted = '"""Unsound: ' if script.failed else ('"""Sound: ', '"""Not seen: ')
        assert docstring.startswith(wanted), name


@pytest.mark.soak
@pytest.mark.parametrize("name", table_of_scripts.scripts())
def test_all_rows_of_a_script_of_the_table(name: str, table: list[str]) -> None:
    """A sound script must fail no row, and an unsound script must fail exactly the rows of the table."""
    checked = table_of_scripts.check(table_of_scripts.scripts()[name], "all")
    wrong = [*checked.wrong()]
    table.append(f"check: all rows of {name} | 2 | none | {len(checked.rows)} | {len(checked.rows) - len(wrong)}")
    assert not wrong
