"""The resolved arguments, and the read-only view of them that hooks get."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import asdict, dataclass
from typing import Any

from instep.arguments.all_flags import GROUPS, find

# Attributes that exist only once a run has started, for every kind of engine.
RUNTIME_ATTRIBUTES = (
    "vllm_router_ip",
    "vllm_router_port",
    "vllm_model_routers",
    "rollout_engine_urls",
    "vllm_model_engine_urls",
    "num_rollout",
)
SECRETS = frozenset(f.attribute for g in GROUPS for f in g.flags if f.secret)
_RENAMED = {"sglang_router_ip": "vllm_router_ip", "sglang_router_port": "vllm_router_port"}


@dataclass
class EvalDataset:
    """One data set of the evaluation. What its entry leaves out is filled in: `--eval-*`, else `--rollout-*`."""

    name: str
    path: str
    input_key: str
    label_key: str | None
    metadata_key: str
    tool_key: str
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int | None
    max_prompt_len: int | None
    max_context_len: int | None
    min_new_tokens: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    rm_type: str | None
    reward_key: str | None
    custom_rm_path: str | None
    custom_generate_function_path: str | None
    metadata_overrides: dict[str, Any]


class Args(argparse.Namespace):
    """All settings of a run, flat, under the names of their flags (`args.rollout_batch_size`).

    Only flags that act have an attribute. Further attributes, derived or gathered: `command`, `world_size`,
    `dp_size`, `rollout_num_engines`, `eval_datasets`, `megatron_overrides`, `vllm_overrides` and
    `router_overrides` (words of a command line, by field), `vllm_topology` (what `--vllm-config` holds),
    `topology_num_gpus` (of all engines and placeholders), `responses_per_request`, `notes` (for the user to know).
    """

    def to_dict(self) -> dict[str, Any]:
        """Everything but secrets, as JSON-able data."""
        out = {k: v for k, v in sorted(vars(self).items()) if k not in SECRETS}
        out["eval_datasets"] = [asdict(d) for d in out.get("eval_datasets", [])]
        return out

    def view(self, runtime: dict[str, Any]) -> HookArgs:
        """A read-only view for hooks. `runtime` may be filled in later; its keys are RUNTIME_ATTRIBUTES.

        Raises: ValueError for a run-time attribute that is not declared.
        """
        return HookArgs(self, runtime)

    def __repr__(self) -> str:
        return f"Args({self.to_dict()})"

    def __getattr__(self, name: str) -> Any:  # only reached where the attribute is missing
        raise AttributeError(_missing(name, vars(self)))


class HookArgs:
    """What a hook gets as `args`: every setting but secrets, and the run-time attributes. Nothing can be set."""

    __slots__ = ("_args", "_runtime")

    def __init__(self, args: Args, runtime: dict[str, Any]):
        if unknown := set(runtime) - set(RUNTIME_ATTRIBUTES):
            raise ValueError(f"undeclared run-time attributes: {sorted(unknown)}")
        object.__setattr__(self, "_args", args)
        object.__setattr__(self, "_runtime", runtime)

    def __getattr__(self, name: str) -> Any:
        if name in RUNTIME_ATTRIBUTES and name in self._runtime:
            return self._runtime[name]
        values = vars(self._args)
        unset = name in RUNTIME_ATTRIBUTES and values.get(name) is None
        if name in values and name not in SECRETS and not unset:
            return values[name]
        raise AttributeError(_missing(name, values))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"args.{name} cannot be set: hooks see the arguments read-only. Keep state in your own module, "
            "or in sample.metadata"
        )

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __dir__(self) -> list[str]:
        return sorted({*(k for k in vars(self._args) if k not in SECRETS), *self._runtime, "to_dict"})

    def __contains__(self, name: str) -> bool:
        return name in dir(self)

    def __repr__(self) -> str:
        return f"HookArgs({self.to_dict()})"

    def __reduce__(self) -> tuple[Any, ...]:  # secrets stay in this process
        public = Args(**{k: v for k, v in vars(self._args).items() if k not in SECRETS})
        return HookArgs, (public, dict(self._runtime))

    def to_dict(self) -> dict[str, Any]:
        return {**self._args.to_dict(), **self._runtime}


def _missing(name: str, values: dict[str, Any]) -> str:
    """Why `args.<name>` does not exist."""
    if name.startswith("__"):  # pickle and copy ask for these
        return name
    if name in SECRETS:
        return f"args.{name} is a secret and not shown to hooks"
    if name in RUNTIME_ATTRIBUTES:
        return f"args.{name} exists only once the engines run"
    if name in _RENAMED:
        return f"args.{name} is args.{_RENAMED[name]} here"
    flag = find("--" + name.replace("_", "-"))
    if flag is not None and flag.status != "acts":
        return f"args.{name}: {flag.name} is {flag.status}: {flag.note}"
    like = difflib.get_close_matches(name, [*values, *RUNTIME_ATTRIBUTES], n=1)
    return f"args.{name} does not exist" + (f"; did you mean args.{like[0]}?" if like else "")
