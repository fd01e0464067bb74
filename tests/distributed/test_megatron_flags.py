"""What flags of Megatron that are handed through change on a rank; `LAYOUTS` has the same numbers with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.helpers import RankPool
from tests.distributed.megatron_layouts import CUDA, make_models
from tests.distributed.megatron_runs import make_backend, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(CUDA, reason="counts what happens on a CPU"),
]


def spy(patch: pytest.MonkeyPatch, owner: Any, name: str, see: Callable[..., Any]) -> list[Any]:
    """What `see` says of the arguments of each call."""
    seen, call = list[Any](), getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kw: (seen.append(see(*args)), call(*args, **kw))[1])
    return seen


def reductions(root: Path, on: bool) -> tuple[list[bool], int]:
    """Whether gradients are on their way when a backward pass ends, and how often their size is checked."""
    overrides = {"overlap_grad_reduce": on, "check_for_large_grads": on}
    backend, hf = make_backend(root, "dp2-dist-opt", megatron_overrides=overrides)
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    backend.load_hf(hf)
    with pytest.MonkeyPatch.context() as patch:
        under_way = spy(patch, Group, "finish_grad_sync", lambda group, *_: group.grad_reduce_handle is not None)
        checked = spy(patch, Group, "check_grads", lambda *_: True)
        train(backend, range(2))
    return under_way, len(checked)


def split_activations(root: Path, distributed: bool) -> int:
    more = {} if distributed else {"megatron_overrides": {}}
    backend, hf = make_backend(root, "tp2-recompute-distributed", **more)
    from megatron.core.tensor_parallel import random

    backend.load_hf(hf)
    with pytest.MonkeyPatch.context() as patch:
        calls = spy(patch, random, "split_tensor_into_1d_equal_chunks", lambda *_: True)
        train(backend, range(1))
    return len(calls)


def decayed_norms(root: Path, **overrides: bool) -> set[int]:
    """The widths of the norms that decay."""
    backend, _ = make_backend(root, "dp2", megatron_overrides=overrides)
    return {
        p.numel()
        for group in backend.optimizer.param_groups
        if group["wd_mult"]
        for p in group["params"]
        if p.ndim == 1
    }


class Clones(TorchDispatchMode):
    """Counts copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def clones_of_embeddings(root: Path, **overrides: bool) -> int:
    backend, _ = make_backend(root, "tp2-sp", megatron_overrides=overrides)
    with Clones() as clones, torch.no_grad():
        backend.chunks[0].embedding(torch.arange(8)[None], None)
    return clones.count


def effects(root: Path) -> dict[str, tuple[Any, Any]]:
    """Without and with each flag."""
    from instep.training.megatron import cpu_platform

    cpu_platform.install()
    return {
        "--overlap-grad-reduce and --check-for-large-grads": tuple(reductions(root, on) for on in (False, True)),
        "--distribute-saved-activations": tuple(split_activations(root, on) for on in (False, True)),
        "--apply-wd-to-qk-layernorm": tuple(decayed_norms(root, apply_wd_to_qk_layernorm=on) for on in (False, True)),
        "--no-clone-scatter-output-in-embedding": tuple(
            clones_of_embeddings(root, clone_scatter_output_in_embedding=on) for on in (True, False)
        ),
    }


def test_each_flag_has_its_effect(tmp_path):
    make_models(tmp_path)
    with RankPool(2, timeout=500, megatron=True) as pool:
        ranks = pool.run(effects, tmp_path)
    for found in ranks:
        without, both = found["--overlap-grad-reduce and --check-for-large-grads"]
        assert without == ([False] * 2, 0)
        assert both == ([False, True], 2)  # the first step tells the order in which gradients come
        without, split = found["--distribute-saved-activations"]
        assert without == 0 and split == 2 * 4  # layers, micro-batches
        assert found["--apply-wd-to-qk-layernorm"] == (set(), {16})  # the width of a head
        cloned, bare = found["--no-clone-scatter-output-in-embedding"]
        assert cloned == bare + 1
