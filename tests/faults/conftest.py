from pathlib import Path

import pytest

from tests import forks
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments, run
from tests.faults.harness import Place


def prepare(root: Path) -> tuple[Path, Path]:
    """`tiny/` (model and data) and `saved/`, the checkpoints of a run of two rollouts on them."""
    make_checkpoint(root / "tiny" / "hf", head_dim=32)  # which vLLM has on a CPU
    make_prompts(root / "tiny" / "train.jsonl", 64)
    done = run(grpo_arguments(root / "tiny", root / "run", "--save", str(root / "saved"), "--save-interval", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "tiny", root / "saved"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> tuple[Path, Path]:
    with forks.using(forks.SERVER):  # a server that has imported SGLang patches torch: other logprobs
        return prepare(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def place(prepared, tmp_path) -> Place:
    return Place(*prepared, tmp_path)
