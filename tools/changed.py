"""Print the tox environments that a change needs. `bash scripts/test.sh --changed [REVISION]` runs these environments.

A change consists of all files that differ from REVISION, committed or not, and of new files that git does not ignore.
The default REVISION is the merge base with the main branch, the first existing branch of MAIN_BRANCHES that is not the
current branch. RULES maps a path's pattern to the environments that a change of the path needs. A path without a rule
needs all environments.
"""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
ALL = "ALL"
MAIN_BRANCHES = ("origin/HEAD", "origin/main", "origin/master", "main", "master")
# The first pattern that matches a path applies. `*` also matches `/`, and {1} is the text that the first `*` matched.
RULES = [
    ("*.md", "lint docs core"),
    ("docs/recipes/*", "lint docs core recipes-cpu"),
    ("docs/*", "lint docs core"),
    ("mkdocs.yml", "docs"),
    ("pyproject.toml", ALL),
    ("apps/mnist_horovod/*", "lint core mnist_horovod-cpu mnist_horovod-mpi"),
    ("apps/*/*", "lint core {1}-cpu"),
    ("scripts/run_mnist_horovod.sh", "lint core mnist_horovod-cpu mnist_horovod-mpi"),
    ("scripts/run_*.sh", "lint core {1}-cpu"),
    ("scripts/new_app.sh", "lint core copies"),
    ("scripts/verify_horovod.sh", "lint mnist_horovod-cpu"),
    ("scripts/launch.*", "lint core mnist_ddp-cpu"),
    ("tools/new_app.py", "lint core copies"),
    ("tools/templates/*", "core copies"),
    ("tools/*", "lint core"),
    ("check/samestep_check/*", "lint core mnist_ddp-cpu"),
    ("launch/samestep_launch/preflight.py", "lint core multihost"),
    ("launch/samestep_launch/trackers.py", "lint core trackers"),
    ("launch/samestep_launch/tracker_locks/*", "core trackers"),
    ("launch/samestep_launch/*", "lint core mnist_ddp-cpu"),
    ("observe/samestep_observe/track*", "lint core trackers"),
    ("observe/samestep_observe/*", "lint core"),
    ("core/samestep/data/cifar*", "lint core cifar_ddp-cpu"),
    ("core/samestep/sharded/*", "lint core gpt_fsdp-cpu"),
    ("core/samestep/torch/*", "lint core mnist_ddp-cpu cifar_ddp-cpu gpt_fsdp-cpu mnist_lightning-cpu recipes-cpu"),
    ("core/*", "lint core mnist_ddp-cpu lenet_paddle-cpu"),
    ("deploy/slurm/*", "lint core slurm"),
    ("deploy/*", "lint core"),
    ("benchmarks/scoreboard/*", "lint mnist_ddp-cpu"),
    ("benchmarks/*", "lint mnist_ddp-cpu"),
    ("tests/benchmarks/*", "lint mnist_ddp-cpu"),
    ("tests/common/*", "lint mnist_ddp-cpu mnist_horovod-cpu lenet_paddle-cpu"),
    ("tests/conformance/test_paddle_and_torch.py", "lint lenet_paddle-cpu"),
    ("tests/conformance/test_mindspore_and_torch.py", "lint resnet50_mindspore-cpu"),
    ("tests/conformance/*", "lint mnist_horovod-cpu"),
    ("tests/copies/*", "lint copies"),
    ("tests/kit/*", "lint mnist_ddp-cpu"),
    ("tests/docs/*", "lint docs"),
    ("tests/images/*", "lint"),
    ("tests/mnist_horovod_mpi/*", "lint mnist_horovod-mpi"),
    ("tests/multihost/*", "lint multihost"),
    ("tests/slurm/*", "lint slurm"),
    ("tests/trackers/*", "lint trackers"),
    ("tests/adversarial/*", "lint core"),
    ("tests/check/*", "lint core mnist_ddp-cpu"),
    ("tests/core/*", "lint core"),
    ("tests/coverage.ini", "lint"),
    ("tests/defects/*", "lint core"),
    ("tests/deploy/*", "lint core"),
    ("tests/launch/*", "lint core"),
    ("tests/mutation/*", "lint"),
    ("tests/observe/*", "lint core"),
    ("tests/test_commands_started.py", "lint mnist_ddp-cpu"),
    ("tests/*/*", "lint {1}-cpu"),
    ("tests/test_*.py", "lint core"),
    ("tests/*.py", ALL),
    ("tox.ini", ALL),
    ("pytest.ini", ALL),
    ("scripts/test.sh", ALL),
    (".ci/run", ALL),
    (".github/*", "lint core"),
    (".importlinter", "lint"),
    (".shellcheckrc", "lint"),
    ("mypy.ini", "lint"),
    ("ruff.toml", "lint"),
    (".pre-commit-config.yaml", "lint"),
    (".dockerignore", "core"),
    (".gitattributes", "core"),
    (".gitignore", "core"),
    ("LICENSE", "core"),
]


