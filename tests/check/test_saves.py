"""Test the rows of ``samestep check`` about saves: kills at each write, power cuts, full disks (program/saver.py)."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from samestep_check import filter_calls, rows_saves, states
from samestep_check.calls import AnnouncedCalls, Call, FilteredCalls, is_supported
from samestep_check.command import build_parser
from samestep_check.runner import ScriptRunner
from samestep_check.states import Recorded
from samestep_check.verdicts import NotSeen
from test_command import Replaced, check, program

SAVER = Path(__file__).with_name("program") / "saver.py"
ROWS = "save-every-write,save-power-cut,disk-full"
FSYNC = "        os.fsync(file.fileno())\n"
NEWEST = '    os.replace("new.tmp", f"checkpoint-{step}.json")\n'
OPENED = '    with open("new.tmp"'
CAUGHT = "        try:\n            save(step)\n        except OSError:\n            pass\n"
ONE_KEPT: Replaced = (("KEPT = 2", "KEPT = 1"),)
# For each fault: the row that must find it, words of the row's message, and the replacements in the script.
FAULTS: dict[str, tuple[str, str, Replaced]] = {
    "the newest is named by a file that is written in place": (
        "save-every-write",
        "killed before the write of latest at byte 0 (saver.py:",
        (
            (NEWEST, NEWEST + '    Path("latest").write_text(f"checkpoint-{step}.json")\n'),
            (
                "def load() -> int:\n",
                "def load() -> int:\n"
                '    if Path("latest").exists():\n'
                '        return int(json.loads(Path(Path("latest").read_text()).read_text())["step"])\n',
            ),
        ),
    ),
    "the old one is deleted first": (
        "save-every-write",
        "killed before the open of new.tmp",
        ((OPENED, "    for path in saves():\n        path.unlink()\n" + OPENED),),
    ),
    "no fsync": ("save-power-cut", "checkpoint-6.json is empty", ((FSYNC, ""), *ONE_KEPT)),
    "only one is kept": ("checkpoint-damaged", "a byte of checkpoint-4.json: starts over at step 0", ONE_KEPT),
    "written in place": (
        "disk-full",
        "no space for checkpoint-0.json",
        ((NEWEST, ""), ('open("new.tmp", "w")', 'open("checkpoint-0.json", "w")')),
    ),
    "a full disk without a word": (
        "disk-full",
        "exit 0 without an error or a warning",
        (
            ("        save(step)\n", CAUGHT),
            ('    with open("log.txt", "a") as log:\n        log.write(f"loss {1 / step}\\n")\n', ""),
        ),
    ),
}
needs_filter = pytest.mark.skipif(not is_supported(), reason="the kernel refuses a filter of calls")


@needs_filter
def test_a_sound_script_survives_each_moment_of_a_save(tmp_path: Path) -> None:
    """Restart a sound script from each state that a kill or a power cut during a save can leave."""
    folder = program(tmp_path / "sound", SAVER)
    done, verdicts = check(folder, f"--faults={ROWS}", "--", sys.executable, "saver.py")
    assert {*verdicts.values()} == {"passed"}, done.stdout + done.stderr
    assert len(verdicts) == 3
    assert "states of the save of step 6: each resumes, at step 4 or 6" in done.stdout
    assert "each file of the save of step 6 is fsynced before its rename" in done.stdout
    assert "no space for new.tmp (saver.py:23): exit 1" in done.stdout  # the line of os.replace
    assert [*folder.iterdir()] == [folder / "saver.py"]


@needs_filter
def test_an_older_checkpoint_survives_a_power_cut(tmp_path: Path) -> None:
    """Without fsync, a power cut can empty the newest checkpoint, but an older checkpoint stays."""
    folder = program(tmp_path / "sound", SAVER, ((FSYNC, ""),))
    done, verdicts = check(folder, "--faults=save-power-cut", "--", sys.executable, "saver.py")
    assert verdicts == {"save-power-cut": "passed"}, done.stdout + done.stderr
    assert "checkpoint-6.json without an fsync before the rename; if it is empty, an earlier" in done.stdout


@needs_filter
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_save_is_found_in_its_row(tmp_path: Path, fault: str) -> None:
    """Put one fault into the script, and run the row that must find it."""
    row, words, replaced = FAULTS[fault]
    folder = program(tmp_path / "unsound", SAVER, replaced)
    done, verdicts = check(folder, f"--faults={row}", "--", sys.executable, "saver.py")
    assert verdicts == {row: "failed"}, done.stdout + done.stderr
    assert words in done.stdout


SAVE = SAVER.read_text().partition("def save(step: int) -> None:\n")[2].partition("\n\ndef load")[0]
LOAD = SAVER.read_text().partition("def load() -> int:\n")[2].partition("\n\nstep = load()")[0]
BY_DESCRIPTORS: Replaced = (
    (
        "from samestep_record import record_step\n",
        "from samestep import checkpoint\nfrom samestep_record import record_step\n",
    ),
    (SAVE, '    checkpoint.save(Path("run"), "saver", step, {}, {}, {}, KEPT)\n    checkpoint.finish()\n'),
    (LOAD, '    found = checkpoint.newest(Path("run"), print)\n    return found.step if found else 0\n'),
)


BY_THREAD: Replaced = (
    ("import os\n", "import os\nimport threading\nimport time\n"),
    (
        "def load() -> int:\n",
        "def save_during_the_next_step(at: int) -> None:\n"
        "    while step == at < STEPS:\n"
        "        time.sleep(0.001)\n"
        "    save(at)\n\n\n"
        "def load() -> int:\n",
    ),
    ("    step += 1\n", "    step += 1\n    time.sleep(0.02)\n"),
    ("        save(step)\n", "        threading.Thread(target=save_during_the_next_step, args=[step]).start()\n"),
)


def test_a_thread_may_write_a_checkpoint_during_a_later_step(tmp_path: Path) -> None:
    """Write each checkpoint after the next step. The step of a write is then not the step of the checkpoint."""
    folder = program(tmp_path / "sound", SAVER, BY_THREAD)
    done, verdicts = check(folder, "--faults=resume-position,save-killed", "--", sys.executable, "saver.py")
    assert verdicts == {"resume-position": "passed", "save-killed": "passed"}, done.stdout + done.stderr


BY_PROCESS: Replaced = (
    ("import os\n", "import multiprocessing\nimport os\nimport time\n"),
    (
        "def load() -> int:\n",
        "def write_later(steps: multiprocessing.Queue) -> None:\n"
        "    for at in iter(steps.get, None):\n"
        "        time.sleep(0.03)\n"
        "        save(at)\n\n\n"
        "def load() -> int:\n",
    ),
    (
        "step = load()\n",
        "step = load()\n"
        "steps = multiprocessing.Queue()\n"
        'writer = multiprocessing.get_context("fork").Process(target=write_later, args=[steps])\n'
        "writer.start()\n",
    ),
    ("    step += 1\n", "    step += 1\n    time.sleep(0.02)\n"),
    (
        "        save(step)\n",
        "        steps.put(step)\nsteps.put(None)\nwriter.join()\nraise SystemExit(writer.exitcode and 1)\n",
    ),
)


def test_a_process_may_write_a_checkpoint_during_a_later_step(tmp_path: Path) -> None:
    """Write all checkpoints in another process, which takes no steps."""
    folder = program(tmp_path / "sound", SAVER, BY_PROCESS)
    done, verdicts = check(folder, "--faults=save-killed", "--", sys.executable, "saver.py")
    assert verdicts == {"save-killed": "passed"}, done.stdout + done.stderr


def test_a_checkpoint_that_is_renamed_by_descriptors_of_folders_is_seen(tmp_path: Path) -> None:
    """Rename a checkpoint by paths relative to descriptors of folders, as samestep does."""
    folder = program(tmp_path / "sound", SAVER, BY_DESCRIPTORS)
    done, verdicts = check(folder, "--faults=checkpoint-damaged", "--", sys.executable, "saver.py")
    assert verdicts == {"checkpoint-damaged": "passed"}, done.stdout + done.stderr
    assert "a byte of manifest.json: resumes an older one, at step " in done.stdout


def test_without_a_filter_the_calls_of_python_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the rows as on a kernel that refuses to install a filter of system calls."""
    (tmp_path / "copies").mkdir()
    monkeypatch.chdir(program(tmp_path / "sound", SAVER))
    command = [sys.executable, "saver.py"]
    runner = ScriptRunner(build_parser().parse([]), command, tmp_path / "copies")
    runner.results["can_filter"] = False
    words = rows_saves.save_every_write(runner)
    assert "4 states of the save of step 6: each resumes, at step 4 or 6; the kernel refuses a filter" in words
    with pytest.raises(NotSeen, match="the kernel refuses a filter"):
        rows_saves.save_power_cut(runner)
    words = rows_saves.disk_full(runner)
    assert words.startswith("new.tmp cannot grow beyond 10005 bytes (the kernel refuses a filter) (saver.py:")
    assert "exit 1: OSError: [Errno 27] File too large; a restart resumes" in words


