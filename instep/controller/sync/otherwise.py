"""The error of an engine that holds the trainer's weights and computes otherwise: by how much, and where it begins."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from instep.checkpoints.hf_export import read_hf_config
from instep.controller.sync.probe import Difference, Probe
from instep.controller.sync.session import Session
from instep.engines.engine import Engine
from instep.errors import InstepError, SyncError
from instep.weights.way import OF_ADAPTERS

BEGINS = {"bf16": 0.05, "fp32": 1e-3}  # a layer whose output differs by more, relative to its size
# What engines and trainers have implemented differently, by the entries of config.json that ask for it.
SUSPECTS = {
    "sliding windows": ("sliding_window",),
    "the scale of rotary positions": ("rope_scaling",),
    "caps of logits": ("final_logit_softcapping", "attn_logit_softcapping"),
    "experts and their router": ("num_experts", "num_local_experts", "n_routed_experts"),
    "linear attention": ("linear_num_key_heads",),
    "latent attention": ("kv_lora_rank",),
    "scales of embeddings and residuals": ("embedding_multiplier", "residual_multiplier", "logits_scaling"),
}


def computes_otherwise(
    session: Session,
    engine: Engine,
    way: str,
    probe: Probe,
    gap: Difference,
    rounding: Difference,
    tolerance: float,
    *,
    shown: bool,
) -> SyncError:
    """Return the error of `engine`, whose scores of the probe differ by `gap` though its weights are right.

    Args:
        shown: its digests or the golden path have shown that its weights are; else only that they were sent so.
    """
    holds = "its weights are the trainer's" if shown else "what was sent is what the trainer has"
    times = f"{gap.rms / rounding.rms:.0f} times what rounding explains" if rounding.rms else "without any rounding"
    what = (
        f"trainer and {engine.name} compute differently, although {holds}: on {probe.num_scores} tokens "
        f"their log-probs differ by {gap.mean:.3g} nats in the mean and {gap.largest:.3g} at most, {times} "
        f"(relative {gap.rms:.3g}, allowed {tolerance:.3g}). "
    )
    if way in OF_ADAPTERS:
        what += "The engine has another base than --hf-checkpoint or another alpha, or its requests do not use it. "
    remedy = "a difference that stays with --precision fp32 is no rounding; compare versions of vLLM and transformers"
    return SyncError(
        what + _where_it_begins(session, engine, probe),
        where=engine.url,
        remedy=f"{remedy}; --sync-tolerance {1.5 * gap.rms:.2g} accepts it (the loss can correct it: --use-tis)",
    )


def _where_it_begins(session: Session, engine: Engine, probe: Probe) -> str:
    ours = theirs = None
    with contextlib.suppress(InstepError):  # the difference is what has to be said
        timeout = session.seconds_left()
        theirs = engine.kind.layer_sketches(engine, [list(text.tokens) for text in probe.texts], timeout=timeout)
        if theirs is not None:
            with session.turns.borrowed(session, optimizer=False):
                ours = session.actor.layer_sketches(probe.batches(), timeout)
    if theirs is None or ours is None:
        return _suspects(read_hf_config(Path(session.args.hf_checkpoint)))
    differences = {place: relative_difference(ours[place], theirs[place]) for place in sorted(ours)}
    limit = BEGINS[session.args.precision]
    first = next((place for place, found in differences.items() if found > limit), None)
    if first is None:
        return f"All layers agree (to {max(differences.values()):.1g}): the last norm or the output layer differs."
    before = f"; the layers before it agree to {max(list(differences.values())[:first]):.1g}" if first else ""
    return f"It begins in layer {first}, whose output differs by {differences[first]:.1%}{before}."


def relative_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Return |a - b| / |a| of what a layer returns on two sides; infinite where one is not finite."""
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    found = float((a - b).norm() / a.norm())
    return found if found == found else float("inf")


def _suspects(config: Mapping[str, Any]) -> str:
    """Which parts of this model to suspect first."""
    found = [what for what, names in SUSPECTS.items() if any(config.get(name) for name in names)]
    return f"This engine cannot say in which layer. Suspect first: {', '.join(found) or 'the attention'}."
