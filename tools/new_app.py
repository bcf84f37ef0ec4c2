"""Copy an app under a name of your own: beside the others, or as a project that stands alone.

    bash scripts/new_app.sh my_app --from cifar_ddp                   # apps/my_app, its launch script, its tests
    bash scripts/new_app.sh my_app --from cifar_ddp --out ~/my_app    # a project of its own, with core as a wheel

What is renamed is the app's name, in files, paths and commands; a path to what is not copied stays. A file of tests
that names another app, or what the repository alone has (benchmarks, deploy, docs), is about more than this app: it is
left behind. The copy's row leaves out what core alone decides (`-- --every-case` runs that too) and, where starts are
long, what its origin leaves out for that; no other app shows the rest for it.

It runs on the system's Python, with the standard library alone; the wheel is made by pip.
"""

from __future__ import annotations

import argparse
import ast
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
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
FIRST = "mnist_ddp"  # the app that the shared tests and their options take where none is named
LONGEST = 18  # letters of a name: with more, lines of the apps' own would be over 120
FACTORS = {"ascend", "cpu", "gpu", "mpi", "mpich"}  # of tox: in the name of an environment they choose its lines
REPOSITORY = ("apps", "benchmarks", "core", "deploy", "docs", "scripts", "tests", "tools")
SEEN = ("How fast", "Speed", "What a step spends its time on")  # sections of READMEs that are of one program alone
DERIVED = {"docs/devices.md": "docs/device_paths.py", "docs/messages.md": "docs/messages.py"}  # pages made of the code
SKIPPED = re.compile(r"\..*|__pycache__|.*\.egg-info|.*\.pyc")

CHANGE = """\
apps/{name}/model.py         the model; weights.py takes its parameters' names as they are
apps/{name}/data.py          what a batch is made of; a data set of your own: `resolve` in options.py finds its files
apps/{name}/options.py       its options and their defaults
apps/{name}/train.py         the optimizer, the loss, the metric
apps/{name}/requirements.in  what it needs; `bash scripts/test.sh -e locks -- {name}` then makes what is installed
tests/{name}/row.py          the options of small runs, and the accuracy that the defaults must reach
tests/{name}/test_*.py       what was particular to the program that you copied: keep what still holds
apps/{name}/README.md        what it says was seen was seen of that program, not of yours"""

KEEP = """\
1. The same step at any number of ranks: a batch is what `batches.indices(step)` names of the global batch, and what is
   drawn at random is drawn for all of it, from (seed, step) or from the sample's (seed, epoch, index).
2. Every sample counts once: a rank's loss is a sum, scaled so that the gradient is the mean over the global batch; an
   evaluation adds up sums and counts over ranks. A rank without samples still takes part.
3. A run that is killed ends as one that is not: all that the next step depends on is a function of the step, or in the
   checkpoint (`weights.groups`), and every rank takes part wherever `ranks talk`."""

README = """\
# {name}

{about}.

```
bash scripts/run_{name}.sh 2    # trains on 2 ranks; the first start makes its environment
{tests}    # runs its tests
```

They need Linux, bash, a package index and Python {python}. `bash scripts/run_{name}.sh --help` explains every option;
[apps/{name}](apps/{name}/README.md) tells about the program.

## Make it yours

```
{change}
```

What to keep, as the tests in `tests/common` rely on it:

{keep}

## What is where

| | |
|---|---|
| `apps/{name}` | the program: one rank runs `train.py`, which reads from top to bottom |
| `scripts/run_{name}.sh`, `scripts/launcher` | what runs before and around the ranks |
| `tools/lock.py` | makes the app's locks: all that is installed, with hashes |
| `vendor/{wheel}` | the package `samestep`: what frameworks leave out |
| `tests/common`, `tests/{name}` | kills, signals, damaged checkpoints, any N; what is particular to this program |
| `deploy/slurm` | the same on a Slurm cluster |

`bash scripts/test.sh -e {name}-cpu -- tests/common -k resume` runs a part of the tests, `-- --every-case` also those of
`samestep` alone, and `-- --soak` the high counts.

## Licences

It began as a copy of a program of Samestep {version}{commit}, which is under the Apache License 2.0, as `LICENSE`
says; its pages tell more of runs, signals, hangs and messages. The wheel's embedded digits
(`samestep/data/mnist-5k`) are MNIST's, under CC BY-SA 3.0; their README in the wheel names the authors.
"""

