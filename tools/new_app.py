"""Copy an app under a new name, into this repository or into a separate project.

    bash scripts/new_app.sh my_app --from cifar_ddp                   # apps/my_app, its launch script and its tests
    bash scripts/new_app.sh my_app --from cifar_ddp --out ~/my_app    # a separate project, with core as a wheel

The tool renames the app in files, paths and commands, except in paths to files that the tool does not copy. The tool
writes READMEs from templates. It omits programs that measure figures of the app's README, and their tests. It also
omits each test file that mentions another app, `stored` runs of an earlier version, or a folder that only the
repository has, such as benchmarks and docs. The copy runs the tests that the app leaves to other apps. `skipped_marks`
in the copy's app_spec.py therefore keeps only the marks `core_only` and `slow`.

The tool runs on the system's Python, and needs only the standard library. pip builds the wheel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_APP = "mnist_ddp"  # the app that common tests and their options use as the example
MAX_NAME_LENGTH = 18  # lines of a copy with a longer name exceed 120 characters
TOX_FACTORS = {"ascend", "cpu", "gpu", "mpi", "mpich"}  # these parts of an environment's name select lines of tox.ini
PACKAGES = ("core", "launch", "observe", "check")
TOP_FOLDERS = ("apps", "benchmarks", *PACKAGES, "deploy", "docs", "scripts", "tests", "tools")
USE = {"en": "want your copy of", "zh": "复制自"}  # a copy's purpose, in the tables of README.md and README.zh.md
GENERATED_PAGES = {
    "README.md": "docs/app_tables.py",
    "README.zh.md": "docs/app_tables.py",
    "docs/devices.md": "docs/device_paths.py",
    "docs/messages.md": "docs/messages.py",
}
SKIPPED_FILES = re.compile(r"\..*|__pycache__|.*\.egg-info|.*\.pyc")
TEST_FILES = re.compile(r"conftest\.py|test_.*")  # not imported by other files
# Programs that measure figures of an app's README, and tests of README.md. The tool copies no README.
OF_README = {"wrong_ways.py", "test_readme.py"}
PROJECT_FILES = (
    *("scripts/launch.sh", "scripts/launch.py", "scripts/test.sh", "LICENSE"),
    *("tools/lock.py", "tools/quick_imports.py", "tools/run_tox.py"),
    *("deploy/slurm/common.sh", ".ci/run", ".gitignore", ".pre-commit-config.yaml"),
    *("mypy.ini", "pytest.ini", "ruff.toml"),
)
END_OF_PROJECT = re.compile(r"(?m)^# --- .*new_app\.sh leaves the rest of this file out of a project")


class UsageError(Exception):
    """The tool cannot create the copy. The message is one line that has the problem and the remedy."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise UsageError(message)


