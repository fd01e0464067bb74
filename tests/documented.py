"""The names of docs/metrics.md."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
DOCUMENTED = set(re.findall(r"^\| `([^`]+)`", TEXT, re.MULTILINE))


def undocumented(names: set[str]) -> set[str]:
    """Those that the document does not list; `<...>` in it stands for any name."""
    patterns = [re.sub("<[^>]+>", "[^/]+", re.escape(name)) for name in DOCUMENTED]
    known = re.compile("|".join([*patterns, "step", "time"]))
    return {name for name in names if not known.fullmatch(name)}
