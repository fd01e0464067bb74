"""The names of docs/metrics.md and docs/files.md."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
DOCUMENTED = set(re.findall(r"^\| `([^`]+)`", TEXT, re.MULTILINE))


def undocumented(names: set[str]) -> set[str]:
    """Those that the document does not list; `<...>` in it stands for any name."""
    patterns = [re.sub("<[^>]+>", "[^/]+", re.escape(name)) for name in DOCUMENTED]
    known = re.compile("|".join([*patterns, "step", "time"]))
    return {name for name in names if not known.fullmatch(name)}


def unlisted(files: set[str], flag: str) -> set[str]:
    """The files of a folder that the section of `flag` in docs/files.md does not list; `<...>` is part of a name."""
    page = (Path(__file__).parents[1] / "docs/files.md").read_text()
    section = page.split(f"## `{flag}`\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    patterns = [re.sub("<[^>]+>", "[^/]*", re.escape(name)) for cell in cells for name in re.findall("`([^`]+)`", cell)]
    known = re.compile("|".join(pattern + ".*" * pattern.endswith("/") for pattern in patterns))
    return {name for name in files if not known.fullmatch(name)}
