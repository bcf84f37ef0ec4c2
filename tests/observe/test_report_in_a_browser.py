"""Test the report in a real browser: no console message, no request, and working buttons and keys."""

from __future__ import annotations

from pathlib import Path

import browser
import pytest
import rundirs
from samestep_observe import report

WIDTHS = {"a phone": 360, "a desktop": 1280}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of three runs; the name of one run would run JavaScript if it were not escaped."""
    folder = tmp_path_factory.mktemp("page")
    made = rundirs.make(folder)
    named = made["stopped"].rename(folder / "<img src=x onerror=alert(1)>")
    output = folder / "report.html"
    assert report.main([*map(str, (made["whole"], made["killed"], named)), "-o", str(output)]) == 0
    return output


def test_a_browser_shows_it_without_an_error_and_fetches_nothing(page: Path, tmp_path: Path) -> None:
    with browser.tab(tmp_path / "profile") as tab:
        tab.open(page)
        assert tab.evaluate("document.querySelectorAll('figure').length") == 5
        for name, width in WIDTHS.items():
            for dark in (False, True):
                tab.resize(width, 900, dark)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, name
        back = "getComputedStyle(document.body).backgroundColor"
        assert tab.evaluate(back) == "rgb(21, 23, 26)"
        tab.resize(1280, 900)
        assert tab.evaluate(back) == "rgb(255, 255, 255)"
        # A button hides its run's curves, in all plots, and shows them again.
        hidden = "document.querySelectorAll('g[data-run=\"1\"][hidden]').length"
        assert tab.evaluate(f"document.querySelector('button[data-run=\"1\"]').click(); {hidden}") >= 4
        assert tab.evaluate(f"document.querySelector('button[data-run=\"1\"]').click(); {hidden}") == 0
        # Keys and the pointer show the values at a step.
        key = "plot.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
        plot = "const plot = document.querySelector('.plot'); plot.focus();"
        expression = "document.querySelector('output').textContent"
        assert tab.evaluate(f"(() => {{ {plot} {key % 'End'}; return {expression} }})()").startswith(
            "step 12: whole loss "
        )
        assert tab.evaluate(f"(() => {{ {plot} {key % 'ArrowLeft'}; return {expression} }})()").startswith("step 11: ")
        assert tab.evaluate(f"(() => {{ {plot} {key % 'Escape'}; return {expression} }})()") == ""
        at = "(() => { const box = document.querySelector('.plot').getBoundingClientRect();"
        x, y = tab.evaluate(f"{at} return [box.left + box.width / 2, box.top + 20] }})()")
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert tab.evaluate(expression).startswith("step 6: whole loss ")
        assert tab.errors == []
        assert tab.requests == [page.resolve().as_uri()]
