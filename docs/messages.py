"""Make docs/messages.md: every message with which the programs end on purpose, by the file that says it.

    python3.11 docs/messages.py            # writes the page
    python3.11 docs/messages.py --check    # compares, writes nothing

A message is the argument of an error of `ERRORS`, wherever one is made in core/ and apps/, or is printed there by
`log.error`, or by `print_stderr` or a `Decision` of the launcher after "error: ". What is known only when the program runs is shown as an
ellipsis: of an f-string the fixed words stay, a name stands for each string that is assigned to it, a parameter for
what the calls in its file give, and a call for what a function of its file returns.
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
    "EnvError": "2",  # a ConfigError
    "ArgumentTypeError": "2",  # argparse makes a ConfigError of it, with the option's name before
    "NonRetryableError": "1",
    "RetryableError": "again",
}
AFTER_ERROR = ("print_stderr", "Decision")  # their last argument is a message if it begins with "error: "
PRINTED = {"log.error": "1", "error": "1", "parser.error": "2", **dict.fromkeys(AFTER_ERROR, "1")}
ELLIPSIS = "…"
DEPTH = 4  # of names that stand for names
Scope = dict[str, list[str]]  # what the parameters of a function may be, as `Source.words` gives it
HEAD = """\
# Messages

Every message with which a program here ends on purpose, by the part that says it. Made by `docs/messages.py` of the
code. A message is one line after `error: `; … stands for what differs from case to case, so search this page for a few
words of yours. [Troubleshooting](troubleshooting.md) begins at what you see.

