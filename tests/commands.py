"""Find the commands of the pages, and the check of each command or its row in docs/commands.md.

A block without a language, or with bash or sh, holds commands if its first line is a command. In a block that also
shows output, a command begins with `$ `. Inline code is a command if it has a program of `PROGRAMS` and an argument. A
comment in the page makes the tests start an app. The comment is in the line above a block, or in the line of inline
code:

    <!-- run in mnist_ddp: --max-steps=2 --dataset=mnist-5k -->

For this comment, test_commands_started.py runs the block's starts of mnist_ddp with these options added, in
mnist_ddp's environment. All other commands match one of `RULES`, or have a row in docs/commands.md
(test_commands.py).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = "docs/commands.md"
# Pages that show messages of programs, not commands, and the page that lists commands.
LEFT_OUT = {NOT_RUN, "docs/messages.md", "CHANGELOG.md"}
PROGRAMS = {
    *(".", "apt-get", "bash", "cd", "curl", "diff", "dlc", "docker", "export", "fleetrun", "git", "horovodrun", "kill"),
    *("kubectl", "ln", "mlflow", "mpirun", "msrun", "pip", "podman", "pre-commit", "python", "python3"),
    *("python3.11", "samestep", "sbatch", "scancel", "scontrol", "sh", "srun", "ssh", "tail", "tensorboard"),
    *("torchrun", "tox", "visualdl", "wandb", "watch", "zensical"),
}
ASSIGNMENTS = r"(?:[A-Za-z_]+=(?:\$\([^)]*\)|\S)*[ ;]+)*"
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# The first cells of the tables in these pages hold commands of other people's tutorials.
FOREIGN = "docs/coming_from/"
FIRST_CELL = re.compile(r"^\|(?:\\\||[^|\n])*\|", re.MULTILINE)
INLINE = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
NOTE = re.compile(r"<!-- run in (\w+): ?(.*?) ?-->")
# Placeholders, and values that a reader could write instead.
PLACEHOLDERS = {
    r"<app>": "mnist_ddp",
    r"(?<=\.sh )N\b": "2",
    r" (\[options\]|\.\.\.)": "",
    r"\bRUN_DIR\b": "runs/x",
    r"(?<=new_app\.sh )my_app\b": "one_more",  # an app my_app may exist
    r"(?<=run_)my_app(?=\.sh)|(?<=-e )my_app(?=-cpu)": "cifar_ddp",  # the app that my_app is a copy of
    r"(?<![/\w])own_loop\.py|\bPROGRAM\b": "docs/own_loop.py",
    r"(?<=samestep run -n )N\b": "2",
}
# Checks that need no framework, by name: a pattern that a command must match from start to end.
RULES = {
    # The command runs with --dry-run.
    "shown": rf"(?!RANK_TABLE_FILE=){ASSIGNMENTS}bash scripts/run_\w+\.sh( .*)?",
    "as it stands": r"(diff|bash docs/\w+\.sh|python3 docs/\w+\.py|python apps/\w+/make_rank_table\.py)( .*)?",
    # The command runs on the run dir of a run that has just begun.
    "seen": r"samestep (report|watch) \S.*",
    # The command runs with --dry-run.
    "planned": r"bash scripts/new_app\.sh .*",
    # The environments exist, and the words after -- select a test.
    "collected": r"bash scripts/test\.sh( .*)?",
    # The program exists and has the options, and a test runs the program.
    "known": r"python3\.11 benchmarks/(?!launcher_signals)\w+\.py( .*)?",
    # The program accepts the options.
    "parsed": rf"{ASSIGNMENTS}(python|torchrun|fleetrun|horovodrun|mpirun|msrun)\b[^&|;]* apps/\w+/train\.py( .*)?",
    # The command accepts its options, and the program exists.
    "samestep": (
        r"samestep (run|report|watch|track|replay|verify|diff|hang)|samestep run -[^&|;]* \S+\.py( .*)?|"
        r"samestep check( .*)?"
    ),
}


@dataclass(frozen=True)
class Command:
    """A command of a page. ``app`` and ``added`` are the app and the options in the page's comment, or ""."""

    page: str
    line: int
    text: str
    app: str = ""
    added: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: `{self.text}`"

    @property
    def filled(self) -> str:
        """Return the command with values instead of placeholders."""
        text = self.text
        for placeholder, value in PLACEHOLDERS.items():
            text = re.sub(placeholder, value, text)
        return text

    @property
    def started(self) -> str | None:
        """Return the command that tests start; None without a comment, with MASTER_ADDR=, or without a program."""
        if not self.app or "MASTER_ADDR=" in self.text or not re.search(rf"\brun_{self.app}\.sh \d|\.py\b", self.text):
            return None
        return f"{self.filled} {self.added}".strip()


