"""Test the wheel: build the package, install it in a clean environment outside the repository, and use it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest
import samestep
import tomllib
from repository import PACKAGES
from samestep.__main__ import PROGRAMS
from wheel import LIMIT, Built, build, run

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core"
pytestmark = pytest.mark.slow
LICENSES = ["LICENSE", "core/samestep/data/mnist-5k/README.md"]
PROGRAM = """
import importlib
import re
from pathlib import Path

import samestep
from samestep.data import datasets

site = Path(samestep.__path__[0]).parent
files = [path.relative_to(site) for package in site.glob("samestep*") for path in package.rglob("[a-z]*.py")]
names = [".".join(path.with_suffix("").parts) for path in files]
# Those of a framework, those of pytest or of a checked script, and what runs when it is imported.
needs = r"samestep\\.torch|samestep_(check|observe)\\.inside|samestep_check\\.plugin|"
needs = re.compile(needs + r".*(\\.track_|elastic_agent$|__main__$)")
modules = [importlib.import_module(name) for name in names if not needs.match(name)]
digits = datasets.load("mnist-5k", Path("nowhere"))
print(samestep.__file__, samestep.__version__, len(modules), digits.train_images.shape, digits.test_labels.shape)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def test_wheel_and_sdist_hold_the_package_alone(built: Built) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *(f"{folder}/{name}" for folder, name in PACKAGES.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    sources = set(listed.stdout.split())
    package = {path.partition("/")[2] for path in sources}
    assert {"samestep/py.typed", "samestep/data/mnist-5k/README.md", "samestep_check/page.css"} <= package
    with zipfile.ZipFile(built.wheel) as archive:
        found = set(archive.namelist())
    about = f"samestep-{samestep.__version__}.dist-info"
    licences = {f"{about}/licenses/{name}" for name in LICENSES}
    assert found == package | licences | {
        f"{about}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")
    }
    with tarfile.open(built.sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    # hatchling adds PKG-INFO and .gitignore.
    assert files == sources | {"CHANGELOG.md", "LICENSE", "core/README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}


def test_the_wheels_metadata_has_version_licenses_and_readme(built: Built) -> None:
    found = metadata(built.wheel)
    assert (found["Name"], found["Version"]) == ("samestep", samestep.__version__)
    assert found["License-Expression"] == "Apache-2.0 AND CC-BY-SA-3.0"  # the licenses of the code and the MNIST digits
    assert found.get_all("License-File") == LICENSES
    assert found["Requires-Python"] == ">=3.10"
    assert found["Summary"]
    assert str(found.get_payload()).strip() == (CORE / "README.md").read_text().strip()


def test_the_version_stands_in_one_place_and_the_newest_change_is_its() -> None:
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == samestep.__version__


def test_a_project_elsewhere_imports_it_and_its_digits(built: Built, tmp_path: Path, soak: bool) -> None:
    """A soak run also checks that mypy finds the package's types."""
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "venv", folder=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", built.wheel, folder=tmp_path)
    output = run(python, "-c", PROGRAM, folder=tmp_path).split(maxsplit=3)
    assert Path(output[0]).is_relative_to(tmp_path / "venv")
    paths = [path for folder, name in PACKAGES.items() for path in (ROOT / folder / name).rglob("[a-z]*.py")]
    left_out = re.compile(r"/(samestep/torch/.*|inside/.*|plugin|track_\w+|elastic_agent)\.py$")
    modules = [path for path in paths if not left_out.search(str(path))]
    assert (output[1], int(output[2])) == (samestep.__version__, len(modules))
    assert output[3].strip() == "(4000, 28, 28) (1000,)"
    script = tmp_path / "venv" / "bin" / "samestep"
    assert run(script, "--version", folder=tmp_path) == f"samestep {samestep.__version__}\n"
    for name in PROGRAMS:
        assert f"usage: samestep {name} " in run(script, name, "--help", folder=tmp_path)
    assert run(script, "--help", folder=tmp_path) == run(python, "-m", "samestep", "--help", folder=tmp_path)
    # The README's programs run as printed.
    blocks = re.findall(r"^```python\n(.*?)^```$", (CORE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        (tmp_path / f"program_{number}.py").write_text(block)
        run(python, f"program_{number}.py", folder=tmp_path)
    if not soak:
        return
    mypy = re.findall(r"^ +(mypy==\S+)$", (ROOT / "tox.ini").read_text(), re.MULTILINE)[0]
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", mypy, folder=tmp_path)
    (tmp_path / "wrong.py").write_text('from samestep.sharding import shard\n\nshard("3", 0, 1)\n')
    run(python, "-m", "mypy", "--strict", "program_0.py", "program_1.py", folder=tmp_path)
    wrong = subprocess.run(
        [str(python), "-m", "mypy", "--strict", "wrong.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert 'expected "int"' in wrong.stdout, wrong.stdout + wrong.stderr