LINT = """\
[testenv:lint]
description = ruff, and mypy for the launcher, the tests and the app
deps =
  -r apps/{name}/requirements.in
  vendor/{wheel}
  {pins}
commands =
  ruff check .
  ruff format --check .
  mypy --cache-dir={{env_tmp_dir}}/mypy scripts/launcher tools
  bash -c 'MYPYPATH=tests:tests/common mypy --cache-dir={{env_tmp_dir}}/mypy tests'
  bash -c 'cd apps/{name} && mypy --config-file={{tox_root}}/mypy.ini --cache-dir={{env_tmp_dir}}/mypy .'
"""


class Mistake(Exception):
    """What stands in the way: one line that names the thing and the remedy."""


@dataclass(frozen=True)
class File:
    content: bytes
    mode: int = 0o644

    @classmethod
    def read(cls, path: Path) -> File:
        return cls(path.read_bytes(), path.stat().st_mode & 0o777)

    @property
    def text(self) -> str | None:
        """None for what is no text, such as an image."""
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            return None


@dataclass
class Copy:
    """Which app is copied, and under what name; ``wheel`` is the name of core's where a project of its own is made."""

    origin: str
    name: str
    wheel: str | None = None
    paths: set[str] = field(default_factory=set)  # of the repository, which are copied
    left: list[str] = field(default_factory=list)  # of the origin's tests, which are not

    @property
    def alone(self) -> bool:
        return self.wheel is not None

    def rename(self, text: str) -> str:
        """``text`` with the app's name in place of its origin's, but for paths to what is not copied."""

        def renamed(found: re.Match[str]) -> str:
            path = re.sub(r"^(\.\./)+", "", found[0]).rstrip("./")
            known = path.partition("/")[0] in REPOSITORY and (ROOT / path).exists()
            copied = any(each == path or each.startswith(f"{path}/") for each in self.paths)
            return found[0] if known and not copied else re.sub(name_of(self.origin), self.name, found[0])

        return re.sub(rf"[\w./-]*{name_of(self.origin)}[\w./-]*", renamed, text)

    def foreign(self, text: str) -> bool:
        """Whether ``text`` names another app."""
        others = {path.name for path in (ROOT / "apps").iterdir() if path.is_dir()} - {self.origin, self.name}
        return any(re.search(name_of(other), text) for other in others)


def name_of(app: str) -> str:
    """A regular expression for an app's name where it is one: alone, or in the name of one of its files or folders."""
    more = "|".join(path.name[len(app) :] for path in test_folders(app) if path.name != app)
    after = r"(?!_?[A-Za-z0-9])" + (rf"|(?=(?:{more})(?![A-Za-z0-9_]))" if more else "")
    return rf"(?:(?<![A-Za-z0-9_])|(?<=run_)|(?<=test_)){app}(?:{after})"


def test_folders(app: str) -> list[Path]:
    """tests/<app>, and those whose names begin so and which are no other app's."""
    folders = sorted(path for path in (ROOT / "tests").iterdir() if path.name == app or path.name.startswith(f"{app}_"))
    return [path for path in folders if path.name == app or not (ROOT / "apps" / path.name).exists()]


# --- the call ------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(f"{message}: bash scripts/new_app.sh NAME --from APP [--out DIR], or --help")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="new_app.sh",
        usage="bash scripts/new_app.sh NAME --from APP [--out DIR] [--dry-run]",
        description="Copy an app, its launch script, its tests and its environment under a name of your own.",
        epilog="It writes all of it or nothing. Exit codes: 0 done, 2 a mistake in the call, 1 anything else.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="lower-case letters, digits and underscores, such as my_app")
    apps = ", ".join(training_apps())
    parser.add_argument("--from", dest="origin", metavar="APP", required=True, help=f"what to copy: one of {apps}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="make a project of its own there, and not apps/NAME")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="with --out: this wheel of core; none is built then")
    parser.add_argument("--dry-run", action="store_true", help="list what would be written, and write nothing")
    return parser.parse_args(argv)


def training_apps() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("tests/*/row.py"))


