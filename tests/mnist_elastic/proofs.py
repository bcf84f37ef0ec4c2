"""Connect two processes by gloo, and print whether the first accepts the proof that the second sends.

In the case ``key``, the second process has the job's key. In the other cases, it sends an HMAC with another key or of
another group, or the HMAC of the first process. The program prints the name and the result of each case in one line.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "apps" / "mnist_elastic")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from authentication import (  # type: ignore[import-not-found]  # noqa: E402
    LauncherStore,
    StoreServer,
    StrangerFound,
    prove_key,
    sign,
)

KEY = b"k" * 32
GROUP = "group"
SIGNED = {  # HMACs that the second process sends to the first
    "other-key": sign(b"j" * 32, GROUP, "1", "0"),
    "other-group": sign(KEY, "earlier group", "1", "0"),
    "returned": sign(KEY, GROUP, "0", "1"),
}


def send(proof: bytes) -> None:
    """Send a proof to the first process in place of `prove_key`."""
    sent = torch.frombuffer(bytearray(proof * 2), dtype=torch.uint8).view(2, -1)
    dist.all_to_all_single(torch.empty_like(sent), sent)


def connect_and_prove(kind: str) -> None:
    """Fork a second process, connect both, and print whether the first accepts the second's proof."""
    ends = [Pipe(), Pipe()]
    rank = int(os.fork() == 0)
    if rank == 0:
        server = StoreServer()
        for end, _ in ends:
            threading.Thread(target=server.serve, args=[end], daemon=True).start()
    store = LauncherStore(ends[rank][1], 10.0)
    dist.init_process_group("gloo", None, timedelta(seconds=10), 2, rank, store)
    if rank == 1 and kind in SIGNED:
        send(SIGNED[kind])
        os._exit(0)
    result = "accepted"
    try:
        prove_key(KEY, GROUP)
    except StrangerFound as found:
        result = str(found)
    if rank == 0:
        print(kind, result, flush=True)
        os.wait()
    os._exit(0)


def main() -> None:
    for kind in ("key", *SIGNED):
        if os.fork() == 0:
            connect_and_prove(kind)
        os.wait()


if __name__ == "__main__":
    main()
