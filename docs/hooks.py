"""Add the pages to the site that are not in docs/. mkdocs.yml names this file.

The pages are written to be read in the repository, where a link leads to any file of it. On the site:

- A link to a page of docs/, a README.md or one of the few other pages of the repository leads to that page.
- A link to anything else that git knows leads to source/<its path>, which shows the file or lists the folder.

No link therefore needs an address of the repository. The README of the repository is the first page. Each module of
core/ that an app imports has a page of its docstrings. A notebook becomes a page.
"""

from __future__ import annotations

import json
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
CODE_OR_TARGET = re.compile(
    r"(?P<code>^```.*?^```|``.+?``|`[^`\n]+`)|(?<=\]\()(?P<target>[^)\s]+)(?=[)\s])", re.M | re.S
)
PROGRAM = r"apps/.*\.py|docs/own_loop\w*\.py"  # a user's own program may be a copy of one
KIT_MODULE = re.compile(r'^    "\w+": "(\w+)",$', re.M)  # of the names that samestep.torch exports
# Launchers of apps call these, or an app names them in a type. A program of a user needs none of them.
INTERNAL = {"samestep.monitor", "samestep.root", "samestep.rundir", "samestep.step_sync", "samestep.untrusted"}
KIT = "samestep.torch"
UNLISTED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings GitHub's anchors, and the sections Apps and API their pages."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    apps = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("apps/*/README.md"))
    coming_from = sorted(path for path in ROOT.glob("docs/coming_from/*.md") if not path.name.endswith(".zh.md"))
    sections: dict[str, list[Any]] = {
        "Apps": [{app.split("/")[1]: app} for app in apps],
        "API": ["api/index.md", *({name: api_page(name)} for name in modules())],
        "Coming from": [str(path.relative_to(ROOT / "docs")) for path in coming_from],
    }
    fill(config.nav or [], sections)
    return config


def fill(nav: list[Any], sections: dict[str, list[Any]]) -> None:
    """Fill the empty sections of a nav by title. Remove those that stay empty."""
    for section in [each for each in nav if isinstance(each, dict)]:
        for title, pages in section.items():
            if pages == []:
                section[title] = sections[title]
            if isinstance(pages, list):
                fill(pages, sections)
    nav[:] = [each for each in nav if not isinstance(each, dict) or [] not in each.values()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the targets of all links."""
    files.append(File.generated(config, "api/index.md", content="# The package samestep\n\n::: samestep\n"))
    for name in modules():
        files.append(File.generated(config, api_page(name), content=api_content(name)))
    seen: set[str] = set()
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    waiting += [path for path in sorted(known()) if re.fullmatch(r"apps/\w+/README\.md|docs/\w+\.ipynb", path)]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/") or not is_page(path) or path.endswith(".ipynb"):
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
    return re.sub(r"\.ipynb$", "_notebook.md", path.removeprefix("docs/"))


def is_page(path: str) -> bool:
    """Return whether the site shows the file as it is: a text with links, a notebook or an image."""
    return path.endswith((".md", ".ipynb", *IMAGES))


def add(files: Files, config: MkDocsConfig, path: str) -> None:
    """Add a file or folder of the repository: as a page, an image, or a page that shows it."""
    source = ROOT / path
    if path.endswith(IMAGES):
        files.append(File.generated(config, place(path), abs_src_path=str(source)))
        return
    if path.endswith(".ipynb"):
        content = notebook_page(source)
    elif is_page(path):
        content = source.read_text()
    elif source.is_dir():
        names = sorted(name.removeprefix(f"{path}/") for name in known() if name.startswith(f"{path}/"))
        shown = [name for name in names if path.startswith("docs/") and name.endswith(".md")]
        links = {name: f"[`{name}`]({posixpath.relpath(place(f'{path}/{name}'), f'source/{path}')})" for name in shown}
        content = "\n".join([f"{UNLISTED}# {path}/\n", *(f"- {links.get(name, f'`{name}`')}" for name in names)])
    else:
        language = LANGUAGES.get(source.suffix, "text")
        content = f"{UNLISTED}# {path}\n\n``````{language}\n{source.read_text()}\n``````\n"
    made = File.generated(config, place(path), content=content)
    made.inclusion = InclusionLevel.NOT_IN_NAV if place(path) not in in_nav(config.nav) else made.inclusion
    files.append(made)


def notebook_page(source: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and the text and pictures that the code prints."""
    cells = json.loads(source.read_text())["cells"]
    parts = [f"[Download this notebook]({source.name})"]
    for cell in cells:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            printed = "".join(output.get("text", data.get("text/plain", [])))
            if "image/png" in data:
                parts.append(f"![Output of the cell](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif printed:
                parts.append(f"```text\n{printed}\n```")
    first = next((index for index, part in enumerate(parts) if part.startswith("# ")), 0)  # the title comes first
    return "\n\n".join([parts[first], *parts[:first], *parts[first + 1 :]]) + "\n"


def in_nav(nav: Any) -> set[str]:
    """Return the pages of a nav."""
    if isinstance(nav, str):
        return {nav}
    items = nav.values() if isinstance(nav, dict) else nav or []
    return {page for item in items for page in in_nav(item)}


def modules() -> list[str]:
    """Return the names of the public modules: those that programs of apps/ and docs/ import.

    The parts of the kit are imported from one package, and have its page.
    """
    text = "\n".join((ROOT / name).read_text() for name in sorted(known()) if re.fullmatch(PROGRAM, name))
    imported = {f"samestep.{name}" for name in re.findall(r"^ *from samestep\.([\w.]+) import", text, re.M)}
    for package, names in re.findall(r"^ *from (samestep[\w.]*) import ([\w, ]+)", text, re.M):
        imported |= {f"{package}.{name.split()[0]}" for name in names.split(",")}
    imported -= {*kit_modules(), *INTERNAL}
    found = [name for name in imported if (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()]
    return sorted([KIT, *found], key=lambda name: (name.count("."), name))


def kit_modules() -> list[str]:
    """Return the names of the modules that define the kit's parts."""
    text = (PACKAGE / "torch" / "__init__.py").read_text()
    return sorted({f"{KIT}.{name}" for name in KIT_MODULE.findall(text)})


def api_content(name: str) -> str:
    """Return the Markdown of a module's page. The page of the kit has all modules of its parts."""
    shown = [name, *kit_modules()] if name == KIT else [name]
    directives = "".join(f"::: {module}\n\n" for module in shown)
    return f"# {name}\n\n{directives}"


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
