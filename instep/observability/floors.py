"""Floors: the least seconds that a part of a step can take, from its arithmetic and its memory traffic.

FLOPs of training are 6 N per token plus attention (N: the weights that multiply a token; the output layer counts for
response tokens only). Recomputation does not count. Each decoding step reads every weight once, and for each token the
keys and values of its sequence. All functions are pure; a part with an unknown floor has no floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep.models.sizes import shape_in

Samples = Sequence[tuple[int, int]]  # prompt tokens and response tokens of each

OPTIMIZER_BYTES = 28  # per weight: AdamW reads gradient, weight and moments, and writes all but the gradient, in fp32


@dataclass(frozen=True)
class Peak:
    """The peak rates of a device.

    Attributes:
        flops: dense, per second, in the dtype of the weights.
        memory: bytes per second, read and written.
        host: bytes per second to or from the host's memory; peer: to another GPU of the host.
    """

    name: str
    flops: float
    memory: float
    host: float
    peer: float


# Published figures: bf16 without sparsity, HBM, PCIe and NVLink in one direction.
CARDS = {
    "H100": Peak("H100", 989e12, 3.35e12, 64e9, 450e9),
    "H200": Peak("H200", 989e12, 4.8e12, 64e9, 450e9),
    "A100": Peak("A100", 312e12, 2.0e12, 32e9, 300e9),
}


def peak_of(machine: Mapping[str, Any]) -> Peak | None:
    """Return the peak of the device in `machine` (from `training/profile.py`); None if it is unknown."""
    if machine["card"]:
        return next((peak for name, peak in CARDS.items() if name in machine["card"]), None)
    memory = float(machine["memory"])
    return Peak("this CPU, measured", float(machine["flops"]), memory, memory / 2, memory / 2)


@dataclass(frozen=True)
class Model:
    """The facts about a decoder that the floors need.

    Attributes:
        parameters: weights, without the token embeddings; all experts of a mixture count.
        active: the weights that multiply one token; head: those of the output layer.
        attention: forward FLOPs of attention for a sequence, divided by its length squared.
        kv_bytes: of keys and values, per token.
    """

    parameters: float
    active: float
    head: float
    attention: float
    kv_bytes: float
    bytes_per_weight: int

    @classmethod
    def of(cls, config: Mapping[str, Any], bytes_per_weight: int) -> Model | None:
        """Return the model of a config.json; None if its shape is unknown."""
        if (shape := shape_in(config)) is None:
            return None
        values = shape.cached or 2 * shape.keys
        return cls(
            float(shape.total - (0 if shape.tied else shape.embedding)),
            float(shape.used),
            float(shape.embedding),
            2.0 * shape.attending * shape.queries,  # scores and values, half of each as it is causal
            float(shape.attending * int(values) * bytes_per_weight),
            bytes_per_weight,
        )

    def forward_flops(self, samples: Samples) -> float:
        """Return the FLOPs of one forward pass over all samples, with logits of the responses."""
        lengths = [prompt + response for prompt, response in samples]
        layers = 2 * (self.active - self.head) * sum(lengths) + self.attention * sum(n * n for n in lengths)
        return layers + 2 * self.head * sum(response for _, response in samples)


def training(model: Model, samples: Samples, peak: Peak, num_gpus: int, *, lora: bool = False) -> float:
    """Return the seconds of a forward and backward pass; with LoRA the base weights get no gradient."""
    return (2 if lora else 3) * scoring(model, samples, peak, num_gpus)


def scoring(model: Model, samples: Samples, peak: Peak, num_gpus: int) -> float:
    """Return the seconds of a forward pass over all samples."""
    return model.forward_flops(samples) / (peak.flops * num_gpus)


def optimizer(model: Model, peak: Peak, num_gpus: int) -> float:
    """Return the seconds of an optimizer step whose states are sharded over all GPUs."""
    return OPTIMIZER_BYTES * model.parameters / (peak.memory * num_gpus)


def decoding(model: Model, turns: Samples, peak: Peak, num_engines: int, gpus_per_engine: int) -> float:
    """Return the seconds of decoding, limited by memory or by arithmetic; prompts are already read."""
    num_gpus = num_engines * gpus_per_engine
    num_steps = max((made for _, made in turns), default=0)
    weights = num_steps * model.parameters * model.bytes_per_weight / gpus_per_engine
    cached = sum(made * read + made * made / 2 for read, made in turns) * model.kv_bytes / num_gpus
    flops = 2 * model.active * sum(made for _, made in turns)
    return max((weights + cached) / peak.memory, flops / (peak.flops * num_gpus))


def transfer(way: str, num_bytes: float, peak: Peak) -> float | None:
    """Return the seconds to transfer the weights of a sync once by `way`; None if the way's rate is unknown."""
    rates = {"shm": peak.host, "lora": peak.host, "nccl": peak.peer}
    rates |= {way: peak.memory / 2 for way in ("ipc", "lora_ipc", "single-copy")}  # read and written on one GPU
    return num_bytes / rates[way] if way in rates else None
