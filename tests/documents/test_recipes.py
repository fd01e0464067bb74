"""Every recipe is accepted as its command stands, and says what `instep plan` says."""

import json
import re
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from scripts.docs.recipes import FOLDER, ROOT, head, make_models, planned, readme, recipes, words
from tests.command_line import CONFIG


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples/tool_use")
    make_models()
    gemma = Path("models/gemma-3-270m")
    gemma.mkdir(parents=True)
    (gemma / "config.json").write_text(json.dumps(CONFIG))
    (gemma / "model.safetensors").write_bytes(b"0")
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


def test_the_table_of_recipes():
    assert (FOLDER / "README.md").read_text() == readme(), "python -m scripts.docs.recipes"
