"""Make the table that compares Samestep with published examples, from benchmarks/scoreboard/cells.json.

docs/app_tables.py writes this table into README.md and README.zh.md. The module uses only the standard library.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

CELLS = Path(__file__).resolve().parents[1] / "benchmarks" / "scoreboard" / "cells.json"
# Title of each program, by its name in cells.json.
PROGRAMS = {
    "mnist_ddp": "**Samestep** (mnist_ddp)",
    "mnist_elastic": "**Samestep** (mnist_elastic)",
    "pytorch": "PyTorch DDP tutorial",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "horovod-elastic": "Horovod Elastic",
}
HEADS = {
    "en": "| program | a rank is killed | TERM to the job | damaged checkpoint | same samples at 1 rank | evaluation |",
    "zh": "| 程序 | 杀掉一个 rank | 向作业发送 TERM | 检查点损坏 | 与 1 个 rank 样本相同 | 评估 |",
}
ROWS = ("resume-position", "term", "checkpoint-damaged", "one-rank", "evaluation")
# Pattern of a message of `samestep check`, and its short form in English and Chinese. The first match applies.
SHORT = (
    (r"resumes at step \d+ of \d+, sample for sample", "resumes exactly", "精确恢复"),
    (r"resumes at step (\d+): (\d+) samples repeated, 0 lost", "repeats {2} samples", "重复 {2} 个样本"),
    (
        r"(step) \d+: (\d+) samples repeated, (\d+) lost",
        "repeats {2} samples, loses {3}",
        "重复 {2} 个样本，丢失 {3} 个",
    ),
    (r"starts over at step 0", "all steps lost", "全部丢失"),
    (r"exit (\d+); no step lost", "saves the step, exit {1}", "保存当前步，退出码 {1}"),
    (r"exit 0 after (\d+) of (\d+) steps", "exit 0 after {1} of {2} steps", "{2} 步中只做了 {1} 步，退出码却是 0"),
    (r"resumes an older one", "uses the previous one", "改用前一个"),
    (r"loaded without a word", "loads it", "照常加载"),
    (r"no checkpoint is written", "saves none", "不保存"),
    (r"same samples in all \d+ steps", "yes", "是"),
    (r"step \d+ has other samples", "no", "否"),
    (r"each of \d+ examples counts once", "each example once", "每个统计一次"),
    (r"(\d+) of (\d+) examples count twice", "{1} of {2} counts twice", "{2} 个里有 {1} 个统计两次"),
    (r"no evaluation", "none", "没有评估"),
)


def table(language: str) -> str:
    """Return the comparison in ``language``, a key of HEADS."""
    cells = json.loads(CELLS.read_text())
    lines = [HEADS[language], "|---" * (len(ROWS) + 1) + "|"]
    for program, title in PROGRAMS.items():
        texts = [short(cells[row][program]["seen"], language) for row in ROWS]
        texts[0] = f"{texts[0]}{seconds(cells, program, language)}"
        lines.append(f"| {' | '.join([title, *texts])} |")
    return "\n".join(lines)


def short(seen: str, language: str) -> str:
    """Return the short form of a message of `samestep check`.

    Raises:
        SystemExit: no pattern of SHORT matches.
    """
    for pattern, english, chinese in SHORT:
        found = re.search(pattern, seen)
        if found:
            numbers = [f"{int(text):,}" if text.isdigit() else text for text in found.groups()]
            form = english if language == "en" else chinese
            return form.format("", *numbers)
    raise SystemExit(f"error: docs/comparison.py has no short form of {seen!r}: add one to SHORT")


def seconds(cells: dict[str, Any], program: str, language: str) -> str:
    """Return a program's seconds to recover, as text; "" if a user must start the job again."""
    seen = cells["recovery-time"][program]["seen"]
    if "without a new start" not in seen:
        return ""
    value = seen.partition(" s ")[0]
    return f" (after {value} s)" if language == "en" else f"（{value} 秒后）"