# --- calls -----------------------------------------------------------------------------------------------------------

WRITER = """
import os
with open("a", "w") as file:
    file.write("x")
    file.flush()
    os.fsync(file.fileno())
os.rename("a", "b")
os.symlink("b", "link")
os.unlink("link")
try:
    os.close(os.open("read", os.O_RDWR | os.O_CREAT))
    os.truncate("full", 9)
except OSError as error:
    raise SystemExit(error.errno)
"""


@needs_filter
def test_calls_are_stopped_in_their_order_and_may_fail(tmp_path: Path) -> None:
    """Check which system calls the filter reports, and make one call fail."""
    found: list[Call] = []
    work = tmp_path / "work"
    work.mkdir()

    def handle(call: Call) -> int:
        found.append(call)
        return errno.ENOSPC if call.path.endswith("full") else 0

    calls = FilteredCalls(work, handle)
    command = calls.wrapped([sys.executable, "-c", WRITER])
    process = subprocess.Popen(command, cwd=work, pass_fds=calls.descriptors)
    calls.start()
    assert process.wait(30) == errno.ENOSPC
    calls.stop()
    assert calls.error is None
    names = [(call.kind, Path(call.path).name, Path(call.target or "").name) for call in found]
    assert names == [
        ("open", "a", ""),
        ("write", "a", ""),
        ("fsync", "a", ""),
        ("rename", "a", "b"),
        ("symlink", "link", ""),
        ("unlink", "link", ""),
        ("truncate", "full", ""),
    ]


