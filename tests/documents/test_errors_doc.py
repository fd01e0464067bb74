"""docs/errors.md is made from the errors."""

from __future__ import annotations

from pathlib import Path

from scripts.docs.errors import markdown


def test_docs_are_made_from_the_errors() -> None:
    path = Path(__file__).parents[2] / "docs/errors.md"
    assert path.read_text() == markdown(), "python scripts/docs/errors.py > docs/errors.md"
