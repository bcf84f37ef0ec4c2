"""Lock the packages of each app: the name, the version, and the SHA-256 of every file on PyPI.

    bash scripts/test.sh -e locks                        # updates changed locks; keeps versions that still fit
    bash scripts/test.sh -e locks -- APP                 # updates the locks of one app
    bash scripts/test.sh -e locks -- --upgrade           # updates packages without a pin to their newest versions
    bash scripts/test.sh -e locks -- --check             # only compares

The tool installs no package and downloads no wheel. uv resolves each ``apps/<app>/requirements.in``, together with
core's own requirements, from metadata alone. uv resolves for the first Python of the line ``# python:`` and all newer
Pythons, and marks the packages that differ between Pythons. The tool does not use pip-compile, which resolves only for
the Python and the machine that run it. Without a JSON API of the index, pip-compile also downloads every file that it
hashes, which is 10 GB with CUDA's packages.

``requirements-cuda.txt`` locks PyPI's wheels and the packages of NVIDIA that they need. ``requirements-cpu.txt`` lacks
NVIDIA's packages, and has torch's build for CPUs. An app without packages of NVIDIA has only this lock. Any other
``*.in`` of an app has a lock of the same name. The requirements of ``--track``
(``launch/samestep_launch/tracker_locks``) count as an app named ``trackers``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
TRACKERS = ROOT / "launch" / "samestep_launch" / "tracker_locks"
PYPI = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")  # a mirror has the same files
GPU = re.compile(r"(nvidia|cuda)-.*|triton")  # packages that only a build for NVIDIA's GPUs needs

# The SHA-256 of each Linux file that https://download.pytorch.org/whl/cpu/<package>/ lists. PyPI's wheels of torch, for
# x86-64 and for aarch64, need NVIDIA's packages. So the lock for CPUs has the hashes of torch's build for CPUs only.
# For the apps, torchvision's wheels from PyPI work beside either build of torch, so the lock has the hashes of both
# indexes. The hash of torchvision for Python 3.14 on x86-64 is unknown. To use a new version, first add its hashes
# here.
CPU_INDEX = {
    ("torch", "2.13.0"): """
        6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b  cp311-manylinux_2_28_x86_64
        84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7  cp311-manylinux_2_28_aarch64
        4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2  cp312-manylinux_2_28_x86_64
        6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604  cp312-manylinux_2_28_aarch64
        3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6  cp313-manylinux_2_28_x86_64
        0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d  cp313-manylinux_2_28_aarch64
        d20fa53ee744502fa4c69818a720b05ca0d37abd055d4f6e66cae155114bc691  cp314-manylinux_2_28_x86_64
        ca021f9eb2f8345c83fa03e3a04587308afb8df71bd472670b3ece00df58621c  cp314-manylinux_2_28_aarch64
    """,
    ("torchvision", "0.28.0"): """
        1dad604dfc0177ecebe0891bd9701fe2c62ec3f7819a247be541b3fb6effee99  cp311-manylinux_2_28_x86_64
        22958193d72444ed7cbcc665ba4821a31e5279f9c4d1ad08520918b30896b78a  cp311-manylinux_2_28_aarch64
        b545d46f4d2f9d30381281cf22874bfe1d32a8a7b0ee8396fccde89f30c6a9d9  cp312-manylinux_2_28_x86_64
        2f768c4f6d5adf6d5535061fd69ec44827608bac0e96e12114942a6fdfce1107  cp312-manylinux_2_28_aarch64
        c6373ec4c2f922e89f45ac91889404d312ba29a31f205b0ad9a725a3894ca246  cp313-manylinux_2_28_x86_64
        879ae6d4e2e3651582fb7187eafd535601cb5d019595d47e2c874262a000e88e  cp313-manylinux_2_28_aarch64
        3a1a76c8decb1d7bbedd3588bccc90fb269944b7321a773db181735b42115422  cp314-manylinux_2_28_aarch64
    """,
}


@dataclass
class Entry:
    """A package of a lock, such as ``numpy==2.4.6 ; python_full_version < '3.12'``, with its hashes and comments."""

    requirement: str
    hashes: list[str]
    words: list[str]

    @property
    def name(self) -> str:
        return self.requirement.partition("==")[0]

    @property
    def version(self) -> str:
        """Return the version without a local label: 2.13.0 for 2.13.0+cpu."""
        return re.split(r"[ +;]", self.requirement.partition("==")[2])[0]

    def text(self) -> str:
        hashes = [f"    --hash=sha256:{each}" for each in sorted(self.hashes)]
        return "\n".join([" \\\n".join([self.requirement, *hashes]), *self.words]) + "\n"


def entries(text: str) -> list[Entry]:
    """Return the entries of a lock, or of uv's output, in their order."""
    found: list[Entry] = []
    for line in text.splitlines():
        digest = re.match(r"    --hash=sha256:([0-9a-f]{64})", line)
        if digest:
            found[-1].hashes.append(digest[1])
        elif line.startswith("    #"):
            found[-1].words.append(line)
        elif line and not line.startswith("#"):
            found.append(Entry(line.rstrip(" \\"), [], []))
    return found


