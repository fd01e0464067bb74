"""docs/errors.md and docs/api.md are made from the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs import api, errors


@pytest.mark.parametrize("made", [api, errors], ids=["api", "errors"])
def test_a_document_is_up_to_date(made) -> None:
    name = made.__name__.rpartition(".")[2]
    text = (Path(__file__).parents[2] / f"docs/{name}.md").read_text()
    assert text == made.markdown(), f"python scripts/docs/{name}.py > docs/{name}.md"
