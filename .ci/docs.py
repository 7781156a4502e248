"""What the documentation site has beside docs/: other pages, the files that pages link to, and the docstrings.

mkdocs calls the functions (mkdocs.yml names this file). The pages in docs/ are written for a reader of the repository:
their links to other files become links to pages here, so that the site needs no other place.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the site by their files outside docs/."""
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
_SQL = {"connect": "connection", "refresh": "connection", "scan": "lazy_frames"}
"""Functions of `ludic` by the module of ludic.root.sql that has them."""
_LANGUAGES = {".py": "python", ".sql": "sql", ".toml": "toml"}


def on_config(config: Any) -> Any:
    """Put the pages of docs/settings/ below settings.md in the navigation."""
    settings = ["settings.md", *(f"settings/{path.name}" for path in sorted((ROOT / "docs/settings").glob("*.md")))]
    for section in config.nav:
        for title, pages in section.items():
            section[title] = [{"Settings": settings} if page == "settings.md" else page for page in pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source in PAGES:
        _add(files, config, PAGES[source], (ROOT / source).read_text())
    _add(files, config, "reference.md", _reference())
    for source in (*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))):
        for link in _LINK.findall((ROOT / source).read_text()):
            target = _target(source, link[1])
            if target is not None and target.startswith("source/") and files.get_file_from_path(target) is None:
                _add(files, config, target, _listing(ROOT / target.removeprefix("source/").removesuffix(".md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links lead to the pages of the site; a link to what it does not have stays as its text."""
    here = page.file.src_uri
    source = next((path for path, uri in PAGES.items() if uri == here), f"docs/{here}")
    if here.startswith("source/"):
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        return link[0] if target is None else f"{link[1]}{os.path.relpath(target, Path(here).parent)}{link[3]}"

    return _LINK.sub(moved, markdown)


def _target(source: str, link: str) -> str | None:
    """Return the page of the site that a link of a file of the repository leads to; None if it is no file of it."""
    path = os.path.normpath(Path(source).parent / link)
    if path.startswith(".."):
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or (f"source/{path}.md" if (ROOT / path).exists() else None)


def _listing(path: Path) -> str:
    """Return a page with a file, a notebook's cells, or the names in a folder."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(f"- `{each.name}`\n" for each in sorted(path.iterdir()) if each.name[0] not in "._")
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        texts = ("".join(cell["source"]) for cell in cells)
        kinds = (cell["cell_type"] for cell in cells)
        # Headings of cells would make a second title.
        shown = (
            f"```python\n{text}\n```" if kind == "code" else re.sub(r"^#", "##", text, flags=re.MULTILINE)
            for kind, text in zip(kinds, texts, strict=True)
        )
        return title + "\n\n".join(shown)
    return f"{title}````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def _reference() -> str:
    """Return the page of all public names: those of ludic, of Run, and of the table of docs/api.md."""
    table = (ROOT / "docs/api.md").read_text().partition("## What your files may import")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(ludic[^`]*)` \| ([^|]*) \|", table, re.MULTILINE)
    stub = (ROOT / "ludic/app/operations/methods.pyi").read_text()
    methods = re.findall(r"^    (\w+) = (\w+)\.(\w+)$", stub, re.MULTILINE)
    parts = ["# Python reference\n\nExamples: [Train from Python](fit.md), [Python API](api.md).\n\n## ludic\n"]
    functions = {name: f"app.operations.fit.{name}" for name in ("grpo", "fit", "sft", "dpo")}
    functions |= {"create": "app.operations.create.create", "open": "app.operations.run.open_run"}
    functions |= {name: f"root.sql.{module}.{name}" for name, module in _SQL.items()}
    parts += [_entry(f"ludic.{path}", f"ludic.{name}") for name, path in functions.items()]
    parts += [_entry("ludic.app.operations.run.Run", "ludic.Run", members=["url", "config"])]
    parts += [_entry(f"ludic.app.operations.{module}.{function}", f"run.{name}") for name, module, function in methods]
    parts += [_entry("ludic.run.config.RunConfig", "ludic.RunConfig"), _entry("ludic.root.root.Root", "ludic.Root")]
    for module, names in rows:
        parts.append(f"## {module}\n")
        parts += [_entry(f"{module}.{name}", name) for name in re.findall(r"`([^`]+)`", names)]
    return "\n".join(parts)


def _entry(path: str, heading: str, **options: Any) -> str:
    """Return what mkdocstrings replaces by the docstring and the members of what is at `path`."""
    return f"::: {path}\n    options: {json.dumps({'heading': heading, 'toc_label': heading, **options})}\n"


def _add(files: Files, config: Any, uri: str, content: str) -> None:
    files.append(File.generated(config, uri, content=content))
