"""The README's differences of the usual ways, and a core that does not mention this app's packages."""

from __future__ import annotations

import re

from harness import ROOT, told_by

APART = {
    "mean over ranks": 3e-3,
    "mean over micro-batches": 3e-3,
    "mean over samples": 8e-3,
    "clipping": 2e-3,
    "end as padding": 1e-2,
    "dropout": 1e-2,
    "evaluation: mean over batches": 1e-2,
}


def test_the_usual_ways_make_another_training() -> None:
    found = told_by("llm_finetune", "import wrong_ways; wrong_ways.main()")
    assert found.pop("none") < 1e-12
    assert found.keys() == APART.keys()
    # Another processor or torch may round differently.
    assert all(apart / 3 < found[way] < 3 * apart for way, apart in APART.items()), found


def test_the_core_knows_neither_this_app_nor_its_packages() -> None:
    pattern = re.compile(r"llm_finetune|transformers|peft|LoRA", re.IGNORECASE)
    for path in (ROOT / "core").rglob("*.py"):
        assert not pattern.search(path.read_text()), path
