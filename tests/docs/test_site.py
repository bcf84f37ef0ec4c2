"""Test that Zensical and MkDocs build the same complete site without warnings. Pages load nothing from the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILDERS = ("zensical", "mkdocs")
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "audio": "src",
    "video": "src",
    "embed": "src",
}
LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


class Loads(HTMLParser):
    """Find the addresses that a browser loads when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED:
            self.found.append(values.get(LOADED[tag]) or "")
        if tag == "link" and LOADED_LINKS & set((values.get("rel") or "").split()):
            self.found.append(values.get("href") or "")
        self.found += re.findall(r"url\(([^)]*)\)", values.get("style") or "")


def run(*command: str) -> str:
    # Material and mkdocs-redirects print warnings that advertise forks of MkDocs.
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    command = (sys.executable, *command)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the site with each builder, and return the folders of HTML by builder. A warning is an error."""
    found = {}
    for builder in BUILDERS:
        folder = tmp_path_factory.mktemp(builder)
        run("docs/stage.py", str(folder))
        printed = run("-m", builder, "build", "--strict", "--config-file", str(folder / "mkdocs.yml"))
        assert "WARNING" not in printed, printed
        found[builder] = folder / "html"
    return found


@pytest.fixture(params=BUILDERS)
def site(request: pytest.FixtureRequest, sites: dict[str, Path]) -> Path:
    return sites[request.param]


def anchors(site: Path) -> dict[str, list[str]]:
    """Return the anchors of each page's headings by the page's path."""
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    return {name: re.findall(r'<h[1-6][^>]* id="?([^" >]+)', text) for name, text in pages.items()}


def test_both_builders_make_the_same_pages_and_anchors(sites: dict[str, Path]) -> None:
    zensical, mkdocs = (anchors(sites[builder]) for builder in BUILDERS)
    assert zensical.keys() == mkdocs.keys()
    assert len(mkdocs) > 200
    different = [page for page, found in mkdocs.items() if zensical[page] != found]
    assert not different
    assert sum(map(len, mkdocs.values())) > 1000


def moved(site: Path) -> list[Path]:
    """Return the pages that redirect to another page."""
    return [page for page in site.glob("*/index.html") if "<title>Redirecting" in page.read_text()]


def test_a_page_that_moved_leads_to_its_new_place(site: Path) -> None:
    assert {page.parent.name for page in moved(site)} == {"house", "proofs"}
    assert 'url=../architecture/"' in (site / "house" / "index.html").read_text()


def test_no_page_scrolls_sideways_on_a_phone_or_a_desktop(sites: dict[str, Path], tmp_path: Path) -> None:
    """Wide tables and long code must have their own scroll bars."""
    site = sites["zensical"]
    alike = {*site.glob("source/**/*.html"), *site.glob("api/**/*.html")} - {site / "api" / "run" / "index.html"}
    pages = sorted({*site.rglob("*.html")} - {*moved(site), site / "404.html"} - alike)
    few = [site / "index.html", site / "speed" / "index.html", site / "options" / "index.html"]
    too_wide = []
    with browser.tab(tmp_path / "profile") as tab:
        for width, shown in ((400, pages), (1400, few)):
            tab.resize(width, 900)
            for page in shown:
                tab.open(page)
                found = tab.evaluate("document.documentElement.scrollWidth")
                if found > width:
                    too_wide.append(f"{page.relative_to(site)}: {found} of {width} px")
    assert not too_wide


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    pages = {*site.rglob("*.html")}
    assert len(pages) > 40
    for page in pages - {*moved(site)}:
        loads = Loads()
        loads.feed(page.read_text())
        assert loads.found, page
        assert not [address for address in loads.found if re.match(r"\s*['\"]?(https?:)?//", address)], page
        # With these elements, Material's script would load a library for diagrams, and counts of stars from GitHub.
        assert not re.search(r'class="mermaid"|data-md-component="source"', page.read_text()), page
    styles = list(site.rglob("*.css"))
    assert styles
    for style in styles:
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]*", style.read_text()), style


def test_every_page_of_docs_every_readme_and_each_public_module_is_there(site: Path) -> None:
    for page in ROOT.glob("docs/*.md"):
        assert (site / page.stem / "index.html").exists(), page
    for readme in [*ROOT.glob("apps/*/README.md"), *ROOT.glob("deploy/*/README.md")]:
        assert (site / readme.relative_to(ROOT).parent / "index.html").exists(), readme
    listed = (site / "apps" / "mnist_ddp" / "index.html").read_text().partition("<article")[0]
    for app in ROOT.glob("apps/*/README.md"):  # Material can show the first README of a section as the section's title
        assert re.search(rf">\s*{app.parent.name}\s*<", listed), app
    shown = {str(page.parent.relative_to(site / "api")) for page in site.glob("api/**/index.html")} - {"."}
    assert {"checkpoint", "env", "options", "run", "sharding", "data/datasets", "torch/reduction"} <= shown
    assert not {each for each in shown if each.startswith(("launch", "observe"))}  # programs do not import these
    assert len(shown) < 27
    sharding = (site / "api" / "sharding" / "index.html").read_text()
    assert "steps_per_epoch" in sharding
    assert "pseudo-random permutation" in sharding


def test_a_link_out_of_docs_leads_to_a_page_that_shows_the_file(site: Path) -> None:
    page = (site / "concepts" / "index.html").read_text()
    assert 'href="../source/tests/core/test_sharding.py/"' in page
    assert "test_golden_orders" in (site / "source" / "tests" / "core" / "test_sharding.py" / "index.html").read_text()
    assert 'href="../apps/mnist_ddp/"' in (site / "which_app" / "index.html").read_text()


def test_what_the_repository_shows_as_a_list_or_a_table_is_one_here(site: Path) -> None:
    """Python-Markdown requires a blank line before a list or a table. GitHub does not."""
    for page in site.rglob("*.html"):
        if "source" in page.relative_to(site).parts or "api" in page.relative_to(site).parts:
            continue
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.DOTALL):
            assert not re.search(r"^(- |\d+\. |\|)", paragraph, re.MULTILINE), f"{page}: {paragraph[:200]}"
