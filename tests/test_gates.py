"""Test that checkpoints, run dirs and messages with foreign text are written only through their own modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core/samestep", "launch/samestep_launch", "observe/samestep_observe")

# Calls that change files: functions of os and shutil, and methods of a Path. `replace` is also a method of str.
MODULES = {"os", "shutil"}
FUNCTIONS = set(
    "open mkdir makedirs rename replace unlink remove rmdir utime truncate link symlink rmtree move".split()
)
METHODS = set("open write_text write_bytes mkdir touch unlink rename rmdir symlink_to hardlink_to".split())
# Modules and functions that may change files without samestep.root.Root, each with the reason.
OUTSIDE = {
    "core/samestep/child_signals.py _is_pending": "a file of /proc",
    "core/samestep/data/download.py": "caches of datasets",
    "core/samestep/data/files.py opened": "reads",
    "core/samestep/root.py": "the way itself",
    "core/samestep/untrusted.py own_folder": "a folder of this user in /tmp",
    "core/samestep/untrusted.py open_to_read": "reads",
    "core/samestep/untrusted.py open_closed_streams": "/dev/null",
    "core/samestep/log.py <module>": "/dev/null",
    "core/samestep/log.py _open_launch_script_file": "an open file of the launch script",
    "core/samestep/rundir.py make_folder": "the run dir itself",
    "core/samestep/sharded/storage.py consolidate": "/dev/null",
    "launch/samestep_launch/environments.py": "virtual environments",
    "launch/samestep_launch/user_folder.py": "folders of this user in /tmp",
    "launch/samestep_launch/process_info.py": "files of /proc",
    "launch/samestep_launch/fork_server.py _discard": "/dev/null",
    "launch/samestep_launch/job.py run_job": "deletes the run dir itself, which this job has made",
    "launch/samestep_launch/supervise.py _can_be_opened": "an open file of this process",
    "launch/samestep_launch/preflight.py read_secret": "reads",
    "launch/samestep_launch/app.py _check_weights": "reads",
    "observe/samestep_observe/command.py run_command": "/dev/null",
    "observe/samestep_observe/inside/samestep_probe.py": "records of a replay in a temporary folder",
    "observe/samestep_observe/replay_export.py": "the folder that --export names",
    "observe/samestep_observe/replay_job.py": "a copy of the run dir in a temporary folder",
    "observe/samestep_observe/track_tensorboard.py delete_stale": "a descriptor from Root",
}


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with the name of the outermost function or method around it."""
    for statement in tree.body:
        blocks = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        for block in blocks:
            name = block.name if isinstance(block, (ast.FunctionDef, ast.ClassDef)) else "<module>"
            for node in ast.walk(block):
                if isinstance(node, ast.Call):
                    yield name, node


def changes_files(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    owner, _, name = function.rpartition(".")
    if owner in MODULES:
        return name in FUNCTIONS
    if function == "open":
        return True
    is_root = (owner.endswith(("root", ")")) and "Root" in owner) or owner in ("root", "self._root")
    if name == "replace":
        return len(call.args) == 1 and not call.keywords
    return bool(owner) and name in METHODS and not is_root


def test_only_root_changes_files_below_a_run_dir() -> None:
    found = set()
    for path, tree in sources(*PACKAGES):
        for function, call in calls(tree):
            if changes_files(call) and path not in OUTSIDE:
                found.add(f"{path} {function}")
    unknown = found - {*OUTSIDE}
    assert not unknown, "open these by samestep.root.Root, or list them with the reason"
    assert not {place for place in OUTSIDE if " " in place} - found, "remove these from the list"


# --- values of a checkpoint ------------------------------------------------------------------------------------------


def callers(function: str) -> set[str]:
    """Return the functions that call ``function``, compared by the last part of its name."""
    return {
        f"{path.removeprefix('core/samestep/')} {caller}"
        for path, tree in sources(*PACKAGES)
        for caller, call in calls(tree)
        if ast.unparse(call.func).rpartition(".")[2] == function
    }


def test_each_manifest_is_sealed_before_it_is_written() -> None:
    """Saving and reading share `verify`; no other code writes a manifest or a safetensors file."""
    saves = {"checkpoint.py save", "sharded/storage.py save"}
    assert callers("commit") == saves
    assert callers("_seal") == {"sharded/storage.py save"}
    # These seal the same values before a save.
    earlier = {"run.py start", "sharded/storage.py __init__", "torch/checkpoints.py __init__"}
    assert callers("seal") == {"checkpoint.py save", "sharded/storage.py _seal", *earlier}
    assert callers("verify") == {"manifest.py seal", "checkpoint.py _read_manifest"}
    assert callers("encode") >= {"manifest.py seal", "checkpoint.py commit", "checkpoint.py _read_manifest"}
    assert callers("Snapshot") == {"checkpoint.py save", "sharded/storage.py __init__"}
    assert callers("serialize") == {"checkpoint.py save_weights", "rundir.py open_run"}


# --- text of others --------------------------------------------------------------------------------------------------

# Functions that print pages or tables, whose lines have any length.
PAGES = {
    "check/samestep_check/command.py",
    "check/samestep_check/results.py",
    "core/samestep/log.py _to_console",
    "core/samestep/untrusted.py shown",
    "observe/samestep_observe/diff.py",
    "observe/samestep_observe/hang_report.py _run",
    "observe/samestep_observe/replay.py",
    "observe/samestep_observe/report_page.py text",
    "observe/samestep_observe/verify.py",
    "observe/samestep_observe/watch.py _cut",
}


def test_only_pages_print_a_text_of_others_without_its_limit() -> None:
    found = set()
    for path, tree in sources(*PACKAGES, "check/samestep_check"):
        for function, call in calls(tree):
            names = [ast.unparse(node) for node in (call.func, *call.args)]
            if any(name.rpartition(".")[2] == "printable" for name in names) and path not in PAGES:
                found.add(f"{path} {function}")
    assert found == {place for place in PAGES if " " in place}


def test_no_message_holds_a_variable_of_the_environment_as_it_is() -> None:
    found = []
    for path, tree in sources("core/samestep", "observe/samestep_observe"):
        for text in (node for node in ast.walk(tree) if isinstance(node, ast.FormattedValue)):
            value = ast.unparse(text.value)
            if re.match(r"(os\.)?environ(\[|\.get)", value):
                found.append(f"{path}: {value}")
    assert not found, "show these by samestep.untrusted.shown"


def test_each_error_line_of_a_program_is_shown() -> None:
    """`print_stderr`, `print` and `log` get an error only as one line of limited length."""
    found = []
    for path, tree in sources(*PACKAGES, "check/samestep_check"):
        for function, call in calls(tree):
            is_print = ast.unparse(call.func) in ("print", "print_stderr", "supervise.print_stderr")
            for argument in call.args if is_print else []:
                text = ast.unparse(argument)
                if text.startswith("f'error: {") and "shown" not in text:
                    found.append(f"{path} {function}: {text}")
    assert not found
