"""SGLang on a GPU drafts with a model's own layer of multi-token prediction: each sync brings the layer to it.

The layer drafts the likeliest token or the unlikeliest one, so the share of accepted drafts says which one an engine
has. `python -m pytest -s` prints the figures.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from instep.controller.drafts import AcceptedDrafts
from instep.controller.sync.session import Session
from instep.engines.engine import EngineRefusal
from instep.errors import SyncError
from instep.weights.way import way_named
from tests.assets import make_prompts
from tests.drafting import NORM, SIZES, chi_square, make_next, make_policy
from tests.e2e.commands import grpo_arguments, sync_folder
from tests.gpu.test_ipc import Source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPECULATION = "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 --sglang-speculative-eagle-topk 1 "
SPECULATION += "--sglang-speculative-num-draft-tokens 3"
# Two engines beside each other: each gets a small cache, whatever the other has taken of the card.
SMALL = "--sglang-context-length 128 --sglang-max-running-requests 64 --sglang-cuda-graph-max-bs 32 "
SMALL += "--sglang-max-total-tokens 20000 --sglang-max-mamba-cache-size 400 --sglang-mem-fraction-static 0.7 "
SMALL += "--sglang-disable-custom-all-reduce"
PROMPT, VOCABULARY, NUM_SAMPLES, TEMPERATURE = [5, 6, 7], 64, 2000, 0.8


class Trainer:
    """Sends a checkpoint from this process."""

    def __init__(self, folder: Path, left_out: str = ""):
        weights = load_file(folder / "model.safetensors", "cuda")
        self.tensors = {n: t for n, t in weights.items() if n != left_out}

    def publish(self, way, order, *, timeout, on_event):
        way_named(way).send(Source(self.tensors), replace(order, device="cuda:0"), on_event)

    def watch(self):
        pass


class Stack:
    """An engine of a family, and how weights come to it."""

    def __init__(self, name: str, root: Path):
        self.name, self.versions = name, 0
        self.first = make_policy(name, root / "hf")
        self.second = make_next(name, self.first, root / "next")
        make_prompts(root / "train.jsonl", 4)
        flags = ["--rollout-backend", "sglang", "--device", "cuda", "--precision", "bf16", "--colocate"]
        flags += ["--weight-sync", "ipc", "--hf-checkpoint", str(self.first), "--sync-timeout", "60"]
        words = grpo_arguments(root, root / "run", *flags, *SPECULATION.split(), *SMALL.split())
        args = parse(words[1:], "train").replace(device="cuda", precision="bf16", update_weight_buffer_size=4_000_000)
        assert args.offload_rollout  # the engine can sleep
        self.args = args.replace(offload_train=False, offload_rollout=False)
        self.drafts = AcceptedDrafts()
        self.engine = start_engine(args, plan_engines(args)[0], num_threads=4, log_dir=root / "logs")

    def sync(self, folder: Path, way: str = "ipc", left_out: str = "") -> None:
        self.versions += 1
        Session(self.args, Trainer(folder, left_out), [self.engine], self.versions, sync_folder(self.args)).transfer(
            way
        )

    def checksums(self) -> dict[str, str]:
        """Those of each parameter of model and drafter, by SGLang's own names."""
        (rank,) = self.engine.post("/weights_checker", {"action": "checksum"}, timeout=120)["ranks"]
        return dict(rank["checksums"])

    def sample(self, n: int, length: int, **more) -> list[tuple[list[int], list[float]]]:
        """Return the tokens and log-probs of `n` responses."""
        params = {"max_new_tokens": length, "temperature": TEMPERATURE, "ignore_eos": True, "sampling_seed": 7, "n": n}
        body = {"input_ids": PROMPT, "sampling_params": params | more, "return_logprob": True}
        answers = self.engine.post("/generate", body, timeout=200)
        answers = answers if isinstance(answers, list) else [answers]
        rows = [a["meta_info"]["output_token_logprobs"] for a in answers]
        assert all([t for _, t, _ in row] == a["output_ids"] for row, a in zip(rows, answers, strict=True))
        return [([t for _, t, _ in row], [p for p, _, _ in row]) for row in rows]

    def check(self, folder: Path) -> float:
        """Compare samples with what transformers computes; return the share of accepted drafts."""
        self.drafts.take([self.engine])
        began, rows = time.monotonic(), self.sample(NUM_SAMPLES, 4)
        share = self.drafts.take([self.engine])["perf/accepted_drafts"]
        probs = expected(folder)
        off = [chi_square(Counter(tokens[i] for tokens, _ in rows), p) for i, p in enumerate(probs)]
        gaps = log_prob_gaps(folder, self.sample(64, 32))
        print(
            f"\n{self.name}: {share:.3f} of the drafts accepted, chi-square {', '.join(f'{x:.2f}' for x in off)}, "
            f"log-probs off by {gaps.mean():.4f}, at most {gaps.max():.4f}; {time.monotonic() - began:.1f} s"
        )
        assert max(off) < 2.5 and gaps.mean() < 0.03 and gaps.max() < 0.3
        return share


