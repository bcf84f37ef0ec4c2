"""Test that public functions with three or more parameters describe them in a section Args."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core/samestep", "launch/samestep_launch", "observe/samestep_observe", "check/samestep_check")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Yield the public functions and methods of a module or class. The class's docstring describes ``__init__``."""
    for node in body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)


def parameters(function: Function) -> list[str]:
    """Return the names of the parameters, without self and cls."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    rest = [each for each in (arguments.vararg, arguments.kwarg) if each]
    names = [each.arg for each in [*named, *rest]]
    return [name for name in names if name not in ("self", "cls")]


def lacking(source: str) -> list[str]:
    """Return the names of the public functions that have three or more parameters, but no section Args."""
    functions = [each for each in public_functions(ast.parse(source).body) if len(parameters(each)) >= 3]
    return [each.name for each in functions if "Args:" not in (ast.get_docstring(each) or "")]


def files() -> list[Path]:
    found: list[Path] = []
    for package in PACKAGES:
        found += sorted((ROOT / package).rglob("*.py"))
    return found


def test_the_search_finds_functions_and_methods() -> None:
    source = '''
def few(a, b): ...
def _private(a, b, c): ...
def lacks(a, b, *, c): ...
def has(a, b, c):
    """Do it.

    Args:
        a: x.
    """
class Thing:
    def method(self, a, b, c): ...
'''
    assert lacking(source) == ["lacks", "method"]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_public_function_with_three_parameters_describes_them(path: Path) -> None:
    assert not lacking(path.read_text())
