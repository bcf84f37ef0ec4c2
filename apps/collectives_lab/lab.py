"""Run a command of the app. Start the command's ranks, or run the command in this process if it needs no ranks.

    lab.py COMMAND [options] --by python -m torch.distributed.run --nproc-per-node=4 ...

scripts/run_collectives_lab.sh passes torchrun's command line after --by. `primitives`, `aggregate` and `straggler` run
on ranks, which this program starts. `launchers`, `predict` and `report` run in this process. `all` runs every other
command in turn.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import launchers
import predict
import report
from options import APP, COMMANDS, RANKS, device_argument, parse
from samestep import ConfigError, NonRetryableError, log
from samestep.checkpoint import write_atomic
from samestep.options import Options
from show import write_json

HERE = Path(__file__).resolve().parent


def start_ranks(torchrun: Sequence[str], command: str, n: int, arguments: Sequence[str]) -> None:
    """Run the program of a command on ``n`` ranks. If the program fails, exit with code 1. A rank logs the reason.

    Args:
        torchrun: torchrun's command line.
        command: name of the command.
        n: number of ranks.
        arguments: arguments of the program.
    """
    # torchrun uses the last --nproc-per-node of its command line.
    words = [*torchrun, f"--nproc-per-node={n}", str(HERE / f"{command}.py"), *arguments]
    code = subprocess.run(words, check=False).returncode
    if code != 0:
        sys.exit(f"{command} on {n} ranks ended with code {code}")


def own_network() -> list[str]:
    """Return a command prefix that runs a command in a new network namespace, which has only a loopback interface.

    Returns:
        The prefix as a list of arguments; [] if this process may not create a namespace.
    """
    for unshare in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        words = [*unshare, sys.executable, str(HERE / "loopback.py")]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([*words, "true"], capture_output=True, check=False, timeout=20)
            if done.returncode == 0:
                return words
    return []


def run_aggregate(torchrun: Sequence[str], n: int, options: Options, arguments: Sequence[str]) -> None:
    """Run ``aggregate`` at each world size. If possible, a network namespace excludes the bytes of other programs.

    Raises:
        ConfigError: a number in --ranks is above ``n``.
    """
    counts = options.ranks or sorted({r for r in RANKS if r <= n} | {n})
    if max(counts) > n:
        raise ConfigError(f"--ranks {max(counts)} is more than N={n}")
    network = own_network()
    if not network:
        log.warning("no network namespace can be made here: bytes on loopback include those of other programs")
    for ranks in counts:
        start_ranks([*network, *torchrun], "aggregate", ranks, arguments)


def run_predict(torchrun: Sequence[str], n: int, options: Options) -> None:
    """Run ``predict``. If the run dir has no measurements of two or more ranks, run ``primitives`` first."""
    measured = {path.stem for path in options.run_dir.glob("primitives-*.json")}
    if not measured - {"primitives-1"}:
        ranks = max(n, 2)
        log.info(f"no sends are measured yet in this run dir: measuring on {ranks} ranks first")
        arguments = [f"--run-dir={options.run_dir}", device_argument(options), f"--timeout={options.timeout}"]
        if options.quick:
            arguments.append("--quick")
        start_ranks(torchrun, "primitives", ranks, arguments)
    predict.predict(options)


def run(command: str, torchrun: Sequence[str], n: int, arguments: Sequence[str]) -> None:
    """Run one command on ``n`` ranks, or in this process."""
    options = parse([command, *arguments])
    if command == "aggregate":
        run_aggregate(torchrun, n, options, arguments)
    elif command == "launchers":
        launchers.compare(n, options)
    elif command == "predict":
        run_predict(torchrun, n, options)
    elif command == "report":
        report.write(options.run_dir, markdown=options.markdown)
    else:
        start_ranks(torchrun, command, n, arguments)


def main() -> None:
    """Run the command line, and print a line RESULT. After an error, write the exit code for the launch script."""
    split = sys.argv.index("--by")
    command, *arguments = sys.argv[1:split]
    torchrun = sys.argv[split + 1 :]
    options = parse([command, *arguments])
    word = next(word for word in torchrun if word.startswith("--nproc-per-node="))
    n = int(word.partition("=")[2])
    commands = [command]
    if command == "all":  # `all` accepts only the common options
        commands = [name for name in COMMANDS if name != "all"]
    begun = time.monotonic()
    try:
        for each in commands:
            run(each, torchrun, n, arguments)
    except (ConfigError, NonRetryableError) as error:
        # Write the exit code for the launch script, as `log` does for a rank.
        write_atomic(options.run_dir / "log" / "no-restart", json.dumps({"code": error.exit_code}).encode())
        raise
    files = [path.name for path in options.run_dir.iterdir() if path.is_file() and path.name[0] != "."]
    result = {
        "app": APP,
        "command": command,
        "world_size": n,
        "seconds": round(time.monotonic() - begun, 1),
        "files": sorted(files),
        "run_dir": str(options.run_dir),
    }
    write_json(options.run_dir, "result", result)
    print(f"RESULT {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    log.run(main)
