"""Refuse an app that imports names of samestep 0.1, with a line that names the file and the table of new names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from samestep import ConfigError

# What 0.1 had and 0.2 has not: modules, and names of modules that both have.
MODULES = frozenset(
    "autopsy best cifar datasets download hang phases rollback rundata signals straggler watchdog".split()
)
NAMES = {
    "checkpoint": {"Damaged", "OtherFormat", "bit_sum", "mismatch", "reason", "retire", "seal"},
    "log": {"leave"},
    "options": {"MAY_CHANGE_AT_RESUME", "arithmetic", "real", "whole"},
    "run": {"Due", "Ranks"},
    "rundir": {"answer", "claim", "misfit", "set_aside"},
    "sharded": {"Piece", "Stored", "exchange", "shards_of"},
    "sharding": {"AHEAD", "Rows"},
}


def check_imports(folder: Path) -> None:
    """Raise ConfigError if a Python file of the app's ``folder`` uses a name that only samestep 0.1 had."""
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        if "samestep" in text and (old := next(_old_names(text), None)):
            raise ConfigError(
                f"{path}:{old[0]}: samestep 0.2 has no {old[1]}: its new name is in the table under 0.2.0 in "
                "core/CHANGELOG.md"
            )


def _old_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each use of an old name; a file with a syntax error has none."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return
    local = {}  # names by which the file knows modules of samestep
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module == "samestep":
                local.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local:
            names = [f"samestep.{local[node.value.id]}.{node.attr}"]
        for name in names:
            package, module, attribute = (*name.split("."), "", "")[:3]
            if package == "samestep" and (module in MODULES or attribute in NAMES.get(module, ())):
                yield node.lineno, f"samestep.{module}" + ("" if module in MODULES else f".{attribute}")
