"""The package as another project has it: built, installed in a clean environment outside the repository, and used."""

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
from wheel import LIMIT, Built, build, run

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core"
PROGRAM = """
import importlib
import re
from pathlib import Path

import samestep
from samestep.data import datasets

files = [path.relative_to(samestep.__path__[0]) for path in Path(samestep.__path__[0]).rglob("[a-z]*.py")]
names = [".".join(("samestep", *path.with_suffix("").parts)) for path in files]
needs = re.compile(r"samestep\\.(torch|check\\.(inside|plugin)|.*track_)|.*__main__$")  # a framework, or it runs
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


def test_they_hold_the_package_and_nothing_else(built: Built) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "samestep"],
        cwd=CORE,
        capture_output=True,
        text=True,
        check=True,
    )
    package = set(listed.stdout.split())
    assert {"samestep/py.typed", "samestep/data/mnist-5k/README.md"} <= package
    with zipfile.ZipFile(built.wheel) as archive:
        found = set(archive.namelist())
    about = f"samestep-{samestep.__version__}.dist-info"
    licences = {f"{about}/licenses/{name}" for name in ("LICENSE", "samestep/data/mnist-5k/README.md")}
    assert found == package | licences | {
        f"{about}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")
    }
    with tarfile.open(built.sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    # hatchling adds the last two by itself.
    assert files == package | {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}


def test_what_they_say_of_themselves(built: Built) -> None:
    found = metadata(built.wheel)
    assert (found["Name"], found["Version"]) == ("samestep", samestep.__version__)
    assert found["License-Expression"] == "Apache-2.0 AND CC-BY-SA-3.0"  # the code's, and the digits'
    assert found.get_all("License-File") == ["LICENSE", "samestep/data/mnist-5k/README.md"]
    assert (CORE / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert found["Requires-Python"] == ">=3.10"
    assert found["Summary"]
    assert str(found.get_payload()).strip() == (CORE / "README.md").read_text().strip()


def test_the_version_stands_in_one_place_and_the_newest_change_is_its() -> None:
    assert "version" in tomllib.loads((CORE / "pyproject.toml").read_text())["project"]["dynamic"]
    headings = re.findall(r"^## (\S+)", (CORE / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == samestep.__version__


def test_a_project_elsewhere_imports_it_and_its_digits(built: Built, tmp_path: Path, soak: bool) -> None:
    """In the soak, mypy also knows its types there."""
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "venv", folder=tmp_path)
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", built.wheel, folder=tmp_path)
    output = run(python, "-c", PROGRAM, folder=tmp_path).split(maxsplit=3)
    assert Path(output[0]).is_relative_to(tmp_path / "venv")
    paths = [path.relative_to(CORE / "samestep") for path in (CORE / "samestep").rglob("[a-z]*.py")]
    modules = [path for path in paths if path.parts[0] != "torch" and not path.name.startswith(("track_", "plugin"))]
    modules = [path for path in modules if path.parent.name != "inside"]
    assert (output[1], int(output[2])) == (samestep.__version__, len(modules))
    assert output[3].strip() == "(4000, 28, 28) (1000,)"
    script = tmp_path / "venv" / "bin" / "samestep"
    assert run(script, "--version", folder=tmp_path) == f"samestep {samestep.__version__}\n"
    assert run(script, "run", "--help", folder=tmp_path) == run(
        python, "-m", "samestep_launch", "run", "--help", folder=tmp_path
    )
    # The README's programs run as they stand.
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
