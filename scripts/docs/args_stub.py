"""instep/arguments/settings.pyi, the types of all settings: `python scripts/docs/args_stub.py` writes it.

The type of an attribute is that of its resolver; where it has none, the type follows from the record of its flag. The
settings of a concern are a class, so that the signature of a function says what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from instep.arguments import flag as kinds
from instep.arguments.all_flags import groups, own_flags
from instep.arguments.args import RUNTIME_ATTRIBUTES, SLIME_NAMES, Runtime
from instep.arguments.flag import Flag
from instep.arguments.validate import CONCERNS, resolvers

PATH = Path(__file__).parents[2] / "instep/arguments/settings.pyi"
# Rules require that these are given or follow from others; they are None only in commands that do not read them.
REQUIRED = {
    *("hf_checkpoint", "rollout_batch_size", "global_batch_size", "num_steps_per_rollout", "over_sampling_batch_size"),
    "port",
}
# Attributes that neither a flag nor a resolver sets.
FURTHER = {
    "extra_flags": "list[str]",
    "eval_datasets": "list[EvalDataset]",
    "megatron_config": "dict[str, dict[str, Any]]",
    "megatron_overrides": "dict[str, Any]",
    "router_overrides": "dict[str, list[str]]",
    "sglang_flags": "list[str]",
    "sglang_overrides": "dict[str, list[str]]",
    "vllm_overrides": "dict[str, list[str]]",
    "vllm_topology": "Any",
}
# The title of each concern, and the class of its settings.
SECTIONS = {
    "Model and checkpoints": "ModelSettings",
    "Data and batches": "DataSettings",
    "Rollout": "RolloutSettings",
    "Reward": "RewardSettings",
    "Evaluation": "EvalSettings",
    "Algorithm": "AlgorithmSettings",
    "Optimizer": "OptimizerSettings",
    "LoRA": "LoraSettings",
    "Asynchronous training (docs/async.md)": "AsyncSettings",
    "Cluster and device": "ClusterSettings",
    "Engine and weight sync": "EngineSettings",
    "Megatron: parallelism and memory": "ParallelSettings",
    "Megatron: shape of the model (compared with config.json of --hf-checkpoint)": "ShapeSettings",
    "Logging": "LoggingSettings",
    "Limits of waits, in seconds": "TimeoutSettings",
    "Debugging": "DebugSettings",
}
# Settings of a concern that its flags and resolvers do not show.
PLACES = {
    "eval_datasets": "EvalSettings",
    "router_overrides": "EngineSettings",
    **dict.fromkeys(("sglang_enable_ep_moe", "sglang_flags", "sglang_overrides"), "EngineSettings"),
    "sglang_server_concurrency": "EngineSettings",
    "tis_lower_bound": "AlgorithmSettings",
    "tis_upper_bound": "AlgorithmSettings",
    "vllm_overrides": "EngineSettings",
    "vllm_topology": "EngineSettings",
    "world_size": "ClusterSettings",
}
_HEADER = """\
# Made by `python scripts/docs/args_stub.py`; do not edit.
from typing import Any, Literal

from instep.data.formats import EvalDataset

class Common:
    command: Literal["train", "train-async", "sft", "dpo", "serve"]
    planned: bool

"""


def type_of(flag: Flag) -> str:
    """The annotation of a flag's attribute."""
    if flag.choices:
        single = f"Literal[{', '.join(repr(choice) for choice in flag.choices)}]".replace("'", '"')
    elif isinstance(flag.type, kinds.Number):
        single = flag.type.kind.__name__
    else:
        single = {bool: "bool", kinds.json_object: "dict[str, Any]", kinds.size: "int"}.get(flag.type, "str")
    if flag.nargs in ("+", "*") or flag.append:
        single = f"list[{single}]"
    return single if flag.default is not None or flag.attribute in REQUIRED else f"{single} | None"


def stub() -> str:
    """The text of settings.pyi."""
    own = (*own_flags(sglang=True).values(), *own_flags().values())
    fields = {flag.attribute: type_of(flag) for flag in own if flag.status == "acts"} | FURTHER
    for resolver in resolvers():
        name, given = resolver.__name__, resolver.__annotations__["return"].replace("'", '"')
        fields[name] = given.removesuffix(" | None") if name in REQUIRED else given
    types = {name: given.__forward_arg__ for name, given in Runtime.__annotations__.items()}
    runtime = {name: types[name] for name in RUNTIME_ATTRIBUTES}
    runtime |= {slime: runtime[name] for slime, name in SLIME_NAMES.items()}
    sections = {name: sorted((_names(title) | _placed(name)) & fields.keys()) for title, name in SECTIONS.items()}
    rest = sorted(fields.keys() - set(chain.from_iterable(sections.values())))
    bases = ",".join(f"\n    {name}" for name in sections)
    return (
        _HEADER
        + "".join(_class(f"{name}(Common)", {n: fields[n] for n in names}) for name, names in sections.items())
        + _class(f"Settings({bases},\n)", {name: fields[name] for name in rest})
        + _class("HookSettings(Settings)", runtime).rstrip("\n")
        + "\n"
    )


def _names(title: str) -> set[str]:
    """The attributes of a concern: of its flags, and those that its resolvers add."""
    (group,) = (group for group in groups() if group.title == title)
    flags = {flag.attribute for flag in group.flags}
    modules = {vars(concern)["__name__"] for concern in CONCERNS if group in vars(concern).values()}
    elsewhere = {flag.attribute for flag in own_flags().values()} - flags
    return flags | ({r.__name__ for r in resolvers() if r.__module__ in modules} - elsewhere)


def _placed(section: str) -> set[str]:
    return {name for name, place in PLACES.items() if place == section}


def _class(head: str, fields: Mapping[str, str]) -> str:
    return f"class {head}:\n" + "".join(_declaration(name, given) for name, given in fields.items()) + "\n"


def _declaration(name: str, given: str) -> str:
    line = f"    {name}: {given}\n"
    if len(line) > 120:  # as ruff formats it
        line = line.replace("[", "[\n        ").replace(", ", ",\n        ").replace("]", ",\n    ]")
    return line


if __name__ == "__main__":
    PATH.write_text(stub(), encoding="ascii")