class Copy:
    """A copy of an app, with its origin, its name and its files.

    Args:
        origin: name of the app to copy.
        name: name of the copy.
        wheel: the file name of core's wheel in a separate project; None for a copy in the repository.
    """

    def __init__(self, origin: str, name: str, wheel: str | None = None) -> None:
        self.origin = origin
        self.name = name
        self.wheel = wheel
        self.test = "test.sh" if wheel else f"test.sh -e {name}-cpu"
        self.left_behind: list[str] = []  # files of the origin that the copy omits
        own = [*files_under(f"apps/{origin}")]
        measuring = [path for path in own if Path(path).name in OF_README]
        self.paths = [path for path in own if path not in measuring]
        self.paths += [f"scripts/run_{origin}.sh", *self._test_files()]
        self.left_behind += measuring
        self.paths += [path for path in files_under("deploy/slurm") if path.endswith(f"/{origin}.sbatch")]
        if wheel:  # a project also contains the app's other scripts
            scripts = [path for path in files_under("scripts") if not path.startswith("scripts/run_")]
            self.paths += [path for path in scripts if re.search(name_pattern(origin), read(path))]

    def rename(self, text: str) -> str:
        """Return ``text`` with the copy's name for the origin's, except in paths to files that are not copied."""

        def renamed(match: re.Match[str]) -> str:
            path = re.sub(r"^(\.\./)+", "", match[0]).rstrip("./")
            exists = path.partition("/")[0] in TOP_FOLDERS and (ROOT / path).exists()
            copied = any(each == path or each.startswith(f"{path}/") for each in self.paths)
            if exists and not copied:
                return match[0]
            return re.sub(name_pattern(self.origin), self.name, match[0])

        return re.sub(rf"[\w./-]*{name_pattern(self.origin)}[\w./-]*", renamed, text)

    def names_another_app(self, text: str) -> bool:
        others = {path.name for path in (ROOT / "apps").iterdir() if path.is_dir()} - {self.origin, self.name}
        return any(re.search(name_pattern(other), text) for other in others)

    def _is_about_more(self, text: str) -> bool:
        of_repository = r'"(benchmarks|deploy|docs|stored)"|"tests" / "check"|ROOT / "tools"|\bimport wrong_ways\b'
        return self.names_another_app(text) or re.search(of_repository, text) is not None

    def files(self) -> dict[str, str]:
        """Return the texts of the copy's files, which contain the new name, by their new paths."""
        files = {self.rename(path): self.rename(read(path)) for path in self.paths}
        spec = f"tests/{self.name}/app_spec.py"
        pattern = r"skipped_marks=\(.*?\)(,?)(  #.*)?"
        marks = '("core_only", "slow")' if re.search(r'skipped_marks=.*"slow"', files[spec]) else '("core_only",)'
        text, count = re.subn(pattern, rf"skipped_marks={marks}\1", files[spec])
        require(count == 1, f"tests/{self.origin}/app_spec.py has no skipped_marks=(...), or several: write one")
        about = f"tests/{self.name}/about.json"
        if about in files:
            files[about] = self._about()
        files[spec] = re.sub(r'(?s)\A""".*?"""', f'"""Describe {self.name} for the common cases."""', text)
        return {**files, f"apps/{self.name}/README.md": self.fill("app_readme.txt")}

    def _about(self) -> str:
        """Return the copy's about.json, which places the copy after its origin in the tables of apps."""
        origin = self.origin
        about = json.loads(read(f"tests/{origin}/about.json"))
        about["order"] += 1
        about["use"] = {language: f"{words} [{origin}](apps/{origin})" for language, words in USE.items()}
        return json.dumps(about, indent=2, ensure_ascii=False) + "\n"

    def fill(self, template: str, **values: str) -> str:
        """Return a template of tools/templates, filled with the values of this copy and with ``values``."""
        about = read(f"scripts/run_{self.origin}.sh").splitlines()[1].lstrip("# ").partition(":")[0]
        python = re.findall(r"(?m)^# python: (\S+)", read(f"apps/{self.origin}/requirements.in")) or ["3.11"]
        test = f"bash scripts/{self.test:<{len(f'run_{self.name}.sh 2')}}"
        values |= {"name": self.name, "about": about, "python": python[0], "test": test, "version": provenance()}
        values |= {"origin": "a program" if self.wheel else f"`apps/{self.origin}`", "wheel": self.wheel or ""}
        return read(f"tools/templates/{template}").format(**values)

    def project_files(self) -> dict[str, str]:
        """Return the files that a project needs besides the copy and the wheel. No file mentions another app."""
        shared = [*files_under("tests/common"), *(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*.py"))]
        helpers = [path for path in shared if not TEST_FILES.fullmatch(Path(path).name)]
        cases = [path for path in files_under("tests/common") if path not in helpers]
        texts = [read(path) for path in [*cases, "tests/conftest.py", *self.paths] if path.startswith("tests/")]
        paths = [*PROJECT_FILES, "tests/conftest.py", *cases, *used_helpers(helpers, texts)]
        files = {path: project_part(read(path)) for path in paths}
        for path in (path for path in files if path.startswith("tests/")):
            files[path] = re.sub(name_pattern(DEFAULT_APP), self.name, files[path])
        of_repository = (r"^#   [^\n]* --fast [^\n]*\n", r"^# Run the tests of a change[^\n]*\n(?:#[^\n]*\n)*")
        blocks = r"^if \[ .[^\n]* = --(?:fast|changed) \].*?^fi\n"  # a project lacks their environments and tools
        pattern = f"(?ms){'|'.join((*of_repository, blocks))}"
        files["scripts/test.sh"] = re.sub(pattern, "", files["scripts/test.sh"])
        return {**files, "tox.ini": self._tox(), "README.md": self.fill("project_readme.txt")}

    def environment(self, section: str) -> str:
        """Return a section of tox.ini for the copy, with the copy's requirements and tests, and the common tests."""
        own = {"tests/common", *(f"tests/{path.name}" for path in test_folders(self.origin))}

        def of_copy(match: re.Match[str]) -> str:
            paths = match[1].split()
            return f'"testpaths={" ".join(path for path in paths if path in own or path.startswith("tests/common/"))}"'

        lines = []
        wanted = (line for line in section.splitlines() if ".in" not in line or not self.names_another_app(line))
        for line in wanted:
            line = re.sub(r"^description = .*", f"description = {self.origin}, driven through its launch script", line)
            line = re.sub(r'"testpaths=([^"]*)"', of_copy, line)
            lines.append(line.replace("-e .", "{[samestep]wheel}") if self.wheel else line)
        return self.rename("\n".join(lines))

    def _test_files(self) -> list[str]:
        """Return the paths of the origin's test files to copy, and of the helpers that these test files use."""
        of_repository = "" if self.wheel else r"|device_paths\.py|about\.json"
        always = re.compile(rf"/(app_spec\.py|conftest\.py{of_repository})$")
        files = [path for folder in test_folders(self.origin) for path in files_under(f"tests/{folder.name}")]
        texts = {path: read(path) for path in files}
        own = [path for path, text in texts.items() if always.search(path) or not self._is_about_more(text)]
        own = [path for path in own if Path(path).name not in OF_README]
        cases = [path for path in own if always.search(path) or Path(path).name.startswith("test_")]
        helpers = used_helpers([path for path in own if path not in cases], [texts[path] for path in cases])
        self.left_behind = [path for path in files if path not in (*cases, *helpers)]
        return [*cases, *helpers]

    def _tox(self) -> str:
        """Return the tox.ini of a project."""
        tox = read("tox.ini")
        base, lint, own, locks = (find_environments(tox, name) for name in ("", ":lint", f":{self.origin}", ":locks"))
        pins = [
            pin
            for pin in re.findall(r"^  ([\w-]+==\S+)$", lint[0], re.MULTILINE)
            if not re.match("check-jsonschema|import-linter|shellcheck", pin)
        ]
        listed = ", ".join(["lint", *listed_environments(tox, self.origin, self.name)])
        head = self.fill("project_tox.txt", base=base[0], pins="\n  ".join(pins), listed=listed)
        return "\n\n".join([head.strip(), *map(self.environment, own), *locks]) + "\n"


# --- the repository ------------------------------------------------------------------------------------------------


def training_apps() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("tests/*/app_spec.py"))


def name_pattern(app: str) -> str:
    """Return a regular expression for an app's name, alone or in the name of one of the app's files or folders."""
    suffixes = "|".join(path.name[len(app) :] for path in test_folders(app) if path.name != app)
    after = r"(?!_?[A-Za-z0-9])" + (rf"|(?=(?:{suffixes})(?![A-Za-z0-9_]))" if suffixes else "")
    return rf"(?:(?<![A-Za-z0-9_])|(?<=run_)|(?<=test_)){app}(?:{after})"


def test_folders(app: str) -> list[Path]:
    """Return tests/<app>, and the test folders whose names begin with <app> and belong to no other app."""
    folders = sorted((ROOT / "tests").glob(f"{app}_*"))
    return [ROOT / "tests" / app, *(path for path in folders if not (ROOT / "apps" / path.name).exists())]


def files_under(folder: str) -> Iterator[str]:
    """Yield the paths, relative to the repository, of all files in a folder, without caches."""
    for path in sorted((ROOT / folder).iterdir()):
        if not SKIPPED_FILES.fullmatch(path.name):
            inner = str(path.relative_to(ROOT))
            yield from files_under(inner) if path.is_dir() else [inner]


def used_helpers(helpers: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return the helpers that ``texts`` import or mention, and the helpers that these helpers use."""

    def is_used(helper: str) -> bool:
        name = re.findall(r"^tests/(?:\w+/)?(\w+)", helper)[0]
        return any(re.search(rf'\b(import|from) {name}\b|"{name}(\.\w+)?"|{name}\.py\b', text) for text in texts)

    used = [helper for helper in helpers if is_used(helper)]
    rest = [helper for helper in helpers if helper not in used]
    if used:
        return [*used, *used_helpers(rest, [read(path) for path in used])]
    return []


def find_environments(tox: str, name: str) -> list[str]:
    """Return the sections [testenv<name>] and [testenv<name>-...] of tox.ini."""
    found = re.findall(rf"(?ms)^\[testenv{name}(?:-[^\n]*)?\].*?(?=^\[|\Z)", tox)
    require(found, f"tox.ini has no section [testenv{name}-...]: add one")
    return [each.strip() for each in found]


def project_part(text: str) -> str:
    """Return the part of a file that a project needs: up to the line END_OF_PROJECT, or the full text without one."""
    end = END_OF_PROJECT.search(text)
    return text[: end.start()].rstrip() + "\n" if end else text


def listed_environments(tox: str, origin: str, name: str) -> list[str]:
    """Return the environments of the origin that tox runs by default, with the copy's ``name`` for the origin's."""
    (environments,) = re.findall(r"(?m)^env_list = (.*)", tox)
    ends = re.findall(rf"\b{origin}(-\w+)", environments)
    require(ends, f"{origin} has no place in tox.ini's env_list: add it")
    return [f"{name}{end}" for end in ends]


def provenance() -> str:
    """Return core's version, and the commit if git can report it."""
    version: str = re.findall(r'(?m)^__version__ = "(.*)"', read("core/samestep/__init__.py"))[0]
    with contextlib.suppress(OSError, UsageError):
        version += f" at commit {run(['git', '--git-dir=.git', 'rev-parse', '--short=12', 'HEAD'], '', ROOT).strip()}"
    return version


def run(command: Sequence[str], problem: str, folder: Path) -> str:
    """Run a command in ``folder``, and return its output.

    Raises:
        UsageError: the command failed. The message has ``problem`` and the command's last error line.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # git hooks set GIT_*
    done = subprocess.run(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"it ended with code {done.returncode}"]
        errors = [line for line in lines if re.match(r"\W*(\w*error|fatal)\b", line, re.IGNORECASE)]
        raise UsageError(f"{problem}: {(errors or lines)[-1]}")
    return done.stdout


def decode(path: Path) -> str:
    """Return a file as text, from which `write` restores the same bytes, even for a binary file."""
    return path.read_bytes().decode(errors="surrogateescape")


def read(path: str) -> str:
    """Return a file of the repository as text."""
    return decode(ROOT / path)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files at their paths in ``folder``, and make scripts executable."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))
        path.chmod(0o755 if text.startswith("#!") else 0o644)


# --- into the repository -------------------------------------------------------------------------------------------


def changed_lists(copy: Copy) -> dict[str, str]:
    """Return the changed texts of the files that list apps, with the copy after its origin, by path."""
    origin = copy.origin
    tox = read("tox.ini")
    sections = find_environments(tox, f":{origin}")
    tox = tox.replace(sections[-1], "\n\n".join([sections[-1], *map(copy.environment, sections)]))
    names = listed_environments(tox, origin, copy.name)
    record = json.loads(read("tools/python_versions.json"))
    record = dict(sorted({**record, copy.name: record[origin]}.items()))
    return {
        "tox.ini": re.sub(r"(?m)^env_list = .*", rf"\g<0>, {', '.join(names)}", tox),
        "tools/python_versions.json": json.dumps(record, indent=2) + "\n",
    }


def install(new: Mapping[str, str], changed: Mapping[str, str]) -> None:
    """Write new and changed files into the repository. After a failure, restore the repository."""
    tops = sorted({"/".join(path.split("/")[:2]) if path.startswith(("apps/", "tests/")) else path for path in new})
    existing = [top for top in tops if (ROOT / top).exists()]
    require(not existing, f"there is a {''.join(existing[:1])}: choose another name, or move it away")
    before = {path: read(path) for path in [*changed, *GENERATED_PAGES]}
    try:
        write(ROOT, {**new, **changed})
        for page, script in GENERATED_PAGES.items():
            run([sys.executable, script], f"{script} cannot make {page}", ROOT)
        if shutil.which("git") and (ROOT / ".git").exists():  # some tests read git's list of files
            run(["git", "add", "--", *new], "git cannot add the new files", ROOT)
    except BaseException:
        for top in tops:
            shutil.rmtree(ROOT / top) if (ROOT / top).is_dir() else (ROOT / top).unlink(missing_ok=True)
        write(ROOT, {path: file for path, file in before.items() if read(path) != file})
        raise


# --- a project of its own ------------------------------------------------------------------------------------------


def build_wheel(folder: Path) -> Path:
    """Build core's wheel in ``folder`` by pip, which downloads the build backend. Return the wheel's path."""
    print("building core's wheel", flush=True)
    venv = folder / "venv"  # the system's Python may lack pip
    run([sys.executable, "-m", "venv", str(venv)], f"{sys.executable} cannot make an environment to build in", folder)
    command = [str(venv / "bin/python"), *"-m pip wheel --quiet --disable-pip-version-check --no-deps".split()]
    run([*command, f"--wheel-dir={folder}", str(ROOT)], "pip cannot build the wheel of samestep", folder)
    return next(folder.glob("samestep-*.whl"))


def write_project(files: Mapping[str, str], out: Path) -> None:
    """Write the project as a git repository with staged files into a temporary folder, and rename it to ``out``."""
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        stage.chmod(0o755)
        write(stage, files)
        if shutil.which("git"):
            run(["git", "-c", "init.defaultBranch=main", "init", "--quiet"], "git cannot make a repository", stage)
            run(["git", "add", "--all", "--force"], "git cannot add the new files", stage)
        stage.rename(out)  # this call also replaces an empty folder
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


# --- the command ---------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: bash scripts/new_app.sh NAME --from APP [--out DIR], or --help")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="bash scripts/new_app.sh",
        description="Copy an app, its launch script, its tests and its environment under a new name.",
        epilog="It writes everything or nothing. Exit codes: 0 done, 2 a mistake in the call, 1 any other failure.",
        allow_abbrev=False,
    )
    apps = ", ".join(training_apps())
    parser.add_argument("name", metavar="NAME", help="lower-case letters, digits and underscores, such as my_app")
    parser.add_argument("--from", dest="origin", metavar="APP", required=True, help=f"the app to copy: one of {apps}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="make a project of its own in this new folder")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="with --out: use this wheel of core, build none")
    parser.add_argument("--dry-run", action="store_true", help="list the files that would be written, and write none")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Raise UsageError for a mistake in the options, and make ``out`` absolute."""
    name = options.name
    origin = options.origin
    wheel = options.wheel
    out = options.out = options.out and Path(os.path.abspath(options.out))
    taken = [path for path in (f"apps/{name}", f"tests/{name}", f"scripts/run_{name}.sh") if (ROOT / path).exists()]
    pattern = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"
    apps = training_apps()
    require(re.fullmatch(pattern, name), f"{name!r} is no name for an app: use lower-case letters, digits, single _")
    require(len(name) <= MAX_NAME_LENGTH, f"{name} has {len(name)} letters: use {MAX_NAME_LENGTH} at most")
    reserved = name in TOX_FACTORS or re.fullmatch(r"(py|pypy|python)\d*", name)
    require(not reserved, f"{name} means something to tox in the name of an environment: choose another name")
    problem = "measures instead of training" if (ROOT / "apps" / origin).is_dir() else "is no app"
    require(origin in apps, f"{origin} {problem}: name one of {', '.join(apps)}")
    free = not taken or (out and name == origin)
    require(free, f"{name} is taken, by {''.join(taken[:1])}: choose another name")
    if out is None:
        require(not wheel, "--wheel goes with --out: without --out the copy uses the repository's core")
        tops = ("apps", "docs", "tests/common", *(f"tests/{app}" for app in apps))
        paths = ["README.md", "README.zh.md", "CONTRIBUTING.md", *(path for top in tops for path in files_under(top))]
        pages = [path for path in paths if path.endswith((".md", ".py")) and "_" not in name]
        uses = [path for path in pages if re.search(name_pattern(name), read(path))]
        require(not uses, f"{name} is a word in {', '.join(uses[:1])}: choose another name, such as my_{name}")
        return
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(empty, f"--out {out} exists and is not an empty folder: name a new one")
    require(out.parent.is_dir(), f"--out {out}: there is no folder {out.parent}: make it first")
    outside = out.resolve() != ROOT and ROOT not in out.resolve().parents
    require(outside, f"--out {out} is in this repository: name a folder outside, or omit --out")
    valid = not wheel or (wheel.is_file() and re.fullmatch(r"samestep-.*\.whl", wheel.name))
    require(valid, f"--wheel {wheel} is not a file samestep-*.whl: omit it to build one")


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # SystemExit removes a partial copy
    try:
        options = parse(argv)
        check(options)
        make_copy(options)
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the process that reads stdout has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as problem:
        print(f"error: {problem}: nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def make_copy(options: argparse.Namespace) -> None:
    """Write the copy, and print the next steps. For a dry run, only print the paths that the tool would write."""
    out = options.out
    wheel = options.wheel
    name = None
    with tempfile.TemporaryDirectory() as folder:
        if out:
            wheel = wheel or (None if options.dry_run else build_wheel(Path(folder)))
            name = wheel.name if wheel else f"samestep-{provenance().split()[0]}-py3-none-any.whl"
        copy = Copy(options.origin, options.name, name)
        new = {**copy.files(), **copy.project_files(), f"vendor/{name}": ""} if out else copy.files()
        changed = {} if out else changed_lists(copy)
        lists = [] if out else [*changed, *GENERATED_PAGES]
        if options.dry_run:
            print_paths(f"would write to {out}" if out else "would write", new)
            print_paths("would change", lists)
            print_paths("would leave behind", copy.left_behind)
            return
        if out:
            write_project({**new, f"vendor/{name}": decode(wheel)}, out)
        else:
            install(new, changed)
    print(f"{out or f'apps/{copy.name}'} is a copy of {copy.origin}\n")
    print(f"cd {shlex.quote(str(out))}\n" if out else "", end="")
    print_advice(copy)
    if lists:
        print(f"also changed: {', '.join(lists)}")
        print("deploy/images, deploy/kubernetes and deploy/dlc do not have it: add it where it must run.")
    print("new files are staged, and nothing is committed.")


def print_paths(title: str, paths: Sequence[str] | Mapping[str, str]) -> None:
    if paths:
        print("\n".join([f"{title}:", *(f"  {path}" for path in paths)]))


def print_advice(copy: Copy) -> None:
    """Print the commands that train and test the copy, and the page that lists the first changes to make."""
    print(copy.fill("app_readme.txt").split("```", 2)[1].strip())
    print(f"apps/{copy.name}/README.md lists the first changes, and the parts to keep.")
    print_paths("left behind, because these are about more than the app", copy.left_behind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