def is_command(text: str, words: int = 1) -> bool:
    """Return whether ``text`` begins with a program, after variables, and has at least ``words`` arguments."""
    found = re.match(rf"{ASSIGNMENTS}(\S+)((?: +\S+)*)$", text)
    return found is not None and found[1].rpartition("/")[2] in PROGRAMS and len(found[2].split()) >= words


def of_any_app(text: str) -> str:
    """Return a command or a page with <app> instead of an app's name, so that a row covers an app's copies."""
    names = sorted({"my_app", *(path.name for path in ROOT.glob("apps/*"))}, key=len, reverse=True)
    return re.sub(rf"(?<![A-Za-z0-9])({'|'.join(names)})(?![A-Za-z0-9])", "<app>", text)


def pages() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [page for page in listed.stdout.split() if page not in LEFT_OUT and (ROOT / page).exists()]
    return [page for page in found if not page.endswith(".zh.md")]  # test_translations.py checks these


def commands(page: str, text: str) -> Iterator[Command]:
    """Yield the commands of a page: first from code blocks, then from inline code, each in order."""
    for block in FENCE.finditer(text):
        above = text[: block.start()].rstrip("\n").rpartition("\n")[2]
        note = NOTE.fullmatch(above.strip())
        if block[2] in ("", "bash", "sh"):
            first = text.count("\n", 0, block.start()) + 2
            for line, shown in _of_block(block[3]):
                yield Command(page, first + line, shown, *(note.groups() if note else ()))
    prose = FENCE.sub(lambda block: re.sub("[^\n]", "", block[0]), text)
    if page.startswith(FOREIGN):
        prose = FIRST_CELL.sub("|", prose)
    for code in INLINE.finditer(prose):
        shown = " ".join(code[2].split())
        if "\n\n" not in code[2] and is_command(shown):
            line = prose.count("\n", 0, code.start())
            note = NOTE.search(INLINE.sub("", prose.split("\n")[line]))
            yield Command(page, line + 1, shown, *(note.groups() if note else ()))


def _of_block(block: str) -> Iterator[tuple[int, str]]:
    """Yield the commands of a block, with their lines from 0; lines that a backslash joins are one command."""
    lines = list(enumerate(block.split("\n")))
    prompted = [(number, line[2:]) for number, line in lines if line.startswith("$ ")]
    if prompted:
        lines = prompted
    elif block.startswith("#!"):  # a script: only its last command
        lines = [(0, re.sub(r" *\\\n *", " ", block).strip().rpartition("\n")[2])]
        yield lines[0]
        return
    whole: list[tuple[int, str]] = []
    goes_on = False
    for number, line in lines:
        if goes_on:
            whole[-1] = (whole[-1][0], f"{whole[-1][1]} {line.strip()}")
        elif line.strip() and not line.startswith("#"):
            whole.append((number, line))
        goes_on = line.endswith("\\")
        if goes_on:
            whole[-1] = (whole[-1][0], whole[-1][1][:-1].rstrip())
    shown = [(number, re.sub(r"\s+#( .*)?$|\s*&$", "", line).strip()) for number, line in whole]
    if shown and is_command(shown[0][1]):
        yield from shown


@cache
def found() -> list[Command]:
    """Return all commands of all pages."""
    return [command for page in pages() for command in commands(page, (ROOT / page).read_text())]


def not_run() -> dict[str, tuple[set[str], str]]:
    """Return ``{command: (its pages, why no test runs it)}`` of docs/commands.md, in the form of `of_any_app`."""
    rows = re.findall(r"^\| `+ ?(.+?) ?`+ \| (.+?) \| (.+?) \|$", (ROOT / NOT_RUN).read_text(), re.MULTILINE)
    assert len(rows) == len({text for text, _, _ in rows}), "a command stands twice in docs/commands.md"
    return {text.replace("\\|", "|"): ({*re.findall(r"`(.+?)`", where)}, why) for text, where, why in rows}


def rule_of(text: str) -> str | None:
    """Return the name of the first rule that matches a command without placeholders; None if none does."""
    return next((name for name, pattern in RULES.items() if re.fullmatch(pattern, text)), None)
