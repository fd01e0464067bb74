"""What gated delta nets keep for the backward pass, and their FLOPs."""

from __future__ import annotations

from instep.models.sizes import Shape
from instep.preflight.plan.card import layer_flops
from instep.training.kernels import has_flash_linear_attention

CHUNK = 64  # tokens, see `training/delta_net.py`


def kept_by_mixers(s: Shape, e: int, tp: int, attention: float, *, cuda: bool, largest: bool = False) -> float:
    """Return bytes per token and layer of attention or a gated delta net, the mean over layers or those of the largest.

    Args:
        e: bytes of an element in computations.
        tp: ranks that share the heads.
        attention: bytes of plain attention.
        cuda: trained on GPUs, of a kind that is not known here.
    """
    if (d := s.delta) is None:
        return attention
    gated = attention + 2 * e * s.queries / tp  # the gate and the product
    # Inputs of the convolution and of its activation, and the result; the output gate, the norm's input, the product.
    delta = e * (3 * (2 * d.keys + d.values) + 3 * d.values)
    if cuda and e == 2 and has_flash_linear_attention(hopper=True):
        delta += e * (2 * d.keys + CHUNK * d.value_heads) + 4 * d.value_heads
    else:  # in float32; measured: `tests/unit/test_plan_activations.py`
        delta += 4 * (9 * d.key_dim + 6 * d.value_dim + 5 * CHUNK) * d.value_heads
    return max(gated, delta / tp) if largest else (s.attending * gated + len(d.layers) * delta / tp) / s.num_layers


def layers_flops(s: Shape, length: int) -> float:
    """Return FLOP per token of the forward pass of all layers in a sequence of `length` tokens; the states of delta
    nets, some percent, are left out."""
    if (d := s.delta) is None:
        return s.num_layers * layer_flops(s.hidden, s.ffn, s.queries, s.keys, length)
    attention = 2.0 * s.hidden * (3 * s.queries + 2 * s.keys) + 2.0 * length * s.queries
    delta = 2.0 * s.hidden * (2 * d.keys + 3 * d.values)
    return s.attending * attention + len(d.layers) * delta + s.num_layers * 6.0 * s.hidden * s.ffn
