"""The megatron backend with moments in 8 bits: what it computes, its checkpoints, and what goes on from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from instep.training.hf.optimizer import BLOCK, EIGHT_BITS, MOMENTS, PiecewiseAdamW
from tests.distributed import megatron_runs
from tests.distributed.helpers import RankPool
from tests.distributed.megatron_layouts import LR, NUMBERS, WEIGHT_DECAY

BITS: dict[str, Any] = {"optimizer": EIGHT_BITS}
SPREAD = {"use_distributed_optimizer": True}
TP2 = {"tensor_model_parallel_size": 2}
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "dp2 8": (torch.bfloat16, BITS | SPREAD),
    "dp2 32": (torch.bfloat16, SPREAD),
    "dp2 8 torch": (torch.bfloat16, BITS | SPREAD | {"ckpt_format": "torch"}),
    "dp2 8 fp32": (torch.float32, BITS | SPREAD),
    "dp2 32 fp32": (torch.float32, SPREAD),
    "tp2 8": (torch.float32, BITS | SPREAD | TP2),
    "tp2 32": (torch.float32, SPREAD | TP2),
    "tp2 8 plain": (torch.bfloat16, BITS | TP2),
}


def made(root: Path, dtype: torch.dtype, more: dict[str, Any]) -> tuple[Any, Path]:
    from instep.training.megatron import cpu_platform

    cpu_platform.install()  # before the first import of megatron.core
    return megatron_runs.make_backend(root, "one", dtype=dtype, **more)


def states(backend: Any) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds of the optimizer, of the parameters of this rank; collective."""
    from instep.training.megatron import checkpoint

    named = {p: n for chunk in backend.chunks for n, p in chunk.named_parameters()}
    found = checkpoint.whole_states(backend.optimizer, list(named))
    return {f"{name}.{named[p]}": value.clone() for p, name, value in found if value is not None}


def goes_on(backend: Any) -> dict[str, Any]:
    losses = megatron_runs.train(backend, range(2, 4))
    return {"losses": losses, "weights": megatron_runs.export(backend)}


def _run(root: Path, name: str) -> dict[str, Any]:
    """Two steps, a checkpoint, two steps."""
    backend, hf = made(root, *RUNS[name])
    from instep.training.megatron import checkpoint

    backend.load_hf(hf)
    out = {"begun": megatron_runs.train(backend, range(2)), "states": states(backend)}
    folder = root / name
    folder.mkdir(exist_ok=True)
    backend.save(folder)
    held = [m.state[moment] for m in checkpoint.masters(backend.optimizer).values() for moment in MOMENTS]
    out["kinds"] = {(t.dtype, t.numel() >= 4096) for t in held}
    return out | goes_on(backend)


def _resume(root: Path, saved: str, name: str, park: bool = False) -> dict[str, Any]:
    backend, _ = made(root, *RUNS[name])
    backend.load(root / saved)
    out = {"states": states(backend)}
    if park:
        backend.offload()
        backend.onload()
    return out | goes_on(backend)


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, megatron=True) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A model whose matrices are large enough for 8 bits on each of two ranks, and no multiples of blocks as slices."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    sizes = NUMBERS | dict(num_hidden_layers=1, hidden_size=136, intermediate_size=300)
    config = Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "untied")
    return folder


@pytest.fixture(scope="module")
def runs(pool, root) -> Callable[[str], list[dict[str, Any]]]:
    """What the ranks of a run say, which is made when it is first asked for."""
    return functools.cache(lambda name: pool.run(_run, root, name))


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """Between two ends, as a part of the way from the start."""
    way = sum(float((theirs[n].double() - start[n].double()).square().sum()) for n in start)
    return (sum(float((ours[n].double() - w.double()).square().sum()) for n, w in theirs.items()) / way) ** 0.5


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "slim, exact", [pytest.param("dp2 8 fp32", "dp2 32 fp32", marks=pytest.mark.slow), ("tp2 8", "tp2 32")]
)
def test_8_bits_step_as_float32_does_but_for_their_noise(root, runs, slim, exact):
    start = weights_of(root / "untied")
    ours, theirs = runs(slim)[0], runs(exact)[0]
    assert ours["begun"][0][0] == theirs["begun"][0][0]  # the same weights
    assert 1e-4 < distance(ours["weights"], theirs["weights"], start) < 0.05
    assert distance(ours["weights"], runs("dp2 8 fp32")[0]["weights"], start) < 0.05  # whatever the layout
    for run in (*runs(slim), *runs("dp2 8")):
        assert run["kinds"] == {(torch.uint8, True), (torch.float32, False)}
    assert {kind for run in runs(exact) for kind, _ in run["kinds"]} == {torch.float32}