def core_requirements() -> str:
    """Return core's requirements, from pyproject.toml or, in a project that new_app.py made, from core's wheel."""
    project = ROOT / "pyproject.toml"
    if project.exists():
        needs: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    else:
        with zipfile.ZipFile(max(ROOT.glob("vendor/samestep-*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            all_needs = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", [])
        needs = [need for need in all_needs if "extra ==" not in need]
    return "\n".join(needs) + "\n"


def resolve(source: Path, locked: Sequence[Entry], excluded: Sequence[str] = ()) -> list[Entry]:
    """Return the entries that uv resolves from a file of requirements, with the versions in ``locked`` that still fit.

    The function does not pass the hashes in ``locked`` to uv, because uv would treat them as hashes of PyPI. If uv
    fails, the program exits with an error.

    Args:
        source: path of the file of requirements.
        locked: entries of the present lock.
        excluded: names of packages to leave out.
    """
    pythons = re.search(r"^# python: (\S+)", source.with_name("requirements.in").read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as name:
        output = Path(name, "lock.txt")
        exclude = Path(name, "exclude.txt")
        output.write_text("".join(f"{entry.requirement.replace('+cpu', '')}\n" for entry in locked))
        exclude.write_text("".join(f"{each}\n" for each in excluded))
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--native-tls"]
        command += [f"--python={sys.executable}", f"--python-version={pythons[1] if pythons else '3.11'}"]
        command += ["--universal", "--only-binary=:all:", f"--default-index={PYPI}", "--generate-hashes", "--no-header"]
        command += [f"--excludes={exclude}", f"--output-file={output}", str(source.relative_to(ROOT))]
        core = core_requirements() if source.name == "requirements.in" else ""
        command += ["-"] if core else []
        environ = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        done = subprocess.run(
            command, cwd=ROOT, env=environ, input=core, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != 0:
            sys.exit(f"error: uv could not resolve {source.relative_to(ROOT)}: {' '.join(done.stderr.split())}")
        return entries(output.read_text())


def for_cpu(found: Sequence[Entry]) -> list[Entry]:
    """Return the lock for CPUs, with the hashes in CPU_INDEX, from entries without NVIDIA's packages."""
    made = []
    for entry in found:
        listed = CPU_INDEX.get((entry.name, entry.version), "").split()[::2]
        if entry.name == "torch":
            if not listed:
                sys.exit(f"error: CPU_INDEX in {Path(__file__).name} has no hashes of torch {entry.version}: add them")
            pin = entry.requirement.replace(entry.version, f"{entry.version}+cpu", 1)
            made.append(Entry(pin, listed, entry.words))
        else:
            made.append(Entry(entry.requirement, [*entry.hashes, *listed], entry.words))
    return made


def app_of(source: Path) -> str:
    """Return the name of the app that a file of requirements belongs to, or "trackers"."""
    if source.parent == TRACKERS:
        return "trackers"
    return source.parent.name


def header(app: str, hardware: str) -> str:
    return f"# Made by `bash scripts/test.sh -e locks -- {app}`{hardware}: do not edit.\n"


def locks(source: Path, upgrade: bool) -> dict[Path, str]:
    """Return the contents of the locks of a file of requirements, by path."""
    app = app_of(source)

    def kept(path: Path) -> list[Entry]:
        if path.exists() and not upgrade:
            return entries(path.read_text())
        return []

    if source.name != "requirements.in":
        path = source.with_suffix(".txt")
        return {path: header(app, "") + "".join(entry.text() for entry in resolve(source, kept(path)))}
    cpu, cuda = (source.with_name(f"requirements-{each}.txt") for each in ("cpu", "cuda"))
    resolved = resolve(source, kept(cuda) or kept(cpu))
    gpu = sorted({entry.name for entry in resolved if GPU.fullmatch(entry.name)})
    made = {}
    if gpu:
        made[cuda] = header(app, ", for NVIDIA GPUs") + "".join(entry.text() for entry in resolved)
        resolved = resolve(source, resolved, gpu)
    made[cpu] = header(app, ", for CPUs" if gpu else "") + "".join(entry.text() for entry in for_cpu(resolved))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="lock what each app pulls in, with hashes")
    parser.add_argument("apps", nargs="*", metavar="APP", help="of these apps; all by default")
    parser.add_argument("--check", action="store_true", help="compare with the locks that are there, and write nothing")
    parser.add_argument("--upgrade", action="store_true", help="the newest versions, where requirements.in has no pin")
    options = parser.parse_args()
    sources = sorted([*ROOT.glob("apps/*/*.in"), *TRACKERS.glob("*.in")])
    unknown = [app for app in options.apps if app not in {app_of(source) for source in sources}]
    if unknown:
        sys.exit(f"error: there is no apps/{unknown[0]}/requirements.in: name an app, or none for all")
    differ = []
    for source in sources:
        if options.apps and app_of(source) not in options.apps:
            continue
        made = locks(source, options.upgrade)
        both = {source.with_name(f"requirements-{each}.txt") for each in ("cpu", "cuda")}
        for old in (path for path in both - made.keys() if source.name == "requirements.in" and path.exists()):
            differ.append(str(old.relative_to(ROOT)))  # the app no longer needs this lock
            if not options.check:
                old.unlink()
                print(f"deleted {old.relative_to(ROOT)}")
        for path, text in made.items():
            if path.exists() and path.read_text() == text:
                continue
            differ.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(text)
                print(f"wrote {path.relative_to(ROOT)}")
    if options.check and differ:
        sys.exit(f"error: {', '.join(differ)}: not what is found now: bash scripts/test.sh -e locks")


if __name__ == "__main__":
    main()
