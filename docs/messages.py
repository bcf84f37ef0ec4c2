"""Make docs/messages.md, which lists the error messages of all programs by file.

    python3.11 docs/messages.py            # writes the page
    python3.11 docs/messages.py --check    # only compares

Messages are the arguments of exceptions in `ERRORS`, of `log.error`, and of `parser.error`. Arguments of `print_stderr`
and of the launcher's `Decision` are messages if they begin with ``error:`` and a space.

The program finds the possible strings of an argument without running the code. The program follows a name to all
assignments, a parameter to all calls of the function, and an item of a dict to all values of the dict. It follows a
call to all return values, if the same file defines the function. An ellipsis replaces any other value.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "messages.md"
ERRORS = {
    "ConfigError": "2",
    "EnvError": "2",  # a subclass of ConfigError
    "ArgumentTypeError": "2",  # argparse converts this error to a ConfigError that begins with the option's name
    "NonRetryableError": "1",
    "RetryableError": "again",
}
AFTER_ERROR = ("print_stderr", "Decision")  # calls whose last argument is a message if it begins with "error: "
PRINTED = {"log.error": "1", "error": "1", "parser.error": "2", **dict.fromkeys(AFTER_ERROR, "1")}
ELLIPSIS = "…"
DEPTH = 4  # limit of nested names and calls that `Source.words` follows
Scope = dict[str, list[str]]  # the possible strings of each parameter of a function, as `Source.words` returns them
HEAD = """\
# Messages

To find the exit code and the source of an error message, search for it here. `docs/messages.py` collects the messages
from the code. A message is one line after `error: `. An ellipsis (…) is a placeholder for values, so search for a few
words of your message. [Troubleshooting](troubleshooting.md) starts from symptoms.

