"""The guide of Atropos' example trainer, typed into bash: the wheel's API and a `BaseEnv` train with instep on the CPU.

What the guide greps for in the logs is there. tests/gpu/test_atropos_guide.py does the same on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.neighbours.atropos_guide import ATROPOS, Guide, make_model

pytestmark = pytest.mark.skipif(not ATROPOS.is_dir(), reason="make test-neighbours makes .venv-atropos")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("atropos"))


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only", "none"])
def test_the_guide_trains(mode: str, made: Path, tmp_path: Path) -> None:
    """What the guide says appears; the scores rise; what is left loads, and has moved."""
    steps = 18 if mode == "none" else 12  # the last ones after the second restart: with fewer the scores hardly rise
    guide = Guide(mode, tmp_path, made, steps=steps)
    try:
        guide.start_server(240)
        guide.start_environment()
        guide.start_trainer()
        guide.wait_for_end(900)
    finally:
        guide.end()
    guide.check()
    guide.check_scores()
