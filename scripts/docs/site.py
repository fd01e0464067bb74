"""What MkDocs adds to docs/: README.md as the first page, and each file of the repository that a page links to."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#:\s]+)(?=[)#])")
titles: dict[str, str] = {}  # of pages, by their place on the site


def on_config(config: Any) -> Any:
    """Read the titles of the navigation."""
    entries = list(config.nav)
    while entries:
        for title, inside in entries.pop().items():
            if isinstance(inside, str):
                titles[inside] = title
            else:
                entries += inside
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, CONTRIBUTING.md, and what they and the documents name outside docs/."""
    paths, seen = ["README.md", "CONTRIBUTING.md", *(f"docs/{file.src_uri}" for file in files)], set()
    while paths:
        if (path := paths.pop()) in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            paths += [name for name in linked(path) if (ROOT / name).is_file()]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between files of the repository those between pages, and name a page by its title where a file was."""
    here = page.file.src_uri
    path = "README.md" if here == "index.md" else f"docs/{here}" if (ROOT / "docs" / here).exists() else here

    if here == "index.md":
        page.meta["hide"] = ["navigation"]

    def moved(match: re.Match[str]) -> str:
        target = place(posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2])))
        name = titles.get(target, match[1]) if match[1].endswith(".md") else match[1]
        return f"[{name}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}"

    return LINK.sub(moved, markdown)


def linked(path: str) -> Iterator[str]:
    """Yield the files that a page of the repository links to, as paths in it."""
    for match in LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))


def place(path: str) -> str:
    """Return where a file of the repository lies on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
