"""docs/algorithms.md: its recipes are accepted, its tables are the code's, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instep.algorithms.catalog import ALGORITHMS
from instep.arguments.all_flags import own_flags
from instep.arguments.parse import parse
from scripts.docs.algorithms import made
from tests.assets import make_prompts

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/algorithms.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
RECIPES = [line for block in BLOCKS for line in block.splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "hf" / "model.safetensors").write_bytes(b"")
    make_prompts(folder / "train.jsonl", 8)
    line = f"--hf-checkpoint {folder}/hf --prompt-data {folder}/train.jsonl --rollout-batch-size 4 --num-rollout 9 "
    line += "--rm-type math --label-key label "
    line += "--actor-num-gpus-per-node 1 --device cpu --rollout-max-response-len 8 --input-key prompt"
    return line.split()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_accepted_without_a_note(base: list[str], recipe: str) -> None:
    assert parse(base + recipe.split(), "train").notes == []


def test_every_algorithm_has_a_recipe_of_its_own(base: list[str]) -> None:
    assert {parse(base + recipe.split(), "train").advantage_estimator for recipe in RECIPES} == set(ALGORITHMS)


def test_every_algorithm_was_seen_to_learn() -> None:
    assert set(ALGORITHMS) <= set(re.findall(r"^\| (\w+) \|", TEXT.partition("## They learn")[2], re.MULTILINE))


def test_what_is_made_is_that_of_the_catalog_and_the_validator() -> None:
    assert made(TEXT) == TEXT, "python scripts/docs/algorithms.py"


def test_every_flag_exists_and_every_file_and_heading_that_is_named() -> None:
    flags = set(re.findall(r"--[a-z][a-z-]*[a-z]", TEXT))
    assert len(flags) > 50 and flags <= set(own_flags())
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
    anchors = {re.sub(r"-$", "", anchor) for anchor in anchors}
    for target in re.findall(r"\]\((?!https:)([^)]+)\)", TEXT):
        path, _, anchor = target.partition("#")
        assert (ROOT / "docs" / path).exists() if path else anchor in anchors, target
    for path in re.findall(r"`((?:advantages|losses|algorithms)/\w+\.py)`", TEXT):
        assert (ROOT / "instep/algorithms" / path.removeprefix("algorithms/")).exists(), path
    for path in re.findall(r"`((?:unit|oracles|distributed|e2e)/\w+\.py)`", TEXT):
        assert (ROOT / "tests" / path).exists(), path