def check(options: argparse.Namespace) -> None:
    """Raises Mistake for what can be told before anything is read."""
    name, origin = options.name, options.origin
    out = options.out = options.out and Path(os.path.abspath(options.out))
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise Mistake(f"{name!r} is no name for an app: use lower-case letters, digits and single underscores")
    if len(name) > LONGEST:
        raise Mistake(f"{name} has {len(name)} letters: use {LONGEST} at most, so that lines with it stay short enough")
    if name in FACTORS or re.fullmatch(r"(py|pypy|python)\d*", name):
        raise Mistake(f"{name} means something to tox in the name of an environment: choose another")
    if origin not in training_apps():
        what = "measures instead of training" if (ROOT / "apps" / origin).is_dir() else "is no app"
        raise Mistake(f"{origin} {what}: name one of {', '.join(training_apps())}")
    taken = [ROOT / "apps" / name, ROOT / "tests" / name, ROOT / "scripts" / f"run_{name}.sh"]
    found = next((path for path in taken if path.exists()), None)
    if found and (out is None or name != origin):
        raise Mistake(f"{name} is taken, by {found.relative_to(ROOT)}: choose another name")
    if out is None:
        if options.wheel:
            raise Mistake("--wheel goes with --out: without it the app uses the repository's core")
        where = [] if "_" in name else [path for path in sources() if re.search(name_of(name), path.read_text())]
        if where:
            raise Mistake(f"{name} is a word in {where[0].relative_to(ROOT)}: choose another, such as my_{name}")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Mistake(f"--out {out} is there and is not an empty folder: name a new one")
    if not out.parent.is_dir():
        raise Mistake(f"--out {out}: there is no folder {out.parent}: make it first")
    if out.resolve() == ROOT or ROOT in out.resolve().parents:
        raise Mistake(f"--out {out} is in this repository: name a folder outside, or leave --out away")
    if options.wheel and not (options.wheel.is_file() and re.fullmatch(r"samestep-.*\.whl", options.wheel.name)):
        raise Mistake(f"--wheel {options.wheel} is not a file samestep-*.whl: leave it away to have one built")


def sources() -> Iterator[Path]:
    """Where an app's name is looked for later, by the tests and when another one is copied."""
    folders = ["apps", "docs", "tests/common", *(f"tests/{app}" for app in training_apps())]
    files = [path for folder in folders for path in files_under(folder) if path.endswith((".md", ".py"))]
    yield from (ROOT / path for path in ["README.md", "CONTRIBUTING.md", *files])


# --- what is copied ------------------------------------------------------------------------------------------------


def files_under(folder: str) -> Iterator[str]:
    """The files in a folder of the repository, by their paths there, without what programs leave."""
    for path in sorted((ROOT / folder).iterdir()):
        if SKIPPED.fullmatch(path.name):
            continue
        inner = str(path.relative_to(ROOT))
        if path.is_dir():
            yield from files_under(inner)
        else:
            yield inner


def test_files(copy: Copy) -> list[str]:
    """The origin's files of tests that are about it alone, and what these use; the others go to ``copy.left``."""
    kept: list[str] = []
    for folder in test_folders(copy.origin):
        files = list(files_under(f"tests/{folder.name}"))
        texts = {file: File.read(ROOT / file).text or "" for file in files}
        roots = {f"tests/{folder.name}/{name}" for name in ("row.py", "device_paths.py", "conftest.py")}
        about = [file for file in files if file not in roots and not about_more(copy, texts[file])]
        helpers = {file for file in about if not Path(file).name.startswith("test_")}
        wanted = [file for file in about if file not in helpers]
        while more := [file for file in sorted(helpers) if any(named(file, texts[each]) for each in wanted)]:
            wanted += more
            helpers -= {*more}
        kept += [*(file for file in files if file in roots), *wanted]
        copy.left += [file for file in files if file not in roots and file not in wanted]
    return [file for file in kept if not (copy.alone and file.endswith("/device_paths.py"))]


