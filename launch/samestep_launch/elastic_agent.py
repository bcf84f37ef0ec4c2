"""Run torchrun's agent in this process. The agent starts each rank as a program, or forks the rank.

torchrun's own store listens on all addresses of the machine, without authentication, and no option changes that. For a
job on one machine, this module's store listens only at ``--master-addr`` and ``--master-port``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from samestep import untrusted
from samestep.job_info import JobInfo
from torch.distributed import TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import elastic_launch
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext

from samestep_launch import fork_server, process_info
from samestep_launch.program import ImportFailed, Program, exit_code, importing, threads

NAME = "loopback"
TIMEOUT = 900  # time limit of the rendezvous in seconds; torchrun's default
ANONYMOUS = 0  # file type of an epoll or eventfd descriptor, by stat.S_IFMT
AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals that the agent handles


class LoopbackRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous, registered as `NAME`."""

    def get_backend(self) -> str:
        return NAME


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of a one-machine job, whose store listens only at ``parameters.endpoint``."""
    address, _, port = parameters.endpoint.rpartition(":")
    handler = LoopbackRendezvous(address, int(port), 0, 1, parameters.run_id, TIMEOUT)
    listener = socket.create_server((address, int(port))).detach()
    where = address, int(port), 1, True, handler.timeout
    handler._store = TCPStore(*where, multi_tenant=True, master_listen_fd=listener)
    return handler


def main() -> None:
    """Run the agent with torchrun's arguments from the command line."""
    arguments = sys.argv[1:]
    control = fork_server.control_socket()
    rendezvous_handler_registry.register(NAME, create_handler)
    options = run.parse_args(arguments)
    if options.start_method == "fork":
        program = Program(Path(options.training_script))
        if load(program, options.training_script_args):
            launch(program, _with_loopback(fork_server.serve(control, arguments)))
    run.main(_with_loopback(arguments))


def _with_loopback(arguments: Sequence[str]) -> list[str]:
    """Return torchrun's arguments, with the options of `LoopbackRendezvous` if the job has one machine."""
    options = run.parse_args([*arguments])
    endpoint = f"{options.master_addr}:{options.master_port}"
    ours = [f"--rdzv-backend={NAME}", f"--rdzv-endpoint={endpoint}"] if options.nnodes == "1" else []
    return [*ours, *arguments]


# --- ranks that are forked -----------------------------------------------------------------------------------------


def load(program: Program, arguments: Sequence[str]) -> bool:
    """Import torch's compiler and the program, and return whether this process may fork ranks.

    If this process must not fork ranks, the function prints a warning with the reason. If the program cannot be
    imported, this process exits.
    """
    try:
        with importing():
            importlib.import_module("torch._dynamo")  # DDP and all optimizers import this module later anyway
            program.load(arguments)
    except ImportFailed as failure:
        _report_failed_import(failure)
    reason = _why_not_fork()
    if reason:
        text = f"{program.path.name} {reason} at its import: the ranks start as programs (--start-method exec)"
        print(f"warning: {text}", file=sys.stderr, flush=True)
    return not reason


def _report_failed_import(failure: ImportFailed) -> None:
    """Print the failure, record that a restart cannot help, and exit."""
    print(untrusted.shown(f"error: {failure}", untrusted.MAX_LINE), file=sys.stderr, flush=True)
    info = JobInfo.from_environ(os.environ)
    if info.run_dir:
        verdict = {"code": failure.exit_code, "job": info.job or None}
        untrusted.write_json(Path(info.run_dir, "log"), "no-restart", verdict, 0)
    sys.exit(failure.exit_code)


def _why_not_fork() -> str:
    """Return the reason why ranks cannot be forked, such as "used CUDA"; "" if ranks can be forked."""
    if torch.cuda.is_initialized() or _spoils_cuda():
        return "used CUDA"
    count = threads()
    return f"started {count - 1} {'threads' if count > 2 else 'thread'}" if count > 1 else ""


