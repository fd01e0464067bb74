"""What vLLM's and SGLang's command lines name differently: lengths, roles, and how an engine's GPUs share the work."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instep.arguments.settings import EngineSettings
from instep.engines.flags import PREFIXES, Package
from instep.errors import ConfigError

Words = Mapping[str, list[str]]  # of a command line, by field
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_SI, _IEC = ({unit: base**n for n, unit in enumerate("kmgt", 1)} for base in (1000, 1024))


@dataclass(frozen=True)
class Parallel:
    """How the GPUs of one engine share the work: GPUs = tensor x pipeline x data (x prefill context)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1  # replicas of the weights
    prefill_context: int = 1
    expert: int = 1  # the number of GPUs that share the experts of a layer
    attention: int = 1  # data-parallel groups of the attention, which divide `tensor` (SGLang)

    def __str__(self) -> str:
        parts = [f"TP {self.tensor}"] + [f"PP {self.pipeline}"] * (self.pipeline > 1)
        parts += [f"DP {self.data}"] * (self.data > 1) + [f"PCP {self.prefill_context}"] * (self.prefill_context > 1)
        attention = f", attention DP {self.attention}" if self.attention > 1 else ""
        return " x ".join(parts) + attention + (f", EP {self.expert}" if self.expert > 1 else "")


@dataclass(frozen=True)
class Dialect:
    """How the command line of an engine says what a plan needs.

    Attributes:
        package: whose flags they are. It is also the key of the models in the file of groups.
        length: the field of the most tokens of a sequence; units: the suffixes of such a number.
        memory: the field of the fraction of a GPU's memory.
        parallel: returns how the GPUs of an engine share the work, by its words, their number, and a place for errors.
        role_words: returns the words of a prefill or decode engine beside its others.
    """

    package: Package
    length: str
    memory: str
    units: Mapping[str, int]
    parallel: Callable[[Words, int, str], Parallel]
    role_words: Callable[[str, Words], dict[str, list[str]]]

    @property
    def file_flag(self) -> str:
        """The flag of the file of models and groups."""
        return self.flag("config")

    def flag(self, field: str) -> str:
        """Return instep's flag for a field of the engine's command line."""
        return PREFIXES[self.package] + field.replace("_", "-")


def dialect_of(args: EngineSettings) -> Dialect:
    """Return the dialect of the run's engines. The embedded engine has vLLM's."""
    return SGLANG if args.rollout_backend == "sglang" else VLLM


def of_vllm(words: Words, num_gpus: int, where: str) -> Parallel:
    """Return how the `num_gpus` GPUs of an engine of vLLM share the work.

    Raises:
        ConfigError: PP x DP (x PCP) does not divide them, or one of these degrees is below 1.
    """
    names = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
    pipeline, data, context = _degrees(words, names, where)
    rest = pipeline * data * context
    if num_gpus % rest:
        product = f"PP {pipeline} x DP {data}" + (f" x PCP {context}" if context > 1 else "") + f" = {rest}"
        raise ConfigError(
            f"the GPUs of an engine are TP x PP x DP, but {num_gpus} are no multiple of {product}",
            where=where,
            remedy=f"give an engine a multiple of {rest} GPUs (--rollout-num-gpus-per-engine or num_gpus_per_engine)",
        )
    spread = words.get("enable_expert_parallel") == ["--enable-expert-parallel"]
    tensor = num_gpus // rest
    return Parallel(tensor, pipeline, data, context, tensor * data * context if spread else 1)


def of_sglang(words: Words, num_gpus: int, where: str) -> Parallel:
    """Return how the `num_gpus` GPUs of an engine of SGLang share the work.

    Raises:
        ConfigError: DP or EP does not divide TP, there are replicas, or a degree is below 1.
    """
    data, expert = _degrees(words, ("dp_size", "ep_size"), where)
    tensor = num_gpus
    if data > 1 and not words.get("enable_dp_attention"):
        raise ConfigError(
            f"an engine would have {data} replicas (dp_size), but a weight sync updates one",
            where=where,
            remedy="make more engines instead (--rollout-num-gpus), or give --sglang-enable-dp-attention",
        )
    for name, degree in (("dp_size", data), ("ep_size", expert)):
        if tensor % degree:
            what = f"{name} {degree} does not divide the {tensor} GPUs of tensor parallelism"
            raise ConfigError(what, where=where, remedy=f"use a divisor of {tensor}, or larger engines")
    if words.get("moe_a2a_backend", [""])[-1] == "deepep":  # SGLang sets it then
        expert = tensor
    return Parallel(tensor, expert=expert, attention=data)


def _degrees(words: Words, names: tuple[str, ...], where: str) -> list[int]:
    degrees = {name: int(words[name][-1]) if name in words else 1 for name in names}
    if low := [name for name in names if degrees[name] < 1]:
        raise ConfigError(f"{low[0]} is {degrees[low[0]]}", where=where, remedy="use at least 1")
    return list(degrees.values())


def _kv_transfer(role: str, words: Words) -> dict[str, list[str]]:
    """Return the connector by which vLLM's engines pass on the KV cache: NIXL, unless `words` have another."""
    if any(field.partition(".")[0] == "kv_transfer_config" for field in words):
        return {}
    config = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role]}
    return {"kv_transfer_config": ["--kv-transfer-config", json.dumps(config)]}


VLLM = Dialect(
    package="vllm",
    length="max_model_len",
    memory="gpu_memory_utilization",
    units={**_SI, **{unit.upper(): size for unit, size in _IEC.items()}},
    parallel=of_vllm,
    role_words=_kv_transfer,
)
SGLANG = Dialect(
    package="sglang",
    length="context_length",
    memory="mem_fraction_static",
    units={
        **{"k": 1000, **{unit.upper(): _SI[unit] for unit in "mgt"}},
        **{unit.upper() + "i": size for unit, size in _IEC.items()},
    },
    parallel=of_sglang,
    role_words=lambda role, words: {"disaggregation_mode": ["--disaggregation-mode", role]},
)
