"""What runs on the ranks of `test_routing_replay.py`, and the micro-batches with their routed experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from instep.errors import RolloutError
from instep.models.shape import num_experts
from instep.training.own_choices import CHOSEN, OwnChoices
from instep.types import TokenBatch
from tests.distributed.megatron_layouts import CUDA, LAYOUTS, MODELS
from tests.distributed.megatron_runs import make_backend, micro_batches, weighted_loss


def routed_batches(model: str) -> list[TokenBatch]:
    """The micro-batches of a step; each token has two different experts at random in every layer."""
    random, config, batches = np.random.default_rng(3), MODELS[model], micro_batches(0)
    sizes = config.num_hidden_layers, num_experts(config.to_dict())
    for batch in batches:
        batch.sample_columns["routed_experts"] = [
            random.random((n, *sizes)).argsort(-1)[..., :2].astype(np.uint8) for n in batch.total_lengths.tolist()
        ]
    return batches


def backend_on_rank(root: Path, layout: str, **more):
    """`make_backend` on a rank of a `RankPool`."""
    if not CUDA:
        from instep.training.megatron import cpu_platform

        cpu_platform.install()  # before the first import of megatron.core
    return make_backend(root, layout, **more)


def replayed(root: Path, layout: str, more: dict) -> dict:
    """On a rank: log-probs with replay, without, and the loss and the gradient norm of a step with replay."""
    backend, folder = backend_on_rank(root, layout, **more)
    backend.load_hf(folder)
    p, batches = backend.parallel, routed_batches(LAYOUTS[layout][1])
    mine = batches[p.dp_rank * 4 // p.dp_size : (p.dp_rank + 1) * 4 // p.dp_size]
    scores = backend.forward_only(mine)
    own = backend.forward_only([batch.without_routes() for batch in mine])
    outputs = backend.forward_backward(mine, weighted_loss)
    norm = backend.optimizer_step(0.0).grad_norm
    return dict(output=(p.dp_rank if p.is_output_rank else None, scores, own, outputs), norm=norm)


def own_choices_replayed(root: Path) -> list[tuple[float, float]]:
    """On a stage of a pipeline: loss (0 but on the last stage) and gradient norm of a step after the routers have
    changed, with the experts that were noted before, with the same ones as an engine's, and with new ones."""
    backend, folder = backend_on_rank(root, "pp2-moe")
    from instep.training.megatron.router import Router

    backend.load_hf(folder)
    choices = OwnChoices(SimpleNamespace(use_routing_replay=True, use_rollout_routing_replay=False), "actor")
    parts = micro_batches(0)
    noted = choices.noting(parts)
    backend.forward_only(noted)
    engines = []
    for part in noted:
        chosen = part.sample_columns[CHOSEN]
        rows = np.tile(np.arange(2), (part.tokens.numel(), 4, 1))  # other stages' layers: any two experts
        for layer, experts in chosen.items():
            rows[:, layer - 1] = experts.cpu().numpy()
        split = np.split(rows, part.total_lengths.cumsum(0)[:-1])
        columns = {**part.without_routes().sample_columns, "routed_experts": split}
        engines.append(replace(part, sample_columns=columns))
    torch.manual_seed(0)
    for module in (m for chunk in backend.chunks for m in chunk.modules() if isinstance(m, Router)):
        module.weight.data += torch.randn_like(module.weight)
    out = []
    for batches in (choices.replayed(parts), engines, choices.replayed(parts)):  # nothing is kept for the third
        losses = backend.forward_backward(batches, weighted_loss)
        norm = backend.optimizer_step(0.0).grad_norm
        out.append((sum(float(o.loss) for o in losses or ()), norm))
    return out


def without_routes_recorded(root: Path) -> None:
    backend, _ = backend_on_rank(root, "ep2")
    batch = routed_batches("moe")[0]
    batch.sample_columns["routed_experts"][0][:] = 0
    try:
        backend.forward_only([batch])
    except RolloutError as error:
        assert "--enable-return-routed-experts" in error.remedy
        raise
