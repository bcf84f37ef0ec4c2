"""Add to the site what is not in docs/. mkdocs.yml names this file.

The pages are written to be read in the repository, where a link leads to any file of it. On the site a link leads to

- the page, for one of docs/, for a README.md and the few other pages of the repository;
- a page that shows the file, or lists the folder, for everything else that git knows: source/<its path>;

so that no link needs an address of the repository. The README of the repository is the first page. Each public module
of core/ has a page of its docstrings.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "core" / "samestep"
IMAGES = (".png", ".svg")
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".ini": "ini", ".json": "json"}
# Code, which is left as it is, or the target of a link.
CODE_OR_TARGET = re.compile(r"(?P<code>^```.*?^```|``.+?``|`[^`\n]+`)|(?<=\]\()(?P<target>[^)\s]+)(?=\))", re.M | re.S)
UNLISTED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings GitHub's anchors, and the sections Apps and API their pages."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    apps = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("apps/*/README.md"))
    sections: dict[str, list[Any]] = {
        "Apps": [{app.split("/")[1]: app} for app in apps],
        "API": ["api/index.md", *({name: api_page(name)} for name in modules())],
    }
    for section in config.nav or []:
        for title in section.keys() & sections.keys():
            section[title] = sections[title]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the targets of all links."""
    files.append(File.generated(config, "api/index.md", content="# The package samestep\n\n::: samestep\n"))
    for name in modules():
        files.append(File.generated(config, api_page(name), content=f"# {name}\n\n::: {name}\n"))
    seen: set[str] = set()
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    waiting += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("apps/*/README.md"))
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/") or not is_page(path):
            add(files, config, path)
        if path.endswith(".md") and (ROOT / path).exists():
            waiting += [found for target in targets((ROOT / path).read_text()) if (found := resolved(path, target))]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the targets of links that leave docs/ by their places on the site."""
    origin = "README.md" if page.file.src_uri == "index.md" else page.file.src_uri
    origin = origin if (ROOT / origin).exists() else f"docs/{origin}"
    if not (ROOT / origin).exists():  # made here
        return markdown

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        found = resolved(origin, target) if target else None
        if not found:
            return match[0]
        here = posixpath.dirname(page.file.src_uri)
        _, mark, anchor = target.partition("#")
        return posixpath.relpath(place(found), here or ".") + mark + anchor

    return CODE_OR_TARGET.sub(replace, markdown)


def targets(markdown: str) -> Iterator[str]:
    """Return the targets of a page's links."""
    return (match["target"] for match in CODE_OR_TARGET.finditer(markdown) if match["target"])


def resolved(origin: str, target: str) -> str | None:
    """Return the path, relative to the root, of a relative link in the file ``origin``.

    Of a folder with a README.md it is that file. Return None for a target that is not in the repository.
    """
    path = target.partition("#")[0]
    if not path or re.match("[a-z]+:", path):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    readme = posixpath.normpath(posixpath.join(path, "README.md"))
    return readme if readme in known() else path if path in known() or path in folders() else None


def place(path: str) -> str:
    """Return the place on the site of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if not is_page(path):
        return f"source/{path}/index.md" if path in folders() else f"source/{path}.md"
    return path.removeprefix("docs/")


def is_page(path: str) -> bool:
    """Return whether the site shows the file as it is: a text with links, or an image."""
    return path.endswith((".md", *IMAGES))


def add(files: Files, config: MkDocsConfig, path: str) -> None:
    """Add a file or folder of the repository: as a page, an image, or a page that shows it."""
    source = ROOT / path
    if path.endswith(IMAGES):
        files.append(File.generated(config, place(path), abs_src_path=str(source)))
        return
    if is_page(path):
        content = source.read_text()
    elif source.is_dir():
        names = sorted(name.removeprefix(f"{path}/") for name in known() if name.startswith(f"{path}/"))
        content = "\n".join([f"{UNLISTED}# {path}/\n", *(f"- `{name}`" for name in names)])
    else:
        language = LANGUAGES.get(source.suffix, "text")
        content = f"{UNLISTED}# {path}\n\n``````{language}\n{source.read_text()}\n``````\n"
    made = File.generated(config, place(path), content=content)
    made.inclusion = InclusionLevel.NOT_IN_NAV if place(path) not in in_nav(config.nav) else made.inclusion
    files.append(made)


def in_nav(nav: Any) -> set[str]:
    """Return the pages of a nav."""
    if isinstance(nav, str):
        return {nav}
    items = nav.values() if isinstance(nav, dict) else nav or []
    return {page for item in items for page in in_nav(item)}


def modules() -> list[str]:
    """Return the names of the public modules: those of the core first, then those of each package in it."""
    paths = [path for pattern in ("*.py", "*/*.py") for path in sorted(PACKAGE.glob(pattern))]
    public = [path for path in paths if not path.stem.startswith("_") and "import runpy" not in path.read_text()]
    return [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in public]


def api_page(name: str) -> str:
    """Return the page of a module, such as api/data/datasets.md."""
    return f"api/{name.removeprefix('samestep.').replace('.', '/')}.md"


@lru_cache
def known() -> frozenset[str]:
    """Return the files that git lists."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(listed.stdout.splitlines())


@lru_cache
def folders() -> frozenset[str]:
    return frozenset(str(folder) for name in known() for folder in Path(name).parents)