def test_the_filter_fits_both_machines() -> None:
    """Build the filter of system calls for each processor architecture, and check its length."""
    for machine in filter_calls.MACHINES:
        names = filter_calls.numbers(machine)
        assert {"write", "openat", "renameat2", "unlinkat", "fsync"} <= {*names.values()}
        size = len(filter_calls.program(machine)) // 8
        assert size == 5 + 2 * len(names) + 3 * sum(name.startswith("open") for name in names.values())


def test_announced_calls_wait_for_the_answer(tmp_path: Path) -> None:
    """Send a call as the recorder's audit hook does if the kernel refuses a filter of system calls."""
    found: list[Call] = []

    def handle(call: Call) -> int:
        found.append(call)
        return 0

    calls = AnnouncedCalls(tmp_path / "calls", handle)
    calls.start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(calls.path))
        connection.sendall(b'["rename", "a", "b"]\n')
        assert connection.recv(1) == b"."
    calls.stop()
    assert found == [Call("rename", "a", "b")]


# --- states ----------------------------------------------------------------------------------------------------------


def recorded(time: float, kind: str, path: str, target: str | None = None, size: int = 0) -> Recorded:
    return Recorded(kind, path, target, time, size)


def save_of(time: float, name: str) -> list[Recorded]:
    written = [recorded(time, "open", "new.tmp"), recorded(time, "write", "new.tmp")]
    return [*written, recorded(time, "rename", "new.tmp", name, size=100)]


TIMES = [1.0, 2.0, 3.0, 4.0]  # when each step ended, in seconds


