"""Loads weights straight into the live parameters of a model on a GPU, at the addresses that CUDA graphs know.

vLLM's own reload makes each layer anew, processes it, and copies it over the old one, which takes seconds. A model
whose weights vLLM keeps as the checkpoint has them needs none of that. The first session loads through the model's own
`load_weights`, and records which slices of which parameters each weight is copied to; later ones copy these at once.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from instep_engine.manifest import WeightMismatch

_SETS_ALL = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # of rows that only pad a vocabulary


def loads_directly(model: nn.Module, vllm_config: Any, device: torch.device) -> bool:
    """Whether vLLM keeps each weight of this model as the checkpoint has it: nothing is packed, quantized or fused."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if device.type != "cuda" or vllm_config.lora_config is not None or vllm_config.quant_config is not None:
        return False
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        processes = getattr(layer, "process_weights_after_loading", None) is not None
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return False
        if processes and (type(layer) is not Attention or any(True for _ in layer.parameters(False))):
            return False
    return True


class _Copy(NamedTuple):
    """One slice of a weight: `target` in the live parameter of a name, and where it is in the weight, in elements."""

    target: torch.Tensor
    parameter: str
    offset: int
    stride: tuple[int, ...]


class DirectLoader:
    """The loader of one model; `begin` begins a session."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._copies: dict[str, list[_Copy]] = {}  # of the weights that are plain copies
        self._written: dict[str, int] = {}

    def begin(self) -> None:
        self._written = {}  # parameter -> elements that were copied into it

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy weights into the parameters. Raises what the model's `load_weights` raises."""
        if new := {name: tensor for name, tensor in tensors.items() if name not in self._copies}:
            with _Recorder(self._model, new) as recorder:
                self._model.load_weights(iter(new.items()))
            for name, count in recorder.written:
                self._written[name] = self._written.get(name, 0) + count
            if recorder.plain:
                self._copies |= recorder.copies
        targets: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name in tensors.keys() - new.keys():
            whole = tensors[name]
            for target, parameter, offset, stride in self._copies[name]:
                source = whole.as_strided(target.shape, stride, whole.storage_offset() + offset)
                self._written[parameter] = self._written.get(parameter, 0) + target.numel()
                if source.is_contiguous() and target.is_contiguous() and source.device == target.device:
                    pairs = targets.setdefault((target.dtype, source.dtype), ([], []))
                    pairs[0].append(target)
                    pairs[1].append(source)
                else:
                    target.copy_(source)
        for into, out_of in targets.values():
            torch._foreach_copy_(into, out_of)

    def check_complete(self) -> None:
        """Raise WeightMismatch unless each parameter was written whole in this session."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        written = {id(p): self._written.get(name, 0) for name, p in self._model.named_parameters()}  # tied ones once
        for path, layer in self._model.named_modules():
            for parameter in layer.parameters(recurse=False):
                here = written[id(parameter)]
                padded = isinstance(layer, VocabParallelEmbedding) and here > 0  # to a multiple of 64 rows
                if here < parameter.numel() and not padded:
                    some = f"{here} of {parameter.numel()} elements"
                    raise WeightMismatch(f"{path} was not delivered whole ({some})", path)


class _Recorder(TorchDispatchMode):
    """Sees what is written into the parameters and buffers of a model while it loads `tensors`.

    Attributes:
        copies: by weight the plain copies of its slices; plain: whether nothing else was written.
        written: the parameters that were copied into, and how many elements.
    """

    def __init__(self, model: nn.Module, tensors: dict[str, torch.Tensor]):
        super().__init__()
        self.copies: dict[str, list[_Copy]] = {name: [] for name in tensors}
        self.plain, self.written = True, list[tuple[str, int]]()
        self._targets = _Ranges({**dict(model.named_buffers()), **dict(model.named_parameters())})
        self._sources, self._tensors = _Ranges(tensors), tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            target = self._targets.holding(args[0])
            if target is not None and func is torch.ops.aten.copy_.default:
                self._copied(target, args[0], args[1])
            elif target is not None and func not in _SETS_ALL:
                self.plain = False
        return result

    def _copied(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        self.written.append((name, target.numel()))
        weight = self._sources.holding(source)
        whole = self._tensors[weight] if weight is not None else None
        if weight is None or whole is None or source.dtype != whole.dtype or not whole.is_contiguous():
            self.plain = False
            return
        offset = (source.data_ptr() - whole.data_ptr()) // whole.element_size()
        stride = tuple(source.expand_as(target).stride())
        self.copies[weight].append(_Copy(target.detach(), name, offset, stride))


class _Ranges:
    """Finds the tensor in whose memory another one begins."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        known = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for n, t in tensors.items()]
        self._ranges = sorted(known)
        self._begins = [begin for begin, _, _ in self._ranges]

    def holding(self, tensor: torch.Tensor) -> str | None:
        place = bisect.bisect_right(self._begins, tensor.data_ptr()) - 1
        return self._ranges[place][2] if place >= 0 and tensor.data_ptr() < self._ranges[place][1] else None
