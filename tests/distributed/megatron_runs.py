"""What `test_megatron_backend.py` compares: runs of the megatron backend in their own processes, and the oracle, which
is plain transformers + torch.optim.AdamW.

All two-rank layouts run in one pair of processes, one after another, and all one-rank ones in one more; they write what
they computed. On a machine with GPUs the same runs over nccl, as far as there are GPUs.
"""

from __future__ import annotations

import contextlib
import copy
import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from instep.errors import InstepError
from instep.training.backend import LossOutput, TokenOutputs
from instep.types import TokenBatch

CUDA = torch.cuda.is_available()
SIZES = [n for n in (2, 1) if not CUDA or n <= torch.cuda.device_count()]

# eps is large, because Adam blows rounding noise of vanishing gradients up to full steps
HEAD_LOGITS = 2**28  # the default
LR, WEIGHT_DECAY, BETAS, EPS, CLIP = 3e-3, 0.1, (0.9, 0.95), 1e-4, 1.0
NUMBERS = dict(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6,
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
MODELS: dict[str, PretrainedConfig] = {
    "untied": Qwen3Config(**NUMBERS, head_dim=16, tie_word_embeddings=False),
    "tied": Qwen3Config(**NUMBERS, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**NUMBERS, tie_word_embeddings=True),
    "llama": LlamaConfig(**NUMBERS, head_dim=16, tie_word_embeddings=False, rope_parameters=LLAMA3),
}
# name: (ranks, model, arguments)
LAYOUTS = {
    "one": (1, "untied", {}),
    "one-no-clip": (1, "untied", dict(clip_grad=0.0)),
    "one-tied": (1, "tied", {}),
    "one-qwen2": (1, "qwen2", {}),
    "one-llama": (1, "llama", {}),
    "one-recompute": (
        1, "untied", dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ),
    "one-chunked": (1, "untied", dict(head_logits=300)),
    "tp2": (2, "untied", dict(tensor_model_parallel_size=2)),
    "tp2-chunked": (2, "tied", dict(tensor_model_parallel_size=2, head_logits=200)),
    "tp2-tied": (2, "tied", dict(tensor_model_parallel_size=2)),
    "tp2-qwen2": (2, "qwen2", dict(tensor_model_parallel_size=2)),
    "tp2-sp": (2, "untied", dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2-sp-tied": (2, "tied", dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "dp2": (2, "untied", {}),
    "dp2-dist-opt": (2, "untied", dict(use_distributed_optimizer=True)),
    "pp2": (2, "untied", dict(pipeline_model_parallel_size=2)),
    "pp2-tied": (2, "tied", dict(pipeline_model_parallel_size=2)),
}  # fmt: skip
# saved by -> loaded by
RESUMES = [
    ("tp2", "one"), ("dp2-dist-opt", "one"), ("dp2-dist-opt", "pp2"), ("pp2", "dp2-dist-opt"),
    ("dp2-dist-opt", "tp2"), ("dp2", "dp2"), ("dp2-dist-opt", "dp2-dist-opt"), ("pp2-tied", "one-tied"),
]  # fmt: skip


def make_args(**changes) -> SimpleNamespace:
    base = dict(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, sequence_parallel=False,
        use_distributed_optimizer=False, recompute_granularity=None, recompute_method=None,
        recompute_num_layers=None, lr=LR, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        adam_eps=EPS, clip_grad=CLIP, seed=1, no_save_optim=False, megatron_overrides={}, num_layers=None,
        hidden_size=None, deterministic_mode=False,
    )  # fmt: skip
    return SimpleNamespace(**(base | changes))


def micro_batches(step: int) -> list[TokenBatch]:
    """Four micro-batches of two samples of different lengths, and weights of either sign."""
    g = torch.Generator().manual_seed(100 + step)
    batches = []
    for _ in range(4):
        responses = torch.randint(1, 12, (2,), generator=g)
        totals = responses + torch.randint(1, 9, (2,), generator=g)
        weights = torch.randn(int(responses.sum()), generator=g) / 30
        batches.append(
            TokenBatch(
                torch.randint(0, 100, (int(totals.sum()),), generator=g),
                totals,
                responses,
                {"loss_weights": weights},
                {"temperature": torch.tensor([1.0, 0.7])},
            )  # fmt: skip
        )
    return batches


def weighted_loss(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
    w = batch.token_columns["loss_weights"]
    loss = -(w * outputs.log_probs).sum() - 0.3 * (w.abs() * outputs.entropy).sum()
    return LossOutput(loss, {"tokens": torch.tensor(float(w.numel()))}, {"top": outputs.log_probs.detach().max()})


# The oracle


def oracle_outputs(model: torch.nn.Module, batch: TokenBatch) -> TokenOutputs:
    """Sample by sample, no packing, plain log-softmax."""
    log_probs, entropies = [], []
    for tokens, n, t in zip(
        batch.tokens.split(batch.total_lengths.tolist()), batch.response_lengths, batch.sample_columns["temperature"],
        strict=True,
    ):  # fmt: skip
        logits = model(tokens[None]).logits[0, -n - 1 : -1] / t
        log_p = torch.log_softmax(logits, -1)
        log_probs.append(log_p.gather(1, tokens[-n:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return TokenOutputs(torch.cat(log_probs), torch.cat(entropies))


def oracle(folder: Path, clip: float = CLIP) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    with torch.no_grad():
        scores = [oracle_outputs(model, b) for b in micro_batches(0)]
    losses, norms, weights = [], [], []
    for step in range(5):
        loss = sum(weighted_loss(b, oracle_outputs(model, b)).loss for b in micro_batches(step))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, clip)))
        for group in optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        optimizer.step()
        losses.append(float(loss))
        weights.append({k: v.clone() for k, v in model.state_dict().items()})
    names = {n for n, _ in model.named_parameters()}  # tied weights once
    return dict(scores=scores, losses=losses, norms=norms, weights=[{n: w[n] for n in names} for w in weights])


# What runs in the processes


def export(backend) -> dict[str, torch.Tensor]:
    source = backend.weight_source()
    out = {}
    for (spec, tensor), want in zip(source, source.specs, strict=True):
        assert spec == want and (tensor is not None) == source.emits
        if tensor is not None:
            assert tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype and tensor.is_contiguous()
            assert spec.name not in out
            out[spec.name] = tensor.to("cpu", copy=True)
    return out


def train(backend, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    p = backend.parallel
    for step in steps:
        share = 4 // p.dp_size
        mine = micro_batches(step)[p.dp_rank * share : (p.dp_rank + 1) * share]
        out = backend.forward_backward(mine, weighted_loss)
        assert (out is None) == (not p.is_last_stage)
        loss = torch.zeros(2, device=p.device)
        if p.is_output_rank:
            loss = sum(torch.stack([o.loss, o.sums["tokens"].to(p.device)]) for o in out)
        dist.all_reduce(loss)
        assert loss[1] == sum(int(b.response_lengths.sum()) for b in micro_batches(step))
        result = backend.optimizer_step(LR / (step + 1))
        assert not result.skipped
        losses.append(float(loss[0]))
        norms.append(result.grad_norm)
    return losses, norms


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if CUDA else torch.device("cpu")


def make_backend(root: Path, layout: str, *, dtype=torch.float32, with_optimizer=True, fresh=True, **more):
    from megatron.core import parallel_state

    from instep.training.megatron.backend import MegatronBackend

    if fresh:
        parallel_state.destroy_model_parallel()
    _, model, changes = LAYOUTS[layout]
    config = AutoConfig.from_pretrained(root / model)
    backend = MegatronBackend(
        make_args(**changes | more), hf_config=config, device=device(), dtype=dtype,
        with_optimizer=with_optimizer,
    )  # fmt: skip
    from instep.training.megatron import spec  # only when the backend has put its stand-ins for torch.cuda in place

    spec.HEAD_LOGITS = changes.get("head_logits", HEAD_LOGITS)
    return backend, root / model


def run_layout(root: Path, name: str) -> dict:
    backend, hf = make_backend(root, name)
    backend.load_hf(hf)
    p = backend.parallel
    share = 4 // p.dp_size
    head, num_tokens = backend.model._head, []  # of each call
    backend.model._head = lambda hidden, *more: num_tokens.append(len(hidden)) or head(hidden, *more)
    scores = backend.forward_only(micro_batches(0)[p.dp_rank * share : (p.dp_rank + 1) * share], entropy=True)
    result = dict(parallel=(p.dp_rank, p.is_last_stage, p.is_output_rank), scores=scores, exported=export(backend))
    result["head_tokens"] = list(num_tokens)
    result["losses"], result["norms"] = train(backend, range(3))
    result["weights"] = export(backend)
    if any(saved == name for saved, _ in RESUMES):
        folder = root / f"checkpoint-{name}"
        folder.mkdir(exist_ok=True)
        backend.save(folder)
    return result


def run_resume(root: Path, saved: str, name: str) -> dict:
    backend, _ = make_backend(root, name)
    backend.load(root / f"checkpoint-{saved}")
    losses, norms = train(backend, range(3, 5))
    return dict(losses=losses, norms=norms, weights=export(backend))


def run_edges(root: Path) -> dict:
    """Behaviour beyond numbers, on one rank."""
    backend, hf = make_backend(root, "one")
    backend.load_hf(hf)
    before = export(backend)
    bad = micro_batches(0)[0]
    bad.token_columns["loss_weights"][0] = math.nan
    backend.forward_backward([bad], weighted_loss)
    result = backend.optimizer_step(LR)
    after = export(backend)
    edges = {
        "skipped": result.skipped and math.isnan(result.grad_norm),
        "unchanged": all(torch.equal(before[k], after[k]) for k in before),
        "then_trains": train(backend, range(0, 1)),
        "type_outside": torch.zeros(1).type(),
    }
    backend.forward_backward(micro_batches(0), weighted_loss)
    edges["twice"] = refusal(lambda: backend.forward_backward(micro_batches(0), weighted_loss))
    backend.optimizer_step(0.0)
    edges["no_checkpoint"] = refusal(lambda: backend.load(root))
    edges["no_folder"] = refusal(lambda: backend.save(root / "nowhere"))
    edges["wrong_checkpoint"] = refusal(lambda: backend.load_hf(root / "tied"))
    edges["wrong_model"] = refusal(lambda: backend.load(root / "checkpoint-pp2-tied"))
    edges["unknown_override"] = refusal(lambda: make_backend(root, "one", megatron_overrides={"layernorm_epsilom": 1}))
    edges["refused_upstream"] = refusal(lambda: make_backend(root, "one", recompute_granularity="full"))
    actor, _ = make_backend(root, "one")
    reference, _ = make_backend(root, "one", with_optimizer=False, fresh=False)
    actor.load_hf(hf)
    reference.load_hf(hf)
    edges["beside"] = train(actor, range(1))
    edges["reference"] = reference.forward_only(micro_batches(0))
    edges["untrained"] = refusal(lambda: reference.forward_backward(micro_batches(0), weighted_loss))
    return edges


def run_bf16(root: Path) -> dict:
    """bfloat16 with float32 masters, as on CUDA; saved by the plain optimizer, loaded by the distributed one."""
    backend, hf = make_backend(root, "one", dtype=torch.bfloat16)
    backend.load_hf(hf)
    losses, norms = train(backend, range(3))
    folder = root / "checkpoint-bf16"
    folder.mkdir()
    backend.save(folder)
    straight = train(backend, range(3, 5)), export(backend)
    resumed, _ = make_backend(root, "one", dtype=torch.bfloat16, use_distributed_optimizer=True)
    resumed.load(folder)
    return dict(losses=losses, norms=norms, straight=straight, resumed=(train(resumed, range(3, 5)), export(resumed)))


def run_faults(root: Path) -> dict:
    """What upstream does without our patches, in the process that has the stand-ins."""
    from instep.training.megatron import cpu_platform

    optimizer = make_backend(root, "one", use_distributed_optimizer=True)[0].optimizer.chained_optimizers[0]
    faults = {"dist_opt_state": failure(optimizer.state_dict)}
    backend, _ = make_backend(root, "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_platform, "scope", contextlib.nullcontext)
        faults["schedule"] = failure(lambda: backend.forward_only(micro_batches(0)))
        faults["optimizer"] = failure(lambda: make_backend(root, "one", use_distributed_optimizer=True))
    return faults


def bare_faults(_: int, root: Path) -> None:
    """What upstream does without any of our patches, in a process of its own."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from instep.training.megatron import cpu_platform, upstream_fixes

    faults: dict = {"te_general_gemm": "te_general_gemm" in vars(moe_utils)}
    upstream_fixes.apply()
    faults["te_general_gemm fixed"] = moe_utils.te_general_gemm
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False, persist_layer_norm=False, memory_efficient_layer_norm=False,
        normalization="RMSNorm", sequence_parallel=True,
    )  # fmt: skip
    faults["norm"] = failure(lambda: WrappedTorchNorm(config, 8))
    faults["device"] = failure(torch.cuda.current_device)
    faults["late"] = refusal(cpu_platform.install)
    torch.save(faults, root / "faults.pt")


def failure(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusal(call) -> InstepError:
    try:
        call()
    except InstepError as error:
        return copy.copy(error)
    raise AssertionError("not refused")


def processes(rank: int, size: int, port: int, root: Path) -> None:
    torch.set_num_threads(1)
    backend, address = ("nccl" if CUDA else "gloo"), f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    if CUDA:
        torch.cuda.set_device(rank)
    else:
        from instep.training.megatron import cpu_platform

        cpu_platform.install()  # before the first import of megatron.core
    results: dict = {name: run_layout(root, name) for name, (ranks, *_) in LAYOUTS.items() if ranks == size}
    results |= {
        (a, b): run_resume(root, a, b)
        for a, b in RESUMES
        if LAYOUTS[b][0] == size and (root / f"checkpoint-{a}" / "metadata.json").exists()
    }
    if size == 1:
        results |= {"edges": run_edges(root), "bf16": run_bf16(root), "faults": {} if CUDA else run_faults(root)}
    torch.save(results, root / f"results-{size}-{rank}.pt")
    dist.destroy_process_group()
