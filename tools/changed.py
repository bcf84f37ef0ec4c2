"""Print the tox environments that a change needs: `bash scripts/test.sh --changed [REVISION]` runs them.

A change is what differs from REVISION (default: origin's main branch, if there is one, else HEAD), committed or not,
new files included. RULES says which environments a path needs; a path without a rule needs all of them.
"""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALL = "ALL"
# The first pattern that matches a path decides. `*` matches `/` too; {1} is the text that the first `*` matched.
RULES = [
    ("*.md", "lint docs core"),
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
    ("core/samestep/torch/*", "lint core mnist_ddp-cpu cifar_ddp-cpu gpt_fsdp-cpu mnist_lightning-cpu"),
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
    (".gitignore", "core"),
    ("LICENSE", "core"),
]


def environments_of(path: str) -> list[str]:
    """Return the environments that a change of this file needs; [ALL] if no rule names it."""
    for pattern, environments in RULES:
        if fnmatch.fnmatchcase(path, pattern):
            before, _, after = pattern.partition("*")
            first = path.removeprefix(before).partition(after[:1])[0] if after else ""
            return environments.replace("{1}", first).split()
    return [ALL]


def changed_paths(revision: str) -> list[str]:
    """Return the paths that differ from a revision, and those that git does not know yet."""

    def lines(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: git {' '.join(words)}: {done.stderr.strip()}: name a revision that exists")
        return done.stdout.splitlines()

    return lines("diff", "--name-only", "--no-renames", revision) + lines("ls-files", "--others", "--exclude-standard")


def default_revision() -> str:
    """Return where this branch left origin's main branch, or HEAD without an origin."""
    words = ["git", "merge-base", "HEAD", "origin/HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "HEAD"


def needed(paths: Iterable[str]) -> list[str]:
    """Return the environments that changes of these files need, sorted; [ALL] if one file needs all."""
    found = {environment for path in paths for environment in environments_of(path)}
    return [ALL] if ALL in found else sorted(found)


if __name__ == "__main__":
    print(",".join(needed(changed_paths(sys.argv[1] if len(sys.argv) > 1 else default_revision()))))
