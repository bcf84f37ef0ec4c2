"""Run torchrun for a job on one machine, with its store on 127.0.0.1 alone: ``python -m samestep_launch.torchrun``.

torchrun's own store listens on all addresses of the machine, without authentication, and no option changes that. The
arguments are torchrun's; the store listens at ``--master-addr`` and ``--master-port``.
"""

from __future__ import annotations

import argparse
import socket
import sys

from torch.distributed import TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

NAME = "loopback"
TIMEOUT = 900  # seconds, torchrun's default


class LoopbackRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous under a name of its own."""

    def get_backend(self) -> str:
        return NAME


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of one machine, with its store on a socket that is bound here."""
    address, _, port = parameters.endpoint.rpartition(":")
    handler = LoopbackRendezvous(address, int(port), 0, 1, parameters.run_id, TIMEOUT)
    listener = socket.create_server((address, int(port))).detach()
    where = address, int(port), 1, True, handler.timeout
    handler._store = TCPStore(*where, multi_tenant=True, master_listen_fd=listener)
    return handler


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port")
    options, _ = parser.parse_known_args()
    rendezvous_handler_registry.register(NAME, create_handler)
    sys.argv[1:1] = [f"--rdzv-backend={NAME}", f"--rdzv-endpoint={options.master_addr}:{options.master_port}"]
    run.main()


if __name__ == "__main__":
    main()
