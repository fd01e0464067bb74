"""One engine of the plan, of any kind: its model, its GPUs, and its flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from instep.engines.dialect import Parallel
from instep.engines.topology import ServerRole
from instep.models.hub import name_of

# vLLM's own limit for a start, in seconds: a day. The flags of a run bound the start of its engines and each load
# of its trainer. The run enforces these bounds itself, and ends its engines.
LONGEST_START = 86_400
_CONNECTOR_KEY = re.compile(r'"kv_connector"\s*:\s*"(\w+)"')
# The router's names of vLLM's connectors, by which prefill engines pass the KV cache to decode engines.
KV_CONNECTORS = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "MooncakeConnector": "mooncake",
    "MoRIIOConnector": "moriio",
}


@dataclass(frozen=True, order=True)
class Slot:
    """One GPU (or one CPU process) of one node."""

    node: int
    gpu: int


@dataclass(frozen=True)
class Addresses:
    """The addresses of an engine, known when it starts.

    Attributes:
        host, port: where its HTTP server listens, on its first node.
        master_host: the address of its first node for its other nodes.
        master_port: where its ranks meet, if it has several nodes.
        rpc_port: where its data-parallel replicas meet, if they are on several nodes.
        side_channel_port: the first of `num_side_channel_ports` on each of its nodes.
    """

    host: str
    port: int | str
    master_host: str = ""
    master_port: int | str = 0
    rpc_port: int | str = 0
    side_channel_port: int | str = 0


@dataclass(frozen=True)
class EngineSpec:
    """One engine of the plan.

    Attributes:
        index: its number among all engines of the run; its name is `engine <index>`.
        model: the name of the model that it serves; path: the model's Hugging Face folder.
        role: regular, prefill or decode.
        slots: its GPUs, node after node.
        parallel: how the GPUs share the work; the product of its degrees is `num_gpus`.
        words: the words of command line and overrides for `vllm serve`, by field; own: what instep adds. Neither has
            TP, addresses or nodes.
        port: of its HTTP server, by `--engine-port`; None: a free one.
        update_weights: whether it gets the trainer's weights.
        served_name: the model's name in requests, if it is not `path`.
        sleeps: whether it frees its GPUs while the trainer works, which uses one of them.
    """

    index: int
    model: str
    path: str
    role: ServerRole
    slots: tuple[Slot, ...]
    parallel: Parallel
    words: Mapping[str, list[str]] = field(default_factory=dict)
    own: Mapping[str, list[str]] = field(default_factory=dict)
    port: int | None = None
    update_weights: bool = True
    served_name: str = ""
    sleeps: bool = False

    def on(self, checkpoint: Path | None) -> EngineSpec:
        """Return the same engine with the weights of `checkpoint`, if one is given."""
        return replace(self, path=str(checkpoint), served_name=self.path) if checkpoint is not None else self

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def names(self) -> list[str]:
        """Names of the model in requests: its folder, and its name on the hub if it has one."""
        folder = self.served_name or self.path
        known = name_of(folder)
        return [folder, known[0]] if known is not None else [folder]

    @property
    def num_gpus(self) -> int:
        return len(self.slots)

    @property
    def flags(self) -> tuple[str, ...]:
        """`words` and `own` as one command line."""
        return tuple(word for words in (*self.words.values(), *self.own.values()) for word in words)

    @property
    def nodes(self) -> tuple[tuple[Slot, ...], ...]:
        """Its slots, node by node. One process of the engine runs on each node."""
        nodes = sorted({slot.node for slot in self.slots})
        return tuple(tuple(slot for slot in self.slots if slot.node == node) for node in nodes)

    @property
    def kv_connector(self) -> str:
        """The router's name of the connector of a prefill or decode engine; "" for a regular engine."""
        if self.role == "regular":
            return ""
        for flag, value in zip(self.flags, self.flags[1:], strict=False):
            if flag == "--kv-transfer-config.kv_connector":
                return KV_CONNECTORS.get(value, "")
            if flag == "--kv-transfer-config" and (found := _CONNECTOR_KEY.search(value)):
                return KV_CONNECTORS.get(found[1], "")
        return ""

    @property
    def num_side_channel_ports(self) -> int:
        """How many consecutive ports each node needs to pass on the KV cache: with vLLM one per replica."""
        if "disaggregation_mode" in self.words:  # SGLang's
            return int(self.role == "prefill")
        return self.parallel.data if self.kv_connector == "nixl" else 0
