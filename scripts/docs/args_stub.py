"""instep/arguments/settings.pyi, the types of all settings: `python scripts/docs/args_stub.py` writes it.

The type of an attribute is that of its resolver; where it has none, the type follows from the record of its flag.
"""

from __future__ import annotations

from pathlib import Path

from instep.arguments import flag as kinds
from instep.arguments.all_flags import own_flags
from instep.arguments.args import RUNTIME_ATTRIBUTES, SLIME_NAMES, Runtime
from instep.arguments.flag import Flag
from instep.arguments.validate import resolvers

PATH = Path(__file__).parents[2] / "instep/arguments/settings.pyi"
# Rules require that these are given or follow from others; they are None only in commands that do not read them.
REQUIRED = {
    *("hf_checkpoint", "rollout_batch_size", "global_batch_size", "num_steps_per_rollout", "over_sampling_batch_size"),
    "port",
}
# Attributes that neither a flag nor a resolver sets.
FURTHER = {
    "command": 'Literal["train", "train-async", "sft", "dpo", "serve", "plan"]',
    "extra_flags": "list[str]",
    "eval_datasets": "list[EvalDataset]",
    "megatron_config": "dict[str, dict[str, Any]]",
    "megatron_overrides": "dict[str, Any]",
    "router_overrides": "dict[str, list[str]]",
    "vllm_overrides": "dict[str, list[str]]",
    "vllm_topology": "Any",
}
_HEADER = """\
# Made by `python scripts/docs/args_stub.py`; do not edit.
from typing import Any, Literal

from instep.data.formats import EvalDataset

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
    fields = {flag.attribute: type_of(flag) for flag in own_flags().values() if flag.status == "acts"} | FURTHER
    for resolver in resolvers():
        name, given = resolver.__name__, resolver.__annotations__["return"]
        fields[name] = given.removesuffix(" | None") if name in REQUIRED else given
    own = {name: given.__forward_arg__ for name, given in Runtime.__annotations__.items()}
    runtime = {name: own[name] for name in RUNTIME_ATTRIBUTES}
    runtime |= {slime: runtime[name] for slime, name in SLIME_NAMES.items()}
    return (
        _HEADER
        + "class Settings:\n"
        + "".join(_declaration(name, given) for name, given in sorted(fields.items()))
        + "\nclass HookSettings(Settings):\n"
        + "".join(_declaration(name, given) for name, given in runtime.items())
    )


def _declaration(name: str, given: str) -> str:
    line = f"    {name}: {given}\n"
    if len(line) > 120:  # as ruff formats it
        line = line.replace("[", "[\n        ").replace(", ", ",\n        ").replace("]", ",\n    ]")
    return line


if __name__ == "__main__":
    PATH.write_text(stub(), encoding="ascii")