def test_saves_are_the_groups_of_calls_that_write_the_largest_file() -> None:
    """A log, a small file that each step renames, and a file after the last step belong to no save."""
    calls = [
        recorded(1.5, "write", "log.txt", size=0),
        recorded(1.6, "rename", "at-1.tmp", "at-1", size=9),
        *save_of(1.7, "1.pt"),
        recorded(2.5, "write", "log.txt", size=9),
        recorded(2.6, "rename", "at-2.tmp", "at-2"),
        recorded(3.5, "write", "log.txt", size=18),
        recorded(3.6, "rename", "at-3.tmp", "at-3"),
        *save_of(3.7, "3.pt"),
        recorded(3.8, "unlink", "1.pt"),
        *save_of(4.1, "4.pt"),
        recorded(4.2, "rename", "model.tmp", "model.pt", size=1000),
    ]
    found = states.saves(calls, TIMES)
    assert [(save.done, save.calls) for save in found[:2]] == [(1, [2, 3, 4]), (3, [9, 10, 11, 12])]
    assert [save.done for save in found[2:]] == [4]
    assert states.chosen(found, total=4) == found[1]
    assert states.chosen(found[:1], total=4) is None


def test_the_calls_of_a_thread_during_later_steps_are_one_save() -> None:
    """A file that is renamed much later, such as a table of losses, or that is deleted, does not join two steps."""
    calls = [
        recorded(1.5, "write", "table.tmp", size=0),
        recorded(1.9, "write", "new/model", size=1000),
        recorded(2.2, "write", "new/optimizer", size=10),
        recorded(3.1, "rename", "new", "step-1"),
        recorded(3.5, "write", "new/model", size=1000),
        recorded(3.6, "write", "new/part", size=10),
        recorded(3.7, "rename", "new/model", "step-3"),
        recorded(4.1, "unlink", "new/part"),
        recorded(5.5, "rename", "table.tmp", "table"),
    ]
    found = states.saves(calls, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert [(save.done, save.calls) for save in found] == [(1, [0, 1, 2, 3]), (3, [4, 6])]


def test_the_states_at_names_come_first_and_the_others_are_spread() -> None:
    """Choose from more states than --points allows."""
    calls = [recorded(1.5, "write", "a", size=k) for k in range(8)] + [recorded(1.6, "rename", "a", "b")]
    all_states = [states.State(k, {}) for k in range(10)]
    save = states.Save(1, [*range(9)], 2)
    found = [state.call for state in states.states_of(save, calls, all_states, most=5)]
    assert found == [0, 9, 8, 5, 2]


def test_a_power_cut_empties_what_was_renamed_before_its_fsync() -> None:
    """Test a renamed folder, and an fsync after the rename, which is too late."""

    def lost(*calls: Recorded) -> set[str]:
        save = states.Save(1, [*range(len(calls))], 2)
        cuts = states.cuts(save, calls, [states.State(len(calls), {})])
        return {*cuts[-1].lost} if cuts else set()

    written = recorded(1, "write", "d/a")
    assert lost(written, recorded(1, "rename", "d", "e")) == {"e/a"}
    assert lost(written, recorded(1, "fsync", "d/a"), recorded(1, "rename", "d", "e")) == set()
    assert lost(written, recorded(1, "rename", "d/a", "d/b"), recorded(1, "fsync", "d/b")) == {"d/b"}
    assert lost(written, recorded(1, "sync", "/"), recorded(1, "rename", "d/a", "b")) == set()
    assert lost(written, recorded(1, "link", "d/a", "b")) == {"b"}


def test_a_snapshot_copies_changed_files_only_and_comes_back(tmp_path: Path) -> None:
    """Restore links, modes and times from a snapshot."""
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    (work / "out" / "a").write_text("one")
    (work / "out" / "a").chmod(0o600)
    (work / "link").symlink_to("out/a")
    store = states.Store(work, tmp_path / "copies")
    first = store.snapshot()
    store.change(work / "out" / "a")
    (work / "out" / "a").write_text("two")
    second = store.snapshot()
    third = store.snapshot()
    assert store.copied == 6
    assert second == third
    states.restore(first, tmp_path / "back")
    back = tmp_path / "back" / "link"
    assert (back.readlink(), back.read_text()) == (Path("out/a"), "one")
    assert back.stat().st_mode & 0o777 == 0o600
    assert back.stat().st_mtime_ns == first["out/a"].time
    states.restore(second, tmp_path / "cut", ["out/a"])
    assert (tmp_path / "cut" / "out" / "a").read_text() == ""