def _beside_rank(root: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Masters of three steps beside those of an optimizer of the hf backend that gets the same gradients."""
    backend, hf = made(root, torch.float32, BITS)
    backend.load_hf(hf)
    params = [p for chunk in backend.chunks for p in chunk.parameters()]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    parts = [{"params": [t for t in twins if (t.ndim > 1) == wide], "weight_decay": WEIGHT_DECAY * wide}
             for wide in (True, False)]  # fmt: skip
    args = backend.args
    options = dict(lr=LR, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps, fused=True)
    twin = PiecewiseAdamW(parts, options, eight_bits=True, offload=False)
    step = backend.optimizer.step_with_ready_grads

    def both() -> Any:
        for p, t in zip(params, twins, strict=True):
            t.grad = p.main_grad.clone()
        for group in twin.param_groups:
            group["lr"] = backend.optimizer.param_groups[0]["lr"]
        twin.step()
        return step()

    backend.optimizer.step_with_ready_grads = both
    megatron_runs.train(backend, range(3))
    return [(p.detach(), t.detach()) for p, t in zip(params, twins, strict=True)]


def test_it_is_the_optimizer_of_the_hf_backend(root):
    with RankPool(1, megatron=True) as one:
        pairs = one.run(_beside_rank, root)[0]
    assert len(pairs) > 10 and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert any(ours.numel() % BLOCK for ours, _ in pairs)


def _experts_rank(root: Path, spread: bool) -> list[tuple[dict[str, torch.Tensor], list[int]]]:
    """Weights and states after three steps with and without joined parameters, and how many are joined in each run."""
    ends = []
    for joins in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not joins:
                patch.setattr(PiecewiseAdamW, "join", lambda self, gradients: None)
            more = BITS | dict(use_distributed_optimizer=spread)
            backend, hf = megatron_runs.make_backend(root, "one-moe-grouped", dtype=torch.bfloat16, **more)
        backend.load_hf(hf)
        megatron_runs.train(backend, range(2))
        backend.offload()
        backend.onload()
        megatron_runs.train(backend, range(2, 3))
        runs = [run for opt in backend.optimizer.chained_optimizers for run in opt.optimizer._runs]
        ends.append((megatron_runs.export(backend) | states(backend), [len(run.params) for run in runs]))
    return ends


@pytest.mark.parametrize("spread", [False, True])
def test_experts_are_stepped_together_with_the_same_bits(tmp_path, spread):
    sizes = NUMBERS | dict(num_hidden_layers=2, hidden_size=128, moe_intermediate_size=64, head_dim=16, num_experts=4)
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=2, mlp_only_layers=[0], tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe-mixed")
    with RankPool(1, megatron=True) as one:
        (together, joined), (alone, none) = one.run(_experts_rank, tmp_path, spread)[0]
    assert 8 in joined and not none, "four experts of two weights"
    assert together.keys() == alone.keys() and all(torch.equal(together[n], t) for n, t in alone.items())


@pytest.mark.parametrize(
    "name",
    [
        "dp2 8",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("dp2 8 torch", "dp2 8 fp32", "tp2 8 plain")),
        "tp2 8",
    ],
)
def test_a_run_in_8_bits_goes_on_as_if_never_stopped(pool, root, runs, name):
    for straight, again in zip(runs(name), pool.run(_resume, root, name, name, True), strict=True):
        assert again["losses"] == straight["losses"]
        assert all(torch.equal(again["weights"][n], w) for n, w in straight["weights"].items())
        assert again["states"].keys() == straight["states"].keys()
        assert all(torch.equal(again["states"][n], t) for n, t in straight["states"].items())


@pytest.mark.parametrize("saved, name", [("dp2 8", "dp2 32"), ("dp2 8 torch", "dp2 32"), ("tp2 8", "tp2 32")])
def test_float32_goes_on_from_8_bits_with_the_same_moments(pool, root, runs, saved, name):
    for straight, loaded in zip(runs(saved), pool.run(_resume, root, saved, name), strict=True):
        assert all(torch.equal(loaded["states"][n], t) for n, t in straight["states"].items())
        assert loaded["losses"][0] == pytest.approx(straight["losses"][0], rel=2e-2, abs=2e-3)


@pytest.mark.parametrize(
    "saved, name",
    [
        ("dp2 32", "dp2 8"),
        ("dp2 8", "tp2 8 plain"),
        pytest.param("tp2 8 plain", "dp2 8", marks=pytest.mark.slow),
        ("tp2 32", "dp2 8 fp32"),
    ],
)
def test_8_bits_go_on_from_float32_and_from_other_ranks(pool, root, runs, saved, name):
    """Blocks lie elsewhere, so moments are rounded once more."""
    straight, loaded = runs(saved)[0], pool.run(_resume, root, saved, name)[0]  # the first rank exports
    assert loaded["losses"][0] == pytest.approx(straight["losses"][0], rel=2e-2, abs=2e-3)
    assert distance(loaded["weights"], straight["weights"], weights_of(root / "untied")) < 0.1


@pytest.mark.slow
def test_four_ranks_that_share_layers_and_states_do_so_too(root, runs):
    with RankPool(4, megatron=True) as four:
        straight = four.run(_run, root, "tp2 8")
        again = four.run(_resume, root, "tp2 8", "tp2 8", True)
    start = weights_of(root / "untied")
    assert 0 < distance(straight[0]["weights"], runs("tp2 32")[0]["weights"], start) < 0.05
    for ours, theirs in zip(again, straight, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert all(torch.equal(ours["weights"][n], w) for n, w in theirs["weights"].items())
