"""How far a proof's statistic of right syncs is from that of wrong ones: engine and trainer score the same texts.

    python -m tests.distributed.margins [--real DIR]      writes tests/distributed/margins.json

The statistic is what a proof compares with its tolerance: the difference of the probe over what one rounding of the
embeddings explains (`controller/sync/probe.py`). The trainer is the `hf` backend. The engine of the families is the
embedded one, that of the real model (`examples/real/make_model.py`) is transformers, a sample at a time. Faults are
planted in the engine's weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from instep.controller.sync.probe import Probe, difference
from instep.controller.sync.proof import ALLOWED, Proof, TrainerScores
from instep.engines.embedded.model import Runner, load_model
from instep.training.hf.backend import HfBackend
from instep.training.rounding import UNITS, rounded_embedding
from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import ARGS
from tests.families import make_family

TABLE = Path(__file__).parent / "margins.json"
FAMILIES = "qwen2 qwen3 qwen3_moe llama yi mistral phi phi3 gemma starcoder2".split()  # Mixtral: see the docs
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNLIKELY = -20.0  # the mean log-prob of random tokens under a peaked model
NUM_RIGHT = 20
Weights = dict[str, torch.Tensor]
Fault = Callable[[Weights, Probe], None]


def make_model(name: str, folder: Path, precision: str, peaked: bool) -> Path:
    """A random checkpoint of a family; a peaked one has an output layer under which random tokens are unlikely."""
    path = make_family(name, folder, "fp32", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head, tokens = model.get_output_embeddings().weight, torch.randint(0, 64, (1, 48))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("_proj.bias"):
                weight.mul_(5)  # those of published models are not small
        while peaked and model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).mean() > UNLIKELY:
            head.mul_(1.5)
    model.to(DTYPES[precision]).save_pretrained(path)
    return path


class Pair:
    """A trainer, and the scores of an engine whose weights are `engine`."""

    def __init__(self, path: Path, precision: str, embedded: bool):
        self.precision, self.embedded, config = precision, embedded, AutoConfig.from_pretrained(path)
        self.backend = HfBackend(ARGS, hf_config=config, device=torch.device("cpu"), dtype=DTYPES[precision])  # type: ignore[arg-type]
        self.backend.load_hf(path)
        if embedded:
            self.engine: PreTrainedModel = load_model(str(path), DTYPES[precision], torch.device("cpu"), 128, False)
            self.runner = Runner(self.engine, 4, 128)
            self._score = lambda tokens: [place[0][1] for place in self.runner.score(tokens)]
        else:
            self.engine = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[precision]).eval()
            self._score = self._plain
        given = {"precision": precision, "sync_tolerance": None, "vllm_overrides": {}, "sglang_overrides": {}}
        settings: Any = SimpleNamespace(**given, weight_sync="shm")
        self.proof = Proof(settings, vocab_size=config.vocab_size, max_len=128)
        self.vocab_size, start = config.vocab_size, config.bos_token_id
        self.start = start if isinstance(start, int) else 0

    @torch.no_grad()
    def _plain(self, tokens: list[int]) -> list[float]:
        logits = self.engine(torch.tensor([tokens])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]

    def probe(self, seed: int) -> Probe:
        """Texts that the engine writes at temperature 1."""
        probe = Probe(vocab_size=self.vocab_size, max_len=128, start=self.start)
        torch.manual_seed(seed)
        probe.sample([self], 0.0)  # type: ignore[list-item]
        return probe

    def sample(self, tokens: list[int], num_tokens: int, *, num: int, timeout: float) -> list[list[int]]:
        if self.embedded:
            return self._sampled(tokens, num_tokens, num)
        else:
            rows = torch.tensor([tokens] * num)
            how: Any = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": num_tokens, "pad_token_id": 0}
            made = self.engine.generate(rows, min_new_tokens=num_tokens, attention_mask=torch.ones_like(rows), **how)
        return [row[len(tokens) :] for row in made.tolist()]

    @torch.no_grad()
    def _sampled(self, tokens: list[int], num_tokens: int, num: int) -> list[list[int]]:
        """As the embedded engine does: all texts at once, with its cache."""
        logits, made = self.runner.prefill([tokens], [0] * num, 0), [list[int]() for _ in range(num)]
        while True:
            drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()
            for text, token in zip(made, drawn, strict=True):
                text.append(token)
            if len(made[0]) == num_tokens:
                return made
            logits = self.runner.decode(drawn, [len(tokens) + len(made[0])] * num)

    def scores(self, probe: Probe) -> TrainerScores:
        batch = probe.batch()
        plain = self.backend.forward_only([batch])[0].log_probs.tolist()
        with rounded_embedding(self.backend.embedding, UNITS[self.precision]):
            return TrainerScores(plain, self.backend.forward_only([batch])[0].log_probs.tolist())

    def statistic(self, probe: Probe, expected: TrainerScores, right: bool) -> float:
        """The difference over what rounding explains, as the proof has it (which allows `ALLOWED`)."""
        theirs = [score for text in probe.texts for score in self._score(list(text.tokens))]
        found = ALLOWED * difference(expected.plain, theirs).rms / self.proof.tolerance(expected)
        if right:
            self.proof.remember(expected)
        return found


def faults(weights: Weights) -> Iterator[tuple[str, Fault]]:
    """The faults that this model can have."""

    def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
        def plant(weights: Weights, probe: Probe) -> None:
            weights[name].copy_(how(weights[name].clone()))

        return plant

    def exchange(one: str, other: str) -> Fault:
        def plant(weights: Weights, probe: Probe) -> None:
            kept = weights[one].clone()
            weights[one].copy_(weights[other])
            weights[other].copy_(kept)

        return plant

    def rows(weights: Weights, probe: Probe) -> None:
        a, b = probe.texts[0].tokens[5], next(t for t in probe.texts[0].tokens[6:] if t != probe.texts[0].tokens[5])
        embedding = next(weight for name, weight in weights.items() if "embed_tokens" in name)
        embedding[[a, b]] = embedding[[b, a]].clone()

    def scaled(weights: Weights, probe: Probe) -> None:
        """As if the engine used 0.9 of an adapter whose norm is 0.6 of that of each weight."""
        generator = torch.Generator().manual_seed(3)
        for name, weight in weights.items():
            if "layers." in name and weight.ndim == 2:
                a, b = (torch.randn(size, 4, generator=generator) for size in weight.shape)
                part = a @ b.T
                weight.sub_((0.1 * 0.6 * weight.float().norm() / part.norm() * part).to(weight.dtype))

    first = next(n for n in weights if n.endswith("layers.1.input_layernorm.weight"))
    around_zero = bool(weights[first].float().mean().abs() < 0.5)  # Gemma adds 1
    yield "one norm at its first values", change(first, torch.zeros_like if around_zero else torch.ones_like)
    yield "two rows of the embedding exchanged", rows
    yield "adapter scaled by 0.9", scaled
    square = next((n for n, w in weights.items() if "layers.1" in n and w.ndim == 2 and w.shape[0] == w.shape[1]), "")
    if square:
        yield "one tensor transposed", change(square, lambda w: w.T)
    halves = [
        n for n in weights if "layers.0" in n and n.endswith(("gate_proj.weight", "gate_up_proj.weight", "c_fc.weight"))
    ]
    if halves:
        yield "two shards exchanged", change(halves[0], lambda w: torch.cat(w.chunk(2)[::-1]))
        yield "one shard zero", change(halves[0], lambda w: torch.cat([w[: len(w) // 2], 0 * w[len(w) // 2 :]]))
    keys, values = (next((n for n in weights if f"layers.0.self_attn.{x}_proj.weight" in n), "") for x in "kv")
    if keys and weights[keys].shape == weights[values].shape:
        yield "keys and values exchanged", exchange(keys, values)
    experts = next((n for n in weights if "layers.0" in n and n.endswith("experts.gate_up_proj")), "")
    if experts:
        yield "two experts exchanged", change(experts, lambda w: w[[1, 0, *range(2, len(w))]])
    bias = next((n for n in weights if "layers.0" in n and n.endswith("q_proj.bias")), "")
    if bias:
        yield "a bias left out", change(bias, torch.zeros_like)


@torch.no_grad()
def margins(path: Path, precision: str, embedded: bool = True) -> dict[str, Any]:
    """The largest statistic of right syncs, and that of each fault."""
    pair = Pair(path, precision, embedded)
    weights = dict(pair.engine.named_parameters())
    probes = [pair.probe(seed) for seed in range(2 if embedded else 4)]
    right = []
    for number in range(NUM_RIGHT if embedded else len(probes)):
        probe = probes[number % len(probes)]
        right.append(pair.statistic(probe, pair.scores(probe), True))
        if embedded:
            _move(pair, number)  # the policy moves, on both sides alike
    found: dict[str, float] = {}
    expected = pair.scores(probes[0])  # a fault is the engine's
    for name, plant in faults(weights):
        kept = {n: w.clone() for n, w in weights.items()}
        plant({n: w.data for n, w in weights.items()}, probes[0])
        found[name] = pair.statistic(probes[0], expected, False)
        for n, weight in weights.items():
            weight.data.copy_(kept[n])
    return {"right": max(right), "wrong": found}


def _move(pair: Pair, seed: int) -> None:
    theirs = dict(pair.engine.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    for name, weight in pair.backend.policy.model.named_parameters():
        noise = 0.01 * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
        weight.data.copy_((weight.data + noise.to(weight.dtype)).to(DTYPES[pair.precision]))
        theirs[name].data.copy_(weight.data)
    pair.backend._changed()


def of_families(folder: Path, names: list[str], precision: str) -> dict[str, dict[str, Any]]:
    out = {}
    for name in names:
        for kind in ("flat", "peaked"):
            path = make_model(name, folder / f"{name}-{kind}-{precision}", precision, kind == "peaked")
            out[f"{name}, {kind}, {precision}"] = margins(path, precision)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="the folder of the real model; its rows stay as they are without")
    options = parser.parse_args()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    pool = RankPool(1, timeout=3000)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for precision in ("bf16", "fp32") if not options.real else ():
                table |= pool.run(of_families, Path(scratch), FAMILIES, precision)[0]
        if options.real:
            table["gemma-3-270m, real, bf16"] = pool.run(margins, options.real, "bf16", False)[0]
    finally:
        pool.close()
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
