"""Words that readers of the code stumble over: in its comments, docstrings, errors and helps (CONTRIBUTING.md)."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("instep", "instep_engine", "instep_neighbours")
PLAINER = {
    r"anew": "again, or restart",
    r"told": "reported, known, passed",
    r"somebody|someone|whoever": "who it is: the user, another process",
    r"mends?|mended|mending": "fix, repair",
    r"heeds?|heeded": "follow, read",
    r"(?<!there )(is|are) none(?=[.;:)]|$)": "is not one",
    r"thereof|therein|wherein|thereby": "a sentence of its own",
}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and texts of a file, each with its line."""
    if path.suffix == ".toml":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], token.string


def test_the_code_has_plain_words() -> None:
    files = sorted(
        path for package in PACKAGES for end in ("py", "toml") for path in (ROOT / package).rglob(f"*.{end}")
    )
    found = [
        f"{path.relative_to(ROOT)}:{line}: '{match[0]}': {instead}"
        for path in files
        for line, text in prose(path)
        for word, instead in PLAINER.items()
        for match in re.finditer(rf"\b({word})\b" if word[-1] != ")" else rf"\b{word}", text, re.MULTILINE)
    ]
    assert len(files) > 300 and not found, "\n".join(found)