def named(helper: str, text: str) -> bool:
    """Whether ``text`` names a helper of tests, by its file's name in tests/<app>, or by its folder's."""
    return re.search(rf"\b{re.escape(Path(helper).parts[2].partition('.')[0])}\b", text) is not None


def about_more(copy: Copy, text: str) -> bool:
    return copy.foreign(text) or re.search(r'"(benchmarks|deploy|docs)"', text) is not None


def collect(copy: Copy) -> dict[str, File]:
    """The files of the copy by their new paths, with the new name in them; sets ``copy.paths`` and ``copy.left``."""
    sources = [*files_under(f"apps/{copy.origin}"), f"scripts/run_{copy.origin}.sh", *test_files(copy)]
    sources += [path for path in (f"deploy/slurm/{copy.origin}.sbatch",) if (ROOT / path).exists()]
    if copy.alone:
        doors = (path for path in files_under("scripts") if "/" not in path[8:] and not path.startswith("scripts/run_"))
        sources += [path for path in doors if re.search(name_of(copy.origin), (ROOT / path).read_text())]
    copy.paths = {*sources}
    made = {}
    for path in sources:
        file = File.read(ROOT / path)
        if path.endswith("/row.py"):
            file = File(row(copy).encode(), file.mode)
        if path == f"apps/{copy.origin}/README.md":
            file = File(copied_readme(file.content.decode()).encode(), file.mode)
        if file.text is not None:
            file = File(copy.rename(file.text).encode(), file.mode)
        made[copy.rename(path)] = file
    return made


def copied_readme(text: str) -> str:
    """An app's README without what was measured of it, and with a word on the rest."""
    for title in SEEN:
        text = re.sub(rf"^## {title}\n.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^## What to know before you copy it$", "## What to know", text, flags=re.MULTILINE)
    title, _, rest = text.partition("\n")
    return f"{title}\n\nA copy, to be changed: what this page says was seen, was seen of its origin.\n{rest.rstrip()}\n"


def row(copy: Copy) -> str:
    """The copy's row.py, whole, also where its origin's replaces a part of another app's."""
    source, left_out = whole_row(copy.origin)
    kept = '("once", "slow")' if "slow" in left_out else '("once",)'
    source = with_keywords(source, {"left_out": kept})
    docstring = f'"""What the common cases need to know of {copy.origin}."""'  # which is renamed with the rest
    return re.sub(r'\A""".*?"""', docstring, source, flags=re.DOTALL)


def whole_row(app: str) -> tuple[str, list[str]]:
    """An app's row.py as a call of ``App``, and what it leaves out.

    ``replace(row("other"), name=value)`` is other's with these values.
    """
    source = (ROOT / "tests" / app / "row.py").read_text()
    call = row_call(source)
    values = {keyword.arg or "": ast.get_source_segment(source, keyword.value) or "" for keyword in call.keywords}
    if ast.unparse(call.func) == "replace":
        base = call.args[0]
        if not (isinstance(base, ast.Call) and isinstance(base.args[0], ast.Constant)):
            raise Mistake(f'tests/{app}/row.py: ROW is neither App(...) nor replace(row("app"), ...): make it so')
        source = with_keywords(whole_row(str(base.args[0].value))[0], values)
    return source, [*ast.literal_eval(values.get("left_out", "()"))]


def row_call(source: str) -> ast.Call:
    """The call that ``ROW`` is."""
    found = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROW" and isinstance(node.value, ast.Call)
    ]
    if len(found) != 1:
        raise Mistake("a row.py has no ROW = App(...): see tests/common/harness.py")
    return found[0]


def with_keywords(source: str, values: Mapping[str, str]) -> str:
    """``source`` with other values of keywords in the call that ``ROW`` is."""
    lines, call = source.splitlines(keepends=True), row_call(source)
    there = {keyword.arg: keyword.value for keyword in call.keywords}
    for name, value in sorted(values.items(), key=lambda item: -getattr(there.get(item[0]), "lineno", 10**6)):
        if name in there:
            first, last = there[name].lineno - 1, there[name].end_lineno or 0
            lines[first:last] = [f"    {name}={value},\n"]
        else:  # from the end on, so that what stands before keeps its line
            lines.insert((call.end_lineno or 0) - 1, f"    {name}={value},\n")
    return "".join(lines)


