"""The arguments: a draft that is being resolved, the frozen result, and the read-only view for hooks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

from instep.arguments.all_flags import find, own_flags
from instep.arguments.concern import flag_name
from instep.arguments.settings import HookSettings, Settings
from instep.system.private import without_secrets

# slime's names of run-time attributes. Hooks may use them.
SLIME_NAMES = {f"sglang_{name}": f"vllm_{name}" for name in ("router_ip", "router_port", "model_routers")}


class Runtime(TypedDict, total=False):
    """Attributes that are known only while the run works. Hooks read these values, not those of the command line."""

    vllm_router_ip: str
    vllm_router_port: int
    vllm_model_routers: dict[str, tuple[str, int]]
    rollout_engine_urls: list[str]
    rollout_engine_kind: str
    vllm_model_engine_urls: dict[str, list[str]]
    num_rollout: int
    rollout_max_context_len: int | None


# Attributes that hooks have only after the engines have started.
RUNTIME_ATTRIBUTES = tuple(name for name in Runtime.__annotations__ if name != "rollout_max_context_len")


class Args(Settings):
    """All settings of a run, frozen, under the names of their flags (`args.rollout_batch_size`).

    Only flags that act have an attribute. `settings.pyi` declares these attributes and those that follow from flags.
    """

    def __init__(self, **values: Any):
        vars(self).update(values)

    def replace(self, **changes: Any) -> Args:
        """Return a copy with other values for some attributes.

        Raises: AttributeError for an attribute that does not exist.
        """
        for name in changes:
            getattr(self, name)
        return Args(**{**vars(self), **changes})

    def public(self) -> Args:
        """Return a copy without secrets."""
        return Args(**{name: value for name, value in vars(self).items() if name not in _secrets()})

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes except secrets as data for JSON. URLs contain no credentials."""
        out = dict(sorted(vars(self.public()).items()))
        out["eval_datasets"] = [asdict(d) for d in out.get("eval_datasets", [])]
        clean: dict[str, Any] = without_secrets(out)
        return clean

    def view(self, runtime: Runtime) -> HookArgs:
        """Return a read-only view for hooks. `runtime` may be filled later."""
        return HookArgs(self, runtime)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"Args({self.to_dict()})"

    if not TYPE_CHECKING:  # with it, mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:  # only called for missing attributes
            raise AttributeError(_missing(name, vars(self)))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name} cannot be set: arguments are frozen. Use a copy: args.replace({name}=value)")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


class Unreadable(Exception):
    """A resolver or rule read an attribute whose value on the command line is invalid. That is already reported."""


class Draft(Args):
    """The arguments while they are resolved and checked. Attributes can be set.

    Args:
        unreadable: attributes whose value is invalid. The set may grow. Reading one of them raises `Unreadable`.
    """

    __slots__ = ("unreadable",)
    unreadable: set[str]

    def __init__(self, unreadable: set[str], **values: Any):
        object.__setattr__(self, "unreadable", unreadable)
        super().__init__(**values)

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "unreadable"):
            raise Unreadable(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Draft:
        return Draft(self.unreadable, **{**vars(self), **changes})


class HookArgs(HookSettings):
    """The `args` of a hook: all settings except secrets, and the run-time attributes. All are read-only."""

    _args: Args
    _runtime: Runtime

    def __init__(self, args: Args, runtime: Runtime):
        # Plain attributes are fast: a rollout reads about twenty of them for each sample. __getattr__ serves the rest.
        shown = {name: value for name, value in vars(args.public()).items() if name not in Runtime.__annotations__}
        vars(self).update(shown, _args=args.public(), _runtime=runtime)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            name = SLIME_NAMES.get(name, name)
            values: Mapping[str, Any] = self._runtime if name in self._runtime else vars(self._args)
            if name in values and not (name in RUNTIME_ATTRIBUTES and values[name] is None):
                return values[name]
            raise AttributeError(_missing(name, vars(self._args)))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"args.{name} cannot be set: the arguments are read-only for hooks. Keep state in your own module "
            "or in sample.metadata"
        )

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self._args), *self._runtime, "to_dict"})

    def __contains__(self, name: str) -> bool:
        return name in dir(self)

    def __repr__(self) -> str:
        return f"HookArgs({self.to_dict()})"

    def __reduce__(self) -> tuple[Any, ...]:  # secrets stay in this process
        return HookArgs, (self._args, dict(self._runtime))

    def to_dict(self) -> dict[str, Any]:
        return {**self._args.to_dict(), **self._runtime}


@cache
def _secrets() -> frozenset[str]:
    return frozenset(flag.attribute for flag in own_flags().values() if flag.secret)


def _missing(name: str, values: dict[str, Any]) -> str:
    """Return why `args.<name>` does not exist."""
    if name.startswith("__"):  # pickle and copy ask for these
        return name
    if name in _secrets():
        return f"args.{name} is a secret; hooks cannot read it"
    if name in RUNTIME_ATTRIBUTES:
        return f"args.{name} exists only once the engines run"
    flag = find(flag_name(name))
    if flag is not None and flag.status != "acts":
        return f"args.{name}: {flag.name} is {flag.status}: {flag.note}"
    like = difflib.get_close_matches(name, [*values, *RUNTIME_ATTRIBUTES], n=1)
    return f"args.{name} does not exist" + (f"; did you mean args.{like[0]}?" if like else "")
