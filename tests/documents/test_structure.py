"""The walls between the packages, and imports without circles: lazy ones and those for types count as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("instep", "instep_engine", "instep_neighbours")


def modules() -> dict[str, Path]:
    out = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


# `instep` itself is the face of the Python interface: whoever asks it for the version asks for no more.
IMPORTS = {name: {t for t in imported(path) if t in MODULES} - {name, "instep"} for name, path in MODULES.items()}


def test_imports_have_no_circle() -> None:
    try:
        order = list(TopologicalSorter(IMPORTS).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert len(order) == len(MODULES) > 300


@pytest.mark.parametrize(
    ("package", "may"),
    [("instep", "instep_engine"), ("instep_engine", ""), ("instep_neighbours", "instep instep_engine")],
)
def test_a_package_imports_only_those_below_it(package: str, may: str) -> None:
    """The core finds its neighbours by their entry points."""
    allowed = {package, *may.split()}
    inside = [name for name in MODULES if name.partition(".")[0] == package]
    wrong = [(name, t) for name in inside for t in IMPORTS[name] if t.partition(".")[0] not in allowed]
    assert inside and not wrong
