"""docs/errors.md and docs/api.md are made from the code, and each page stands in mkdocs.yml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs import api, errors

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("made", [api, errors], ids=["api", "errors"])
def test_a_document_is_up_to_date(made) -> None:
    name = made.__name__.rpartition(".")[2]
    text = (ROOT / f"docs/{name}.md").read_text()
    assert text == made.markdown(), f"python scripts/docs/{name}.py > docs/{name}.md"


def test_each_page_stands_in_the_navigation() -> None:
    """Those of docs/, and those of other folders to which one of them links."""
    paths = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}
    links = [(path, target) for path in paths for target in re.findall(r"\]\(([^):#]+\.md)", path.read_text())]
    paths |= {(path.parent / target).resolve() for path, target in links}
    pages = {str(path.relative_to(ROOT)).removeprefix("docs/") for path in paths} - {"README.md"}
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed)) and pages <= set(listed)