| code | meaning |
|---|---|
| 2 | a mistake in the call: the line has the cause and the remedy; no restart |
| 1 | a failure that a restart cannot fix, or did not fix |
| again | the launch script restarts the job from its newest good checkpoint, up to `--max-restarts` times; then 1 |
"""
PACKAGE, LAUNCHER = "All apps: the package `samestep`", "The launch script and `samestep run`"
OBSERVE = "`samestep report`, `watch`, `track` and `hang`"
PARTS = {
    "core/samestep": PACKAGE,
    **{f"core/samestep/{name}": PACKAGE for name in ("data", "recovery", "sharded", "torch")},
    "observe/samestep_observe": OBSERVE,
    "check/samestep_check": "`samestep check`",
    "launch/samestep_launch": LAUNCHER,
}


class Message(NamedTuple):
    """An error message, with its text, the exit code, and the files that print it (paths in the repository)."""

    words: str
    code: str
    files: tuple[str, ...]


class Source:
    """Find the messages in a Python file."""

    def __init__(self, path: Path) -> None:
        self.module, self.tree = path.stem, ast.parse(path.read_text())
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._functions: dict[str, list[ast.FunctionDef]] = {}  # by name
        self._calls: dict[str, list[ast.Call]] = {}
        self._imported: set[str] = set()  # names of imported objects and modules
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Call):
                self._calls.setdefault(_last_name(node.func), []).append(node)
            elif isinstance(node, ast.ImportFrom):
                self._imported |= {alias.name for alias in node.names}

    def messages(self, others: Sequence[Source] = ()) -> Iterator[tuple[str, str]]:
        """Yield the text and exit code of each message. ELLIPSIS replaces parts that are known only at run time."""
        made = [(call, code) for name, code in ERRORS.items() for call in self._calls.get(name, [])]
        printed = [call for name in ("error", *AFTER_ERROR) for call in self._calls.get(name, [])]
        made += [(call, PRINTED[name]) for call in printed if (name := ast.unparse(call.func)) in PRINTED]
        for call, code in sorted(made, key=lambda each: each[0].lineno):
            message = call.args[-1] if call.args else ast.Constant("")
            if ast.unparse(call.func) in ("log.error", "error"):  # the second argument is the kind of event
                message = call.args[0]
            for bound in self._scopes(call, message, others) if call.args else ():
                for words in self.words(message, bound):
                    if _last_name(call.func) not in AFTER_ERROR or words.startswith("error: "):
                        line = " ".join(words.removeprefix("error: ").split())
                        yield re.sub(f"{ELLIPSIS}+", ELLIPSIS, line).rstrip(": "), code

    def words(self, node: ast.expr, bound: Scope, depth: int = 0) -> list[str]:  # noqa: C901
        """Return the possible strings of an expression, with ELLIPSIS for values that are known only at run time.

        Args:
            node: the expression to follow.
            bound: possible strings of the parameters of the function around the expression.
            depth: number of names and calls that led to this expression.
        """
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.FormattedValue):
            return self.words(node.value, bound, depth)
        if isinstance(node, ast.IfExp):
            return self._each([node.body, node.orelse], bound, depth)
        parts = node.values if isinstance(node, ast.JoinedStr) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        if parts is not None:
            choices = itertools.product(*(self.words(part, bound, depth) for part in parts))
            return list(dict.fromkeys("".join(choice) for choice in choices))
        if isinstance(node, ast.Name) and node.id in bound:
            return bound[node.id]
        if isinstance(node, ast.Name) and depth < DEPTH and (made := self._caught(node)):
            return self._each([call.args[0] for call in made if call.args], bound, depth)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):  # an item of a dict
            dicts = [value for value in self._assigned(node.value) if isinstance(value, ast.Dict)]
            return self._each([value for each in dicts for value in each.values], bound, depth)
        if isinstance(node, ast.Name) and depth < DEPTH:
            found = self._each(self._assigned(node), bound, depth)
            for more in self._added(node):  # `name += more`, which may be conditional
                found += [before + after for before in found for after in self.words(more, bound, depth + 1)]
            return found
        if isinstance(node, ast.Call) and depth < DEPTH:
            found = [
                words
                for function in self._functions.get(_last_name(node.func), [])
                for words in self._each(
                    self._returned(function), self._arguments(function, node, bound, depth + 1), depth
                )
            ]
            return list(dict.fromkeys(found)) or [ELLIPSIS]
        return [ELLIPSIS]

    def _each(self, nodes: Sequence[ast.expr], bound: Scope, depth: int) -> list[str]:
        found = [words for node in nodes for words in self.words(node, bound, depth + 1)]
        return list(dict.fromkeys(found)) or [ELLIPSIS]

    def _caught(self, name: ast.Name) -> list[ast.Call]:
        """Return the calls that create the exception ``name`` of an `except` clause, if its class is private."""
        node: ast.AST = name
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.ExceptHandler) and node.name == name.id:
                kind = _last_name(node.type) if node.type else ""
                return self._calls.get(kind, []) if kind.startswith("_") else []
        return []

    def _scopes(self, call: ast.Call, message: ast.expr, others: Sequence[Source]) -> list[Scope]:
        """Return a scope for each call of the function around ``call``, or one empty scope if there are no such calls.

        If the message uses several names that one returned tuple assigns, there is a scope for each possible tuple.
        """
        function = self._around(call)
        if not function:
            return [{}]
        calls = self._calls.get(function.name, [])
        scopes = [self._arguments(function, each, {}, 0) for each in calls]
        for other in others:  # files that may import this function or its module
            if {function.name, self.module} & other._imported and not function.name.startswith("_"):
                scopes += [other._arguments(function, each, {}, 0) for each in other._calls.get(function.name, [])]
        scopes = scopes or [{}]
        used = {node.id for node in ast.walk(message) if isinstance(node, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                names = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
                tuples = [each.elts for each in self._results(node.value) if isinstance(each, ast.Tuple)]
                given = [{name: self.words(one, {}) for name, one in zip(names, elements)} for elements in tuples]
                if len(used.intersection(names)) > 1 and given:
                    scopes = [{**scope, **each} for scope in scopes for each in given]
        return scopes

    def _arguments(self, function: ast.FunctionDef, call: ast.Call, bound: Scope, depth: int) -> Scope:
        """Return the possible strings of each parameter of ``function`` in one call."""
        names = [each.arg for each in [*function.args.posonlyargs, *function.args.args]]
        names = names[1:] if names[:1] == ["self"] else names
        given = {**dict(zip(names, call.args)), **{each.arg: each.value for each in call.keywords if each.arg}}
        return {name: self.words(value, bound, depth) for name, value in given.items()}

    def _assigned(self, name: ast.Name) -> list[ast.expr]:
        """Return the expressions that are assigned to a name in the nearest function around it, or in the module."""
        function = self._around(name)
        while function:  # continue with the outer functions
            if found := [value for node in ast.walk(function) for value in self._values(node, name.id)]:
                return found
            function = self._around(function)
        return [value for node in self.tree.body for value in self._values(node, name.id)]

    def _added(self, name: ast.Name) -> list[ast.expr]:
        function = self._around(name)
        nodes = (node for node in ast.walk(function or ast.Module([], [])) if isinstance(node, ast.AugAssign))
        return [node.value for node in nodes if _last_name(node.target) == name.id]

    def _values(self, node: ast.AST, name: str) -> list[ast.expr]:
        """Return the expressions that a statement (an assignment, or a loop over a literal) assigns to a name."""
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.For) and isinstance(node.iter, (ast.Tuple, ast.List)):
            pairs = [(node.target, value) for value in node.iter.elts]
        found = []
        for target, value in pairs:
            if not isinstance(target, ast.Tuple):
                found += [value] if isinstance(target, ast.Name) and target.id == name else []
                continue
            for given in self._results(value) if isinstance(value, ast.Call) else [value]:
                elements = given.elts if isinstance(given, ast.Tuple) else []
                found += [one for each, one in zip(target.elts, elements) if _last_name(each) == name]
        return found

    def _results(self, call: ast.Call) -> list[ast.expr]:
        """Return the return values of all functions in this file that have the name of the called function."""
        functions = self._functions.get(_last_name(call.func), [])
        return [value for function in functions for value in self._returned(function)]

    def _returned(self, function: ast.FunctionDef) -> list[ast.expr]:
        nodes = (node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value)
        return [node.value for node in nodes if node.value and self._around(node) is function]

    def _around(self, node: ast.AST) -> ast.FunctionDef | None:
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.FunctionDef):
                return node
        return None


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def files() -> list[Path]:
    """Return the Python files whose messages the page lists, sorted."""
    return sorted(path for part in (*PARTS, "apps/*") for path in ROOT.glob(f"{part}/*.py"))


def collect() -> list[Message]:
    """Return each message with fixed words once. Messages are in the order of the first file that prints them."""
    files_of: dict[tuple[str, str], list[str]] = {}
    sources = {path: Source(path) for path in files()}
    for path, source in sources.items():
        for words, code in source.messages([each for each in sources.values() if each is not source]):
            name = str(path.relative_to(ROOT))
            if re.search("[a-z]", words) and name not in files_of.setdefault((words, code), []):
                files_of[words, code].append(name)
    return [Message(words, code, tuple(names)) for (words, code), names in files_of.items()]


def page(messages: list[Message]) -> str:
    """Return the text of docs/messages.md."""
    by_part: dict[str, list[Message]] = {}
    for message in messages:
        parts = {name.rpartition("/")[0] for name in message.files}
        titles = {PARTS.get(part, part.rpartition("/")[2]) for part in parts}
        title = titles.pop() if len(titles) == 1 else "Several apps"
        by_part.setdefault(title, []).append(message)
    first = [PACKAGE, LAUNCHER, "Several apps"]
    lines = [HEAD]
    for title in sorted(by_part, key=lambda title: (title not in first, first.index(title) if title in first else 0)):
        lines += [f"## {title}", "", "| message | code | file |", "|---|---|---|"]
        for message in sorted(by_part[title], key=lambda each: each.files[0]):
            links = ", ".join(_link(name, len(message.files) > 1) for name in message.files)
            lines.append(f"| {_code(message.words)} | {message.code} | {links} |")
        lines.append("")
    return "\n".join(lines)


def _link(name: str, several: bool) -> str:
    folder, _, file = name.rpartition("/")
    return f"[{folder.rpartition('/')[2]}/{file}](../{name})" if several else f"[{file}](../{name})"


def _code(words: str) -> str:
    """Return the text as Markdown code for a cell of a table."""
    fence = "``" if "`" in words else "`"
    pad = " " if fence == "``" else ""
    return f"{fence}{pad}{words.replace('|', chr(92) + '|')}{pad}{fence}"


def main() -> None:
    parser = argparse.ArgumentParser(description="make docs/messages.md")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    made = page(collect())
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        sys.exit("error: docs/messages.md differs from the code: run python3.11 docs/messages.py")


if __name__ == "__main__":
    main()
