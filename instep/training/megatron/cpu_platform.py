"""Replacements for the parts of `torch.cuda` that Megatron-Core 0.16.x always calls, so that it runs on a CPU.

A worker process that trains on the CPU calls `install()` before its first import of `megatron.core`; it is an error if
CUDA is available. It replaces, for the life of the process:

- `torch.cuda.current_device`, used as `device=`: the CPU device;
- streams, events, `synchronize`, `empty_cache`: nothing to do;
- the CUDA random-number state, kept by `tensor_parallel.random`: the CPU generator's;
- `maybe_move_tensor_to_cpu`, which leaves sizes of an all-to-all on the CPU as tensors: numbers;
- collectives over parts of different sizes, which gloo does not have;
- `jit_fuser` (torch.compile of tiny functions): off.

`scope()` is entered around calls into Megatron. It also turns `device="cuda"` literals (`schedules.py`, `optimizer.py`)
into CPU and makes `Tensor.type()` return `torch.cuda.FloatTensor`, which the optimizers compare with. It is off
elsewhere, because it costs time on every torch call and reports a wrong type.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from instep.errors import ConfigError

_CPU = torch.device("cpu")
_installed = False


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event of a device without streams."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    wait_stream = wait_event = synchronize = record = wait = __init__


def install() -> None:
    """Install the replacements; once per process, later calls do nothing.

    Raises:
        ConfigError: CUDA is available.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        what = "the megatron train backend cannot run on the CPU of a machine with CUDA"
        raise ConfigError(what, where="--device cpu", remedy="train on the GPU, or set CUDA_VISIBLE_DEVICES= (empty)")
    assert "megatron.core" not in sys.modules, "it has already imported the original functions"
    stream, cuda = _Stream(), torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _Stream

    compiled = torch.compile
    # Modules that `megatron.core` itself imports have already imported `jit_fuser` by name; for all others it is off.
    torch.compile = lambda model=None, **how: compiled(**how) if model is None else model  # type: ignore[assignment]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiled
    jit.disable_jit_fuser()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import token_dispatcher

    _gather_any_sizes(mappings)

    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, record_stream=False: (
        x.numpy() if as_numpy and torch.is_tensor(x) else x
    )
    _installed = True


def _gather_any_sizes(mappings: Any) -> None:
    """Replace Megatron's collectives over parts of different sizes, which experts on several ranks need.

    Megatron's own collectives still handle parts of one size.
    """
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def any_gather(part: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        padded = part.new_zeros(max(sizes), *part.shape[1:])
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:size] for p, size in zip(parts, sizes, strict=True)])

    def any_reduce_scatter(
        whole: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, None, use_global_buffer)
        total = whole.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = any_gather, any_reduce_scatter


def scope() -> contextlib.AbstractContextManager[Any]:
    """Return the context for calls into Megatron, in which `device="cuda"` is the CPU; no-op unless `install` ran."""
    return _CudaIsCpu() if _installed else contextlib.nullcontext()