def environments_of(path: str) -> list[str]:
    """Return the environments that a change of a file needs, or [ALL] if no rule matches its path."""
    for pattern, environments in RULES:
        if fnmatch.fnmatchcase(path, pattern):
            before, _, after = pattern.partition("*")
            first = path.removeprefix(before).partition(after[:1])[0] if after else ""
            return environments.replace("{1}", first).split()
    return [ALL]


def refuse(problem: str) -> NoReturn:
    """Print an error, and exit with 2, the exit code of a user's mistake."""
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


def git(*words: str) -> str | None:
    """Run git with the arguments ``words``, and return its output, or None if git fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, encoding="utf-8", errors="surrogateescape")
    if done.returncode:
        return None
    return done.stdout


def changed_paths(revision: str) -> list[str]:
    """Return the paths that differ from a revision, and the paths of new files that git does not track."""
    differ = git("diff", "-z", "--name-only", "--no-renames", revision, "--")
    new = git("ls-files", "-z", "--others", "--exclude-standard")
    if differ is None or new is None:
        refuse(f"git cannot compare with {revision}: name another revision")
    return [path for path in (differ + new).split("\0") if path]


def commit_of(revision: str) -> str:
    """Return a revision's commit, or an empty string if the revision does not exist."""
    return (git("rev-parse", "--quiet", "--verify", "--end-of-options", f"{revision}^{{commit}}") or "").strip()


def default_revision() -> tuple[str, str]:
    """Return the name of the main branch, and the merge base of this branch and HEAD."""
    current = (git("symbolic-ref", "--quiet", "HEAD") or "").strip()
    for branch in MAIN_BRANCHES:
        if f"refs/heads/{branch}" == current:  # the merge base of a branch with itself hides its new commits
            continue
        commit = (git("merge-base", "HEAD", branch) or "").strip()
        if commit:
            return branch, commit
    refuse(f"there is no other branch of {', '.join(MAIN_BRANCHES)}: name a revision, such as HEAD~1")


def chosen_revision(name: str) -> tuple[str, str]:
    """Return the revision ``name`` and its commit, or the default revision and its commit if ``name`` is empty."""
    if not name:
        return default_revision()
    if name.startswith("-"):
        refuse(f"{name} is no revision: name a commit or a branch")
    commit = commit_of(name)
    if not commit:
        refuse(f"git knows no revision {name}: name a commit or a branch")
    return name, commit


def needed(paths: Iterable[str]) -> list[str]:
    """Return the environments that changes of these files need, sorted; [ALL] if a file needs all environments."""
    found = {environment for path in paths for environment in environments_of(path)}
    if ALL in found:
        return [ALL]
    return sorted(found)


def main(revision: str) -> None:
    """Print the needed environments to stdout, and the compared revision and number of files to stderr."""
    name, commit = chosen_revision(revision)
    paths = changed_paths(commit)
    print(f"compared with {name} ({commit[:12]}): changed files: {len(paths)}", file=sys.stderr)
    found = needed(paths)
    if found == [ALL]:
        cause = next(path for path in paths if ALL in environments_of(path))
        print(f"{cause!a} needs all environments", file=sys.stderr)
    print(",".join(found))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
