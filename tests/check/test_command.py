"""Run ``samestep check`` on program/plain.py, a script without a framework whose ranks record their steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import tutorial
from samestep_check.job import Job
from samestep_check.records import Records
from samestep_check.rows import ROWS

PLAIN = Path(__file__).with_name("program") / "plain.py"
MAIN = "from samestep.__main__ import main; raise SystemExit(main())"
Done = tuple[subprocess.CompletedProcess[str], dict[str, str]]
Replaced = tuple[tuple[str, str], ...]
NO_PASSWD = """
import pwd

def getpwuid(uid):
    raise KeyError(uid)

pwd.getpwuid = getpwuid
"""
PADDED = (("range(rank, 7, n)", "[*range(rank, 7, n), 0]"),)


def program(folder: Path, script: Path, replaced: Replaced = ()) -> Path:
    """Copy a script into a new folder, replace texts in the copy, and return the folder."""
    text = script.read_text()
    for before, after in replaced:
        assert before in text
        text = text.replace(before, after)
    folder.mkdir()
    (folder / script.name).write_text(text)
    return folder


def check(folder: Path, *words: str, **environ: str) -> Done:
    """Run a check in a folder, and return the finished process and the verdict of each row."""
    junit = folder.parent / "junit.xml"
    command = [sys.executable, "-c", MAIN, "check", f"--junit={junit}", *words]
    environ = {**os.environ, **environ}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=1200, check=False)
    verdicts = {}
    for case in ElementTree.parse(junit).getroot() if junit.exists() else []:  # noqa: S314  # made here
        verdicts[case.attrib["name"]] = (case[0].text or case[0].attrib["message"]).partition(":")[0]
    return done, verdicts


def plain(folder: Path, rows: str, *words: str, **environ: str) -> Done:
    return check(folder, f"--faults={rows}", *words, "--", sys.executable, "plain.py", "-n", "2", **environ)


def test_a_sound_script_passes_each_row_or_the_row_is_not_seen(tmp_path: Path) -> None:
    """Run all rows, write the HTML page, and check that no files are left."""
    folder = program(tmp_path / "sound", PLAIN)
    page = tmp_path / "page.html"
    (tmp_path / "temporary").mkdir()
    done, verdicts = plain(folder, "all", f"--html={page}", TMPDIR=str(tmp_path / "temporary"))
    assert done.returncode == 0, done.stdout + done.stderr
    not_seen = {name for name, verdict in verdicts.items() if verdict == "not seen"}
    # The script has no weights and no DataLoader.
    assert not_seen == {"resume-optimizer", "odd-batch", "replicas", "workers"}, done.stdout
    assert len(verdicts) == len(ROWS)
    assert {*verdicts.values()} == {"passed", "not seen"}, done.stdout
    assert "<td>no optimizer of torch</td>" in page.read_text()
    assert [*folder.iterdir()] == [folder / "plain.py"]
    assert not [*(tmp_path / "temporary").iterdir()]


def test_a_failed_row_has_its_cause_and_its_page(tmp_path: Path) -> None:
    """Test the cause below a failed row, and the option --require."""
    folder = program(tmp_path / "unsound", PLAIN, PADDED)
    done, verdicts = plain(folder, "evaluation")
    assert (done.returncode, verdicts) == (1, {"evaluation": "failed"})
    assert "usual cause: DistributedSampler pads the evaluation set; see docs/same_step.md" in done.stdout
    done, verdicts = plain(folder, "evaluation", "--require=epoch-order")
    assert (done.returncode, verdicts["epoch-order"]) == (0, "passed")


@pytest.mark.parametrize("allowed", [False, True])
def test_a_write_outside_of_the_copy_stops_the_check(tmp_path: Path, allowed: bool) -> None:
    """A check protects the user's files, including files that its copies of the folder share with the folder."""
    outside = tmp_path / "unsound" / ".git" / "precious"
    folder = program(
        tmp_path / "unsound",
        PLAIN,
        (("def train() -> None:\n", f"open({str(outside)!r}, 'w')\n\n\ndef train() -> None:\n"),),
    )
    outside.parent.mkdir()
    done, verdicts = plain(folder, "evaluation", *([f"--allow-write={outside}"] if allowed else []))
    assert outside.exists() == allowed
    assert done.returncode == (0 if allowed else 2), done.stderr
    assert allowed == (verdicts == {"evaluation": "passed"})
    assert allowed or done.stderr.startswith(f"error: the script writes to {outside}, outside of its folder: add")