# --- into the repository -------------------------------------------------------------------------------------------


def registered(copy: Copy) -> dict[str, File]:
    """The files that list apps, with the copy beside its origin: tox.ini, README.md, tools/python_versions.json."""
    tox = (ROOT / "tox.ini").read_text()
    origins, ends = environments(tox, copy.origin)
    added = "".join(f"{environment(copy, each)}\n\n" for each in origins)
    tox = tox[:ends] + added + tox[ends:]
    listed = re.search(r"^env_list = (.*)$", tox, re.MULTILINE)
    names = listed[1].split(", ") if listed else []
    new = [re.sub(rf"^{copy.origin}-", f"{copy.name}-", each) for each in names if each.startswith(f"{copy.origin}-")]
    tox = tox.replace(", ".join(names), ", ".join([*names, *new]), 1)

    readme = (ROOT / "README.md").read_text()
    line = re.search(rf"^\| \[{copy.origin}\]\(apps/{copy.origin}\) .*\n", readme, re.MULTILINE)
    if line is None or not new:
        raise Mistake(
            f"{copy.origin} has no line in README.md's table of apps, or no place in tox.ini's env_list: add it"
        )
    cells = copy.rename(line[0]).split("|")
    cells[2] = f" a copy of [{copy.origin}](apps/{copy.origin}) "
    readme = readme[: line.end()] + "|".join(cells) + readme[line.end() :]

    record = json.loads((ROOT / "tools" / "python_versions.json").read_text())
    record = {**record, copy.name: record[copy.origin]}
    versions = json.dumps({name: record[name] for name in sorted(record)}, indent=2) + "\n"
    return {
        "tox.ini": File(tox.encode()),
        "README.md": File(readme.encode()),
        "tools/python_versions.json": File(versions.encode()),
    }


def environments(tox: str, app: str) -> tuple[list[str], int]:
    """The app's sections of tox.ini, and where the last of them ends."""
    found = [*re.finditer(rf"^\[testenv:{app}[-\]].*?(?=^\[|\Z)", tox, re.MULTILINE | re.DOTALL)]
    if not found:
        raise Mistake(f"tox.ini has no section [testenv:{app}-...]: add one")
    return [each[0].strip() for each in found], found[-1].end()


def environment(copy: Copy, section: str) -> str:
    """A section of tox.ini for the copy: its requirements alone, the common tests and its own."""
    lines, own = [], {"tests/common", *(f"tests/{path.name}" for path in test_folders(copy.origin))}
    for line in section.splitlines():
        if copy.foreign(line) and "requirements.in" in line:
            continue
        line = re.sub(r"^description = .*", f"description = {copy.origin}, driven through its launch script", line)
        line = re.sub(r" (tests/[\w./-]+)", lambda found: found[0] if found[1] in own else "", line)
        lines.append(line.replace("-e core", f"vendor/{copy.wheel}") if copy.alone else line)
    return copy.rename("\n".join(lines))


def install(new: Mapping[str, File], changed: Mapping[str, File]) -> None:
    """Put all of it into the repository, or leave that as it was."""
    tops = sorted({"/".join(path.split("/")[:2]) if path.startswith(("apps/", "tests/")) else path for path in new})
    found = [top for top in tops if (ROOT / top).exists()]
    if found:
        raise Mistake(f"there is a {found[0]}: choose another name, or move it away")
    before = {path: File.read(ROOT / path) for path in [*changed, *DERIVED]}
    stage = Path(tempfile.mkdtemp(prefix=".new_app.", dir=ROOT))
    try:
        write(stage, {**new, **changed})
        for path in [*tops, *changed]:
            (stage / path).replace(ROOT / path)
        for page, script in DERIVED.items():
            finish([sys.executable, script], f"{script} cannot make {page}")
        if is_repository():  # some tests read what git lists
            finish(["git", "add", "--", *new], "git cannot add the new files")
    except BaseException:
        for top in tops:
            shutil.rmtree(ROOT / top) if (ROOT / top).is_dir() else (ROOT / top).unlink(missing_ok=True)
        write(ROOT, {path: file for path, file in before.items() if File.read(ROOT / path) != file})
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def commit() -> str:
    """Which commit is copied, in words; "" where git does not know."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if is_repository() and done.returncode == 0:
            return f" at commit {done.stdout.strip()}"
    return ""


def is_repository() -> bool:
    return shutil.which("git") is not None and (ROOT / ".git").exists()


def write(folder: Path, files: Mapping[str, File]) -> None:
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)


def finish(command: Sequence[str], what: str, folder: Path = ROOT) -> None:
    """Run a command that must succeed; raises Mistake with the last line that it says."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's
    done = subprocess.run(
        command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"it ended with code {done.returncode}"]
        why = [line for line in said if re.match(r"\W*(\w*error|fatal)\b", line, re.IGNORECASE)]
        raise Mistake(f"{what}: {(why or said)[-1]}")


