"""Start a job by its launcher, without the launch script, send the launcher a signal, and report how the job ends.

    python3.11 benchmarks/launcher_signals.py mnist_ddp lenet_paddle     # print the rows of docs/signals.md
    PYTHON=/path/to/python python3.11 benchmarks/launcher_signals.py mnist_horovod

Each launcher starts two ranks of the app, except `python train.py`, which starts one rank. The launcher gets TERM, INT
or USR1 as soon as the ranks train. The table shows the launcher's exit code, the seconds until the last rank had ended,
and whether the ranks saved their last step. The script uses .venvs/<app>, which the app's launch script creates; PYTHON
selects another Python. The script omits launchers that are not installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60.0  # seconds after a signal until the remaining processes are killed
DIGITS = "--dataset=mnist-5k --epochs=500 --global-batch-size=250 --log-every=10 --checkpoint-every=1000000".split()
IMAGES = "--dataset=synthetic-cifar10 --depth=18 --image-size=16 --epochs=500 --log-every=2".split()
TORCHRUN = ["{bin}/torchrun", "--standalone", "--nproc-per-node=2", "{train}"]
MPI = ["-np", "2", "{bin}/python", "{train}", "--transport=mpi"]
ROOT_MAY = "--allow-run-as-root --oversubscribe"  # options of Open MPI's mpirun
LAUNCHERS: dict[str, dict[str, Sequence[str]]] = {
    "mnist_ddp": {
        "`torchrun`": [*TORCHRUN, *DIGITS],
        "none: `python train.py`": ["{bin}/python", "{train}", *DIGITS],
    },
    "mnist_horovod": {
        "`horovodrun --gloo`": ["{bin}/horovodrun", "--gloo", "-np", "2", "{bin}/python", "{train}", *DIGITS],
        "`mpirun` (Open MPI)": ["{bin}/mpirun", *ROOT_MAY.split(), *MPI, *DIGITS],
        "`horovodrun --mpi`": ["{bin}/horovodrun", "--mpi", f"--mpi-args={ROOT_MAY}", *MPI, *DIGITS],
    },
    "mnist_lightning": {"`torchrun` (Lightning)": [*TORCHRUN, *DIGITS]},
    "lenet_paddle": {
        "`paddle.distributed.launch`": [
            *"{bin}/python -m paddle.distributed.launch --nproc_per_node=2 {train}".split(),
            *DIGITS,
        ],
        "`--launcher spawn`": ["{bin}/python", "{train}", "--launcher=spawn", "--nprocs=2", *DIGITS],
    },
    "resnet50_mindspore": {
        "`msrun`": [
            *"{bin}/msrun --worker_num=2 --local_worker_num=2 --master_port={port} --join=True {train}".split(),
            *IMAGES,
        ],
    },
}


def processes(mark: str, word: str = "") -> list[int]:
    """Return the PIDs of the processes that have ``mark`` in their environment and ``word`` in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = f"BENCHMARK_MARK={mark}".encode() in entry.read_bytes().split(b"\0")
            if marked and word.encode() in entry.with_name("cmdline").read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            pass
    return found


def bin_of(app: str) -> Path:
    return Path(os.environ.get("PYTHON", ROOT / ".venvs" / app / "bin" / "python")).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(app: str, command: Sequence[str], number: signal.Signals, folder: Path) -> str:
    """Start a job, send its launcher the signal ``number``, and return the outcome as two cells of a table.

    Args:
        app: name of the app, such as mnist_ddp.
        command: words of the launcher's command line, with placeholders such as ``{train}``.
        number: the signal, which is sent as soon as the ranks train.
        folder: empty folder for the run directory and the console's output.
    """
    values = {"bin": bin_of(app), "train": ROOT / "apps" / app / "train.py", "port": free_port()}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SAMESTEP_")}
    environ |= {"BENCHMARK_MARK": folder.name, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "core")}
    environ |= {"PATH": f"{bin_of(app)}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}
    with (folder / "console").open("w") as console:
        process = subprocess.Popen(
            [*(word.format(**values) for word in command), "--device=cpu", f"--run-dir={folder / 'run'}"],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        if process.poll() is not None:
            sys.exit(f"{command[0]} ended early: {(folder / 'console').read_text()}")
        time.sleep(0.1)
    begun = time.monotonic()
    process.send_signal(number)
    while (left := processes(folder.name, "train.py")) and time.monotonic() < begun + LIMIT:
        process.poll()
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    for pid in processes(folder.name):  # msrun leaves a `tail` process for each log
        os.kill(pid, signal.SIGKILL)
    code = process.wait()
    said = re.findall("stopped by .*", (folder / "run" / "log" / "rank-0.log").read_text())
    saved = "saved" if said and said[-1].endswith("saved") else "nothing saved"
    end = f"runs on after {LIMIT:.0f} s, {saved}" if left else f"{saved}, {seconds:.1f} s"
    return f"{end} | {code} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("apps", nargs="+", choices=LAUNCHERS)
    parser.add_argument("--launchers", default="", help="only those whose name has this in it")
    options = parser.parse_args()
    print("| launcher | signal | ranks | exit code |\n|---|---|---|---|")
    for app in options.apps:
        for name, command in LAUNCHERS[app].items():
            if options.launchers not in name or not Path(command[0].format(bin=bin_of(app))).exists():
                continue
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                folder = Path(tempfile.mkdtemp(prefix="launcher-signals-"))
                print(f"| {name} | {number.name} | {stop(app, command, number, folder)}", flush=True)
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