def test_a_file_outside_of_the_copy_is_not_deleted_by_a_descriptor_of_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "unsound" / ".git" / "precious"
    delete = f"import os\n\nos.unlink('precious', dir_fd=os.open({str(outside.parent)!r}, os.O_RDONLY))\n\n\n"
    start = "def train() -> None:\n"
    folder = program(tmp_path / "unsound", PLAIN, ((start, delete + start),))
    outside.parent.mkdir()
    outside.touch()
    done, _ = plain(folder, "evaluation")
    assert outside.exists()
    assert done.stderr.startswith(f"error: the script writes to {outside}, outside of its folder: add")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults=no", "--", "true"], "--faults: there is no row 'no': choose quick, all, or of rank-killed,"),
        (["--copy-limit=0.001", "--", "true"], "the folder is larger than 0.001 MB: link data by --link"),
        (["--", "false"], "the undisturbed script: at 2 ranks: exit 1"),
        (["--", "no-such-program"], "cannot run no-such-program"),
        ([], "COMMAND is missing: write it after --"),
        (["--keep=kept", "--", "true"], "copies in "),
        (["--keep=/dev/null", "--", "true"], "--keep /dev/null: File exists: name a new folder"),
        (["--json=no/such/folder", "--", "true"], "--json no/such/folder: No such file or directory: name a file"),
        (["--link=no", "--", "true"], "--link "),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    """Each mistake ends the check with exit code 2 and one error line."""
    done, _ = check(program(tmp_path / "sound", PLAIN), *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_script_that_stops_two_seconds_after_term_stops(tmp_path: Path) -> None:
    """A short run ends before the stop, so the check repeats the run with slower steps."""
    replaced = (
        ("lambda number, _: asked.append(number)", "lambda *_: asked.append(time.monotonic())"),
        ('f"{len(asked)}"', 'f"{sum(time.monotonic() - asking > 2 for asking in asked)}"'),
    )
    done, verdicts = plain(program(tmp_path / "sound", PLAIN, replaced), "term")
    assert verdicts == {"term": "passed"}, done.stdout


def test_an_adapter_that_raises_ends_the_check(tmp_path: Path) -> None:
    """An exception of the adapter's code ends the check. A hook that is never called causes a note."""
    folder = program(tmp_path / "sound", PLAIN)
    (folder / "adapter.py").write_text("raise RuntimeError('a mistake')\n")
    done, _ = plain(folder, "evaluation", "--adapter=adapter.py")
    assert done.returncode == 2
    assert done.stderr == "error: the adapter raises RuntimeError: a mistake: correct the file of --adapter\n"
    (folder / "adapter.py").write_text(
        "import samestep_record\nsamestep_record.after_import('no_such_module', print)\n"
    )
    done, _ = plain(folder, "evaluation", "--adapter=adapter.py")
    assert "note: the adapter's function for no_such_module is never called" in done.stdout


def test_rows_can_be_listed_and_written_as_json(tmp_path: Path) -> None:
    """Test --list and --json."""
    folder = program(tmp_path / "unsound", PLAIN, PADDED)
    done, _ = check(folder, "--list")
    assert done.stdout.splitlines()[0].split() == ["rank-killed", "2", "starts", "A", "rank", "is", "killed"]
    done, _ = plain(folder, "evaluation", f"--json={tmp_path / 'table.json'}")
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert (row["row"], row["verdict"], row["page"]) == ("evaluation", "failed", "docs/same_step.md")


def test_a_check_needs_no_home_folder_and_no_asserts(tmp_path: Path) -> None:
    """Simulate a container whose user has no entry in passwd, with PYTHONOPTIMIZE=1."""
    folder = program(tmp_path / "sound", PLAIN)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_PASSWD)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    words = ["env", "-u", "HOME", sys.executable, "-c", MAIN, "check", "--faults=evaluation"]
    done = subprocess.run(
        [*words, "--", sys.executable, "plain.py", "-n", "2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONOPTIMIZE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_sitecustomize_of_the_user_also_runs(tmp_path: Path) -> None:
    """The check's own sitecustomize shadows the user's sitecustomize, so the check must also run the user's module."""
    folder = program(
        tmp_path / "sound", PLAIN, (("def train() -> None:\n", "def train() -> None:\n    assert sys.chained\n"),)
    )
    (folder / "modules").mkdir()
    (folder / "modules" / "sitecustomize.py").write_text("import sys\nsys.chained = True\n")
    path = os.pathsep.join([str(folder / "modules"), os.environ.get("PYTHONPATH", "")])
    done, verdicts = plain(folder, "evaluation", PYTHONPATH=path)
    assert verdicts == {"evaluation": "passed"}, done.stderr


def test_the_fixture_fails_a_test_with_the_table(tmp_path: Path) -> None:
    """Test the pytest plugin with a row that passes and a row that fails."""
    folder = program(tmp_path / "unsound", PLAIN, PADDED)
    command = f"{sys.executable} plain.py -n 2"
    (folder / "test_it.py").write_text(
        f"def test_good(samestep_check): samestep_check({command!r}, '--faults=epoch-order')\n"
        f"def test_bad(samestep_check): samestep_check({command!r}, '--faults=evaluation')\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "samestep_check.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "evaluation          failed       at 2 ranks" in done.stdout


Events = list[tuple[str, dict[str, Any]]]
STEP: tuple[str, dict[str, Any]] = ("step", {})


def records(folder: Path, *ranks: Events) -> Records:
    """Write a file of events for each rank, one event per second, and return the `Records` of these files."""
    for rank, events in enumerate(ranks):
        lines = [{"event": name, "time": at, "rank": rank, **values} for at, (name, values) in enumerate(events)]
        (folder / f"{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Records(folder)


def begin(loader: int, batches: int, *subsets: list[int]) -> tuple[str, dict[str, Any]]:
    return "iterate", {"loader": loader, "size": 20, "batches": batches, "subsets": subsets}


def batch(loader: int, *indices: int, trains: bool = True) -> tuple[str, dict[str, Any]]:
    return "batch", {"loader": loader, "indices": indices, "trains": trains}


def end(loader: int) -> tuple[str, dict[str, Any]]:
    return "end", {"loader": loader}


def test_batches_belong_to_the_steps_that_used_them(tmp_path: Path) -> None:
    """Test a loader that prefetches as Accelerate's does, next(iter(loader)), and a step without a batch."""
    epochs: list[Events] = [
        [begin(k, 3), batch(k, 0), batch(k, 1), STEP, batch(k, 2), STEP, end(k), STEP] for k in (1, 2)
    ]
    whole = records(tmp_path, epochs[0] + epochs[1]).steps()
    assert [(step.epoch, step.indices) for step in whole] == [(k, [i]) for k in range(2) for i in range(3)]
    killed = records(tmp_path, epochs[0][:-2]).steps()
    assert [step.indices for step in killed] == [[0], [1]]
    accumulated: Events = [begin(1, 3), batch(1, 0), batch(1, 1), STEP, batch(1, 2), STEP, end(1)]
    assert [step.indices for step in records(tmp_path, accumulated).steps()] == [[0, 1], [2]]
    shown: Events = [STEP, begin(1, 2), batch(1, 9), ("gone", {"loader": 1}), begin(2, 2), batch(2, 0), STEP]
    assert [step.indices for step in records(tmp_path, shown).steps()] == [[0]]


def test_a_loader_that_ends_before_its_first_step_trains_or_evaluates(tmp_path: Path) -> None:
    """After a resume in front of an epoch's last batch, a script that prefetches batches ends the loader first."""

    def numbered(loader: int, number: int) -> tuple[str, dict[str, Any]]:
        name, values = batch(loader, number)
        return name, {**values, "number": number}

    prefetched: Events = [begin(1, 1), numbered(1, 5), end(1), ("step", {"used": [5]})]
    evaluated: Events = [begin(2, 1), numbered(2, 6), end(2)]
    trained: Events = [begin(3, 1), numbered(3, 7), ("step", {"used": [7]}), end(3)]
    found = records(tmp_path, [*prefetched, *evaluated, *trained])
    assert [(step.epoch, step.indices) for step in found.steps()] == [(0, [5]), (1, [7])]
    assert [[*each.counts] for each in found.evaluations()] == [[6]]


def test_an_evaluation_of_a_split_is_whole(tmp_path: Path) -> None:
    """Test an evaluation of a Subset, and padding that Accelerate drops."""

    def rank(*indices: int, subsets: list[list[int]], dropped: int = 0) -> Events:
        events: Events = [begin(1, 1, *subsets), batch(1, *indices, trains=False), end(1)]
        if dropped:
            return [*events, ("dropped", {"count": dropped})]
        return events

    split = [[3, 12345]]
    (found,) = records(tmp_path, rank(0, 1, subsets=split), rank(2, 0, subsets=split, dropped=1)).evaluations()
    assert (found.counts.total(), len(found.counts), found.size) == (3, 3, 3)
    parts = [[2, 1]], [[2, 2]]
    (found,) = records(tmp_path, rank(0, 1, subsets=parts[0]), rank(2, 3, subsets=parts[1])).evaluations()
    assert found.size == 20  # each rank has its own part of the dataset
    (found,) = records(tmp_path, rank(0, 1, subsets=parts[0] + split), rank(2, subsets=parts[1] + split)).evaluations()
    assert found.size == 3  # each rank has its own part of the split


def test_an_evaluation_that_a_rank_leaves_early_is_omitted(tmp_path: Path) -> None:
    """Lightning's sanity check reads two batches of each rank, which is the whole shard of only one rank."""

    def reads(loader: int, batches: int, *indices: int) -> Events:
        return [begin(loader, batches), *(batch(loader, index, trains=False) for index in indices)]

    sanity = reads(1, 3, 0, 1), reads(1, 2, 3, 4)
    probe: tuple[Events, Events] = reads(3, 3, 0), []  # only the first rank looks at a batch
    train: Events = [begin(4, 1), batch(4, 9), STEP]
    evaluation = reads(2, 3, 0, 1, 2), reads(2, 2, 3, 4)
    for before, between in ((sanity, []), (sanity, train), (probe, train)):
        ranks = [[*before[k], *between, *evaluation[k]] for k in range(2)]
        (found,) = records(tmp_path, *ranks).evaluations()
        assert sorted(found.counts.elements()) == [0, 1, 2, 3, 4]


def test_a_rank_that_continues_in_its_process_needs_no_restart(tmp_path: Path) -> None:
    """After a rank is killed, the other ranks of Horovod Elastic continue in the same processes."""
    ranks = [[begin(1, 9), *(event for i in range(n) for event in (batch(1, i), STEP))] for n in (4, 2)]
    assert [step.indices for step in records(tmp_path, *ranks).continued(since=4.5)] == [[2], [3]]
    assert not records(tmp_path, *ranks).continued(since=0.5)


def test_a_script_may_create_sockets_with_long_paths_below_tmpdir(tmp_path: Path) -> None:
    """Linux limits the path of a socket to 107 bytes. Ray's sockets have 65 bytes after TMPDIR."""
    command = [sys.executable, "-I", "-c", "import os; print(os.environ['TMPDIR'])"]
    job = Job(command, tmp_path, tmp_path / "records-123", {})
    job.process.wait(60)
    assert job.output() == f"{tmp_path}/t123\n"


def test_the_error_of_a_spawned_rank_is_named(tmp_path: Path) -> None:
    """Multiprocessing prints its own exception, without a message, before the traceback of the rank."""
    output = "torch.multiprocessing.spawn.ProcessRaisedException: \n\nValueError: 3 is odd"
    command = [sys.executable, "-I", "-c", f"print({output!r})"]
    job = Job(command, tmp_path, tmp_path / "records-1", {})
    job.process.wait(60)
    assert job.error_line() == "ValueError: 3 is odd"


def test_the_page_has_the_adapter_that_the_soak_runs() -> None:
    """Compare the adapter in docs/check_your_own.md with adapter.py."""
    page = Path(__file__).parents[2] / "docs" / "check_your_own.md"
    assert f"```python\n{PLAIN.with_name('adapter.py').read_text()}```" in page.read_text()


def test_the_diffs_of_the_tutorial_apply(tmp_path: Path) -> None:
    """Apply the diffs of docs/make_it_survive.md. The soak also runs the checks of the page's tables."""
    page = tutorial.PAGE.read_text()
    for count, table in enumerate(tutorial.tables(tmp_path, page), 1):
        script = (tmp_path / "train.py").read_text()
        compile(script, f"the script before table {count}", "exec")
        assert tutorial.rows(table.text), f"table {count} is empty"
    assert f"## The finished script\n\nThis is the script after all changes:\n\n```python\n{script}```" in page
    assert page.count("```diff\n") == 9
    verdicts = {row: verdict for row, (verdict, _) in tutorial.rows(table.text).items()}
    assert verdicts == dict.fromkeys(ROWS, "passed") | {"workers": "not seen"}
