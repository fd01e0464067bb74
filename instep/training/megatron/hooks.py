"""The functions of `--custom-megatron-*-path`, `--custom-model-provider-path` and `--spec`, with slime's signatures.

This module imports nothing large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from instep.arguments.args import Args
from instep.arguments.settings import HookSettings
from instep.system.hooks import Hook

if TYPE_CHECKING:
    from instep.training.megatron.spec import PolicyModel

T = TypeVar("T")
MODEL_PROVIDER, SPEC = "--custom-model-provider-path", "--spec"


class Provider(Protocol):
    """Builds the part of the model on a rank; `vp_stage` is the index of its chunk, None if it has only one."""

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> PolicyModel: ...


_building: list[Provider] = []  # while a user's function builds


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> PolicyModel:
    """Return instep's own model, for the function of `--custom-model-provider-path` to change: a Megatron `GPTModel`.

    Raises:
        RuntimeError: no model is being built.
    """
    if not _building:
        raise RuntimeError(
            "model_provider() builds a part of a run's model: call it only in --custom-model-provider-path"
        )
    return _building[-1](pre_process, post_process, vp_stage)


@dataclass(frozen=True)
class MegatronHooks:
    """The functions that a rank of the megatron backend calls.

    Attributes:
        args: the arguments in the form that the functions get.
        init: f(args), once Megatron's process groups exist, before the model is built.
        log_probs: f(args, model, store_prefix), before log-probs are computed; the prefix is "" for the policy, "ref_"
            and "teacher_" for frozen models.
        step: f(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), before the gradients of a step, which
            are zero then; the scheduler is None: the controller sets the learning rate.
        provider: f(pre_process, post_process[, vp_stage]) builds the model, from the result of `model_provider`.
        spec: f(args, config[, vp_stage]) makes the spec of the layers; `config` is Megatron's.

    `model` is a list of this rank's modules, as Megatron has wrapped them.
    """

    args: HookSettings
    init: str | None
    log_probs: str | None
    step: str | None
    provider: str | None
    spec: str | None = None

    @classmethod
    def from_args(cls, args: Args) -> MegatronHooks:
        return cls(
            args.view({}),
            args.custom_megatron_init_path,
            args.custom_megatron_before_log_prob_hook_path,
            args.custom_megatron_before_train_step_hook_path,
            args.custom_model_provider_path,
            args.spec,
        )

    @property
    def builders(self) -> str:
        """Return the flags whose functions build the model, joined by commas; empty if there are none."""
        named = ((MODEL_PROVIDER, self.provider), (SPEC, self.spec))
        return ", ".join(f"{flag} {path}" for flag, path in named if path)

    def build(
        self, kind: type[Any], own: Provider, pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> PolicyModel:
        """Return the model of the user's function, or of `own`.

        Args:
            kind: the class that it must have.

        Raises:
            RolloutError: the function raised, or returned another object.
        """
        if self.provider is None:
            return own(pre_process, post_process, vp_stage)
        hook = Hook(MODEL_PROVIDER, self.provider)
        chunk = _stage_if_taken(hook, vp_stage)
        _building.append(own)
        try:
            model = hook.call(pre_process=pre_process, post_process=post_process, **chunk)
        finally:
            _building.pop()
        if not isinstance(model, kind):
            raise hook.wrong(model, "the model of instep.training.megatron.hooks.model_provider, changed or not")
        return cast("PolicyModel", model)

    def layers(self, read: Callable[[Any], T], config: Any, vp_stage: int | None) -> T | None:
        """Return the result of `read` for the spec that the user's function returns; None if there is no function.

        Args:
            read: raises TypeError or ValueError for an invalid spec.

        Raises:
            RolloutError: the function raised, or returned another object.
        """
        if self.spec is None:
            return None
        hook = Hook(SPEC, self.spec)
        spec = hook.call(self.args, config, **_stage_if_taken(hook, vp_stage))
        expected = "a ModuleSpec of a layer, or TransformerBlockSubmodules with one for each layer of the chunk"
        with hook.reading(spec, expected):
            return read(spec)

    def started(self) -> None:
        if self.init:
            Hook("--custom-megatron-init-path", self.init).call(self.args)

    def before_log_probs(self, model: list[Any], prefix: str) -> None:
        if self.log_probs:
            Hook("--custom-megatron-before-log-prob-hook-path", self.log_probs).call(self.args, model, prefix)

    def before_step(self, rollout_id: int, step_id: int, model: list[Any], optimizer: Any) -> None:
        if self.step:
            hook = Hook("--custom-megatron-before-train-step-hook-path", self.step)
            hook.call(self.args, rollout_id, step_id, model, optimizer, None)


def _stage_if_taken(hook: Hook, vp_stage: int | None) -> dict[str, Any]:
    return {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(hook.function).parameters else {}
