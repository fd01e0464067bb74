"""Base and adapter in one product (`fast/adapter.py`): the op, the layers that it takes, vLLM's log-probs.

On a GPU tests/gpu/test_lora.py runs the kernel. The whole path runs in tests/e2e/test_lora_sync.py, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("slices", [[6], [4, 4], [8, 2, 2]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_op_adds_to_tokens_that_have_the_adapter(slices: list[int], has_bias: bool) -> None:
    import instep_engine.vllm.fast.adapter  # noqa: F401

    num, rank, width = 5, 3, sum(slices)
    generator = torch.Generator().manual_seed(0)
    x, w, a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((num, 7), (width, 7), (len(slices) * rank, 7), (width, rank))
    )
    bias = torch.randn(width, generator=generator, dtype=torch.float64) if has_bias else None
    a[:, 0] = float("inf")  # of a token without the adapter nothing of A may be left, whatever it was
    x[1], x[3] = 0, 0
    x[:, 0] = 0
    x[1, 0] = x[3, 0] = 1
    tokens = torch.tensor([0, -1, 0, -1, 0, -1, -1])  # longer than the batch
    y = torch.nn.functional.linear(x, torch.cat([w, a]))
    y[[0, 2, 4], width:] = x[[0, 2, 4], 1:] @ a[:, 1:].T
    before = y.clone()
    out = torch.ops.vllm.instep_add_adapter(y, b, bias, tokens, slices, rank)
    want = torch.nn.functional.linear(x, w, bias)
    for i, part in enumerate(torch.arange(width).split(slices)):
        for token in (0, 2, 4):
            low = a[i * rank : (i + 1) * rank, 1:] @ x[token, 1:]
            want[token, part] += b[part] @ low
    torch.testing.assert_close(out, want)
    assert out.is_contiguous() and torch.equal(y.nan_to_num(), before.nan_to_num())  # nothing else was written


def test_the_op_is_one_to_a_compiler() -> None:
    from torch import library
    from torch._subclasses import FakeTensorMode

    import instep_engine.vllm.fast.adapter  # noqa: F401

    with FakeTensorMode():
        y, b, tokens = torch.empty(5, 12), torch.empty(6, 3), torch.empty(9, dtype=torch.long)
        out = torch.ops.vllm.instep_add_adapter(y, b, None, tokens, [4, 2], 3)
        assert out.shape == (5, 6) and out.is_contiguous()
    real = (torch.randn(5, 12), torch.randn(6, 3), None, torch.zeros(9, dtype=torch.long), [4, 2], 3)
    results = library.opcheck(torch.ops.vllm.instep_add_adapter.default, real)
    assert set(results.values()) == {"SUCCESS"}


def config(**fields: Any) -> Any:
    lora = {"max_loras": 1, "fully_sharded_loras": False, "max_lora_rank": 16, **fields.pop("lora", {})}
    return SimpleNamespace(lora_config=SimpleNamespace(**lora), additional_config={"instep_adapter": 1}, **fields)


def test_configurations_that_stay_with_vllm_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version

    from instep_engine.vllm.fast.adapter import obstacles

    assert obstacles(config()) == []
    assert obstacles(config(lora={"max_loras": 2})) == ["2 adapters at once"]
    assert obstacles(config(lora={"fully_sharded_loras": True})) == ["fully sharded adapters"]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert obstacles(config()) == ["batch invariance"]
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    unasked = config()
    unasked.additional_config = {}
    assert obstacles(unasked) == ["no --additional-config with instep_adapter = 1"]
    monkeypatch.setattr(vllm.version, "__version__", "0.33.1+cu130")
    assert obstacles(config()) == ["vLLM 0.33.1+cu130"]


def layer(num_outputs: int = 6, num_rows: int = 3, slices: tuple[int, ...] = (4, 2)) -> Any:
    """A packed layer with adapters of rank 2 as vLLM makes it, whose weight has `num_rows` more rows in memory."""
    from vllm.lora.layers import MergedColumnParallelLinearWithLoRA
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, UnquantizedLinearMethod

    base = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    made = MergedColumnParallelLinearWithLoRA.__new__(MergedColumnParallelLinearWithLoRA)
    for module in (base, made):
        torch.nn.Module.__init__(module)
    memory = torch.randn(num_outputs + num_rows, 5)
    base.weight = torch.nn.Parameter(memory[:num_outputs], requires_grad=False)
    base._instep_rows = memory
    base.quant_method = UnquantizedLinearMethod.__new__(UnquantizedLinearMethod)
    made.base_layer, made.output_slices = base, slices
    made.lora_a_stacked = tuple(torch.zeros(1, 1, 2, 5) for _ in slices)
    made.lora_b_stacked = tuple(torch.zeros(1, 1, size, 2) for size in slices)
    made.punica_wrapper = SimpleNamespace(_token_lora_indices=torch.zeros(9, dtype=torch.long))
    return made


def test_vllms_buffers_are_views_of_what_is_multiplied() -> None:
    from instep_engine.vllm.fast.adapter import join

    made = layer(num_rows=4)
    weight = made.base_layer.weight.clone()
    assert join(made) == ""
    for i in range(2):
        made.lora_a_stacked[i][0, 0] = i + 1
        made.lora_b_stacked[i][0, 0] = i + 3
    assert torch.equal(made._instep_joined[:6], weight)
    assert made._instep_joined[6:, 0].tolist() == [1, 1, 2, 2]
    assert made._instep_b[:, 0].tolist() == [3, 3, 3, 3, 4, 4]
    assert (
        made.base_layer._instep_rows.data_ptr() == made._instep_joined.data_ptr() == made.base_layer.weight.data_ptr()
    )


def test_a_joined_layer_is_one_graph_for_all_lengths() -> None:
    """As vLLM compiles it. The buffers are inputs of the graph, so that it reads an adapter that comes later."""
    from instep_engine.vllm.fast.adapter import install, join

    install()
    made = layer(num_rows=4)
    made.tp_size, made._enable_aux_cuda_stream = 1, False
    assert join(made) == ""
    weight, bias = made.base_layer.weight.clone(), torch.randn(6)
    compiled = torch.compile(lambda x: made.apply(x, bias), fullgraph=True, backend="aot_eager", dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (3, 5, 9):
        for buffer in (*made.lora_a_stacked, *made.lora_b_stacked):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        x = torch.randn(num_tokens, 5, generator=generator)
        low = [x @ a[0, 0].T @ b[0, 0].T for a, b in zip(made.lora_a_stacked, made.lora_b_stacked, strict=True)]
        want = x @ weight.T + bias + torch.cat(low, 1)
        torch.testing.assert_close(compiled(x), want)
        torch.testing.assert_close(made.apply(x[None], bias), want[None])
    made.punica_wrapper._token_lora_indices.fill_(-1)
    torch.testing.assert_close(compiled(x), x @ weight.T + bias)


def test_layers_that_do_not_fit_are_named() -> None:
    from instep_engine.vllm.fast.adapter import join

    other = layer(num_rows=4)
    other.base_layer = torch.nn.Linear(5, 6)
    moved, short, typed, several = layer(num_rows=4), layer(num_rows=3), layer(num_rows=4), layer(num_rows=4)
    moved.base_layer.weight = torch.nn.Parameter(moved.base_layer.weight.clone(), requires_grad=False)
    typed.lora_b_stacked = tuple(b.bfloat16() for b in typed.lora_b_stacked)
    several.lora_a_stacked = tuple(torch.zeros(2, 1, 2, 5) for _ in range(2))
    assert join(other) == "another kind of layer"
    assert join(moved) == "its weight was moved or quantized"
    assert join(short) == "its memory has no room"
    assert join(typed) == "dtypes ['torch.bfloat16', 'torch.float32']"
    assert join(several) == "buffers of another shape"
    plain = layer(num_rows=4)
    del plain.base_layer._instep_rows
    assert join(plain) == "its weight was moved or quantized"


@pytest.mark.slow
def test_log_probs_are_those_of_vllms_own_kernels(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In float32 to 1e-5: without an adapter, with it, in a batch of both, and after swaps."""
    from benchmarks.lora_engine import main

    code = main(["--only", "stock", "joined", "--rank", "8", "--device", "cpu", "--models", str(tmp_path)])
    out = capfd.readouterr().out
    assert code == 0, out
    assert "base and adapter in one product in 8 of 8 layers" in out
    found = json.loads(out[out.index('{\n "headline"') : out.rindex("}") + 1])["log_probs"]
    assert found.keys() == {"none", "one", "mixed", "other", "again"}
    assert min(part["adapter"] for part in found.values()) > 0.01
