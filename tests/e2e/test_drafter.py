"""vLLM drafts with the trained layer of multi-token prediction: each sync brings it; speculation changes no sample."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from instep.controller.drafts import AcceptedDrafts
from instep.engines.engine import Engine
from instep.engines.http import open_directly
from tests.distributed.mtp_oracle import Drafter
from tests.drafting import chi_square
from tests.e2e.test_families import LIMITS, stack, train_once

pytestmark = pytest.mark.vllm
SPECULATION = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
FLAGS = ["--train-backend", "megatron", "--mtp-num-layers", "1", "--enable-mtp-training", "--weight-sync", "shm"]
PROMPT, VOCABULARY, NUM_SAMPLES = [5, 6, 7], 64, 1000


def with_drafter(folder: Path) -> None:
    """Make a model whose next token hardly depends on those before, and a layer that drafts the unlikeliest one."""
    file = folder / "model.safetensors"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        common = torch.randn(embedding.shape[1])
        embedding.copy_(common + 0.1 * torch.randn_like(embedding))
        model.lm_head.weight[9] += 0.8 * common / common.norm()  # the likeliest token
    drafts = Drafter(model).weights()
    layer, hidden = "model.layers.2.", embedding.shape[1]
    drafts[f"{layer}eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    drafts[f"{layer}shared_head.norm.weight"] = -model.model.norm.weight.detach()
    drafts = {n: 0.1 * t if "_proj" in n and "eh_proj" not in n else t for n, t in drafts.items()}
    own = {"model.embed_tokens.weight": embedding, "lm_head.weight": model.lm_head.weight}
    weights = load_file(file) | {name: weight.detach() for name, weight in own.items()} | drafts
    save_file({n: t.contiguous() for n, t in weights.items()}, file, {"format": "pt"})


def mended(folder: Path, to: Path) -> Path:
    """Copy the checkpoint; the layer drafts what the model prefers."""
    shutil.copytree(folder, to)
    weights, name = load_file(to / "model.safetensors"), "model.layers.2.shared_head.norm.weight"
    save_file(weights | {name: -weights[name]}, to / "model.safetensors", {"format": "pt"})
    return to


def second_tokens(engine: Engine, drafts: AcceptedDrafts) -> tuple[Counter[int], float]:
    """Sample; return how often each token came second, and which share of the drafts was accepted."""
    url, counts = engine.url, Counter[int]()
    model = json.loads(open_directly(f"{url}/v1/models", timeout=60).read())["data"][0]["id"]

    def ask(seed: int) -> list[int]:
        body: dict[str, Any] = dict(model=model, prompt=PROMPT, max_tokens=3, temperature=1.0, n=100, seed=1000 * seed)
        body |= dict(ignore_eos=True, return_token_ids=True)
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        answer = json.loads(open_directly(request, timeout=300).read())
        return [choice["token_ids"][1] for choice in answer["choices"]]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(ask, range(NUM_SAMPLES // 100)):
            counts.update(found)
    return counts, drafts.take([engine])["perf/accepted_drafts"]


@torch.no_grad()
def expected(folder: Path) -> torch.Tensor:
    """The probabilities of the second token after `PROMPT`, whatever the first one is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    every = torch.cat([torch.tensor(PROMPT).expand(VOCABULARY, -1), torch.arange(VOCABULARY)[:, None]], dim=1)
    return first @ model(every).logits[:, -1].softmax(-1)


@pytest.mark.slow
def test_a_drafter_follows_each_sync(tmp_path):
    with stack("deepseek_v3", tmp_path, *FLAGS, "--vllm-speculative-config", SPECULATION, prepare=with_drafter) as made:
        drafts = AcceptedDrafts()
        hf, sync, probs = Path(made.args.hf_checkpoint), made.sync(), expected(Path(made.args.hf_checkpoint))
        counts, share = second_tokens(made.engine, drafts)
        print(f"before: {share:.3f} of the drafts accepted, chi-square {chi_square(counts, probs):.2f}")
        assert share < 0.02 and chi_square(counts, probs) < 2.5
        try:
            for way, folder in (("shm", mended(hf, tmp_path / "mended")), ("shm", hf), ("nccl", tmp_path / "mended")):
                made.actor.load_weights(folder)
                off, allowed = made.difference(sync, way)
                assert off <= allowed <= LIMITS["bf16"]
                counts, share = second_tokens(made.engine, drafts)
                print(f"{way}: {share:.3f} of the drafts accepted, chi-square {chi_square(counts, probs):.2f}")
                assert (share < 0.02) if folder == hf else (share > 0.3)
                assert chi_square(counts, probs) < 2.5
            train_once(made.actor)
        finally:
            sync.close()
