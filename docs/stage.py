"""Write the pages of the documentation site to one folder, from which Zensical and MkDocs build the site.

    python3 docs/stage.py             # writes site/pages and site/mkdocs.yml
    python3 docs/stage.py FOLDER      # writes pages and mkdocs.yml to FOLDER

The repository's pages link to other pages, files and folders of the repository. The site changes these links:

- A link to a page (a .md file, notebook or image) leads to that page.
- A link to any other file or folder in git leads to source/<its path>, which shows the file or lists the folder.

The repository's README.md becomes the first page. Each module that `modules` returns gets a page of its
docstrings. The configuration is the repository's mkdocs.yml, with its empty sections filled in. The program uses only
the standard library.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "core" / "samestep"
IMAGES = (".png", ".svg")
PROGRAMS = (".py", ".sh")  # suffixes of files in docs/ that the site shows below source/
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".ini": "ini", ".json": "json"}
# This pattern matches code, which stays unchanged, or the target of a link.
CODE_OR_TARGET = re.compile(
    r"(?P<code>^```.*?^```|``.+?``|`[^`\n]+`)|(?<=\]\()(?P<target>[^)\s]+)(?=[)\s])", re.M | re.S
)
PROGRAM = r"apps/.*\.py|docs/own_loop\w*\.py"  # programs whose imports define the public API
KIT_MODULE = re.compile(r'^    "\w+": "(\w+)",$', re.M)  # a module in the table of names that samestep.torch exports
# Modules that apps import only in launchers or for type annotations. Users' programs do not import these modules.
INTERNAL = {
    "samestep.job_info",
    "samestep.monitor",
    "samestep.root",
    "samestep.rundir",
    "samestep.step_sync",
    "samestep.untrusted",
}
KIT = "samestep.torch"
UNLISTED = "---\nsearch:\n  exclude: true\n---\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="write the pages of the site to one folder")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site", help="default: site")
    folder = parser.parse_args().folder
    pages = staged()
    write(folder / "pages", pages)
    (folder / "mkdocs.yml").write_text(configuration(pages))
    print(f"{len(pages)} files in {folder / 'pages'}")


def write(folder: Path, pages: dict[str, bytes]) -> None:
    """Write changed files to ``folder``, so that a server rebuilds only their pages, and delete obsolete files."""
    for name, content in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in pages:
            path.unlink()


# --- pages -----------------------------------------------------------------------------------------------------------


def staged() -> dict[str, bytes]:
    """Return the content of each file of the site, by the file's path on the site."""
    pages = {"api/index.md": b"# The package samestep\n\n::: samestep\n"}
    pages |= {api_page(name): api_content(name).encode() for name in modules()}
    for path in reached():
        pages[place(path)] = content(path)
    for path in known():
        if path.startswith("docs/") and not path.endswith((".md", *PROGRAMS)):
            pages[path.removeprefix("docs/")] = (ROOT / path).read_bytes()
    return pages


def reached() -> set[str]:
    """Return the paths of all pages and link targets, relative to the repository's root."""
    is_first = re.compile(r"README\.md|docs/.*\.md|apps/\w+/README\.md|docs/\w+\.ipynb")
    waiting = [path for path in known() if is_first.fullmatch(path)]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.endswith(".md") and path in known():
            found = [resolved(path, target) for target in targets((ROOT / path).read_text())]
            waiting += [each for each in found if each]
    return seen


def content(path: str) -> bytes:
    """Return the site's content for a path. If a file or folder is not a page, the content is a page that shows it."""
    source = ROOT / path
    if path.endswith(IMAGES):
        return source.read_bytes()
    if path.endswith(".ipynb"):
        return notebook_page(source).encode()
    if is_page(path):
        return with_places(source.read_text(), path).encode()
    if source.is_dir():
        return folder_page(path).encode()
    language = LANGUAGES.get(source.suffix, "text")
    return f"{UNLISTED}# {path}\n\n``````{language}\n{source.read_text()}\n``````\n".encode()


def folder_page(path: str) -> str:
    """Return a page that lists the files of a folder. Markdown pages of docs/ are links."""
    names = sorted(name.removeprefix(f"{path}/") for name in known() if name.startswith(f"{path}/"))
    shown = [name for name in names if path.startswith("docs/") and name.endswith(".md")]
    links = {name: f"[`{name}`]({posixpath.relpath(place(f'{path}/{name}'), f'source/{path}')})" for name in shown}
    lines = [f"- {links.get(name, f'`{name}`')}" for name in names]
    return "\n".join([f"{UNLISTED}# {path}/\n", *lines]) + "\n"


def notebook_page(source: Path) -> str:
    """Return a notebook as Markdown, with the notebook's texts, code, and outputs (text and PNG)."""
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
    first = next((index for index, part in enumerate(parts) if part.startswith("# ")), 0)  # move the title to the top
    return "\n\n".join([parts[first], *parts[:first], *parts[first + 1 :]]) + "\n"


# --- links -----------------------------------------------------------------------------------------------------------


