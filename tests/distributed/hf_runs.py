"""What the tests of the `hf` backend share: a tiny checkpoint, batches, a loss, and steps of training."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from instep.training.backend import LossOutput
from instep.training.hf.backend import HfBackend
from instep.training.selection import Selection
from instep.types import TokenBatch

ARGS = SimpleNamespace(
    device="cpu",
    weight_sync="auto",
    colocate=False,
    offload_train=False,
    async_save=False,
    optimizer="adam",
    optimizer_cpu_offload=False,
    no_torch_compile=False,
    tensor_model_parallel_size=1,
    adam_beta1=0.9,
    adam_beta2=0.98,
    adam_eps=1e-8,
    weight_decay=0.1,
    clip_grad=0.5,
    recompute_granularity=None,
    vllm_max_model_len=None,
    trust_remote_code=False,
    no_save_optim=False,
)
LRS = [1e-3, 2e-3, 5e-4]
VOCAB = 61


def make_checkpoint(folder: Path, *, tied: bool, kind: type[PretrainedConfig] = Qwen3Config, **kw: Any) -> Path:
    torch.manual_seed(3)
    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, max_position_embeddings=128, initializer_range=0.2,
        pad_token_id=None, architectures=[kind.__name__.replace("Config", "ForCausalLM")],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(kind(**{**sizes, **kw}))
    for p in model.parameters():  # biases and norms that are not at their neutral value
        if p.ndim == 1:
            torch.nn.init.normal_(p, mean=1.0, std=0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def make_batch(seed: int) -> TokenBatch:
    """Eight samples, 4 to 30 tokens, of different temperatures; one response is a single token."""
    g = torch.Generator().manual_seed(seed)
    response = torch.randint(1, 20, (8,), generator=g)
    response[0] = 1
    total = response + torch.randint(3, 11, (8,), generator=g)
    batch = TokenBatch(torch.randint(0, VOCAB, (int(total.sum()),), generator=g), total, response)
    batch.token_columns["loss_weights"] = torch.rand(int(response.sum()), generator=g) / 10
    batch.token_columns["advantages"] = torch.randn(int(response.sum()), generator=g)
    batch.sample_columns["temperature"] = torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0, 1.0, 0.9, 1.0])
    return batch


def oracle_log_probs(model, batch: TokenBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    log_probs, entropies = [], []
    samples = zip(
        batch.tokens.split(batch.total_lengths.tolist()),
        batch.response_lengths.tolist(),
        batch.sample_columns["temperature"].tolist(),
        strict=True,
    )
    for tokens, response_length, temperature in samples:
        logits = model(tokens[None]).logits[0, -response_length - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(1, tokens[-response_length:, None])[:, 0])
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    return log_probs, entropies


def micro_batches(batch: TokenBatch, rank: int, world_size: int) -> list[TokenBatch]:
    mine = list(range(8))[rank::world_size]
    return [batch.select(mine[: len(mine) // 2]), batch.select(mine[len(mine) // 2 :])]


def loss_fn(batch, outputs) -> LossOutput:
    weights, advantages = batch.token_columns["loss_weights"], batch.token_columns["advantages"]
    loss = -(weights * (advantages * outputs.log_probs + 0.01 * outputs.entropy)).sum()
    return LossOutput(loss, sums={"loss": loss.detach()})


def oracle_training(path: Path, frozen: str = "(?!)") -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, gradient norm) of each step by plain transformers and torch, and the weights by their names there.

    Weights with `frozen` in their names are not trained.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for name, p in model.named_parameters():
        p.requires_grad_(re.search(frozen, name) is None)
    decay = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    rest = [p for p in model.parameters() if p.ndim == 1 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.98),
                                  eps=1e-8, weight_decay=0.1)  # fmt: skip
    out = []
    for step, lr in enumerate(LRS):
        batch = make_batch(step)
        log_probs, entropies = (torch.cat(x) for x in oracle_log_probs(model, batch))
        columns = batch.token_columns
        loss = -(columns["loss_weights"] * (columns["advantages"] * log_probs + 0.01 * entropies)).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        out.append((float(loss.detach()), float(norm)))
    return out, {name: p.detach() for name, p in model.named_parameters()}


def make_backend(path: Path, load: bool = True, selection: Selection | None = None, **kw) -> HfBackend:
    args = SimpleNamespace(**{**vars(ARGS), **kw})
    config = AutoConfig.from_pretrained(path)
    backend = HfBackend(args, hf_config=config, device=torch.device("cpu"), dtype=torch.float32, selection=selection)
    if load:
        backend.load_hf(path)
    return backend


def train(backend: HfBackend, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    out = []
    for step in steps:
        parts = micro_batches(make_batch(step), backend.parallel.dp_rank, backend.parallel.dp_size)
        loss = sum(r.sums["loss"] for r in backend.forward_backward(parts, loss_fn))
        dist.all_reduce(loss, group=backend.parallel.dp_group)
        out.append((float(loss), backend.optimizer_step(LRS[step]).grad_norm))
    return out


def weights_of(backend: HfBackend) -> dict[str, torch.Tensor] | None:
    out = {spec.name: t if t is None else t.clone() for spec, t in backend.weight_source()}
    return out if backend.weight_source().emits else None
