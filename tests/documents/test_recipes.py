"""Every recipe is accepted as its command stands, and says what `instep plan` says."""

import json
import re
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from scripts.docs.recipes import FOLDER, ROOT, head, make_models, planned, readme, recipes, words

GEMMA = FOLDER / "gemma3-270m-numbers.yaml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples/tool_use")
    make_models()
    for file in {found for path in recipes() for found in re.findall(r"runs/\S+\.jsonl", path.read_text())}:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text('{"prompt": "1 + 1", "label": "2"}\n')


@pytest.mark.parametrize("path", recipes(), ids=lambda path: path.stem)
def test_a_recipe_is_accepted_and_planned(path, folder):
    command, given = words(path)
    args = parse([*given, "--device", "cpu" if head(path)["hardware"].startswith("CPU") else "cuda"], command)
    assert args.run_dir.startswith("runs/") and not [note for note in args.notes if "changes nothing" in note]
    assert head(path)["plan"] == planned(path), "python -m scripts.docs.recipes"
    assert head(path)["command"].endswith(f"--config recipes/{path.name}")


def test_the_measured_curve():
    """Of `make real`, whose flags the recipe has."""
    (cpu, _), curve = (
        json.loads((ROOT / "benchmarks/results/real-example.json").read_text())["rows"],
        head(GEMMA)["curve"],
    )
    assert all(f"{value:.3f}" in curve for value in cpu["held_out"].values())
    assert " ".join(f"{value:.2f}" for value in cpu["reward"]) in curve
    assert head(GEMMA)["plan"] == f"{cpu['peak_pss_gb']:.0f} GB of memory"  # planned, and seen
    example = re.search(r'FLAGS = .*"cpu": "[^"]*"', (ROOT / "examples/real/run.py").read_text(), re.DOTALL)[0]
    flags = re.findall(r"--([a-z-]+)(?: (\w[\w-]*))?", example)
    assert len(flags) > 12 and all(f"\n{name}: {value or 'true'}\n" in GEMMA.read_text() for name, value in flags)


def test_the_table_of_recipes():
    assert (FOLDER / "README.md").read_text() == readme(), "python -m scripts.docs.recipes"
