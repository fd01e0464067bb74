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
from transformers import AutoConfig

from instep.errors import InstepError
from instep.training.backend import LossOutput, TokenOutputs
from instep.types import TokenBatch
from tests.distributed.megatron_layouts import (
    BETAS,
    BIAS_RATES,
    CLIP,
    CUDA,
    EPS,
    HEAD_LOGITS,
    LAYOUTS,
    LR,
    RESUMES,
    WEIGHT_DECAY,
)


def make_args(**changes) -> SimpleNamespace:
    base = dict(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1, sequence_parallel=False,
        num_layers_per_virtual_pipeline_stage=None, num_virtual_stages_per_pipeline_rank=None,
        decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None,
        expert_model_parallel_size=1, expert_tensor_parallel_size=None,
        moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, moe_router_dtype=None, moe_grouped_gemm=False,
        use_distributed_optimizer=False, recompute_granularity=None, recompute_method=None,
        recompute_num_layers=None, lr=LR, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        adam_eps=EPS, clip_grad=CLIP, seed=1, no_save_optim=False, megatron_overrides={}, num_layers=None,
        async_save=False, ckpt_format="torch_dist",
        extra_flags=(), hidden_size=None, deterministic_mode=False, optimizer_cpu_offload=False,
        optimizer="adam", no_torch_compile=False, mtp_num_layers=0, enable_mtp_training=False,
        mtp_loss_scaling_factor=0.2, hf_checkpoint="none",
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
    changes = {"moe_router_bias_update_rate": BIAS_RATES.get(model, 0.0), **changes}
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
    head, num_tokens = backend.chunks[-1]._head, []  # of each call
    backend.chunks[-1]._head = lambda hidden, *more: num_tokens.append(len(hidden)) or head(hidden, *more)
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
        "compiled": compiled_functions(),
    }
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
    return edges


def compiled_functions() -> list[str]:
    """Those of Megatron-Core that torch.compile would compile at their first call."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.moe.router import TopKRouter

    functions = [*vars(fused_bias_swiglu).values(), *vars(TopKRouter).values()]
    return [f.__qualname__ for f in functions if hasattr(f, "_torchdynamo_orig_callable")]


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


def run_bf16_bias(root: Path) -> tuple[list[torch.Tensor], str]:
    """The biases of experts before and after a step in bfloat16, as they are exported; what the backend remarks."""
    backend, hf = make_backend(root, "one-deepseek", dtype=torch.bfloat16)
    backend.load_hf(hf)
    before = export(backend)
    train(backend, range(1))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    return [weights[name] for weights in (before, export(backend))], backend.remark()


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
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from instep.training.megatron import upstream_fixes

    faults: dict = {"te_general_gemm": "te_general_gemm" in vars(moe_utils)}
    faults["latent attention"] = multi_latent_attention.HAVE_TE
    upstream_fixes.apply()
    faults["te_general_gemm fixed"] = moe_utils.te_general_gemm
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False, persist_layer_norm=False, memory_efficient_layer_norm=False,
        normalization="RMSNorm", sequence_parallel=True,
    )  # fmt: skip
    faults["norm"] = failure(lambda: WrappedTorchNorm(config, 8))
    faults["device"] = failure(torch.cuda.current_device)
    torch.save(faults, root / "faults.pt")


def failure(call) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whichever it is, the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def refusal(call) -> InstepError:
    try:
        call()
    except InstepError as error:
        return copy.copy(error)
    raise AssertionError("not refused")


def processes(rank: int, size: int, port: int, root: Path, names: list[str], resumes: list[tuple[str, str]]) -> None:
    """What one of `size` processes does: the layouts `names`, then what goes on under another one; writes a file."""
    torch.set_num_threads(1)
    backend, address = ("nccl" if CUDA else "gloo"), f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    if CUDA:
        torch.cuda.set_device(rank)
        torch.compiler.set_stance("force_eager")  # each layout would be compiled; tests/gpu/test_compiled.py compares
    else:
        from instep.training.megatron import cpu_platform

        cpu_platform.install()  # before the first import of megatron.core
    results: dict = {name: run_layout(root, name) for name in names}
    results |= {(a, b): run_resume(root, a, b) for a, b in resumes}
    if size == 1 and "one" in names:
        results |= {
            "edges": run_edges(root),
            "bf16": run_bf16(root),
            "bf16 bias": run_bf16_bias(root),
            "faults": {} if CUDA else run_faults(root),
        }
    torch.save(results, root / f"results-{size}-{rank}.pt")
    dist.destroy_process_group()
