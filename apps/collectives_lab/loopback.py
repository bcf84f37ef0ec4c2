"""Enable loopback in a new network namespace, then execute a command in place of this process.

Usage: ``unshare --net python loopback.py COMMAND``
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

SIOCGIFFLAGS = 0x8913  # from linux/sockios.h
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1  # from linux/if.h

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)  # struct ifreq: name and flags
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
        _, flags = struct.unpack("16sh14x", answer)
        request = struct.pack("16sh14x", b"lo", flags | IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)
    os.execvp(sys.argv[1], sys.argv[1:])
