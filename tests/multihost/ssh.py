"""Provide ssh between hosts for Horovod's launcher, with Debian's server on each host, a key, and no user's files."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from debian import libraries, unpacked
from hosts import Host

PACKAGES = ("openssh-server", "openssh-client")
# Mounts replace the user's .ssh, and the files that the server reads, by files of the test.
MOUNTS = """
set -e
folder=$1
shift
mkdir -p "$HOME/.ssh"
mount --bind "$folder/ssh" "$HOME/.ssh"
mount --bind "$folder/passwd" /etc/passwd
mount -t tmpfs none /run
mkdir /run/sshd
exec "$@"
"""


@contextlib.contextmanager
def ssh_between(hosts: Sequence[Host], folder: Path, environ: Mapping[str, str]) -> Iterator[Callable[..., list[str]]]:
    """Run an ssh server on each host. Yield a function that returns the command to run words on a host that has ssh."""
    root = unpacked(*PACKAGES)
    library_path = f"{libraries(root)}"
    keys = folder / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("id_ed25519", "host_key"):
        subprocess.run(
            [root / "usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name],
            env={**environ, "LD_LIBRARY_PATH": library_path},
            check=True,
            timeout=30,
        )
    shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")
    users = Path("/etc/passwd").read_text()
    if "\nsshd:" not in users:  # sshd runs as this user before a login
        users += "sshd:x:74:65534:sshd:/run/sshd:/usr/sbin/nologin\n"
    (folder / "passwd").write_text(users)

    def command(host: Host, *words: str) -> list[str]:
        return host.command("bash", "-c", MOUNTS, "mounts", str(folder), *words)

    kept = " ".join(f"{name}={value}" for name, value in environ.items() if name.startswith("SAMESTEP_TEST"))
    settings = [f"HostKey={keys / 'host_key'}", "PidFile=none", "UsePAM=no", "StrictModes=no", f"SetEnv={kept}"]
    server = ["env", f"LD_LIBRARY_PATH={library_path}", str(root / "usr/sbin/sshd"), "-D", "-e", "-f", "/dev/null"]
    server += [word for setting in settings for word in ("-o", setting)]
    servers = []
    try:
        for host in hosts:
            with (folder / f"sshd-{host.name}.log").open("w") as log:
                servers.append(
                    subprocess.Popen(
                        command(host, *server), env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        for host in hosts:
            _wait_for(hosts[0], host, folder)
        yield command
    finally:
        for process in servers:
            process.kill()
            process.wait(timeout=30)


def _wait_for(one: Host, other: Host, folder: Path) -> None:
    probe = f"import socket; socket.create_connection(({other.name!r}, 22), 1)"
    deadline = time.monotonic() + 30
    while subprocess.run(one.command("python3", "-c", probe), capture_output=True, timeout=30, check=False).returncode:
        message = (folder / f"sshd-{other.name}.log").read_text()
        assert time.monotonic() < deadline, f"no ssh server on {other.name}: {message}"
        time.sleep(0.2)
