"""--only-train-params-name-list and --freeze-params-name-list: what is frozen stays, the rest trains as without it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from instep.errors import ConfigError
from instep.training.selection import Selection
from tests.distributed.hf_runs import make_backend, oracle_training, train, weights_of
from tests.distributed.megatron_layouts import LAYOUTS, MODELS
from tests.distributed.megatron_runs import export, make_args
from tests.distributed.megatron_runs import train as train_megatron

FROZEN = r"embed_tokens|layers\.0\."
FREEZE = Selection(("embed_tokens", r"layers\.0\."), only=False)
ONLY = Selection((r"layers\.1\.", r"model\.norm"), only=True)  # the same, where the embedding is the output layer


def selected(path: Path, selection: Selection, kw: dict) -> tuple:
    backend = make_backend(path, selection=selection, **kw)
    before = weights_of(backend)
    return train(backend, range(3)), before, weights_of(backend)


@pytest.mark.parametrize(
    "ranks, kw, selection",
    [
        (1, {}, FREEZE),
        (1, {"weight_sync": "single-copy"}, FREEZE),
        (2, {}, ONLY),
        (2, {"tensor_model_parallel_size": 2}, FREEZE),
        (2, {"weight_sync": "single-copy"}, ONLY),
    ],
    ids=["1", "1 single-copy", "dp2", "tp2", "dp2 single-copy"],
)
def test_hf_trains_what_is_selected(run_ranks, tied_checkpoint, ranks, kw, selection):
    expected, weights = oracle_training(tied_checkpoint, FROZEN)
    steps, before, after = run_ranks(selected, ranks, tied_checkpoint, selection, kw)[0]
    for (loss, norm), (oracle_loss, oracle_norm) in zip(steps, expected, strict=True):
        assert abs(loss - oracle_loss) < 1e-5 * abs(oracle_loss) and abs(norm - oracle_norm) < 1e-5 * oracle_norm
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if selection.trains(name)} and 0 < len(moved) < len(after)
    for name, weight in weights.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-4, atol=1e-5)


def wrong(path: Path, patterns: tuple[str, ...]) -> str:
    try:
        make_backend(path, selection=Selection(patterns, only=False))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_pattern_without_weights_and_one_with_all(run_ranks, tied_checkpoint):
    (text,) = run_ranks(wrong, 1, tied_checkpoint, ("norm", r"layers\.7"))
    assert r"'layers\\.7' matches no weight name" in text and "model.embed_tokens.weight" in text
    (text,) = run_ranks(wrong, 1, tied_checkpoint, ("model",))
    assert "has nothing left to train" in text and "--freeze-params-name-list" in text


def one_step(root: Path, layout: str, selection: Selection | None, more: dict) -> tuple[dict, dict]:
    """The weights before and after a step without clipping, on rank 0."""
    from instep.training.megatron import cpu_platform

    cpu_platform.install()
    from megatron.core import parallel_state

    from instep.training.megatron.backend import MegatronBackend

    parallel_state.destroy_model_parallel()
    _, model, changes = LAYOUTS[layout]
    config = AutoConfig.from_pretrained(root / model)
    options = dict(hf_config=config, device=torch.device("cpu"), dtype=torch.float32, selection=selection)
    backend = MegatronBackend(make_args(**changes, **more, clip_grad=0.0), **options)
    backend.load_hf(root / model)
    before = export(backend)
    train_megatron(backend, range(1))
    return before, export(backend)


RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize(
    "layout, more",
    [("tp2-sp-tied", {}), ("pp2-tied", {}), ("dp2-dist-opt", {}), ("dp2", RECOMPUTED), ("pp2-tied", RECOMPUTED)],
    ids=["tp2-sp", "pp2", "dp2-dist-opt", "dp2 recomputed", "pp2 recomputed"],
)
def test_megatron_trains_what_is_selected(run_ranks, tmp_path_factory, layout, more):
    """AdamW steps each weight by itself: those that are trained end where they do when all are."""
    root, model = tmp_path_factory.mktemp("megatron"), LAYOUTS[layout][1]
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(MODELS[model], dtype=torch.float32).save_pretrained(root / model)
    selection = Selection(("embedding", "self_attention"), only=False)
    before, after = run_ranks(one_step, 2, root, layout, selection, more)[0]
    _, whole = run_ranks(one_step, 2, root, layout, None, more)[0]
    frozen = {name for name in after if "embed_tokens" in name or "self_attn" in name or "input_layernorm" in name}
    assert {name for name in after if torch.equal(before[name], after[name])} <= frozen
    for name in after:
        same = before if torch.equal(before[name], after[name]) else whole
        torch.testing.assert_close(after[name], same[name], rtol=1e-6, atol=1e-7)
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
