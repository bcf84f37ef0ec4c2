"""Fork ranks from a process that has imported their framework, because the import is slower than a short run.

    python rank_server.py torch ...

Each line of stdin is a job in JSON: ``program`` and its ``arguments``, the folder ``cwd``, ``limit`` in seconds, and
``ranks``. A rank has an ``environ``, and paths for ``stdout`` and ``stderr``. The server kills the ranks that still run
at the limit. When all ranks have ended, it writes their exit codes to stdout as a line of JSON.

Before the first fork, the server only imports modules: it starts no thread and draws no random numbers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


def run_rank(job: Mapping[str, Any], rank: Mapping[str, Any]) -> NoReturn:
    """Run the program in this forked process as ``python program arguments`` does, then exit."""
    code = 1
    try:
        os.setsid()
        files = [(os.devnull, os.O_RDONLY), (rank["stdout"], os.O_WRONLY), (rank["stderr"], os.O_WRONLY)]
        for descriptor, (path, flags) in enumerate(files):
            os.dup2(os.open(path, flags | os.O_CREAT), descriptor)
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(rank["environ"])
        sys.path[0:1] = [os.path.dirname(job["program"]), *rank["environ"]["PYTHONPATH"].split(os.pathsep)]
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ImportError):
            importlib.import_module("sitecustomize")  # a new Python process imports this module at startup
        sys.argv = [job["program"], *job["arguments"]]
        runpy.run_path(job["program"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: Sequence[int], limit: float) -> list[int]:
    """Wait for the ranks, and return their exit codes. Code -n means that signal n ended the rank."""
    deadline = time.monotonic() + limit
    codes = dict[int, int]()
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            continue
        if time.monotonic() > deadline:
            for each in {*pids} - {*codes}:
                os.kill(each, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread, which no fork has"
    gc.freeze()
    while line := sys.stdin.readline():
        job = json.loads(line)
        pids = []
        for rank in job["ranks"]:
            pid = os.fork()
            if not pid:
                run_rank(job, rank)
            pids.append(pid)
        print(json.dumps(wait(pids, job["limit"])), flush=True)


if __name__ == "__main__":
    main()
