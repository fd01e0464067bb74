"""Stand-ins for packages that SGLang imports, does not use here, and that are not installed.

A CPU has no build of its kernels, and Triton is absent. A GPU host may lack FlashInfer. Call `prepare` before the first
import of SGLang, in every process. A name of an absent package can then be imported, subclassed and used as a type.
A call of it is an error.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

ON_CPU = ("sgl_kernel", "torchvision", "triton", "IPython", "gguf", "soundfile")
ON_CUDA = ("torchvision", "flashinfer", "deep_gemm", "IPython", "gguf", "soundfile")
# Whoever cannot import them does without: sgl_kernel has norms of its own, and the choice of experts has other kernels.
LEFT_OUT = ("IPython.get_ipython", "flashinfer.norm", "flashinfer.fused_moe.fused_topk_deepseek")


class _Missing(type):
    """A name of an absent package."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__module__}.{cls.__name__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        where = f"{cls.__module__}.{cls.__name__}"
        if not where.startswith("triton."):
            raise RuntimeError(f"{where} is not installed here")
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # @triton.jit
        return lambda function: function  # @triton.autotune(...)

    def __or__(cls, other: Any) -> Any:  # type: ignore[override]
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: Any) -> Any:
        return cls


def _missing(module: str, name: str) -> _Missing:
    return _Missing(name, (), {"__module__": module})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or f"{self.__name__}.{name}" in LEFT_OUT:
            raise AttributeError(name)
        return _missing(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: it answers for `absent` packages."""

    def __init__(self, absent: Sequence[str]):
        self.absent = absent

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.absent and name not in LEFT_OUT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "soundfile":
            module.__dict__["available_formats"] = dict  # mistral_common asks for them
        elif module.__name__ == "flashinfer.sampling":  # a verification of drafts calls them for top-k and top-p
            names = ("top_k_renorm_probs", "top_p_renorm_probs")
            module.__dict__.update({name: functools.partial(_renormalize, f"{name}_triton") for name in names})
        elif module.__name__ == "triton":
            arithmetic = {"cdiv": lambda a, b: -(-a // b), "next_power_of_2": lambda n: 1 << (n - 1).bit_length()}
            module.__dict__.update(arithmetic, __version__="0")


def _renormalize(name: str, probs: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Compute in SGLang's kernels for AMD's GPUs, which Triton compiles for any."""
    from sglang.kernels.ops.sampling import renorm_triton

    kept: torch.Tensor = getattr(renorm_triton, name)(probs, bound)
    return kept


def prepare() -> None:
    """Let SGLang be imported in this process. A second call changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    on_cuda = torch.version.cuda is not None
    absent = [name for name in (ON_CUDA if on_cuda else ON_CPU) if importlib.util.find_spec(name) is None]
    if "deep_gemm" in absent:  # SGLang would call its kernels
        os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "false"
    if not on_cuda:
        _prepare_cpu()
    from transformers import AutoConfig

    register = AutoConfig.register

    def accept(name: str, config: Any, exist_ok: bool = False) -> None:
        register(name, config, exist_ok=True)  # SGLang registers configurations that a newer transformers has

    AutoConfig.register = staticmethod(accept)  # type: ignore[method-assign,assignment]
    sys.meta_path.append(_Finder(absent))
    # For a debugging aid SGLang imports all of Megatron where it is installed, in every process.
    sys.modules["megatron"] = None  # type: ignore[assignment]


def _prepare_cpu() -> None:
    """Let torch and transformers note first that Triton and torchvision are absent, and drop pinned memory."""
    import torch._inductor.compile_fx  # both ask for Triton
    import torch._inductor.select_algorithm
    from torch.utils import _triton
    from transformers.utils import import_utils

    _triton.has_triton_package()
    import_utils.is_torchvision_available()
    import_utils.is_torchaudio_available()
    for name in ("empty", "zeros", "tensor", "ones"):  # torch refuses pinned memory without an accelerator
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    # 0.5.23 pins the buffer of routed experts with CUDA's own call.
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return unpinned
