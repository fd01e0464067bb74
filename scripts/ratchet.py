"""Compare the tree with the figures of `ratchet.toml`; with a command, run it and compare its CPU time, too.

python scripts/ratchet.py [COMMAND ...]
"""

import resource
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = Path(__file__).with_suffix(".toml")


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def measured() -> dict[str, float]:
    """What the tree has, by the names of `ratchet.toml`."""
    python = files("instep/*.py", "instep_engine/*.py", "instep_neighbours/*.py")
    inside = {path.relative_to(ROOT / "instep").parts[0] for path in files("instep/*")}
    return {
        "product_lines": sum(len(path.read_text().splitlines()) for path in python),
        "product_entries": len(inside),
        "docs_words": sum(len(path.read_text().split()) for path in files("README.md", "docs/*.md")),
    }


def too_much(found: dict[str, float], most: dict[str, float]) -> list[str]:
    """A line for each figure that is larger than it may be."""
    remedy = f"Make it smaller, or raise it in scripts/{PLACE.name} and say in the change what that buys."
    return [
        f"{name} is {found[name]:,.0f}, at most {most[name]:,}. {remedy}" for name in found if found[name] > most[name]
    ]


def main(command: list[str]) -> int:
    found, code = measured(), 0
    if command:
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT).returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["test_cpu_minutes"] = (used.ru_utime + used.ru_stime) / 60
        print(f"ratchet: {(time.monotonic() - began) / 60:.1f} minutes")
    most = tomllib.loads(PLACE.read_text())["most"]
    for name, value in found.items():
        print(f"ratchet: {name:16} {value:10,.0f} of {most[name]:8,}")
    failures = too_much(found, most)
    for failure in failures:
        print(failure, file=sys.stderr)
    return code or (1 if failures else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
