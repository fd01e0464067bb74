"""Weights that vLLM packs for its CPU kernels, and does not pack again in a reload."""

from __future__ import annotations

from typing import Any

import torch


class CpuPacking:
    """Packing of `model`: call `undo` before a reload, and `redo` after it."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._kernels: list[tuple[Any, Any]] = []  # the methods of experts, and their kernels

    def undo(self) -> None:
        """Undo the packing: experts are packed only with a new kernel, and latent attention has dropped its weights."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self._model.modules():
            if getattr(layer, "_cpu_skip_gemm_dispatch", False) and not layer.weight.numel():
                blank = torch.empty_like(get_layerwise_info(layer).restore_metadata[0]["weight"], device="cpu")
                layer.weight = torch.nn.Parameter(blank, requires_grad=False)
        methods = [getattr(layer, "quant_method", None) for layer in self._model.modules()]
        self._kernels = [(m, m.moe_kernel) for m in methods if getattr(m, "moe_kernel", None) is not None]
        for method, _ in self._kernels:
            method.moe_kernel = None

    def redo(self) -> None:
        """Give experts their kernels, and pack a tied lm_head again: it receives no separate tensor."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        for layer in self._model.modules():
            if "cpu_linear" in layer.__dict__ and layer.weight.numel():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