# --- a project of its own ------------------------------------------------------------------------------------------


def project(copy: Copy) -> dict[str, File]:
    """What the app needs around it to stand alone, but for the wheel; nothing of it names another app."""
    paths = [*files_under("scripts/launcher"), "scripts/test.sh", ".ci/run", ".gitignore", ".pre-commit-config.yaml"]
    paths += ["LICENSE", "pytest.ini", "ruff.toml", "tests/processes.py", "tools/lock.py"]
    uses = "".join(File.read(ROOT / path).text or "" for path in copy.paths if path.startswith("tests/"))
    paths += [path for path in files_under("tests/common") if not path.endswith("/layouts.py") or "layouts" in uses]
    made = {path: File.read(ROOT / path) for path in paths}
    made["tests/conftest.py"] = File(without((ROOT / "tests" / "conftest.py").read_text(), BESIDE).encode())
    for path, file in made.items():  # the shared tests name the first app where they mean any
        if path.startswith("tests/") and file.text is not None:
            made[path] = File(re.sub(name_of(FIRST), copy.name, file.text).encode(), file.mode)
    made |= {path: File(text.encode()) for path, text in configuration(copy).items()}
    return made


BESIDE = {"beside", "ddp", "cifar"}  # fixtures of tests/conftest.py that run another app


