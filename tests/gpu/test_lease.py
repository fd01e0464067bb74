"""A vLLM ends whose GPU memory a killed trainer has half written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.assets import make_checkpoint
from tests.e2e.test_lease import ATTACH, LEASE, Controller, paused, within
from tests.gpu.test_single_copy import arguments, engine_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_weights_that_a_killed_trainer_has_half_written_end_with_their_engine(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", head_dim=32)
    args = arguments(checkpoint, tmp_path, "bf16", "--vllm-enforce-eager")
    with engine_of(args, checkpoint, tmp_path) as (engine, folder):
        writer = Controller(engine, folder=str(folder))
        assert writer.do(ATTACH) == "done"
        assert writer.do("[view.mul_(2) for view in views]; torch.cuda.synchronize()") == "done"
        assert not within(LEASE + 1.0, lambda: not paused(engine))  # it is renewed
        writer.end()
        assert within(120.0, lambda: engine.process is not None and not engine.process.alive())
        assert "its weights may be of two" in (tmp_path / "logs" / "engine-0.log").read_text()
