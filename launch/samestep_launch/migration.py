"""Refuse an app that imports names of samestep 0.1, with a line that names the file and the table of new names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from samestep import ConfigError
from samestep.untrusted import read_text

# Names that 0.2 removed: modules, and names of modules that still exist.
OLD = frozenset(
    "best cifar datasets download hang phases rollback rundata safetensors_writer signals straggler watchdog "
    "checkpoint.Damaged checkpoint.OtherFormat checkpoint.bit_sum checkpoint.mismatch checkpoint.reason "
    "checkpoint.retire checkpoint.seal log.leave options.MAY_CHANGE_AT_RESUME options.arithmetic options.real "
    "options.whole run.Due run.Ranks run.processor rundir.answer rundir.claim rundir.misfit rundir.set_aside "
    "sharded.Piece sharded.ShardedRun sharded.Stored sharded.exchange sharded.shards_of sharding.AHEAD "
    "sharding.Rows".split()
)


def check_imports(folder: Path) -> None:
    """Raise ConfigError if a Python file of the app's ``folder`` uses a name that only samestep 0.1 had."""
    for path in sorted(folder.glob("*.py")):
        for line, name in _used_names(path):
            module = name.partition(".")[0]
            if old := next(iter(OLD.intersection((name, module))), None):
                where = "in the table under 0.2.0 in CHANGELOG.md"
                raise ConfigError(f"{path}:{line}: samestep 0.2 has no samestep.{old}: its new name is {where}")


def _used_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, "module.name" or "module") of each use of samestep; a file that cannot be parsed has none."""
    try:
        text = read_text(path)
        nodes = list(ast.walk(ast.parse(text))) if "samestep" in text else []
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the parser's for deep nesting
        return
    modules = {}  # of samestep, by their names in the file
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names = [f"{modules[node.value.id]}.{node.attr}"]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "samestep":
                yield getattr(node, "lineno", 0), ".".join(rest.split(".")[:2])
