"""The embedded engine's gated delta nets, against transformers on the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.engines.embedded.model import Runner, load_model
from tests.families import make_family

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@torch.no_grad()
def test_rows_that_come_and_go_have_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    path = make_family(family, tmp_path, "fp32")
    runner = Runner(load_model(str(path), torch.float32, CPU, 128, False), 8, 128)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    texts = torch.randint(0, 64, (4, 100), generator=torch.Generator().manual_seed(2)).tolist()
    rows = [texts[0][:3], texts[1][:70], texts[1][:70]]  # shorter than the convolution, longer than a chunk; a group
    given = [runner.prefill([rows[0]], [0], 0)[0], *runner.prefill([rows[1]], [0, 0], 1)]

    def compare() -> None:
        for logits, row in zip(given, rows, strict=True):
            want = whole(torch.tensor([row]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits, want, atol=2e-5, rtol=1e-5)

    for step in range(10):
        compare()
        if step == 4:  # the first row leaves, the last one takes its place; another begins
            for part in (*runner.data, *runner.states):
                part[:, [0]] = part[:, [2]]
            rows = [rows[2], rows[1], texts[3][:9]]
            given = [given[2], given[1], *runner.prefill([rows[2]], [0], 2)]
            compare()
        rows = [[*row, texts[i][len(row)]] for i, row in enumerate(rows)]
        given = list(runner.decode([row[-1] for row in rows], [len(row) for row in rows]))
    assert runner.data[0].shape[0] == 1 and runner.states[0].shape[0] == 3  # of four layers