| code | |
|---|---|
| 2 | the caller's mistake: the line names the thing and the remedy; nothing is started again |
| 1 | starting again cannot mend it, or did not |
| again | the launch script starts the job again from its newest good checkpoint, up to `--max-restarts` times; then 1 |
"""
PACKAGE, LAUNCHER = "All apps: the package `samestep`", "The launch script and `samestep run`"
PARTS = {
    "core/samestep": PACKAGE,
    **{f"core/samestep/{name}": PACKAGE for name in ("data", "recovery", "sharded", "torch", "observe")},
    "core/samestep/launch": LAUNCHER,
}


class Message(NamedTuple):
    """One message: its words, the exit code that it ends with, and the files that say it, from the root on."""

    words: str
    code: str
    files: tuple[str, ...]


class Source:
    """One file of Python: the messages in it."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._functions: dict[str, list[ast.FunctionDef]] = {}  # by name, as calls
        self._calls: dict[str, list[ast.Call]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Call):
                self._calls.setdefault(_last_name(node.func), []).append(node)

    def messages(self) -> Iterator[tuple[str, str]]:
        """(words, code) of each error that is made; words are ELLIPSIS where another's message is passed on."""
        made = [(call, code) for name, code in ERRORS.items() for call in self._calls.get(name, [])]
        printed = [call for name in ("error", *AFTER_ERROR) for call in self._calls.get(name, [])]
        made += [(call, PRINTED[name]) for call in printed if (name := ast.unparse(call.func)) in PRINTED]
        for call, code in sorted(made, key=lambda each: each[0].lineno):
            for bound in self._scopes(call) if call.args else ():
                for words in self.words(call.args[-1], bound):
                    if _last_name(call.func) not in AFTER_ERROR or words.startswith("error: "):
                        line = " ".join(words.removeprefix("error: ").split())
                        yield re.sub(f"{ELLIPSIS}+", ELLIPSIS, line).rstrip(": "), code

    def words(self, node: ast.expr, bound: Scope, depth: int = 0) -> list[str]:
        """What the expression may be as a string, ELLIPSIS for what only a run knows; ``bound`` are parameters."""
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
        if isinstance(node, ast.Name) and depth < DEPTH:
            found = self._each(self._assigned(node), bound, depth)
            for more in self._added(node):  # `name += more`, perhaps
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

    def _scopes(self, call: ast.Call) -> list[Scope]:
        """What the calls in this file give to the function around this one, one for each call; one where none does.

        What a function returns as a tuple belongs together, and so multiplies them.
        """
        function = self._around(call)
        if not function:
            return [{}]
        calls = self._calls.get(function.name, [])
        scopes = [self._arguments(function, each, {}, 0) for each in calls] or [{}]
        used = {node.id for node in ast.walk(call.args[-1]) if isinstance(node, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                names = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
                tuples = [each.elts for each in self._results(node.value) if isinstance(each, ast.Tuple)]
                given = [{name: self.words(one, {}) for name, one in zip(names, elements)} for elements in tuples]
                if len(used.intersection(names)) > 1 and given:
                    scopes = [{**scope, **each} for scope in scopes for each in given]
        return scopes

    def _arguments(self, function: ast.FunctionDef, call: ast.Call, bound: Scope, depth: int) -> Scope:
        """The words that a call gives to a function's parameters."""
        names = [each.arg for each in [*function.args.posonlyargs, *function.args.args]]
        names = names[1:] if names[:1] == ["self"] else names
        given = {**dict(zip(names, call.args)), **{each.arg: each.value for each in call.keywords if each.arg}}
        return {name: self.words(value, bound, depth) for name, value in given.items()}

    def _assigned(self, name: ast.Name) -> list[ast.expr]:
        """The expressions that are assigned to a name in the function around it, else in the module."""
        function = self._around(name)
        nodes = ast.walk(function) if function else []
        found = [value for node in nodes for value in self._values(node, name.id)]
        return found or [value for node in self.tree.body for value in self._values(node, name.id)]

    def _added(self, name: ast.Name) -> list[ast.expr]:
        function = self._around(name)
        nodes = (node for node in ast.walk(function or ast.Module([], [])) if isinstance(node, ast.AugAssign))
        return [node.value for node in nodes if _last_name(node.target) == name.id]

    def _values(self, node: ast.AST, name: str) -> list[ast.expr]:
        """What an assignment or a loop gives to a name, also by a tuple of targets."""
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
        """What the functions of this file return that a call may call."""
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
    """The programs."""
    return sorted(path for part in (*PARTS, "apps/*") for path in ROOT.glob(f"{part}/*.py"))


def collect() -> list[Message]:
    """All messages with words of their own, each once, in the order of the first file that says them."""
    said: dict[tuple[str, str], list[str]] = {}
    for path in files():
        for words, code in Source(path).messages():
            name = str(path.relative_to(ROOT))
            if re.search("[a-z]", words) and name not in said.setdefault((words, code), []):
                said[words, code].append(name)
    return [Message(words, code, tuple(names)) for (words, code), names in said.items()]


def page(messages: list[Message]) -> str:
    """docs/messages.md."""
    by_part: dict[str, list[Message]] = {}
    for message in messages:
        parts = {name.rpartition("/")[0] for name in message.files}
        titles = {PARTS.get(part, part.rpartition("/")[2]) for part in parts}
        title = titles.pop() if len(titles) == 1 else "Several apps"
        by_part.setdefault(title, []).append(message)
    first = [PACKAGE, LAUNCHER, "Several apps"]
    lines = [HEAD]
    for title in sorted(by_part, key=lambda title: (title not in first, first.index(title) if title in first else 0)):
        lines += [f"## {title}", "", "| message | code | said by |", "|---|---|---|"]
        for message in sorted(by_part[title], key=lambda each: each.files[0]):
            links = ", ".join(_link(name, len(message.files) > 1) for name in message.files)
            lines.append(f"| {_code(message.words)} | {message.code} | {links} |")
        lines.append("")
    return "\n".join(lines)


def _link(name: str, several: bool) -> str:
    folder, _, file = name.rpartition("/")
    return f"[{folder.rpartition('/')[2]}/{file}](../{name})" if several else f"[{file}](../{name})"


def _code(words: str) -> str:
    """The words as Markdown's code, in a table's cell."""
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
        sys.exit("error: docs/messages.md is not what the programs say: run python3.11 docs/messages.py")


if __name__ == "__main__":
    main()