def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()


@torch.no_grad()
def expected(folder: Path) -> list[torch.Tensor]:
    """The probabilities of the first, second and third token after `PROMPT`, whatever those between are."""
    model, prompt = reference(folder), torch.tensor(PROMPT, device="cuda")

    def following(rows: torch.Tensor) -> torch.Tensor:
        logits = model(torch.cat([prompt.expand(len(rows), -1), rows], dim=1)).logits[:, -1]
        return (logits / TEMPERATURE).softmax(-1)

    every = torch.arange(VOCABULARY, device="cuda")[:, None]
    first = following(every[:1, :0])[0]
    second = following(every)
    pairs = torch.cat([every.repeat_interleave(VOCABULARY, 0), every.repeat(VOCABULARY, 1)], dim=1)
    weights = (first[:, None] * second).view(-1)
    return [p.cpu() for p in (first, first @ second, weights @ following(pairs))]


@torch.no_grad()
def log_prob_gaps(folder: Path, rows: list[tuple[list[int], list[float]]]) -> torch.Tensor:
    """How far the log-probs of responses are from transformers' at the sampling temperature."""
    model = reference(folder)
    tokens = torch.tensor([[*PROMPT, *response] for response, _ in rows], device="cuda")
    logits = model(tokens[:, :-1]).logits[:, len(PROMPT) - 1 :] / TEMPERATURE
    right = logits.log_softmax(-1).gather(-1, tokens[:, len(PROMPT) :, None])[..., 0].cpu()
    return (right - torch.tensor([given for _, given in rows])).abs()


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    made = {}
    try:
        for name in SIZES:
            made[name] = Stack(name, tmp_path_factory.mktemp(name))
        yield made
    finally:
        for stack in made.values():
            stack.engine.stop()


@pytest.fixture(params=list(SIZES))
def stack(request, stacks):
    began = time.monotonic()
    stacks[request.param].engine.wait_ready(300)
    print(f"\n{request.param}: waited {time.monotonic() - began:.0f} s for the engine")
    return stacks[request.param]


def test_a_drafter_follows_each_sync(stack):
    """Its parameters become bit for bit what SGLang itself loads from the checkpoint."""
    loaded = stack.checksums()
    own = {n for n in loaded if n.startswith("draft.")}
    assert stack.check(stack.first) < 0.05
    stack.sync(stack.second)
    changed = {n for n, digest in stack.checksums().items() if digest != loaded[n]}
    buffers = {n for n in loaded if "cos_sin_cache" in n or "inv_freq" in n}
    assert changed >= {n for n in loaded if n.endswith("weight")} - buffers and changed & own
    assert stack.check(stack.second) > 0.2
    stack.sync(stack.first, "disk")
    assert stack.checksums() == loaded
    assert stack.check(stack.first) < 0.05


def test_a_drafter_comes_as_a_whole(stack):
    stack.sync(stack.second)
    with pytest.raises(SyncError, match="drafters.0"):
        stack.sync(stack.first, left_out=NORM[stack.name])
    stack.sync(stack.second)
    assert stack.check(stack.second) > 0.2


def test_a_drafter_sleeps_with_its_engine(stack):
    stack.sync(stack.second)
    before = stack.checksums()
    stack.engine.sleep(2, timeout=60)
    stack.engine.wake("weights", timeout=60)
    stack.sync(stack.second)
    stack.engine.wake("kv_cache", timeout=60)
    assert stack.checksums() == before and stack.check(stack.second) > 0.2


def test_what_would_change_the_distribution_is_refused(stack):
    for more in ({"min_p": 0.1}, {"repetition_penalty": 1.2}):
        with pytest.raises(EngineRefusal, match="with speculative decoding SGLang does not apply"):
            stack.sample(1, 4, **more)
    same = [stack.sample(4, 24) for _ in range(2)]
    alone = stack.sample(1, 24)
    equal = [a[0] == b[0] for a, b in zip(*same, strict=True)]
    print(f"\n{stack.name}: {sum(equal)} of 4 responses are again the same, alone: {alone[0][0] == same[0][0][0]}")


def test_top_k_and_top_p_cut_each_token(stack):
    """Last: they have kernels of their own."""
    likeliest = [int(p.argmax()) for p in expected(stack.second)[:1]]
    stack.sync(stack.second)
    for cut in ({"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.0}):
        rows = stack.sample(8, 16, **cut)
        assert {tuple(tokens) for tokens, _ in rows} == {tuple(rows[0][0])} and rows[0][0][:1] == likeliest, cut