def with_places(markdown: str, origin: str) -> str:
    """Return the text of the page ``origin``, in which links to the repository's files become links on the site."""
    here = posixpath.dirname(place(origin))

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        found = resolved(origin, target) if target else None
        if not found:
            return match[0]
        _, mark, anchor = target.partition("#")
        return posixpath.relpath(place(found), here or ".") + mark + anchor

    return CODE_OR_TARGET.sub(replace, markdown)


def targets(markdown: str) -> Iterator[str]:
    """Return the targets of a page's links."""
    return (match["target"] for match in CODE_OR_TARGET.finditer(markdown) if match["target"])


def resolved(origin: str, target: str) -> str | None:
    """Return the path of the target of a link in the file ``origin``, relative to the repository's root.

    Return the path of the folder's README.md if the target is a folder with a README.md. Return None if the target is a
    URL, or if the repository has no such file or folder.
    """
    path = target.partition("#")[0]
    if not path or re.match("[a-z]+:", path):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    readme = posixpath.normpath(posixpath.join(path, "README.md"))
    if readme in known():
        return readme
    if path in known() or path in folders():
        return path
    return None


def place(path: str) -> str:
    """Return the path on the site of the page for a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if not is_page(path):
        return f"source/{path}/index.md" if path in folders() else f"source/{path}.md"
    return re.sub(r"\.ipynb$", "_notebook.md", path.removeprefix("docs/"))


def is_page(path: str) -> bool:
    """Return whether the file is a page of the site: Markdown, a notebook or an image."""
    return path.endswith((".md", ".ipynb", *IMAGES))


@lru_cache
def known() -> frozenset[str]:
    """Return the existing files that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


@lru_cache
def folders() -> frozenset[str]:
    found: set[str] = set()
    for name in known():
        found.update(map(str, Path(name).parents))
    return frozenset(found)


# --- pages of docstrings ---------------------------------------------------------------------------------------------


def modules() -> list[str]:
    """Return the names of core's modules that programs matching PROGRAM import, except those in INTERNAL.

    The list has `samestep.torch` for all modules of the kit, because one page documents them.
    """
    text = "\n".join((ROOT / name).read_text() for name in sorted(known()) if re.fullmatch(PROGRAM, name))
    imported = {f"samestep.{name}" for name in re.findall(r"^ *from samestep\.([\w.]+) import", text, re.M)}
    for package, names in re.findall(r"^ *from (samestep[\w.]*) import ([\w, ]+)", text, re.M):
        imported |= {f"{package}.{name.split()[0]}" for name in names.split(",")}
    imported -= {*kit_modules(), *INTERNAL}
    found = [name for name in imported if (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()]
    return sorted([KIT, *found], key=lambda name: (name.count("."), name))


def kit_modules() -> list[str]:
    """Return the names of the modules that define the public objects of samestep.torch."""
    text = (PACKAGE / "torch" / "__init__.py").read_text()
    return sorted({f"{KIT}.{name}" for name in KIT_MODULE.findall(text)})


def api_content(name: str) -> str:
    """Return the Markdown of a module's page. The page of samestep.torch includes the kit's modules."""
    shown = [name, *kit_modules()] if name == KIT else [name]
    directives = "".join(f"::: {module}\n\n" for module in shown)
    return f"# {name}\n\n{directives}"


def api_page(name: str) -> str:
    """Return the path on the site for a module's page, such as api/data/datasets.md."""
    return f"api/{name.removeprefix('samestep.').replace('.', '/')}.md"


# --- the configuration -----------------------------------------------------------------------------------------------


def configuration(pages: Iterable[str]) -> str:
    """Return the text of mkdocs.yml with its empty sections filled in.

    Only pages of docs/ must be in the nav. The function adds all other pages outside the nav to ``not_in_nav``.

    Args:
        pages: paths of all files of the site.
    """
    text = (ROOT / "mkdocs.yml").read_text()
    for title, section in sections().items():
        listed = f"- {title}: {json.dumps(section)}"
        text, count = re.subn(rf"- {title}: \[\]", listed if section else "", text)
        if count != 1:
            raise SystemExit(f"error: mkdocs.yml has {count} empty sections {title}: it must have one")
    in_nav = {*re.findall(r"[\w./-]+\.md", text.partition("\nnav:\n")[2])}
    by_links = [name for name in pages if name.endswith(".md") and not (ROOT / "docs" / name).exists()]
    lines = [f"  /{name}\n" for name in sorted(by_links) if name not in in_nav]
    text = text.replace("not_in_nav: |\n", "not_in_nav: |\n" + "".join(lines))
    return text.replace("paths: [core]", f"paths: [{json.dumps(str(ROOT / 'core'))}]")


def sections() -> dict[str, list[Any]]:
    """Return the nav entries of the sections that are empty in mkdocs.yml, by title."""
    apps = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("apps/*/README.md"))
    coming_from = sorted(path for path in ROOT.glob("docs/coming_from/*.md") if not path.name.endswith(".zh.md"))
    return {
        "Apps": [{app.split("/")[1]: app} for app in apps],
        "API": ["api/index.md", *({name: api_page(name)} for name in modules())],
        "Coming from": [str(path.relative_to(ROOT / "docs")) for path in coming_from],
    }


if __name__ == "__main__":
    main()
