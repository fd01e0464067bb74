"""One adapter at little cost: base and A in one matrix product, B and the sum in one kernel.

vLLM computes W x, then A x in a kernel for many adapters, then adds B A x in another one. Each adapted layer also
clears a buffer. For the one adapter of a trainer, the rows of A are below those of W in one memory here:

    y = [W; A] x          one product, which reads W and A once
    out = y_W + B y_A     one kernel, for the tokens that have the adapter (of each slice, where layers are packed)

vLLM's own loader fills A and B as usual: its buffers (`lora_a_stacked`, `lora_b_stacked`) are views of these memories.
`--additional-config '{"instep_adapter": 1}'` enables it, because that is part of vLLM's compilation key. Increase the
number when the compiled code changes. Layers that do not fit stay vLLM's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.triton_utils import HAS_TRITON
from vllm.utils.torch_utils import direct_register_custom_op

from instep_engine.vllm.fast import VERSIONS, minor_version

logger = init_logger("vllm.instep")
CONFIG = "instep_adapter"  # in vLLM's additional configuration
FORM = 1
RANKS = (16, 32, 64, 128)  # the ranks of the kernel
COLUMNS = 64  # computed by a program of the kernel, for one slice
_MEMORY = "_instep_rows"  # attribute of a base layer: the memory whose first rows are its weight


def install() -> None:
    """Give layers room for A, and join those of an engine that requests it. Once in each process that computes."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    create_weights, create_modules = UnquantizedLinearMethod.create_weights, LoRAModelManager._create_lora_modules
    apply = BaseLinearLayerWithLoRA.apply
    if hasattr(apply, "__wrapped__"):
        return

    @functools.wraps(create_weights)
    def create_weights_with_room(
        self: Any,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        sizes, rows = output_partition_sizes, _rows_of_a(self, layer, len(output_partition_sizes))
        create_weights(self, layer, input_size_per_partition, [*sizes, rows] if rows else sizes, *args, **kwargs)
        if rows:
            memory = layer.weight.data
            setattr(layer, _MEMORY, memory)
            layer.weight.data = memory[: sum(sizes)]

    @functools.wraps(create_modules)
    def create_lora_modules(self: Any) -> None:
        create_modules(self)
        join_all(self)

    @functools.wraps(apply)
    def apply_joined(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._instep_joined is None:
            return apply(self, x, bias)
        rows = x if x.ndim == 2 else x.flatten(0, 1)  # transformers' models have one dimension more
        y = torch.nn.functional.linear(rows, self._instep_joined)
        slices, rank = list(self.output_slices), self._instep_b.shape[1]
        out = torch.ops.vllm.instep_add_adapter(y, self._instep_b, bias, self._instep_tokens, slices, rank)
        return out if x.ndim == 2 else out.reshape(*x.shape[:2], out.shape[1])

    UnquantizedLinearMethod.create_weights = create_weights_with_room
    LoRAModelManager._create_lora_modules = create_lora_modules
    BaseLinearLayerWithLoRA._instep_joined = None
    BaseLinearLayerWithLoRA.apply = apply_joined


def obstacles(config: Any) -> list[str]:
    """Return why no layer of an engine with this configuration can be joined; empty if they can."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.version import __version__

    lora, on_gpu = config.lora_config, current_platform.is_cuda()
    asked = config.additional_config.get(CONFIG) if isinstance(config.additional_config, dict) else None
    found = {
        f"no --additional-config with {CONFIG} = {FORM}": asked != FORM,
        f"vLLM {__version__}": minor_version() not in VERSIONS,
        f"{lora.max_loras} adapters at once": lora.max_loras != 1,
        "fully sharded adapters": lora.fully_sharded_loras,
        "adapters on a separate stream": envs.VLLM_LORA_ENABLE_DUAL_STREAM,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
        "another device": not on_gpu and not current_platform.is_cpu(),
        "no Triton": on_gpu and not HAS_TRITON,
        f"a rank of {lora.max_lora_rank}": on_gpu and lora.max_lora_rank not in RANKS,
    }
    return [reason for reason, there in found.items() if there]


def _rows_of_a(method: Any, layer: torch.nn.Module, num_slices: int) -> int:
    """Return how many extra rows of memory the weight of this layer needs."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    config = get_current_vllm_config_or_none()
    if config is None or config.lora_config is None or type(method) is not UnquantizedLinearMethod:
        return 0
    if type(layer) not in _pairs().values() or obstacles(config):
        return 0
    return num_slices * config.lora_config.max_lora_rank


@functools.cache
def _pairs() -> dict[type, type]:
    """Yield vLLM's layers with adapters, and the layers below them that are known here."""
    from vllm.lora import layers as lora
    from vllm.model_executor.layers import linear

    return {
        lora.ColumnParallelLinearWithLoRA: linear.ColumnParallelLinear,
        lora.MergedColumnParallelLinearWithLoRA: linear.MergedColumnParallelLinear,
        lora.QKVParallelLinearWithLoRA: linear.QKVParallelLinear,
        lora.MergedQKVParallelLinearWithLoRA: linear.QKVParallelLinear,
        lora.RowParallelLinearWithLoRA: linear.RowParallelLinear,
    }


def join_all(manager: Any) -> None:
    """Join the layers of a model that fit, and log their number, or why there are none."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    reasons = obstacles(config) if config is not None else ["no configuration"]
    if reasons:
        logger.info("instep: vLLM's own kernels for adapters, because there is %s", ", ".join(reasons))
        return
    refusals = {name: refusal for name, layer in manager.modules.items() if (refusal := join(layer))}
    num = len(manager.modules)
    logger.info("instep: base and adapter in one product in %d of %d layers", num - len(refusals), num)
    for refusal in dict.fromkeys(refusals.values()):
        first = next(name for name, why in refusals.items() if why == refusal)
        logger.info("instep: vLLM's own kernels for the adapters of such as %s: %s", first, refusal)
    if not refusals:
        for wrapper in manager.punica_wrapper_mapping.values():
            _spare_metadata(wrapper)


def join(layer: Any) -> str:
    """Make A of a layer rows of its base's memory, and its B one tensor; or return why that is not possible."""
    base = getattr(layer, "base_layer", None)
    memory = getattr(base, _MEMORY, None)
    a, b = getattr(layer, "lora_a_stacked", ()), getattr(layer, "lora_b_stacked", ())
    if type(base) is not _pairs().get(type(layer)) or not (a and isinstance(a, tuple) and isinstance(b, tuple)):
        return "another kind of layer"
    if memory is None or not _holds(base, memory):
        return "its weight was moved or quantized"
    slices, rank, num_inputs = [t.shape[2] for t in b], a[0].shape[2], memory.shape[1]
    num_outputs = sum(slices)
    dtypes = {memory.dtype, *(t.dtype for t in (*a, *b))}
    if tuple(slices) != tuple(layer.output_slices) or len(a) != len(b):
        return f"slices {slices}"
    if any(t.shape[:2] != (1, 1) for t in (*a, *b)) or any(t.shape[2:] != (rank, num_inputs) for t in a):
        return "buffers of another shape"
    if len(dtypes) > 1 or (memory.is_cuda and memory.dtype not in (torch.bfloat16, torch.float16)):
        return f"dtypes {sorted(map(str, dtypes))}"
    if memory.is_cuda and (len(slices) > 3 or any(size % COLUMNS for size in slices)):
        return f"slices {slices}"
    num_rows = num_outputs + len(a) * rank
    if len(base.weight) not in (0, num_outputs) or num_rows > len(memory):
        return "its memory has no room"
    memory[num_outputs:].zero_()
    joined, whole_b = memory[:num_rows], torch.zeros(num_outputs, rank, dtype=memory.dtype, device=memory.device)
    layer.lora_a_stacked = tuple(part[None, None] for part in joined[num_outputs:].split(rank))
    layer.lora_b_stacked = tuple(part[None, None] for part in whole_b.split(slices))
    layer._instep_joined, layer._instep_b = joined, whole_b
    layer._instep_tokens = layer.punica_wrapper._token_lora_indices  # -1: the token has no adapter
    return ""


def _holds(base: Any, memory: torch.Tensor) -> bool:
    """Return whether the base's weight is still the first rows of its memory, and vLLM computes torch's product."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if type(base.quant_method) is not UnquantizedLinearMethod:
        return False
    gemm = getattr(base.quant_method, "_gemm_impl", utils.default_unquantized_gemm)  # 0.26 has one for each platform
    if gemm not in (utils.default_unquantized_gemm, utils.cpu_unquantized_gemm):
        return False
    weight = base.weight
    if weight.device.type == "cpu" and not weight.numel():  # it was packed; its memory stays as it was loaded
        return True
    return weight.data_ptr() == memory.data_ptr() and weight.stride() == memory.stride()


def _spare_metadata(wrapper: Any) -> None:
    """Skip the tables that only vLLM's kernels read.

    Otherwise each start or end of a request would wait for the GPU.
    """
    for name in ("token_mapping_meta", "prompt_mapping_meta"):
        if (meta := getattr(wrapper, name, None)) is not None:
            meta.prepare_tensors = lambda mapping: None


# ---- the kernel ------------------------------------------------------------------------------------------------------


def add_adapter(
    y: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, slices: list[int], rank: int
) -> torch.Tensor:
    """Return `y_W + bias + B y_A` for the tokens that have the adapter, `y_W + bias` for others.

    Args:
        y: `[num_tokens, sum(slices) + len(slices) * rank]`, the products with W and with A of each slice.
        b: `[sum(slices), rank]`.
        bias: `[sum(slices)]`.
        tokens: `[at least num_tokens]`, negative for a token without the adapter.

    Returns:
        `[num_tokens, sum(slices)]`, contiguous.
    """
    if y.is_cuda:
        return _on_gpu(y, b, bias, tokens, slices, rank)
    num_outputs = sum(slices)
    out = y[:, :num_outputs].clone()
    if bias is not None:
        out += bias
    has = (tokens[: len(y)] >= 0)[:, None]
    low = torch.where(has, y[:, num_outputs:], 0)
    parts = out.split(slices, 1), b.split(slices), low[:, : len(slices) * rank].split(rank, 1)
    for part, of_b, of_low in zip(*parts, strict=True):
        part += of_low @ of_b.T
    return out


def _fake(
    y: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, slices: list[int], rank: int
) -> torch.Tensor:
    return y.new_empty(y.shape[0], sum(slices))


def _on_gpu(
    y: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, slices: list[int], rank: int
) -> torch.Tensor:
    from instep_engine.vllm.fast.kernels import add_low_rank

    num_tokens, num_outputs = y.shape[0], sum(slices)
    out = torch.empty(num_tokens, num_outputs, dtype=y.dtype, device=y.device)
    if not num_tokens:
        return out
    if y.stride(1) != 1:
        y = y.contiguous()
    assert b.is_contiguous() and y.shape[1] == num_outputs + len(slices) * rank
    ends = [sum(slices[: i + 1]) for i in range(2)]  # where the second and the third slice begin
    rows = 16 if num_tokens <= 16 else 32 if num_tokens <= 128 else 64
    grid = (num_outputs // COLUMNS, -(-num_tokens // rows))
    add_low_rank[grid](
        out, y, b, b if bias is None else bias, tokens, num_tokens, len(tokens), num_outputs, y.stride(0), *ends,
        RANK=rank, HAS_BIAS=bias is not None, ROWS=rows, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


if not hasattr(torch.ops.vllm, "instep_add_adapter"):
    direct_register_custom_op(op_name="instep_add_adapter", op_func=add_adapter, fake_impl=_fake)
