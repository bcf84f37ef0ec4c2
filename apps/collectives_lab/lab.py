"""The laboratory's bench: starts the ranks for a command, or runs it here where it needs none.

    lab.py COMMAND [options] --by python -m torch.distributed.run --nproc-per-node=4 ...

scripts/run_collectives_lab.sh hands over torchrun's command line. `primitives`, `aggregate` and `straggler` are
programs for ranks, started by it; `launchers`, `predict` and `report` are one process; `all` is one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import launchers
import predict
import report
from options import RANKS, parse
from ranks import APP, write_json
from samestep import FatalError, UserError, log
from samestep.checkpoint import write_atomic

HERE = Path(__file__).resolve().parent
EVERYTHING = ("primitives", "aggregate", "straggler", "launchers", "predict", "report")


def start_ranks(
    torchrun: Sequence[str], command: str, n: int, arguments: Sequence[str], prefix: Sequence[str] = ()
) -> None:
    """Run one program on ``n`` ranks. Raises FatalError when it fails; its ranks have said why."""
    # Of several --nproc-per-node the last counts.
    words = [*prefix, *torchrun, f"--nproc-per-node={n}", str(HERE / f"{command}.py"), *arguments]
    code = subprocess.run(words, check=False).returncode
    if code != 0:
        raise JobFailed(f"{command} on {n} ranks ended with code {code}")


class JobFailed(Exception):
    """The ranks of a job failed, and said why."""


def own_network() -> list[str]:
    """Words before a command that give it a network of its own, where only its ranks talk on loopback; [] if that
    cannot be had here (it takes root, or user namespaces)."""
    for unshare in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        words = [*unshare, sys.executable, str(HERE / "loopback.py")]
        try:
            if subprocess.run([*words, "true"], capture_output=True, check=False, timeout=20).returncode == 0:
                return words
        except (OSError, subprocess.TimeoutExpired):
            return []
    return []


def run_primitives(torchrun: Sequence[str], n: int, options: Namespace, arguments: Sequence[str]) -> None:
    start_ranks(torchrun, "primitives", n, arguments)


def run_aggregate(torchrun: Sequence[str], n: int, options: Namespace, arguments: Sequence[str]) -> None:
    """Once for each number of ranks, where it can be had in a network of its own: bytes are read off its loopback."""
    counts = options.ranks or sorted({r for r in RANKS if r <= n} | {n})
    if max(counts) > n:
        raise UserError(f"--ranks {max(counts)} is more than N={n}")
    network = own_network()
    if not network:
        log.warning("no network namespace can be made here: bytes on loopback include those of other programs")
    for ranks in counts:
        start_ranks(torchrun, "aggregate", ranks, arguments, prefix=network)


def run_straggler(torchrun: Sequence[str], n: int, options: Namespace, arguments: Sequence[str]) -> None:
    start_ranks(torchrun, "straggler", n, arguments)


def run_launchers(torchrun: Sequence[str], n: int, options: Namespace, arguments: Sequence[str]) -> None:
    launchers.compare(n, options)


def run_predict(torchrun: Sequence[str], n: int, options: Namespace, arguments: Sequence[str]) -> None:
    files = options.run_dir.glob("primitives-*.json")
    if not any(path.stem != "primitives-1" for path in files):
        log.info(f"no sends are measured yet in this run dir: measuring on {max(n, 2)} ranks first")
        kept = [f"--run-dir={options.run_dir}", f"--device={options.device}", f"--timeout={options.timeout}"]
        kept += ["--quick"] if options.quick else []
        start_ranks(torchrun, "primitives", max(n, 2), kept)
    predict.predict(options)


def run_report(torchrun: Sequence[str], n: int, options: Namespace, arguments: Sequence[str]) -> None:
    report.write(options.run_dir, markdown=options.markdown)


COMMANDS = {
    "primitives": run_primitives,
    "aggregate": run_aggregate,
    "straggler": run_straggler,
    "launchers": run_launchers,
    "predict": run_predict,
    "report": run_report,
}


def main() -> None:
    split = sys.argv.index("--by")
    (command, *arguments), torchrun = sys.argv[1:split], sys.argv[split + 1 :]
    options = parse([command, *arguments])
    try:
        work(command, arguments, torchrun, options)
    except JobFailed as problem:
        print(problem, file=sys.stderr, flush=True)
        os._exit(1)
    except (UserError, FatalError) as problem:
        # The launch script's exit code; `log` would write it for a rank.
        code = 2 if isinstance(problem, UserError) else 1
        write_atomic(options.run_dir / "log" / "no-restart", json.dumps({"code": code}).encode())
        raise


def work(command: str, arguments: Sequence[str], torchrun: Sequence[str], options: Namespace) -> None:
    """Run the command and say RESULT."""
    n = int(next(word for word in torchrun if word.startswith("--nproc-per-node=")).partition("=")[2])
    begun = time.monotonic()
    for each in EVERYTHING if command == "all" else [command]:
        # `all` takes the common options alone; what each command adds has its defaults.
        COMMANDS[each](torchrun, n, parse([each, *arguments]), arguments)
        if each != "report":
            report.draw(options.run_dir, each)
    result = {
        "app": APP,
        "command": command,
        "world_size": n,
        "seconds": round(time.monotonic() - begun, 1),
        "files": sorted(path.name for path in options.run_dir.iterdir() if path.is_file() and path.name[0] != "."),
        "run_dir": str(options.run_dir),
    }
    write_json(options.run_dir, "result", result)
    print(f"RESULT {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    log.run(main)
