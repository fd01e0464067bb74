from pathlib import Path

import pytest

from tests.assets import make_checkpoint, make_conversations, make_prompts


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with `hf/`, `train.jsonl`, `eval.jsonl` and `sft.jsonl`."""
    root = tmp_path_factory.mktemp("tiny")
    make_checkpoint(root / "hf")
    make_prompts(root / "train.jsonl", 64)
    make_prompts(root / "eval.jsonl", 16, seed=1)
    make_conversations(root / "sft.jsonl", 64)
    return root