def launch(program: Program, arguments: list[str]) -> NoReturn:
    """Run the agent, and exit without Python's shutdown, which would delay the end of the job."""
    code = 0
    try:
        run_agent(program, arguments)
    except BaseException as problem:
        code = exit_code(problem)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _spoils_cuda() -> bool:
    """Return whether CUDA would fail in a process that is forked from this one."""
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] != 0


@record
def run_agent(program: Program, arguments: list[str]) -> None:
    """Run the agent, and fork the ranks from this process."""
    options = run.parse_args(arguments)
    config, _, _ = run.config_from_args(options)
    handlers = {number: signal.getsignal(number) for number in AGENT_SIGNALS}
    own_files = _open_files()
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as torchrun's python -u
    contexts = _record_contexts()
    try:
        elastic_launch(config, run_rank)(program, options.training_script_args, handlers, own_files)
    except ChildFailedError as failure:
        _report_signals(failure, contexts[-1])
        raise


def _record_contexts() -> list[ProcessContext]:
    """Patch torch to append each `ProcessContext` to the returned list, because the agent exposes none."""
    contexts: list[ProcessContext] = []
    start: Callable[..., ProcessContext] = torch.multiprocessing.start_processes  # type: ignore[attr-defined]

    def start_processes(*arguments: Any, **settings: Any) -> ProcessContext:
        contexts.append(start(*arguments, **settings))
        return contexts[-1]

    torch.multiprocessing.start_processes = start_processes  # type: ignore[attr-defined]
    return contexts


def _report_signals(failed: ChildFailedError, context: ProcessContext) -> None:
    """Print rank, process id and signal of each rank of this machine that a signal ended.

    The agent itself reports only one rank, which may be a rank that lost its connection to the killed rank.
    """
    rank, failure = failed.get_first_failure()
    first = rank - failure.local_rank
    for local_rank, process in enumerate(context.processes):
        if process.exitcode is not None and process.exitcode < 0:
            end = f"process rank {first + local_rank} with PID {process.pid} exited on signal {-process.exitcode}"
            print(end, file=sys.stderr, flush=True)


def run_rank(
    program: Program, arguments: Sequence[str], handlers: Mapping[int, Any], own_files: Collection[int]
) -> None:
    """Run the program as one rank, in a process that the agent has forked.

    If the program's exit code is 0, the function returns, because the agent waits for the return. Otherwise the process
    exits with the program's code.

    Args:
        program: the imported program.
        arguments: the program's command line.
        handlers: signal handlers from before the agent's start, by signal number.
        own_files: file descriptors from before the agent's start.
    """
    _prctl_pr_set_pdeathsig(0)  # otherwise, the agent's death would send SIGINT, a stop request, to this process
    faulthandler.disable()  # the agent has enabled the fault handler for standard error
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _close_store(own_files)
    process_info.set_title(f"rank {os.environ['RANK']}: {program.path.parent.name} {program.path.name}")
    process_info.show_environment(os.environ)
    process_info.forget_launcher()
    code = program.run(arguments)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code:
        os._exit(code)
    _wait_quietly()


def _wait_quietly() -> None:
    """Ignore INT and USR1, and let TERM or the agent's death end this process, whose program has ended."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl_pr_set_pdeathsig(signal.SIGKILL)


def _open_files() -> dict[int, int]:
    """Return the type (`stat.S_IFMT`) of each open file of this process, by descriptor."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed already
            files[int(name)] = stat.S_IFMT(os.fstat(int(name)).st_mode)
    return files


def _close_store(keep: Collection[int]) -> None:
    """Close the agent's sockets, epolls and eventfds, so that this process does not listen at the store's port."""
    for descriptor, kind in _open_files().items():
        if descriptor not in keep and kind in (stat.S_IFSOCK, ANONYMOUS):  # multiprocessing still needs its pipes
            os.close(descriptor)
