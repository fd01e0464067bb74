"""What --async-save writes of a GPU while training goes on there, and how long the run waits for it."""

from __future__ import annotations

import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.weights.parking import HostCopies
from tests.assets import make_conversations
from tests.distributed import megatron_layouts
from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import make_checkpoint
from tests.distributed.test_async_save import OTHERS, differing, hf_rank, megatron_rank
from tests.e2e.commands import run, sft_arguments
from tests.gpu import test_offload

tiny = test_offload.tiny  # the fixture
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_copies_are_pinned_and_complete_before_the_tensors_change():
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.randn(64 << 20, device=device), torch.randn(512, 300, device=device).t(), torch.ones(3)]
    want = [t.cpu().clone() for t in tensors]
    copies = HostCopies(device, "--async-save", "none")
    for _ in range(2):
        copies.clear()
        began = time.monotonic()
        made = [copies.copy(t) for t in tensors]
        copies.wait()
        seconds = time.monotonic() - began
        for tensor in tensors:
            tensor.zero_()
        torch.cuda.synchronize()
        assert all(m.is_pinned() and torch.equal(m, w) for m, w in zip(made, want, strict=True))
        for tensor, whole in zip(tensors, want, strict=True):
            tensor.copy_(whole)
    assert seconds < 0.2  # 256 MiB into memory that is pinned


def test_hf_writes_the_same_as_a_save_that_waits(tmp_path):
    make_checkpoint(tmp_path / "hf", tied=True)
    with RankPool(1, cuda=True) as pool:
        assert differing(pool.run(hf_rank, tmp_path / "hf", tmp_path, torch.bfloat16), 1) == OTHERS


def test_megatron_writes_the_same_as_a_save_that_waits(tmp_path):
    AutoModelForCausalLM.from_config(megatron_layouts.MODELS["untied"]).save_pretrained(tmp_path / "untied")
    with RankPool(1, cuda=True) as pool:
        assert differing(pool.run(megatron_rank, tmp_path, [("one", torch.bfloat16)])[0], 1) == OTHERS


@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_a_run_waits_less_for_a_save_in_the_background(tiny, tmp_path, backend):
    """Of 101 M parameters, 1.2 GB; the first save pins its memory, and each has the time to end before the next."""
    data = make_conversations(tmp_path / "sft.jsonl", 64)
    waited = {}
    for name, flags in (("waiting", []), ("background", ["--async-save"])):
        more = ["--device", "cuda", "--precision", "bf16", "--num-rollout", "6", "--save-interval", "2", *flags]
        more += ["--rollout-function-path", "tests.gpu.slow_sft.rollout"]
        words = sft_arguments(tiny, tmp_path / name, *more, "--train-backend", backend, "--prompt-data", str(data))
        done = run(words, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        waited[name] = [row["perf/save_seconds"] for row in rows if "perf/save_seconds" in row]
        written = [row["perf/save_write_seconds"] for row in rows if "perf/save_write_seconds" in row]
        print(f"\n{backend}, {name}: waited {waited[name]} s, wrote {written} s")
    assert min(waited["background"]) < min(waited["waiting"])
