"""vLLM's kernels for GPTQ and AWQ on a GPU give the log-probs of the trainer, which reads such a base dequantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.assets import make_checkpoint, make_prompts
from tests.e2e.test_quantized import CASES, train_on
from tests.quantized import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("method", "more"), CASES)
def test_each_sync_is_within_rounding(tmp_path: Path, method: str, more: str) -> None:
    # Marlin takes no smaller layers; vLLM 0.26 warms up an adapter of a tied embedding with as many rows as columns.
    model = make_checkpoint(tmp_path / "hf", hidden_size=256, head_dim=64, vocab_size=1024)
    quantize(model, method)
    make_prompts(tmp_path / "train.jsonl", 8)
    train_on(model, tmp_path, tmp_path, "MarlinLinearKernel", more, "--vllm-enforce-eager")