def without(source: str, names: set[str]) -> str:
    """A module without these functions."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            last = node.end_lineno or 0
            while last < len(lines) and not lines[last].strip():
                last += 1
            del lines[first:last]
    return "".join(lines)


def configuration(copy: Copy) -> dict[str, str]:
    """tox.ini, mypy.ini, README.md and what Slurm needs, by their paths."""
    tox = (ROOT / "tox.ini").read_text()
    sections, _ = environments(tox, copy.origin)
    common = re.search(r"^\[testenv\]\n.*?(?=^\[)", tox, re.MULTILINE | re.DOTALL)
    linted = tox.partition("[testenv:lint]")[2].partition("\n[")[0]
    pins = re.findall(r"^  ([\w-]+==\S+)$", linted, re.MULTILINE)
    lint = LINT.format(name=copy.name, wheel=copy.wheel, pins="\n  ".join(pins))
    head = "# Run by scripts/test.sh; -gpu variants are opt-in.\n[tox]\nmin_version = 4.20\n"
    head += f"env_list = lint, {copy.name}-cpu\nno_package = true\n"
    parts = [head, common[0].strip() if common else "", lint, *(environment(copy, section) for section in sections)]
    parts += environments(tox, "locks")[0]

    blocks = (ROOT / "mypy.ini").read_text().split("\n\n")  # those of the repository's own folders are said so
    mypy = "\n\n".join(
        block for block in blocks if not re.search(r"^# .*(benchmarks|deploy|docs)/", block, re.MULTILINE)
    )
    return {
        "tox.ini": "\n\n".join(part.strip() for part in parts) + "\n",
        "mypy.ini": mypy.replace("$MYPY_CONFIG_FILE_DIR/core:", "").strip() + "\n",
        "README.md": readme(copy),
        "deploy/slurm/common.sh": (ROOT / "deploy" / "slurm" / "common.sh").read_text(),
    }


def about(copy: Copy) -> str:
    """What the app does, as its launch script says it."""
    second = (ROOT / "scripts" / f"run_{copy.origin}.sh").read_text().splitlines()[1]
    return second.lstrip("# ").partition(":")[0]


def readme(copy: Copy) -> str:
    requirements = (ROOT / "apps" / copy.origin / "requirements.in").read_text()
    python = re.search(r"^# python: (\S+)", requirements, re.MULTILINE)
    return README.format(
        name=copy.name,
        about=about(copy),
        tests=f"bash scripts/{'test.sh':<{len(f'run_{copy.name}.sh 2')}}",
        python=python[1] if python else "3.11",
        wheel=copy.wheel,
        version=version(),
        commit=commit(),
        change=CHANGE.format(name=copy.name),
        keep=KEEP,
    )


# What a project of its own does not have: where links out of the app's folder lead, and these folders.
ELSEWHERE = r"\]\((\.\./)+|\b(benchmarks|docs)/|\bdeploy/(?!slurm\b)|\btests/(?!common\b|{name}\b|{name}_)"


def own_words(copy: Copy, text: str) -> str:
    """A README without what it says of other apps, and of what the project does not have.

    Sentences, rows, items and lines of code are left out, and a heading under which nothing is left.
    """

    def elsewhere(part: str) -> bool:
        left = copy.name != copy.origin and re.search(name_of(copy.origin), part)  # a path to what is not copied
        return bool(left or copy.foreign(part) or re.search(ELSEWHERE.format(name=copy.name), part))

    kept: list[str] = []
    for block in blocks(re.sub(r"<!-- run in .*? -->\n", "", text)):  # what the repository's tests do with commands
        first = block.splitlines()[0]
        if first.startswith("```"):
            lines = [line for line in block.splitlines() if not elsewhere(line)]
            block = "\n".join(lines) if len(lines) > 2 else ""
        elif first.startswith("|"):
            lines = [line for line in block.splitlines() if not elsewhere(line)]
            block = "\n".join(lines) if len(lines) > 2 and lines[0] == first else ""
        elif re.match(r"- |\d+\. ", first):
            items = re.split(r"\n(?=- |\d+\. )", block)
            block = "\n".join(item for item in items if not elsewhere(item))
        elif elsewhere(block):
            sentences = re.split(r"(?<=[.:])\s+(?=[A-Z`*\[])", " ".join(block.splitlines()))
            own = " ".join(sentence for sentence in sentences if not elsewhere(sentence))
            block = textwrap.fill(own, 120, break_long_words=False, break_on_hyphens=False)
        if block:
            kept.append(block)
        elif kept and kept[-1].endswith(":"):  # what led to it
            kept.pop()
    levels = [len(block) - len(block.lstrip("#")) for block in kept]
    empty = {i for i, (level, below) in enumerate(zip(levels, [*levels[1:], 1])) if i and 0 < below <= level}
    return "\n\n".join(block for i, block in enumerate(kept) if i not in empty) + "\n"


def blocks(text: str) -> list[str]:
    """Of a text in Markdown: what blank lines part, but for code between fences."""
    found: list[list[str]] = [[]]
    fenced = False
    for line in text.splitlines():
        fence = line.startswith("```")
        if found[-1] and ((fence and not fenced) or not (line.strip() or fenced)):
            found.append([])
        if line.strip() or fenced:
            found[-1].append(line)
        if fence and fenced:
            found.append([])
        fenced = fenced != fence
    return ["\n".join(lines) for lines in found if lines]


def alone(copy: Copy, path: str, text: str) -> str:
    """A file of the project without what points out of it."""
    if path == f"apps/{copy.name}/README.md":
        return own_words(copy, text)
    if path.startswith("deploy/slurm/"):
        text = text.replace("Samestep's folder", "the project's folder").replace("   (docs/slurm.md)", "")
        return text.replace(" docs/slurm.md says what the cluster must grant.", "")
    return text


def build_wheel(folder: Path) -> Path:
    """Core's wheel, made in ``folder`` by pip, which takes its build backend from the package index."""
    print("building core's wheel", flush=True)
    if sys.version_info < (3, 10):
        raise Mistake(f"core's wheel needs Python 3.10 or newer, and {sys.executable} is older: install python3.11")
    venv = folder / "venv"  # a system's Python may come without pip
    finish([sys.executable, "-m", "venv", str(venv)], f"{sys.executable} cannot make an environment to build in")
    command = [str(venv / "bin" / "python"), "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", f"--wheel-dir={folder}", str(ROOT / "core")]
    finish(command, "pip cannot build core's wheel")
    return next(folder.glob("samestep-*.whl"))


def stand_alone(files: Mapping[str, File], out: Path, wheel: Path) -> None:
    """Write the project beside its place, as a git repository with all of it added, and then give it its name."""
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        stage.chmod(0o755)
        write(stage, {**files, f"vendor/{wheel.name}": File(wheel.read_bytes())})
        if shutil.which("git"):
            finish(["git", "-c", "init.defaultBranch=main", "init", "--quiet"], "git cannot make a repository", stage)
            finish(["git", "add", "--all", "--force"], "git cannot add the new files", stage)
        stage.rename(out)  # also where it is an empty folder
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


# --- the program ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is half done is undone
    try:
        options = parse(argv)
        check(options)
        if options.out is None:
            beside_the_others(options)
        else:
            as_a_project(options)
    except Mistake as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has gone: there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as problem:
        print(f"error: {problem}: nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def beside_the_others(options: argparse.Namespace) -> None:
    copy = Copy(options.origin, options.name)
    new, changed = collect(copy), registered(copy)
    if options.dry_run:
        show("would write", new)
        show("would change", [*changed, *DERIVED])
        show("would leave behind", copy.left)
        return
    install(new, changed)
    print(f"apps/{copy.name} is a copy of {copy.origin}\n")
    commands(copy, f"scripts/test.sh -e {copy.name}-cpu")
    advise(copy)
    print(f"\nalso changed: {', '.join([*changed, *DERIVED])}; new files are staged, and nothing is committed.")
    print("deploy/images, deploy/kubernetes and deploy/dlc do not know it: add it where it is to run.")


def as_a_project(options: argparse.Namespace) -> None:
    out: Path = options.out
    with tempfile.TemporaryDirectory() as folder:
        wheel: Path | None = options.wheel
        if wheel is None and not options.dry_run:
            wheel = build_wheel(Path(folder))
        copy = Copy(options.origin, options.name, wheel.name if wheel else f"samestep-{version()}-py3-none-any.whl")
        files = {**collect(copy), **project(copy)}
        for path, file in files.items():
            if file.text is not None:
                files[path] = File(alone(copy, path, file.text).encode(), file.mode)
        if options.dry_run:
            show(f"would write to {out}", sorted([*files, f"vendor/{copy.wheel}"]))
            show("would leave behind", copy.left)
            return
        assert wheel is not None
        stand_alone(files, out, wheel)
    print(f"{out} is a project of its own, a copy of {copy.origin}\n")
    print(f"  cd {shlex.quote(str(out))}")
    commands(copy, "scripts/test.sh")
    advise(copy)
    print("its files are staged, and nothing is committed.")


def version() -> str:
    found = re.search(r'^__version__ = "(.*)"', (ROOT / "core" / "samestep" / "__init__.py").read_text(), re.MULTILINE)
    return found[1] if found else "*"


def show(what: str, paths: Sequence[str] | Mapping[str, File]) -> None:
    if paths:
        print("\n".join([f"{what}:", *(f"  {path}" for path in paths)]))


def commands(copy: Copy, test: str) -> None:
    """Print how the copy is run, and by what command it is tested."""
    train = f"bash scripts/run_{copy.name}.sh 2"
    width = max(len(train), len(f"bash {test}"))
    print(f"  {train:<{width}}    # trains on 2 ranks\n  {f'bash {test}':<{width}}    # runs its tests")


def advise(copy: Copy) -> None:
    print("\nchange first:")
    print("\n".join(f"  {line}" for line in CHANGE.format(name=copy.name).splitlines()))
    print("keep:")
    print("\n".join(f"  {line}" for line in KEEP.splitlines()))
    if copy.left:
        print("left behind, as these are about more than the app: " + ", ".join(copy.left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
